/* The warpgroup that brings a row's queries and its selected keys into shared memory, for those that
 * make products of both: Q, and a ring of two tiles of keys, block by block. SHARED has q, ring and
 * their barriers q_full, q_empty, full and empty as in forward.cu. */
#pragma once
#include "shape.cuh"

using namespace hopper;

constexpr int SLOTS = 2 * BLOCKS; /* of the ring */

struct gather_arguments {
    const __nv_bfloat16 *q, *kv;
    const int32_t *selected, *counts;
    int64_t rows;
    int32_t heads, k;
    uint32_t *started; /* NULL: blocks need not keep together */
};

/* `workspace` holds one word. */
inline gather_arguments arguments_of_gather(const struct sparse_mla *shape, const void *q,
                                            const void *kv, const int32_t *selected,
                                            const int32_t *counts, void *workspace)
{
    const bool together = (size_t)shape->keys * WIDTH * 2 > CACHED_BYTES;

    return {(const __nv_bfloat16 *)q,
            (const __nv_bfloat16 *)kv,
            selected,
            counts,
            shape->rows,
            shape->heads,
            shape->k,
            together ? (uint32_t *)workspace : nullptr};
}

/* Barriers of Q and the ring, for one thread; `readers`: warps that free Q. */
template <class SHARED>
__device__ __forceinline__ void init_gather(SHARED &s, int readers)
{
    for (int i = 0; i < BLOCKS; i++)
        barrier_init(shared_address(&s.q_full[i]), WARPGROUP);
    for (int i = 0; i < SLOTS; i++) {
        barrier_init(shared_address(&s.full[i]), WARPGROUP);
        barrier_init(shared_address(&s.empty[i]), 4);
    }
    barrier_init(shared_address(&s.q_empty), readers);
}

/* Position in the ring -> block of columns. The RoPE block comes first: it is free after Q K^T.
 * Then the two output warpgroups' blocks in turn, in the order in which they end. */
__device__ __forceinline__ constexpr int block_at(int position)
{
    return position == 0 ? 8 : (position - 1) / 2 + (position - 1) % 2 * 4;
}

template <class SHARED>
__device__ __forceinline__ void gather_q(const gather_arguments &a, SHARED &s, int64_t row, uint32_t parity,
                                         uint64_t policy)
{
    const int lane = threadIdx.x % WARPGROUP, piece = lane % 8, head = lane / 8;
    const uint32_t to = shared_address(s.q) + head * 128 + ((piece ^ (head & 7)) << 4);
    const uint32_t full = shared_address(s.q_full);
    const __nv_bfloat16 *from[4];
    uint32_t bytes[4];

#pragma unroll
    for (int j = 0; j < 4; j++) {
        const bool real = head + 16 * j < a.heads;

        from[j] = real ? a.q + (row * a.heads + head + 16 * j) * WIDTH + piece * 8 : a.q;
        bytes[j] = real ? 16 : 0;
    }
    barrier_wait(shared_address(&s.q_empty), parity ^ 1);
    repeat<0, BLOCKS>([&](auto p) {
        repeat<0, 4>([&](auto j) {
            copy16<p.value * BLOCK_BYTES + j.value * 2048, block_at(p.value) * BLOCK * 2>(
                to, from[j.value], bytes[j.value], policy);
        });
        copies_arrive(full + p.value * 8);
    });
}

/* One tile: this thread copies 16 bytes of four keys in each block. */
template <class SHARED>
__device__ __forceinline__ void gather_tile(const gather_arguments &a, SHARED &s, const int (&index)[4],
                                            uint32_t tile)
{
    const int lane = threadIdx.x % WARPGROUP, piece = lane % 8, key = lane / 8;
    const uint32_t slot = (tile & 1) * BLOCKS, over = ((tile >> 1) & 1) ^ 1;
    const uint32_t full = shared_address(s.full) + slot * 8,
                   empty = shared_address(s.empty) + slot * 8;
    const uint32_t to =
        shared_address(s.ring) + slot * BLOCK_BYTES + key * 128 + ((piece ^ (key & 7)) << 4);
    const __nv_bfloat16 *from[4];
    uint32_t bytes[4];

#pragma unroll
    for (int j = 0; j < 4; j++) {
        bytes[j] = index[j] >= 0 ? 16 : 0;
        from[j] = a.kv + (int64_t)max(index[j], 0) * WIDTH + piece * 8;
    }
    repeat<0, BLOCKS>([&](auto p) {
        barrier_wait(empty + p.value * 8, over);
        repeat<0, 4>([&](auto j) {
            copy16<p.value * BLOCK_BYTES + j.value * 2048, block_at(p.value) * BLOCK * 2>(
                to, from[j.value], bytes[j.value]);
        });
        copies_arrive(full + p.value * 8);
    });
}

template <class SHARED>
__device__ __forceinline__ void gather(const gather_arguments &a, SHARED &s)
{
    const int key = threadIdx.x % WARPGROUP / 8;
    const uint64_t policy = policy_evict_first();
    uint32_t tile = 0, parity = 0; /* tiles since the kernel began; parity of rows with keys */

    for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
        const int count = (int)uniform(a.counts[row]);
        const int32_t *selected = a.selected + row * a.k;
        int next[4];

        if (a.started) {
            if (threadIdx.x == 0)
                start_together(a.started, row, a.rows, count / 2);
            named_barrier(1, WARPGROUP);
        }
        if (threadIdx.x == 0 && row + gridDim.x < a.rows)
            prefetch_l2(a.q + (row + gridDim.x) * a.heads * WIDTH, a.heads * WIDTH * 2);
        if (count == 0)
            continue;
#pragma unroll
        for (int j = 0; j < 4; j++)
            next[j] = key + 16 * j < count ? __ldg(selected + key + 16 * j) : -1;
        for (int first = 0; first < count; first += TILE, tile++) {
            const int now[4] = {next[0], next[1], next[2], next[3]};

#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int ahead = first + TILE + key + 16 * j;

                next[j] = ahead < count ? __ldg(selected + ahead) : -1;
            }
            gather_tile(a, s, now, tile);
            if (first == 0)
                gather_q(a, s, row, parity, policy);
        }
        parity ^= 1;
    }
}
