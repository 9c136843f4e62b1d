/* Where things lie in the shared memory of small.cu, its barriers, and who has which columns. */
#pragma once

#include "update/half.cuh"
#include "update/small.cuh"

namespace small {
using namespace hopper;

constexpr int PIECE = 64, HALF_PIECE = 32; /* columns of a tile of x, and of one of gradient and momentum */
constexpr int STAGES = 6, X_SLOTS = 3;     /* at most, and for x while it is made */

/* For N rows. Shared memory has SLOTS places of N x 64 halves. The three squares take GROUPS of them each, the last
 * of all; what multiplies the columns is the middle one (see run_steps), and the other FREE places are for columns
 * meanwhile. */
template <int N>
struct layout {
    static constexpr int GROUPS = N / 64, CONSUMERS = GROUPS * 128, THREADS = CONSUMERS + 128;
    static constexpr int DECIDING = CONSUMERS + 64; /* threads that agree whether x is made again */
    static constexpr int SLOTS = N > 128 ? 9 : 13, FREE = SLOTS - GROUPS;
    static constexpr uint32_t PIECE_BYTES = N * 128, SQUARE_BYTES = GROUPS * PIECE_BYTES;
    static constexpr int SQUARES = SLOTS - 3 * GROUPS; /* the first */
    static constexpr int PARTIAL = SLOTS - 2 * GROUPS; /* the other's sums: not in the first square */
    static constexpr int MAKING = SLOTS - X_SLOTS;     /* x while it is made; gradient and momentum are below */

    static __device__ constexpr int free(int i) { return i < SLOTS - 2 * GROUPS ? i : i + GROUPS; }
};

/* What a block tells the other of its own columns. */
struct alignas(16) part_norm {
    double squares;
    float scale; /* of its x */
};

struct signals {
    uint64_t full[STAGES], done[STAGES], empty[STAGES]; /* of what is loaded; done: what is made of it may be stored */
    uint64_t x_done[X_SLOTS], x_empty[X_SLOTS];         /* of x while it is made */
    uint64_t polynomial;                                /* a segment's is there */
    part_norm other;
    double sums[SMALL_ROWS / 64 * 4]; /* of the warps */
    int32_t again;                    /* x is made again, on another scale */
};

template <int N>
constexpr uint32_t SHARED_BYTES = layout<N>::SLOTS *layout<N>::PIECE_BYTES + (uint32_t)sizeof(signals) + 1024;

/* x: [batch,rows,columns], in boxes of all rows; the others as they lie, in boxes of all rows of a block. */
struct maps {
    CUtensorMap x, gradient, momentum, weight, rounded;
};

struct shape {
    struct muon muon;
    struct segments segments;
};

/* addresses in shared memory, and which of the pair this is */
template <int N>
struct frame {
    uint32_t base;
    signals *signal;
    int rank;

    __device__ uint32_t slot(int i) const { return base + i * layout<N>::PIECE_BYTES; }
    __device__ uint32_t square(int i) const { return slot(layout<N>::SQUARES) + i * layout<N>::SQUARE_BYTES; }
    __device__ uint32_t barrier(const uint64_t &b) const { return shared_address(&b); }
    __device__ uint32_t full(int i) const { return barrier(signal->full[i]); }
    __device__ uint32_t done(int i) const { return barrier(signal->done[i]); }
    __device__ uint32_t empty(int i) const { return barrier(signal->empty[i]); }
    __device__ uint32_t x_done(int i) const { return barrier(signal->x_done[i]); }
    __device__ uint32_t x_empty(int i) const { return barrier(signal->x_empty[i]); }
    __device__ uint32_t polynomial() const { return barrier(signal->polynomial); }
};

template <int N>
__device__ __forceinline__ frame<N> open_frame(uint8_t *shared)
{
    constexpr int GROUPS = layout<N>::GROUPS;
    const uint32_t skipped = -shared_address(shared) & 1023;
    frame<N> f;

    f.base = shared_address(shared) + skipped;
    f.signal = (signals *)(shared + skipped + layout<N>::SLOTS * layout<N>::PIECE_BYTES);
    f.rank = cluster_rank();
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(f.full(i), 1);
            barrier_init(f.done(i), GROUPS);
            barrier_init(f.empty(i), GROUPS + 1);
        }
        for (int i = 0; i < X_SLOTS; i++) {
            barrier_init(f.x_done(i), GROUPS);
            barrier_init(f.x_empty(i), GROUPS + 1);
        }
        barrier_init(f.polynomial(), GROUPS);
        fence_barrier_init();
    }
    __syncthreads();
    return f;
}

/* where a thread stands in a ring of up to STAGES, whose length changes from one use to the next */
struct place {
    int slot = 0, count = 0;
    uint32_t over = 0; /* a bit for each slot */

    __device__ void begin(int length)
    {
        slot = 0;
        count = length;
    }
    __device__ uint32_t parity() const { return over >> slot & 1; }
    __device__ void advance()
    {
        over ^= 1u << slot;
        slot = slot + 1 == count ? 0 : slot + 1;
    }
};

/* Tiles are dealt in turn. Those that were touched last come first the next time: they may still be in L2. */
template <class F>
__device__ __forceinline__ void each_tile(int columns, int rank, bool backward, F &&f)
{
    const int count = ((columns + PIECE - 1) / PIECE - rank + 1) / 2;

    for (int i = 0; i < count; i++) f((rank + 2 * (backward ? count - 1 - i : i)) * PIECE);
}

/* 16-byte pieces of rows of 128 bytes, or of 64, lie where the copy engine's swizzle of that width puts them. */
__device__ __forceinline__ uint32_t swizzled(uint32_t offset)
{
    return offset ^ (offset >> 3 & 0x70);
}
__device__ __forceinline__ uint32_t swizzled64(uint32_t offset)
{
    return offset ^ (offset >> 3 & 0x30);
}

/* One arrival of a warpgroup */
__device__ __forceinline__ void arrive(uint32_t barrier)
{
    if (threadIdx.x % 128 == 0) barrier_arrive(barrier);
}

/* After this warpgroup wrote what is at the stage. */
__device__ __forceinline__ void arrive_written(uint32_t barrier)
{
    fence_async();
    named_barrier(2 + threadIdx.x / 128, 128);
    arrive(barrier);
}

} /* namespace small */
