/* How the sums of the gradient of the weights leave: in pieces, through blocks of shared memory,
 * written, or added to old ones that the copy engine brought there ahead of time. */
#pragma once
#include "pair.cuh"

namespace pair {

/* Columns of a pair's tile: two sets of 64 x WIDTH sums must fit a warpgroup's registers. */
constexpr int WIDTH = 192;

/* Columns of a piece of 64 x WIDTH sums, which lies in a block of shared memory; and pieces */
template <class T>
constexpr int COLUMNS = 128 / sizeof(T);
template <class T>
constexpr int PIECES = WIDTH / COLUMNS<T>;

constexpr int SLOTS = 4; /* blocks of shared memory of a warpgroup for pieces */
using weight_frame = frame<4, SLOTS, GROUPS * SLOTS, WIDTH>;

/* ---- one piece --------------------------------------------------------------------------------
 * 64 rows of 128 bytes of a warpgroup's sums d, in a swizzled block; a warp has 16 of the rows. */

__device__ __forceinline__ void stage_piece(float *d, uint32_t block, __nv_bfloat16 *)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int part = lane / 8, row = warp * 16 + part % 2 * 8 + lane % 8;

#pragma unroll
    for (int i = 0; i < 4; i++) {
        float *v = d + i * 8;

        store_matrices(block + row * 128 + ((i * 2 + part / 2) ^ (row & 7)) * 16,
                       pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]),
                       pack_bf16(v[6], v[7]));
    }
}

__device__ __forceinline__ void add_piece(float *d, uint32_t block, __nv_bfloat16 *)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, row = warp * 16 + lane / 4;

#pragma unroll
    for (int i = 0; i < 16; i++) { /* eight columns of a row, then of the row 8 below */
        const uint32_t at = block + (row + i % 2 * 8) * 128 + (i / 2 ^ (row & 7)) * 16 + lane % 4 * 4;
        uint32_t old;

        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(old) : "r"(at) : "memory");
        d[i * 2] += __uint_as_float(old << 16);
        d[i * 2 + 1] += __uint_as_float(old & 0xffff0000u);
    }
    __syncwarp(); /* stage_piece() has each lane write others' sums */
}

/* fp32: a thread's pair i of sums lies in eight columns i % 4 of its first row (i < 4) or second.
 * Lanes of odd rows take the columns in another order, or every two rows would meet in the same
 * banks. Calls f(address, the pair there in lanes of even rows, in those of odd rows). */
template <class F>
__device__ __forceinline__ void each_pair(uint32_t block, F &&f)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int row = warp * 16 + lane / 4, quarter = lane % 4, swap = row % 2 * 2;

#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int piece = ((i % 4 ^ swap) * 2 + quarter / 2) ^ (row & 7);

        f(block + (row + i / 4 * 8) * 128 + piece * 16 + quarter % 2 * 8, i % 4 * 4 + i / 4 * 2,
          (i % 4 ^ 2) * 4 + i / 4 * 2);
    }
}

__device__ __forceinline__ void stage_piece(float *d, uint32_t block, float *)
{
    const bool odd = threadIdx.x / 4 % 2;

    each_pair(block, [&](uint32_t at, int i, int j) {
        asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(at), "f"(odd ? d[j] : d[i]),
                     "f"(odd ? d[j + 1] : d[i + 1])
                     : "memory");
    });
}

__device__ __forceinline__ void add_piece(float *d, uint32_t block, float *)
{
    const bool odd = threadIdx.x / 4 % 2;
    float old[16];

    each_pair(block, [&](uint32_t at, int i, int) {
        asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];"
                     : "=f"(old[i]), "=f"(old[i + 1])
                     : "r"(at)
                     : "memory");
    });
    each_pair(block, [&](uint32_t, int i, int j) {
        d[i] += odd ? old[j] : old[i];
        d[i + 1] += odd ? old[j + 1] : old[i + 1];
    });
}

/* Where a warpgroup's sums of a tile go; matrix < 0: nowhere. */
struct target {
    int row, column, matrix;
};

__device__ __forceinline__ target target_of(int4 t, int group)
{
    return {t.y * PAIR + (int)cluster_rank() * OWN + group * 64, t.w * WIDTH, t.z};
}

/* Writes pieces through a ring of blocks of shared memory. */
template <class T>
struct writer {
    const weight_frame &f;
    const CUtensorMap *dw;
    int group, slot = 0;

    __device__ uint32_t block(int i) const { return f.staging(group) + i * BLOCK_BYTES; }
    __device__ bool first() const { return threadIdx.x % 128 == 0; }

    __device__ __forceinline__ void start(const target &) {}
    __device__ __forceinline__ void write(float *d, int i, const target &to, const target &)
    {
        stage_piece(d, block(slot), (T *)nullptr);
        fence_async();
        if (first())
            boxes_read<SLOTS - 2>(); /* the next block's last piece has left */
        named_barrier(1 + group, 128);
        if (first()) {
            store_box(dw, to.column + i * COLUMNS<T>, to.row, to.matrix, block(slot));
            boxes_commit();
        }
        slot = slot + 1 < SLOTS ? slot + 1 : 0;
    }
};

/* Adds pieces to the old ones, which have come to the blocks ahead of time: of the ring's blocks at
 * most LEAVING are on their way out, and one thread has asked for all others. */
template <class T>
struct adder {
    static constexpr int LEAVING = 2, AHEAD = SLOTS - LEAVING;
    static_assert(AHEAD <= PIECES<T>, "old pieces are asked for of a tile and the next one");

    const weight_frame &f;
    const CUtensorMap *dw;
    int group;
    place<SLOTS> at, next; /* next: to be asked for */

    __device__ uint32_t block(int i) const { return f.staging(group) + i * BLOCK_BYTES; }
    __device__ uint32_t full(int i) const { return f.own(group * SLOTS + i); }
    __device__ bool first() const { return threadIdx.x % 128 == 0; }

    __device__ __forceinline__ void ask(const target &of, int i)
    {
        if (of.matrix < 0)
            return;
        barrier_expect(full(next.slot), BLOCK_BYTES);
        load_box(block(next.slot), dw, of.column + i * COLUMNS<T>, of.row, of.matrix, full(next.slot));
        next.advance();
    }
    /* with the first tile of all */
    __device__ __forceinline__ void start(const target &of)
    {
        if (first())
            for (int i = 0; i < AHEAD; i++)
                ask(of, i);
    }
    __device__ __forceinline__ void write(float *d, int i, const target &to, const target &following)
    {
        if (first()) {
            boxes_read<LEAVING - 1>(); /* the block that is asked for has left */
            i + AHEAD < PIECES<T> ? ask(to, i + AHEAD) : ask(following, i + AHEAD - PIECES<T>);
        }
        barrier_wait(full(at.slot), at.parity);
        add_piece(d, block(at.slot), (T *)nullptr);
        stage_piece(d, block(at.slot), (T *)nullptr);
        fence_async();
        named_barrier(1 + group, 128);
        if (first()) {
            store_box(dw, to.column + i * COLUMNS<T>, to.row, to.matrix, block(at.slot));
            boxes_commit();
        }
        at.advance();
    }
};

} /* namespace pair */
