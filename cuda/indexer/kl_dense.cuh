/* The fast form of the loss over all visible keys: 32 bf16 heads of 128 (kl_dense.cu says what is computed).
 *
 * Three slabs [rows, stride] of a chunk: scores, the teacher's probabilities, which loss_kernel turns into slopes
 * (row_weight * (softmax - p), the gradient of the scores), and which heads are active (dots > 0), a bit each as in
 * scores.cuh. With these both gradients are one product each, without the dots:
 *     dq[t,h] = weight[t,h] sum_u slope[t,u] active[t,h,u] key[u]
 *     dkey[u] = sum_t,h slope[t,u] weight[t,h] active[t,h,u] q[t,h]
 * Their left operands are made in registers, slopes rounded to bf16 as over selected keys; q and key are bf16 as they
 * come, and sums are fp32. */
#pragma once

#include "attention/visible.cuh"
#include "device/element.cuh"
#include "indexer/scores.cuh"
#include "sparse_mla/hopper.cuh"

constexpr int DENSE_HEADS = 32, DENSE_WIDTH = 128;
constexpr int DENSE_GROUP = 8;      /* rows with one range of keys */
constexpr int DENSE_KEYS = 256;     /* of a block of kl_dense_keys.cu; slopes are whole to multiples of it */
constexpr int DENSE_MOST_PARTS = 32;

struct dense_slopes {
    int64_t all_rows, keys, first, rows; /* the chunk: `rows` from row `first` on */
    int64_t stride;             /* keys, rounded up to DENSE_KEYS */
    const bf16 *q, *key;
    const float *weight, *slope;
    const uint32_t *active;
    const range *seen;          /* [groups]: keys that any row of a group sees */
    bf16 *dq;
    float *dkey, *dweight;
    float *part;                /* [parts, stride, DENSE_WIDTH] */
    int parts;
};

void dense_rows(cuda_device *d, const dense_slopes &x); /* dq, dweight */
void dense_keys(cuda_device *d, const dense_slopes &x); /* dkey (+)= */
