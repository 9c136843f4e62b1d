/* A pair of blocks of threads (a cluster) has one block of the matrix, each half of its columns, in tiles of 64.
 * Both make x and x x^T of their columns from gradient and momentum, exchange the sums, take the steps of a segment
 * on the same square in shared memory, and multiply their columns by the polynomial that comes of it: to x again and
 * to the next x x^T, or at last to weights. One thread loads, another stores; a warpgroup has 64 rows. */
#include "device/early.cuh"
#include "device/tensor_map.cuh"
#include "update/small_momentum.cuh"

using namespace small;

namespace {

/* ---- boxes of arrays as they lie: columns, rows of a group, groups, blocks ---- */

__device__ __forceinline__ void load_rows(uint32_t to, const CUtensorMap *map, int column, int matrix, uint32_t barrier)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2,%3,%3,%4}], [%5];" ::"r"(to),
                 "l"(map), "r"(column), "r"(0), "r"(matrix), "r"(barrier)
                 : "memory");
}

__device__ __forceinline__ void store_rows(const CUtensorMap *map, int column, int matrix, uint32_t from)
{
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1,%2,%2,%3}], [%4];" ::"l"(map),
                 "r"(column), "r"(0), "r"(matrix), "r"(from)
                 : "memory");
}

/* What was stored so far may be loaded by another thread after the next barrier. */
__device__ __forceinline__ void all_stored()
{
    boxes_written();
    asm volatile("fence.proxy.async;" ::: "memory");
}

/* The stage may be loaded again as far as its stores go. */
__device__ __forceinline__ void stored(uint32_t empty)
{
    boxes_commit();
    boxes_read<0>();
    barrier_arrive(empty);
}

/* Where a stage of columns has its tiles while they are multiplied: x; and at last the weights, in one tile or
 * (fp32) two, and what they are rounded to, in place of x. */
template <int N, class W>
struct column_tiles {
    static constexpr int PLACES = 1 + sizeof(W) / 2;

    static __device__ int stages(bool is_last) { return min(STAGES, layout<N>::FREE / (is_last ? PLACES : 1)); }
    static __device__ uint32_t place(const frame<N> &f, int stage, bool is_last, int i)
    {
        return f.slot(layout<N>::free(stage * (is_last ? PLACES : 1) + i));
    }
};

/* ---- the thread that loads ---- */

template <int N>
__device__ __forceinline__ void load_state(const frame<N> &f, const maps &m, const shape &s, place &at)
{
    const state_tiles<N> tiles(s.muon);
    const uint32_t bytes = (uint32_t)s.muon.rows * (tiles.bytes() / N);
    const int matrix = blockIdx.x / 2;

    at.begin(tiles.stages());
    each_tile((int)s.muon.columns, f.rank, false, [&](int column) {
        for (int half = 0; half < 2; half++, at.advance(), column += HALF_PIECE) {
            const uint32_t full = f.full(at.slot);

            barrier_wait(f.empty(at.slot), at.parity() ^ 1);
            barrier_expect(full, bytes);
            load_rows(tiles.gradient(f, at.slot), &m.gradient, column, matrix, full);
            load_rows(tiles.momentum(f, at.slot), &m.momentum, column, matrix, full);
        }
    });
}

template <int N, class W>
__device__ __forceinline__ void load_columns(const frame<N> &f, const maps &m, const shape &s, place &at, int segment)
{
    using tiles = column_tiles<N, W>;
    const bool is_last = segment + 1 == s.segments.count;
    const int matrix = blockIdx.x / 2;
    const uint32_t weights = is_last ? (uint32_t)s.muon.rows * PIECE * sizeof(W) : 0;

    at.begin(tiles::stages(is_last));
    barrier_wait(f.polynomial(), segment & 1);
    asm volatile("fence.proxy.async;" ::: "memory");
    each_tile((int)s.muon.columns, f.rank, !(segment & 1), [&](int column) {
        const uint32_t full = f.full(at.slot);

        barrier_wait(f.empty(at.slot), at.parity() ^ 1);
        barrier_expect(full, layout<N>::PIECE_BYTES + weights);
        load_box(tiles::place(f, at.slot, is_last, 0), &m.x, column, 0, matrix, full);
        for (int i = 1; is_last && i < tiles::PLACES; i++)
            load_rows(tiles::place(f, at.slot, true, i), &m.weight, column + (i - 1) * HALF_PIECE, matrix, full);
        at.advance();
    });
}

/* ---- the thread that stores ---- */

template <int N>
__device__ __forceinline__ void store_state(const frame<N> &f, const maps &m, const shape &s, place &at, place &x,
                                            bool again)
{
    const state_tiles<N> tiles(s.muon);
    const int matrix = blockIdx.x / 2;

    at.begin(tiles.stages());
    x.begin(X_SLOTS);
    each_tile((int)s.muon.columns, f.rank, false, [&](int column) {
        for (int half = 0; half < 2; half++, at.advance()) {
            barrier_wait(f.done(at.slot), at.parity());
            if (!again) store_rows(&m.momentum, column + half * HALF_PIECE, matrix, tiles.momentum(f, at.slot));
            stored(f.empty(at.slot));
        }
        barrier_wait(f.x_done(x.slot), x.parity());
        store_box(&m.x, column, 0, matrix, f.slot(layout<N>::MAKING + x.slot));
        stored(f.x_empty(x.slot));
        x.advance();
    });
    all_stored();
}

template <int N, class W>
__device__ __forceinline__ void store_columns(const frame<N> &f, const maps &m, const shape &s, place &at, int segment)
{
    using tiles = column_tiles<N, W>;
    const bool is_last = segment + 1 == s.segments.count;
    const int matrix = blockIdx.x / 2;

    at.begin(tiles::stages(is_last));
    each_tile((int)s.muon.columns, f.rank, !(segment & 1), [&](int column) {
        barrier_wait(f.done(at.slot), at.parity());
        if (!is_last || sizeof(W) == 4)
            (is_last ? store_rows(&m.rounded, column, matrix, tiles::place(f, at.slot, true, 0))
                     : store_box(&m.x, column, 0, matrix, tiles::place(f, at.slot, false, 0)));
        for (int i = 1; is_last && i < tiles::PLACES; i++)
            store_rows(&m.weight, column + (i - 1) * HALF_PIECE, matrix, tiles::place(f, at.slot, true, i));
        stored(f.empty(at.slot));
        at.advance();
    });
    all_stored();
}

/* A warp whose first thread loads or stores; the last two of the block do neither, and are at the pair's barriers
 * only. */
template <int N, class W>
__device__ __forceinline__ void serve(const frame<N> &f, const maps &m, const shape &s)
{
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0) - layout<N>::CONSUMERS / 32;
    const bool loads = warp == 0 && threadIdx.x % 32 == 0, stores = warp == 1 && threadIdx.x % 32 == 0;
    place at, x;

    for (bool again = false, whole = warp > 1; !whole; again = true) {
        if (loads) load_state(f, m, s, at);
        if (stores) store_state(f, m, s, at, x, again);
        __syncwarp();
        named_barrier(0, layout<N>::DECIDING);
        whole = !f.signal->again;
        __syncwarp();
    }
    for (int i = 0; i < s.segments.count; i++) {
        cluster_barrier();
        cluster_barrier();
        if (loads) load_columns<N, W>(f, m, s, at, i);
        if (stores) store_columns<N, W>(f, m, s, at, i);
        __syncwarp();
    }
}

/* ---- the warpgroups that multiply ---- */

/* 64 columns of this warpgroup's rows of P x */
template <int N>
__device__ __forceinline__ void multiply_tile(float (&d)[PIECE / 2], uint32_t polynomial, uint32_t x)
{
    const uint32_t a = descriptor(polynomial, 0), b = descriptor(x, layout<N>::PIECE_BYTES);

    clear(d);
    mma_begin();
#pragma unroll
    for (int k = 0; k < N / 16; k++)
        multiply_step64<1>(d, a + k / 4 * (layout<N>::PIECE_BYTES / 16) + k % 4 * 2, b + k * 128);
    mma_commit();
    mma_wait<0>();
    settle(d);
}

/* x = factor P x of this block's columns, and the first square = x x^T of all */
template <int N, class Share>
__device__ __forceinline__ void multiply_columns(const frame<N> &f, const shape &s, place &at, int segment,
                                                 float factor, int group)
{
    float squares[Share::SUMS];
    int before = -1;

    clear(squares);
    at.begin(column_tiles<N, float>::stages(false));
    each_tile((int)s.muon.columns, f.rank, !(segment & 1), [&](int) {
        const uint32_t x = column_tiles<N, float>::place(f, at.slot, false, 0);
        float d[PIECE / 2];

        barrier_wait(f.full(at.slot), at.parity());
        multiply_tile<N>(d, f.square(1) + group * BLOCK_BYTES, x);
        if (before >= 0) arrive(f.empty(before));
#pragma unroll
        for (int i = 0; i < PIECE / 2; i++) d[i] *= factor;
        named_barrier(1, layout<N>::CONSUMERS); /* all have read x */
        stage_halves<false>(d, x + group * BLOCK_BYTES);
        fence_async();
        named_barrier(1, layout<N>::CONSUMERS);
        arrive(f.done(at.slot));
        add_squares<Share>(squares, x);
        before = at.slot;
        at.advance();
    });
    mma_wait<0>();
    settle(squares);
    if (before >= 0) arrive(f.empty(before));
    cluster_barrier();
    send_sums<N, Share>(f, squares);
    cluster_barrier();
    add_sent<N, Share>(f, squares, 1, 1);
}

/* Pairs of neighbours in the order of a warpgroup's sums: w = keep w - d, rounded in place of d where the weights
 * are fp32. */
__device__ __forceinline__ void move_tile(float (&d)[PIECE / 2], const uint32_t (&tile)[2], int group, float keep,
                                          float)
{
    const int lane = threadIdx.x % 32, row = group * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;

#pragma unroll
    for (int i = 0; i < PIECE / 4; i++) {
        const uint32_t at = tile[i / 8] + swizzled((row + i % 2 * 8) * 128 + i / 2 % 4 * 32 + lane % 4 * 8);
        float a, b;

        asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(a), "=f"(b) : "r"(at) : "memory");
        d[2 * i] = a * keep - d[2 * i];
        d[2 * i + 1] = b * keep - d[2 * i + 1];
        asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(at), "f"(d[2 * i]), "f"(d[2 * i + 1]) : "memory");
    }
}

__device__ __forceinline__ void move_tile(float (&d)[PIECE / 2], const uint32_t (&tile)[2], int group, float keep, bf16)
{
    const int lane = threadIdx.x % 32, row = group * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;

#pragma unroll
    for (int i = 0; i < PIECE / 4; i++) {
        const uint32_t at = tile[0] + swizzled((row + i % 2 * 8) * 128 + i / 2 * 16 + lane % 4 * 4);
        uint32_t w;

        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(w) : "r"(at) : "memory");
        w = pack_bf16(__uint_as_float(w << 16) * keep - d[2 * i],
                      __uint_as_float(w & 0xffff0000u) * keep - d[2 * i + 1]);
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(w) : "memory");
    }
}

/* The weights of this block's columns move by factor P x. */
template <int N, class W>
__device__ __forceinline__ void move_columns(const frame<N> &f, const shape &s, const float *rates, place &at,
                                             int segment, float factor, int group)
{
    const float lr = rates[RATE_LR], keep = 1.0f - lr * s.muon.decay, reach = lr * s.muon.scale * factor;

    at.begin(column_tiles<N, W>::stages(true));
    each_tile((int)s.muon.columns, f.rank, !(segment & 1), [&](int) {
        const uint32_t x = column_tiles<N, W>::place(f, at.slot, true, 0);
        const uint32_t tile[2] = {column_tiles<N, W>::place(f, at.slot, true, 1),
                                  column_tiles<N, W>::place(f, at.slot, true, sizeof(W) == 4 ? 2 : 1)};
        float d[PIECE / 2];

        barrier_wait(f.full(at.slot), at.parity());
        multiply_tile<N>(d, f.square(1) + group * BLOCK_BYTES, x);
#pragma unroll
        for (int i = 0; i < PIECE / 2; i++) d[i] *= reach;
        move_tile(d, tile, group, keep, W());
        if (sizeof(W) == 4) {
            named_barrier(1, layout<N>::CONSUMERS); /* all have read x */
            stage_halves<false, bf16>(d, x + group * BLOCK_BYTES);
        }
        arrive_written(f.done(at.slot));
        arrive(f.empty(at.slot));
        at.advance();
    });
}

template <int N, int GROUP, class W>
__device__ __forceinline__ void multiply_all(const frame<N> &f, const shape &s, const float *rates, float coefficient)
{
    using own_share = share<N, GROUP>;
    const making<N> maker(f, s.muon, coefficient);
    place at, x;
    float factor = make_x<N, own_share>(maker, (int)s.muon.columns, at, x);

    for (int i = 0, done = 0; i < s.segments.count; done += s.segments.steps[i++]) {
        run_steps<N, own_share>(f, s.muon.coefficient + done, s.segments.steps[i]);
        arrive(f.polynomial());
        if (i + 1 < s.segments.count)
            multiply_columns<N, own_share>(f, s, at, i, factor, GROUP);
        else
            move_columns<N, W>(f, s, rates, at, i, factor, GROUP);
        factor = 1;
    }
}

template <int N, class W>
__global__ __cluster_dims__(2) __launch_bounds__(layout<N>::THREADS, N > 64 ? 1 : 2)
    void small_kernel(const __grid_constant__ maps m, const __grid_constant__ shape s, const float *rates,
                      const float *coefficient)
{
    extern __shared__ uint8_t shared[];
    const frame<N> f = open_frame<N>(shared);
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);

    follow();
    const float given = *coefficient;

    if (given < 0) return; /* all blocks: nothing changes */
    if (group == layout<N>::GROUPS) {
        if (N > 128) registers_fewer<32>();
        serve<N, W>(f, m, s);
    } else {
        if (N > 128) registers_more<160>();
        repeat<0, layout<N>::GROUPS>([&](auto i) {
            if (group == decltype(i)::value) multiply_all<N, decltype(i)::value, W>(f, s, rates, given);
        });
    }
    __syncwarp();
    cluster_barrier(); /* the other block may still reach into this one's memory */
}

/* ---- host ---- */

template <int N>
void launch(cuda_device *device, const maps &m, const shape &s, const struct small_blocks *b)
{
    auto kernel = b->arrays.rounded ? small_kernel<N, float> : small_kernel<N, bf16>;

    allow_shared(kernel, SHARED_BYTES<N>);
    launch_following(device->stream, kernel, (unsigned)b->batch * 2, layout<N>::THREADS, SHARED_BYTES<N>, m, s,
                     b->arrays.rates, b->arrays.coefficient);
}

/* An array of the parameter's shape in boxes of all rows of a block. */
bool map_rows(CUtensorMap *map, const struct small_blocks *b, const void *at, bool narrow, int box_columns)
{
    const struct muon *m = b->muon;
    const int64_t inner = std::min(m->group_rows, m->rows), groups = m->rows / inner;
    const int64_t size[4] = {m->columns, inner, groups, b->batch};
    const int64_t pitch[3] = {m->columns, groups > 1 ? m->group_stride : inner * m->columns,
                              b->batch > 1 ? m->stride : m->rows * m->columns};
    const int box[4] = {box_columns, (int)inner, (int)groups, 1};

    return map_array(map, narrow, at, size, pitch, box);
}

} /* namespace */

bool small_takes(const struct muon *m)
{
    return m->rows <= SMALL_ROWS && m->rows <= m->columns && m->rows % std::min(m->group_rows, m->rows) == 0;
}

void small_blocks_run(cuda_device *device, const struct small_blocks *b)
{
    const struct muon *m = b->muon;
    const bool narrow_gradient = m->gradient == GLM52_DTYPE_BF16, narrow_momentum = m->moments == GLM52_DTYPE_BF16;
    const muon_arrays &a = b->arrays;
    const int whole = (int)divided(m->rows, 64) * 64;
    const shape s = {*m, b->segments};
    maps map = {};

    if (!map_halves(&map.x, b->x, b->batch, m->rows, m->columns, whole) ||
        !map_rows(&map.gradient, b, a.gradient, narrow_gradient, HALF_PIECE) ||
        !map_rows(&map.momentum, b, a.momentum, narrow_momentum, HALF_PIECE) ||
        !map_rows(&map.weight, b, a.weight, !a.rounded, a.rounded ? HALF_PIECE : PIECE) ||
        (a.rounded && !map_rows(&map.rounded, b, a.rounded, true, PIECE))) {
        record_error(device, cudaErrorNotSupported, "a tensor map");
        return;
    }
    (whole == 64 ? launch<64> : whole == 128 ? launch<128> : launch<192>)(device, map, s, b);
}
