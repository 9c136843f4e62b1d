/* Backward of the norms of held.cuh, a block a multiprocessor. Its warps form teams, as narrow as their threads' pieces
 * allow; a team takes rows in turn, which the copy engine brings into a ring of the team's in shared memory some rows
 * ahead. What RMSNorm has of a row then stays in registers: its place in the ring is free before the row is written.
 *
 * Sums for gain and bias stay in registers over all rows; those of a block's teams are added in order, on chip, and go
 * to partial [blocks, 2, width] (NULL: not wanted). */
#pragma once

#include "grouped_gemm/tensor.cuh"
#include "norm/held.cuh"

namespace held {

constexpr int BACKWARD_THREADS = 512; /* of a block */
constexpr int MOST_BLOCKS = 132;      /* one for each of a Hopper's multiprocessors */
constexpr int MOST_PIECES = 4;        /* of a thread */
constexpr int MOST_WARPS = BACKWARD_THREADS / 32, MOST_STAGES = 8;
/* Bytes of a block's rings; LayerNorm reads a row twice, so that a stage comes free a turn later. More under way at
 * once makes no block faster, only the fast ones end earlier. */
constexpr size_t RINGS = 128 << 10, LAYER_RINGS = 150 << 10;

/* ---- statistics ---- */

/* Those of a team's rows first, first + step, ..., 32 rows ahead: a lane has those of a row. */
template <bool LAYER>
struct statistics_ahead {
    const float *from;
    int64_t first, step, rows;
    float mean, rstd, next_mean, next_rstd;

    __device__ statistics_ahead(const float *statistics, int64_t first, int64_t step, int64_t rows)
        : from(statistics), first(first), step(step), rows(rows)
    {
        fetch(0);
    }
    __device__ __forceinline__ void fetch(int turn)
    {
        const int64_t row = first + (turn + threadIdx.x % 32) * step;

        next_mean = LAYER && row < rows ? from[2 * row] : 0;
        next_rstd = row < rows ? from[LAYER ? 2 * row + 1 : row] : 0;
    }
    /* For turns 0, 1, 2, ... one after the other. */
    __device__ __forceinline__ void take(int turn, float &row_mean, float &row_rstd)
    {
        if (turn % 32 == 0) {
            mean = next_mean;
            rstd = next_rstd;
            fetch(turn + 32);
        }
        row_mean = LAYER ? __shfl_sync(~0u, mean, turn % 32) : 0;
        row_rstd = __shfl_sync(~0u, rstd, turn % 32);
    }
};

/* ---- a row ---- */

/* A team as one of its threads sees it; thread `me` has pieces me, me + threads, ... of the row's. */
struct team {
    int number, threads, me, pieces;
};

/* From here on the compiler no longer knows the elements as fp32, which take twice the registers. */
template <int PIECES>
__device__ __forceinline__ void keep_packed(piece (&p)[PIECES])
{
#pragma unroll
    for (int c = 0; c < PIECES; c++) {
        int4 &word = (int4 &)p[c];
        asm volatile("" : "+r"(word.x), "+r"(word.y), "+r"(word.z), "+r"(word.w));
    }
}

/* A thread's pieces of x, dy and, where dx is added to, what it was: HELD in registers, or in the ring alone. */
template <int PIECES, bool HELD, bool ADD>
struct row_of {
    static constexpr int ARRAYS = ADD ? 3 : 2;
    const bf16 *from;
    int64_t width;
    piece held[HELD ? ARRAYS : 1][HELD ? PIECES : 1];

    __device__ __forceinline__ piece in_ring(const team &t, int array, int c) const
    {
        return piece_at(from + array * width, t.me + c * t.threads);
    }
    __device__ __forceinline__ row_of(const team &t, const bf16 *from, int64_t width) : from(from), width(width)
    {
#pragma unroll
        for (int c = 0; c < (HELD ? PIECES : 0); c++)
#pragma unroll
            for (int array = 0; array < ARRAYS; array++)
                if (t.me + c * t.threads < t.pieces) held[array][c] = in_ring(t, array, c);
    }
    __device__ __forceinline__ piece x(const team &t, int c) const { return HELD ? held[0][c] : in_ring(t, 0, c); }
    __device__ __forceinline__ piece dy(const team &t, int c) const { return HELD ? held[1][c] : in_ring(t, 1, c); }
    __device__ __forceinline__ piece old(const team &t, int c) const
    {
        return HELD ? held[ARRAYS - 1][c] : in_ring(t, ARRAYS - 1, c);
    }
    __device__ __forceinline__ void pack()
    {
        if (HELD) keep_packed(held[0]), keep_packed(held[1]);
    }
};

/* What a thread sums for its columns over all rows. */
template <int PIECES, bool LAYER>
struct column_sums {
    float gain[PIECES][WIDE] = {}, bias[LAYER ? PIECES : 1][WIDE] = {};
};

/* Adds a row to the sums of gain and bias, and gives this thread's parts of sum g and sum g h: see norm.cu. */
template <int PIECES, bool LAYER, class Row>
__device__ __forceinline__ void add_row(const team &t, const Row &row, const piece (&gain)[PIECES], float mean,
                                        float rstd, column_sums<PIECES, LAYER> &sums, float &sum_g, float &sum_gh)
{
#pragma unroll
    for (int c = 0; c < PIECES; c++) {
        if (t.me + c * t.threads >= t.pieces) break;
        const piece x = row.x(t, c), dy = row.dy(t, c);
#pragma unroll
        for (int i = 0; i < WIDE; i++) {
            const float up = get(dy.at[i]), h = (get(x.at[i]) - mean) * rstd, g = get(gain[c].at[i]) * up;

            sums.gain[c][i] += up * h;
            if (LAYER) sums.bias[c][i] += up;
            if (LAYER) sum_g += g;
            sum_gh += g * h;
        }
    }
}

template <int PIECES, bool ADD, class Row>
__device__ __forceinline__ void write_row(const team &t, const Row &row, const piece (&gain)[PIECES], float mean,
                                          float rstd, float mean_g, float mean_gh, bf16 *dx)
{
#pragma unroll
    for (int c = 0; c < PIECES; c++) {
        float out[WIDE];

        if (t.me + c * t.threads >= t.pieces) break;
        const piece x = row.x(t, c), dy = row.dy(t, c), old = ADD ? row.old(t, c) : piece{};
#pragma unroll
        for (int i = 0; i < WIDE; i++)
            out[i] = rstd * (get(gain[c].at[i]) * get(dy.at[i]) - mean_g - (get(x.at[i]) - mean) * rstd * mean_gh) +
                     get(old.at[i]);
        store(dx + (t.me + c * t.threads) * WIDE, out);
    }
}

/* ---- rings ---- */

/* A team's: stages of a row's x, dy and, where dx is added to, what it was; addresses in shared memory. */
struct ring {
    uint32_t full, data, row_bytes; /* full: a barrier a stage */
    int stages, stage;
    uint32_t parity;

    __device__ __forceinline__ void copy(uint32_t to, const bf16 *from, uint32_t barrier) const
    {
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                     " [%0], [%1], %2, [%3];" ::"r"(to),
                     "l"(__cvta_generic_to_global(from)), "r"(row_bytes), "r"(barrier)
                     : "memory");
    }
    /* A row into stage s. */
    template <bool ADD>
    __device__ __forceinline__ void fetch(const struct norm &n, const bf16 *x, const bf16 *dy, const bf16 *dx,
                                          int64_t row, int s) const
    {
        const uint32_t barrier = full + (uint32_t)s * 8, bytes = (ADD ? 3 : 2) * row_bytes, to = data + s * bytes;

        hopper::barrier_expect(barrier, bytes);
        copy(to, x + row * n.x_stride, barrier);
        copy(to + row_bytes, dy + row * n.y_stride, barrier);
        if (ADD) copy(to + 2 * row_bytes, dx + row * n.x_stride, barrier);
    }
    __device__ void open() const
    {
        for (int s = 0; s < stages; s++) hopper::barrier_init(full + s * 8, 1);
        hopper::fence_barrier_init();
    }
    __device__ __forceinline__ void wait() const { hopper::barrier_wait(full + (uint32_t)stage * 8, parity); }
    /* The stage so many turns ago. */
    __device__ __forceinline__ int before(int turns) const { return stage >= turns ? stage - turns : stages - turns; }
    __device__ __forceinline__ void next()
    {
        if (++stage < stages) return;
        stage = 0;
        parity ^= 1;
    }
};

/* ---- the kernel ---- */

/* From a thread's parts to the sums of its team; part is shared memory that the row before did not use. */
template <bool LAYER>
__device__ __forceinline__ void all_sums(const team &t, float (&part)[LAYER ? 2 : 1][MOST_WARPS], float &sum_g,
                                         float &sum_gh)
{
    const int warps = t.threads / 32;

    sum_gh = warp_reduce(sum_gh, plus());
    if (LAYER) sum_g = warp_reduce(sum_g, plus());
    if (warps == 1) {
        __syncwarp();
        return;
    }
    if (t.me % 32 == 0) {
        part[0][threadIdx.x / 32] = sum_gh;
        if (LAYER) part[LAYER][threadIdx.x / 32] = sum_g;
    }
    hopper::named_barrier(1 + t.number, t.threads);
    sum_gh = part[0][t.number * warps];
    if (LAYER) sum_g = part[LAYER][t.number * warps];
    for (int w = 1; w < warps; w++) {
        sum_gh += part[0][t.number * warps + w];
        if (LAYER) sum_g += part[LAYER][t.number * warps + w];
    }
}

/* The sums of all teams, in order, to partial [2, width] of the block. */
template <int PIECES, bool LAYER>
__device__ __forceinline__ void write_sums(const team &t, int teams, const column_sums<PIECES, LAYER> &sums,
                                           int64_t width, float *of_teams, float *partial)
{
    const int columns = (LAYER ? 2 : 1) * (int)width;
    float *own = of_teams + t.number * columns;

#pragma unroll
    for (int c = 0; c < PIECES; c++) {
        if (t.me + c * t.threads >= t.pieces) break;
        store(own + (t.me + c * t.threads) * WIDE, sums.gain[c]);
        if (LAYER) store(own + width + (t.me + c * t.threads) * WIDE, sums.bias[c]);
    }
    __syncthreads();
    const float4 *quads = (const float4 *)of_teams;
#pragma unroll 4
    for (int j = threadIdx.x; j < columns / 4; j += blockDim.x) {
        float4 sum = quads[j];

#pragma unroll 4
        for (int other = 1; other < teams; other++) {
            const float4 more = quads[other * columns / 4 + j];

            sum = {sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w};
        }
        ((float4 *)partial)[j] = sum;
    }
}

/* Team t of block b takes rows b + (t + i * teams) * blocks, i = 0, 1, ... */
template <int PIECES, bool LAYER, bool ADD>
__global__ __launch_bounds__(BACKWARD_THREADS, 1) void
backward_kernel(const struct norm n, const bf16 *x, const bf16 *gain, const float *statistics, const bf16 *dy, bf16 *dx,
                float *partial, int threads, int stages)
{
    /* The bias's sums leave LayerNorm no registers to hold a row in: it reads twice. */
    constexpr bool HELD = !LAYER;
    constexpr int BEHIND = HELD ? 0 : 1; /* turns after which a stage is free */
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ float part[2][LAYER ? 2 : 1][MOST_WARPS];
    __shared__ __align__(8) uint64_t barriers[MOST_WARPS * MOST_STAGES];
    const int teams = blockDim.x / threads, number = threadIdx.x / threads;
    const team t = {number, threads, (int)threadIdx.x - number * threads, (int)(n.width / WIDE)};
    const int64_t first = blockIdx.x + (int64_t)number * gridDim.x, step = (int64_t)teams * gridDim.x;
    const int rows = (int)max((n.rows - first + step - 1) / step, (int64_t)0);
    const int64_t stage_elements = (ADD ? 3 : 2) * n.width;
    const bf16 *own = (const bf16 *)shared + number * stages * stage_elements;
    ring r = {hopper::shared_address(barriers + number * stages), hopper::shared_address(own), (uint32_t)n.width * 2,
              stages, 0, 0};
    column_sums<PIECES, LAYER> sums;
    piece g[PIECES];

    if (t.me == 0) {
        r.open();
        for (int i = 0; i < min(stages, rows); i++) r.fetch<ADD>(n, x, dy, dx, first + i * step, i);
    }
    statistics_ahead<LAYER> ahead(statistics, first, step, n.rows);
#pragma unroll
    for (int c = 0; c < PIECES; c++)
        if (t.me + c * threads < t.pieces) g[c] = piece_at(gain, t.me + c * threads);
    __syncthreads();

    for (int i = 0; i < rows; i++, r.next()) {
        float mean, rstd, sum_g = 0, sum_gh = 0;

        keep_packed(g);
        ahead.take(i, mean, rstd);
        r.wait();
        row_of<PIECES, HELD, ADD> row(t, own + r.stage * stage_elements, n.width);
        add_row<PIECES, LAYER>(t, row, g, mean, rstd, sums, sum_g, sum_gh);
        all_sums<LAYER>(t, part[i & 1], sum_g, sum_gh);
        if (t.me == 0 && i >= BEHIND && i - BEHIND + stages < rows)
            r.fetch<ADD>(n, x, dy, dx, first + (i - BEHIND + stages) * step, r.before(BEHIND));
        row.pack();
        keep_packed(g);
        write_row<PIECES, ADD>(t, row, g, mean, rstd, sum_g / (float)n.width, sum_gh / (float)n.width,
                               dx + (first + i * step) * n.x_stride);
    }
    if (!partial) return;
    __syncthreads(); /* the rings are empty: sums of teams go there */
    write_sums<PIECES, LAYER>(t, teams, sums, n.width, (float *)shared, partial + (int64_t)blockIdx.x * 2 * n.width);
}

/* ---- launches ---- */

/* Threads of a team: a power of two of warps, so that as many teams fill a block. */
static inline int team_threads(int64_t width)
{
    int threads = 32;

    while (divided(width / WIDE, threads) > MOST_PIECES) threads *= 2;
    return threads;
}

template <bool LAYER>
static void backward(cuda_device *d, const struct norm *n, const bf16 *x, const bf16 *gain, const float *statistics,
                     const bf16 *dy, bf16 *dx, float *partial, unsigned blocks)
{
    const int team = team_threads(n->width), teams = BACKWARD_THREADS / team;
    const size_t stage = (size_t)n->width * 2 * (n->add ? 3 : 2) * (size_t)teams;
    const int stages = (int)std::max<size_t>(2, std::min<size_t>(MOST_STAGES, (LAYER ? LAYER_RINGS : RINGS) / stage));
    const size_t sums = (size_t)teams * (size_t)n->width * sizeof(float) * (LAYER ? 2 : 1);
    const size_t shared = std::max((size_t)stages * stage, sums);

    with_pieces(divided(n->width / WIDE, team), [&](auto pieces) {
        constexpr int PIECES = decltype(pieces)::value;
        auto launch = [&](auto kernel) {
            allow_shared(kernel, shared);
            kernel<<<blocks, BACKWARD_THREADS, shared, d->stream>>>(*n, x, gain, statistics, dy, dx, partial, team,
                                                                    stages);
        };

        if (n->add)
            launch(backward_kernel<PIECES, LAYER, true>);
        else
            launch(backward_kernel<PIECES, LAYER, false>);
    });
}

} /* namespace held */
