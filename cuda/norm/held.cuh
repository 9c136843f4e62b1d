/* Norms of bf16 rows whose width is a multiple of 8 columns and at most HELD_WIDTH: each thread of a team (a warp for narrow
 * rows, else a block) has up to four pieces of 8 columns, and a row is read once.
 *
 * Backward: sums for gain and bias stay in registers over all rows of a block. Wide rows come through a ring in shared memory
 * that the copy engine fills some rows ahead, because two barriers a row would leave loads of the threads' own too few. */
#pragma once

#include "device/element.cuh"
#include "sparse_mla/hopper.cuh"

namespace held {

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int WARP_WIDTH = 1024, HELD_WIDTH = 8192;
constexpr int FORWARD_WARP_WIDTH = 2048; /* a warp needs no barrier, and forward keeps no sums */
constexpr size_t RING = 108 << 10; /* bytes of a block's ring: two blocks fit a multiprocessor */
constexpr int MOST_STAGES = 8;

typedef several<bf16, WIDE> piece;

__device__ __forceinline__ piece piece_at(const bf16 *row, int at) { return ((const piece *)row)[at]; }

/* The sum over a team. part [WARPS] is shared memory that no other sum uses before the next barrier but one. */
template <bool WARP>
__device__ __forceinline__ float team_sum(float x, float *part)
{
    x = warp_reduce(x, plus());
    if (WARP) return x;
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = x;
    __syncthreads();
    x = part[0];
    for (int w = 1; w < (int)blockDim.x / 32; w++) x += part[w];
    return x;
}

/* ---- forward ---- */

template <int PIECES, bool WARP, bool LAYER, bool LATE>
__global__ __launch_bounds__(THREADS) void forward_kernel(const struct norm n, const bf16 *x, const bf16 *gain,
                                                          const bf16 *bias, bf16 *y, float *statistics)
{
    __shared__ float part[2][WARPS];
    const int64_t row = WARP ? blockIdx.x * (int64_t)WARPS + threadIdx.x / 32 : blockIdx.x;
    const int team = WARP ? 32 : blockDim.x, me = WARP ? threadIdx.x % 32 : threadIdx.x, pieces = (int)(n.width / WIDE);
    piece a[PIECES], g[PIECES];
    float mean = 0, squares = 0;

    if (row >= n.rows) return;
    x += row * n.x_stride;
    y += row * n.y_stride;
#pragma unroll
    for (int c = 0; c < PIECES; c++)
        if (me + c * team < pieces) a[c] = piece_at(x, me + c * team);
#pragma unroll
    for (int c = 0; c < PIECES && !LATE; c++)
        if (me + c * team < pieces) g[c] = piece_at(gain, me + c * team);
    if (LAYER) {
        float sum = 0;

#pragma unroll
        for (int c = 0; c < PIECES; c++)
#pragma unroll
            for (int i = 0; i < WIDE; i++) sum += me + c * team < pieces ? get(a[c].at[i]) : 0;
        mean = team_sum<WARP>(sum, part[0]) / (float)n.width;
    }
#pragma unroll
    for (int c = 0; c < PIECES; c++)
#pragma unroll
        for (int i = 0; i < WIDE; i++) {
            const float off = me + c * team < pieces ? get(a[c].at[i]) - mean : 0;

            squares += off * off;
        }
    const float rstd = 1.0f / sqrtf(team_sum<WARP>(squares, part[1]) / (float)n.width + n.epsilon);
#pragma unroll
    for (int c = 0; c < PIECES; c++) {
        float out[WIDE];

        if (me + c * team >= pieces) break;
        piece b = {};
        if (LATE) g[c] = piece_at(gain, me + c * team);
        if (LAYER) b = piece_at(bias, me + c * team);
#pragma unroll
        for (int i = 0; i < WIDE; i++)
            out[i] = (get(a[c].at[i]) - mean) * rstd * get(g[c].at[i]) + (LAYER ? get(b.at[i]) : 0);
        store(y + (me + c * team) * WIDE, out, n.add);
    }
    if (me == 0) {
        if (LAYER) statistics[2 * row] = mean;
        statistics[LAYER ? 2 * row + 1 : row] = rstd;
    }
}

/* ---- backward ---- */

/* Statistics of a team's rows, 32 rows ahead: a lane has those of a row. */
template <bool LAYER>
struct statistics_ahead {
    const float *from;
    int64_t first, step, rows; /* row i of the team is first + i * step, i < rows */
    float mean, rstd, next_mean, next_rstd;

    __device__ statistics_ahead(const float *statistics, int64_t first, int64_t step, int64_t rows)
        : from(statistics), first(first), step(step), rows(rows)
    {
        fetch(0);
    }
    __device__ __forceinline__ void fetch(int64_t i)
    {
        const int64_t mine = i + threadIdx.x % 32, row = first + mine * step;

        next_mean = LAYER && mine < rows ? from[2 * row] : 0;
        next_rstd = mine < rows ? from[LAYER ? 2 * row + 1 : row] : 0;
    }
    /* For i = 0, 1, 2, ... in turn. */
    __device__ __forceinline__ void row(int64_t i, float &row_mean, float &row_rstd)
    {
        if (i % 32 == 0) {
            mean = next_mean;
            rstd = next_rstd;
            fetch(i + 32);
        }
        row_mean = LAYER ? __shfl_sync(~0u, mean, (int)(i % 32)) : 0;
        row_rstd = __shfl_sync(~0u, rstd, (int)(i % 32));
    }
};

/* What a team's thread sums for its columns over all rows. */
template <int PIECES, bool LAYER>
struct column_sums {
    float gain[PIECES][WIDE] = {}, bias[LAYER ? PIECES : 1][WIDE] = {};
};

/* Adds a row to the sums of gain and bias, and gives this thread's parts of sum g and sum g h: see norm.cu. */
template <int PIECES, bool LAYER>
__device__ __forceinline__ void add_row(const bf16 *x, const bf16 *dy, const piece (&gain)[PIECES], float mean, float rstd,
                                        int me, int team, int pieces, column_sums<PIECES, LAYER> &sums, float &sum_g,
                                        float &sum_gh)
{
#pragma unroll
    for (int c = 0; c < PIECES; c++) {
        if (me + c * team >= pieces) break;
        const piece a = piece_at(x, me + c * team), up = piece_at(dy, me + c * team);
#pragma unroll
        for (int i = 0; i < WIDE; i++) {
            const float h = (get(a.at[i]) - mean) * rstd, g = get(gain[c].at[i]) * get(up.at[i]);

            sums.gain[c][i] += get(up.at[i]) * h;
            if (LAYER) sums.bias[c][i] += get(up.at[i]);
            if (LAYER) sum_g += g;
            sum_gh += g * h;
        }
    }
}

template <int PIECES>
__device__ __forceinline__ void write_row(const bf16 *x, const bf16 *dy, const bf16 *old, const piece (&gain)[PIECES],
                                          float mean, float rstd, float mean_g, float mean_gh, int me, int team, int pieces,
                                          bf16 *dx)
{
#pragma unroll
    for (int c = 0; c < PIECES; c++) {
        float out[WIDE];

        if (me + c * team >= pieces) break;
        const piece a = piece_at(x, me + c * team), up = piece_at(dy, me + c * team);
        piece before = {};
        if (old) before = piece_at(old, me + c * team);
#pragma unroll
        for (int i = 0; i < WIDE; i++)
            out[i] = rstd * (get(gain[c].at[i]) * get(up.at[i]) - mean_g - (get(a.at[i]) - mean) * rstd * mean_gh) +
                     get(before.at[i]);
        store(dx + (me + c * team) * WIDE, out);
    }
}

/* partial [2, width] of the block: sums of gain, then of bias. */
template <int PIECES, bool LAYER>
__device__ __forceinline__ void write_sums(const column_sums<PIECES, LAYER> &sums, int me, int team, int pieces, int64_t width,
                                           float *partial)
{
#pragma unroll
    for (int c = 0; c < PIECES; c++) {
        if (me + c * team >= pieces) break;
        store(partial + (me + c * team) * WIDE, sums.gain[c]);
        if (LAYER) store(partial + width + (me + c * team) * WIDE, sums.bias[c]);
    }
}

/* Rows of the ring: x, dy and, where dx is added to, what it was. */
struct ring {
    uint32_t full, data; /* addresses in shared memory: a barrier a stage, then the rows */
    uint32_t row_bytes, arrays;
};

__device__ __forceinline__ void fetch(const ring &r, int stage, const bf16 *x, const bf16 *dy, const bf16 *old)
{
    const uint32_t barrier = r.full + stage * 8, to = r.data + stage * r.arrays * r.row_bytes;

    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(r.arrays * r.row_bytes)
                 : "memory");
    for (uint32_t a = 0; a < r.arrays; a++)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                         to + a * r.row_bytes),
                     "l"(__cvta_generic_to_global(a == 0 ? x : a == 1 ? dy : old)), "r"(r.row_bytes), "r"(barrier)
                     : "memory");
}

/* The block takes rows blockIdx.x, blockIdx.x + gridDim.x, ... */
template <int PIECES, bool LAYER>
__global__ __launch_bounds__(THREADS, LAYER ? 1 : 2) void backward_ring_kernel(const struct norm n, const bf16 *x,
                                                                               const bf16 *gain, const float *statistics,
                                                                               const bf16 *dy, bf16 *dx, float *partial,
                                                                               int stages)
{
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ float part[2][2][WARPS];
    const int me = threadIdx.x, team = blockDim.x, pieces = (int)(n.width / WIDE);
    const int64_t rows = (n.rows - blockIdx.x + gridDim.x - 1) / gridDim.x;
    const uint32_t base = hopper::shared_address(shared);
    const ring r = {base, base + 128, (uint32_t)n.width * 2, n.add ? 3u : 2u};
    const bf16 *stage_rows = (const bf16 *)(shared + 128);
    column_sums<PIECES, LAYER> sums;
    statistics_ahead<LAYER> ahead(statistics, blockIdx.x, gridDim.x, rows);
    piece g[PIECES];

    int stage = 0;
    uint32_t parity = 0;

    auto fetch_row = [&](int64_t i, int into) {
        const int64_t row = blockIdx.x + i * gridDim.x;

        fetch(r, into, x + row * n.x_stride, dy + row * n.y_stride, dx + row * n.x_stride);
    };

    if (me == 0) {
        for (int s = 0; s < stages; s++) hopper::barrier_init(r.full + s * 8, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        for (int i = 0; i < min((int64_t)stages, rows); i++) fetch_row(i, i);
    }
    __syncthreads();
#pragma unroll
    for (int c = 0; c < PIECES; c++)
        if (me + c * team < pieces) g[c] = piece_at(gain, me + c * team);

    for (int64_t i = 0; i < rows; i++) {
        const int64_t row = blockIdx.x + i * gridDim.x;
        const bf16 *own_x = stage_rows + stage * r.arrays * n.width, *own_dy = own_x + n.width;
        float sum_g = 0, sum_gh = 0, mean, rstd;

        ahead.row(i, mean, rstd);
        hopper::barrier_wait(r.full + (uint32_t)stage * 8, parity);
        add_row<PIECES, LAYER>(own_x, own_dy, g, mean, rstd, me, team, pieces, sums, sum_g, sum_gh);
        const float mean_g = LAYER ? team_sum<false>(sum_g, part[0][i & 1]) / (float)n.width : 0;
        const float mean_gh = team_sum<false>(sum_gh, part[1][i & 1]) / (float)n.width;
        /* everybody is done with the row before: its stage is free */
        if (me == 0 && i > 0 && i - 1 + stages < rows) fetch_row(i - 1 + stages, stage > 0 ? stage - 1 : stages - 1);
        write_row(own_x, own_dy, n.add ? own_dy + n.width : nullptr, g, mean, rstd, mean_g, mean_gh, me, team, pieces,
                  dx + row * n.x_stride);
        if (++stage == stages) {
            stage = 0;
            parity ^= 1;
        }
    }
    if (partial) write_sums(sums, me, team, pieces, n.width, partial + (int64_t)blockIdx.x * 2 * n.width);
}

/* A warp takes rows in turn; the sums of a block's warps are added in order, on chip. */
template <int PIECES, bool LAYER>
__global__ __launch_bounds__(THREADS) void backward_warp_kernel(const struct norm n, const bf16 *x, const bf16 *gain,
                                                                const float *statistics, const bf16 *dy, bf16 *dx,
                                                                float *partial)
{
    __shared__ __align__(16) float block_sums[2 * WARP_WIDTH];
    const int me = threadIdx.x % 32, warp = threadIdx.x / 32, pieces = (int)(n.width / WIDE);
    column_sums<PIECES, LAYER> sums;
    piece g[PIECES];

#pragma unroll
    for (int c = 0; c < PIECES; c++)
        if (me + c * 32 < pieces) g[c] = piece_at(gain, me + c * 32);
    const int64_t first = blockIdx.x * (int64_t)WARPS + warp, step = (int64_t)gridDim.x * WARPS;
    const int64_t rows = max((n.rows - first + step - 1) / step, (int64_t)0);
    statistics_ahead<LAYER> ahead(statistics, first, step, rows);
    for (int64_t i = 0; i < rows; i++) {
        const int64_t row = first + i * step;
        const bf16 *own_x = x + row * n.x_stride, *own_dy = dy + row * n.y_stride;
        bf16 *own_dx = dx + row * n.x_stride;
        float sum_g = 0, sum_gh = 0, mean, rstd;

        ahead.row(i, mean, rstd);
        add_row<PIECES, LAYER>(own_x, own_dy, g, mean, rstd, me, 32, pieces, sums, sum_g, sum_gh);
        const float mean_g = LAYER ? team_sum<true>(sum_g, nullptr) / (float)n.width : 0;
        const float mean_gh = team_sum<true>(sum_gh, nullptr) / (float)n.width;
        write_row(own_x, own_dy, n.add ? own_dx : nullptr, g, mean, rstd, mean_g, mean_gh, me, 32, pieces, own_dx);
    }
    if (!partial) return;
    for (int w = 0; w < WARPS; w++) {
        if (warp == w) {
#pragma unroll
            for (int c = 0; c < PIECES; c++) {
                const int at = (me + c * 32) * WIDE;

                if (me + c * 32 >= pieces) break;
                store(block_sums + at, sums.gain[c], w > 0);
                if (LAYER) store(block_sums + n.width + at, sums.bias[c], w > 0);
            }
        }
        __syncthreads();
    }
    for (int64_t j = threadIdx.x; j < (LAYER ? 2 : 1) * n.width; j += THREADS)
        partial[(int64_t)blockIdx.x * 2 * n.width + j] = block_sums[j];
}

/* ---- launches ---- */

static inline bool fits(const struct norm *n) { return n->type == GLM52_DTYPE_BF16 && n->width <= HELD_WIDTH; }

/* Calls f with std::integral_constant of the pieces of a thread, and the number of threads of a team; up to four pieces. */
template <class F>
static inline void with_pieces(int64_t width, bool warp, F f)
{
    const int64_t all = width / WIDE, most = warp ? 32 : THREADS, pieces = divided(all, most);
    const int team = (int)divided(divided(all, pieces), 32) * 32;

    if (pieces == 1) f(std::integral_constant<int, 1>(), team);
    if (pieces == 2) f(std::integral_constant<int, 2>(), team);
    if (pieces == 3) f(std::integral_constant<int, 3>(), team);
    if (pieces == 4) f(std::integral_constant<int, 4>(), team);
}

template <bool LAYER>
static void forward(cuda_device *d, const struct norm *n, const bf16 *x, const bf16 *gain, const bf16 *bias, bf16 *y,
                    float *statistics)
{
    const bool warp = n->width <= WARP_WIDTH;
    const unsigned by_warps = (unsigned)divided(n->rows, WARPS);

    if (!warp && n->width <= FORWARD_WARP_WIDTH) {
        forward_kernel<FORWARD_WARP_WIDTH / WIDE / 32, true, LAYER, true>
            <<<by_warps, THREADS, 0, d->stream>>>(*n, x, gain, bias, y, statistics);
        return;
    }
    with_pieces(n->width, warp, [&](auto pieces, int team) {
        constexpr int PIECES = decltype(pieces)::value;

        if (warp)
            forward_kernel<PIECES, true, LAYER, false>
                <<<by_warps, THREADS, 0, d->stream>>>(*n, x, gain, bias, y, statistics);
        else
            forward_kernel<PIECES, false, LAYER, true>
                <<<(unsigned)n->rows, team, 0, d->stream>>>(*n, x, gain, bias, y, statistics);
    });
}

/* partial [blocks, 2, width], or NULL. */
template <bool LAYER>
static void backward(cuda_device *d, const struct norm *n, const bf16 *x, const bf16 *gain, const float *statistics,
                     const bf16 *dy, bf16 *dx, float *partial, unsigned blocks)
{
    with_pieces(n->width, n->width <= WARP_WIDTH, [&](auto pieces, int team) {
        constexpr int PIECES = decltype(pieces)::value;
        const size_t stage = (size_t)n->width * 2 * (n->add ? 3 : 2);
        const int stages = (int)std::min<size_t>(MOST_STAGES, RING / stage);
        const size_t shared = 128 + (size_t)stages * stage;

        if (n->width <= WARP_WIDTH) {
            backward_warp_kernel<PIECES, LAYER><<<blocks, THREADS, 0, d->stream>>>(*n, x, gain, statistics, dy, dx, partial);
            return;
        }
        allow_shared(backward_ring_kernel<PIECES, LAYER>, shared);
        backward_ring_kernel<PIECES, LAYER><<<blocks, team, shared, d->stream>>>(*n, x, gain, statistics, dy, dx, partial,
                                                                                stages);
    });
}

} /* namespace held */
