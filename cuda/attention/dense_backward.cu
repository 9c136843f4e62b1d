/* Causal attention over whole documents, backward (model.md 2.2, not absorbed). With P the probabilities,
 * redone from lse, and D = sum(out * dout):
 *     dS = P * (dout v^T - D) * scale,  dq = dS k,  dk = dS^T q,  dv = P^T dout.
 *
 * A block has one tile of one gradient, all its terms in order: of queries over their keys, or of keys over the rows
 * that see them. So a sum has one writer and one order; P and dS are redone for each of the three. The widths of
 * GLM-5.2 in bf16 have kernels of their own (hopper.cuh). */
#include "attention/dense.cuh"

namespace {

size_t layout(const struct dense_attention *a, void *base, dense_gradients *g)
{
    size_t used = 0;

    g->delta = carve<float>(base, &used, a->rows * a->heads);
    g->seen = carve<range>(base, &used, divided(a->rows, TILE));
    g->space = carve<char>(base, &used, (int64_t)hopper_bytes(a));
    return used;
}

size_t dense_attention_backward_bytes(struct stream *, const struct dense_attention *a)
{
    dense_gradients g;

    return layout(a, nullptr, &g);
}

/* ---- before ---- */

template <class T>
__global__ __launch_bounds__(TILE_THREADS) void delta_kernel(const dense_call x, const dense_gradients g)
{
    const int64_t i = blockIdx.x * (int64_t)(TILE_THREADS / 32) + threadIdx.x / 32;
    const T *out = (const T *)g.out + i * x.a.v, *dout = (const T *)g.dout + i * x.a.v;
    float sum = 0;

    if (i >= x.a.rows * x.a.heads) return;
    for (int c = threadIdx.x % 32; c < x.a.v; c += 32) sum += get(out[c]) * get(dout[c]);
    sum = warp_reduce(sum, plus());
    if (threadIdx.x % 32 == 0) g.delta[i] = sum;
}

__global__ __launch_bounds__(TILE_THREADS) void seen_kernel(const dense_call x, const dense_gradients g)
{
    const int64_t row = (int64_t)blockIdx.x * TILE;
    const range all = visible_range(x.start, x.end, row, (int)min((int64_t)TILE, x.a.rows - row));

    if (threadIdx.x == 0) g.seen[blockIdx.x] = all;
}

/* ---- one tile of rows and keys ---- */

struct place {
    int64_t row, key, head;
    int rows, keys;
};

template <class T> using dots = tile<T, TILE, TILE, ALONG, ALONG>;
template <class T> using weights = T[TILE][TILE + tile_shape<T>::PAD];

/* P, or dS if slope, into shared memory; 0 where a row does not see a key. */
template <class T>
__device__ void redo(const dense_call &x, const dense_gradients &g, const dense_bounds &bound, const place &p,
                     bool slope, typename dots<T>::shared &shared, weights<T> &to_tile)
{
    dots<T> logit, change;

    logit.clear();
    logit.multiply(shared, of_head<T>(x, x.q, x.a.qk, p.row, p.head, p.rows),
                   of_head<T>(x, x.k, x.a.qk, p.key, p.head, p.keys), x.a.qk);
    change.clear();
    if (slope)
        change.multiply(shared, of_head<T>(x, g.dout, x.a.v, p.row, p.head, p.rows),
                        of_head<T>(x, x.v, x.a.v, p.key, p.head, p.keys), x.a.v);
    __syncthreads();
#pragma unroll
    for (int e = 0; e < dots<T>::COUNT; e++) {
        const int r = dots<T>::row(e), c = dots<T>::column(e);
        const int64_t at = (p.row + r) * x.a.heads + p.head;
        float value = 0;

        if (seen(bound, r, p.key + c)) {
            value = expf(logit.sum[e] * x.a.scale - g.lse[at]);
            if (slope) value *= (change.sum[e] - g.delta[at]) * x.a.scale;
        }
        to_tile[r][c] = to<T>(value);
    }
    __syncthreads();
}

/* blockIdx: tile of rows, head, group of CHUNKS * TILE columns. */
template <class T, int CHUNKS>
__global__ __launch_bounds__(TILE_THREADS) void queries_kernel(const dense_call x, const dense_gradients g)
{
    using sums = tile<T, TILE, TILE, ALONG, ACROSS>;
    __shared__ union {
        typename dots<T>::shared of_dots;
        typename sums::shared of_sums;
    } shared;
    __shared__ alignas(16) weights<T> slope;
    __shared__ dense_bounds bound;
    place p = {(int64_t)blockIdx.x * TILE, 0, blockIdx.y};
    const int64_t column = (int64_t)blockIdx.z * CHUNKS * TILE;
    const range all = g.seen[blockIdx.x];
    sums sum[CHUNKS];

    p.rows = (int)min((int64_t)TILE, x.a.rows - p.row);
    read_bounds(x, p.row, p.rows, &bound);
    for (int c = 0; c < CHUNKS; c++) sum[c].clear();
    for (p.key = all.low; p.key < all.high; p.key += TILE) {
        p.keys = (int)min((int64_t)TILE, x.a.keys - p.key);
        redo<T>(x, g, bound, p, true, shared.of_dots, slope);
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
            if (column + c * TILE < x.a.qk)
                sum[c].multiply_shared(shared.of_sums, &slope[0][0], TILE + tile_shape<T>::PAD,
                                       across_head<T>(x, x.k, x.a.qk, p.key, p.head, column + c * TILE), p.keys);
    }
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
        sum[c].each([&](int r, int e, float value) {
            const int64_t at = column + c * TILE + e;
            if (r < p.rows && at < x.a.qk) ((T *)g.dq)[((p.row + r) * x.a.heads + p.head) * x.a.qk + at] = to<T>(value);
        });
}

/* dk from dS and q, or dv from P and dout. blockIdx: tile of keys, head, group of columns. */
template <class T, int CHUNKS, bool VALUES>
__global__ __launch_bounds__(TILE_THREADS) void keys_kernel(const dense_call x, const dense_gradients g)
{
    using sums = tile<T, TILE, TILE, ACROSS, ACROSS>;
    __shared__ union {
        typename dots<T>::shared of_dots;
        typename sums::shared of_sums;
    } shared;
    __shared__ alignas(16) weights<T> weight;
    __shared__ dense_bounds bound;
    place p = {0, (int64_t)blockIdx.x * TILE, blockIdx.y};
    const int64_t column = (int64_t)blockIdx.z * CHUNKS * TILE, width = VALUES ? x.a.v : x.a.qk;
    const void *from = VALUES ? g.dout : x.q;
    T *out = (T *)(VALUES ? g.dv : g.dk);
    sums sum[CHUNKS];

    p.keys = (int)min((int64_t)TILE, x.a.keys - p.key);
    for (int c = 0; c < CHUNKS; c++) sum[c].clear();
    for (; p.row < x.a.rows; p.row += TILE) {
        const range seen = g.seen[p.row / TILE];

        if (seen.low >= p.key + p.keys || seen.high <= p.key) continue;
        p.rows = (int)min((int64_t)TILE, x.a.rows - p.row);
        read_bounds(x, p.row, p.rows, &bound);
        redo<T>(x, g, bound, p, !VALUES, shared.of_dots, weight);
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
            if (column + c * TILE < width)
                sum[c].multiply_shared(shared.of_sums, &weight[0][0], TILE + tile_shape<T>::PAD,
                                       across_head<T>(x, from, width, p.row, p.head, column + c * TILE), p.rows);
    }
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
        sum[c].each([&](int u, int e, float value) {
            const int64_t at = column + c * TILE + e;
            if (u < p.keys && at < width) out[((p.key + u) * x.a.heads + p.head) * width + at] = to<T>(value);
        });
}

/* ---- the operation ---- */

unsigned groups_of(int64_t width, int chunks)
{
    return (unsigned)divided(width, chunks * TILE);
}

template <class T, int CHUNKS>
void launch(cuda_device *d, const dense_call &x, const dense_gradients &g)
{
    const unsigned rows = (unsigned)divided(x.a.rows, TILE), keys = (unsigned)divided(x.a.keys, TILE);
    const unsigned heads = (unsigned)x.a.heads;

    if (rows > 0) seen_kernel<<<rows, TILE_THREADS, 0, d->stream>>>(x, g);
    if (hopper_backward(d, x, g)) return;
    if (rows > 0) {
        delta_kernel<T><<<(unsigned)divided(x.a.rows * heads, TILE_THREADS / 32), TILE_THREADS, 0, d->stream>>>(x, g);
        queries_kernel<T, CHUNKS><<<dim3(rows, heads, groups_of(x.a.qk, CHUNKS)), TILE_THREADS, 0, d->stream>>>(x, g);
    }
    if (keys > 0) {
        keys_kernel<T, CHUNKS, false>
            <<<dim3(keys, heads, groups_of(x.a.qk, CHUNKS)), TILE_THREADS, 0, d->stream>>>(x, g);
        keys_kernel<T, CHUNKS, true><<<dim3(keys, heads, groups_of(x.a.v, CHUNKS)), TILE_THREADS, 0, d->stream>>>(x, g);
    }
}

void dense_attention_backward(struct stream *s, const struct dense_attention *a, const void *q, const void *k,
                              const void *v, const int32_t *start, const int32_t *end, const void *out,
                              const float *lse, const void *dout, void *dq, void *dk, void *dv, void *workspace)
{
    cuda_device *d = device_of(s);
    dense_call x = dense_call_of(a, q, k, v, start, end);
    dense_gradients g = {out, dout, lse, nullptr, nullptr, nullptr, dq, dk, dv};

    count_dense_attention_backward(s, a);
    x.wide = x.wide && aligned16(dout);
    layout(a, workspace, &g);
    with_type(a->type, [&](auto element) {
        using T = decltype(element);

        if (a->qk <= TILE && a->v <= TILE)
            launch<T, 1>(d, x, g);
        else
            launch<T, 4>(d, x, g);
    });
    launched(d, "dense_attention_backward");
}

} /* namespace */

void fill_dense_attention_backward(struct ops *t)
{
    t->dense_attention_backward_bytes = dense_attention_backward_bytes;
    t->dense_attention_backward = dense_attention_backward;
}
