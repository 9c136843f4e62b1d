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

score_call score_call_of(const struct indexer *i, const void *q, const void *key, const float *weight, const int32_t *start,
                         const int32_t *end);

enum score_use {
    SCORES_ALL,     /* -inf where a key is not visible */
    SCORES_SEEN,    /* visible keys alone; the others are left as they are */
    SCORES_SELECT,  /* as SEEN, but rows that see no more than k keys are left out */
};

/* Rows first .. first + rows - 1 into scores, `stride` elements a row. A score's bits depend on its query, weights and key
 * alone, whatever the use. */
void score_rows(cuda_device *d, const score_call &c, int64_t first, int64_t rows, score_use use, int64_t stride,
                float *scores);

/* The same by Hopper's tensor cores (scores_hopper.cu); false: not of this shape, nothing done. */
bool hopper_score_rows(cuda_device *d, const score_call &c, int64_t first, int64_t rows, score_use use, int64_t stride,
                       float *scores);
