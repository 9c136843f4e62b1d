/* All of Muon on blocks of few rows in one launch. */
#pragma once

#include "update/muon.cuh"

#include <cuda_fp16.h>

constexpr int SMALL_ROWS = 192, SEGMENT_STEPS = 3, MOST_SEGMENTS = (MUON_STEPS + SEGMENT_STEPS - 1) / SEGMENT_STEPS;

/* How many steps are taken on the square side before x is multiplied out. */
struct segments {
    int32_t count, steps[MOST_SEGMENTS];
};

struct small_blocks {
    const struct muon *muon; /* one that small_takes */
    int64_t batch;           /* of these blocks; the arrays begin with the first of them */
    struct segments segments;
    muon_arrays arrays;
    __half *x; /* [batch,rows,columns], for what is between */
};

/* Of blocks that muon_takes_half: those of no more than SMALL_ROWS rows, in groups of as many. */
bool small_takes(const struct muon *m);
void small_blocks_run(cuda_device *device, const struct small_blocks *b);
