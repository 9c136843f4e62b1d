/* The fast form of the loss over selected keys: 32 bf16 heads of 128 (kl_selected.cu says what is computed).
 *
 * Rows come in chunks. Of a row first the scores and which heads are active (dots > 0); then, the loss and its slopes
 * being known, dq and dweight. kl_rows.cu, a block a row, gathers the row's keys for both; kl_held.cu, a cluster of
 * blocks a row, once. Of each selected pair they leave an `entry`: what a row gives to a key needs no dots again, slope
 * and active heads say it all. dkey is then summed over the rows on the tensor cores: where rows select much of the
 * keys by kl_keys.cu, from a slab [rows of the chunk, keys] of entries, 0 elsewhere; where that would be zeros for the
 * most part by kl_pairs.cu, from the entries alone, whose keys kl_ranges.cu has looked up. Sums are made in a fixed
 * order everywhere. */
#pragma once

#include "device/element.cuh"
#include "indexer/scores.cuh"

constexpr int KL_HEADS = 32, KL_WIDTH = 128;
constexpr int KL_MOST_KEYS = 8192;                   /* of a row */
constexpr int KL_HELD_KEYS = 2048;                   /* of a row of kl_held.cu */

/* kl_keys.cu */
constexpr int KL_KEYS = 256;                         /* of a block, */
constexpr int KL_ROWS = 4;                           /* which takes so many rows at a time, */
constexpr int KL_MOST_STEPS = 4096;                  /* and so often in a chunk at most */

/* kl_pairs.cu */
constexpr int64_t KL_MOST_ENTRIES = 1 << 27;         /* of a chunk */
constexpr int KL_COLUMNS = 32;                       /* of dkey that a block sums, */
constexpr int KL_SLICES = KL_WIDTH / KL_COLUMNS;
constexpr int KL_UNIT = 160;                         /* for so many keys a warp, at most 256 */
constexpr int KL_UNITS = 4;
constexpr int KL_GROUP = KL_UNITS * KL_UNIT;
constexpr int KL_ROUND = 16;                         /* of which it takes so many of a row at a time */
constexpr int KL_TILE = KL_HEADS * KL_COLUMNS;       /* elements of a row's queries in a slice */

/* Of a selected pair: row_weight * (softmax - target), with the key's number in its unit in place of the lowest 8
 * bits; and a bit for each active head, see active_bit (scores.cuh). */
struct entry {
    uint32_t slope, active;
};
__device__ __forceinline__ uint32_t pack_slope(float slope, int key)
{
    return (__float_as_uint(slope) & ~255u) | (uint32_t)key % KL_UNIT;
}
__device__ __forceinline__ float slope_of(uint32_t packed) { return __uint_as_float(packed & ~255u); }
__device__ __forceinline__ int key_of(uint32_t packed) { return packed & 255; }

/* The entries of a row that belong to a group of keys: where they begin, and how many each unit has, a byte each. */
struct entry_range {
    uint32_t begin, counts;
};
__device__ __forceinline__ int count_of(entry_range r, int unit) { return r.counts >> unit * 8 & 255; }
__device__ __forceinline__ int rounds_of(entry_range r) /* until the fullest unit is through */
{
    int most = 0;

#pragma unroll
    for (int unit = 0; unit < KL_UNITS; unit++) most = max(most, count_of(r, unit));
    return (most + KL_ROUND - 1) / KL_ROUND;
}

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
    int64_t most_rows;        /* of any chunk */
    bool dense;               /* kl_keys.cu sums dkey */
    entry *entries;           /* [most_rows, k]; dense: [steps * KL_ROWS, tiles * KL_KEYS] */
    float *part;              /* sums of dkey: [blocks + groups, KL_SLICES, KL_GROUP, KL_COLUMNS];
                               * dense: [parts, tiles * KL_KEYS, KL_WIDTH] */
    /* dense */
    int64_t tiles, steps;     /* KL_KEYS keys each; KL_ROWS rows each */
    uint8_t *filled;          /* [tiles, steps]: whether any entry stands there */
    int parts;
    /* otherwise */
    int64_t groups;           /* KL_GROUP keys each */
    int blocks;               /* that share the rounds of a slice */
    bf16 *queries;            /* [KL_SLICES, most_rows, KL_TILE]: weight * q, laid out for kl_pairs.cu */
    entry_range *ranges;      /* [groups, most_rows]: kl_ranges.cu */
    int32_t *counts;          /* [groups]: rounds of the chunk */
    int32_t *before;          /* [groups + 1]: rounds of the groups before */
    uint32_t *rounds;         /* [rounds, KL_UNITS]: kl_pairs.cu */
    int32_t *source;          /* [rounds]: row of the chunk */
};

int kl_pair_blocks(const cuda_device *d); /* the blocks of a call */
void kl_rows(cuda_device *d, const kl_call &c);
void kl_held(cuda_device *d, const kl_call &c);
void kl_keys(cuda_device *d, const kl_call &c);
void kl_ranges(cuda_device *d, const kl_call &c); /* for kl_pairs */
void kl_pairs(cuda_device *d, const kl_call &c);
