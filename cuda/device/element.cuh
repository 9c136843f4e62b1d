/* Elements of either type as fp32, several at a time where addresses allow it; sums over a block in a fixed order. */
#pragma once

#include <cuda_bf16.h>

#include "device/device.cuh"

typedef __nv_bfloat16 bf16;

__device__ __forceinline__ float get(float x) { return x; }
__device__ __forceinline__ float get(bf16 x) { return __bfloat162float(x); }
template <class T> __device__ __forceinline__ T to(float x);
template <> __device__ __forceinline__ float to<float>(float x) { return x; }
template <> __device__ __forceinline__ bf16 to<bf16>(float x) { return __float2bfloat16_rn(x); }

/* V neighbours: one or two 16-byte accesses for V = 8. */
template <class T, int V>
struct alignas(sizeof(T) * V >= 16 ? 16 : sizeof(T) * V) several {
    T at[V];
};

template <class T, int V>
__device__ __forceinline__ void load(const T *from, float (&x)[V])
{
    const several<T, V> all = *(const several<T, V> *)from;

#pragma unroll
    for (int i = 0; i < V; i++) x[i] = get(all.at[i]);
}

/* Writes, or adds to what is there and rounds once. */
template <class T, int V>
__device__ __forceinline__ void store(T *at, const float (&x)[V], bool add = false)
{
    several<T, V> all;

    if (add) all = *(const several<T, V> *)at;
#pragma unroll
    for (int i = 0; i < V; i++) all.at[i] = to<T>(add ? get(all.at[i]) + x[i] : x[i]);
    *(several<T, V> *)at = all;
}

constexpr int WIDE = 8; /* elements at a time where rows and addresses are multiples of 16 bytes */

/* Calls f with an element of the type, which names it. */
template <class F>
static inline void with_type(glm52_dtype type, F f)
{
    if (type == GLM52_DTYPE_F32)
        f(float());
    else
        f(bf16());
}

/* The same, and with std::integral_constant of WIDE or 1. */
template <class F>
static inline void with_type_and_width(glm52_dtype type, bool wide, F f)
{
    with_type(type, [&](auto element) {
        if (wide)
            f(element, std::integral_constant<int, WIDE>());
        else
            f(element, std::integral_constant<int, 1>());
    });
}

/* ---- reductions: the order depends on nothing but the number of threads ---- */

struct plus {
    template <class T> __device__ __forceinline__ T operator()(T a, T b) const { return a + b; }
};
struct larger {
    template <class T> __device__ __forceinline__ T operator()(T a, T b) const { return a > b ? a : b; }
};

template <class T, class F>
__device__ __forceinline__ T warp_reduce(T x, F f)
{
#pragma unroll
    for (int apart = 16; apart; apart /= 2) x = f(x, __shfl_xor_sync(~0u, x, apart));
    return x;
}

/* Every thread gets the result. For blocks of THREADS in one dimension; ends and begins with a barrier. */
template <int THREADS, class T, class F>
__device__ __forceinline__ T block_reduce(T x, F f)
{
    __shared__ T part[THREADS / 32];

    x = warp_reduce(x, f);
    __syncthreads();
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = x;
    __syncthreads();
    x = part[0];
#pragma unroll
    for (int w = 1; w < THREADS / 32; w++) x = f(x, part[w]);
    return x;
}

template <int THREADS, class T>
__device__ __forceinline__ T block_sum(T x)
{
    return block_reduce<THREADS>(x, plus());
}

template <int THREADS, class T>
__device__ __forceinline__ T block_largest(T x)
{
    return block_reduce<THREADS>(x, larger());
}

/* Sum of the x of lower threads; *all gets the sum of every thread's. */
template <int THREADS>
__device__ __forceinline__ int block_before(int x, int *all)
{
    __shared__ int part[THREADS / 32];
    int sum = x, before = 0;

#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) {
        const int lower = __shfl_up_sync(~0u, sum, apart);
        if ((int)(threadIdx.x % 32) >= apart) sum += lower;
    }
    __syncthreads();
    if (threadIdx.x % 32 == 31) part[threadIdx.x / 32] = sum;
    __syncthreads();
    *all = 0;
#pragma unroll
    for (int w = 0; w < THREADS / 32; w++) {
        if (w == (int)threadIdx.x / 32) before = *all;
        *all += part[w];
    }
    return before + sum - x;
}
