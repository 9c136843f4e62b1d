/* Sparse MLA for any shape, fp32 or bf16: plain loops, fp32 sums in a fixed order. Made to be read
 * and to be right: parity tests, tiny models, shapes without a Hopper kernel. Bitwise repeatable.
 *
 * Forward and dQ: a block a row. dKV: a block a key looks its rows up (the lists are ascending), so
 * that each key's sum has one writer and one order. Logits are computed anew where needed. */
#include "shape.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int SLAB = 1024; /* keys whose logits a block holds at a time */

struct generic_arguments {
    const void *q, *kv, *out, *dout;
    const int32_t *selected, *counts;
    const float *lse;
    float *delta;
    int64_t rows, keys;
    int32_t heads, rank, width, k;
    float scale;
};

__device__ __forceinline__ float value(float x) { return x; }
__device__ __forceinline__ float value(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ void put(float *to, float x) { *to = x; }
__device__ __forceinline__ void put(__nv_bfloat16 *to, float x) { *to = __float2bfloat16(x); }

__device__ __forceinline__ float warp_sum(float x)
{
    for (int apart = 16; apart; apart /= 2)
        x += __shfl_xor_sync(~0u, x, apart);
    return x;
}

/* dot product of n elements by one warp; every lane gets it */
template <class T>
__device__ __forceinline__ float warp_dot(const T *x, const T *y, int n)
{
    float sum = 0;

    for (int i = threadIdx.x % 32; i < n; i += 32)
        sum += value(x[i]) * value(y[i]);
    return warp_sum(sum);
}

/* maximum or sum of x[0..n) over the block; scratch: WARPS floats */
template <bool MAXIMUM>
__device__ float block_reduce(const float *x, int n, float *scratch)
{
    float all = MAXIMUM ? -INFINITY : 0;

    for (int i = threadIdx.x; i < n; i += THREADS)
        all = MAXIMUM ? fmaxf(all, x[i]) : all + x[i];
    for (int apart = 16; apart; apart /= 2) {
        const float other = __shfl_xor_sync(~0u, all, apart);
        all = MAXIMUM ? fmaxf(all, other) : all + other;
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0)
        scratch[threadIdx.x / 32] = all;
    __syncthreads();
    all = scratch[0];
    for (int w = 1; w < WARPS; w++)
        all = MAXIMUM ? fmaxf(all, scratch[w]) : all + scratch[w];
    return all;
}

template <class T>
__global__ __launch_bounds__(THREADS) void forward_kernel(const generic_arguments a, T *out,
                                                          float *lse)
{
    extern __shared__ float acc[]; /* [rank] */
    __shared__ float e[SLAB], scratch[WARPS];
    const int64_t row = blockIdx.x;
    const int count = a.counts[row];
    const int32_t *selected = a.selected + row * a.k;
    const T *kv = (const T *)a.kv;

    for (int head = 0; head < a.heads; head++) {
        const T *q = (const T *)a.q + (row * a.heads + head) * a.width;
        float top = -INFINITY, sum = 0;

        for (int c = threadIdx.x; c < a.rank; c += THREADS)
            acc[c] = 0;
        for (int first = 0; first < count; first += SLAB) {
            const int n = min(SLAB, count - first);

            for (int j = threadIdx.x / 32; j < n; j += WARPS) {
                const float dot = warp_dot(q, kv + (int64_t)selected[first + j] * a.width, a.width);
                e[j] = dot * a.scale;
            }
            __syncthreads();
            const float new_top = fmaxf(top, block_reduce<true>(e, n, scratch));
            const float shrink = expf(top - new_top);
            for (int j = threadIdx.x; j < n; j += THREADS)
                e[j] = expf(e[j] - new_top);
            __syncthreads();
            sum = sum * shrink + block_reduce<false>(e, n, scratch);
            top = new_top;
            for (int c = threadIdx.x; c < a.rank; c += THREADS) {
                float x = acc[c] * shrink;

                for (int j = 0; j < n; j++)
                    x += e[j] * value(kv[(int64_t)selected[first + j] * a.width + c]);
                acc[c] = x;
            }
            __syncthreads();
        }
        for (int c = threadIdx.x; c < a.rank; c += THREADS)
            put(out + (row * a.heads + head) * a.rank + c, count ? acc[c] / sum : 0);
        if (threadIdx.x == 0)
            lse[row * a.heads + head] = count ? top + logf(sum) : INFINITY;
    }
}

/* p and ds of one (row, head, key), by one warp */
template <class T>
__device__ __forceinline__ float2 gradient_pair(const generic_arguments &a, int64_t row_head,
                                                int64_t key)
{
    const T *q = (const T *)a.q + row_head * a.width, *kv = (const T *)a.kv + key * a.width;
    const T *dout = (const T *)a.dout + row_head * a.rank;
    const float p = expf(warp_dot(q, kv, a.width) * a.scale - a.lse[row_head]);

    return make_float2(p, p * (warp_dot(dout, kv, a.rank) - a.delta[row_head]) * a.scale);
}

template <class T>
__global__ __launch_bounds__(THREADS) void queries_kernel(const generic_arguments a, T *dq,
                                                          float *target)
{
    extern __shared__ float acc[]; /* [width] */
    __shared__ float p[SLAB], ds[SLAB];
    const int64_t row = blockIdx.x;
    const int count = a.counts[row], warp = threadIdx.x / 32;
    const int32_t *selected = a.selected + row * a.k;

    if (target)
        for (int j = threadIdx.x; j < a.k; j += THREADS)
            target[row * a.k + j] = 0;
    for (int head = 0; head < a.heads; head++) {
        const int64_t row_head = row * a.heads + head;

        for (int c = threadIdx.x; c < a.width; c += THREADS)
            acc[c] = 0;
        if (warp == 0) {
            const T *out = (const T *)a.out + row_head * a.rank;
            const float sum = warp_dot(out, (const T *)a.dout + row_head * a.rank, a.rank);
            if (threadIdx.x == 0)
                a.delta[row_head] = sum;
        }
        __syncthreads();
        for (int first = 0; first < count; first += SLAB) {
            const int n = min(SLAB, count - first);

            for (int j = warp; j < n; j += WARPS) {
                const float2 pair = gradient_pair<T>(a, row_head, selected[first + j]);
                p[j] = pair.x;
                ds[j] = pair.y;
            }
            __syncthreads();
            if (target)
                for (int j = threadIdx.x; j < n; j += THREADS)
                    target[row * a.k + first + j] += p[j] / a.heads;
            for (int c = threadIdx.x; c < a.width; c += THREADS) {
                float x = acc[c];

                for (int j = 0; j < n; j++)
                    x += ds[j] *
                         value(((const T *)a.kv)[(int64_t)selected[first + j] * a.width + c]);
                acc[c] = x;
            }
            __syncthreads();
        }
        for (int c = threadIdx.x; c < a.width; c += THREADS)
            put(dq + row_head * a.width + c, acc[c]);
    }
}

/* A warp a key, heads in the order of the kernel above. */
template <class T>
__global__ __launch_bounds__(THREADS) void target_kernel(const generic_arguments a, float *target)
{
    const int64_t row = blockIdx.x;
    const int count = a.counts[row];
    const T *q = (const T *)a.q + row * a.heads * a.width, *kv = (const T *)a.kv;

    for (int j = threadIdx.x / 32; j < a.k; j += WARPS) {
        float sum = 0;

        if (j < count) {
            const T *key = kv + (int64_t)a.selected[row * a.k + j] * a.width;

            for (int head = 0; head < a.heads; head++) {
                const float logit = warp_dot(q + (int64_t)head * a.width, key, a.width) * a.scale;
                sum += expf(logit - a.lse[row * a.heads + head]) / a.heads;
            }
        }
        if (threadIdx.x % 32 == 0)
            target[row * a.k + j] = sum;
    }
}

__device__ bool selects(const int32_t *selected, int count, int64_t key)
{
    int low = 0, high = count;

    while (low < high) {
        const int middle = (low + high) / 2;

        if (selected[middle] < key)
            low = middle + 1;
        else
            high = middle;
    }
    return low < count && selected[low] == key;
}

template <class T>
__global__ __launch_bounds__(THREADS) void keys_kernel(const generic_arguments a, float *dkv)
{
    extern __shared__ float acc[]; /* [width] */
    __shared__ float2 pairs[WARPS];
    __shared__ bool found[THREADS];
    const int64_t key = blockIdx.x;
    const int warp = threadIdx.x / 32;

    for (int c = threadIdx.x; c < a.width; c += THREADS)
        acc[c] = 0;
    for (int64_t base = 0; base < a.rows; base += THREADS) {
        const int64_t mine = base + threadIdx.x;

        __syncthreads();
        found[threadIdx.x] = mine < a.rows && selects(a.selected + mine * a.k, a.counts[mine], key);
        __syncthreads();
        for (int i = 0; i < THREADS; i++) {
            if (!found[i])
                continue;
            for (int head = 0; head < a.heads; head += WARPS) {
                const int64_t row_head = (base + i) * a.heads + head;
                const int n = min(WARPS, a.heads - head);

                __syncthreads();
                if (warp < n) {
                    const float2 pair = gradient_pair<T>(a, row_head + warp, key);
                    if (threadIdx.x % 32 == 0)
                        pairs[warp] = pair;
                }
                __syncthreads();
                for (int c = threadIdx.x; c < a.width; c += THREADS) {
                    float x = acc[c];

                    for (int h = 0; h < n; h++) {
                        if (c < a.rank)
                            x += pairs[h].x *
                                 value(((const T *)a.dout)[(row_head + h) * a.rank + c]);
                        x += pairs[h].y * value(((const T *)a.q)[(row_head + h) * a.width + c]);
                    }
                    acc[c] = x;
                }
            }
        }
    }
    for (int c = threadIdx.x; c < a.width; c += THREADS)
        dkv[key * a.width + c] = acc[c];
}

template <class T>
cudaError_t launch_backward(cudaStream_t stream, const generic_arguments &a, void *dq, float *dkv,
                            float *target)
{
    const size_t shared = (size_t)a.width * sizeof(float);

    queries_kernel<T><<<(unsigned)a.rows, THREADS, shared, stream>>>(a, (T *)dq, target);
    if (a.keys > 0)
        keys_kernel<T><<<(unsigned)a.keys, THREADS, shared, stream>>>(a, dkv);
    return cudaGetLastError();
}

generic_arguments arguments(const struct sparse_mla *shape, const void *q, const void *kv,
                            const int32_t *selected, const int32_t *counts)
{
    generic_arguments a = {};

    a.q = q;
    a.kv = kv;
    a.selected = selected;
    a.counts = counts;
    a.rows = shape->rows;
    a.keys = shape->keys;
    a.heads = shape->heads;
    a.rank = shape->kv_rank;
    a.width = shape->kv_rank + shape->rope;
    a.k = shape->k;
    a.scale = shape->scale;
    return a;
}

} /* namespace */

cudaError_t generic_forward(cudaStream_t stream, const struct sparse_mla *shape, const void *q,
                            const void *kv, const int32_t *selected, const int32_t *counts,
                            void *out, float *lse, void *)
{
    const generic_arguments a = arguments(shape, q, kv, selected, counts);
    const size_t shared = (size_t)a.rank * sizeof(float);

    if (shape->dtype == SPARSE_MLA_F32)
        forward_kernel<<<(unsigned)a.rows, THREADS, shared, stream>>>(a, (float *)out, lse);
    else
        forward_kernel<<<(unsigned)a.rows, THREADS, shared, stream>>>(a, (__nv_bfloat16 *)out, lse);
    return cudaGetLastError();
}

size_t generic_backward_bytes(const struct sparse_mla *shape)
{
    return (size_t)shape->rows * shape->heads * sizeof(float);
}

cudaError_t generic_backward(cudaStream_t stream, const struct sparse_mla *shape, const void *q,
                             const void *kv, const int32_t *selected, const int32_t *counts,
                             const void *out, const float *lse, const void *dout, void *dq,
                             float *dkv, float *target, void *workspace)
{
    generic_arguments a = arguments(shape, q, kv, selected, counts);

    a.out = out;
    a.dout = dout;
    a.lse = lse;
    a.delta = (float *)workspace;
    return shape->dtype == SPARSE_MLA_F32
               ? launch_backward<float>(stream, a, dq, dkv, target)
               : launch_backward<__nv_bfloat16>(stream, a, dq, dkv, target);
}

cudaError_t generic_target(cudaStream_t stream, const struct sparse_mla *shape, const void *q,
                           const void *kv, const int32_t *selected, const int32_t *counts,
                           const float *lse, float *target, void *)
{
    generic_arguments a = arguments(shape, q, kv, selected, counts);

    a.lse = lse;
    if (shape->dtype == SPARSE_MLA_F32)
        target_kernel<float><<<(unsigned)a.rows, THREADS, 0, stream>>>(a, target);
    else
        target_kernel<__nv_bfloat16><<<(unsigned)a.rows, THREADS, 0, stream>>>(a, target);
    return cudaGetLastError();
}
