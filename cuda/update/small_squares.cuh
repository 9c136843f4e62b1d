/* Products of squares of up to SMALL_ROWS rows in shared memory: the steps of a segment. Squares are symmetric, so
 * the warpgroups compute their 64 x 64 blocks on and below the diagonal, and write those below it twice. */
#pragma once

#include "update/small_frame.cuh"

namespace small {

/* Which blocks a warpgroup computes: COUNT neighbours of block row ROW, from column 0 on; of 192 rows, the last
 * warpgroup has two on the diagonal. FIRST: as the blocks of all warpgroups are numbered. */
template <int N, int GROUP>
struct share {
    static constexpr bool APART = GROUP == 2;
    static constexpr int COUNT = N > 128 ? 2 : GROUP + 1, FIRST = N > 128 ? 2 * GROUP : GROUP, SUMS = COUNT * 32;

    static __device__ constexpr int row(int i) { return APART ? 2 * i : N > 128 ? GROUP + 1 : GROUP; }
    static __device__ constexpr int column(int i) { return APART ? 2 * i : i; }
};

constexpr uint32_t BLOCK_BYTES = 64 * 128; /* of a block of a square, and of 64 rows of a tile */

/* d += A[64, 16] B[16, N], B read across where TB */
#define STEP_PRODUCT(N, A, B, TB_)                                                                                     \
    template <int TB>                                                                                                  \
    __device__ __forceinline__ void multiply_step##N(float *d, uint32_t a, uint32_t b)                                 \
    {                                                                                                                  \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" L##N "}, "                             \
                     "%" #A ", %" #B ", 1, 1, 1, 0, %" #TB_ ";"                                                        \
                     : F##N                                                                                            \
                     : "l"(whole_descriptor(a)), "l"(whole_descriptor(b)), "n"(TB));                                   \
    }
STEP_PRODUCT(64, 32, 33, 34)
STEP_PRODUCT(128, 64, 65, 66)
#undef STEP_PRODUCT

/* d += a b of 16 columns of a and of b, which is read as its transpose: descriptors of the first block row of both */
template <class Share>
__device__ __forceinline__ void multiply_share(float *d, uint32_t a, uint32_t b)
{
    constexpr uint32_t BLOCK = BLOCK_BYTES / 16;

    if constexpr (Share::COUNT == 2 && !Share::APART)
        multiply_step128<0>(d, a + Share::row(0) * BLOCK, b);
    else
        repeat<0, Share::COUNT>([&](auto index) {
            constexpr int i = decltype(index)::value;

            multiply_step64<0>(d + i * 32, a + Share::row(i) * BLOCK, b + Share::column(i) * BLOCK);
        });
}

template <int COUNT>
__device__ __forceinline__ void clear(float (&d)[COUNT])
{
#pragma unroll
    for (int i = 0; i < COUNT; i++) d[i] = 0;
}

/* d += this warpgroup's share of x x^T, of the 64 columns at a place. */
template <class Share>
__device__ __forceinline__ void add_squares(float (&d)[Share::SUMS], uint32_t x)
{
    const uint32_t at = descriptor(x, 0);

    mma_begin();
#pragma unroll
    for (int k = 0; k < PIECE / 16; k++) multiply_share<Share>(d, at + k * 2, at + k * 2);
    mma_commit();
}

/* A warpgroup's share into a square, for all to read. */
template <int N, class Share>
__device__ __forceinline__ void write_share(const float (&d)[Share::SUMS], uint32_t square)
{
    using L = layout<N>;

#pragma unroll
    for (int i = 0; i < Share::COUNT; i++) {
        const int row = Share::row(i), column = Share::column(i);

        stage_halves<false>(d + i * 32, square + column * L::PIECE_BYTES + row * BLOCK_BYTES);
        if (row != column) stage_halves<true>(d + i * 32, square + row * L::PIECE_BYTES + column * BLOCK_BYTES);
    }
    fence_async();
    named_barrier(1, L::CONSUMERS);
}

__device__ __forceinline__ void send(uint32_t there, const float *v)
{
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(there), "f"(v[0]), "f"(v[1]), "f"(v[2]),
                 "f"(v[3])
                 : "memory");
}

/* Where the other's sums come. */
template <int N, class Share>
__device__ __forceinline__ uint32_t sent_to(const frame<N> &f)
{
    return f.slot(layout<N>::PARTIAL) + Share::FIRST * (64 * 64 * 4) + threadIdx.x % 128 * 16;
}

/* This block's sums to the other, which is past a barrier of the pair: nobody reads the places any more. */
template <int N, class Share>
__device__ __forceinline__ void send_sums(const frame<N> &f, const float (&d)[Share::SUMS])
{
    const uint32_t there = cluster_address(sent_to<N, Share>(f), f.rank ^ 1);

#pragma unroll
    for (int i = 0; i < Share::SUMS; i += 4) send(there + i * 512, d + i);
}

__device__ __forceinline__ void send_norm(part_norm *here, int other, const part_norm &norm)
{
    send(cluster_address(shared_address(here), other), (const float *)&norm);
}

/* After the next barrier: the first square = own d + other what the other sent. Both blocks get the same bits. */
template <int N, class Share>
__device__ __forceinline__ void add_sent(const frame<N> &f, float (&d)[Share::SUMS], float own, float other)
{
    const uint32_t sent = sent_to<N, Share>(f);

#pragma unroll
    for (int i = 0; i < Share::SUMS; i += 4) {
        uint32_t bits[4];

        load_shared16(sent + i * 512, bits);
#pragma unroll
        for (int j = 0; j < 4; j++)
            d[i + j] = __fadd_rn(__fmul_rn(own, d[i + j]), __fmul_rn(other, __uint_as_float(bits[j])));
    }
    write_share<N, Share>(d, f.square(0));
}

struct terms {
    float alpha, beta, gamma;
};

/* d = alpha d + beta S + gamma I of a block at (row, column) of S */
template <int N>
__device__ __forceinline__ void add_terms(float *d, uint32_t s, int row, int column, const terms &t)
{
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 % 4 * 16 + lane / 4;

    s += column * layout<N>::PIECE_BYTES + row * BLOCK_BYTES;
#pragma unroll
    for (int i = 0; i < 16; i++) { /* pairs of neighbours */
        const int r = first + i % 2 * 8, c = i / 2 * 8 + lane % 4 * 2;
        uint32_t bits;

        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(bits) : "r"(s + swizzled(r * 128 + c * 2)) : "memory");
        const float2 term = __half22float2(*(const __half2 *)&bits);
        d[2 * i] = t.alpha * d[2 * i] + t.beta * term.x + (row == column && r == c ? t.gamma : 0);
        d[2 * i + 1] = t.alpha * d[2 * i + 1] + t.beta * term.y + (row == column && r == c + 1 ? t.gamma : 0);
    }
}

/* c = alpha a b + beta a + gamma I, all symmetric. Nothing is written before all have read. */
template <int N, class Share>
__device__ __forceinline__ void multiply_squares(uint32_t a, uint32_t b, uint32_t c, const terms &t)
{
    using L = layout<N>;
    const uint32_t a0 = descriptor(a, 0), b0 = descriptor(b, 0);
    float d[Share::SUMS];

    clear(d);
    mma_begin();
#pragma unroll
    for (int i = 0; i < N / 16; i++) {
        const uint32_t at = i / 4 * (L::PIECE_BYTES / 16) + i % 4 * 2;

        multiply_share<Share>(d, a0 + at, b0 + at);
    }
    mma_commit();
    mma_wait<0>();
    settle(d);
    if (t.alpha != 1 || t.beta != 0 || t.gamma != 0)
#pragma unroll
        for (int i = 0; i < Share::COUNT; i++) add_terms<N>(d + i * 32, a, Share::row(i), Share::column(i), t);
    named_barrier(1, L::CONSUMERS);
    write_share<N, Share>(d, c);
}

/* From A, the first square: per step B = a I + b A + c A A, A = B A B, P = B P. The first B is P, in the second
 * square. */
template <int N, class Share>
__device__ __forceinline__ void run_steps(const frame<N> &f, const float (*coefficient)[3], int steps)
{
    const uint32_t gram = f.square(0), polynomial = f.square(1);

    for (int i = 0; i < steps; i++) {
        const uint32_t factor = i ? f.square(2) : polynomial;

        multiply_squares<N, Share>(gram, gram, factor, {coefficient[i][2], coefficient[i][1], coefficient[i][0]});
        if (i + 1 < steps) {
            multiply_squares<N, Share>(factor, gram, gram, {1, 0, 0});
            multiply_squares<N, Share>(gram, factor, gram, {1, 0, 0});
        }
        if (i) multiply_squares<N, Share>(factor, polynomial, polynomial, {1, 0, 0});
    }
}

} /* namespace small */
