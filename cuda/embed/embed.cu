/* Rows of the embedding table by token, and the sum of gradients back into them.
 *
 * Backward puts the rows of each token side by side, in order, and has a block for each. The first of few rows of a
 * token adds them all up; of many, each takes some columns, so that however often a token comes, many blocks share the
 * work. Either way an element of the table has one writer, which adds the rows in a fixed order. */
#include "device/early.cuh"
#include "embed/group.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int AT_ONCE = 4; /* pieces of a row, or rows, that a thread has under way */

template <class T, int V>
__global__ __launch_bounds__(THREADS) void forward_kernel(const struct embed e, const int32_t *token, const T *table,
                                                          T *y)
{
    const int32_t from = token[blockIdx.x];

    table += from * e.width;
    y += blockIdx.x * e.width;
    for (int64_t first = threadIdx.x * V; first < e.width; first += AT_ONCE * THREADS * V) {
        several<T, V> all[AT_ONCE] = {};

#pragma unroll
        for (int q = 0; q < AT_ONCE; q++) {
            const int64_t j = first + q * THREADS * V;
            if (from >= 0 && j < e.width) all[q] = *(const several<T, V> *)(table + j);
        }
#pragma unroll
        for (int q = 0; q < AT_ONCE; q++) {
            const int64_t j = first + q * THREADS * V;
            if (j < e.width) *(several<T, V> *)(y + j) = all[q];
        }
    }
}

void embed_forward(struct stream *s, const struct embed *e, const int32_t *token, const void *table, void *y)
{
    cuda_device *d = device_of(s);
    const bool wide = e->width % WIDE == 0 && aligned16(table) && aligned16(y);

    count_embed_forward(s, e);
    if (e->rows == 0) return;
    with_type_and_width(e->type, wide, [&](auto element, auto width) {
        using T = decltype(element);
        constexpr int V = decltype(width)::value;
        forward_kernel<T, V><<<(unsigned)e->rows, THREADS, 0, d->stream>>>(*e, token, (const T *)table, (T *)y);
    });
    launched(d, "embed_forward");
}

/* ---- backward ---- */

/* Rows in groups of one token. */
struct grouped_rows {
    int32_t *token, *row;
};

constexpr int SUM_THREADS = 128;
constexpr int FEW = 4;          /* rows of a token that one block adds up alone */
constexpr int MOST_SLICES = 96; /* blocks that share the columns of a token's many rows */

/* The rows of a block's token among the grouped ones. */
struct run {
    int32_t token; /* negative: nothing to do */
    int before;    /* how many come before the block's own, MOST_SLICES at most */
    int ahead;     /* how many from its own on, 32 at most */
    int32_t row;   /* lane i: the one i further on */

    __device__ run(const grouped_rows &s, int64_t rows)
    {
        const int64_t own = blockIdx.x;
        const int lane = threadIdx.x % 32;
        unsigned lower[MOST_SLICES / 32];

        const int32_t here = own + lane < rows ? s.token[own + lane] : -1;
        token = __shfl_sync(~0u, here, 0);
        row = own + lane < rows ? s.row[own + lane] : 0;
#pragma unroll
        for (int q = 0; q < MOST_SLICES / 32; q++) {
            const int64_t at = own - 1 - lane - 32 * q;
            lower[q] = __ballot_sync(~0u, at >= 0 && s.token[at] == token);
        }
        ahead = ones(__ballot_sync(~0u, here == token));
        before = 0;
#pragma unroll
        for (int q = 0; q < MOST_SLICES / 32; q++)
            if (before == 32 * q) before += ones(lower[q]);
    }
    /* From the lowest bit on. */
    static __device__ __forceinline__ int ones(unsigned x) { return x == ~0u ? 32 : __ffs(~x) - 1; }
};

/* Adds n rows to a row of the table; PIECES of a row and ROWS at once. */
template <int PIECES, int ROWS, int V, class T, class G>
__device__ __forceinline__ void add_rows(const struct embed &e, const int *list, int n, const T *dy, G *table)
{
    for (int64_t first = threadIdx.x * V; first < e.width; first += PIECES * SUM_THREADS * V) {
        several<G, V> old[PIECES];
        float sum[PIECES][V] = {};

#pragma unroll
        for (int c = 0; c < PIECES; c++) {
            const int64_t j = first + c * SUM_THREADS * V;
            if (j < e.width) old[c] = *(const several<G, V> *)(table + j);
        }
        for (int r = 0; r < n; r += ROWS) {
            several<T, V> part[ROWS][PIECES];

#pragma unroll
            for (int q = 0; q < ROWS; q++)
#pragma unroll
                for (int c = 0; c < PIECES; c++) {
                    const int64_t j = first + c * SUM_THREADS * V;
                    if (r + q < n && j < e.width) part[q][c] = *(const several<T, V> *)(dy + list[r + q] * e.width + j);
                }
#pragma unroll
            for (int q = 0; q < ROWS; q++)
#pragma unroll
                for (int c = 0; c < PIECES; c++)
#pragma unroll
                    for (int i = 0; i < V; i++)
                        if (r + q < n) sum[c][i] += get(part[q][c].at[i]);
        }
#pragma unroll
        for (int c = 0; c < PIECES; c++) {
            const int64_t j = first + c * SUM_THREADS * V;

#pragma unroll
            for (int i = 0; i < V; i++) sum[c][i] += get(old[c].at[i]);
            if (j < e.width) store(table + j, sum[c]);
        }
    }
}

/* Of n rows, this block's being number `number`: adds them all in slices of columns number, number + n, ... Groups of
 * threads take rows in turn, and are added in order. */
template <int V, class T, class G>
__device__ void add_slices(const struct embed &e, const int32_t *rows, int n, int number, const T *dy, G *table)
{
    constexpr int THINNEST = V > 1 ? 8 : 64;
    __shared__ float part[SUM_THREADS][V + 1];
    const int pieces = (int)(e.width / V), shared_by = min(n, MOST_SLICES);
    const int wanted = (pieces + shared_by - 1) / shared_by;
    const int thick = min((wanted + THINNEST - 1) / THINNEST * THINNEST, SUM_THREADS);
    const int groups = SUM_THREADS / thick, group = threadIdx.x / thick;

    for (int slice = number; slice * thick < pieces; slice += shared_by) {
        const int piece = slice * thick + threadIdx.x % thick;
        const bool mine = group < groups && piece < pieces;
        float sum[V] = {};

        for (int r = group; mine && r < n; r += AT_ONCE * groups) {
            several<T, V> row[AT_ONCE];

#pragma unroll
            for (int q = 0; q < AT_ONCE; q++)
                if (r + q * groups < n)
                    row[q] = *(const several<T, V> *)(dy + rows[r + q * groups] * e.width + piece * V);
#pragma unroll
            for (int q = 0; q < AT_ONCE; q++)
#pragma unroll
                for (int i = 0; i < V; i++)
                    if (r + q * groups < n) sum[i] += get(row[q].at[i]);
        }
        __syncthreads(); /* the slice before is added up */
#pragma unroll
        for (int i = 0; i < V; i++) part[threadIdx.x][i] = sum[i];
        __syncthreads();
        if (!mine || group != 0) continue;
        for (int g = 1; g < groups; g++)
#pragma unroll
            for (int i = 0; i < V; i++) sum[i] += part[threadIdx.x + g * thick][i];
        store(table + piece * V, sum, true);
    }
}

template <class T, class G, int V>
__global__ __launch_bounds__(SUM_THREADS, 6) void sums_kernel(const struct embed e, const grouped_rows grouped,
                                                              const T *dy, G *dtable)
{
    __shared__ int list[FEW];

    wait_for_kernel_before(); /* until the rows are in groups */
    const run own(grouped, e.rows);

    if (own.token < 0 || own.before == MOST_SLICES) return;
    G *table = dtable + own.token * e.width;
    if (own.before + own.ahead > FEW) {
        const int64_t first = blockIdx.x - own.before;
        int n = own.before;

        for (int64_t at = blockIdx.x;; at += SUM_THREADS) {
            const int64_t mine = at + threadIdx.x;
            const int here = __syncthreads_count(mine < e.rows && grouped.token[mine] == own.token);

            n += here;
            if (here < SUM_THREADS) break;
        }
        add_slices<V>(e, grouped.row + first, n, own.before, dy, table);
    } else if (own.before == 0 && own.ahead == 1) {
        const int alone = __shfl_sync(~0u, own.row, 0);

        add_rows<3, 1, V>(e, &alone, 1, dy, table);
    } else if (own.before == 0) {
        if ((int)threadIdx.x < own.ahead) list[threadIdx.x] = own.row;
        __syncthreads();
        add_rows<1, 4, V>(e, list, own.ahead, dy, table);
    }
}

void embed_backward(struct stream *s, const struct embed *e, const int32_t *token, const void *dy, void *dtable)
{
    cuda_device *d = device_of(s);
    const bool wide = e->width % WIDE == 0 && aligned16(dy) && aligned16(dtable);
    size_t used = 0;

    count_embed_backward(s, e);
    if (e->rows == 0) return;
    const grouped_rows grouped = {carve<int32_t>(d->scratch, &used, e->rows),
                                  carve<int32_t>(d->scratch, &used, e->rows)};
    group::item *room = carve<group::item>(d->scratch, &used, e->rows);
    if (used > SCRATCH_BYTES) {
        record_error(d, cudaErrorInvalidValue, "embed_backward: more rows than the scratch has room for");
        return;
    }
    group::launch(d->stream, e->rows, token, room, grouped.token, grouped.row);
    with_type_and_width(e->type, wide, [&](auto element, auto width) {
        using T = decltype(element);
        constexpr int V = decltype(width)::value;

        with_type(e->gradient, [&](auto other) {
            using G = decltype(other);
            launch_following(d->stream, sums_kernel<T, G, V>, (unsigned)e->rows, SUM_THREADS, 0, *e, grouped,
                             (const T *)dy, (G *)dtable);
        });
    });
    launched(d, "embed_backward");
}

} /* namespace */

void fill_embed(struct ops *t)
{
    t->embed_forward = embed_forward;
    t->embed_backward = embed_backward;
}
