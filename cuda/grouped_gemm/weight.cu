/* The gradient of the weights on Hopper: dW_g = dy_g^T x_g, both operands read across by the tensor
 * cores. The rows of a group are read through tensor maps of its own, which end with the group: the
 * last stage is filled up with zeros, and of its four steps only those with rows are multiplied.
 *
 * A group of few rows gives few products for the bytes of its gradient. So a warpgroup has two sets
 * of sums: while one tile is multiplied into one, it writes the tile before out of the other, piece
 * by piece between the stages, and neither the tensor cores nor the ring ever wait for a tile's end. */
#include "pieces.cuh"

using namespace pair;

namespace {

using tile_product = product<WIDTH, 1, 1>;

struct weight_shape {
    int32_t across; /* pair tiles along k */
    int32_t groups;
};

/* message: steps of 16 rows, row of pair tiles (along n), group, column of them (along k) */
__device__ __forceinline__ int4 describe(const int32_t *offsets, int across, int group, int number)
{
    const int rows = offsets[group + 1] - offsets[group];

    return make_int4((rows + STEP - 1) / STEP, number / across, group, number % across);
}

constexpr int STEPS = DEPTH / STEP; /* of a stage */

/* A group without rows has one stage all the same, of zeros. */
__device__ __forceinline__ int stages_of(int steps)
{
    return max(1, (steps + STEPS - 1) / STEPS);
}

/* Each block of a pair loads its own columns of dy, and of x half the rows of a stage for both. */
__device__ __forceinline__ void load_tiles(const weight_frame &f, const struct group_maps *maps)
{
    const int rank = cluster_rank();
    place<MESSAGES> mail;
    weight_frame::place at;
    int mapped = -1;

    for (;;) {
        const int4 t = next_tile_to_load(f, mail);

        if (t.z < 0)
            return;
        const int stages = stages_of(t.x), wanted = max(0, stages - LOOK_AHEAD);
        const int row = t.y * PAIR + rank * OWN, column = t.w * WIDTH;
        const int from = t.x ? 0 : DEPTH; /* behind the one row that the maps of no rows have */
        const struct group_maps *m = maps + t.z;

        if (t.z != mapped) {
            map_acquire(&m->dy);
            map_acquire(&m->x);
            mapped = t.z;
        }
        for (int i = 0; i < stages; i++) {
            const uint32_t full = f.full(at.slot), a = f.a(at.slot);
            const uint32_t b = f.b(at.slot) + rank * (BLOCK_BYTES / 2);

            if (rank == 0 && i == wanted)
                barrier_arrive(f.wanted());
            barrier_wait(f.empty(at.slot), at.parity ^ 1);
            barrier_expect(full, weight_frame::STAGE_BYTES);
            load_box(a, &m->dy, row, from + i * DEPTH, full);
            load_box(a + BLOCK_BYTES, &m->dy, row + 64, from + i * DEPTH, full);
            for (int c = 0; c < WIDTH / 64; c++)
                load_box_pair(b + c * BLOCK_BYTES, &m->x, column + c * 64,
                              from + i * DEPTH + rank * (DEPTH / 2), full);
            at.advance();
        }
    }
}

using sums = float[WIDTH / 2];

/* STEPS products of one stage, of which the first one begins new sums if FIRST */
template <bool FIRST, int STEPS_>
__device__ __forceinline__ void multiply_steps(uint32_t a, uint32_t b, sums &d)
{
    mma_begin();
#pragma unroll
    for (int i = 0; i < STEPS_; i++)
        FIRST && i == 0 ? tile_product::start(d, a, b) : tile_product::run(d, a + i * 128, b + i * 128);
    mma_commit();
}

/* What a warpgroup multiplies, from tile to tile without a pause. */
struct multiplier {
    const weight_frame &f;
    int group;
    weight_frame::place at;
    int before = -1; /* the slot that is still being multiplied */

    /* Begins the ring's next stage, of which `steps` hold rows; what came before is then over. */
    template <bool FIRST>
    __device__ __forceinline__ void stage(sums &d, int steps)
    {
        const uint32_t next = at.slot * (weight_frame::STAGE_BYTES / 16);
        const uint32_t a = descriptor(f.a(0) + group * BLOCK_BYTES, BLOCK_BYTES) + next;
        const uint32_t b = descriptor(f.b(0), BLOCK_BYTES) + next;

        barrier_wait(f.full(at.slot), at.parity);
        if (steps >= STEPS)
            multiply_steps<FIRST, STEPS>(a, b, d);
        else if (steps == 3)
            multiply_steps<FIRST, 3>(a, b, d);
        else if (steps == 2)
            multiply_steps<FIRST, 2>(a, b, d);
        else
            multiply_steps<FIRST, 1>(a, b, d);
        mma_wait<1>();
        if (before >= 0)
            f.release(before);
        before = at.slot;
        at.advance();
    }
    __device__ __forceinline__ void finish()
    {
        mma_wait<0>();
        f.release(before);
    }
};

/* Multiplies a tile and writes the one before. */
template <class T, class Writer>
__device__ __forceinline__ void step(multiplier &m, Writer &w, int steps, sums &now, sums &done,
                                     const target &to, const target &following)
{
    const int stages = stages_of(steps);

    m.stage<true>(now, steps);
    settle(done);
    w.write(done, 0, to, following);
#pragma unroll
    for (int i = 1; i < PIECES<T>; i++) {
        if (i < stages)
            m.stage<false>(now, steps - i * STEPS);
        w.write(done + i * COLUMNS<T> / 2, i, to, following);
    }
    for (int i = PIECES<T>; i < stages; i++)
        m.stage<false>(now, steps - i * STEPS);
}

template <class T, class Writer>
__device__ __forceinline__ void write_last(multiplier &m, Writer &w, sums &done, const target &to)
{
    const target none = {0, 0, -1};

    m.finish();
    settle(done);
#pragma unroll
    for (int i = 0; i < PIECES<T>; i++)
        w.write(done + i * COLUMNS<T> / 2, i, to, none);
}

template <class T, class Writer>
__device__ __forceinline__ void multiply_tiles(const weight_frame &f, Writer &w, int group)
{
    multiplier m = {f, group};
    place<MESSAGES> mail;
    int4 t = next_tile(f, mail);
    target to = target_of(t, group);
    sums even, odd;

    if (t.z < 0)
        return;
    w.start(to);
    m.stage<true>(even, t.x);
    for (int i = 1; i < stages_of(t.x); i++)
        m.stage<false>(even, t.x - i * STEPS);

    auto tile = [&](sums &now, sums &done) {
        t = next_tile(f, mail);
        if (t.z < 0) {
            write_last<T>(m, w, done, to);
            return false;
        }
        const target following = target_of(t, group);

        step<T>(m, w, t.x, now, done, to, following);
        to = following;
        return true;
    };
    while (tile(odd, even) && tile(even, odd)) {
    }
}

/* Writer: how sums of type T leave */
template <class T, class Writer>
__global__ __cluster_dims__(2)
    __launch_bounds__(THREADS, 1) void weight_kernel(const __grid_constant__ CUtensorMap dw,
                                                     const weight_shape s, const int32_t *offsets,
                                                     struct plan *plan,
                                                     const struct group_maps *maps)
{
    extern __shared__ uint8_t shared[];
    const weight_frame f(shared);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);

    if (warp < 4) {
        registers_fewer<24>();
        if (warp == 0) {
            if (elected())
                load_tiles(f, maps);
        } else if (warp == 1 && cluster_rank() == 0) {
            deal_tiles(f, plan, s.groups, [&](int group, int number) {
                return describe(offsets, s.across, group, number);
            });
        }
    } else {
        const int group = warp / 4 - 1;
        Writer w = {f, &dw, group};

        registers_more<240>();
        multiply_tiles<T>(f, w, group);
        if (threadIdx.x % 128 == 0)
            boxes_written();
    }
    __syncwarp();
    cluster_barrier(); /* the other block may still reach into this one's memory */
}

template <class T, class Writer>
cudaError_t launch(cudaStream_t stream, const CUtensorMap &dw, const weight_shape &s,
                   const int32_t *offsets, struct plan *plan, const struct group_maps *maps)
{
    auto kernel = weight_kernel<T, Writer>;
    cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         weight_frame::SHARED_BYTES);

    if (e != cudaSuccess)
        return e;
    kernel<<<2 * pairs_of_blocks(), THREADS, weight_frame::SHARED_BYTES, stream>>>(dw, s, offsets, plan,
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
    const int down = (int)((g->n + PAIR - 1) / PAIR), across = (int)((g->k + WIDTH - 1) / WIDTH);
    const weight_shape s = {across, g->groups};
    struct plan *plan = (struct plan *)workspace;
    struct group_maps whole, *maps = maps_of(g, workspace);
    CUtensorMap out;
    cudaError_t e;

    if (!encode_map(&out, g->weight_type, dw, 3, weights, g->k, g->stride, narrow ? 64 : 32, 64) ||
        !encode_map(&whole.dy, GROUPED_GEMM_BF16, dy, 2, dy_size, g->n, 0, 64, DEPTH) ||
        !encode_map(&whole.x, GROUPED_GEMM_BF16, x, 2, x_size, g->k, 0, 64, DEPTH / 2))
        return cudaErrorNotSupported;
    e = plan_weight(stream, g, down * across, offsets, &whole, dy, x, plan, maps);
    if (e != cudaSuccess)
        return e;
    if (narrow)
        return g->add ? launch<__nv_bfloat16, adder<__nv_bfloat16>>(stream, out, s, offsets, plan, maps)
                      : launch<__nv_bfloat16, writer<__nv_bfloat16>>(stream, out, s, offsets, plan, maps);
    return g->add ? launch<float, adder<float>>(stream, out, s, offsets, plan, maps)
                  : launch<float, writer<float>>(stream, out, s, offsets, plan, maps);
}
