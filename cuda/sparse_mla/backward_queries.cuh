/* Warpgroups 0 and 1 of the sparse MLA backward: the gathers, P and dS, dQ. */
#pragma once
#include "backward.cuh"

/* ---- gathers --------------------------------------------------------------------------------- */

/* NUMBER blocks of 64 columns of a [heads, `width`] matrix, by one warpgroup. */
template <int NUMBER>
__device__ __forceinline__ void gather_heads(uint32_t to, const __nv_bfloat16 *from, int width,
                                             int heads, uint32_t full, uint64_t policy)
{
    const int lane = thread_index() % WARPGROUP, piece = lane % 8, head = lane / 8;

    to += head * 128 + ((piece ^ (head & 7)) << 4);
    repeat<0, 4>([&](auto j) {
        const bool real = head + 16 * j.value < heads;
        const __nv_bfloat16 *row = real ? from + (head + 16 * j.value) * width + piece * 8 : from;

        repeat<0, NUMBER>([&](auto b) {
            copy16<b.value * BLOCK_BYTES + j.value * 2048, b.value * BLOCK * 2>(
                to, row, real ? 16 : 0, policy);
        });
    });
    copies_arrive(full);
}

/* The key rows a thread copies pieces of: four for whole blocks, two for the shared block 4. */
struct gather_rows {
    int whole[4], half[2];
};

__device__ __forceinline__ gather_rows load_gather_rows(const int32_t *selected, int first,
                                                        int count)
{
    const int lane = thread_index() % WARPGROUP;
    gather_rows rows;

#pragma unroll
    for (int j = 0; j < 4; j++) {
        const int at = first + lane / 8 + 16 * j;
        rows.whole[j] = at < count ? __ldg(selected + at) : -1;
    }
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const int at = first + lane / 4 + 32 * j;
        rows.half[j] = at < count ? __ldg(selected + at) : -1;
    }
    return rows;
}

/* This warpgroup's half of the columns of one tile. */
template <int SIDE>
__device__ __forceinline__ void gather_keys(const backward_arguments &a, shared_backward &s,
                                            const gather_rows &rows)
{
    constexpr int FIRST = SIDE ? 5 : 0; /* whole blocks FIRST..FIRST+3 */
    const int lane = thread_index() % WARPGROUP;
    const uint32_t full = shared_address(s.kv_full), kv = shared_address(s.kv);
    const int piece = lane % 8, key = lane / 8;
    const uint32_t to = kv + key * 128 + ((piece ^ (key & 7)) << 4);
    const __nv_bfloat16 *from[4];
    uint32_t bytes[4];

#pragma unroll
    for (int j = 0; j < 4; j++) {
        from[j] = a.kv + (int64_t)max(rows.whole[j], 0) * WIDTH + piece * 8;
        bytes[j] = rows.whole[j] >= 0 ? 16 : 0;
    }
    auto whole = [&](auto b) {
        repeat<0, 4>([&](auto j) {
            copy16<b.value * BLOCK_BYTES + j.value * 2048, b.value * BLOCK * 2>(to, from[j.value],
                                                                                bytes[j.value]);
        });
        copies_arrive(full + b.value * 8);
    };
    auto half = [&] {
        const int half_piece = lane % 4 + SIDE * 4, half_key = lane / 4;
        const uint32_t half_to = kv + half_key * 128 + ((half_piece ^ (half_key & 7)) << 4);

        repeat<0, 2>([&](auto j) {
            const int index = rows.half[j.value];

            copy16<4 * BLOCK_BYTES + j.value * 4096, 4 * BLOCK * 2>(
                half_to, a.kv + (int64_t)max(index, 0) * WIDTH + half_piece * 8,
                index >= 0 ? 16 : 0);
        });
        copies_arrive(full + 4 * 8);
    };
    if (SIDE)
        half();
    repeat<FIRST, FIRST + 4>(whole);
    if (!SIDE)
        half();
}

/* ---- products of warpgroups 0 and 1 ---------------------------------------------------------- */

/* acc = K M^T (keys x heads), M the Q or dO of NUMBER blocks, block by block as the keys land. */
template <int NUMBER>
__device__ __forceinline__ void multiply_keys(shared_backward &s, float (&acc)[32], uint32_t matrix,
                                              uint32_t parity)
{
    const uint32_t full = shared_address(s.kv_full);
    const uint32_t k = descriptor(shared_address(s.kv), 16), m = descriptor(matrix, 16);

#pragma unroll
    for (int b = 0; b < NUMBER; b++) {
        barrier_wait(full + b * 8, parity);
        fence_async();
        mma_begin();
#pragma unroll
        for (int step = 0; step < 4; step++) {
            const int at = b * (BLOCK_BYTES >> 4) + step * 2;

            mma<64, 0, 0>::ss(acc, k + at, m + at, b > 0 || step > 0);
        }
    }
    mma_commit();
    mma_wait<0>();
}

/* dQ of one warpgroup: 256 columns of whole blocks, 32 of block 4 */
struct query_gradient {
    float whole[128], half[16];
};

template <int SIDE>
__device__ __forceinline__ void add_query_gradient(shared_backward &s, query_gradient &dq,
                                                   bool first)
{
    const uint32_t kv = shared_address(s.kv);
    const uint32_t ds = descriptor(shared_address(s.ds), 8192);
    const uint32_t whole = descriptor(kv + (SIDE ? 5 : 0) * BLOCK_BYTES, 8192);
    const uint32_t half = descriptor(kv + 4 * BLOCK_BYTES + SIDE * 64, 8192);

    mma_begin();
#pragma unroll
    for (int step = 0; step < 4; step++) {
        mma<256, 1, 1>::ss(dq.whole, ds + step * 128, whole + step * 128, !first || step > 0);
        mma<32, 1, 1>::ss(dq.half, ds + step * 128, half + step * 128, !first || step > 0);
    }
    mma_commit();
    mma_wait<0>();
}

/* 32 columns as bf16: four lanes write 64 contiguous bytes of a head. */
__device__ __forceinline__ void store_gradient_part(__nv_bfloat16 *to, const float *e, int heads)
{
    const int head = fragment_row();

#pragma unroll
    for (int h = 0; h < 2; h++) {
        uint32_t w[4];

#pragma unroll
        for (int g = 0; g < 4; g++)
            w[g] = pack_bf16(e[4 * g + 2 * h], e[4 * g + 2 * h + 1]);
        quad_transpose(w);
        if (head + 8 * h < heads)
            __stcs((uint4 *)(to + h * 8 * WIDTH), make_uint4(w[0], w[1], w[2], w[3]));
    }
}

template <int SIDE>
__device__ __forceinline__ void store_query_gradient(const backward_arguments &a,
                                                     const query_gradient &dq, int64_t row)
{
    __nv_bfloat16 *to = a.dq + (row * a.heads + fragment_row()) * WIDTH + thread_index() % 4 * 8;

#pragma unroll
    for (int part = 0; part < 8; part++)
        store_gradient_part(to + (SIDE ? 320 : 0) + part * 32, dq.whole + part * 16, a.heads);
    store_gradient_part(to + (SIDE ? 288 : 256), dq.half, a.heads);
}

template <int SIDE>
__device__ __forceinline__ void zero_query_gradient(const backward_arguments &a, int64_t row)
{
    uint4 *to = (uint4 *)(a.dq + row * a.heads * WIDTH);

    for (int i = threadIdx.x; i < a.heads * WIDTH / 8; i += 2 * WARPGROUP)
        to[i] = make_uint4(0, 0, 0, 0);
}

/* ---- warpgroup 0: P -------------------------------------------------------------------------- */

__device__ __forceinline__ void publish_probabilities(const backward_arguments &a,
                                                      shared_backward &s, const float (&score)[32],
                                                      int64_t row, int first, int count,
                                                      uint32_t parity)
{
    const float scale_log2 = a.scale * LOG2_E;
    const int key = first + fragment_row();
    const bool valid[2] = {key < count, key + 8 < count};
    float sum[2] = {0, 0};
    uint32_t p[4][4];

#pragma unroll
    for (int step = 0; step < 4; step++)
#pragma unroll
        for (int r = 0; r < 4; r++) { /* registers: keys +0, +8; then the same 8 heads further */
            const int i = 8 * step + 2 * r;
            const float2 lse =
                *(const float2 *)&s.lse_log2[16 * step + r / 2 * 8 + fragment_column()];
            const float e0 = exp2_fast(fmaf(score[i], scale_log2, -lse.x));
            const float e1 = exp2_fast(fmaf(score[i + 1], scale_log2, -lse.y));

            sum[r % 2] += e0 + e1;
            p[step][r] = valid[r % 2] ? pack_bf16(e0, e1) : 0;
        }
    barrier_wait(shared_address(&s.p_used), parity ^ 1);
#pragma unroll
    for (int step = 0; step < 4; step++)
        store_matrices(fragment_address(shared_address(s.p), step), p[step][0], p[step][1],
                       p[step][2], p[step][3]);
    fence_async();
    barrier_arrive_warp(shared_address(&s.p_full));
    if (!a.target)
        return;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        sum[h] += __shfl_xor_sync(~0u, sum[h], 1);
        sum[h] += __shfl_xor_sync(~0u, sum[h], 2);
        if (fragment_column() == 0 && valid[h])
            a.target[row * a.k + key + 8 * h] = sum[h] / a.heads;
    }
}

/* ---- warpgroup 1: dS ------------------------------------------------------------------------- */

__device__ __forceinline__ void publish_score_gradients(const backward_arguments &a,
                                                        shared_backward &s, const float (&dp)[32],
                                                        uint32_t parity)
{
    uint32_t ds[4][4];

    barrier_wait(shared_address(&s.p_full), parity);
#pragma unroll
    for (int step = 0; step < 4; step++) {
        uint32_t p[4];

        load_matrices(fragment_address(shared_address(s.p), step), p);
#pragma unroll
        for (int r = 0; r < 4; r++) { /* registers: rows +0, +8; then the same 8 columns further */
            const int i = 8 * step + 2 * r;
            const float2 delta =
                *(const float2 *)&s.delta[16 * step + r / 2 * 8 + fragment_column()];
            const float2 e = __bfloat1622float2(*(const __nv_bfloat162 *)&p[r]);

            ds[step][r] =
                pack_bf16(e.x * (dp[i] - delta.x) * a.scale, e.y * (dp[i + 1] - delta.y) * a.scale);
        }
    }
    barrier_wait(shared_address(&s.used), parity ^ 1);
#pragma unroll
    for (int step = 0; step < 4; step++)
        store_matrices(fragment_address(shared_address(s.ds), step), ds[step][0], ds[step][1],
                       ds[step][2], ds[step][3]);
    fence_async();
    barrier_arrive_warp(shared_address(&s.ds_full));
}

/* ---- the row loop of warpgroups 0 and 1 ------------------------------------------------------ */

template <int SIDE>
__device__ __forceinline__ void start_row(const backward_arguments &a, shared_backward &s,
                                          int64_t row, uint32_t tile)
{
    const int thread = thread_index() % WARPGROUP;
    const uint64_t policy = policy_evict_first();

    barrier_wait(shared_address(&s.used), (tile & 1) ^ 1);
    if (SIDE == 0) {
        gather_heads<BLOCKS>(shared_address(s.q), a.q + row * a.heads * WIDTH, WIDTH, a.heads,
                             shared_address(&s.q_full), policy);
        if (thread < HEADS)
            s.lse_log2[thread] =
                thread < a.heads ? a.lse[row * a.heads + thread] * LOG2_E : INFINITY;
    } else {
        gather_heads<RANK / BLOCK>(shared_address(s.dout), a.dout + row * a.heads * RANK, RANK,
                                   a.heads, shared_address(&s.dout_full), policy);
        if (thread < HEADS)
            s.delta[thread] = thread < a.heads ? a.delta[row * a.heads + thread] : 0;
    }
    named_barrier(1 + SIDE, WARPGROUP);
}

template <int SIDE>
__device__ __forceinline__ void queries(const backward_arguments &a, shared_backward &s)
{
    uint32_t tile = 0, row_parity = 0;

    for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
        const int count = (int)uniform(a.counts[row]);
        const int32_t *selected = a.selected + row * a.k;
        query_gradient dq;

        if (a.started) {
            if (SIDE == 0 && threadIdx.x == 0)
                start_together(a.started, row, a.rows, count);
            named_barrier(3, 2 * WARPGROUP);
        }
        if (threadIdx.x == 0 && row + gridDim.x < a.rows) {
            prefetch_l2(a.q + (row + gridDim.x) * a.heads * WIDTH, a.heads * WIDTH * 2);
            prefetch_l2(a.dout + (row + gridDim.x) * a.heads * RANK, a.heads * RANK * 2);
        }
        if (SIDE == 0 && a.target)
            for (int i = count + threadIdx.x; i < a.k; i += WARPGROUP)
                a.target[row * a.k + i] = 0;
        if (count == 0) {
            zero_query_gradient<SIDE>(a, row);
            continue;
        }
        gather_keys<SIDE>(a, s, load_gather_rows(selected, 0, count));
        start_row<SIDE>(a, s, row, tile);
        barrier_wait(shared_address(SIDE ? &s.dout_full : &s.q_full), row_parity);
        row_parity ^= 1;
        for (int first = 0; first < count; first += TILE, tile++) {
            const uint32_t parity = tile & 1;
            float acc[32];

            if (SIDE == 0) {
                multiply_keys<BLOCKS>(s, acc, shared_address(s.q), parity);
                publish_probabilities(a, s, acc, row, first, count, parity);
            } else {
                multiply_keys<RANK / BLOCK>(s, acc, shared_address(s.dout), parity);
                publish_score_gradients(a, s, acc, parity);
            }
            const gather_rows next = load_gather_rows(selected, first + TILE, count);
            /* block 8 is read by side 1 only here, which otherwise never waits for it */
            if (SIDE == 1)
                barrier_wait(shared_address(&s.kv_full[8]), parity);
            barrier_wait(shared_address(&s.ds_full), parity);
            fence_async();
            add_query_gradient<SIDE>(s, dq, first == 0);
            if (first + TILE < count)
                gather_keys<SIDE>(a, s, next);
        }
        store_query_gradient<SIDE>(a, dq, row);
    }
}
