/* What the Hopper kernels share: 256 columns in both widths, bf16, tiles of 64 rows that lie in shared memory as blocks of
 * [64 rows][64 columns] (8 KiB, swizzled), products by wgmma.
 *
 * Backward: a block of threads has one tile of dk and dv (hopper_keys.cu), or of dq (hopper_queries.cu), all its terms in
 * order, so nothing is added by two; the price is that P and dS are made in both: 7 products instead of 5. */
#pragma once

#include "attention/dense.cuh"
#include "grouped_gemm/tensor.cuh"

namespace hopper {

constexpr int COLUMNS = 256, BLOCK = 64, BLOCKS = COLUMNS / BLOCK; /* columns; of a block of them */
constexpr uint32_t BLOCK_BYTES = 64 * BLOCK * 2, TILE_BYTES = BLOCKS * BLOCK_BYTES;
constexpr int WARPGROUP = 128;
constexpr float LOG2_E = 1.4426950408889634f;

/* [rows, heads, 256] as (column, row, head), in boxes of 64 x 64. */
struct attention_maps {
    CUtensorMap q, k, v, out, dout, dq, dk, dv; /* out: forward; the rest behind it: backward */
};

struct attention_call {
    int64_t rows, keys;
    int heads;
    float scale;
    const int32_t *start, *end;
    const float *lse, *delta;  /* these: backward */
    const range *seen;         /* [tiles of 64 rows] */
};

/* A wgmma accumulator: element i of a thread is row fragment_row() + 8 * (i / 2 % 2), column 8 * (i / 4) +
 * fragment_column() + i % 2. */
__device__ __forceinline__ int fragment_row()
{
    return threadIdx.x % WARPGROUP / 32 * 16 + threadIdx.x % 32 / 4;
}
__device__ __forceinline__ int fragment_column() { return threadIdx.x % 4 * 2; }

/* A [64, 64] accumulator as the left operand of products over its columns, 16 at a time. */
__device__ __forceinline__ void to_operand(const float (&from)[32], uint32_t (&to)[4][4])
{
#pragma unroll
    for (int step = 0; step < 4; step++)
#pragma unroll
        for (int i = 0; i < 4; i++) to[step][i] = pack_bf16(from[8 * step + 2 * i], from[8 * step + 2 * i + 1]);
}

/* d[64, 256] += A[64, 16] B[16, 256], A in registers, B read across its rows. */
__device__ __forceinline__ void multiply_registers(float (&d)[128], const uint32_t (&a)[4], uint32_t b)
{
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" L256
                 "}, {%128, %129, %130, %131}, %132, 1, 1, 1, 1;\n"
                 : F256
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(whole_descriptor(b)));
}

/* d[64, 64] = a b^T over 256 columns of two tiles in shared memory. Begins and commits a group. */
__device__ __forceinline__ void multiply_tiles(float (&d)[32], uint32_t a, uint32_t b)
{
    const uint32_t left = descriptor(a, 16), right = descriptor(b, 16);

    mma_begin();
#pragma unroll
    for (int step = 0; step < COLUMNS / 16; step++) {
        const uint32_t at = step / 4 * (BLOCK_BYTES >> 4) + step % 4 * 2;

        mma<64, 0, 0>::ss(d, left + at, right + at, step > 0);
    }
    mma_commit();
}

/* d[64, 256] += a b, a [64, 64] in registers, b a tile. Begins and commits a group. */
__device__ __forceinline__ void multiply_by_tile(float (&d)[128], const uint32_t (&a)[4][4], uint32_t b)
{
    const uint32_t right = descriptor(b, BLOCK_BYTES);

    mma_begin();
#pragma unroll
    for (int step = 0; step < 4; step++) multiply_registers(d, a[step], right + step * 128);
    mma_commit();
}

__device__ __forceinline__ void load_tile(uint32_t to, const CUtensorMap *map, int64_t row, int head, uint32_t barrier)
{
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) load_box(to + b * BLOCK_BYTES, map, b * BLOCK, (int)row, head, barrier);
}

/* Sums of a warpgroup into a tile of shared memory that nobody reads any more, and from there to memory. */
__device__ __forceinline__ void store_tile(const float (&sum)[128], uint32_t tile, const CUtensorMap *map, int64_t row,
                                           int head, int barrier)
{
    const int lane = threadIdx.x % 32, line = threadIdx.x % WARPGROUP / 32 * 16 + lane % 16, half = lane / 16;

#pragma unroll
    for (int piece = 0; piece < COLUMNS / 16; piece++) { /* 16 columns: two pieces of 16 bytes */
        const int at = piece % 4 * 2 + half;
        const float *e = sum + 8 * piece;

        store_matrices(tile + piece / 4 * BLOCK_BYTES + line * 128 + ((at ^ line % 8) << 4), pack_bf16(e[0], e[1]),
                       pack_bf16(e[2], e[3]), pack_bf16(e[4], e[5]), pack_bf16(e[6], e[7]));
    }
    fence_async();
    named_barrier(barrier, WARPGROUP);
    if (threadIdx.x % WARPGROUP == 0) {
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) store_box(map, b * BLOCK, (int)row, head, tile + b * BLOCK_BYTES);
        boxes_commit();
        boxes_written();
    }
}

void attend_forward(cudaStream_t stream, const attention_maps &maps, const attention_call &call, float *lse);
void attend_keys(cudaStream_t stream, const attention_maps &maps, const attention_call &call);
void attend_queries(cudaStream_t stream, const attention_maps &maps, const attention_call &call);

} /* namespace hopper */
