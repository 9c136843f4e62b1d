/* Halves as the tensor cores take and give them, and weights that move by what they give. */
#pragma once

#include <cuda_fp16.h>

#include "device/element.cuh"
#include "update/products.cuh"

#include "grouped_gemm/grouped_gemm.h"
#include "grouped_gemm/shape.cuh"
#include "grouped_gemm/tensor.cuh"

namespace hopper {

__device__ __forceinline__ uint32_t pack_half(float low, float high)
{
    const __half2 both = __floats2half2_rn(low, high);

    return *(const uint32_t *)&both;
}

__device__ __forceinline__ uint32_t pack(float low, float high, __half) { return pack_half(low, high); }
__device__ __forceinline__ uint32_t pack(float low, float high, bf16) { return pack_bf16(low, high); }

/* 64 x 64 sums of a warpgroup, d[32], into the swizzled block, as they are or transposed. */
template <bool TRANSPOSED, class T = __half>
__device__ __forceinline__ void stage_halves(const float *d, uint32_t block)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, part = lane / 8;

#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float *v = d + i * 8;
        const int across = i * 2 + part / 2, down = warp * 2 + part % 2; /* the 8 x 8 that this lane addresses */
        const int row = (TRANSPOSED ? across : down) * 8 + lane % 8, piece = TRANSPOSED ? down : across;
        const uint32_t to = block + row * 128 + (piece ^ (row & 7)) * 16;

        const uint32_t a = pack(v[0], v[1], T()), b = pack(v[2], v[3], T());
        const uint32_t c = pack(v[4], v[5], T()), e = pack(v[6], v[7], T());

        if (TRANSPOSED)
            store_matrices_across(to, a, b, c, e);
        else
            store_matrices(to, a, b, c, e);
    }
}

/* Moves the weights at `row` (of a warpgroup) and `column` by its 64 x COLUMNS sums; what lies outside rows x columns
 * is left out. A thread has pairs of neighbouring columns of two rows. */
template <int COLUMNS, class W>
__device__ __forceinline__ void move_weights(const float (&d)[COLUMNS / 2], const half_update &u, int row, int column,
                                             int rows, int columns, int matrix)
{
    const int lane = threadIdx.x % 32, group_rows = (int)u.group_rows;
    const float lr = u.rates[RATE_LR], keep = 1.0f - lr * u.decay, reach = lr * u.scale;
    int64_t at[2];

    if (*u.coefficient < 0) return;
    row += threadIdx.x / 32 % 4 * 16 + lane / 4;
    column += lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int r = row + i * 8;

        at[i] = matrix * u.stride + r / group_rows * u.group_stride + (int64_t)(r % group_rows) * columns + column;
    }
#pragma unroll
    for (int from = 0; from < COLUMNS; from += 64) {
        float w[16][2];

#pragma unroll
        for (int i = 0; i < 16; i++) {
            const int c = from + i / 2 * 8;

            if (row + i % 2 * 8 < rows && column + c < columns) load((const W *)u.weight + at[i % 2] + c, w[i]);
        }
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const int c = from + i / 2 * 8;

            if (row + i % 2 * 8 >= rows || column + c >= columns) continue;
            w[i][0] = w[i][0] * keep - reach * d[from / 2 + i * 2];
            w[i][1] = w[i][1] * keep - reach * d[from / 2 + i * 2 + 1];
            store((W *)u.weight + at[i % 2] + c, w[i]);
            if (u.rounded) store((bf16 *)u.rounded + at[i % 2] + c, w[i]);
        }
    }
}

/* A map of `batch` matrices of `rows` x `columns` halves that follow one another, in boxes of 64 columns. */
static inline bool map_halves(CUtensorMap *map, const __half *at, int64_t batch, int64_t rows, int64_t columns,
                              int box_rows)
{
    const int64_t size[3] = {columns, rows, batch};

    /* 16 bits are 16 bits. */
    return encode_map(map, GROUPED_GEMM_BF16, at, 3, size, columns, rows * columns, 64, box_rows);
}

} /* namespace hopper */
