/* Backward of the norms of held.cuh. Rows come through rings in shared memory that the copy engine fills some rows
 * ahead: one of a block for wide rows, whose threads meet at a barrier for each row or each two, one of each warp for
 * narrow ones.
 *
 * Sums for gain and bias stay in registers over all rows of a block, and go to partial [blocks, 2, width] (NULL: not
 * wanted). */
#pragma once

#include "norm/held.cuh"
#include "sparse_mla/hopper.cuh"

namespace held {

constexpr size_t RING = 104 << 10; /* bytes of a block's rings: two blocks fit a multiprocessor */
constexpr int MOST_STAGES = 8;
constexpr uint32_t BARRIERS = WARPS * MOST_STAGES * 8; /* their bytes, before the rings */

/* ---- statistics ---- */

/* Those of a team's rows, 32 rows ahead: a lane has those of a row. The team's rows are groups of ROWS, first, first +
 * step, ... */
template <bool LAYER, int ROWS>
struct statistics_ahead {
    const float *from;
    int64_t first, step, rows;
    float mean, rstd, next_mean, next_rstd;

    __device__ statistics_ahead(const float *statistics, int64_t first, int64_t step, int64_t rows)
        : from(statistics), first(first), step(step), rows(rows)
    {
        fetch(0);
    }
    __device__ __forceinline__ void fetch(int64_t group)
    {
        const int lane = threadIdx.x % 32;
        const int64_t row = (first + (group + lane / ROWS) * step) * ROWS + lane % ROWS;

        next_mean = LAYER && row < rows ? from[2 * row] : 0;
        next_rstd = row < rows ? from[LAYER ? 2 * row + 1 : row] : 0;
    }
    /* For groups 0, 1, 2, ... in turn. */
    __device__ __forceinline__ void group(int64_t i, float (&row_mean)[ROWS], float (&row_rstd)[ROWS])
    {
        constexpr int GROUPS = 32 / ROWS;

        if (i % GROUPS == 0) {
            mean = next_mean;
            rstd = next_rstd;
            fetch(i + GROUPS);
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const int lane = (int)(i % GROUPS) * ROWS + r;

            row_mean[r] = LAYER ? __shfl_sync(~0u, mean, lane) : 0;
            row_rstd[r] = __shfl_sync(~0u, rstd, lane);
        }
    }
};

/* ---- a row ---- */

/* What a team's thread sums for its columns over all rows. */
template <int PIECES, bool LAYER>
struct column_sums {
    float gain[PIECES][WIDE] = {}, bias[LAYER ? PIECES : 1][WIDE] = {};
};

/* Adds a row to the sums of gain and bias, and gives this thread's parts of sum g and sum g h: see norm.cu. */
template <int PIECES, bool LAYER>
__device__ __forceinline__ void add_row(const bf16 *x, const bf16 *dy, const piece (&gain)[PIECES], float mean,
                                        float rstd, int me, int team, int pieces, column_sums<PIECES, LAYER> &sums,
                                        float &sum_g, float &sum_gh)
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
                                          float mean, float rstd, float mean_g, float mean_gh, int me, int team,
                                          int pieces, bf16 *dx)
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
__device__ __forceinline__ void write_sums(const column_sums<PIECES, LAYER> &sums, int me, int team, int pieces,
                                           int64_t width, float *partial)
{
#pragma unroll
    for (int c = 0; c < PIECES; c++) {
        if (me + c * team >= pieces) break;
        store(partial + (me + c * team) * WIDE, sums.gain[c]);
        if (LAYER) store(partial + width + (me + c * team) * WIDE, sums.bias[c]);
    }
}

/* ---- rings ---- */

/* Stages of some rows: of each x, dy and, where dx is added to, what it was. */
struct ring {
    uint32_t full, data; /* addresses in shared memory: a barrier a stage, then the rows */
    uint32_t row_bytes, arrays, stage_rows;
    int stages;

    __device__ void open() const
    {
        for (int s = 0; s < stages; s++) hopper::barrier_init(full + s * 8, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __device__ __forceinline__ uint32_t stage_bytes() const { return stage_rows * arrays * row_bytes; }
    /* Rows first .. first + count - 1 into a stage. */
    __device__ __forceinline__ void fetch(const struct norm &n, const bf16 *x, const bf16 *dy, const bf16 *dx,
                                          int64_t first, int count, int stage) const
    {
        const uint32_t barrier = full + stage * 8;
        uint32_t to = data + stage * stage_bytes();

        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                     "r"(count * arrays * row_bytes)
                     : "memory");
        for (int64_t row = first; row < first + count; row++)
            for (uint32_t a = 0; a < arrays; a++, to += row_bytes) {
                const bf16 *from = a == 0   ? x + row * n.x_stride
                                   : a == 1 ? dy + row * n.y_stride
                                            : dx + row * n.x_stride;

                asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                             " [%0], [%1], %2, [%3];" ::"r"(to),
                             "l"(__cvta_generic_to_global(from)), "r"(row_bytes), "r"(barrier)
                             : "memory");
            }
    }
};

/* Which stage comes next, and in which phase. */
struct turn {
    int stage = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ void next(int stages)
    {
        if (++stage < stages) return;
        stage = 0;
        parity ^= 1;
    }
};

/* ---- kernels ---- */

/* The block takes groups of ROWS rows blockIdx.x, blockIdx.x + gridDim.x, ... */
template <int PIECES, int ROWS, bool LAYER>
__global__ __launch_bounds__(THREADS, LAYER ? 1 : 2) void
backward_ring_kernel(const struct norm n, const bf16 *x, const bf16 *gain, const float *statistics, const bf16 *dy,
                     bf16 *dx, float *partial, int stages)
{
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ float part[2][2][ROWS][WARPS];
    const int me = threadIdx.x, team = blockDim.x, pieces = (int)(n.width / WIDE);
    const int64_t groups = ((n.rows + ROWS - 1) / ROWS - blockIdx.x + gridDim.x - 1) / gridDim.x;
    const uint32_t base = hopper::shared_address(shared);
    const ring r = {base, base + BARRIERS, (uint32_t)n.width * 2, n.add ? 3u : 2u, ROWS, stages};
    column_sums<PIECES, LAYER> sums;
    statistics_ahead<LAYER, ROWS> ahead(statistics, blockIdx.x, gridDim.x, n.rows);
    piece g[PIECES];
    turn at;

    auto first_row = [&](int64_t i) { return (blockIdx.x + i * gridDim.x) * ROWS; };
    auto row_count = [&](int64_t i) { return (int)min((int64_t)ROWS, n.rows - first_row(i)); };

    if (me == 0) {
        r.open();
        for (int i = 0; i < min((int64_t)stages, groups); i++) r.fetch(n, x, dy, dx, first_row(i), row_count(i), i);
    }
    __syncthreads();
#pragma unroll
    for (int c = 0; c < PIECES; c++)
        if (me + c * team < pieces) g[c] = piece_at(gain, me + c * team);

    for (int64_t i = 0; i < groups; i++, at.next(stages)) {
        const bf16 *rows = (const bf16 *)(shared + BARRIERS + at.stage * r.stage_bytes());
        const int64_t row_elements = r.arrays * n.width;
        const int count = row_count(i);
        float mean[ROWS], rstd[ROWS], sum_g[ROWS] = {}, sum_gh[ROWS] = {};

        ahead.group(i, mean, rstd);
        hopper::barrier_wait(r.full + (uint32_t)at.stage * 8, at.parity);
#pragma unroll
        for (int q = 0; q < ROWS; q++)
            if (q < count)
                add_row<PIECES, LAYER>(rows + q * row_elements, rows + q * row_elements + n.width, g, mean[q], rstd[q],
                                       me, team, pieces, sums, sum_g[q], sum_gh[q]);
#pragma unroll
        for (int q = 0; q < ROWS; q++) {
            if (LAYER) sum_g[q] = warp_reduce(sum_g[q], plus());
            sum_gh[q] = warp_reduce(sum_gh[q], plus());
            if (me % 32 == 0) {
                part[i & 1][0][q][me / 32] = sum_g[q];
                part[i & 1][1][q][me / 32] = sum_gh[q];
            }
        }
        __syncthreads();
        /* everybody is done with the group before: its stage is free */
        const int64_t next = i - 1 + stages;
        if (me == 0 && i > 0 && next < groups)
            r.fetch(n, x, dy, dx, first_row(next), row_count(next), at.stage > 0 ? at.stage - 1 : stages - 1);
#pragma unroll
        for (int q = 0; q < ROWS; q++) {
            const bf16 *row = rows + q * row_elements;
            float all_g = 0, all_gh = 0;

            if (q >= count) break;
            for (int w = 0; w < team / 32; w++) {
                if (LAYER) all_g += part[i & 1][0][q][w];
                all_gh += part[i & 1][1][q][w];
            }
            write_row(row, row + n.width, n.add ? row + 2 * n.width : nullptr, g, mean[q], rstd[q],
                      all_g / (float)n.width, all_gh / (float)n.width, me, team, pieces,
                      dx + (first_row(i) + q) * n.x_stride);
        }
    }
    if (partial) write_sums(sums, me, team, pieces, n.width, partial + (int64_t)blockIdx.x * 2 * n.width);
}

/* A warp takes rows in turn, through a ring of its own; the sums of a block's warps are added in order, on chip. */
template <int PIECES, bool LAYER>
__global__ __launch_bounds__(THREADS, LAYER ? 1 : 2) void
backward_warp_kernel(const struct norm n, const bf16 *x, const bf16 *gain, const float *statistics, const bf16 *dy,
                     bf16 *dx, float *partial, int stages)
{
    extern __shared__ __align__(128) unsigned char shared[];
    float *block_sums = (float *)(shared + BARRIERS); /* where the rings were */
    const int me = threadIdx.x % 32, warp = threadIdx.x / 32, pieces = (int)(n.width / WIDE);
    const int64_t first = blockIdx.x * (int64_t)WARPS + warp, step = (int64_t)gridDim.x * WARPS;
    const int64_t rows = max((n.rows - first + step - 1) / step, (int64_t)0);
    const uint32_t base = hopper::shared_address(shared), arrays = n.add ? 3 : 2;
    const uint32_t own = BARRIERS + warp * stages * arrays * (uint32_t)n.width * 2;
    const ring r = {base + warp * stages * 8, base + own, (uint32_t)n.width * 2, arrays, 1, stages};
    column_sums<PIECES, LAYER> sums;
    statistics_ahead<LAYER, 1> ahead(statistics, first, step, n.rows);
    piece g[PIECES];
    turn at;

    if (me == 0) {
        r.open();
        for (int i = 0; i < min((int64_t)stages, rows); i++) r.fetch(n, x, dy, dx, first + i * step, 1, i);
    }
    __syncwarp();
#pragma unroll
    for (int c = 0; c < PIECES; c++)
        if (me + c * 32 < pieces) g[c] = piece_at(gain, me + c * 32);
    for (int64_t i = 0; i < rows; i++, at.next(stages)) {
        const bf16 *own_x = (const bf16 *)(shared + own + at.stage * r.stage_bytes()), *own_dy = own_x + n.width;
        float sum_g = 0, sum_gh = 0, mean[1], rstd[1];

        ahead.group(i, mean, rstd);
        hopper::barrier_wait(r.full + (uint32_t)at.stage * 8, at.parity);
        add_row<PIECES, LAYER>(own_x, own_dy, g, mean[0], rstd[0], me, 32, pieces, sums, sum_g, sum_gh);
        const float mean_g = LAYER ? warp_reduce(sum_g, plus()) / (float)n.width : 0;
        const float mean_gh = warp_reduce(sum_gh, plus()) / (float)n.width;
        write_row(own_x, own_dy, n.add ? own_dy + n.width : nullptr, g, mean[0], rstd[0], mean_g, mean_gh, me, 32,
                  pieces, dx + (first + i * step) * n.x_stride);
        __syncwarp();
        if (me == 0 && i + stages < rows) r.fetch(n, x, dy, dx, first + (i + stages) * step, 1, at.stage);
    }
    if (!partial) return;
    __syncthreads();
    for (int w = 0; w < WARPS; w++) {
        if (warp == w) {
#pragma unroll
            for (int c = 0; c < PIECES; c++) {
                const int j = (me + c * 32) * WIDE;

                if (me + c * 32 >= pieces) break;
                store(block_sums + j, sums.gain[c], w > 0);
                if (LAYER) store(block_sums + n.width + j, sums.bias[c], w > 0);
            }
        }
        __syncthreads();
    }
    for (int64_t j = threadIdx.x; j < (LAYER ? 2 : 1) * n.width; j += THREADS)
        partial[(int64_t)blockIdx.x * 2 * n.width + j] = block_sums[j];
}

/* ---- launches ---- */

template <bool LAYER>
static void backward(cuda_device *d, const struct norm *n, const bf16 *x, const bf16 *gain, const float *statistics,
                     const bf16 *dy, bf16 *dx, float *partial, unsigned blocks)
{
    const size_t row = (size_t)n->width * 2 * (n->add ? 3 : 2);
    const bool warp = n->width <= WARP_WIDTH, paired = !LAYER && 2 * 2 * row <= RING;
    const size_t stage = warp ? row * WARPS : paired ? 2 * row : row;
    const int stages = (int)std::min<size_t>(MOST_STAGES, RING / stage);
    const size_t shared = BARRIERS + (size_t)stages * stage;

    with_pieces(n->width, warp, [&](auto pieces, int team) {
        constexpr int PIECES = decltype(pieces)::value;
        auto launch = [&](auto kernel) {
            allow_shared(kernel, shared);
            kernel<<<blocks, warp ? THREADS : team, shared, d->stream>>>(*n, x, gain, statistics, dy, dx, partial,
                                                                         stages);
        };

        if (warp)
            launch(backward_warp_kernel<PIECES, LAYER>);
        else if (paired)
            launch(backward_ring_kernel<PIECES, LAYER ? 1 : 2, LAYER>);
        else
            launch(backward_ring_kernel<PIECES, 1, LAYER>);
    });
}

} /* namespace held */
