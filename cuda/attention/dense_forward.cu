/* Causal attention over whole documents, forward (model.md 2.2, not absorbed): out = softmax(scale * q k^T) v.
 *
 * A block takes a tile of queries of one head over their keys, tile by tile, keeping per row the largest logit so
 * far, the sum of exponentials under it, and the sum of values under it; a new largest logit shrinks both sums. */
#include "attention/dense.cuh"

namespace {

constexpr int QUARTER = TILE_THREADS / TILE; /* threads that share a row of a tile */

/* Softmax so far, of the tile's rows. */
struct progress {
    float top[TILE], sum[TILE], shrink[TILE];
};

/* A row of logits becomes exponentials of the type; -inf is what the row does not see. */
template <class T>
__device__ void soften(const float (*logit)[TILE + 1], T (*weight)[TILE + tile_shape<T>::PAD], progress *p)
{
    const int row = threadIdx.x / QUARTER, part = threadIdx.x % QUARTER;
    const float before = p->top[row];
    float top = before, sum = 0;

    for (int c = part; c < TILE; c += QUARTER) top = fmaxf(top, logit[row][c]);
    for (int apart = 1; apart < QUARTER; apart *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, apart));
    for (int c = part; c < TILE; c += QUARTER) {
        const float e = logit[row][c] == -INFINITY ? 0 : expf(logit[row][c] - top);

        sum += e;
        weight[row][c] = to<T>(e);
    }
    for (int apart = 1; apart < QUARTER; apart *= 2) sum += __shfl_xor_sync(~0u, sum, apart);
    __syncwarp();
    if (part != 0) return;
    p->shrink[row] = before == -INFINITY ? 0 : expf(before - top);
    p->sum[row] = p->sum[row] * p->shrink[row] + sum;
    p->top[row] = top;
}

/* blockIdx: tile of rows, head, group of CHUNKS * TILE columns of the values. */
template <class T, int CHUNKS>
__global__ __launch_bounds__(TILE_THREADS) void forward_kernel(const dense_call x, T *out, float *lse)
{
    using dots = tile<T, TILE, TILE, ALONG, ALONG>;
    using values = tile<T, TILE, TILE, ALONG, ACROSS>;
    __shared__ union {
        typename dots::shared of_dots;
        typename values::shared of_values;
    } shared;
    __shared__ float logit[TILE][TILE + 1];
    __shared__ alignas(16) T weight[TILE][TILE + tile_shape<T>::PAD];
    __shared__ progress soft;
    __shared__ dense_bounds bound;
    const int64_t row = (int64_t)blockIdx.x * TILE, head = blockIdx.y, column = (int64_t)blockIdx.z * CHUNKS * TILE;
    const int rows = (int)min((int64_t)TILE, x.a.rows - row);
    const range all = visible_range(x.start, x.end, row, rows);
    values sum[CHUNKS];
    dots t;

    read_bounds(x, row, rows, &bound);
    if (threadIdx.x < TILE) {
        soft.top[threadIdx.x] = -INFINITY;
        soft.sum[threadIdx.x] = 0;
    }
    for (int c = 0; c < CHUNKS; c++) sum[c].clear();
    for (int64_t key = all.low; key < all.high; key += TILE) {
        const int keys = (int)min((int64_t)TILE, x.a.keys - key);

        t.clear();
        t.multiply(shared.of_dots, of_head<T>(x, x.q, x.a.qk, row, head, rows),
                   of_head<T>(x, x.k, x.a.qk, key, head, keys), x.a.qk);
        t.each([&](int r, int c, float dot) { logit[r][c] = seen(bound, r, key + c) ? dot * x.a.scale : -INFINITY; });
        __syncthreads();
        soften<T>(logit, weight, &soft);
        __syncthreads();
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
#pragma unroll
            for (int e = 0; e < values::COUNT; e++) sum[c].sum[e] *= soft.shrink[values::row(e)];
            if (column + c * TILE < x.a.v)
                sum[c].multiply_shared(shared.of_values, &weight[0][0], TILE + tile_shape<T>::PAD,
                                       across_head<T>(x, x.v, x.a.v, key, head, column + c * TILE), keys);
        }
    }
    __syncthreads();
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
        sum[c].each([&](int r, int e, float value) {
            const int64_t at = column + c * TILE + e;
            if (r < rows && at < x.a.v)
                out[((row + r) * x.a.heads + head) * x.a.v + at] = to<T>(soft.sum[r] == 0 ? 0 : value / soft.sum[r]);
        });
    if (blockIdx.z == 0 && (int)threadIdx.x < rows)
        lse[(row + threadIdx.x) * x.a.heads + head] =
            soft.sum[threadIdx.x] == 0 ? INFINITY : soft.top[threadIdx.x] + logf(soft.sum[threadIdx.x]);
}

template <class T, int CHUNKS>
void launch(cuda_device *d, const dense_call &x, void *out, float *lse)
{
    const dim3 grid((unsigned)divided(x.a.rows, TILE), (unsigned)x.a.heads, (unsigned)divided(x.a.v, CHUNKS * TILE));

    forward_kernel<T, CHUNKS><<<grid, TILE_THREADS, 0, d->stream>>>(x, (T *)out, lse);
}

size_t dense_attention_forward_bytes(struct stream *, const struct dense_attention *)
{
    return 0;
}

void dense_attention_forward(struct stream *s, const struct dense_attention *a, const void *q, const void *k,
                             const void *v, const int32_t *start, const int32_t *end, void *out, float *lse, void *)
{
    cuda_device *d = device_of(s);
    const dense_call x = dense_call_of(a, q, k, v, start, end);

    count_dense_attention_forward(s, a);
    if (a->rows == 0) return;
    if (!hopper_forward(d, x, out, lse))
        with_type(a->type, [&](auto element) {
            using T = decltype(element);

            if (a->v <= TILE)
                launch<T, 1>(d, x, out, lse);
            else
                launch<T, 4>(d, x, out, lse);
        });
    launched(d, "dense_attention_forward");
}

} /* namespace */

void fill_dense_attention(struct ops *t)
{
    t->dense_attention_forward_bytes = dense_attention_forward_bytes;
    t->dense_attention_forward = dense_attention_forward;
    fill_dense_attention_backward(t);
}
