/* Forward and the gradient of rows on Hopper: out^T = W x^T, so that tokens are the columns of the
 * tensor cores' tiles. Their number in a tile is any multiple of 16 up to 256, hence a group of any
 * size wastes at most 15 columns a tile; the rows of a group are split evenly over its tiles. */
#include "pair.cuh"

using namespace pair;

namespace {

using rows_frame = frame<4, 2>;

constexpr int WIDTHS = COMMON / 16; /* of tiles, in tokens */

struct rows_maps {
    CUtensorMap tokens[WIDTHS]; /* [i]: boxes of 8 (i + 1) rows, half of what a pair needs */
    CUtensorMap weights;
};

struct rows_shape {
    int32_t width, depth; /* of the output rows, and what is summed */
    int32_t columns, groups, add;
};

__device__ __forceinline__ int tiles_of(int rows)
{
    return (rows + COMMON - 1) / COMMON;
}

/* message: first row, rows, group, pair column */
__device__ __forceinline__ int4 describe(const int32_t *offsets, int group, int number)
{
    const int from = offsets[group], rows = offsets[group + 1] - from, tiles = tiles_of(rows);
    const int tokens = ((rows + tiles - 1) / tiles + 15) / 16 * 16, tile = number % tiles;

    return make_int4(from + tile * tokens, min(tokens, rows - tile * tokens), group,
                     number / tiles);
}

template <bool BACKWARD>
__device__ __forceinline__ void load_tiles(const rows_frame &f, const rows_maps &maps,
                                           const rows_shape &s)
{
    const int rank = cluster_rank(), blocks = (s.depth + DEPTH - 1) / DEPTH;
    place<MESSAGES> mail;
    rows_frame::place at;

    for (;;) {
        const int4 t = next_tile_to_load(f, mail);

        if (t.z < 0)
            return;
        const int half = (t.y + 15) / 16 * 8, column = t.w * PAIR + rank * OWN;
        const CUtensorMap *tokens = &maps.tokens[half / 8 - 1];

        for (int i = 0; i < blocks; i++) {
            const uint32_t full = f.full(at.slot), a = f.a(at.slot);

            if (rank == 0 && i == max(0, blocks - LOOK_AHEAD))
                barrier_arrive(f.wanted());
            barrier_wait(f.empty(at.slot), at.parity ^ 1);
            barrier_expect(full, A_BYTES + half * 2 * DEPTH * 2);
            if (BACKWARD) {
                load_box(a, &maps.weights, column, i * DEPTH, t.z, full);
                load_box(a + BLOCK_BYTES, &maps.weights, column + 64, i * DEPTH, t.z, full);
            } else {
                load_box(a, &maps.weights, i * DEPTH, column, t.z, full);
            }
            load_box_pair(f.b(at.slot) + rank * half * DEPTH * 2, tokens, i * DEPTH,
                          t.x + rank * half, full);
            at.advance();
        }
    }
}

/* Where token `row` of a staged block has its 16-byte piece `piece`. */
__device__ __forceinline__ uint32_t staged(uint32_t block, int row, int piece)
{
    return block + row * 128 + ((piece ^ (row & 7)) << 4);
}

/* What a warpgroup writes: `rows` rows of 64 columns, of which the first `columns` exist. */
struct target {
    __nv_bfloat16 *out;
    int rows, columns, width;
    bool add;
};

/* ROWS (16, 32, 48 or 64) rows from row C on, from the sums v, through a block of shared memory */
template <int C, int ROWS>
__device__ __forceinline__ void write_some(float *v, const target &t, uint32_t block, int group)
{
    const int thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32;
    const int piece = thread % 8, first = thread / 8; /* of the rows this thread moves */
    const int part = lane / 8;                        /* of the four 8 x 8 blocks of a store */
    const int left = piece * 8 < t.columns ? t.rows - C - first : 0;
    __nv_bfloat16 *to = t.out + (int64_t)(C + first) * t.width + piece * 8;

    if (t.add) {
#pragma unroll
        for (int i = 0; i < ROWS; i += 16) {
            uint4 old = make_uint4(0, 0, 0, 0);

            if (i < left)
                old = *(const uint4 *)(to + (int64_t)i * t.width);
            store_shared16(staged(block, first + i, piece), old.x, old.y, old.z, old.w);
        }
        named_barrier(1 + group, 128);
    }
#pragma unroll
    for (int i = 0; i < ROWS; i += 16, v += 8) {
        const uint32_t at = staged(block, i + part / 2 * 8 + lane % 8, warp * 2 + part % 2);

        if (t.add) {
            uint32_t old[4];

            load_matrices_across(at, old);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                v[2 * j] += __uint_as_float(old[j] << 16);
                v[2 * j + 1] += __uint_as_float(old[j] & 0xffff0000u);
            }
        }
        store_matrices_across(at, pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]),
                              pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
    }
    named_barrier(1 + group, 128);
#pragma unroll
    for (int i = 0; i < ROWS; i += 16) {
        uint32_t w[4];

        load_shared16(staged(block, first + i, piece), w);
        if (i < left)
            *(uint4 *)(to + (int64_t)i * t.width) = make_uint4(w[0], w[1], w[2], w[3]);
    }
}

/* Two blocks of shared memory take turns, on from tile to tile (`turn`): whoever is past the
 * barrier of one block has been through with reading the other. */
template <int N>
__device__ __forceinline__ void write_rows(float (&d)[N / 2], const target &t, uint32_t staging,
                                           int group, int &turn)
{
    repeat<0, (N + 63) / 64>([&](auto i) {
        constexpr int C = 64 * decltype(i)::value;

        write_some<C, (N - C < 64 ? N - C : 64)>(d + C / 2, t, staging + (turn & 1) * BLOCK_BYTES,
                                                 group);
        turn++;
    });
}

template <int N, bool BACKWARD>
__device__ __forceinline__ void one_tile(const rows_frame &f, rows_frame::place &at, int group, int4 t,
                                         const rows_shape &s, __nv_bfloat16 *out, int &turn)
{
    const int column = t.w * PAIR + cluster_rank() * OWN + group * 64;
    const target to = {out + (int64_t)t.x * s.width + column, t.y, s.width - column, s.width,
                       s.add != 0};
    float d[N / 2];

    multiply<product<N, BACKWARD, 0>>(f, at, group, (s.depth + DEPTH - 1) / DEPTH, d);
    write_rows<N>(d, to, f.staging(group), group, turn);
}

/* one_tile of the width that holds the tile's rows */
template <int N, bool BACKWARD>
__device__ __forceinline__ void some_tile(const rows_frame &f, rows_frame::place &at, int group, int4 t,
                                          const rows_shape &s, __nv_bfloat16 *out, int &turn)
{
    if constexpr (N > 16) {
        if (t.y <= N - 16)
            return some_tile<N - 16, BACKWARD>(f, at, group, t, s, out, turn);
    }
    one_tile<N, BACKWARD>(f, at, group, t, s, out, turn);
}

template <bool BACKWARD>
__global__ __cluster_dims__(2)
    __launch_bounds__(THREADS, 1) void rows_kernel(const __grid_constant__ rows_maps maps,
                                                   const rows_shape s, const int32_t *offsets,
                                                   struct plan *plan, __nv_bfloat16 *out)
{
    extern __shared__ uint8_t shared[];
    const rows_frame f(shared);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);

    if (warp < 4) {
        registers_fewer<24>();
        if (warp == 0) {
            if (elected())
                load_tiles<BACKWARD>(f, maps, s);
        } else if (warp == 1 && cluster_rank() == 0) {
            deal_tiles(f, plan, s.groups,
                       [&](int group, int number) { return describe(offsets, group, number); });
        }
    } else {
        const int group = warp / 4 - 1;
        place<MESSAGES> mail;
        rows_frame::place at;
        int turn = 0;

        registers_more<240>();
        for (;;) {
            const int4 t = next_tile(f, mail);

            if (t.z < 0)
                break;
            some_tile<COMMON, BACKWARD>(f, at, group, t, s, out, turn);
        }
    }
    __syncwarp();
    cluster_barrier(); /* the other block may still reach into this one's memory */
}

bool encode_rows(rows_maps *maps, const struct grouped_gemm_shape *g, bool backward, const void *in,
                 const void *w)
{
    const int64_t depth = backward ? g->n : g->k, tokens[2] = {depth, g->rows};
    const int64_t weights[3] = {g->k, g->n, g->groups};

    for (int i = 0; i < WIDTHS; i++)
        if (!encode_map(&maps->tokens[i], GROUPED_GEMM_BF16, in, 2, tokens, depth, 0, DEPTH,
                        8 * (i + 1)))
            return false;
    return encode_map(&maps->weights, GROUPED_GEMM_BF16, w, 3, weights, g->k, g->stride, DEPTH,
                      backward ? DEPTH : OWN);
}

} /* namespace */

cudaError_t hopper_rows(cudaStream_t stream, const struct grouped_gemm_shape *g, bool backward,
                        const int32_t *offsets, const void *in, const void *w, void *out,
                        void *workspace)
{
    const int64_t width = backward ? g->k : g->n, depth = backward ? g->n : g->k;
    const rows_shape s = {(int32_t)width, (int32_t)depth, (int32_t)((width + PAIR - 1) / PAIR),
                          g->groups, g->add};
    auto kernel = backward ? rows_kernel<true> : rows_kernel<false>;
    struct plan *plan = (struct plan *)workspace;
    rows_maps maps;
    cudaError_t e;

    if (!encode_rows(&maps, g, backward, in, w))
        return cudaErrorNotSupported;
    e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, rows_frame::SHARED_BYTES);
    if (e == cudaSuccess)
        e = plan_rows(stream, g, s.columns, offsets, plan);
    if (e != cudaSuccess)
        return e;
    kernel<<<2 * pairs_of_blocks(), THREADS, rows_frame::SHARED_BYTES, stream>>>(maps, s, offsets, plan,
                                                                     (__nv_bfloat16 *)out);
    return cudaGetLastError();
}
