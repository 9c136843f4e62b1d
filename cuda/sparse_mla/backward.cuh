/* What the three warpgroups of the sparse MLA backward share; backward.cu says how they divide the
 * work. */
#pragma once
#include "passes.cuh"

using namespace hopper;

struct shared_backward {
    uint8_t q[BLOCKS * BLOCK_BYTES];
    uint8_t dout[RANK / BLOCK * BLOCK_BYTES];
    uint8_t kv[BLOCKS * BLOCK_BYTES];
    uint8_t p[BLOCK_BYTES], ds[BLOCK_BYTES]; /* [keys][heads] */
    float lse_log2[HEADS], delta[HEADS];
    uint64_t kv_full[BLOCKS], q_full, dout_full;
    uint64_t p_full, ds_full;
    uint64_t p_used, used; /* warpgroup 2 has read p; and ds, q, dout as well */
};

struct backward_arguments {
    const __nv_bfloat16 *q, *kv, *dout;
    const int32_t *selected, *counts;
    const float *lse, *delta;
    __nv_bfloat16 *dq;
    float *dkv, *target;
    int64_t rows;
    int32_t heads, k;
    float scale;
    uint32_t *started;      /* NULL: blocks need not keep together */
    fixed_units *units;     /* deterministic mode */
    int64_t middle, coarse; /* from a fine sum to the others, in bytes */
};

/* Where lane l of a warp finds its row of the matrices that ld/stmatrix move, for step 0 of 4. */
__device__ __forceinline__ uint32_t fragment_address(uint32_t block, int step)
{
    const int thread = thread_index(), row = thread % WARPGROUP / 32 * 16 + thread % 16;

    return (block + row * 128 + ((thread % 32 / 16 ^ (row & 7)) << 4)) ^ step << 5;
}
