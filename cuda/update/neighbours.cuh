/* Passes over arrays of any mixture of types, at the speed of memory: a thread takes a few neighbours, 16
 * bytes of the widest type, so that every access of a warp is one run of bytes; short runs twice, a block
 * apart, all loads before the first store. */
#pragma once

#include "device/element.cuh"

namespace neighbours {

constexpr int THREADS = 256;
template <int V>
constexpr int ROUNDS = V < 8 ? 2 : 1; /* more takes registers that more threads use better */

/* Blocks for `count` elements in runs of V. */
template <int V>
static inline unsigned blocks(int64_t count)
{
    return (unsigned)divided(count, THREADS * ROUNDS<V> * V);
}

/* The first element of a thread's run in a round; not below the count: none. */
template <int V>
__device__ __forceinline__ int64_t run_at(int round)
{
    return ((blockIdx.x * (int64_t)ROUNDS<V> + round) * THREADS + threadIdx.x) * V;
}

/* Elements in 16 bytes of the widest of the types. */
template <class... T>
constexpr int RUN = 16 / (int)std::max({sizeof(T)...});

} /* namespace neighbours */
