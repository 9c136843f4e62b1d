/* Where things lie in the shared memory of small.cu, and its barriers. */
#pragma once

#include "update/half.cuh"
#include "update/small.cuh"

namespace small {
using namespace hopper;

constexpr int PIECE = 64, CHUNK = 2 * PIECE; /* columns read, and columns multiplied, at a time */
constexpr int SLOTS = 9, STAGES = 2;

/* For N rows. Shared memory has SLOTS places of N x 64 halves. Squares take GROUPS of them, the last of all; what multiplies
 * the columns is the middle one of three squares (see run_steps), so that the places below are free meanwhile. */
template <int N>
struct layout {
    static constexpr int GROUPS = N / 64, CONSUMERS = GROUPS * 128, THREADS = CONSUMERS + 128;
    static constexpr uint32_t PIECE_BYTES = N * 128, SQUARE_BYTES = GROUPS * PIECE_BYTES;
    static constexpr int SQUARES = SLOTS - 3 * GROUPS;             /* the first */
    static constexpr int PARTIAL = GROUPS == 1 ? 0 : SLOTS - 2 * GROUPS; /* the other's sums: not in the first square */

    static __device__ constexpr int stage(int i) { return i == 0 ? 0 : GROUPS == 3 ? 6 : 3; } /* two places each */
    static __device__ constexpr int staging(int i) { return i == 0 ? 2 : 8; }
};

struct signals {
    uint64_t full[SLOTS], empty[SLOTS];                /* of pieces, while squares are summed */
    uint64_t stage_full[STAGES], stage_empty[STAGES];  /* of chunks, while columns are multiplied */
    uint64_t polynomial, written;                      /* a segment's is there; its columns are multiplied */
};

template <int N>
constexpr uint32_t SHARED_BYTES = SLOTS *layout<N>::PIECE_BYTES + (uint32_t)sizeof(signals) + 1024;

struct maps {
    CUtensorMap x, y, y_rows; /* y_rows: boxes of one warpgroup, for writing */
};

struct shape {
    int32_t rows, columns;
    struct segments segments;
    float coefficient[MUON_STEPS][3];
};

/* addresses in shared memory, and which of the pair this is */
template <int N>
struct frame {
    uint32_t base, signal;
    int rank;

    __device__ uint32_t slot(int i) const { return base + i * layout<N>::PIECE_BYTES; }
    __device__ uint32_t square(int i) const { return slot(layout<N>::SQUARES) + i * layout<N>::SQUARE_BYTES; }
    __device__ uint32_t full(int i) const { return signal + (int)offsetof(signals, full) + i * 8; }
    __device__ uint32_t empty(int i) const { return signal + (int)offsetof(signals, empty) + i * 8; }
    __device__ uint32_t stage_full(int i) const { return signal + (int)offsetof(signals, stage_full) + i * 8; }
    __device__ uint32_t stage_empty(int i) const { return signal + (int)offsetof(signals, stage_empty) + i * 8; }
    __device__ uint32_t polynomial() const { return signal + (int)offsetof(signals, polynomial); }
    __device__ uint32_t written() const { return signal + (int)offsetof(signals, written); }
};

template <int N>
__device__ __forceinline__ frame<N> open_frame(void *shared)
{
    constexpr int GROUPS = layout<N>::GROUPS;
    frame<N> f;

    f.base = (shared_address(shared) + 1023) & ~1023u;
    f.signal = f.base + SLOTS * layout<N>::PIECE_BYTES;
    f.rank = cluster_rank();
    if (threadIdx.x == 0) {
        for (int i = 0; i < SLOTS; i++) {
            barrier_init(f.full(i), 1);
            barrier_init(f.empty(i), GROUPS);
        }
        for (int i = 0; i < STAGES; i++) {
            barrier_init(f.stage_full(i), 1);
            barrier_init(f.stage_empty(i), GROUPS);
        }
        barrier_init(f.polynomial(), GROUPS);
        barrier_init(f.written(), GROUPS);
        fence_barrier_init();
    }
    __syncthreads();
    return f;
}

/* where a thread stands in a ring of COUNT */
template <int COUNT>
struct place {
    int slot = 0;
    uint32_t parity = 0;

    __device__ void advance()
    {
        if (++slot == COUNT) {
            slot = 0;
            parity ^= 1;
        }
    }
};

/* Chunks are dealt in turn. */
template <class F>
__device__ __forceinline__ void each_chunk(int columns, int rank, F &&f)
{
    for (int column = rank * CHUNK; column < columns; column += 2 * CHUNK) f(column);
}

} /* namespace small */
