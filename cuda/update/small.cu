/* A pair of blocks of threads (a cluster) has one block of the matrix, each half of its columns, which it reads in pieces of 64.
 * Both sum x x^T over their columns, exchange the sums, take the steps of a segment on the same square in shared memory, and
 * multiply their columns by the polynomial that comes of it. One thread loads; a warpgroup has 64 rows. */
#include "update/follow.cuh"
#include "update/small_frame.cuh"

#include <cstring>

using namespace small;

namespace {

/* ---- loads ---- */

template <int N>
__device__ __forceinline__ void load_all(const frame<N> &f, const maps &m, const shape &s)
{
    using L = layout<N>;
    const int matrix = blockIdx.x / 2;
    const bool first = threadIdx.x == L::CONSUMERS;
    place<SLOTS> piece;
    place<STAGES> stage;

    for (int i = 0; i < s.segments.count; i++) {
        const CUtensorMap *x = i ? &m.y : &m.x;

        if (first)
            each_chunk(s.columns, f.rank, [&](int column) {
                for (int j = 0; j < 2; j++, piece.advance()) {
                    barrier_wait(f.empty(piece.slot), piece.parity ^ 1);
                    barrier_expect(f.full(piece.slot), L::PIECE_BYTES);
                    load_box(f.slot(piece.slot), x, column + j * PIECE, 0, matrix, f.full(piece.slot));
                }
            });
        __syncwarp();
        cluster_barrier();
        cluster_barrier();
        if (first) {
            barrier_wait(f.polynomial(), i & 1);
            each_chunk(s.columns, f.rank, [&](int column) {
                const uint32_t to = f.slot(L::stage(stage.slot)), full = f.stage_full(stage.slot);

                barrier_wait(f.stage_empty(stage.slot), stage.parity ^ 1);
                barrier_expect(full, 2 * L::PIECE_BYTES);
                load_box(to, x, column, 0, matrix, full);
                load_box(to + L::PIECE_BYTES, x, column + PIECE, 0, matrix, full);
                stage.advance();
            });
            barrier_wait(f.written(), i & 1);
            asm volatile("fence.proxy.async;" ::: "memory");
        }
        __syncwarp();
    }
}

/* ---- products ---- */

/* d += A[64, 16] B[16, N], B read across where TB */
#define STEP_PRODUCT(N, A, B, TB_)                                                                                      \
    template <int TB>                                                                                                   \
    __device__ __forceinline__ void multiply_step(float (&d)[N / 2], uint32_t a, uint32_t b)                            \
    {                                                                                                                   \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" L##N "}, "                               \
                     "%" #A ", %" #B ", 1, 1, 1, 0, %" #TB_ ";"                                                          \
                     : F##N                                                                                             \
                     : "l"(whole_descriptor(a)), "l"(whole_descriptor(b)), "n"(TB));                                    \
    }
STEP_PRODUCT(64, 32, 33, 34)
STEP_PRODUCT(128, 64, 65, 66)
STEP_PRODUCT(192, 96, 97, 98)
#undef STEP_PRODUCT

template <int COUNT>
__device__ __forceinline__ void clear(float (&d)[COUNT])
{
#pragma unroll
    for (int i = 0; i < COUNT; i++) d[i] = 0;
}

/* One arrival of a warpgroup */
__device__ __forceinline__ void arrive(uint32_t barrier)
{
    if (threadIdx.x % 128 == 0) barrier_arrive(barrier);
}

/* W columns of this warpgroup's 64 rows of a symmetric square, up to the diagonal, into it, twice where they are not on it. */
template <int N, int W>
__device__ __forceinline__ void write_rows(const float (&d)[W / 2], uint32_t square)
{
    using L = layout<N>;
    constexpr int GROUP = W / 64 - 1;

#pragma unroll
    for (int i = 0; i <= GROUP; i++) {
        stage_halves<false>(d + i * 32, square + i * L::PIECE_BYTES + GROUP * (64 * 128));
        if (i < GROUP) stage_halves<true>(d + i * 32, square + GROUP * L::PIECE_BYTES + i * (64 * 128));
    }
    fence_async();
    named_barrier(1, L::CONSUMERS);
}

/* The first square = x x^T: this block's columns, then the other's sums. */
template <int N, int W>
__device__ __forceinline__ void sum_squares(const frame<N> &f, const shape &s, place<SLOTS> &piece)
{
    using L = layout<N>;
    constexpr int GROUP = W / 64 - 1;
    const uint32_t other = f.slot(L::PARTIAL) + GROUP * (GROUP + 1) / 2 * (64 * 64 * 4) + threadIdx.x % 128 * 16;
    const uint32_t there = cluster_address(other, f.rank ^ 1);
    float d[W / 2];
    int before = -1;

    clear(d);
    each_chunk(s.columns, f.rank, [&](int) {
        for (int j = 0; j < 2; j++, piece.advance()) {
            const uint32_t b = descriptor(f.slot(piece.slot), 0), a = b + GROUP * (64 * 128 / 16);

            barrier_wait(f.full(piece.slot), piece.parity);
            mma_begin();
#pragma unroll
            for (int k = 0; k < PIECE / 16; k++) multiply_step<0>(d, a + k * 2, b + k * 2);
            mma_commit();
            if (before >= 0) {
                mma_wait<1>();
                arrive(f.empty(before));
            }
            before = piece.slot;
        }
    });
    mma_wait<0>();
    settle(d);
    if (before >= 0) arrive(f.empty(before));
    cluster_barrier(); /* nobody reads the pieces any more */
#pragma unroll
    for (int i = 0; i < W / 2; i += 4)
        asm volatile("st.shared::cluster.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(there + i * 512), "f"(d[i]), "f"(d[i + 1]),
                     "f"(d[i + 2]), "f"(d[i + 3])
                     : "memory");
    cluster_barrier();
#pragma unroll
    for (int i = 0; i < W / 2; i += 4) {
        uint32_t bits[4];

        load_shared16(other + i * 512, bits);
#pragma unroll
        for (int j = 0; j < 4; j++) d[i + j] += __uint_as_float(bits[j]);
    }
    write_rows<N, W>(d, f.square(0));
}

/* d = alpha d + beta S + gamma I */
template <int N, int W>
__device__ __forceinline__ void add_terms(float (&d)[W / 2], uint32_t s, float alpha, float beta, float gamma)
{
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;

#pragma unroll
    for (int i = 0; i < W / 4; i++) { /* pairs of neighbours */
        const int r = row + i % 2 * 8, piece = i / 2 % 8, c = i / 2 * 8 + lane % 4 * 2;
        const uint32_t at = s + i / 16 * layout<N>::PIECE_BYTES + r * 128 + (piece ^ (r & 7)) * 16 + lane % 4 * 4;
        uint32_t bits;

        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(bits) : "r"(at) : "memory");
        const float2 term = __half22float2(*(const __half2 *)&bits);
        d[2 * i] = alpha * d[2 * i] + beta * term.x + (r == c ? gamma : 0);
        d[2 * i + 1] = alpha * d[2 * i + 1] + beta * term.y + (r == c + 1 ? gamma : 0);
    }
}

struct terms {
    float alpha, beta, gamma;
};

/* c = alpha a b + beta a + gamma I, all symmetric. Nothing is written before all have read. */
template <int N, int W>
__device__ __forceinline__ void multiply_squares(uint32_t a, uint32_t b, uint32_t c, const terms &t)
{
    using L = layout<N>;
    const uint32_t a0 = descriptor(a + (W / 64 - 1) * (64 * 128), 0), b0 = descriptor(b, 0);
    float d[W / 2];

    clear(d);
    mma_begin();
#pragma unroll
    for (int i = 0; i < N / 16; i++) {
        const uint32_t at = i / 4 * (L::PIECE_BYTES / 16) + i % 4 * 2;

        multiply_step<0>(d, a0 + at, b0 + at);
    }
    mma_commit();
    mma_wait<0>();
    settle(d);
    if (t.alpha != 1 || t.beta != 0 || t.gamma != 0) add_terms<N, W>(d, a, t.alpha, t.beta, t.gamma);
    named_barrier(1, L::CONSUMERS);
    write_rows<N, W>(d, c);
}

/* From A, the first square: per step B = a I + b A + c A A, A = B A B, P = B P. The first B is P, in the second square. */
template <int N, int W>
__device__ __forceinline__ void run_steps(const frame<N> &f, const float (*coefficient)[3], int steps)
{
    const uint32_t gram = f.square(0), polynomial = f.square(1);

    for (int i = 0; i < steps; i++) {
        const uint32_t factor = i ? f.square(2) : polynomial;

        multiply_squares<N, W>(gram, gram, factor, {coefficient[i][2], coefficient[i][1], coefficient[i][0]});
        if (i + 1 < steps) {
            multiply_squares<N, W>(factor, gram, gram, {1, 0, 0});
            multiply_squares<N, W>(gram, factor, gram, {1, 0, 0});
        }
        if (i) multiply_squares<N, W>(factor, polynomial, polynomial, {1, 0, 0});
    }
}

/* ---- columns ---- */

/* 64 x 128 products of a warpgroup to y, through its rows of the staging places */
template <int N>
__device__ __forceinline__ void write_columns(const frame<N> &f, const float (&d)[CHUNK / 2], int group, const CUtensorMap *y,
                                              int column)
{
    const bool first = threadIdx.x % 128 == 0;

    if (first) boxes_read<0>();
    named_barrier(2 + group, 128);
#pragma unroll
    for (int i = 0; i < 2; i++) stage_halves<false>(d + i * 32, f.slot(layout<N>::staging(i)) + group * (64 * 128));
    fence_async();
    named_barrier(2 + group, 128);
    if (!first) return;
    for (int i = 0; i < 2; i++)
        store_box(y, column + i * PIECE, group * 64, blockIdx.x / 2, f.slot(layout<N>::staging(i)) + group * (64 * 128));
    boxes_commit();
}

template <int N, class W>
__device__ __forceinline__ void multiply_columns(const frame<N> &f, const shape &s, const maps &m, const half_update &u,
                                                 place<STAGES> &stage, int group, bool is_last)
{
    using L = layout<N>;
    const uint32_t a0 = descriptor(f.square(1) + group * (64 * 128), 0);

    each_chunk(s.columns, f.rank, [&](int column) {
        const uint32_t b0 = descriptor(f.slot(L::stage(stage.slot)), L::PIECE_BYTES);
        float d[CHUNK / 2];

        clear(d);
        barrier_wait(f.stage_full(stage.slot), stage.parity);
        mma_begin();
#pragma unroll
        for (int k = 0; k < N / 16; k++) multiply_step<1>(d, a0 + k / 4 * (L::PIECE_BYTES / 16) + k % 4 * 2, b0 + k * 128);
        mma_commit();
        mma_wait<0>();
        settle(d);
        arrive(f.stage_empty(stage.slot));
        stage.advance();
        if (is_last)
            move_weights<CHUNK, W>(d, u, group * 64, column, s.rows, s.columns, blockIdx.x / 2);
        else
            write_columns<N>(f, d, group, &m.y_rows, column);
    });
    if (threadIdx.x % 128 == 0) boxes_written();
    asm volatile("fence.proxy.async;" ::: "memory");
    arrive(f.written());
}

/* Warpgroup W / 64 - 1 */
template <int N, int W, class Weight>
__device__ __forceinline__ void multiply_all(const frame<N> &f, const shape &s, const maps &m, const half_update &u)
{
    place<SLOTS> piece;
    place<STAGES> stage;

    for (int i = 0, done = 0; i < s.segments.count; done += s.segments.steps[i++]) {
        sum_squares<N, W>(f, s, piece);
        run_steps<N, W>(f, s.coefficient + done, s.segments.steps[i]);
        arrive(f.polynomial());
        multiply_columns<N, Weight>(f, s, m, u, stage, W / 64 - 1, i + 1 == s.segments.count);
    }
}

template <int N, class Weight>
__global__ __cluster_dims__(2) __launch_bounds__(layout<N>::THREADS, 1) void small_kernel(const __grid_constant__ maps m,
                                                                                          const __grid_constant__ shape s,
                                                                                          const half_update u)
{
    extern __shared__ uint8_t shared[];
    const frame<N> f = open_frame<N>(shared);
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);

    follow();
    if (group == layout<N>::GROUPS) {
        if (N > 128) registers_fewer<32>();
        load_all<N>(f, m, s);
    } else {
        if (N > 128) registers_more<160>();
        if (N > 128 && group == 2)
            multiply_all<N, N, Weight>(f, s, m, u);
        else if (N > 64 && group == 1)
            multiply_all<N, N < 128 ? N : 128, Weight>(f, s, m, u);
        else
            multiply_all<N, 64, Weight>(f, s, m, u);
    }
    __syncwarp();
    cluster_barrier(); /* the other block may still reach into this one's memory */
}

template <int N>
void launch(cuda_device *device, const maps &m, const shape &s, const struct small_blocks *b)
{
    auto kernel = b->update.rounded ? small_kernel<N, float> : small_kernel<N, bf16>;

    allow_shared(kernel, SHARED_BYTES<N>);
    launch_following(device->stream, kernel, (unsigned)b->batch * 2, layout<N>::THREADS, SHARED_BYTES<N>, m, s, b->update);
}

} /* namespace */

void small_blocks_run(cuda_device *device, const struct small_blocks *b)
{
    const int whole = (int)divided(b->rows, 64) * 64;
    shape s = {(int)b->rows, (int)b->columns, b->segments, {}};
    maps m;

    memcpy(s.coefficient, b->coefficient, sizeof s.coefficient);
    if (!map_halves(&m.x, b->x, b->batch, b->rows, b->columns, whole) ||
        !map_halves(&m.y, b->y, b->batch, b->rows, b->columns, whole) ||
        !map_halves(&m.y_rows, b->y, b->batch, b->rows, b->columns, 64)) {
        record_error(device, cudaErrorNotSupported, "a tensor map");
        return;
    }
    (whole == 64 ? launch<64> : whole == 128 ? launch<128> : launch<192>)(device, m, s, b);
}
