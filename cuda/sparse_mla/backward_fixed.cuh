/* Warpgroup 2 of the sparse MLA backward in deterministic mode: dKV of each tile as integers (passes.cuh), 64 columns
 * at a time, added into global memory straight from the accumulator.
 *
 * The products are made the other way round than in fast mode, with columns as rows of the accumulator and keys as its
 * columns: a lane then holds columns c and c + 8 of a key, which share a word of the sums, and eight lanes add 64
 * contiguous bytes of a key. With keys as rows, lanes would first have to exchange half of all values. */
#pragma once
#include "backward.cuh"

/* acc = dKV^T (columns x keys) of one tile in a block: dO^T P + Q^T dS. The RoPE block has no values. */
template <bool VALUES>
__device__ __forceinline__ void multiply_columns(const shared_backward &s, float (&acc)[32], int block)
{
    const uint32_t at = block * (BLOCK_BYTES >> 4);
    const uint32_t dout = descriptor(shared_address(s.dout), 8192) + at;
    const uint32_t q = descriptor(shared_address(s.q), 8192) + at;
    const uint32_t p = descriptor(shared_address(s.p), 16);
    const uint32_t ds = descriptor(shared_address(s.ds), 16);

    mma_begin();
    if (VALUES)
#pragma unroll
        for (int step = 0; step < 4; step++)
            mma<64, 1, 0>::ss(acc, dout + step * 128, p + step * 2, step > 0);
#pragma unroll
    for (int step = 0; step < 4; step++)
        mma<64, 1, 0>::ss(acc, q + step * 128, ds + step * 2, VALUES || step > 0);
    mma_commit();
    mma_wait<0>();
}

/* Adding 1.5 2^23 rounds a float below 2^22 to an integer and leaves it in the low bits. */
constexpr float TO_INTEGER = 12582912.0f;

__device__ __forceinline__ uint32_t integer_bits(float x, float per_unit)
{
    return __float_as_uint(fmaf(x, per_unit, TO_INTEGER));
}

/* low + 2^32 high of two such integers */
__device__ __forceinline__ uint64_t pair_word(uint32_t low, uint32_t high)
{
    const uint64_t bias = 0x4b400000; /* the bits of TO_INTEGER */

    return ((uint64_t)high << 32 | low) - (bias << 32 | bias);
}

/* Adds to the sums of a key at `offset` bytes; NO_KEY adds nothing, and does not occur in a WHOLE tile. */
constexpr uint32_t NO_KEY = ~0u;

template <bool WHOLE>
__device__ __forceinline__ void add_word(char *sums, uint32_t offset, uint64_t word)
{
    if (WHOLE)
        asm volatile("red.global.add.u64 [%0], %1;" ::"l"(sums + offset), "l"(word) : "memory");
    else
        asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %2, %3;\n"
                     "@p red.global.add.u64 [%0], %1;\n}" ::"l"(sums + offset),
                     "l"(word), "r"(offset), "n"(NO_KEY)
                     : "memory");
}

/* Where a thread's words belong: word i is of element 4 (i / 2) + i % 2 (column c) and the next but one (c + 8). */
struct word_offsets {
    uint32_t at[16];
};

/* own: of this thread's words among a block's */
__device__ __forceinline__ word_offsets load_word_offsets(const int32_t *selected, int first, int count, uint32_t own)
{
    word_offsets to;

#pragma unroll
    for (int i = 0; i < 16; i++) {
        const int key = first + i / 2 * 8 + fragment_column() + i % 2;

        to.at[i] = key < count ? (uint32_t)__ldg(selected + key) * (WIDTH * 4) + own : NO_KEY;
    }
    return to;
}

__device__ __forceinline__ float larger(float x, float y) /* of |x|, |y|; NaN if one is */
{
    float z;

    asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(fabsf(x)), "f"(fabsf(y)));
    return z;
}

/* Each word picks its class. Coarser classes are few, so their sums lie at the same place of buffers of their own. */
__device__ __forceinline__ void add_any(const backward_arguments &a, const float (&acc)[32], const word_offsets &to,
                                        char *sums)
{
    const fixed_units units = *a.units;

#pragma unroll
    for (int i = 0; i < 16; i++) {
        const float x = acc[i / 2 * 4 + i % 2], y = acc[i / 2 * 4 + i % 2 + 2];
        const float size = larger(x, y);
        float per_unit = units.per_fine;
        int64_t away = 0;

        if (!(size <= units.fine)) {
            per_unit = size <= units.middle ? units.per_middle : units.per_coarse;
            away = size <= units.middle ? a.middle : a.coarse;
        }
        if (!(size <= units.bound))
            a.units->broken = 1;
        add_word<false>(sums + away, to.at[i], pair_word(integer_bits(x, per_unit), integer_bits(y, per_unit)));
    }
}

struct fine_class {
    float square, per_unit;
};

template <bool WHOLE>
__device__ __forceinline__ void add_columns(const backward_arguments &a, const float (&acc)[32], const word_offsets &to,
                                            char *sums, const fine_class &fine)
{
    float square[4] = {0, 0, 0, 0};

#pragma unroll
    for (int i = 0; i < 32; i++)
        square[i % 4] = fmaf(acc[i], acc[i], square[i % 4]);
    /* No element is above the root of the sum: a cheaper test than one of each, and stricter. */
    if (!__all_sync(~0u, square[0] + square[1] + (square[2] + square[3]) <= fine.square)) {
        add_any(a, acc, to, sums);
        return;
    }
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const float x = acc[i / 2 * 4 + i % 2], y = acc[i / 2 * 4 + i % 2 + 2];

        add_word<WHOLE>(sums, to.at[i], pair_word(integer_bits(x, fine.per_unit), integer_bits(y, fine.per_unit)));
    }
}

/* The loop stays a loop, so that its instructions stay cached. P is free for the next tile while the RoPE block, which
 * does not need it, still adds. */
template <bool WHOLE>
__device__ __forceinline__ void add_tile(const backward_arguments &a, shared_backward &s, const word_offsets &to,
                                         const fine_class &fine, uint32_t parity)
{
    constexpr int ROPE_BLOCK = RANK / BLOCK;
    char *sums = (char *)a.dkv;
    float acc[32];

    barrier_wait(shared_address(&s.ds_full), parity);
#pragma unroll 1
    for (int b = 0; b < ROPE_BLOCK; b++) {
        multiply_columns<true>(s, acc, b);
        if (b == ROPE_BLOCK - 1)
            barrier_arrive_warp(shared_address(&s.p_used));
        add_columns<WHOLE>(a, acc, to, sums, fine);
        sums += BLOCK * 4;
    }
    multiply_columns<false>(s, acc, ROPE_BLOCK);
    barrier_arrive_warp(shared_address(&s.used));
    add_columns<WHOLE>(a, acc, to, sums, fine);
}

__device__ __forceinline__ void key_gradients_fixed(const backward_arguments &a, shared_backward &s)
{
    /* the same in all lanes; with plain loads the compiler schedules the loop otherwise, which was not timed */
    const float most = __shfl_sync(~0u, a.units->fine, 0);
    const fine_class fine = {most * most, __shfl_sync(~0u, a.units->per_fine, 0)};
    const int thread = thread_index() % WARPGROUP;
    const uint32_t own = thread / 32 * 64 + thread % 32 / 4 * 8;
    uint32_t tile = 0;

    for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
        const int count = (int)uniform(a.counts[row]);
        const int32_t *selected = a.selected + row * a.k;

        for (int first = 0; first < count; first += TILE, tile++) {
            const word_offsets to = load_word_offsets(selected, first, count, own);

            if (first + TILE <= count)
                add_tile<true>(a, s, to, fine, tile & 1);
            else
                add_tile<false>(a, s, to, fine, tile & 1);
        }
    }
}
