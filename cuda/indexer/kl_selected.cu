/* Indexer loss over selected keys (training.md 1.4). With d[h,u] = q[h] . key[u], score[u] = sum_h weight[h]
 * relu(d[h,u]) and g = row_weight * (softmax(score) - target):
 *     c[h,u] = g[u] weight[h] [d[h,u] > 0],  dq[h] = sum_u c[h,u] key[u],  dkey[u] += sum_h c[h,u] q[h],
 *     dweight[h] = sum_u g[u] relu(d[h,u]).
 *
 * A block a row for the loss, dq and dweight, KEYS keys at a time in shared memory; then a block a key, which
 * looks up the rows that selected it and adds them in their order. fp32 throughout. bf16 of the size that is
 * trained goes another way: kl_selected.cuh. */
#include "indexer/kl_selected.cuh"

#include "indexer/index_kl.cuh"

namespace {

constexpr int THREADS = 256, WARPS = THREADS / 32, KEYS = 32;

struct arguments {
    struct indexer i;
    const void *q, *key;
    const float *weight;
    const int32_t *selected;
    const float *target, *row_weight;
    float *kl;
    void *dq;
    float *dkey, *dweight;
    float *slope;    /* [rows, k]: g */
    int32_t *count;  /* [rows]: keys of each; 0 where there is no gradient */
};

/* What a block has on chip. A key's row is one longer than it is wide, so that keys lie in different banks. */
struct on_chip {
    float *q, *dq;   /* [heads, width] */
    float *key;      /* [KEYS, width + 1] */
    float *dot;      /* [KEYS, heads + 1] */
    float *dweight;  /* [heads] */
    float *score;    /* [k] */
};

__host__ __device__ size_t on_chip_layout(const struct indexer &i, float *base, on_chip *c)
{
    const size_t row = (size_t)i.heads * i.width;

    c->q = base;
    c->dq = c->q + row;
    c->key = c->dq + row;
    c->dot = c->key + KEYS * (i.width + 1);
    c->dweight = c->dot + KEYS * (i.heads + 1);
    c->score = c->dweight + i.heads;
    return (2 * row + KEYS * (i.width + 1) + KEYS * (i.heads + 1) + i.heads + i.k) * sizeof(float);
}

__device__ int count_keys(const int32_t *selected, int32_t k)
{
    int n = 0;

    for (int j = threadIdx.x; j < k; j += THREADS) n += selected[j] >= 0;
    return block_sum<THREADS>(n);
}

/* d of `n` keys from number `first` on. */
template <class T>
__device__ void dots(const arguments &x, const on_chip &c, const int32_t *selected, int first, int n)
{
    const int width = x.i.width, heads = x.i.heads;

    __syncthreads();
    for (int j = threadIdx.x; j < n * width; j += THREADS)
        c.key[j / width * (width + 1) + j % width] =
            get(((const T *)x.key)[(int64_t)selected[first + j / width] * width + j % width]);
    __syncthreads();
    for (int j = threadIdx.x; j < KEYS * heads; j += THREADS) {
        const int u = j % KEYS, h = j / KEYS;
        float sum = 0;

        if (u >= n) continue;
        for (int e = 0; e < width; e++) sum += c.key[u * (width + 1) + e] * c.q[h * width + e];
        c.dot[u * (heads + 1) + h] = sum;
    }
    __syncthreads();
}

/* One tile's share of dq and dweight. */
__device__ void add_gradients(const arguments &x, const on_chip &c, int64_t t, const float *weight, const float *slope,
                              int first, int n)
{
    const int width = x.i.width, heads = x.i.heads;

    for (int h = threadIdx.x; h < heads; h += THREADS) {
        float sum = c.dweight[h];

        for (int u = 0; u < n; u++) {
            float *d = &c.dot[u * (heads + 1) + h];

            sum += *d > 0 ? slope[first + u] * *d : 0;
            *d = relu_open(x.i, (t * heads + h) * x.i.k + first + u, *d) ? slope[first + u] * weight[h] : 0;
        }
        c.dweight[h] = sum;
    }
    __syncthreads();
    for (int j = threadIdx.x; j < heads * width; j += THREADS) {
        float sum = c.dq[j];

        for (int u = 0; u < n; u++) sum += c.dot[u * (heads + 1) + j / width] * c.key[u * (width + 1) + j % width];
        c.dq[j] = sum;
    }
}

template <class T>
__global__ __launch_bounds__(THREADS) void rows_kernel(const arguments x)
{
    extern __shared__ float memory[];
    const int64_t t = blockIdx.x;
    const int heads = x.i.heads, size = heads * x.i.width;
    const int32_t *selected = x.selected + t * x.i.k;
    const float *weight = x.weight + t * heads, row_weight = x.row_weight[t];
    float *slope = x.slope + t * x.i.k;
    on_chip c;

    on_chip_layout(x.i, memory, &c);
    const int n = count_keys(selected, x.i.k);
    for (int j = threadIdx.x; j < size; j += THREADS) {
        c.q[j] = get(((const T *)x.q)[t * size + j]);
        c.dq[j] = 0;
    }
    for (int h = threadIdx.x; h < heads; h += THREADS) c.dweight[h] = 0;
    for (int first = 0; first < n; first += KEYS) {
        const int tile = min(KEYS, n - first);

        dots<T>(x, c, selected, first, tile);
        if ((int)threadIdx.x < tile) {
            float sum = 0;

            for (int h = 0; h < heads; h++) sum += weight[h] * fmaxf(c.dot[threadIdx.x * (heads + 1) + h], 0);
            c.score[first + threadIdx.x] = sum;
        }
    }
    __syncthreads();
    const float kl = n ? kl_row<THREADS>(c.score, x.target + t * x.i.k, n, row_weight, slope) : 0;
    const int moving = row_weight == 0 ? 0 : n;
    if (threadIdx.x == 0) {
        x.kl[t] = kl;
        x.count[t] = moving;
    }
    for (int first = 0; first < moving; first += KEYS) {
        dots<T>(x, c, selected, first, min(KEYS, moving - first));
        add_gradients(x, c, t, weight, slope, first, min(KEYS, moving - first));
    }
    __syncthreads();
    for (int j = threadIdx.x; j < size; j += THREADS) ((T *)x.dq)[t * size + j] = to<T>(c.dq[j]);
    for (int h = threadIdx.x; h < heads; h += THREADS) x.dweight[t * heads + h] = c.dweight[h];
}

/* Where `key` stands in an ascending list; -1: nowhere. */
__device__ int find(const int32_t *selected, int count, int key)
{
    int low = 0, high = count;

    while (low < high) {
        const int middle = (low + high) / 2;

        if (selected[middle] < key)
            low = middle + 1;
        else
            high = middle;
    }
    return low < count && selected[low] == key ? low : -1;
}

/* What row t gives to the key at `place` of its selection: c by the warps, a head each, then the sum. */
template <class T>
__device__ void add_row(const arguments &x, int64_t t, int place, const float *key, float *dkey)
{
    const float slope = x.slope[t * x.i.k + place];
    __shared__ float c[WARPS];
    const int width = x.i.width, warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    for (int first = 0; first < x.i.heads; first += WARPS) {
        const int n = min(WARPS, x.i.heads - first);
        const T *q = (const T *)x.q + (t * x.i.heads + first) * width;
        float dot = 0;

        if (warp < n) {
            for (int e = lane; e < width; e += 32) dot += get(q[warp * width + e]) * key[e];
            dot = warp_reduce(dot, plus());
        }
        __syncthreads();
        if (warp < n && lane == 0) {
            const int64_t head = t * x.i.heads + first + warp;
            const bool open = x.i.sides ? x.i.open[head * x.i.k + place] != 0 : dot > 0; /* rows_kernel has said it */

            c[warp] = open ? slope * x.weight[head] : 0;
        }
        __syncthreads();
        for (int e = threadIdx.x; e < width; e += THREADS) {
            float sum = dkey[e];

            for (int h = 0; h < n; h++) sum += c[h] * get(q[h * width + e]);
            dkey[e] = sum;
        }
    }
}

template <class T>
__global__ __launch_bounds__(THREADS) void keys_kernel(const arguments x)
{
    extern __shared__ float memory[];
    __shared__ int found[THREADS];
    float *key = memory, *dkey = memory + x.i.width;
    const int64_t u = blockIdx.x;

    for (int e = threadIdx.x; e < x.i.width; e += THREADS) {
        key[e] = get(((const T *)x.key)[u * x.i.width + e]);
        dkey[e] = 0;
    }
    for (int64_t base = 0; base < x.i.rows; base += THREADS) {
        const int64_t t = base + threadIdx.x;
        const int place = t < x.i.rows ? find(x.selected + t * x.i.k, x.count[t], (int)u) : -1;

        found[threadIdx.x] = place;
        if (!__syncthreads_or(place >= 0)) continue;
        for (int j = 0; j < THREADS; j++)
            if (found[j] >= 0) add_row<T>(x, base + j, found[j], key, dkey);
        __syncthreads();
    }
    for (int e = threadIdx.x; e < x.i.width; e += THREADS) x.dkey[u * x.i.width + e] = dkey[e];
}

size_t layout(const struct indexer *i, void *base, float **slope, int32_t **count)
{
    size_t used = 0;

    *slope = carve<float>(base, &used, i->rows * i->k);
    *count = carve<int32_t>(base, &used, i->rows);
    return used;
}

void learn(cuda_device *d, arguments x, void *workspace)
{
    on_chip c;
    const size_t rows_bytes = on_chip_layout(x.i, nullptr, &c), keys_bytes = 2 * (size_t)x.i.width * sizeof(float);

    layout(&x.i, workspace, &x.slope, &x.count);
    with_type(x.i.type, [&](auto element) {
        using T = decltype(element);

        allow_shared(rows_kernel<T>, rows_bytes);
        if (x.i.rows > 0) rows_kernel<T><<<(unsigned)x.i.rows, THREADS, rows_bytes, d->stream>>>(x);
        if (x.i.keys > 0) keys_kernel<T><<<(unsigned)x.i.keys, THREADS, keys_bytes, d->stream>>>(x);
    });
}

/* ---- the fast form ---- */

constexpr size_t CHUNK = (size_t)128 << 20; /* bytes that grow with the rows of a chunk, */
constexpr int64_t FEWEST_ROWS = 256;        /* but at least so many rows */
constexpr int DENSE = 5;                    /* rows that select more than one key of so many: kl_keys.cu is faster */
constexpr int HELD = 4;                     /* rows that select at most one key of so many: kl_held.cu */
static_assert(CHUNK / sizeof(entry) <= KL_MOST_ENTRIES && FEWEST_ROWS * KL_MOST_KEYS <= KL_MOST_ENTRIES, "see there");

bool is_fast(const struct indexer *i)
{
    return i->type == GLM52_DTYPE_BF16 && i->heads == KL_HEADS && i->width == KL_WIDTH && i->k <= KL_MOST_KEYS &&
           i->rows > 0 && i->rows <= INT32_MAX / KL_HEADS && i->keys > 0 && i->sides == 0;
}

/* Rounds of a row at most: in each of the groups that it has entries in, one may be less than full. */
int64_t most_rounds(const kl_call &c) { return std::min<int64_t>(c.groups, c.i.k) + c.i.k / KL_ROUND; }

/* Chunks of about the same size. */
int64_t chunk_rows(const kl_call &c)
{
    const int64_t pairs = c.i.k * sizeof(entry) + KL_SLICES * KL_TILE * sizeof(bf16) + c.groups * sizeof(entry_range) +
                          most_rounds(c) * (KL_UNITS + 1) * sizeof(uint32_t);
    const int64_t row = c.dense ? c.tiles * KL_KEYS * (int64_t)sizeof(entry) : pairs;
    const int64_t fit = std::max((int64_t)CHUNK / row, FEWEST_ROWS);
    const int64_t chunks = divided(c.i.rows, c.dense ? std::min(fit, (int64_t)KL_MOST_STEPS * KL_ROWS) : fit);

    return divided(divided(c.i.rows, chunks), KL_ROWS) * KL_ROWS;
}

/* As many parts as fill the device twice, and no few blocks for a third time. */
void dense_layout(const cuda_device *d, void *base, size_t *used, kl_call *c)
{
    const int64_t steps = c->most_rows / KL_ROWS;

    c->parts = (int)std::max<int64_t>(1, std::min(2 * d->multiprocessors / c->tiles, steps));
    c->entries = carve<entry>(base, used, steps * KL_ROWS * c->tiles * KL_KEYS);
    c->filled = carve<uint8_t>(base, used, c->tiles * steps);
    c->part = carve<float>(base, used, c->parts * c->tiles * KL_KEYS * KL_WIDTH);
}

void pairs_layout(const cuda_device *d, void *base, size_t *used, kl_call *c)
{
    c->blocks = kl_pair_blocks(d);
    c->entries = carve<entry>(base, used, c->most_rows * c->i.k);
    c->queries = carve<bf16>(base, used, KL_SLICES * c->most_rows * KL_TILE);
    c->ranges = carve<entry_range>(base, used, c->groups * c->most_rows);
    c->counts = carve<int32_t>(base, used, c->groups);
    c->before = carve<int32_t>(base, used, c->groups + 1);
    c->rounds = carve<uint32_t>(base, used, c->most_rows * most_rounds(*c) * KL_UNITS);
    c->source = carve<int32_t>(base, used, c->most_rows * most_rounds(*c));
    c->part = carve<float>(base, used, (c->blocks + c->groups) * KL_SLICES * KL_GROUP * KL_COLUMNS);
}

/* Fills in what does not change from chunk to chunk. */
size_t fast_layout(const cuda_device *d, void *base, kl_call *c)
{
    size_t used = 0;

    c->dense = c->i.keys < DENSE * (int64_t)c->i.k;
    c->tiles = divided(c->i.keys, KL_KEYS);
    c->groups = divided(c->i.keys, KL_GROUP);
    c->most_rows = chunk_rows(*c);
    if (c->dense)
        dense_layout(d, base, &used, c);
    else
        pairs_layout(d, base, &used, c);
    return used;
}

/* Whether kl_held.cu has room for the keys, and most of its blocks have some. A row with few keys takes it as long as
 * one with many, kl_rows.cu less: so not where many rows of a causal document have few. */
bool is_held(const struct indexer *i)
{
    return i->k > KL_HELD_KEYS / 2 && i->k <= KL_HELD_KEYS && i->keys >= HELD * (int64_t)i->k;
}

void learn_fast(cuda_device *d, kl_call c, void *workspace)
{
    fast_layout(d, workspace, &c);
    for (c.first = 0; c.first < c.i.rows; c.first += c.most_rows) {
        c.rows = std::min(c.most_rows, c.i.rows - c.first);
        c.steps = divided(c.rows, KL_ROWS);
        if (c.dense) {
            cudaMemsetAsync(c.entries, 0, (size_t)(c.steps * KL_ROWS * c.tiles * KL_KEYS) * sizeof(entry), d->stream);
            cudaMemsetAsync(c.filled, 0, (size_t)(c.tiles * c.steps), d->stream);
        } else
            cudaMemsetAsync(c.counts, 0, (size_t)c.groups * sizeof(int32_t), d->stream);
        is_held(&c.i) ? kl_held(d, c) : kl_rows(d, c);
        c.dense ? kl_keys(d, c) : kl_pairs(d, c);
    }
}

/* ---- the operation ---- */

size_t index_kl_selected_bytes(struct stream *s, const struct indexer *i)
{
    kl_call c = {*i};
    float *slope;
    int32_t *count;

    return is_fast(i) ? fast_layout(device_of(s), nullptr, &c) : layout(i, nullptr, &slope, &count);
}

void index_kl_selected(struct stream *s, const struct indexer *i, const void *q, const void *key, const float *weight,
                       const int32_t *selected, const float *target, const float *row_weight, float *kl, void *dq,
                       float *dkey, float *dweight, void *workspace)
{
    cuda_device *d = device_of(s);

    count_index_kl_selected(s, i);
    if (is_fast(i))
        learn_fast(d,
                   {*i, (const bf16 *)q, (const bf16 *)key, weight, selected, target, row_weight, kl, (bf16 *)dq, dkey,
                    dweight},
                   workspace);
    else
        learn(d, {*i, q, key, weight, selected, target, row_weight, kl, dq, dkey, dweight}, workspace);
    launched(d, "index_kl_selected");
}

} /* namespace */

void fill_index_kl_selected(struct ops *t)
{
    t->index_kl_selected_bytes = index_kl_selected_bytes;
    t->index_kl_selected = index_kl_selected;
}
