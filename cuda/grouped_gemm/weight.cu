/* The gradient of the weights on Hopper: dW_g = dy_g^T x_g, both operands read across by the tensor
 * cores. The rows of a group are read through tensor maps of its own, which end with the group: the
 * last stage is filled up with zeros, and of its four steps only those with rows are multiplied. */
#include "pair.cuh"

using namespace pair;

namespace {

/* Columns of a block of sums, and blocks of a warpgroup's 64 x COMMON sums */
template <class T>
constexpr int COLUMNS = 128 / sizeof(T);
template <class T>
constexpr int BLOCKS = COMMON / COLUMNS<T>;

/* fp32 gradients that are added to: in L2 by the copy engine, which is enough where groups have many
 * rows on average; or to the old ones, which come to shared memory while the tile is multiplied, and
 * take places that stages would have. */
constexpr int64_t MANY_ROWS = 1024;

using write_frame = frame<4, 2>;
constexpr int LOADED = 5, LEAVING = 1; /* blocks per warpgroup; and of these, on their way out */
using load_frame = frame<3, LOADED, GROUPS * LOADED>;

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

template <class Frame>
__device__ __forceinline__ void load_tiles(const Frame &f, const struct group_maps *maps)
{
    constexpr uint32_t HALF = 2 * BLOCK_BYTES; /* of operand B, which each block loads for both */
    const int rank = cluster_rank();
    place<MESSAGES> mail;
    typename Frame::place at;
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

/* 64 rows of 128 bytes of a warpgroup's sums, d, into a swizzled block */
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

/* Calls f(address, two sums that lie there) for all of a thread's in a block of fp32. */
template <class F>
__device__ __forceinline__ void each_pair(float *d, uint32_t block, F &&f)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int row = warp * 16 + lane / 4, quarter = lane % 4;

#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t at =
            block + row * 128 + ((i * 2 + quarter / 2) ^ (row & 7)) * 16 + quarter % 2 * 8;

        f(at, d + i * 4);
        f(at + 8 * 128, d + i * 4 + 2); /* the same row & 7 */
    }
}

__device__ __forceinline__ void stage_block(float *d, uint32_t block, float *)
{
    each_pair(d, block, [](uint32_t at, float *v) { store_shared8(at, v[0], v[1]); });
}

__device__ __forceinline__ void add_block(float *d, uint32_t block)
{
    each_pair(d, block, [](uint32_t at, float *v) {
        float a, b;

        asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(a), "=f"(b) : "r"(at) : "memory");
        v[0] += a;
        v[1] += b;
    });
    stage_block(d, block, (float *)nullptr);
}

/* Where a warpgroup's sums go */
struct target {
    const CUtensorMap *dw;
    int row, column, matrix;

    template <class T>
    __device__ void load(int i, uint32_t block, uint32_t barrier) const
    {
        barrier_expect(barrier, BLOCK_BYTES);
        load_box(block, dw, column + i * COLUMNS<T>, row, matrix, barrier);
    }
    template <class T>
    __device__ void store(int i, uint32_t block) const
    {
        store_box(dw, column + i * COLUMNS<T>, row, matrix, block);
    }
    template <class T>
    __device__ void add(int i, uint32_t block) const
    {
        add_box(dw, column + i * COLUMNS<T>, row, matrix, block);
    }
};

/* A warpgroup's sums, block by block through shared memory. Adding is L2's work: every element gets
 * one addition a call, so the order of the additions is no matter. */
template <class T>
__device__ __forceinline__ void write_sums(float (&d)[COMMON / 2], uint32_t staging, int group,
                                           const target &to, bool add)
{
    const bool first = threadIdx.x % 128 == 0;

#pragma unroll
    for (int i = 0; i < BLOCKS<T>; i++) {
        const uint32_t block = staging + i % write_frame::STAGING * BLOCK_BYTES;

        if (first)
            boxes_read<write_frame::STAGING - 1>(); /* the block's last contents have left */
        named_barrier(1 + group, 128);
        stage_block(d + i * COLUMNS<T> / 2, block, (T *)nullptr);
        fence_async();
        named_barrier(1 + group, 128);
        if (first) {
            add ? to.add<T>(i, block) : to.store<T>(i, block);
            boxes_commit();
        }
    }
}

/* The old sums of a warpgroup: its blocks form a ring. One thread asks for those AHEAD of the one
 * that is added to. */
struct old_sums {
    static constexpr int AHEAD = LOADED - LEAVING;

    const load_frame &f;
    int group;
    place<LOADED> at, next; /* next: to be asked for, known to that thread */

    __device__ uint32_t block(int slot) const { return f.staging(group) + slot * BLOCK_BYTES; }
    __device__ uint32_t full(int slot) const { return f.own(group * LOADED + slot); }
    __device__ void ask(const target &of, int i)
    {
        of.load<float>(i, block(next.slot), full(next.slot));
        next.advance();
    }

    /* Adds a tile's sums, and asks for the following tile's first blocks. */
    __device__ __forceinline__ void add(float (&d)[COMMON / 2], const target &to,
                                        const target *following)
    {
        const bool first = threadIdx.x % 128 == 0;

#pragma unroll
        for (int i = 0; i < BLOCKS<float>; i++) {
            if (first) {
                boxes_read<LEAVING - 1>(); /* the block that is asked for has left */
                if (i + AHEAD < BLOCKS<float>)
                    ask(to, i + AHEAD);
                else if (following)
                    ask(*following, i + AHEAD - BLOCKS<float>);
            }
            barrier_wait(full(at.slot), at.parity);
            add_block(d + i * COLUMNS<float> / 2, block(at.slot));
            fence_async();
            named_barrier(1 + group, 128);
            if (first) {
                to.store<float>(i, block(at.slot));
                boxes_commit();
            }
            at.advance();
        }
    }
};

/* What both kernels' warps but those that multiply do */
template <class Frame>
__device__ __forceinline__ void serve(const Frame &f, const weight_shape &s, const int32_t *offsets,
                                      struct plan *plan, const struct group_maps *maps, int warp)
{
    if (warp == 0) {
        if (elected())
            load_tiles(f, maps);
    } else if (warp == 1 && cluster_rank() == 0) {
        deal_tiles(f, plan, s.groups, [&](int group, int number) {
            return describe(offsets, s.across, group, number);
        });
    }
}

__device__ __forceinline__ target target_of(const CUtensorMap *dw, int4 t, int group)
{
    return {dw, t.y * PAIR + (int)cluster_rank() * OWN + group * 64, t.w * COMMON, t.z};
}

template <class Frame>
__device__ __forceinline__ void multiply_tile(const Frame &f, typename Frame::place &at, int group,
                                              int4 t, float (&d)[COMMON / 2])
{
    multiply<product<COMMON, 1, 1>>(f, at, group, blocks_of(t.x), t.x % (DEPTH / STEP), d);
}

template <class T>
__device__ __forceinline__ void write_tiles(const write_frame &f, const CUtensorMap *dw, int group,
                                            bool add)
{
    place<MESSAGES> mail;
    write_frame::place at;

    for (;;) {
        const int4 t = next_tile(f, mail);
        float d[COMMON / 2];

        if (t.z < 0)
            return;
        multiply_tile(f, at, group, t, d);
        write_sums<T>(d, f.staging(group), group, target_of(dw, t, group), add);
    }
}

__device__ __forceinline__ void add_tiles(const load_frame &f, const CUtensorMap *dw, int group)
{
    place<MESSAGES> mail;
    load_frame::place at;
    old_sums old = {f, group};
    int4 t = next_tile(f, mail);

    if (t.z >= 0 && threadIdx.x % 128 == 0)
        for (int i = 0; i < old_sums::AHEAD; i++)
            old.ask(target_of(dw, t, group), i);
    while (t.z >= 0) {
        float d[COMMON / 2];

        multiply_tile(f, at, group, t, d);
        const int4 following = next_tile(f, mail);
        const target next = target_of(dw, following, group);

        old.add(d, target_of(dw, t, group), following.z >= 0 ? &next : nullptr);
        t = following;
    }
}

template <class Frame, class T, bool ADDS_TO_OLD>
__global__ __cluster_dims__(2)
    __launch_bounds__(THREADS, 1) void weight_kernel(const __grid_constant__ CUtensorMap dw,
                                                     const weight_shape s, const int32_t *offsets,
                                                     struct plan *plan,
                                                     const struct group_maps *maps)
{
    extern __shared__ uint8_t shared[];
    const Frame f(shared);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);

    if (warp < 4) {
        registers_fewer<24>();
        serve(f, s, offsets, plan, maps, warp);
    } else {
        registers_more<240>();
        if constexpr (ADDS_TO_OLD)
            add_tiles(f, &dw, warp / 4 - 1);
        else
            write_tiles<T>(f, &dw, warp / 4 - 1, s.add != 0);
        if (threadIdx.x % 128 == 0)
            boxes_written();
    }
    __syncwarp();
    cluster_barrier(); /* the other block may still reach into this one's memory */
}

template <class Frame, class T, bool ADDS_TO_OLD>
cudaError_t launch(cudaStream_t stream, const CUtensorMap &dw, const weight_shape &s,
                   const int32_t *offsets, struct plan *plan, const struct group_maps *maps)
{
    auto kernel = weight_kernel<Frame, T, ADDS_TO_OLD>;
    cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         Frame::SHARED_BYTES);

    if (e != cudaSuccess)
        return e;
    kernel<<<2 * pairs_of_blocks(), THREADS, Frame::SHARED_BYTES, stream>>>(dw, s, offsets, plan,
                                                                          maps);
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
    if (narrow)
        return launch<write_frame, __nv_bfloat16, false>(stream, out, s, offsets, plan, maps);
    if (g->add && g->rows < MANY_ROWS * g->groups)
        return launch<load_frame, float, true>(stream, out, s, offsets, plan, maps);
    return launch<write_frame, float, false>(stream, out, s, offsets, plan, maps);
}
