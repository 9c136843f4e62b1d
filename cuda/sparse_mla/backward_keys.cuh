/* Warpgroup 2 of the sparse MLA backward in fast mode: dKV of each tile, 64 columns at a time, added into
 * global memory straight from the accumulator. One accumulator suffices: the additions need no answer,
 * and while they drain the next products run. */
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

/* A lane's four values of 16 columns, (2q, 2q + 1, 2q + 8, 2q + 9), go side by side, so that four
 * lanes add 64 contiguous bytes; launch_order puts the columns right. */

template <int AT>
__device__ __forceinline__ void add_global4(float *to, float x, float y, float z, float w)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.u64 p, %0, 0;\n"
                 "@p red.global.add.v4.f32 [%0 + %5], {%1, %2, %3, %4};\n}" ::"l"(to),
                 "f"(x), "f"(y), "f"(z), "f"(w), "n"(AT)
                 : "memory");
}

/* Where this thread's two keys of a tile are summed; NULL beyond the end, where nothing is added. */
__device__ __forceinline__ void key_sums(const backward_arguments &a, const int32_t *selected,
                                         int first, int count, float *(&to)[2])
{
    const int shift = thread_index() % 4 * 4;

#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int at = first + fragment_row() + 8 * h;

        to[h] = at < count ? a.dkv + (int64_t)__ldg(selected + at) * WIDTH + shift : nullptr;
    }
}

template <int B>
__device__ __forceinline__ void add_block(float *const (&to)[2], const float (&acc)[32])
{
    repeat<0, 4>([&](auto sixteen) {
        repeat<0, 2>([&](auto h) {
            const float *e = acc + 8 * sixteen.value + 2 * h.value;

            add_global4<(B * BLOCK + sixteen.value * 16) * 4>(to[h.value], e[0], e[1], e[4], e[5]);
        });
    });
}

__device__ __forceinline__ void key_gradients(const backward_arguments &a, shared_backward &s)
{
    uint32_t tile = 0;

    for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
        const int count = (int)uniform(a.counts[row]);
        const int32_t *selected = a.selected + row * a.k;

        for (int first = 0; first < count; first += TILE, tile++) {
            uint32_t p[4][4];
            float *to[2];

            key_sums(a, selected, first, count, to);
            barrier_wait(shared_address(&s.ds_full), tile & 1);
            load_probabilities(s, p);
            barrier_arrive_warp(shared_address(&s.p_used));
            repeat<0, BLOCKS>([&](auto b) {
                float acc[32];

                multiply_key_gradient<b.value>(s, acc, p);
                if (b.value == BLOCKS - 1)
                    barrier_arrive_warp(shared_address(&s.used));
                add_block<b.value>(to, acc);
            });
        }
    }
}
