/* Rows of the embedding table by token, and the sum of gradients back into them.
 *
 * Backward sorts the rows by token, stable, and shares the sorted ones out in windows of equal length: however often a token
 * comes, a block has the same work. A run of one token that lies in a window goes to the table at once; what a run has in
 * each of several windows is kept aside and added in order afterwards, by one writer. */
#include "device/sort.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int AT_ONCE = 4; /* pieces of a row, or rows, that a thread has under way */

template <class T, int V>
__global__ __launch_bounds__(THREADS) void forward_kernel(const struct embed e, const int32_t *token, const T *table, T *y)
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

/* ---- backward: rows by token ---- */

constexpr int DIGIT = 9; /* bits of a token that one pass sorts by */

/* A pass of the radix sort: items of the pass before (NULL: in the order of rows) by the digit at `shift`. A negative token is
 * all ones, and there are more digits than a token of the vocabulary needs: it comes last and alone. */
struct digits {
    const int32_t *token, *before;
    int32_t *after;
    int shift;

    __device__ int32_t row(int64_t i) const { return before ? before[i] : (int32_t)i; }
    __device__ int bin(int64_t i) const { return (int)((unsigned)token[row(i)] >> shift) & ((1 << DIGIT) - 1); }
    __device__ void put(int64_t i, int slot) const { after[slot] = row(i); }
};

/* The rows in order of their tokens, in one of the two arrays. */
const int32_t *sort_rows(cuda_device *d, const struct embed *e, const int32_t *token, int32_t *one, int32_t *two,
                         int32_t *counts)
{
    const int32_t *sorted = nullptr;

    for (int shift = 0; shift == 0 || e->vocabulary >> shift; shift += DIGIT) {
        int32_t *after = sorted == one ? two : one;

        counting_sort(d, e->rows, 1 << DIGIT, digits{token, sorted, after, shift}, counts, nullptr);
        sorted = after;
    }
    return sorted;
}

/* ---- backward: sums of runs ---- */

/* What is left of a window's first run, if that began before, and of its last, if that goes on: fp32 [windows, 2, width]. */
struct windows {
    const int32_t *sorted;
    int64_t rows;
    int length;
    float *rest;

    __device__ int32_t token_at(const int32_t *token, int64_t i) const
    {
        return i >= 0 && i < rows ? token[sorted[i]] : -1;
    }
};

/* The sum so far goes where it belongs, and begins anew. */
template <class G, int V>
__device__ __forceinline__ void flush(G *table, float *rest, bool whole, float (&sum)[V])
{
    if (whole)
        store(table, sum, true);
    else
        store(rest, sum);
#pragma unroll
    for (int i = 0; i < V; i++) sum[i] = 0;
}

/* A window by blockIdx.x, V columns a thread. */
template <class T, class G, int V>
__global__ __launch_bounds__(THREADS) void runs_kernel(const struct embed e, const windows w, const int32_t *token, const T *dy,
                                                       G *dtable)
{
    const int64_t begin = blockIdx.x * (int64_t)w.length, end = min(begin + w.length, w.rows);
    const int64_t j = (blockIdx.y * (int64_t)THREADS + threadIdx.x) * V;
    const int32_t before = w.token_at(token, begin - 1), after = w.token_at(token, end);
    float *rest = w.rest + blockIdx.x * 2 * e.width + j, sum[V] = {};

    if (j >= e.width) return;
    for (int64_t first = begin; first < end; first += AT_ONCE) {
        int32_t mine[AT_ONCE], next[AT_ONCE];
        several<T, V> row[AT_ONCE] = {};

#pragma unroll
        for (int q = 0; q < AT_ONCE; q++) {
            mine[q] = first + q < end ? w.token_at(token, first + q) : -1;
            next[q] = w.token_at(token, first + q + 1);
            if (mine[q] >= 0) row[q] = *(const several<T, V> *)(dy + w.sorted[first + q] * e.width + j);
        }
#pragma unroll
        for (int q = 0; q < AT_ONCE; q++) {
            if (mine[q] < 0) continue;
#pragma unroll
            for (int i = 0; i < V; i++) sum[i] += get(row[q].at[i]);
            if (next[q] == mine[q] && first + q + 1 < end) continue;
            const bool came = mine[q] == before, goes = mine[q] == after;
            flush(dtable + mine[q] * e.width + j, rest + (came ? 0 : e.width), !came && !goes, sum);
        }
    }
}

/* Runs of several windows: the block of the window where one begins adds up its parts. */
template <class G, int V>
__global__ __launch_bounds__(THREADS) void rests_kernel(const struct embed e, const windows w, const int32_t *token, G *dtable)
{
    const int64_t j = (blockIdx.y * (int64_t)THREADS + threadIdx.x) * V, all = (w.rows + w.length - 1) / w.length;
    const int64_t end = (blockIdx.x + 1) * (int64_t)w.length;
    const int32_t mine = w.token_at(token, end - 1);
    float sum[V];

    if (mine < 0 || mine != w.token_at(token, end) || j >= e.width) return;
    if (mine == w.token_at(token, end - w.length - 1)) return; /* began before */
    load(w.rest + (2 * (int64_t)blockIdx.x + 1) * e.width + j, sum);
    for (int64_t at = blockIdx.x + 1; at < all && w.token_at(token, at * w.length) == mine; at++) {
        float part[V];

        load(w.rest + 2 * at * e.width + j, part);
#pragma unroll
        for (int i = 0; i < V; i++) sum[i] += part[i];
    }
    store(dtable + mine * e.width + j, sum, true);
}

void embed_backward(struct stream *s, const struct embed *e, const int32_t *token, const void *dy, void *dtable)
{
    constexpr int SHORTEST = 16; /* rows of a window */
    cuda_device *d = device_of(s);
    const bool wide = e->width % WIDE == 0 && aligned16(dy) && aligned16(dtable);
    size_t used = 0;

    count_embed_backward(s, e);
    if (e->rows == 0) return;
    int32_t *one = carve<int32_t>(d->scratch, &used, e->rows), *two = carve<int32_t>(d->scratch, &used, e->rows);
    int32_t *counts = carve<int32_t>(d->scratch, &used, (int64_t)(sort_bytes(e->rows, 1 << DIGIT) / sizeof(int32_t)));
    const int64_t most = used < SCRATCH_BYTES ? (int64_t)((SCRATCH_BYTES - used) / (2 * (size_t)e->width * sizeof(float))) : 0;
    if (most == 0) {
        record_error(d, cudaErrorInvalidValue, "embed_backward: more rows than the scratch has room for");
        return;
    }
    const int length = (int)std::max<int64_t>(SHORTEST, divided(e->rows, most));
    const windows w = {sort_rows(d, e, token, one, two, counts), e->rows, length, (float *)((char *)d->scratch + used)};
    with_type_and_width(e->type, wide, [&](auto element, auto width) {
        using T = decltype(element);
        constexpr int V = decltype(width)::value;
        const dim3 grid((unsigned)divided(e->rows, length), (unsigned)divided(e->width, THREADS * V));

        with_type(e->gradient, [&](auto other) {
            using G = decltype(other);
            runs_kernel<T, G, V><<<grid, THREADS, 0, d->stream>>>(*e, w, token, (const T *)dy, (G *)dtable);
            rests_kernel<G, V><<<grid, THREADS, 0, d->stream>>>(*e, w, token, (G *)dtable);
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
