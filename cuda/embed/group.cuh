/* Rows in groups of one token, in order within a group, by one launch: a block looks through all tokens for those of
 * its share of the vocabulary, parts them by further bits among its warps, and each warp takes one token after another
 * out of its part. No block needs to know what another found: where its rows begin among all, it sees by itself. */
#pragma once

#include "device/element.cuh"

namespace group {

constexpr int BLOCKS = 128, THREADS = 1024, WARPS = THREADS / 32;
constexpr int HELD = 16384; /* rows of a block that fit on chip */

struct item {
    int32_t token, row;
};

/* Which block's, and which of its warps', a token is. */
__device__ __forceinline__ int block_of(int32_t token) { return (unsigned)token % BLOCKS; }
__device__ __forceinline__ int warp_of(int32_t token) { return (unsigned)token / BLOCKS % WARPS; }

/* Takes token after token out of a list that nobody but this warp uses, each with all its rows. */
__device__ __forceinline__ void take_out(item *list, int count, int32_t *token, int32_t *row)
{
    constexpr int AT_ONCE = 4; /* items of a lane, so that a long list does not wait for each */
    const int lane = threadIdx.x % 32;
    const unsigned lower = (1u << lane) - 1;
    int taken = 0;

    while (count > 0) {
        const int32_t now = list[0].token;
        int left = 0;

        __syncwarp();
        for (int first = 0; first < count; first += 32 * AT_ONCE) {
            item own[AT_ONCE];

#pragma unroll
            for (int q = 0; q < AT_ONCE; q++)
                if (first + q * 32 + lane < count) own[q] = list[first + q * 32 + lane];
            __syncwarp();
#pragma unroll
            for (int q = 0; q < AT_ONCE; q++) {
                const bool real = first + q * 32 + lane < count, taking = real && own[q].token == now;
                const unsigned same = __ballot_sync(~0u, taking), other = __ballot_sync(~0u, real && !taking);

                if (taking) {
                    token[taken + __popc(same & lower)] = now;
                    row[taken + __popc(same & lower)] = own[q].row;
                } else if (real)
                    list[left + __popc(other & lower)] = own[q]; /* at or before where it was */
                taken += __popc(same);
                left += __popc(other);
            }
        }
        count = left;
        __syncwarp();
    }
}

/* room [rows]: for lists that do not fit on chip. */
static __global__ __launch_bounds__(THREADS) void group_kernel(int rows, const int32_t *token, item *room,
                                                               int32_t *grouped_token, int32_t *grouped_row)
{
    __shared__ int place[WARPS][WARPS + 1], begin[WARPS + 1]; /* place [who found it][whose it is] */
    extern __shared__ __align__(8) unsigned char shared[]; /* item [min(rows, HELD)] */
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, mine = blockIdx.x;
    const int share = (rows + THREADS - 1) / THREADS * 32, first = warp * share, end = min(first + share, rows);
    int before = 0, count;

    place[warp][lane] = 0;
    __syncwarp();
#pragma unroll 8
    for (int i = first + lane; i < end; i += 32) {
        const int32_t t = token[i];

        before += block_of(t) < mine;
        if (block_of(t) == mine) atomicAdd(&place[warp][warp_of(t)], 1);
    }
    before = block_sum<THREADS>(before);
    const int start = block_before<THREADS>(place[lane][warp], &count); /* by whose, then by who found it */
    place[lane][warp] = start;
    if (lane == 0) begin[warp] = start;
    if (threadIdx.x == 0) begin[WARPS] = count;
    __syncthreads();

    item *list = count <= HELD ? (item *)shared : room + before;
#pragma unroll 4
    for (int base = first; base < end; base += 32) {
        const int32_t t = base + lane < end ? token[base + lane] : 0;
        const bool ours = base + lane < end && block_of(t) == mine;
        const unsigned all = __ballot_sync(~0u, ours);

        if (all == 0) continue;
        if (ours) {
            const unsigned same = __match_any_sync(all, warp_of(t));
            const int ahead = __popc(same & ((1u << lane) - 1)), at = place[warp][warp_of(t)];

            __syncwarp(all);
            list[at + ahead] = {t, base + lane};
            if (ahead == 0) place[warp][warp_of(t)] = at + __popc(same);
        }
        __syncwarp();
    }
    __syncthreads();
    take_out(list + begin[warp], begin[warp + 1] - begin[warp], grouped_token + before + begin[warp],
             grouped_row + before + begin[warp]);
}

static inline void launch(cudaStream_t stream, int64_t rows, const int32_t *token, item *room, int32_t *grouped_token,
                          int32_t *grouped_row)
{
    const size_t shared = (size_t)std::min<int64_t>(rows, HELD) * sizeof(item);

    allow_shared(group_kernel, shared);
    group_kernel<<<BLOCKS, THREADS, shared, stream>>>((int)rows, token, room, grouped_token, grouped_row);
}

} /* namespace group */
