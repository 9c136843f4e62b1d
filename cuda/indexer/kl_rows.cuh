/* What kl_rows.cu and kl_held.cu share: rows of 256 bytes in shared memory, and what is made of them. */
#pragma once

#include "indexer/kl_selected.cuh"
#include "sparse_mla/hopper.cuh"

constexpr int GROUP = 16; /* keys at a time */
constexpr uint32_t ROW_BYTES = KL_WIDTH * 2;

/* 16-byte piece `piece` of row `row`: pieces swapped so that 8 rows lie in different banks. */
__device__ __forceinline__ uint32_t place(uint32_t base, int row, int piece)
{
    return base + row * ROW_BYTES + (piece ^ (row & 7)) * 16;
}

/* From a place in piece 0 or 1, the same two pieces times `step` on; the base is a multiple of 256 bytes. */
__device__ __forceinline__ uint32_t at_step(uint32_t place, int step) { return place ^ step * 32; }

__device__ __forceinline__ void load4(uint32_t from, uint32_t (&v)[4]) { hopper::load_matrices(from, v); }
__device__ __forceinline__ void load4_across(uint32_t from, uint32_t (&v)[4])
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"(from)
                 : "memory");
}

/* d[16,8] += a[16,16] b[16,8] */
__device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* TILES * 8 heads of the queries, from head `first` on, as the right operand: b[step][i] of eight of them. */
template <int TILES>
using query_operand = uint32_t[KL_WIDTH / 16][TILES][2];

template <int TILES>
__device__ __forceinline__ void load_operand(uint32_t queries, int first, query_operand<TILES> &b)
{
    const int lane = threadIdx.x % 32;
    const uint32_t from = place(queries, first + lane / 16 * 8 + lane % 8, lane / 8 % 2);

#pragma unroll
    for (int step = 0; step < KL_WIDTH / 16; step++)
#pragma unroll
        for (int half = 0; half < TILES / 2; half++) { /* 16 heads */
            uint32_t v[4];

            load4(at_step(from, step) + half * 16 * ROW_BYTES, v);
            b[step][half * 2][0] = v[0], b[step][half * 2][1] = v[1];
            b[step][half * 2 + 1][0] = v[2], b[step][half * 2 + 1][1] = v[3];
        }
}

/* Of queries in shared memory, heads piece * 8 + first .. + COUNT of one column: as kl_pairs.cu takes them, times their
 * weights. Each slice has a line of 32 heads for each column, its 16-byte pieces swapped. Columns are so ordered that a
 * lane's sums are neighbours: 8 j + 2 l + b is 8 l + 2 j + b. */
template <int COUNT>
__device__ __forceinline__ void write_query(const kl_call &c, int64_t row, uint32_t from, const float *weight, int at,
                                            int piece, int first)
{
    static_assert(KL_HEADS == 32 && KL_COLUMNS == 32, "four pieces a line, lines as 8 l + 2 j + b");
    const int slice = at / KL_COLUMNS, line = at % KL_COLUMNS;
    const int column = slice * KL_COLUMNS + line % 8 / 2 * 8 + line / 8 * 2 + line % 2;
    bf16 *to = c.queries + (slice * c.most_rows + row) * KL_TILE + line * KL_HEADS;
    float x[COUNT];

#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const int head = piece * 8 + first + i;
        uint16_t q;

        asm volatile("ld.shared.u16 %0, [%1];"
                     : "=h"(q)
                     : "r"(place(from, head, column / 8) + column % 8 * 2)
                     : "memory");
        x[i] = weight[head] * __uint_as_float((uint32_t)q << 16);
    }
    store(to + (piece ^ (line / 2 & 3)) * 8 + first, x);
}

/* A lane's share of the scores of 16 keys, lane / 4 and 8 more, by the heads of b, the first of which is `first`; and
 * which of its heads are active, as entries have them. */
template <int TILES>
__device__ __forceinline__ void score_group(uint32_t stage, const query_operand<TILES> &b, const float (&w)[TILES][2],
                                            int first, float (&score)[2], uint32_t (&active)[2])
{
    const int lane = threadIdx.x % 32;
    const uint32_t from = place(stage, lane % 16, lane / 16);
    float d[TILES][4] = {};

#pragma unroll
    for (int step = 0; step < KL_WIDTH / 16; step++) {
        uint32_t a[4];

        load4(at_step(from, step), a);
#pragma unroll
        for (int i = 0; i < TILES; i++) multiply(d[i], a, b[step][i][0], b[step][i][1]);
    }
#pragma unroll
    for (int key = 0; key < 2; key++) {
        score[key] = 0, active[key] = 0;
#pragma unroll
        for (int e = 0; e < 2 * TILES; e++) {
            const float dot = d[e / 2][key * 2 + e % 2];

            score[key] += w[e / 2][e % 2] * fmaxf(dot, 0);
            active[key] |= dot > 0 ? 1u << (e % 2 * 16 + e / 2) : 0;
        }
        active[key] <<= lane % 4 * 4 + first / 8;
    }
}

/* Of two values of each lane, those of one over the lanes that differ in bit `apart`: where it is 0 of x, else of y. */
template <class T, class F>
__device__ __forceinline__ T reduce_one(T x, T y, int apart, F f)
{
    const bool second = threadIdx.x & apart;

    return f(second ? y : x, __shfl_xor_sync(~0u, second ? x : y, apart));
}
struct either {
    __device__ __forceinline__ uint32_t operator()(uint32_t x, uint32_t y) const { return x | y; }
};

template <int TILES>
__device__ __forceinline__ void load_weights(const float *weight, float (&w)[TILES][2])
{
#pragma unroll
    for (int i = 0; i < TILES; i++) {
        const float2 two = __ldg((const float2 *)(weight + threadIdx.x % 4 * 2) + 4 * i);

        w[i][0] = two.x, w[i][1] = two.y;
    }
}

/* Of key number `key`, of a row of the chunk, which stands at `at` in its list. */
__device__ __forceinline__ void write_entry(const kl_call &c, int64_t row, int at, int key, float slope,
                                            uint32_t active)
{
    entry *to = c.entries + row * (c.dense ? c.tiles * KL_KEYS : c.i.k);

    to[c.dense ? key : at] = {pack_slope(slope, key), active};
    if (c.dense) c.filled[key / KL_KEYS * c.steps + row / KL_ROWS] = 1; /* whoever writes, writes 1 */
}

/* dq and dweight of a head by a warp, from sum_u g[u] active[h,u] key[u]: four columns a lane. */
struct head_inputs {
    float weight, q[4];
};
__device__ __forceinline__ int64_t head_at(int64_t t, int head)
{
    return (t * KL_HEADS + head) * KL_WIDTH + threadIdx.x % 32 * 4;
}
__device__ __forceinline__ head_inputs load_head(const kl_call &c, int64_t t, int head)
{
    head_inputs h = {c.weight[t * KL_HEADS + head]};

    load(c.q + head_at(t, head), h.q);
    return h;
}
__device__ __forceinline__ void write_head(const kl_call &c, int64_t t, int head, const head_inputs &h,
                                           const float4 &sum)
{
    const float out[4] = {h.weight * sum.x, h.weight * sum.y, h.weight * sum.z, h.weight * sum.w};

    store(c.dq + head_at(t, head), out);
    const float dweight = warp_reduce(h.q[0] * sum.x + h.q[1] * sum.y + h.q[2] * sum.z + h.q[3] * sum.w, plus());
    if (threadIdx.x % 32 == 0) c.dweight[t * KL_HEADS + head] = dweight;
}
