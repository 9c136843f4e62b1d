/* Sparse MLA forward for sm_90a: out = softmax(scale q k^T) v over each row's selected keys.
 *
 * A persistent block per multiprocessor works through rows; four warpgroups share one row's work:
 *   gather   copies Q and the selected key rows into a ring of 8 KiB blocks (two tiles of 64 keys)
 *   scores   S = Q K^T of tile t + 1 while it turns tile t into P = 2^(S - reference)
 *   output   two of them, each keeps 256 columns of O in registers: O += P V, with P in registers
 * Blocks of the ring are freed one by one as the products that read them end, so the gather never
 * waits for a whole tile. The softmax reference of a head moves only when the maximum rises by more
 * than 2^8: O is then scaled, which is rare, and P stays within bf16 and fp32 range in between. */
#include "gather.cuh"

using namespace hopper;

namespace {

constexpr int THREADS = 4 * WARPGROUP;
constexpr float REFERENCE_SLACK = 8.0f; /* log2 */
/* The RoPE block of the next tile is multiplied before the softmax of this one, to give the tensor
 * cores work; more does not help, as only a few wgmmas are queued before the warp stalls. */
constexpr int AHEAD = 1;
/* Blocks to wait for at once: a wait and its fence cost about two of a block's four wgmmas. */
constexpr int TOGETHER = 2;

struct shared_forward {
    uint8_t q[BLOCKS * BLOCK_BYTES];
    uint8_t ring[SLOTS * BLOCK_BYTES];
    uint8_t p[HEADS * TILE * 2]; /* as the registers of a warpgroup: [4][128 threads][16 B] */
    float factor[HEADS];         /* what to scale O by before this P; after the last P: 1 / sum */
    int rescale[4];              /* per warp: some factor is not 1 */
    uint64_t q_full[BLOCKS], q_empty;
    uint64_t full[SLOTS], empty[SLOTS];
    uint64_t p_full, p_empty;
    uint64_t next_scored; /* the next tile's products are under way, or there is none */
};

struct forward_arguments : gather_arguments {
    __nv_bfloat16 *out;
    float *lse;
    float scale_log2;
};

/* ---- scores ---------------------------------------------------------------------------------- */

/* acc (+)= Q K^T over positions FROM..TO-1 of the ring; FROM = 0 starts it. */
template <int FROM, int TO>
__device__ __forceinline__ void multiply_scores(shared_forward &s, float (&acc)[32], uint32_t tile,
                                                bool new_q, uint32_t q_parity)
{
    const uint32_t turn = uniform(tile & 3), slot = (turn & 1) * BLOCKS, over = turn >> 1;
    const uint32_t full = shared_address(s.full) + slot * 8, q_full = shared_address(s.q_full);
    /* turn >> 31 is 0: it keeps the compiler from holding all of Q's descriptors in registers */
    const uint32_t q = descriptor(shared_address(s.q), 16) + (turn >> 31);
    const uint32_t k = descriptor(shared_address(s.ring) + slot * BLOCK_BYTES, 16);

#pragma unroll
    for (int p = FROM; p < TO; p++) {
        if ((p - FROM) % TOGETHER == 0) {
#pragma unroll
            for (int i = p; i < p + TOGETHER && i < TO; i++) {
                if (new_q)
                    barrier_wait(q_full + i * 8, q_parity);
                barrier_wait(full + i * 8, over);
            }
            fence_async();
            mma_begin();
        }
#pragma unroll
        for (int step = 0; step < 4; step++) {
            const int at = p * (BLOCK_BYTES >> 4) + step * 2;

            mma<64, 0, 0>::ss(acc, q + at, k + at, p > 0 || step > 0);
        }
    }
    mma_commit();
}

struct softmax_state {
    float reference[2], sum[2]; /* of this thread's two heads; log2 domain; sum: its own columns */
};

/* P of one tile: exponentials packed as wgmma's A operand, to the output warpgroups together with
 * what they must scale O by. The scores stay as they are: registers of running products that other
 * instructions write would make the compiler serialise the products. */
template <bool PARTIAL>
__device__ __forceinline__ void softmax_tile(shared_forward &s, const float (&score)[32], int valid,
                                             float scale_log2, softmax_state &state,
                                             uint32_t p_parity)
{
    const int warp = threadIdx.x % WARPGROUP / 32, row = fragment_row(), column = fragment_column();
    float top[2] = {-INFINITY, -INFINITY}, factor[2];
    uint32_t p[16];

#pragma unroll
    for (int i = 0; i < 32; i++)
        if (!PARTIAL || 8 * (i / 4) + column + i % 2 < valid)
            top[i / 2 % 2] = fmaxf(top[i / 2 % 2], score[i]);
    bool moved = false;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        top[h] = fmaxf(top[h], __shfl_xor_sync(~0u, top[h], 1));
        top[h] = fmaxf(top[h], __shfl_xor_sync(~0u, top[h], 2)) * scale_log2;
        const bool move = top[h] > state.reference[h] + REFERENCE_SLACK;
        factor[h] = move ? exp2_fast(state.reference[h] - top[h]) : 1.0f;
        state.reference[h] = move ? top[h] : state.reference[h];
        state.sum[h] *= factor[h];
        moved |= move;
    }
    moved = __any_sync(~0u, moved);
#pragma unroll
    for (int i = 0; i < 32; i += 2) {
        float e[2];

#pragma unroll
        for (int c = 0; c < 2; c++) {
            const int h = i / 2 % 2;

            e[c] = exp2_fast(fmaf(score[i + c], scale_log2, -state.reference[h]));
            if (PARTIAL && 8 * (i / 4) + column + c >= valid)
                e[c] = 0;
            state.sum[h] += e[c];
        }
        p[i / 2] = pack_bf16(e[0], e[1]);
    }
    barrier_wait(shared_address(&s.p_empty), p_parity ^ 1);
#pragma unroll
    for (int step = 0; step < 4; step++)
        store_shared16(shared_address(s.p) + step * 2048 + threadIdx.x % WARPGROUP * 16,
                       p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3]);
    if (moved && column == 0) {
        s.factor[row] = factor[0];
        s.factor[row + 8] = factor[1];
    }
    if (threadIdx.x % 32 == 0)
        s.rescale[warp] = moved;
    barrier_arrive_warp(shared_address(&s.p_full));
}

/* After the last tile: lse, and 1 / sum for the output warpgroups. */
__device__ __forceinline__ void finish_scores(const forward_arguments &a, shared_forward &s,
                                              int64_t row, softmax_state &state, uint32_t p_parity)
{
    barrier_wait(shared_address(&s.p_empty), p_parity ^ 1);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int head = fragment_row() + 8 * h;
        float sum = state.sum[h];

        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (fragment_column() == 0) {
            s.factor[head] = 1.0f / sum;
            if (head < a.heads)
                a.lse[row * a.heads + head] = (state.reference[h] + log2f(sum)) * LN_2;
        }
    }
    barrier_arrive_warp(shared_address(&s.p_full));
}

struct scores_position {
    uint32_t tile, q_parity, p_parity;
};

/* A tile that another one follows: S of this one stands in `now` (still running), S of the next
 * goes to `next`, its first block before the softmax and the others after it. */
__device__ __forceinline__ void scores_tile(const forward_arguments &a, shared_forward &s,
                                            const float (&now)[32], float (&next)[32],
                                            softmax_state &state, scores_position &at)
{
    multiply_scores<0, AHEAD>(s, next, at.tile + 1, false, 0);
    mma_wait<1>();
    barrier_arrive_warp(shared_address(&s.empty[(at.tile & 1) * BLOCKS]));
    softmax_tile<false>(s, now, TILE, a.scale_log2, state, at.p_parity);
    at.p_parity ^= 1;
    at.tile++;
    multiply_scores<AHEAD, BLOCKS>(s, next, at.tile, false, 0);
    barrier_arrive_warp(shared_address(&s.next_scored));
}

__device__ __forceinline__ void scores_last_tile(const forward_arguments &a, shared_forward &s,
                                                 const float (&now)[32], int valid,
                                                 softmax_state &state, scores_position &at)
{
    mma_wait<0>();
    barrier_arrive_warp(shared_address(&s.q_empty));
    barrier_arrive_warp(shared_address(&s.empty[(at.tile & 1) * BLOCKS]));
    softmax_tile<true>(s, now, valid, a.scale_log2, state, at.p_parity);
    barrier_arrive_warp(shared_address(&s.next_scored));
    at.p_parity ^= 1;
    at.tile++;
}

__device__ __forceinline__ void scores(const forward_arguments &a, shared_forward &s)
{
    scores_position at = {0, 0, 0};

    for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
        const int count = (int)uniform(a.counts[row]), thread = threadIdx.x % WARPGROUP;
        softmax_state state = {{-INFINITY, -INFINITY}, {0, 0}};
        float even[32], odd[32];

        if (count == 0) {
            if (thread < a.heads)
                a.lse[row * a.heads + thread] = INFINITY;
            continue;
        }
        multiply_scores<0, BLOCKS>(s, even, at.tile, true, at.q_parity);
        int left = count;
        for (; left > 2 * TILE; left -= 2 * TILE) {
            scores_tile(a, s, even, odd, state, at);
            scores_tile(a, s, odd, even, state, at);
        }
        if (left > TILE) {
            scores_tile(a, s, even, odd, state, at);
            scores_last_tile(a, s, odd, left - TILE, state, at);
        } else {
            scores_last_tile(a, s, even, left, state, at);
        }
        at.q_parity ^= 1;
        finish_scores(a, s, row, state, at.p_parity);
        at.p_parity ^= 1;
    }
}

/* ---- output ---------------------------------------------------------------------------------- */

/* O / sum as bf16, 16 bytes a store: four lanes write 64 contiguous bytes of a head. */
__device__ __forceinline__ void store_output(const forward_arguments &a, float (&o)[4][32],
                                             int64_t row, int half, float scale0, float scale1)
{
    const int head = fragment_row(), lane = threadIdx.x % 4;
    __nv_bfloat16 *to = a.out + (row * a.heads + head) * RANK + half * (RANK / 2) + lane * 8;

#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int part = 0; part < 2; part++) {
                const float *e = o[i] + part * 16 + h * 2, by = h ? scale1 : scale0;
                uint32_t w[4];

#pragma unroll
                for (int g = 0; g < 4; g++)
                    w[g] = pack_bf16(e[4 * g] * by, e[4 * g + 1] * by);
                quad_transpose(w);
                if (head + 8 * h < a.heads)
                    __stcs((uint4 *)(to + h * 8 * RANK + i * BLOCK + part * 32),
                           make_uint4(w[0], w[1], w[2], w[3]));
            }
}

/* One block at once, so that the gather can refill it; the others once S of the next tile is under
 * way, to be the tensor cores' work during its softmax. */
__device__ __forceinline__ void output_tile(shared_forward &s, float (&o)[4][32], int half,
                                            uint32_t tile, bool first)
{
    const int warp = threadIdx.x % WARPGROUP / 32, thread = threadIdx.x % WARPGROUP;
    const uint32_t slot = uniform(tile & 1) * BLOCKS + 1 + half;
    const uint32_t v = descriptor(shared_address(s.ring) + slot * BLOCK_BYTES, 8192);
    uint32_t p[4][4];

#pragma unroll
    for (int step = 0; step < 4; step++)
        load_shared16(shared_address(s.p) + step * 2048 + thread * 16, p[step]);
    if (!first && s.rescale[warp]) {
        const float by[2] = {s.factor[fragment_row()], s.factor[fragment_row() + 8]};

#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int e = 0; e < 32; e++)
                o[i][e] *= by[e / 2 % 2];
    }
    barrier_arrive_warp(shared_address(&s.p_empty));
    mma_begin();
    auto multiply = [&](int i) {
#pragma unroll
        for (int step = 0; step < 4; step++)
            mma<64, 0, 1>::rs(o[i], p[step], v + i * (2 * BLOCK_BYTES >> 4) + step * 128,
                              !first || step > 0);
        mma_commit();
    };
    auto release = [&](int i) { barrier_arrive_warp(shared_address(&s.empty[slot + 2 * i])); };
    multiply(0);
    mma_wait<0>();
    release(0);
    barrier_wait(shared_address(&s.next_scored), tile & 1);
    mma_begin();
    multiply(1);
    multiply(2);
    multiply(3);
    mma_wait<2>();
    release(1);
    mma_wait<1>();
    release(2);
    mma_wait<0>();
    release(3);
}

__device__ __forceinline__ void zero_output(const forward_arguments &a, int64_t row, int half)
{
    uint4 *to = (uint4 *)(a.out + row * a.heads * RANK);

    for (int i = threadIdx.x % WARPGROUP + half * WARPGROUP; i < a.heads * RANK / 8;
         i += 2 * WARPGROUP)
        to[i] = make_uint4(0, 0, 0, 0);
}

__device__ __forceinline__ void output(const forward_arguments &a, shared_forward &s, int half)
{
    uint32_t tile = 0, parity = 0;
    float o[4][32];

    for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
        const int count = (int)uniform(a.counts[row]);

        if (count == 0) {
            zero_output(a, row, half);
            continue;
        }
        for (int first = 0; first < count; first += TILE, tile++, parity ^= 1) {
            barrier_wait(shared_address(&s.p_full), parity);
            output_tile(s, o, half, tile, first == 0);
        }
        barrier_wait(shared_address(&s.p_full), parity);
        parity ^= 1;
        const float scale0 = s.factor[fragment_row()], scale1 = s.factor[fragment_row() + 8];
        barrier_arrive_warp(shared_address(&s.p_empty));
        store_output(a, o, row, half, scale0, scale1);
    }
}

/* ---- kernel ---------------------------------------------------------------------------------- */

__device__ __forceinline__ void init_barriers(shared_forward &s)
{
    init_gather(s, 4);
    barrier_init(shared_address(&s.p_full), 4);
    barrier_init(shared_address(&s.next_scored), 4);
    barrier_init(shared_address(&s.p_empty), 8);
}

__global__ __launch_bounds__(THREADS, 1) void forward_kernel(const forward_arguments a)
{
    extern __shared__ __align__(1024) uint8_t memory[];
    shared_forward &s = *(shared_forward *)memory;
    const int role = __shfl_sync(~0u, threadIdx.x / WARPGROUP, 0);

    if (threadIdx.x == 0)
        init_barriers(s);
    __syncthreads();
    if (role == 0) {
        registers_fewer<40>();
        gather(a, s);
    } else if (role == 1) {
        registers_fewer<120>();
        scores(a, s);
    } else {
        registers_more<176>();
        output(a, s, role - 2);
    }
}

} /* namespace */

size_t hopper_forward_bytes(const struct sparse_mla *) { return sizeof(uint32_t); }

cudaError_t hopper_forward(cudaStream_t stream, const struct sparse_mla *shape, const void *q,
                           const void *kv, const int32_t *selected, const int32_t *counts,
                           void *out, float *lse, void *workspace)
{
    const forward_arguments a = {arguments_of_gather(shape, q, kv, selected, counts, workspace),
                                 (__nv_bfloat16 *)out, lse, shape->scale * LOG2_E};
    const cudaError_t status = reset_started(stream, a.started);

    if (status != cudaSuccess)
        return status;
    return launch_rows(stream, forward_kernel, THREADS, sizeof(shared_forward), a);
}
