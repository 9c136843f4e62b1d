/* Muon (training.md 4.1): momentum, orthogonalisation by Newton-Schulz, decoupled decay. Blocks of more
 * rows than columns are not transposed: their products are taken from the other side. A skipped update
 * still multiplies, and changes nothing. This file has the plain way, which is fp32 throughout and takes
 * any shape; muon_half.cu has the fast one. */
#include "dense/matmul.cuh"
#include "update/muon.cuh"

namespace {

constexpr int THREADS = 256;
constexpr size_t BATCH_BYTES = (size_t)512 << 20; /* of workspace, for as many blocks as fit */
constexpr int64_t SLAB = 1 << 14;                 /* elements of a block that are summed together */

/* The blocks that are worked on together, and their arrays: x and y [blocks,rows,columns], gram and polynomial
 * [blocks,side,side], sums of squares [blocks,slabs]. */
struct batch {
    int64_t blocks, side, slab_rows, slabs;
    float *x, *y, *gram, *polynomial;
    double *squares;
};

size_t layout(const struct muon *m, void *base, batch *b)
{
    const int64_t side = std::min(m->rows, m->columns), area = m->rows * m->columns, square = side * side;
    size_t used = 0;

    *b = {};
    b->side = side;
    if (m->batch == 0 || area == 0) return 0;
    b->blocks = (int64_t)(BATCH_BYTES / sizeof(float)) / (2 * (area + square));
    b->blocks = std::min(std::max<int64_t>(b->blocks, 1), m->batch);
    b->slab_rows = std::min(std::max<int64_t>(SLAB / m->columns, 1), m->rows);
    b->slabs = divided(m->rows, b->slab_rows);
    b->x = carve<float>(base, &used, b->blocks * area);
    b->y = carve<float>(base, &used, b->blocks * area);
    b->gram = carve<float>(base, &used, b->blocks * square);
    b->polynomial = carve<float>(base, &used, b->blocks * square);
    b->squares = carve<double>(base, &used, b->blocks * b->slabs);
    return used;
}

/* ---- passes over the elements ---- */

__device__ int64_t row_at(const struct muon &m, int64_t block, int64_t row)
{
    return block * m.stride + row / m.group_rows * m.group_stride + row % m.group_rows * m.columns;
}

/* Moves the momentum of a slab of rows (blockIdx.x) of a block (blockIdx.y), writes the update and its sum of
 * squares. */
template <class G, class M>
__global__ __launch_bounds__(THREADS) void start_kernel(const struct muon m, const batch w, const muon_arrays a,
                                                        int64_t first)
{
    const int64_t block = blockIdx.y, row = blockIdx.x * w.slab_rows,
                  count = min(w.slab_rows, m.rows - row) * m.columns;
    const muon_momentum of(m, *a.coefficient);
    const G *gradient = (const G *)a.gradient;
    M *momentum = (M *)a.momentum;
    float *x = w.x + (block * m.rows + row) * m.columns;
    double sum = 0;

    if (of.factor < 0) return;
    for (int64_t i = threadIdx.x; i < count; i += THREADS) {
        const int64_t at = row_at(m, first + block, row + i / m.columns) + i % m.columns;
        const float g = get(gradient[at]);
        const M moved = to<M>(of.moved(g, get(momentum[at])));
        const float update = of.update(g, get(moved));

        momentum[at] = moved;
        x[i] = update;
        sum += (double)update * (double)update;
    }
    sum = block_sum<THREADS>(sum);
    if (threadIdx.x == 0) w.squares[block * w.slabs + blockIdx.x] = sum;
}

__global__ __launch_bounds__(THREADS) void normalise_kernel(const struct muon m, const batch w)
{
    const int64_t block = blockIdx.y, area = m.rows * m.columns;
    double sum = 0;

    for (int64_t i = threadIdx.x; i < w.slabs; i += THREADS) sum += w.squares[block * w.slabs + i];
    const float norm = fmaxf((float)sqrt(block_sum<THREADS>(sum)), MUON_NORM_FLOOR);
    for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < area; i += (int64_t)gridDim.x * THREADS)
        w.x[block * area + i] /= norm;
}

template <class W, class Copy>
__global__ __launch_bounds__(THREADS) void apply_kernel(const struct muon m, const float *x, const muon_arrays a,
                                                        int64_t first)
{
    const int64_t block = blockIdx.y, area = m.rows * m.columns;
    const float lr = a.rates[RATE_LR], keep = 1.0f - lr * m.decay, reach = lr * m.scale;

    W *weight = (W *)a.weight;

    if (*a.coefficient < 0) return;
    for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < area; i += (int64_t)gridDim.x * THREADS) {
        const int64_t at = row_at(m, first + block, i / m.columns) + i % m.columns;
        const float moved = get(weight[at]) * keep - reach * x[block * area + i];

        weight[at] = to<W>(moved);
        if (a.rounded) ((Copy *)a.rounded)[at] = to<Copy>(moved);
    }
}

/* ---- products ---- */

struct gemm product(int64_t blocks, int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t stride_a,
                    int64_t stride_b)
{
    struct gemm g = {};

    g.m = m;
    g.n = g.ldc = n;
    g.k = k;
    g.lda = lda;
    g.ldb = ldb;
    g.batch = blocks;
    g.stride_a = stride_a;
    g.stride_b = stride_b;
    g.stride_c = m * n;
    g.a_type = g.b_type = g.c_type = GLM52_DTYPE_F32;
    return g;
}

/* One iteration with coefficients a, b, c: y = a x + (b A + c A A) x, A = x x^T, or the same from the right. */
void iterate(cuda_device *d, const struct muon *m, const batch &w, int64_t blocks, const float *coefficient)
{
    const int64_t side = w.side, area = m->rows * m->columns, square = side * side, columns = m->columns;
    const bool is_wide = m->rows <= columns;
    struct gemm to_gram = product(blocks, side, side, is_wide ? columns : m->rows, columns, columns, area, area);
    const struct gemm to_polynomial = product(blocks, side, side, side, side, side, square, square);
    const struct gemm to_y = is_wide ? product(blocks, side, columns, side, side, columns, square, area)
                                     : product(blocks, m->rows, side, side, columns, side, area, square);

    to_gram.transpose_a = !is_wide;
    to_gram.transpose_b = is_wide;
    matmul(d, &to_gram, w.x, w.x, 1, 0, w.gram, w.gram);
    matmul(d, &to_polynomial, w.gram, w.gram, coefficient[2], coefficient[1], w.gram, w.polynomial);
    matmul(d, &to_y, is_wide ? w.polynomial : w.x, is_wide ? w.x : w.polynomial, 1, coefficient[0], w.x, w.y);
}

/* ---- the operation ---- */

size_t muon_bytes(struct stream *, const struct muon *m)
{
    batch b;
    const size_t plain = layout(m, nullptr, &b);

    return muon_takes_half(m) ? std::max(plain, muon_half_bytes(m)) : plain;
}

void run_muon(struct stream *s, const struct muon *m, const float *rates, const float *coefficient,
              const void *gradient, void *momentum, float *master, void *parameter, void *workspace)
{
    cuda_device *d = device_of(s);
    const muon_arrays a = {rates, coefficient, gradient, momentum, master ? master : parameter,
                      master ? parameter : nullptr};
    batch w;

    count_muon(s, m, master != nullptr);
    if (muon_takes_half(m) && muon_half(d, m, a, workspace)) {
        launched(d, "muon");
        return;
    }
    layout(m, workspace, &w);
    for (int64_t first = 0; w.blocks > 0 && first < m->batch; first += w.blocks) {
        const int64_t blocks = std::min(w.blocks, m->batch - first);
        const dim3 grid(blocks_for(d, divided(m->rows * m->columns, 4), THREADS), (unsigned)blocks);

        with_type(m->gradient, [&](auto g) {
            with_type(m->moments, [&](auto moment) {
                start_kernel<decltype(g), decltype(moment)>
                    <<<dim3((unsigned)w.slabs, (unsigned)blocks), THREADS, 0, d->stream>>>(*m, w, a, first);
            });
        });
        normalise_kernel<<<grid, THREADS, 0, d->stream>>>(*m, w);
        for (int32_t step = 0; step < m->steps; step++) {
            iterate(d, m, w, blocks, m->coefficient[step]);
            std::swap(w.x, w.y);
        }
        with_type(m->type, [&](auto element) {
            using T = decltype(element);
            auto kernel = master ? apply_kernel<float, T> : apply_kernel<T, T>;
            kernel<<<grid, THREADS, 0, d->stream>>>(*m, w.x, a, first);
        });
    }
    launched(d, "muon");
}

} /* namespace */

void fill_muon(struct ops *t)
{
    t->muon_bytes = muon_bytes;
    t->muon = run_muon;
}
