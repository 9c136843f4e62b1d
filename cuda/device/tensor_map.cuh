/* Tensor maps for Hopper's copy engine (TMA), made on the host. */
#pragma once

#include <cuda.h>

#include <cstdint>

/* Of bf16 rows [rows, columns], one after the other, in boxes of box_rows x 64 columns with 128-byte swizzle: the
 * blocks that sparse_mla/hopper.cuh multiplies. What lies outside reads as 0. false: the driver makes none. */
bool map_bf16_rows(CUtensorMap *map, const void *rows_of, int64_t rows, int64_t columns, int box_rows);

/* Of four dimensions, innermost first, bf16 (narrow) or fp32: pitch[i] elements from one step of dimension i + 1 to
 * the next. A box is 128 or 64 bytes wide, which is the width of its swizzle too. */
bool map_array(CUtensorMap *map, bool narrow, const void *at, const int64_t (&size)[4], const int64_t (&pitch)[3],
               const int (&box)[4]);
