/* Any shape, bf16 or fp32, plain fp32 sums in a fixed order: parity tests, tiny models. */
#include <algorithm>

#include "shape.cuh"

namespace {

__device__ __forceinline__ float load(const float *p)
{
    return *p;
}
__device__ __forceinline__ float load(const __nv_bfloat16 *p)
{
    return __bfloat162float(*p);
}
__device__ __forceinline__ void store(float *p, float v)
{
    *p = v;
}
__device__ __forceinline__ void store(__nv_bfloat16 *p, float v)
{
    *p = __float2bfloat16(v);
}

/* A thread an output; the group of a row is found by bisection. */
template <class T>
__global__ void rows_kernel(const grouped_gemm_shape g, bool backward, const int32_t *offsets,
                            const T *in, const T *w, T *out)
{
    const int64_t width = backward ? g.k : g.n, depth = backward ? g.n : g.k;
    const int64_t column = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    const int64_t across = backward ? 1 : g.k, along = backward ? g.k : 1;

    for (int64_t row = blockIdx.y; row < offsets[g.groups] && column < width; row += gridDim.y) {
        int low = 0, high = g.groups - 1; /* the first group that ends behind the row */
        float sum = 0;

        while (low < high) {
            const int middle = (low + high) / 2;

            if (offsets[middle + 1] > row)
                high = middle;
            else
                low = middle + 1;
        }
        const T *weights = w + low * g.stride + column * across;
        for (int64_t i = 0; i < depth; i++)
            sum += load(in + row * depth + i) * load(weights + i * along);
        T *to = out + row * width + column;
        store(to, g.add ? sum + load(to) : sum);
    }
}

template <class T, class W>
__global__ void weight_kernel(const grouped_gemm_shape g, const int32_t *offsets, const T *dy,
                              const T *x, W *dw)
{
    const int64_t column = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    const int group = blockIdx.z;

    for (int64_t row = blockIdx.y; row < g.n && column < g.k; row += gridDim.y) {
        W *to = dw + group * g.stride + row * g.k + column;
        float sum = 0;

        for (int64_t i = offsets[group]; i < offsets[group + 1]; i++)
            sum += load(dy + i * g.n + row) * load(x + i * g.k + column);
        store(to, g.add ? sum + load(to) : sum);
    }
}

constexpr int THREADS = 128, MOST = 65535; /* blocks along y */

unsigned blocks(int64_t columns)
{
    return (unsigned)((columns + THREADS - 1) / THREADS);
}

template <class T, class W>
void launch_weight(cudaStream_t stream, const grouped_gemm_shape &g, const int32_t *offsets,
                   const void *dy, const void *x, void *dw)
{
    const dim3 grid(blocks(g.k), (unsigned)std::min<int64_t>(g.n, MOST), (unsigned)g.groups);

    weight_kernel<<<grid, THREADS, 0, stream>>>(g, offsets, (const T *)dy, (const T *)x, (W *)dw);
}

} /* namespace */

cudaError_t generic_rows(cudaStream_t stream, const struct grouped_gemm_shape *g, bool backward,
                         const int32_t *offsets, const void *in, const void *w, void *out)
{
    const dim3 grid(blocks(backward ? g->k : g->n), (unsigned)std::min<int64_t>(g->rows, MOST));

    if (g->type == GROUPED_GEMM_BF16)
        rows_kernel<<<grid, THREADS, 0, stream>>>(*g, backward, offsets, (const __nv_bfloat16 *)in,
                                                  (const __nv_bfloat16 *)w, (__nv_bfloat16 *)out);
    else
        rows_kernel<<<grid, THREADS, 0, stream>>>(*g, backward, offsets, (const float *)in,
                                                  (const float *)w, (float *)out);
    return cudaGetLastError();
}

cudaError_t generic_weight(cudaStream_t stream, const struct grouped_gemm_shape *g,
                           const int32_t *offsets, const void *dy, const void *x, void *dw)
{
    const bool narrow = g->weight_type == GROUPED_GEMM_BF16;

    if (g->type == GROUPED_GEMM_BF16)
        (narrow ? launch_weight<__nv_bfloat16, __nv_bfloat16>
                : launch_weight<__nv_bfloat16, float>)(stream, *g, offsets, dy, x, dw);
    else
        (narrow ? launch_weight<float, __nv_bfloat16>
                : launch_weight<float, float>)(stream, *g, offsets, dy, x, dw);
    return cudaGetLastError();
}
