/* Lightning indexer: score[t,u] = sum_h weight[t,h] * relu(q[t,h] . key[u]), then the best k keys (model.md 2.3).
 *
 * A block scores a tile of rows x keys, head after head; scores of a chunk of rows stand in a slab of bounded size,
 * from which the rows select. A score's arithmetic does not depend on the chunk or the tile. */
#include "indexer/scores.cuh"

#include "dense/tile.cuh"
#include "indexer/topk.cuh"

namespace {

constexpr size_t SLAB = (size_t)128 << 20; /* bytes of scores at a time */
constexpr int64_t FEWEST_ROWS = 128;      /* but at least so many rows: a tile's */

template <class T> constexpr int TILE = sizeof(T) == 2 ? 128 : 64;

/* Whether any row of the tile needs the score of any of its keys. */
template <class T>
__device__ bool wanted(const score_call &c, int64_t row, int64_t rows, int64_t key, score_use use)
{
    bool any = false;

    if (use == SCORES_ALL) return true;
    if ((int)threadIdx.x < TILE<T> && (int64_t)threadIdx.x < rows) {
        const int64_t first = c.start[row + threadIdx.x], end = c.end[row + threadIdx.x];

        any = first < key + TILE<T> && end > key && first < end && (use != SCORES_SELECT || end - first > c.i.k);
    }
    return __syncthreads_or(any);
}

template <class T>
__global__ __launch_bounds__(TILE_THREADS) void scores_kernel(const score_call c, int64_t first, int64_t rows,
                                                              score_use use, int64_t stride, float *scores)
{
    using product = tile<T, TILE<T>, TILE<T>, ALONG, ALONG>;
    __shared__ typename product::shared shared;
    const int64_t i = (int64_t)blockIdx.y * TILE<T>, u = (int64_t)blockIdx.x * TILE<T>, heads = c.i.heads,
                  width = c.i.width;
    const T *q = (const T *)c.q + (first + i) * heads * width;
    const operand<T> key = {(const T *)c.key + u * width, width, (int)min((int64_t)TILE<T>, c.i.keys - u), c.wide};
    const int left = (int)min((int64_t)TILE<T>, rows - i);
    product dot;
    float total[product::COUNT] = {};

    if (!wanted<T>(c, first + i, left, u, use)) return;
    for (int64_t h = 0; h < heads; h++) {
        dot.clear();
        dot.multiply(shared, operand<T>{q + h * width, heads * width, left, c.wide}, key, width);
#pragma unroll
        for (int e = 0; e < product::COUNT; e++) {
            const int row = product::row(e);
            const float weight = row < left ? c.weight[(first + i + row) * heads + h] : 0;

            total[e] += weight * (dot.sum[e] < 0 ? 0 : dot.sum[e]); /* NaN goes through */
        }
    }
#pragma unroll
    for (int e = 0; e < product::COUNT; e++) {
        const int row = product::row(e);
        const int64_t at = u + product::column(e);

        if (row >= left || at >= c.i.keys) continue;
        const bool seen = at >= c.start[first + i + row] && at < c.end[first + i + row];
        if (seen || use == SCORES_ALL) scores[(i + row) * stride + at] = seen ? total[e] : -INFINITY;
    }
}

/* Elements from one row of the slab to the next: whole lines of memory. */
int64_t slab_stride(const struct indexer *i) { return (i->keys + 31) / 32 * 32; }

int64_t chunk_rows(const struct indexer *i)
{
    const int64_t fit = i->keys ? (int64_t)(SLAB / sizeof(float)) / slab_stride(i) : i->rows;

    return std::min(std::max(fit / FEWEST_ROWS * FEWEST_ROWS, FEWEST_ROWS), i->rows);
}

size_t index_select_bytes(struct stream *, const struct indexer *i)
{
    return (size_t)(chunk_rows(i) * slab_stride(i)) * sizeof(float);
}

void index_select(struct stream *s, const struct indexer *i, const void *q, const void *key, const float *weight,
                  const int32_t *start, const int32_t *end, int32_t *selected, void *workspace)
{
    cuda_device *d = device_of(s);
    const score_call c = score_call_of(i, q, key, weight, start, end);
    const int64_t step = chunk_rows(i), stride = slab_stride(i);

    count_index_select(s, i);
    for (int64_t first = 0; first < i->rows; first += step) {
        const int64_t rows = std::min(step, i->rows - first);

        score_rows(d, c, first, rows, SCORES_SELECT, stride, (float *)workspace);
        select_rows(d, first, rows, i->keys, stride, i->k, (const float *)workspace, start, end, true, selected,
                    nullptr);
    }
    launched(d, "index_select");
}

void index_scores(struct stream *s, const struct indexer *i, const void *q, const void *key, const float *weight,
                  const int32_t *start, const int32_t *end, float *scores)
{
    count_index_scores(s, i);
    score_rows(device_of(s), score_call_of(i, q, key, weight, start, end), 0, i->rows, SCORES_ALL, i->keys,
               scores);
    launched(device_of(s), "index_scores");
}

void select_topk(struct stream *s, int64_t rows, int64_t keys, int32_t k, const float *scores, const int32_t *start,
                 const int32_t *end, int32_t *selected, int32_t *length)
{
    count_select_topk(s, rows, keys, k);
    if (rows == 0) return;
    select_rows(device_of(s), 0, rows, keys, keys, k, scores, start, end, false, selected, length);
    launched(device_of(s), "select_topk");
}

} /* namespace */

score_call score_call_of(const struct indexer *i, const void *q, const void *key, const float *weight,
                         const int32_t *start, const int32_t *end)
{
    return {*i, q, key, weight, start, end, i->width % WIDE == 0 && aligned16(q) && aligned16(key)};
}

void score_rows(cuda_device *d, const score_call &c, int64_t first, int64_t rows, score_use use, int64_t stride,
                float *scores)
{
    if (rows == 0 || c.i.keys == 0 || hopper_score_rows(d, c, first, rows, use, stride, scores)) return;
    with_type(c.i.type, [&](auto element) {
        using T = decltype(element);
        const dim3 grid((unsigned)divided(c.i.keys, TILE<T>), (unsigned)divided(rows, TILE<T>));

        scores_kernel<T><<<grid, TILE_THREADS, 0, d->stream>>>(c, first, rows, use, stride, scores);
    });
}

void fill_indexer(struct ops *t)
{
    t->index_select_bytes = index_select_bytes;
    t->index_select = index_select;
    t->index_scores = index_scores;
    t->select_topk = select_topk;
}
