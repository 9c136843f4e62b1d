/* Muon in half precision: X = P(X X^T) X, where P is the product of the iterations' polynomials, taken on the small
 * square side alone. Since squaring a matrix squares what is lost along its small singular values, no more than
 * SEGMENT_STEPS iterations are taken at once; then X itself is multiplied out and its squares are formed anew. All
 * squares are polynomials of one matrix, so they are symmetric, and half of every product is the mirror image of the
 * other. semantics.md has the bounds. */
#include "device/early.cuh"
#include "update/muon.cuh"
#include "update/neighbours.cuh"
#include "update/products.cuh"
#include "update/small.cuh"

namespace {

constexpr int THREADS = 256, ROUNDS = 4;
constexpr int64_t SLAB = 1 << 14;                  /* elements of a block that are passed over together */
constexpr size_t BATCH_BYTES = (size_t)1200 << 20; /* of workspace, for as many blocks as fit */

/* The blocks that are worked on together, and their arrays: x and y like the blocks, squares [blocks,side,side],
 * sums of squares [blocks,slabs]. Small blocks need x alone. */
struct half_batch {
    int64_t blocks, slabs;
    __half *x, *y, *square[4];
    double *sums;
};

size_t layout(const struct muon *m, void *base, half_batch *b)
{
    const int64_t side = std::min(m->rows, m->columns), area = m->rows * m->columns, square = side * side;
    const bool is_small = small_takes(m);
    size_t used = 0;

    *b = {};
    if (m->batch == 0 || area == 0) return 0;
    b->blocks = (int64_t)(BATCH_BYTES / sizeof(__half)) / (is_small ? area : 2 * area + 4 * square);
    b->blocks = std::min(std::max<int64_t>(b->blocks, 1), m->batch);
    b->blocks = divided(m->batch, divided(m->batch, b->blocks)); /* as many each time */
    b->slabs = divided(area, SLAB);
    b->x = carve<__half>(base, &used, b->blocks * area);
    if (is_small) return used;
    b->y = carve<__half>(base, &used, b->blocks * area);
    for (__half *&at : b->square) at = carve<__half>(base, &used, b->blocks * square);
    b->sums = carve<double>(base, &used, b->blocks * b->slabs);
    return used;
}

/* ---- passes over the elements ---- */

/* Calls load_all and then rest(round, element of a block, element of the arrays) for this thread's runs of V in a
 * slab, ROUNDS of them at a time. */
template <int V, class Load, class Rest>
__device__ __forceinline__ void each_run(const struct muon &m, int64_t block, uint32_t slab, Load &&load_all,
                                         Rest &&rest)
{
    const uint32_t area = (uint32_t)(m.rows * m.columns), end = min(area, (uint32_t)((slab + 1) * SLAB));
    const uint32_t columns = (uint32_t)m.columns, group = (uint32_t)m.group_rows;

    for (uint32_t from = (uint32_t)(slab * SLAB) + threadIdx.x * V; from < end; from += ROUNDS * THREADS * V) {
        int64_t at[ROUNDS];

#pragma unroll
        for (int i = 0; i < ROUNDS; i++) {
            const uint32_t element = from + i * THREADS * V, row = element / columns;

            at[i] = block * m.stride + (int64_t)(row / group) * m.group_stride + (int64_t)(row % group) * columns +
                    element % columns;
            if (element < end) load_all(i, element, at[i]);
        }
#pragma unroll
        for (int i = 0; i < ROUNDS; i++) {
            const uint32_t element = from + i * THREADS * V;

            if (element < end) rest(i, element, at[i]);
        }
    }
}

/* Moves the momentum of a slab of a block (blockIdx.y), and sums the squares of the update. */
template <class G, class M>
__global__ __launch_bounds__(THREADS) void start_kernel(const struct muon m, const half_batch w, const muon_arrays a)
{
    constexpr int V = neighbours::RUN<G, M>;
    const muon_momentum of(m, *a.coefficient);
    const G *gradient = (const G *)a.gradient;
    M *momentum = (M *)a.momentum;
    float g[ROUNDS][V], moved[ROUNDS][V];
    double sum = 0;

    follow();
    if (of.factor < 0) return;
    each_run<V>(
        m, blockIdx.y, blockIdx.x,
        [&](int i, uint32_t, int64_t at) {
            load(gradient + at, g[i]);
            load(momentum + at, moved[i]);
        },
        [&](int i, uint32_t, int64_t at) {
            float squares = 0; /* of a few: in fp32 */
#pragma unroll
            for (int j = 0; j < V; j++) {
                moved[i][j] = ::get(to<M>(of.moved(g[i][j], moved[i][j])));
                const float update = of.update(g[i][j], moved[i][j]);
                squares += update * update;
            }
            store(momentum + at, moved[i]);
            sum += (double)squares;
        });
    sum = block_sum<THREADS>(sum);
    if (threadIdx.x == 0) w.sums[blockIdx.y * w.slabs + blockIdx.x] = sum;
}

/* x = update / its norm. Begins with what was passed over last, which may still be in the cache. */
template <class G, class M>
__global__ __launch_bounds__(THREADS) void normalise_kernel(const struct muon m, const half_batch w,
                                                            const muon_arrays a)
{
    constexpr int V = neighbours::RUN<G, M>;
    const muon_momentum of(m, *a.coefficient);
    const G *gradient = (const G *)a.gradient;
    const M *momentum = (const M *)a.momentum;
    const unsigned block = gridDim.y - 1 - blockIdx.y, slab = gridDim.x - 1 - blockIdx.x;
    __half *x = w.x + block * m.rows * m.columns;
    float g[ROUNDS][V] = {}, moved[ROUNDS][V];
    double sum = 0;

    follow();
    for (int64_t i = threadIdx.x; i < w.slabs; i += THREADS) sum += w.sums[block * w.slabs + i];
    const float norm = fmaxf((float)sqrt(block_sum<THREADS>(sum)), MUON_NORM_FLOOR);
    each_run<V>(
        m, block, slab,
        [&](int i, uint32_t, int64_t at) {
            if (m.nesterov) load(gradient + at, g[i]);
            load(momentum + at, moved[i]);
        },
        [&](int i, uint32_t element, int64_t) {
            several<__half, V> all;
#pragma unroll
            for (int j = 0; j < V; j++) all.at[j] = __float2half_rn(of.update(g[i][j], moved[i][j]) / norm);
            *(several<__half, V> *)(x + element) = all;
        });
}

/* ---- iterations ---- */

/* Short ones come first: the first iterations stretch most. */
segments segments_of(int steps)
{
    segments s = {(steps + SEGMENT_STEPS - 1) / SEGMENT_STEPS, {}};

    for (int i = 0, done = 0; i < s.count; done += s.steps[i++]) s.steps[i] = (steps - done) / (s.count - i);
    return s;
}

/* What the steps of a batch work on; squares change places as they are used up. */
struct iteration {
    cuda_device *device;
    int64_t blocks, rows, columns, side;
    half_batch w;
    half_update update;

    /* c = alpha a b + beta a + gamma I of squares that commute */
    void squares(const __half *a, const __half *b, float alpha, float beta, float gamma, __half *c)
    {
        half_products p = {blocks, side, side, side, false, false, true, alpha, beta, gamma};

        p.a = p.d = a;
        p.b = b;
        p.c = c;
        half_products_run(device, &p);
    }

    /* c = x x^T, or x^T x where x has more rows than columns */
    void gram(__half *c)
    {
        const bool tall = rows > columns;
        half_products p = {blocks, side, side, tall ? rows : columns, tall, tall, true, 1, 0, 0};

        p.a = p.b = w.x;
        p.c = c;
        half_products_run(device, &p);
    }

    /* y = p x, or x p, and they trade places; or, at the end, the weights move by that. */
    void multiply_out(const __half *polynomial, bool is_last)
    {
        const bool tall = rows > columns;
        half_products p = {blocks, rows, columns, side, false, !tall, false, 1, 0, 0};

        p.a = tall ? w.x : polynomial;
        p.b = tall ? polynomial : w.x;
        p.c = is_last ? nullptr : w.y;
        p.update = is_last ? &update : nullptr;
        half_products_run(device, &p);
        std::swap(w.x, w.y);
    }

    /* `steps` iterations from x on: per iteration B = a I + b A + c A A, P = B P, A = B A B. */
    void segment(const float (*coefficient)[3], int steps, bool is_last)
    {
        __half *square = w.square[0], *factor = w.square[1], *all = w.square[2], *spare = w.square[3];

        gram(square);
        for (int i = 0; i < steps; i++) {
            squares(square, square, coefficient[i][2], coefficient[i][1], coefficient[i][0], factor);
            if (i + 1 < steps) {
                squares(factor, square, 1, 0, 0, spare);
                squares(spare, factor, 1, 0, 0, square);
            }
            if (i == 0) {
                std::swap(factor, all);
            } else {
                squares(factor, all, 1, 0, 0, spare);
                std::swap(spare, all);
            }
        }
        multiply_out(all, is_last);
    }

    void all_steps(const struct muon *m)
    {
        const segments s = segments_of(m->steps);

        for (int i = 0, done = 0; i < s.count; done += s.steps[i++])
            segment(m->coefficient + done, s.steps[i], i + 1 == s.count);
    }
};

} /* namespace */

bool muon_takes_half(const struct muon *m)
{
    return m->type == GLM52_DTYPE_BF16 && m->steps > 0 && m->rows % 8 == 0 && m->columns % 8 == 0 &&
           m->stride % 8 == 0 && m->group_stride % 8 == 0 && m->rows * m->columns < INT32_MAX;
}

size_t muon_half_bytes(const struct muon *m)
{
    half_batch b;

    return layout(m, nullptr, &b);
}

/* The arrays from a block on */
static muon_arrays arrays_from(const struct muon *m, const muon_arrays &a, int64_t block)
{
    const size_t by = (size_t)(block * m->stride), gradient = m->gradient == GLM52_DTYPE_F32 ? 4 : 2;
    const size_t moments = m->moments == GLM52_DTYPE_F32 ? 4 : 2, weight = a.rounded ? 4 : 2;
    muon_arrays from = a;

    from.gradient = (const char *)a.gradient + by * gradient;
    from.momentum = (char *)a.momentum + by * moments;
    from.weight = (char *)a.weight + by * weight;
    from.rounded = a.rounded ? (char *)a.rounded + by * sizeof(bf16) : nullptr;
    return from;
}

/* x = momentum's update / its norm, then the iterations, pass by pass */
static void large_blocks(cuda_device *d, const struct muon *m, const muon_arrays &a, const half_batch &w,
                         int64_t blocks)
{
    const half_update update = {a.rates,   a.coefficient, m->decay,      m->scale,       a.weight,
                                a.rounded, m->stride,     m->group_rows, m->group_stride};
    iteration it = {d, blocks, m->rows, m->columns, std::min(m->rows, m->columns), w, update};
    const dim3 grid((unsigned)w.slabs, (unsigned)blocks);

    with_type(m->gradient, [&](auto g) {
        with_type(m->moments, [&](auto moment) {
            start_kernel<decltype(g), decltype(moment)><<<grid, THREADS, 0, d->stream>>>(*m, w, a);
            launch_following(d->stream, normalise_kernel<decltype(g), decltype(moment)>, grid, THREADS, 0, *m, w, a);
        });
    });
    it.all_steps(m);
}

bool muon_half(cuda_device *d, const struct muon *m, const muon_arrays &a, void *workspace)
{
    half_batch w;

    if (!aligned16(a.gradient) || !aligned16(a.momentum) || !aligned16(a.weight) || !aligned16(a.rounded)) return false;
    layout(m, workspace, &w);
    for (int64_t first = 0; first < m->batch && m->rows > 0; first += w.blocks) {
        const int64_t blocks = std::min(w.blocks, m->batch - first);
        const muon_arrays from = arrays_from(m, a, first);
        const small_blocks small = {m, blocks, segments_of(m->steps), from, w.x};

        if (small_takes(m))
            small_blocks_run(d, &small);
        else
            large_blocks(d, m, from, w, blocks);
    }
    return true;
}
