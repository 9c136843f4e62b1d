/* The selection rule: score descending, then position ascending, emitted ascending (model.md 2.3). */
#pragma once

#include "device/element.cuh"

/* Of rows first .. first + rows - 1, from scores (row `first` first, `stride` elements a row), of positions below
 * `keys`. selected and length [all rows, k] and [all rows]; length NULL: not wanted. all_short: rows of k keys or
 * fewer take them all, whatever their scores. */
void select_rows(cuda_device *d, int64_t first, int64_t rows, int64_t keys, int64_t stride, int32_t k,
                 const float *scores, const int32_t *start, const int32_t *end, bool all_short, int32_t *selected,
                 int32_t *length);
