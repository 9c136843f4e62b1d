/* The KL target alone for sm_90a: per row the mean over heads of exp(scale q k^T - lse).
 *
 * A persistent block per multiprocessor works through rows. One warpgroup gathers as in the forward;
 * the tiles go in turn to two others, which multiply with keys as rows of the accumulator, so that
 * the sum over heads stays within four lanes. Bringing the keys is what takes the time. */
#include "gather.cuh"

namespace {

constexpr int THREADS = 3 * WARPGROUP;
/* Blocks to wait for at once, as in the forward. */
constexpr int TOGETHER = 3;

struct shared_target {
    uint8_t q[BLOCKS * BLOCK_BYTES];
    uint8_t ring[SLOTS * BLOCK_BYTES];
    uint64_t q_full[BLOCKS], q_empty;
    uint64_t full[SLOTS], empty[SLOTS];
};

struct target_arguments : gather_arguments {
    const float *lse;
    float *target;
    float scale_log2;
};

/* acc = K Q^T of a tile, which frees its blocks as it goes. */
__device__ __forceinline__ void multiply_keys(shared_target &s, float (&acc)[32], uint32_t tile,
                                              uint32_t q_parity)
{
    const uint32_t turn = uniform(tile & 3), slot = (turn & 1) * BLOCKS, over = turn >> 1;
    const uint32_t full = shared_address(s.full) + slot * 8;
    const uint32_t empty = shared_address(s.empty) + slot * 8;
    const uint32_t q_full = shared_address(s.q_full);
    const uint32_t q = descriptor(shared_address(s.q), 16);
    const uint32_t k = descriptor(shared_address(s.ring) + slot * BLOCK_BYTES, 16);

#pragma unroll
    for (int p = 0; p < BLOCKS; p += TOGETHER) {
#pragma unroll
        for (int i = p; i < p + TOGETHER; i++) {
            barrier_wait(q_full + i * 8, q_parity);
            barrier_wait(full + i * 8, over);
        }
        fence_async();
        mma_begin();
#pragma unroll
        for (int i = p; i < p + TOGETHER; i++)
#pragma unroll
            for (int step = 0; step < 4; step++) {
                const int at = i * (BLOCK_BYTES >> 4) + step * 2;

                mma<64, 0, 0>::ss(acc, k + at, q + at, i > 0 || step > 0);
            }
        mma_commit();
        if (p == 0)
            continue;
        mma_wait<1>();
#pragma unroll
        for (int i = p - TOGETHER; i < p; i++)
            barrier_arrive_warp(empty + i * 8);
    }
    mma_wait<0>();
#pragma unroll
    for (int i = BLOCKS - TOGETHER; i < BLOCKS; i++)
        barrier_arrive_warp(empty + i * 8);
}

/* This thread's 16 heads: 8 * j + fragment_column() + 0, 1. */
__device__ __forceinline__ void load_lse(const target_arguments &a, int64_t row, float (&lse)[16])
{
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const int head = 8 * (i / 2) + fragment_column() + i % 2;

        lse[i] = head < a.heads ? __ldg(a.lse + row * a.heads + head) * LOG2_E : INFINITY;
    }
}

/* `left`: keys of this tile and those after it. */
__device__ __forceinline__ void store_target(const target_arguments &a, const float (&score)[32],
                                             const float (&lse)[16], float *target, int left)
{
    float sum[2] = {0, 0};

#pragma unroll
    for (int i = 0; i < 32; i += 2)
        sum[i / 2 % 2] += exp2_fast(fmaf(score[i], a.scale_log2, -lse[i / 4 * 2])) +
                          exp2_fast(fmaf(score[i + 1], a.scale_log2, -lse[i / 4 * 2 + 1]));
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int key = fragment_row() + 8 * h;

        sum[h] += __shfl_xor_sync(~0u, sum[h], 1);
        sum[h] += __shfl_xor_sync(~0u, sum[h], 2);
        if (fragment_column() == 0 && key < left)
            target[key] = sum[h] / a.heads;
    }
}

/* The tiles whose number, counted since the kernel began, is even (side 0) or odd (side 1). */
__device__ __forceinline__ void targets(const target_arguments &a, shared_target &s, int side)
{
    uint32_t tile = 0, q_parity = 0;

    for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
        const int count = (int)uniform(a.counts[row]);
        float *target = a.target + row * a.k;
        float lse[16], score[32];

        for (int i = count + threadIdx.x - WARPGROUP; i < a.k; i += 2 * WARPGROUP)
            target[i] = 0;
        if (count == 0)
            continue;
        load_lse(a, row, lse);
        for (int first = 0; first < count; first += TILE, tile++) {
            if ((tile & 1) != side)
                continue;
            multiply_keys(s, score, tile, q_parity);
            store_target(a, score, lse, target + first, count - first);
        }
        /* Also where no tile was this side's: an arrival must not count for the row before. */
        barrier_wait(shared_address(&s.q_full[BLOCKS - 1]), q_parity);
        barrier_arrive_warp(shared_address(&s.q_empty));
        q_parity ^= 1;
    }
}

__global__ __launch_bounds__(THREADS, 1) void target_kernel(const target_arguments a)
{
    extern __shared__ __align__(1024) uint8_t memory[];
    shared_target &s = *(shared_target *)memory;
    const int role = __shfl_sync(~0u, threadIdx.x / WARPGROUP, 0);

    if (threadIdx.x == 0)
        init_gather(s, 8);
    __syncthreads();
    if (role == 0)
        gather(a, s);
    else
        targets(a, s, role - 1);
}

} /* namespace */

cudaError_t hopper_target(cudaStream_t stream, const struct sparse_mla *shape, const void *q,
                          const void *kv, const int32_t *selected, const int32_t *counts,
                          const float *lse, float *target, void *workspace)
{
    const target_arguments a = {arguments_of_gather(shape, q, kv, selected, counts, workspace), lse,
                                target, shape->scale * LOG2_E};
    const cudaError_t status = reset_started(stream, a.started);

    if (status != cudaSuccess)
        return status;
    return launch_rows(stream, target_kernel, THREADS, sizeof(shared_target), a);
}
