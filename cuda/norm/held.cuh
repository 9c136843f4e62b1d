/* Norms of bf16 rows whose width is a multiple of 8 columns and at most HELD_WIDTH: each thread of a team (a warp for
 * narrow rows, else a block) has up to four pieces of 8 columns, and a row is read once. Here: forward; backward is
 * held_backward.cuh. */
#pragma once

#include "device/element.cuh"

namespace held {

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int WARP_WIDTH = 1024, HELD_WIDTH = 8192;

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

template <int PIECES, bool WARP, bool LAYER>
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
    for (int c = 0; c < PIECES && WARP; c++) /* later in blocks: fewer registers, more rows under way */
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
        if (!WARP) g[c] = piece_at(gain, me + c * team);
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

/* ---- launches ---- */

static inline bool fits(const struct norm *n) { return n->type == GLM52_DTYPE_BF16 && n->width <= HELD_WIDTH; }

/* Calls f with std::integral_constant of the pieces of a thread, one to four. */
template <class F>
static inline void with_pieces(int64_t pieces, F f)
{
    if (pieces == 1) f(std::integral_constant<int, 1>());
    if (pieces == 2) f(std::integral_constant<int, 2>());
    if (pieces == 3) f(std::integral_constant<int, 3>());
    if (pieces == 4) f(std::integral_constant<int, 4>());
}

template <bool LAYER>
static void forward(cuda_device *d, const struct norm *n, const bf16 *x, const bf16 *gain, const bf16 *bias, bf16 *y,
                    float *statistics)
{
    const bool warp = n->width <= WARP_WIDTH;
    const unsigned by_warps = (unsigned)divided(n->rows, WARPS);
    const int64_t all = n->width / WIDE;
    /* A thread of a block has two pieces at least: the more rows a multiprocessor has under way. */
    const int64_t pieces = warp ? divided(all, 32) : std::max<int64_t>(2, divided(all, THREADS));
    const int team = (int)divided(divided(all, pieces), 32) * 32;

    with_pieces(pieces, [&](auto held) {
        constexpr int PIECES = decltype(held)::value;

        if (warp)
            forward_kernel<PIECES, true, LAYER>
                <<<by_warps, THREADS, 0, d->stream>>>(*n, x, gain, bias, y, statistics);
        else
            forward_kernel<PIECES, false, LAYER>
                <<<(unsigned)n->rows, team, 0, d->stream>>>(*n, x, gain, bias, y, statistics);
    });
}

} /* namespace held */
