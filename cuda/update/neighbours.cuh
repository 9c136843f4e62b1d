/* Passes over arrays of any mixture of types, at the speed of memory: a thread takes a few neighbours, 16 bytes of the widest
 * type, so that every access of a warp is one run of bytes; then as many again a block further on, all loads before the first
 * store. */
#pragma once

#include "device/element.cuh"

namespace neighbours {

constexpr int THREADS = 256, ROUNDS = 2;

/* Blocks for `count` elements in runs of V. */
static inline unsigned blocks(int64_t count, int v)
{
    return (unsigned)divided(count, (int64_t)THREADS * ROUNDS * v);
}

/* The first element of a thread's run in a round; not below the count: none. */
template <int V>
__device__ __forceinline__ int64_t run_at(int round)
{
    return ((blockIdx.x * (int64_t)ROUNDS + round) * THREADS + threadIdx.x) * V;
}

/* Elements in 16 bytes of the widest of the types. */
template <class... T>
constexpr int RUN = 16 / (int)std::max({sizeof(T)...});

} /* namespace neighbours */
