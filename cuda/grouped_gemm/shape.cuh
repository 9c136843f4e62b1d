/* Tiles, the plan of a call, and what the launchers share. */
#pragma once
#include <cuda.h>
#include <cuda_bf16.h>

#include "grouped_gemm.h"

/* A pair of blocks (a cluster) computes 256 rows of outputs, each block 128 of them: up to 256
 * columns (COMMON) of operand B, which both need and each loads half of for both, and its own 128
 * of operand A. */
constexpr int OWN = 128, PAIR = 256, COMMON = 256;
constexpr int DEPTH =
    64; /* of a stage, in the direction that is summed: a swizzled row of 128 bytes */
constexpr int STEP = 16; /* of that, per wgmma */

/* Written on the device before the call's main kernel; `first` has groups + 1 entries. Tiles (of a
 * pair) are numbered by group; group g has numbers first[g] .. first[g+1] - 1. */
struct plan {
    int32_t next; /* the first tile that nobody has taken */
    int32_t unused[31];
    int32_t first[];
};

/* Tensor maps of the rows of one group: rows behind the group read as zeros. */
struct group_maps {
    CUtensorMap dy, x;
};

struct group_maps *maps_of(const struct grouped_gemm_shape *shape, void *workspace);

/* Makes the plan of a call whose output has `columns` pair tiles per 256 rows of a group (rows), or
 * `columns` tiles per group (weight: also the maps of the groups, from `whole` for all rows). */
cudaError_t plan_rows(cudaStream_t stream, const struct grouped_gemm_shape *shape, int columns,
                      const int32_t *offsets, struct plan *plan);
cudaError_t plan_weight(cudaStream_t stream, const struct grouped_gemm_shape *shape, int columns,
                        const int32_t *offsets, const struct group_maps *whole, const void *dy,
                        const void *x, struct plan *plan, struct group_maps *maps);

/* A map of a row-major tensor of 2 or 3 dimensions, innermost first, with 128-byte swizzle;
 * pitch: elements from one row to the next, stride: from one matrix to the next. */
bool encode_map(CUtensorMap *map, int type, const void *data, int dimensions, const int64_t *size,
                int64_t pitch, int64_t stride, int box_columns, int box_rows);

int pairs_of_blocks();

/* backward = false: forward. Both return an error where tensor maps cannot be made. */
cudaError_t hopper_rows(cudaStream_t stream, const struct grouped_gemm_shape *shape, bool backward,
                        const int32_t *offsets, const void *in, const void *w, void *out,
                        void *workspace);
cudaError_t hopper_weight(cudaStream_t stream, const struct grouped_gemm_shape *shape,
                          const int32_t *offsets, const void *dy, const void *x, void *dw,
                          void *workspace);
