/* What runs before and after the backward kernel: delta, and the bookkeeping of dKV's sums.
 *
 * Fast mode sums dKV in fp32, whose order, and so whose last bits, vary from run to run.
 * Deterministic mode sums integers: addition of integers is associative, so any order gives the
 * same bits. A contribution x is added as round(x / unit), with one of three units by the size of
 * x:
 *
 *   fine    |x| <= fine               unit = fine 2^-b
 *   middle  |x| <= middle = 2^9 fine  unit = middle 2^-b
 *   coarse  otherwise                 unit = bound 2^-b
 *
 * each with a sum of its own; all four are powers of two. bound is no less than any contribution can be, and
 * b = 30 - log2(rows), so that no sum of one contribution per row leaves 32 bits, but 22 at most, so that adding a
 * constant in fp32 rounds x / unit to an integer. fine is max|dO| / 16: only keys with a large share of a head's
 * attention exceed it. At 8192 rows (b = 17) rounding changes a middle contribution by at most 2^-9 of itself, as bf16
 * does, and a fine one by 2^-22 max|dO|; the errors of a sum average out. Columns c and c + 8 of 16 share a 64-bit
 * word, low + 2^32 high, so that one 64-bit add moves both. */
#pragma once
#include "shape.cuh"

struct fixed_units {
    float fine, middle, bound;              /* upper ends of the three classes */
    float per_fine, per_middle, per_coarse; /* 1 / unit */
    uint32_t broken;                        /* a contribution was not finite: dkv becomes NaN */
};

/* delta[row, head] = sum of out dout */
void launch_delta(cudaStream_t stream, int64_t number, const void *out, const void *dout,
                  float *delta);
/* delta, and *units from bounds on |dout|, |q|, |kv|; scratch: three words */
void launch_delta_units(cudaStream_t stream, const struct sparse_mla *shape, const void *q,
                        const void *kv, const void *out, const void *dout, float *delta,
                        uint32_t *scratch, struct fixed_units *units);

/* Fast mode adds four values of 16 columns, (2q, 2q + 1, 2q + 8, 2q + 9), side by side; this puts
 * the columns in order. */
void launch_order(cudaStream_t stream, int64_t keys, float *dkv);
/* dkv, holding the fine sums, and coarser (the middle sums, then the coarse ones) to fp32 in dkv */
void launch_fixed_to_float(cudaStream_t stream, int64_t keys, float *dkv, const void *coarser,
                           const struct fixed_units *units);
