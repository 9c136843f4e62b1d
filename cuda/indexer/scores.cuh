/* Scores of the lightning indexer for some rows at a time. */
#pragma once

#include "device/device.cuh"

struct score_call {
    struct indexer i;
    const void *q, *key;
    const float *weight;
    const int32_t *start, *end;
    bool wide; /* see dense/tile.cuh */
};

score_call score_call_of(const struct indexer *i, const void *q, const void *key, const float *weight,
                         const int32_t *start, const int32_t *end);

enum score_use {
    SCORES_ALL,     /* -inf where a key is not visible */
    SCORES_SEEN,    /* visible keys alone; the others are left as they are */
    SCORES_SELECT,  /* as SEEN, but rows that see no more than k keys are left out */
};

/* Rows first .. first + rows - 1 into scores, `stride` elements a row. A score's bits depend on its query,
 * weights and key alone, whatever the use. */
void score_rows(cuda_device *d, const score_call &c, int64_t first, int64_t rows, score_use use, int64_t stride,
                float *scores);

/* The same by Hopper's tensor cores (scores_hopper.cu); false: not of this shape, nothing done. active, laid out as
 * scores, if not NULL (with SCORES_SEEN): a bit for each head whose dot is above 0, see active_bit. */
bool hopper_score_rows(cuda_device *d, const score_call &c, int64_t first, int64_t rows, score_use use, int64_t stride,
                       float *scores, uint32_t *active = nullptr);

/* Heads 8 i + 2 c + b at 16 b + 4 c + i: lane c of four has its heads of an accumulator side by side. */
__device__ __forceinline__ int active_bit(int head) { return head % 2 * 16 + head % 8 / 2 * 4 + head / 8; }
