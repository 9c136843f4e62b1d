/* What the Hopper kernels share: 256 columns in both widths, bf16, tiles of 64 rows that lie in shared memory as
 * blocks of [64 rows][64 columns] (8 KiB, swizzled), products by wgmma.
 *
 * Backward: a block of threads has one tile of dk and dv (hopper_keys.cu), all its terms in order, so nothing is added
 * by two. It leaves dS in memory, some heads at a time, from where dq is one more product (hopper_slopes.cu): 5 in all.
 * Where dS of a single head would take too much memory, dq makes P and dS anew (hopper_queries.cu): 7. */
#pragma once

#include "attention/dense.cuh"
#include "grouped_gemm/tensor.cuh"

namespace hopper {

constexpr int COLUMNS = 256, BLOCK = 64, BLOCKS = COLUMNS / BLOCK; /* columns; of a block of them */
constexpr uint32_t BLOCK_BYTES = 64 * BLOCK * 2, TILE_BYTES = BLOCKS * BLOCK_BYTES;
constexpr uint32_t SLOPE_BYTES = BLOCK_BYTES; /* dS^T of a tile of keys and one of rows, as it lies in shared memory */
constexpr int WARPGROUP = 128;
constexpr float LOG2_E = 1.4426950408889634f;

/* [rows, heads, 256] as (column, row, head), in boxes of 64 x 64. */
struct attention_maps {
    CUtensorMap q, k, v, out, dout, dq, dk, dv; /* out: forward; the rest behind it: backward */
};

/* Of 64 rows: of one head, and of all. Rows that do not exist see nothing. */
struct head_facts {
    float lse[TILE], delta[TILE]; /* lse times log2 e */
};
struct tile_facts {
    int start[TILE], end[TILE];
    int latest, earliest;         /* start and end, of the rows that see anything: between them every such row sees */
    int unused[2];                /* whole pieces of 16 bytes */
};

struct attention_call {
    int64_t rows, keys;
    int heads;
    float scale;
    const int32_t *start, *end;
    /* backward: */
    int first, count;             /* the heads of this launch */
    const range *seen;            /* [tiles of rows] */
    const tile_facts *of_tile;    /* [tiles of rows] */
    const head_facts *of_head;    /* [heads][tiles of rows] */
    unsigned char *slopes;        /* [count][tiles of rows][tiles of keys][SLOPE_BYTES]; NULL: no room */
};

/* Where dS of a tile of keys and one of rows lies; `head` of this launch. */
__device__ __forceinline__ unsigned char *slope_at(const attention_call &c, int head, int64_t row, int64_t key)
{
    const int64_t rows = (c.rows + TILE - 1) / TILE, keys = (c.keys + TILE - 1) / TILE;

    return c.slopes + ((head * rows + row / TILE) * keys + key / TILE) * SLOPE_BYTES;
}

/* What two tiles of rows see, the second of which may not exist: keys low .. high - 1, from a whole tile on. */
__device__ __forceinline__ range keys_of_two(const attention_call &c, int64_t row)
{
    range a = c.seen[row / TILE];

    if (row + TILE < c.rows) {
        const range b = c.seen[row / TILE + 1];

        if (a.low >= a.high)
            a = b;
        else if (b.low < b.high)
            a = {min(a.low, b.low), max(a.high, b.high)};
    }
    return {a.low / TILE * TILE, a.high};
}

/* Counts this warp at a barrier of `threads` without waiting: what it did before is seen by those who wait there. */
__device__ __forceinline__ void named_arrive(int id, int threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

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

/* The same product with the first HELD steps of 16 columns of a in registers. Those leave shared memory to others for
 * half of their time: with both operands there, a product this narrow takes all that it can deliver. */
template <int HELD>
__device__ __forceinline__ void multiply_held(float (&d)[32], const uint32_t (&held)[HELD][4], uint32_t a, uint32_t b)
{
    const uint32_t left = descriptor(a, 16), right = descriptor(b, 16);

    mma_begin();
#pragma unroll
    for (int step = 0; step < COLUMNS / 16; step++) {
        const uint32_t at = step / 4 * (BLOCK_BYTES >> 4) + step % 4 * 2;

        if (step < HELD)
            mma<64, 0, 0>::rs(d, held[step < HELD ? step : 0], right + at, step > 0);
        else
            mma<64, 0, 0>::ss(d, left + at, right + at, step > 0);
    }
    mma_commit();
}

/* Those steps of a tile. */
template <int HELD>
__device__ __forceinline__ void hold(uint32_t (&held)[HELD][4], uint32_t tile)
{
    const int lane = threadIdx.x % 32, line = threadIdx.x % WARPGROUP / 32 * 16 + lane % 16, half = lane / 16;

#pragma unroll
    for (int step = 0; step < HELD; step++)
        load_matrices(tile + step / 4 * BLOCK_BYTES + line * 128 + (((step % 4 * 2 + half) ^ line % 8) << 4),
                      held[step]);
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

/* Bytes that lie in a row, multiples of 16: to shared memory, counted at the barrier; and from it, see boxes_commit. */
__device__ __forceinline__ void load_bytes(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

__device__ __forceinline__ void store_bytes(void *to, uint32_t from, uint32_t bytes)
{
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
                 : "memory");
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

/* Barriers of stages that one thread fills and the warps of two warpgroups empty; for one thread. */
template <int N>
__device__ __forceinline__ void begin_stages(uint64_t (&full)[N], uint64_t (&empty)[N])
{
    for (int i = 0; i < N; i++) {
        barrier_init(shared_address(&full[i]), 1);
        barrier_init(shared_address(&empty[i]), 2 * WARPGROUP / 32);
    }
}

/* Of three warpgroups the first two work, and a warp of the last brings what they need. */
template <class Bring, class Work>
__device__ __forceinline__ void divide_work(Bring &&bring, Work &&work)
{
    if (threadIdx.x >= 2 * WARPGROUP) {
        registers_fewer<24>();
        if (threadIdx.x < 2 * WARPGROUP + 32) bring();
    } else {
        registers_more<240>();
        work();
    }
}

void attend_forward(cudaStream_t stream, const attention_maps &maps, const attention_call &call, float *lse);
/* Makes of_tile and of_head. */
void describe_rows(cudaStream_t stream, const attention_call &call, const void *out, const void *dout,
                   const float *lse);
void attend_keys(cudaStream_t stream, const attention_maps &maps, const attention_call &call);
void attend_slopes(cudaStream_t stream, const attention_maps &maps, const attention_call &call);
void attend_queries(cudaStream_t stream, const attention_maps &maps, const attention_call &call);

} /* namespace hopper */
