/* Indexer loss over all visible keys (training.md 1.4). The teacher's probabilities are exp(logit - lse) with the lse
 * that its attention left: one product of its queries and keys, and a second only where no attention saw all of the
 * support. Equations of the gradients: kl_selected.cu.
 *
 * For a chunk of rows two slabs [rows, keys] hold the student's scores and the teacher's probabilities, which turn
 * into the gradient of the scores: the sum of the teacher's probabilities over its heads tile by tile, then the loss
 * of each row; with the gradient of the scores each head of the student is done once more, for rows and for keys. A
 * gradient is summed in fp32 in order of tiles and heads, chunk after chunk. The kernels here take any shape;
 * teacher.cuh and kl_dense.cuh have those on tensor cores, for teacher and student. */
#include "dense/tile.cuh"
#include "indexer/index_kl.cuh"
#include "indexer/kl_dense.cuh"
#include "indexer/teacher.cuh"

namespace {

constexpr int TILE = 64, THREADS = TILE_THREADS;
constexpr int QUARTER = THREADS / TILE;     /* threads that share a row of a tile */
constexpr size_t SLAB = (size_t)64 << 20;   /* bytes of either slab */
constexpr int COLUMNS = 128;                /* of a gradient that a block keeps in registers */

struct arguments {
    struct indexer i;
    struct teacher t;
    const void *q, *key;
    const float *weight;
    const void *teacher_q, *teacher_key;
    const int32_t *start, *end;
    const float *row_weight;
    float *kl;
    void *dq;
    float *dkey, *dweight;
    int64_t first, rows; /* the chunk */
    int64_t stride;      /* of the slabs */
    float *score, *p;    /* [rows, stride] */
    const float *lse;    /* [rows, teacher heads] */
    float *own_lse;      /* the same where it is made here, for teacher.cu TEACHER_PARTS times */
    /* of kl_dense.cuh, else NULL */
    uint32_t *active;    /* [rows, stride] */
    range *seen;         /* [groups of rows] */
    float *part;
    int parts;
};

/* Everything passes through fp32: gradients of keys are fp32 sums, whatever the operands' type. */
using product = tile<float, TILE, TILE, ALONG, ALONG>;

bool is_fast(const struct indexer *i)
{
    return i->type == GLM52_DTYPE_BF16 && i->heads == DENSE_HEADS && i->width == DENSE_WIDTH && i->rows > 0 &&
           i->rows <= INT32_MAX / DENSE_HEADS && i->keys > 0 && i->keys <= INT32_MAX - DENSE_KEYS &&
           i->sides == 0;
}

int64_t slab_stride(const struct indexer *i) { return divided(i->keys, DENSE_KEYS) * DENSE_KEYS; }

/* Of a chunk: multiples of what the tensor cores' kernels take at a time, if so many fit. */
int64_t chunk_rows(const struct indexer *i)
{
    const int64_t whole = 4 * TILE, fit = i->keys ? (int64_t)(SLAB / sizeof(float)) / slab_stride(i) : i->rows;

    return std::min(fit >= whole ? fit / whole * whole : std::max<int64_t>(fit / TILE * TILE, TILE), i->rows);
}

/* As many parts as fill the device three times: under causal attention the first keys
 * have twice the rows of the average. */
int parts_of(const cuda_device *d, const struct indexer *i)
{
    const int64_t fill = 3 * d->multiprocessors / divided(i->keys, DENSE_KEYS);

    return (int)std::max<int64_t>(1, std::min<int64_t>({fill, DENSE_MOST_PARTS, divided(chunk_rows(i), DENSE_GROUP)}));
}

size_t layout(const cuda_device *d, const struct indexer *i, const struct teacher *t, void *base, arguments *x)
{
    const int64_t rows = divided(chunk_rows(i), DENSE_GROUP) * DENSE_GROUP;
    size_t used = 0;

    x->stride = slab_stride(i);
    x->score = carve<float>(base, &used, rows * x->stride);
    x->p = carve<float>(base, &used, rows * x->stride);
    x->own_lse = carve<float>(base, &used, TEACHER_PARTS * rows * t->heads);
    if (is_fast(i)) {
        x->parts = parts_of(d, i);
        x->active = carve<uint32_t>(base, &used, rows * x->stride);
        x->seen = carve<range>(base, &used, rows / DENSE_GROUP);
        x->part = carve<float>(base, &used, x->parts * x->stride * DENSE_WIDTH);
    }
    return used;
}

size_t index_kl_dense_bytes(struct stream *s, const struct indexer *i, const struct teacher *t)
{
    arguments x = {};

    return layout(device_of(s), i, t, nullptr, &x);
}

/* A tile of rows of the chunk. */
struct block {
    int64_t row;  /* in the chunk; x.first + row in all */
    int rows;
};

__device__ block block_of(const arguments &x, int64_t number)
{
    return {number * TILE, (int)min((int64_t)TILE, x.rows - number * TILE)};
}

/* Bounds of a tile's rows, on chip. */
struct bounds {
    int start[TILE], end[TILE];
};

__device__ void read_bounds(const arguments &x, const block &b, bounds *to)
{
    __syncthreads();
    if ((int)threadIdx.x < TILE) {
        const bool here = (int)threadIdx.x < b.rows;

        to->start[threadIdx.x] = here ? x.start[x.first + b.row + threadIdx.x] : 0;
        to->end[threadIdx.x] = here ? x.end[x.first + b.row + threadIdx.x] : 0;
    }
    __syncthreads();
}

__device__ bool seen(const bounds &b, int row, int64_t key)
{
    return key >= b.start[row] && key < b.end[row];
}

__device__ bool any_seen(const bounds &b, int64_t key)
{
    const bool mine = threadIdx.x < TILE && b.start[threadIdx.x] < b.end[threadIdx.x] &&
                      b.start[threadIdx.x] < key + TILE && b.end[threadIdx.x] > key;

    return __syncthreads_or(mine);
}

template <class T>
__device__ operand<T> rows_of(const void *array, int64_t heads, int64_t width, int64_t row, int64_t head, int rows)
{
    return {(const T *)array + (row * heads + head) * width, heads * width, rows, false};
}

template <class T>
__device__ void teacher_logits(const arguments &x, product &t, product::shared &shared, const block &b, int64_t key,
                               int h)
{
    const int64_t of = (int64_t)h * x.t.key_heads / x.t.heads;

    t.clear();
    t.multiply(shared, rows_of<T>(x.teacher_q, x.t.heads, x.t.width, x.first + b.row, h, b.rows),
               rows_of<T>(x.teacher_key, x.t.key_heads, x.t.width, key, of, (int)min((int64_t)TILE, x.i.keys - key)),
               x.t.width);
}

template <class T>
__device__ void student_dots(const arguments &x, product &t, product::shared &shared, const block &b, int64_t key,
                             int h)
{
    t.clear();
    t.multiply(shared, rows_of<T>(x.q, x.i.heads, x.i.width, x.first + b.row, h, b.rows),
               rows_of<T>(x.key, 1, x.i.width, key, 0, (int)min((int64_t)TILE, x.i.keys - key)), x.i.width);
}

/* ---- the teacher ---- */

/* logsumexp of one head (blockIdx.y) over what each row of a tile sees. */
template <class T>
__global__ __launch_bounds__(THREADS) void teacher_lse_kernel(const arguments x)
{
    __shared__ product::shared shared;
    __shared__ float logit[TILE][TILE + 1];
    __shared__ bounds bound;
    const block b = block_of(x, blockIdx.x);
    const range all = visible_range(x.start, x.end, x.first + b.row, b.rows);
    const int row = threadIdx.x / QUARTER, part = threadIdx.x % QUARTER;
    float top = -INFINITY, sum = 0;
    product t;

    read_bounds(x, b, &bound);
    for (int64_t key = all.low; key < all.high; key += TILE) {
        teacher_logits<T>(x, t, shared, b, key, blockIdx.y);
        t.each([&](int r, int c, float dot) { logit[r][c] = seen(bound, r, key + c) ? dot * x.t.scale : -INFINITY; });
        __syncthreads();
        float most = top, here = 0;
        for (int c = part; c < TILE; c += QUARTER) most = fmaxf(most, logit[row][c]);
        for (int apart = 1; apart < QUARTER; apart *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, apart));
        for (int c = part; c < TILE; c += QUARTER) here += logit[row][c] == -INFINITY ? 0 : expf(logit[row][c] - most);
        for (int apart = 1; apart < QUARTER; apart *= 2) here += __shfl_xor_sync(~0u, here, apart);
        sum = (top == -INFINITY ? 0 : sum * expf(top - most)) + here;
        top = most;
    }
    if (part == 0 && row < b.rows)
        x.own_lse[(b.row + row) * x.t.heads + blockIdx.y] = sum == 0 ? INFINITY : top + logf(sum);
}

/* p = mean over heads. blockIdx.x: the tile of keys. */
template <class T>
__global__ __launch_bounds__(THREADS) void teacher_mean_kernel(const arguments x)
{
    __shared__ product::shared shared;
    __shared__ bounds bound;
    const block b = block_of(x, blockIdx.y);
    const int64_t key = (int64_t)blockIdx.x * TILE;
    float total[product::COUNT] = {};
    product t;

    read_bounds(x, b, &bound);
    if (!any_seen(bound, key)) return;
    for (int h = 0; h < x.t.heads; h++) {
        teacher_logits<T>(x, t, shared, b, key, h);
#pragma unroll
        for (int e = 0; e < product::COUNT; e++) {
            const int row = product::row(e);

            if (seen(bound, row, key + product::column(e)))
                total[e] += expf(t.sum[e] * x.t.scale - x.lse[(b.row + row) * x.t.heads + h]);
        }
    }
#pragma unroll
    for (int e = 0; e < product::COUNT; e++)
        if (seen(bound, product::row(e), key + product::column(e)))
            x.p[(b.row + product::row(e)) * x.stride + key + product::column(e)] = total[e] / (float)x.t.heads;
}

/* ---- the student ---- */

/* What each group of rows sees. */
__global__ void ranges_kernel(const arguments x)
{
    const int64_t group = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    range seen = {INT32_MAX, 0};

    if (group * DENSE_GROUP >= x.rows) return;
    for (int64_t row = group * DENSE_GROUP; row < min((group + 1) * DENSE_GROUP, x.rows); row++) {
        const int start = x.start[x.first + row], end = x.end[x.first + row];

        if (start < end) seen = {min(seen.low, start), max(seen.high, end)};
    }
    x.seen[group] = seen.low < seen.high ? seen : range{0, 0};
}

/* The loss of each row; p becomes the gradient of the scores, for the tensor cores' kernels also 0 where a row sees
 * nothing of what others of its group see, and in rows that fill up the last group. */
__global__ __launch_bounds__(THREADS) void loss_kernel(const arguments x)
{
    const int64_t t = x.first + blockIdx.x;
    const bool here = blockIdx.x < x.rows;
    const int start = here ? x.start[t] : 0, end = here ? max(x.end[t], start) : 0;
    float *p = x.p + blockIdx.x * x.stride;
    const float kl = start < end ? kl_row<THREADS>(x.score + blockIdx.x * x.stride + start, p + start, end - start,
                                                   x.row_weight[t], p + start)
                                 : 0;

    if (threadIdx.x == 0 && here) x.kl[t] = kl;
    if (!x.seen) return;
    const range seen = x.seen[blockIdx.x / DENSE_GROUP];
    const int64_t low = seen.low / DENSE_KEYS * DENSE_KEYS,
                  high = (seen.high + DENSE_KEYS - 1LL) / DENSE_KEYS * DENSE_KEYS;
    for (int64_t u = low + threadIdx.x; u < high; u += THREADS)
        if (u < start || u >= end) p[u] = 0;
}

/* c of a tile into shared memory, 0 where not visible, and if wanted the terms of dweight. */
template <class T>
__device__ void coefficients(const arguments &x, product::shared &shared, const bounds &bound, const block &b,
                             int64_t key, int h, float (*c)[TILE + 4], float (*term)[TILE + 1])
{
    product t;

    student_dots<T>(x, t, shared, b, key, h);
    __syncthreads();
    t.each([&](int r, int u, float dot) {
        const int64_t head = (x.first + b.row + r) * x.i.heads + h;
        const bool here = seen(bound, r, key + u);
        const float slope = here ? x.p[(b.row + r) * x.stride + key + u] : 0;

        c[r][u] = here && relu_open(x.i, head * x.i.keys + key + u, dot) ? slope * x.weight[head] : 0;
        if (term) term[r][u] = here && dot > 0 ? slope * dot : 0;
    });
    __syncthreads();
}

/* dq and dweight of one head (blockIdx.y) for a tile of rows; blockIdx.z: COLUMNS of dq. */
template <class T>
__global__ __launch_bounds__(THREADS) void rows_kernel(const arguments x)
{
    using gradient = tile<float, TILE, COLUMNS, ALONG, ACROSS>;
    __shared__ union {
        product::shared dots;
        typename gradient::shared sums;
    } shared;
    __shared__ alignas(16) float c[TILE][TILE + 4];
    __shared__ float term[TILE][TILE + 1];
    __shared__ bounds bound;
    const block b = block_of(x, blockIdx.x);
    const range all = visible_range(x.start, x.end, x.first + b.row, b.rows);
    const int64_t column = (int64_t)blockIdx.z * COLUMNS, width = x.i.width;
    const int row = threadIdx.x / QUARTER, part = threadIdx.x % QUARTER, h = blockIdx.y;
    float dweight = 0;
    gradient g;

    read_bounds(x, b, &bound);
    g.clear();
    for (int64_t key = all.low; key < all.high; key += TILE) {
        const int left = (int)min((int64_t)TILE, x.i.keys - key);

        coefficients<T>(x, shared.dots, bound, b, key, h, c, term);
        float here = 0;
        for (int u = part; u < TILE; u += QUARTER) here += term[row][u];
        for (int apart = 1; apart < QUARTER; apart *= 2) here += __shfl_xor_sync(~0u, here, apart);
        dweight += here;
        g.multiply_shared(shared.sums, &c[0][0], TILE + 4,
                          operand<T>{(const T *)x.key + key * width + column, width,
                                     (int)min((int64_t)COLUMNS, width - column), false},
                          left);
    }
    g.each([&](int r, int e, float sum) {
        if (r < b.rows && column + e < width)
            ((T *)x.dq)[((x.first + b.row + r) * x.i.heads + h) * width + column + e] = to<T>(sum);
    });
    if (blockIdx.z == 0 && part == 0 && row < b.rows) x.dweight[(x.first + b.row + row) * x.i.heads + h] = dweight;
}

/* What the chunk's rows give to a tile of keys; blockIdx.y: COLUMNS of dkey. */
template <class T>
__global__ __launch_bounds__(THREADS) void keys_kernel(const arguments x)
{
    using gradient = tile<float, TILE, COLUMNS, ACROSS, ACROSS>;
    __shared__ union {
        product::shared dots;
        typename gradient::shared sums;
    } shared;
    __shared__ alignas(16) float c[TILE][TILE + 4];
    __shared__ bounds bound;
    const int64_t key = (int64_t)blockIdx.x * TILE, column = (int64_t)blockIdx.y * COLUMNS, width = x.i.width;
    gradient g;

    g.clear();
    for (int64_t number = 0; number * TILE < x.rows; number++) {
        const block b = block_of(x, number);

        read_bounds(x, b, &bound);
        if (!any_seen(bound, key)) continue;
        for (int h = 0; h < x.i.heads; h++) {
            coefficients<T>(x, shared.dots, bound, b, key, h, c, nullptr);
            g.multiply_shared(shared.sums, &c[0][0], TILE + 4,
                              operand<T>{(const T *)x.q + ((x.first + b.row) * x.i.heads + h) * width + column,
                                         x.i.heads * width, (int)min((int64_t)COLUMNS, width - column), false},
                              b.rows);
        }
    }
    g.each([&](int u, int e, float sum) {
        if (key + u >= x.i.keys || column + e >= width) return;
        float *at = x.dkey + (key + u) * width + column + e;
        *at = x.first == 0 ? sum : *at + sum;
    });
}

/* ---- the operation ---- */

template <class T>
void teach(cuda_device *d, const arguments &x)
{
    const unsigned rows = (unsigned)divided(x.rows, TILE), keys = (unsigned)divided(x.i.keys, TILE);
    const bool own = x.lse == x.own_lse;

    if (teach_hopper(d, {x.t, x.i.rows, x.i.keys, x.first, x.rows, x.stride, x.i.type, x.teacher_q, x.teacher_key,
                         x.start, x.end, own ? nullptr : x.lse, x.own_lse, x.p}))
        return;
    if (own) teacher_lse_kernel<T><<<dim3(rows, (unsigned)x.t.heads), THREADS, 0, d->stream>>>(x);
    teacher_mean_kernel<T><<<dim3(keys, rows), THREADS, 0, d->stream>>>(x);
}

template <class T>
void learn(cuda_device *d, const arguments &x, const score_call &scores)
{
    const unsigned rows = (unsigned)divided(x.rows, TILE), keys = (unsigned)divided(x.i.keys, TILE);
    const unsigned columns = (unsigned)divided(x.i.width, COLUMNS);

    score_rows(d, scores, x.first, x.rows, SCORES_SEEN, x.stride, x.score);
    loss_kernel<<<(unsigned)x.rows, THREADS, 0, d->stream>>>(x);
    rows_kernel<T><<<dim3(rows, (unsigned)x.i.heads, columns), THREADS, 0, d->stream>>>(x);
    keys_kernel<T><<<dim3(keys, columns), THREADS, 0, d->stream>>>(x);
}

void learn_fast(cuda_device *d, const arguments &x, const score_call &scores)
{
    const unsigned groups = (unsigned)divided(x.rows, DENSE_GROUP);
    const dense_slopes slopes = {x.i.rows, x.i.keys, x.first, x.rows, x.stride, (const bf16 *)x.q, (const bf16 *)x.key,
                                 x.weight, x.p, x.active, x.seen, (bf16 *)x.dq, x.dkey, x.dweight, x.part, x.parts};

    if (!hopper_score_rows(d, scores, x.first, x.rows, SCORES_SEEN, x.stride, x.score, x.active))
        return record_error(d, cudaErrorNotSupported, "index_kl_dense");
    ranges_kernel<<<(unsigned)divided(groups, 128), 128, 0, d->stream>>>(x);
    loss_kernel<<<groups * DENSE_GROUP, THREADS, 0, d->stream>>>(x);
    dense_rows(d, slopes);
    dense_keys(d, slopes);
}

void index_kl_dense(struct stream *s, const struct indexer *i, const struct teacher *t, const void *q, const void *key,
                    const float *weight, const void *teacher_q, const void *teacher_key, const float *teacher_lse,
                    const int32_t *start, const int32_t *end, const float *row_weight, float *kl, void *dq, float *dkey,
                    float *dweight, void *workspace)
{
    cuda_device *d = device_of(s);
    const score_call scores = score_call_of(i, q, key, weight, start, end);
    const int64_t step = chunk_rows(i);
    const bool fast = is_fast(i);
    arguments x = {*i, *t, q, key, weight, teacher_q, teacher_key, start, end, row_weight, kl, dq, dkey, dweight};

    count_index_kl_dense(s, i, t, teacher_lse != nullptr);
    if (i->rows == 0 && i->keys > 0) cudaMemsetAsync(dkey, 0, (size_t)(i->keys * i->width) * sizeof(float), d->stream);
    layout(d, i, t, workspace, &x);
    for (x.first = 0; x.first < i->rows; x.first += step) {
        x.rows = std::min(step, i->rows - x.first);
        x.lse = teacher_lse ? teacher_lse + x.first * t->heads : x.own_lse;
        with_type(i->type, [&](auto element) {
            teach<decltype(element)>(d, x);
            if (!fast) learn<decltype(element)>(d, x, scores);
        });
        if (fast) learn_fast(d, x, scores);
    }
    launched(d, "index_kl_dense");
}

} /* namespace */

void fill_index_kl_dense(struct ops *t)
{
    t->index_kl_dense_bytes = index_kl_dense_bytes;
    t->index_kl_dense = index_kl_dense;
}
