/* The gradient of the weights on Hopper: dW_g = dy_g^T x_g, both operands read across by the tensor
 * cores. The rows of a group are read through tensor maps of its own, which end with the group: the
 * last stage is filled up with zeros, and of its four steps only those with rows are multiplied. */
#include "pair.cuh"

using namespace pair;

namespace {

struct weight_shape {
    int32_t across; /* pair tiles along k */
    int32_t groups, add;
};

/* message: steps of 16 rows, row of pair tiles (along n), group, column of them (along k) */
__device__ __forceinline__ int4 describe(const int32_t *offsets, int across, int group, int number)
{
    const int rows = offsets[group + 1] - offsets[group];

    return make_int4((rows + STEP - 1) / STEP, number / across, group, number % across);
}

__device__ __forceinline__ int blocks_of(int steps)
{
    return (steps + DEPTH / STEP - 1) / (DEPTH / STEP);
}

__device__ __forceinline__ void load_tiles(const frame &f, const struct group_maps *maps)
{
    constexpr uint32_t HALF = 2 * BLOCK_BYTES; /* of operand B, which each block loads for both */
    const int rank = cluster_rank();
    place<MESSAGES> mail;
    place<STAGES> at;
    int mapped = -1;

    for (;;) {
        const int4 t = next_tile_to_load(f, mail);

        if (t.z < 0)
            return;
        const int blocks = blocks_of(t.x), wanted = max(0, blocks - LOOK_AHEAD);
        const int row = t.y * PAIR + rank * OWN, column = t.w * PAIR + rank * 128;
        const struct group_maps *m = maps + t.z;

        if (t.z != mapped) {
            map_acquire(&m->dy);
            map_acquire(&m->x);
            mapped = t.z;
        }
        if (rank == 0 && blocks == 0)
            barrier_arrive(f.wanted());
        for (int i = 0; i < blocks; i++) {
            const uint32_t full = f.full(at.slot), a = f.a(at.slot), b = f.b(at.slot) + rank * HALF;

            if (rank == 0 && i == wanted)
                barrier_arrive(f.wanted());
            barrier_wait(f.empty(at.slot), at.parity ^ 1);
            barrier_expect(full, STAGE_BYTES);
            load_box(a, &m->dy, row, i * DEPTH, full);
            load_box(a + BLOCK_BYTES, &m->dy, row + 64, i * DEPTH, full);
            load_box_pair(b, &m->x, column, i * DEPTH, full);
            load_box_pair(b + BLOCK_BYTES, &m->x, column + 64, i * DEPTH, full);
            at.advance();
        }
    }
}

/* 64 rows of 128 bytes of a warpgroup's sums into a swizzled block: columns c .. of d */
__device__ __forceinline__ void stage_block(float *d, uint32_t block, __nv_bfloat16 *)
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

__device__ __forceinline__ void store_shared8(uint32_t to, float a, float b)
{
    asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(to), "f"(a), "f"(b) : "memory");
}

__device__ __forceinline__ void stage_block(float *d, uint32_t block, float *)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int row = warp * 16 + lane / 4, quarter = lane % 4;

#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t at =
            block + row * 128 + ((i * 2 + quarter / 2) ^ (row & 7)) * 16 + quarter % 2 * 8;

        store_shared8(at, d[i * 4], d[i * 4 + 1]);
        store_shared8(at + 8 * 128, d[i * 4 + 2], d[i * 4 + 3]); /* the same row & 7 */
    }
}

/* One warpgroup's 64 x 256 sums to (row, column) of dW_g, block by block through shared memory.
 * Adding is L2's work: every element gets one addition a call, so the order of the additions is no
 * matter. */
template <class T>
__device__ __forceinline__ void write_weight(float (&d)[COMMON / 2], uint32_t staging, int group,
                                             const CUtensorMap *dw, int row, int column, int matrix,
                                             bool add)
{
    constexpr int COLUMNS = 128 / sizeof(T); /* of a block */
    const bool first = threadIdx.x % 128 == 0;

#pragma unroll
    for (int i = 0; i < COMMON / COLUMNS; i++) {
        const uint32_t block = staging + i % STAGING_BLOCKS * BLOCK_BYTES;

        if (first)
            boxes_read<STAGING_BLOCKS - 1>(); /* the block's last contents have left */
        named_barrier(1 + group, 128);
        stage_block(d + i * COLUMNS / 2, block, (T *)nullptr);
        fence_async();
        named_barrier(1 + group, 128);
        if (first) {
            if (add)
                add_box(dw, column + i * COLUMNS, row, matrix, block);
            else
                store_box(dw, column + i * COLUMNS, row, matrix, block);
            boxes_commit();
        }
    }
}

template <class T>
__global__ __cluster_dims__(2)
    __launch_bounds__(THREADS, 1) void weight_kernel(const __grid_constant__ CUtensorMap dw,
                                                     const weight_shape s, const int32_t *offsets,
                                                     struct plan *plan,
                                                     const struct group_maps *maps)
{
    extern __shared__ uint8_t shared[];
    const frame f = open_frame(shared);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), rank = cluster_rank();

    if (warp < 4) {
        registers_fewer<24>();
        if (warp == 0) {
            if (elected())
                load_tiles(f, maps);
        } else if (warp == 1 && rank == 0) {
            deal_tiles(f, plan, s.groups, [&](int group, int number) {
                return describe(offsets, s.across, group, number);
            });
        }
    } else {
        const int group = warp / 4 - 1;
        place<MESSAGES> mail;
        place<STAGES> at;

        registers_more<240>();
        for (;;) {
            const int4 t = next_tile(f, mail);
            float d[COMMON / 2];

            if (t.z < 0)
                break;
            multiply<COMMON, 1, 1>(f, at, group, blocks_of(t.x), t.x % (DEPTH / STEP), d);
            write_weight<T>(d, f.staging + group * STAGING_BYTES, group, &dw,
                            t.y * PAIR + rank * OWN + group * 64, t.w * COMMON, t.z, s.add != 0);
        }
        if (threadIdx.x % 128 == 0)
            boxes_written();
    }
    __syncwarp();
    cluster_barrier(); /* the other block may still reach into this one's memory */
}

template <class T>
cudaError_t launch(cudaStream_t stream, const CUtensorMap &dw, const weight_shape &s,
                   const int32_t *offsets, struct plan *plan, const struct group_maps *maps)
{
    cudaError_t e = cudaFuncSetAttribute(weight_kernel<T>,
                                         cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES);

    if (e != cudaSuccess)
        return e;
    weight_kernel<T>
        <<<2 * pairs_of_blocks(), THREADS, SHARED_BYTES, stream>>>(dw, s, offsets, plan, maps);
    return cudaGetLastError();
}

} /* namespace */

cudaError_t hopper_weight(cudaStream_t stream, const struct grouped_gemm_shape *g,
                          const int32_t *offsets, const void *dy, const void *x, void *dw,
                          void *workspace)
{
    const int64_t weights[3] = {g->k, g->n, g->groups};
    const int64_t dy_size[2] = {g->n, g->rows}, x_size[2] = {g->k, g->rows};
    const bool narrow = g->weight_type == GROUPED_GEMM_BF16;
    const int down = (int)((g->n + PAIR - 1) / PAIR), across = (int)((g->k + PAIR - 1) / PAIR);
    const weight_shape s = {across, g->groups, g->add};
    struct plan *plan = (struct plan *)workspace;
    struct group_maps whole, *maps = maps_of(g, workspace);
    CUtensorMap out;
    cudaError_t e;

    if (!encode_map(&out, g->weight_type, dw, 3, weights, g->k, g->stride, narrow ? 64 : 32, 64) ||
        !encode_map(&whole.dy, GROUPED_GEMM_BF16, dy, 2, dy_size, g->n, 0, 64, DEPTH) ||
        !encode_map(&whole.x, GROUPED_GEMM_BF16, x, 2, x_size, g->k, 0, 64, DEPTH))
        return cudaErrorNotSupported;
    e = plan_weight(stream, g, down * across, offsets, &whole, dy, x, plan, maps);
    if (e != cudaSuccess)
        return e;
    return narrow ? launch<__nv_bfloat16>(stream, out, s, offsets, plan, maps)
                  : launch<float>(stream, out, s, offsets, plan, maps);
}
