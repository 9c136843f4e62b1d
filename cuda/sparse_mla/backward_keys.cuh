/* Warpgroup 2 of the sparse MLA backward: dKV of each tile, 64 columns at a time, added into global
 * memory straight from the accumulator. One accumulator suffices: the additions need no answer, and
 * while they drain the next products run. */
#pragma once
#include "backward.cuh"

/* P^T of a tile as wgmma's A operand in registers, each warp its 16 keys: half the reads of shared
 * memory, and its place is free at once. (dS^T as well would not fit.) */
__device__ __forceinline__ void load_probabilities(const shared_backward &s, uint32_t (&p)[4][4])
{
#pragma unroll
    for (int step = 0; step < 4; step++)
        load_matrices(fragment_address(shared_address(s.p), step), p[step]);
}

/* acc = dKV of one tile in block B: P^T dO + dS^T Q (the RoPE block has no values). */
template <int B>
__device__ __forceinline__ void multiply_key_gradient(const shared_backward &s, float (&acc)[32],
                                                      const uint32_t (&p)[4][4])
{
    constexpr bool VALUES = B < RANK / BLOCK;
    const uint32_t dout = descriptor(shared_address(s.dout) + B * BLOCK_BYTES, 8192);
    const uint32_t q = descriptor(shared_address(s.q) + B * BLOCK_BYTES, 8192);
    const uint32_t ds = descriptor(shared_address(s.ds), 16);

    mma_begin();
    if (VALUES)
#pragma unroll
        for (int step = 0; step < 4; step++)
            mma<64, 0, 1>::rs(acc, p[step], dout + step * 128, step > 0);
#pragma unroll
    for (int step = 0; step < 4; step++)
        mma<64, 0, 1>::ss(acc, ds + step * 2, q + step * 128, VALUES || step > 0);
    mma_commit();
    mma_wait<0>();
}

/* Where this thread's two keys of a tile (rows `flip` away from its own in the accumulator) are
 * summed; NULL beyond the end, where the additions below do nothing. */
__device__ __forceinline__ void key_sums(const backward_arguments &a, const int32_t *selected,
                                         int first, int count, int flip, int shift, float *(&to)[2])
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int at = first + (fragment_row() ^ flip) + 8 * h;

        to[h] = at < count ? a.dkv + (int64_t)__ldg(selected + at) * WIDTH + shift : nullptr;
    }
}

/* ---- fast mode ---------------------------------------------------------------------------------
 * A lane's four values of 16 columns, (2q, 2q + 1, 2q + 8, 2q + 9), go side by side, so that four
 * lanes add 64 contiguous bytes; launch_order puts the columns right. */

template <int AT>
__device__ __forceinline__ void add_global4(float *to, float x, float y, float z, float w)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.u64 p, %0, 0;\n"
                 "@p red.global.add.v4.f32 [%0 + %5], {%1, %2, %3, %4};\n}" ::"l"(to),
                 "f"(x), "f"(y), "f"(z), "f"(w), "n"(AT)
                 : "memory");
}

struct float_sums {
    float *to[2];

    __device__ __forceinline__ explicit float_sums(const backward_arguments &) {}
    __device__ __forceinline__ void start_tile(const backward_arguments &a, const int32_t *selected,
                                               int first, int count)
    {
        key_sums(a, selected, first, count, 0, thread_index() % 4 * 4, to);
    }
    template <int B>
    __device__ __forceinline__ void add(const backward_arguments &, const float (&acc)[32])
    {
        repeat<0, 4>([&](auto sixteen) {
            repeat<0, 2>([&](auto h) {
                const float *e = acc + 8 * sixteen.value + 2 * h.value;

                add_global4<(B * BLOCK + sixteen.value * 16) * 4>(to[h.value], e[0], e[1], e[4],
                                                                  e[5]);
            });
        });
    }
};

/* ---- deterministic mode (passes.cuh) -----------------------------------------------------------
 * Lanes 0-15 (rows 0-3 of 8) and 16-31 (rows 4-7) exchange pairs of columns, so that each addition
 * of a warp covers 64 contiguous bytes of four rows: `first` the lower four, `second`
 * the others. */

template <int AT>
__device__ __forceinline__ void add_global_pair(const char *to, int64_t away, int low, int high)
{
    const uint64_t both = (uint64_t)(uint32_t)(high + (low >> 31)) << 32 | (uint32_t)low;

    asm volatile("{\n.reg .pred p;\nsetp.ne.u64 p, %0, 0;\n"
                 "@p red.global.add.u64 [%1 + %3], %2;\n}" ::"l"(to),
                 "l"(to + away), "l"(both), "n"(AT)
                 : "memory");
}

__device__ __forceinline__ float larger(float x, float y) /* of |x|, |y|; NaN if one is */
{
    float z;

    asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(fabsf(x)), "f"(fabsf(y)));
    return z;
}

struct fixed_sums {
    char *first[2], *second[2];
    float fine, per_fine;

    __device__ __forceinline__ explicit fixed_sums(const backward_arguments &a)
        : fine(a.units->fine), per_fine(a.units->per_fine)
    {
    }
    __device__ __forceinline__ void start_tile(const backward_arguments &a, const int32_t *selected,
                                               int first_key, int count)
    {
        const int thread = thread_index(), upper = thread / 16 % 2;
        const int shift = thread % 4 * 2 + 8 * upper; /* upper lanes add the second 8 columns */
        float *own[2], *other[2];

        key_sums(a, selected, first_key, count, 0, shift, own);
        key_sums(a, selected, first_key, count, 4, shift, other);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            first[h] = (char *)(upper ? other[h] : own[h]);
            second[h] = (char *)(upper ? own[h] : other[h]);
        }
    }
    template <int B>
    __device__ __forceinline__ void add(const backward_arguments &a, const float (&acc)[32]) const
    {
        const bool upper = thread_index() & 16;
        float most = 0;

#pragma unroll
        for (int i = 0; i < 32; i++)
            most = larger(most, acc[i]);
        if (__all_sync(~0u, most <= fine)) {
            repeat<0, 4>([&](auto sixteen) {
                repeat<0, 2>([&](auto h) {
                    add_fine<(B * BLOCK + sixteen.value * 16) * 4>(
                        acc + 8 * sixteen.value + 2 * h.value, first[h.value], second[h.value],
                        upper);
                });
            });
        } else {
            const fixed_units units = *a.units;

            if (!(most <= units.bound))
                a.units->broken = 1;
            repeat<0, 4>([&](auto sixteen) {
                repeat<0, 2>([&](auto h) {
                    add_any<(B * BLOCK + sixteen.value * 16) * 4>(
                        a, units, acc + 8 * sixteen.value + 2 * h.value, first[h.value],
                        second[h.value], upper);
                });
            });
        }
    }

    /* e: columns 0, 1 and 8, 9 of the lane's row */
    template <int AT>
    __device__ __forceinline__ void add_fine(const float *e, char *low_row, char *high_row,
                                             bool upper) const
    {
        const int x0 = __float2int_rn(e[0] * per_fine), x1 = __float2int_rn(e[1] * per_fine);
        const int x8 = __float2int_rn(e[4] * per_fine), x9 = __float2int_rn(e[5] * per_fine);
        const int got0 = __shfl_xor_sync(~0u, upper ? x0 : x8, 16);
        const int got1 = __shfl_xor_sync(~0u, upper ? x1 : x9, 16);

        add_global_pair<AT>(low_row, 0, upper ? got0 : x0, upper ? got1 : x1);
        add_global_pair<AT>(high_row, 0, upper ? x8 : got0, upper ? x9 : got1);
    }

    /* The same where some contribution is not fine: each pair picks its class. Coarser classes are
     * few, so their sums lie at the same place of buffers of their own. */
    template <int AT>
    __device__ __forceinline__ void add_any(const backward_arguments &a, const fixed_units &units,
                                            const float *e, char *low_row, char *high_row,
                                            bool upper) const
    {
        const float middle = units.middle, per_middle = units.per_middle;
        const float per_coarse = units.per_coarse;
        const float left = larger(e[0], e[1]), right = larger(e[4], e[5]);
        const int left_class = (left <= fine ? 0 : 1) + (left <= middle ? 0 : 1);
        const int right_class = (right <= fine ? 0 : 1) + (right <= middle ? 0 : 1);
        const float by = left_class == 0 ? per_fine : left_class == 1 ? per_middle : per_coarse;
        const float by8 = right_class == 0 ? per_fine : right_class == 1 ? per_middle : per_coarse;
        const int x0 = __float2int_rn(e[0] * by), x1 = __float2int_rn(e[1] * by);
        const int x8 = __float2int_rn(e[4] * by8), x9 = __float2int_rn(e[5] * by8);
        const int got0 = __shfl_xor_sync(~0u, upper ? x0 : x8, 16);
        const int got1 = __shfl_xor_sync(~0u, upper ? x1 : x9, 16);
        const int got_class = __shfl_xor_sync(~0u, upper ? left_class : right_class, 16);
        const int low_class = upper ? got_class : left_class;
        const int high_class = upper ? right_class : got_class;
        const int64_t low_at = low_class == 0 ? 0 : low_class == 1 ? a.middle : a.coarse;
        const int64_t high_at = high_class == 0 ? 0 : high_class == 1 ? a.middle : a.coarse;

        add_global_pair<AT>(low_row, low_at, upper ? got0 : x0, upper ? got1 : x1);
        add_global_pair<AT>(high_row, high_at, upper ? x8 : got0, upper ? x9 : got1);
    }
};

/* ---- loop ------------------------------------------------------------------------------------ */

template <class SUMS>
__device__ __forceinline__ void key_gradients(const backward_arguments &a, shared_backward &s)
{
    SUMS sums(a);
    uint32_t tile = 0;

    for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
        const int count = (int)uniform(a.counts[row]);
        const int32_t *selected = a.selected + row * a.k;

        for (int first = 0; first < count; first += TILE, tile++) {
            uint32_t p[4][4];

            sums.start_tile(a, selected, first, count);
            barrier_wait(shared_address(&s.ds_full), tile & 1);
            load_probabilities(s, p);
            barrier_arrive_warp(shared_address(&s.p_used));
            repeat<0, BLOCKS>([&](auto b) {
                float acc[32];

                multiply_key_gradient<b.value>(s, acc, p);
                if (b.value == BLOCKS - 1)
                    barrier_arrive_warp(shared_address(&s.used));
                sums.template add<b.value>(a, acc);
            });
        }
    }
}
