/* A row of bf16 logits and the block of threads that works on it. Each pass over a row is in 16-byte pieces; a pass
 * that follows another goes the other way, so that it begins with what is still in L2. Sums are fp32 and fixed in their
 * order. */
#pragma once

#include "head/head.cuh"

namespace {

constexpr int ROW_THREADS = 1024, PIECE = 8, IN_FLIGHT = 4; /* logits of a piece; pieces on their way to a thread */

/* ex2.approx: 2 ulp, 0 for -inf. The difference comes first, so that large logits lose nothing. */
__device__ __forceinline__ float exp_of(float x)
{
    float y;

    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.4426950408889634f));
    return y;
}

__device__ __forceinline__ void unpack(uint4 raw, float (&z)[PIECE])
{
    const uint32_t word[4] = {raw.x, raw.y, raw.z, raw.w};

#pragma unroll
    for (int i = 0; i < 4; i++) {
        z[2 * i] = __uint_as_float(word[i] << 16);
        z[2 * i + 1] = __uint_as_float(word[i] & 0xffff0000u);
    }
}

__device__ __forceinline__ uint4 pack(const float (&z)[PIECE])
{
    uint32_t word[4];

#pragma unroll
    for (int i = 0; i < 4; i++) {
        const __nv_bfloat162 two = __floats2bfloat162_rn(z[2 * i], z[2 * i + 1]);

        word[i] = *(const uint32_t *)&two;
    }
    return make_uint4(word[0], word[1], word[2], word[3]);
}

/* f(piece, its raw logits of each row) for each of the thread's pieces, several at a time; the last piece may be short:
 * what lies beyond the vocabulary is the padding between rows. */
template <bool DOWN, int ROWS, class F>
__device__ __forceinline__ void each_piece(const bf16 *const (&row)[ROWS], int vocabulary, F f)
{
    constexpr int AHEAD = IN_FLIGHT / ROWS;
    const int pieces = (vocabulary + PIECE - 1) / PIECE;

    for (int i = threadIdx.x; i < pieces; i += AHEAD * ROW_THREADS) {
        uint4 raw[AHEAD][ROWS];

#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            const int at = i + a * ROW_THREADS;

#pragma unroll
            for (int r = 0; r < ROWS && at < pieces; r++)
                raw[a][r] = ((const uint4 *)row[r])[DOWN ? pieces - 1 - at : at];
        }
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            const int at = i + a * ROW_THREADS;

            if (at < pieces) f(DOWN ? pieces - 1 - at : at, raw[a]);
        }
    }
}

struct softmax_sum {
    float most, sum; /* the largest logit; sum exp(logit - most) */
};

/* With one more logit. */
__device__ __forceinline__ softmax_sum joined(softmax_sum s, float logit)
{
    const float most = fmaxf(s.most, logit);

    return {most, (s.sum == 0 ? 0 : s.sum * exp_of(s.most - most)) + exp_of(logit - most)};
}

/* Of all logits of the row but the one at `without` (-1: all). */
__device__ __forceinline__ softmax_sum row_sum(const bf16 *row, int vocabulary, int without)
{
    const bf16 *const rows[1] = {row};
    float most = -INFINITY, sum = 0;

    each_piece<false>(rows, vocabulary, [&](int piece, const uint4 (&raw)[1]) {
        float z[PIECE], top;

        unpack(raw[0], z);
        if (piece == without / PIECE || piece == vocabulary / PIECE) {
#pragma unroll
            for (int i = 0; i < PIECE; i++)
                if (piece * PIECE + i == without || piece * PIECE + i >= vocabulary) z[i] = -INFINITY;
        }
        top = z[0];
#pragma unroll
        for (int i = 1; i < PIECE; i++) top = fmaxf(top, z[i]);
        if (top > most) {
            sum *= exp_of(most - top);
            most = top;
        }
        if (most == -INFINITY) return; /* nothing but the one left out */
#pragma unroll
        for (int i = 0; i < PIECE; i++) sum += exp_of(z[i] - most);
    });
    const float all = block_largest<ROW_THREADS>(most);
    return {all, block_sum<ROW_THREADS>(sum == 0 ? 0 : sum * exp_of(most - all))};
}

/* The cross-entropy of a row. The label's logit is made again in fp32, and kept apart from the sum over the others: a
 * loss near 0 then is as exact as one that is not. */
struct row_loss {
    softmax_sum others;
    float own, most, share, rest; /* the label's logit; of all: the largest; exp(own - most), and those of the others */
};

/* x: the row's state; w: the weights of its label, which is at `mine`. */
__device__ __forceinline__ row_loss loss_of(const bf16 *row, int vocabulary, int mine, const bf16 *x, const bf16 *w,
                                            int64_t width)
{
    row_loss r;
    float part = 0;

    for (int64_t j = threadIdx.x; j < width; j += ROW_THREADS) part += get(x[j]) * get(w[j]);
    r.own = block_sum<ROW_THREADS>(part);
    r.others = row_sum(row, vocabulary, mine);
    r.most = fmaxf(r.others.most, r.own);
    r.share = exp_of(r.own - r.most);
    r.rest = r.others.sum == 0 ? 0 : r.others.sum * exp_of(r.others.most - r.most);
    return r;
}

__device__ __forceinline__ float loss_value(const row_loss &r)
{
    return r.own == r.most ? log1pf(r.rest) : logf(r.rest + r.share) + (r.most - r.own);
}

/* What the gradient of a row takes: it is scale * exp(logit - most), at the label at_label. */
struct row_slope {
    float most, scale, at_label;
    int label; /* -1: zeros */
};

/* weight * softmax; at the label weight * (softmax - 1) = -weight * the others' share */
__device__ __forceinline__ row_slope slope_of(const row_loss &r, float weight, int mine)
{
    const float sum = r.rest + r.share;

    return {r.most, weight / sum, -weight * (r.rest / sum), weight == 0 ? -1 : mine};
}

/* The row becomes zeros. */
__device__ __forceinline__ void clear_row(bf16 *row, int vocabulary)
{
    for (int i = threadIdx.x; i < (vocabulary + PIECE - 1) / PIECE; i += ROW_THREADS) ((uint4 *)row)[i] = uint4{};
}

/* The row becomes its gradient. */
__device__ __forceinline__ void to_gradient(bf16 *row, int vocabulary, row_slope s)
{
    const bf16 *const rows[1] = {row};

    if (s.label < 0) {
        clear_row(row, vocabulary);
        return;
    }
    each_piece<true>(rows, vocabulary, [&](int piece, const uint4 (&raw)[1]) {
        float z[PIECE];

        unpack(raw[0], z);
#pragma unroll
        for (int i = 0; i < PIECE; i++) z[i] = s.scale * exp_of(z[i] - s.most);
        if (piece == s.label / PIECE) {
#pragma unroll
            for (int i = 0; i < PIECE; i++)
                if (i == s.label % PIECE) z[i] = s.at_label;
        }
        ((uint4 *)row)[piece] = pack(z);
    });
}

} /* namespace */
