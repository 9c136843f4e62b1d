/* The fast form of the loss over selected keys: 32 bf16 heads of 128 (kl_selected.cu says what is computed).
 *
 * Rows come in chunks. kl_rows.cu, a block a row, gathers the row's keys twice: for the scores and which heads are active
 * (dots > 0), then, the loss and its slopes being known, for dq and dweight. Of each selected pair it leaves `entry` in a slab
 * [rows of the chunk, keys], 0 elsewhere. kl_keys.cu, blocks of keys, then sums dkey over the rows on the tensor cores: what
 * a row gives to a key needs no dots again, slope and active heads say it all. Sums are made in a fixed order everywhere. */
#pragma once

#include "device/element.cuh"

constexpr int KL_HEADS = 32, KL_WIDTH = 128;
constexpr int KL_MOST_KEYS = 8192;     /* of a row */
constexpr int KL_KEYS = 256;           /* of a block of kl_keys.cu, */
constexpr int KL_ROWS = 4;             /* which takes so many rows at a time, */
constexpr int KL_MOST_STEPS = 4096;    /* and so often in a chunk at most */

/* Of a selected pair: row_weight * (softmax - target), and a bit for each active head: heads 8 i + 2 c + b at 16 b + 4 c + i,
 * which suits the fragments of matrix products. */
struct entry {
    float slope;
    uint32_t active;
};
__device__ __forceinline__ int active_bit(int head) { return head % 2 * 16 + head % 8 / 2 * 4 + head / 8; }

struct kl_call {
    struct indexer i;
    const bf16 *q, *key;
    const float *weight;
    const int32_t *selected;
    const float *target, *row_weight;
    float *kl;
    bf16 *dq;
    float *dkey, *dweight;
    int64_t first, rows;      /* the chunk */
    int64_t tiles, steps;     /* KL_KEYS keys each; KL_ROWS rows each */
    entry *slab;              /* [steps * KL_ROWS, tiles * KL_KEYS] */
    uint8_t *filled;          /* [tiles, steps]: whether any entry stands there */
    float *part;              /* [parts, tiles * KL_KEYS, KL_WIDTH]: sums of dkey */
    int parts;
};

void kl_rows(cuda_device *d, const kl_call &c);
void kl_keys(cuda_device *d, const kl_call &c);
