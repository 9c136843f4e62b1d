/* Elementwise sums, products and conversions; sums in fp64 whose order depends on the count alone. */
#include "device/element.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int SUM_THREADS = 512;
constexpr int64_t SUM_BLOCK = 1 << 15; /* elements that one block sums */

/* ---- elementwise ---- */

template <class T, int V>
__global__ void add_kernel(int64_t count, const T *x, T *y)
{
    for (int64_t i = (blockIdx.x * (int64_t)THREADS + threadIdx.x) * V; i < count; i += (int64_t)gridDim.x * THREADS * V) {
        float a[V];

        load(x + i, a);
        store(y + i, a, true);
    }
}

__global__ void add_doubles_kernel(int64_t count, const double *x, double *y)
{
    for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < count; i += (int64_t)gridDim.x * THREADS) y[i] += x[i];
}

template <int V>
__global__ void multiply_kernel(int64_t count, const float *x, float *y)
{
    for (int64_t i = (blockIdx.x * (int64_t)THREADS + threadIdx.x) * V; i < count; i += (int64_t)gridDim.x * THREADS * V) {
        float a[V], b[V];

        load(x + i, a);
        load(y + i, b);
#pragma unroll
        for (int j = 0; j < V; j++) b[j] *= a[j];
        store(y + i, b);
    }
}

template <class From, class To, int V>
__global__ void convert_kernel(int64_t count, const From *x, To *y)
{
    for (int64_t i = (blockIdx.x * (int64_t)THREADS + threadIdx.x) * V; i < count; i += (int64_t)gridDim.x * THREADS * V) {
        float a[V];

        load(x + i, a);
        store(y + i, a);
    }
}

__global__ void clear_kernel(int64_t count, const float *mask, float *x)
{
    for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < count; i += (int64_t)gridDim.x * THREADS)
        if (mask[i] == 0) x[i] = 0;
}

bool wide(int64_t count, const void *x, const void *y)
{
    return count % WIDE == 0 && aligned16(x) && aligned16(y);
}

void add(struct stream *s, int64_t count, glm52_dtype type, const void *x, void *y)
{
    cuda_device *d = device_of(s);

    count_add(s, count, type);
    if (count == 0) return;
    if (type == GLM52_DTYPE_F64)
        add_doubles_kernel<<<blocks_for(d, count, THREADS), THREADS, 0, d->stream>>>(count, (const double *)x, (double *)y);
    else
        with_type_and_width(type, wide(count, x, y), [&](auto element, auto width) {
            using T = decltype(element);
            constexpr int V = decltype(width)::value;
            add_kernel<T, V><<<blocks_for(d, count / V, THREADS), THREADS, 0, d->stream>>>(count, (const T *)x, (T *)y);
        });
    launched(d, "add");
}

void multiply(struct stream *s, int64_t count, const float *x, float *y)
{
    cuda_device *d = device_of(s);

    count_multiply(s, count);
    if (count == 0) return;
    if (wide(count, x, y))
        multiply_kernel<WIDE><<<blocks_for(d, count / WIDE, THREADS), THREADS, 0, d->stream>>>(count, x, y);
    else
        multiply_kernel<1><<<blocks_for(d, count, THREADS), THREADS, 0, d->stream>>>(count, x, y);
    launched(d, "multiply");
}

void clear_where_zero(struct stream *s, int64_t count, const float *mask, float *x)
{
    cuda_device *d = device_of(s);

    count_clear_where_zero(s, count);
    if (count == 0) return;
    clear_kernel<<<blocks_for(d, count, THREADS), THREADS, 0, d->stream>>>(count, mask, x);
    launched(d, "clear_where_zero");
}

void convert(struct stream *s, int64_t count, glm52_dtype from, const void *x, glm52_dtype to, void *y)
{
    cuda_device *d = device_of(s);

    count_convert(s, count, from, to);
    if (count == 0) return;
    with_type_and_width(from, wide(count, x, y), [&](auto element, auto width) {
        using From = decltype(element);
        constexpr int V = decltype(width)::value;
        with_type(to, [&](auto other) {
            using To = decltype(other);
            convert_kernel<From, To, V>
                <<<blocks_for(d, count / V, THREADS), THREADS, 0, d->stream>>>(count, (const From *)x, (To *)y);
        });
    });
    launched(d, "convert");
}

/* ---- sums ---- */

/* One block's sum of x[i] w[i]; w NULL: 1. */
__global__ void partial_kernel(int64_t count, const float *x, const float *w, double *partial)
{
    const int64_t first = blockIdx.x * SUM_BLOCK, end = min(first + SUM_BLOCK, count);
    double sum[4] = {};

    for (int64_t i = first + threadIdx.x; i < end; i += 4 * SUM_THREADS)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int64_t at = i + j * SUM_THREADS;
            if (at < end) sum[j] += (double)x[at] * (w ? (double)w[at] : 1.0);
        }
    const double all = block_sum<SUM_THREADS>((sum[0] + sum[1]) + (sum[2] + sum[3]));
    if (threadIdx.x == 0) partial[blockIdx.x] = all;
}

__global__ void finish_kernel(int64_t blocks, const double *partial, double *out)
{
    double sum = 0;

    for (int64_t i = threadIdx.x; i < blocks; i += SUM_THREADS) sum += partial[i];
    sum = block_sum<SUM_THREADS>(sum);
    if (threadIdx.x == 0) *out += sum;
}

size_t sum_bytes(struct stream *, int64_t count)
{
    return (size_t)divided(count, SUM_BLOCK) * sizeof(double);
}

void sum_products(cuda_device *d, int64_t count, const float *x, const float *w, double *out, double *partial)
{
    const int64_t blocks = divided(count, SUM_BLOCK);

    if (count == 0) return;
    partial_kernel<<<(unsigned)blocks, SUM_THREADS, 0, d->stream>>>(count, x, w, partial);
    finish_kernel<<<1, SUM_THREADS, 0, d->stream>>>(blocks, partial, out);
    launched(d, "sum");
}

void sum(struct stream *s, int64_t count, const float *x, const float *w, double *out, void *workspace)
{
    count_sum(s, count, w != nullptr);
    sum_products(device_of(s), count, x, w, out, (double *)workspace);
}

void sum_squares(struct stream *s, int64_t count, const float *x, double *out, void *workspace)
{
    count_sum_squares(s, count);
    sum_products(device_of(s), count, x, x, out, (double *)workspace);
}

} /* namespace */

void fill_arithmetic(struct ops *t)
{
    t->add = add;
    t->multiply = multiply;
    t->clear_where_zero = clear_where_zero;
    t->convert = convert;
    t->sum_bytes = sum_bytes;
    t->sum = sum;
    t->sum_squares = sum_squares;
}
