/* How a pair of blocks multiplies tiles of 256 rows, here and in ../update: a ring of stages in
 * shared memory, which one thread of each block feeds through the copy engine, two warpgroups that
 * multiply, and blocks of shared memory that results leave through. */
#pragma once
#include "shape.cuh"
#include "tensor.cuh"

namespace pair {
using namespace hopper;

constexpr int GROUPS =
    2; /* warpgroups that multiply, 64 rows of a block's outputs each; after the one that loads */
constexpr int THREADS = (GROUPS + 1) * 128;
constexpr uint32_t A_BYTES = OWN * DEPTH * 2, B_BYTES = COMMON * DEPTH * 2;
constexpr uint32_t BLOCK_BYTES = 64 * 128; /* 64 rows of a swizzled block */

/* where a thread stands in a ring of N */
template <int N>
struct place {
    int slot = 0;
    uint32_t parity = 0;

    __device__ void advance()
    {
        if (++slot == N) {
            slot = 0;
            parity ^= 1;
        }
    }
};

/* Addresses in shared memory: STAGES stages, STAGING blocks per warpgroup, barriers; what else a
 * kernel needs is at end(), a multiple of 16. COLUMNS: of operand B. */
template <int STAGES_, int STAGING_, int COLUMNS_ = COMMON>
struct ring {
    static constexpr int STAGES = STAGES_, STAGING = STAGING_, COLUMNS = COLUMNS_;
    static constexpr uint32_t STAGE_BYTES = A_BYTES + COLUMNS * DEPTH * 2;
    static constexpr uint32_t STAGING_AT = STAGES * STAGE_BYTES;
    static constexpr uint32_t SIGNALS_AT = STAGING_AT + GROUPS * STAGING * BLOCK_BYTES;
    static constexpr uint32_t END = SIGNALS_AT + 2 * STAGES * (uint32_t)sizeof(uint64_t);
    static constexpr uint32_t SHARED_BYTES = END + 1024; /* alignment */
    using place = pair::place<STAGES>;

    uint32_t base;

    __device__ explicit ring(void *shared) : base((shared_address(shared) + 1023) & ~1023u) {}
    __device__ uint32_t a(int slot) const { return base + slot * STAGE_BYTES; }
    __device__ uint32_t b(int slot) const { return a(slot) + A_BYTES; }
    __device__ uint32_t staging(int group) const
    {
        return base + STAGING_AT + group * STAGING * BLOCK_BYTES;
    }
    __device__ uint32_t full(int i) const { return base + SIGNALS_AT + i * 8; }
    __device__ uint32_t empty(int i) const { return full(STAGES + i); }
    __device__ uint32_t end() const { return base + END; }

    /* by one thread, before a fence_barrier_init() and a barrier of the pair */
    __device__ void init() const
    {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(full(i), 1);
            barrier_init(empty(i), 2 * GROUPS);
        }
    }
    /* Both blocks' loads into the slot may go on once the four warpgroups are through with it. */
    __device__ void release(int slot) const
    {
        const uint32_t thread = threadIdx.x % 128;

        if (thread < 2)
            barrier_arrive_cluster(cluster_address(empty(slot), thread));
    }
};

/* STEPS products of one stage */
template <class Product, int STEPS>
__device__ __forceinline__ void multiply_stage(uint32_t a, uint32_t b,
                                               float (&d)[Product::COLUMNS / 2])
{
    mma_begin();
#pragma unroll
    for (int i = 0; i < STEPS; i++)
        Product::run(d, a + i * (Product::A_ACROSS ? 128 : 2),
                     b + i * (Product::B_ACROSS ? 128 : 2));
    mma_commit();
}

/* d = A[64, 16 steps] B[16 steps, N] of the ring's next stages, all four steps of each. Product:
 * hopper::product, or one like it; an operand stored across lies [depth][64 columns] per block of
 * 64 columns, else [columns][depth]. */
template <class Product, class Ring>
__device__ __forceinline__ void multiply(const Ring &f, typename Ring::place &at, int group,
                                         int stages, float (&d)[Product::COLUMNS / 2])
{
    const uint32_t a0 = descriptor(f.a(0) + group * BLOCK_BYTES, BLOCK_BYTES);
    const uint32_t b0 = descriptor(f.b(0), BLOCK_BYTES);
    int before = -1;

#pragma unroll
    for (int i = 0; i < Product::COLUMNS / 2; i++)
        d[i] = 0; /* also keeps them from being live from one tile to the next */
    for (int i = 0; i < stages; i++) {
        const uint32_t next = at.slot * (Ring::STAGE_BYTES / 16);

        barrier_wait(f.full(at.slot), at.parity);
        multiply_stage<Product, DEPTH / STEP>(a0 + next, b0 + next, d);
        if (before >= 0) {
            mma_wait<1>();
            f.release(before);
        }
        before = at.slot;
        at.advance();
    }
    mma_wait<0>();
    settle(d);
    if (before >= 0)
        f.release(before);
}

} /* namespace pair */
