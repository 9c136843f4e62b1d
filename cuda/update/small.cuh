/* All iterations of Muon on blocks of few rows in one launch. */
#pragma once

#include "update/products.cuh"

constexpr int SMALL_ROWS = 192, SEGMENT_STEPS = 3, MOST_SEGMENTS = (MUON_STEPS + SEGMENT_STEPS - 1) / SEGMENT_STEPS;

/* How many steps are taken on the square side before x is multiplied out. */
struct segments {
    int32_t count, steps[MOST_SEGMENTS];
};

struct small_blocks {
    int64_t batch, rows, columns; /* multiples of 8; rows <= SMALL_ROWS, rows <= columns */
    struct segments segments;
    const float (*coefficient)[3];
    const __half *x;
    __half *y; /* like x, for what is between */
    struct half_update update;
};

void small_blocks_run(cuda_device *device, const struct small_blocks *b);
