/* The small kernels round the sparse MLA backward; see passes.cuh. All are bound by memory. */
#include "passes.cuh"

namespace {

constexpr int THREADS = 256;

__device__ __forceinline__ float warp_sum(float x)
{
#pragma unroll
    for (int apart = 16; apart; apart /= 2)
        x += __shfl_xor_sync(~0u, x, apart);
    return x;
}

__device__ __forceinline__ float warp_max(float x)
{
#pragma unroll
    for (int apart = 16; apart; apart /= 2)
        x = fmaxf(x, __shfl_xor_sync(~0u, x, apart));
    return x;
}

/* f(float2) over pairs of columns: 512 columns, 16 a lane; or, with ROPE_TOO, 576 */
template <bool ROPE_TOO, class F>
__device__ __forceinline__ void each_pair(const __nv_bfloat16 *row, F &&f)
{
    const int lane = threadIdx.x % 32;

#pragma unroll
    for (int part = 0; part < 2; part++) {
        const uint4 x = __ldcs((const uint4 *)row + part * 32 + lane);

        for (uint32_t word : {x.x, x.y, x.z, x.w})
            f(__bfloat1622float2(*(const __nv_bfloat162 *)&word));
    }
    if (ROPE_TOO)
        f(__bfloat1622float2(((const __nv_bfloat162 *)(row + RANK))[lane]));
}

__device__ __forceinline__ float row_delta(const __nv_bfloat16 *out, const __nv_bfloat16 *dout)
{
    float2 o[16];
    float sum = 0;
    int n = 0, m = 0;

    each_pair<false>(out, [&](float2 x) { o[n++] = x; });
    each_pair<false>(dout, [&](float2 y) {
        sum += o[m].x * y.x + o[m].y * y.y;
        m++;
    });
    return warp_sum(sum);
}

__global__ __launch_bounds__(THREADS) void delta_kernel(const __nv_bfloat16 *out,
                                                        const __nv_bfloat16 *dout, float *delta,
                                                        int64_t number)
{
    const int64_t at = (int64_t)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;

    if (at >= number)
        return;
    const float sum = row_delta(out + at * RANK, dout + at * RANK);
    if (threadIdx.x % 32 == 0)
        delta[at] = sum;
}

/* Floats that are not negative order as their bits do. */
__device__ __forceinline__ void raise(uint32_t *to, float x) { atomicMax(to, __float_as_uint(x)); }

__global__ __launch_bounds__(THREADS) void key_norms_kernel(const __nv_bfloat16 *kv, int64_t keys,
                                                            uint32_t *norm)
{
    const int64_t warps = (int64_t)gridDim.x * (THREADS / 32);
    float top = 0;

    for (int64_t at = (int64_t)blockIdx.x * (THREADS / 32) + threadIdx.x / 32; at < keys;
         at += warps) {
        float square = 0;

        each_pair<false>(kv + at * WIDTH, [&](float2 x) { square += x.x * x.x + x.y * x.y; });
        top = fmaxf(top, sqrtf(warp_sum(square)));
    }
    if (threadIdx.x % 32 == 0)
        raise(norm, top);
}

/* What units_kernel needs, as bits of floats (raise) */
struct maxima {
    uint32_t key_norm; /* |v| of a key */
    uint32_t dout;     /* an element of dout */
    uint32_t head;     /* a bound on one head's contribution to a column of dkv */
};

/* delta as above, and the maxima; with P <= 1,
 * |P dO + dS Q| <= max|dO| + scale (|dO| |v| + |delta|) max|Q| */
__global__ __launch_bounds__(THREADS) void delta_maxima_kernel(const __nv_bfloat16 *q,
                                                               const __nv_bfloat16 *out,
                                                               const __nv_bfloat16 *dout,
                                                               float *delta, int64_t number,
                                                               float scale, maxima *top)
{
    const int64_t warps = (int64_t)gridDim.x * (THREADS / 32);
    const float norm = __uint_as_float(top->key_norm);
    float top_dout = 0, top_head = 0;

    for (int64_t at = (int64_t)blockIdx.x * (THREADS / 32) + threadIdx.x / 32; at < number;
         at += warps) {
        const float sum = row_delta(out + at * RANK, dout + at * RANK);
        float square = 0, most_dout = 0, most_q = 0;

        if (threadIdx.x % 32 == 0)
            delta[at] = sum;
        each_pair<false>(dout + at * RANK, [&](float2 x) {
            square += x.x * x.x + x.y * x.y;
            most_dout = fmaxf(most_dout, fmaxf(fabsf(x.x), fabsf(x.y)));
        });
        each_pair<true>(q + at * WIDTH,
                        [&](float2 x) { most_q = fmaxf(most_q, fmaxf(fabsf(x.x), fabsf(x.y))); });
        most_dout = warp_max(most_dout);
        top_dout = fmaxf(top_dout, most_dout);
        top_head = fmaxf(top_head, most_dout + scale * warp_max(most_q) *
                                                   (sqrtf(warp_sum(square)) * norm + fabsf(sum)));
    }
    if (threadIdx.x % 32 == 0) {
        raise(&top->dout, top_dout);
        raise(&top->head, top_head);
    }
}

__device__ __forceinline__ float power_above(float x) /* within what fp32 can scale by */
{
    return exp2f((float)(ilogbf(fminf(fmaxf(x, 0x1p-60f), 0x1p90f)) + 1));
}

__global__ void units_kernel(const maxima *top, int heads, int64_t rows, fixed_units *units)
{
    const int log2_rows = rows > 1 ? 64 - __clzll(rows - 1) : 0;
    const float levels = exp2f((float)min(22, 30 - log2_rows));

    units->fine = fminf(power_above(__uint_as_float(top->dout) / 16), 0x1p60f); /* its square is finite */
    units->middle = units->fine * 512;
    units->bound = fmaxf(power_above(__uint_as_float(top->head) * heads), units->middle);
    units->per_fine = levels / units->fine;
    units->per_middle = levels / units->middle;
    units->per_coarse = levels / units->bound;
    units->broken = 0;
}

__global__ __launch_bounds__(THREADS) void order_kernel(float *dkv, int64_t groups)
{
    const int64_t at = (int64_t)blockIdx.x * THREADS + threadIdx.x;

    if (at >= groups)
        return;
    float4 *group = (float4 *)dkv + at * 4;
    const float4 v[4] = {group[0], group[1], group[2], group[3]};

    group[0] = make_float4(v[0].x, v[0].y, v[1].x, v[1].y);
    group[1] = make_float4(v[2].x, v[2].y, v[3].x, v[3].y);
    group[2] = make_float4(v[0].z, v[0].w, v[1].z, v[1].w);
    group[3] = make_float4(v[2].z, v[2].w, v[3].z, v[3].w);
}

__device__ __forceinline__ float2 sums(long long word)
{
    const int low = (int)word;

    return make_float2((float)low, (float)(int)((word - low) >> 32));
}

/* A warp reads four groups of 16 columns, whose word i holds columns i and i + 8, and writes them in
 * order over the fine sums. */
__global__ __launch_bounds__(THREADS) void fixed_to_float_kernel(float *dkv, const long long *coarser,
                                                                 int64_t pairs,
                                                                 const fixed_units *units)
{
    const int64_t at = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    const bool real = at < pairs;
    const float fine = units->broken ? NAN : 1 / units->per_fine, middle = 1 / units->per_middle;
    const float coarse = 1 / units->per_coarse;
    const float2 f = sums(real ? ((const long long *)dkv)[at] : 0);
    const float2 m = sums(real ? coarser[at] : 0), c = sums(real ? coarser[pairs + at] : 0);
    float *to = dkv + at / 8 * 16 + at % 8;

    __syncwarp();
    if (!real)
        return;
    to[0] = c.x * coarse + m.x * middle + f.x * fine;
    to[8] = c.y * coarse + m.y * middle + f.y * fine;
}

unsigned blocks(int64_t threads) { return (unsigned)((threads + THREADS - 1) / THREADS); }

} /* namespace */

void launch_delta(cudaStream_t stream, int64_t number, const void *out, const void *dout,
                  float *delta)
{
    delta_kernel<<<blocks(number * 32), THREADS, 0, stream>>>(
        (const __nv_bfloat16 *)out, (const __nv_bfloat16 *)dout, delta, number);
}

void launch_delta_units(cudaStream_t stream, const struct sparse_mla *shape, const void *q,
                        const void *kv, const void *out, const void *dout, float *delta,
                        uint32_t *scratch, struct fixed_units *units)
{
    const unsigned grid = (unsigned)multiprocessors() * 8;
    maxima *top = (maxima *)scratch;

    cudaMemsetAsync(top, 0, sizeof *top, stream);
    key_norms_kernel<<<grid, THREADS, 0, stream>>>((const __nv_bfloat16 *)kv, shape->keys,
                                                   &top->key_norm);
    delta_maxima_kernel<<<grid, THREADS, 0, stream>>>(
        (const __nv_bfloat16 *)q, (const __nv_bfloat16 *)out, (const __nv_bfloat16 *)dout, delta,
        shape->rows * shape->heads, shape->scale, top);
    units_kernel<<<1, 1, 0, stream>>>(top, shape->heads, shape->rows, units);
}

void launch_order(cudaStream_t stream, int64_t keys, float *dkv)
{
    const int64_t groups = keys * (WIDTH / 16);

    if (groups > 0)
        order_kernel<<<blocks(groups), THREADS, 0, stream>>>(dkv, groups);
}

void launch_fixed_to_float(cudaStream_t stream, int64_t keys, float *dkv, const void *coarser,
                           const struct fixed_units *units)
{
    const int64_t pairs = keys * (WIDTH / 2);

    if (pairs > 0)
        fixed_to_float_kernel<<<blocks(pairs), THREADS, 0, stream>>>(
            dkv, (const long long *)coarser, pairs, units);
}
