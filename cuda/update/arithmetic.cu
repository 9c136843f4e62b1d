/* Elementwise sums, products and conversions; sums in fp64 whose order depends on the count alone. */
#include "update/neighbours.cuh"

namespace {

using namespace neighbours;

constexpr int SUM_THREADS = 512;
constexpr int64_t SUM_BLOCK = 1 << 15; /* elements that one block sums */

/* ---- elementwise ---- */

/* y = f(x, y); KEEPS: f needs what y was. */
template <class From, class To, int V, bool KEEPS, class F>
__global__ __launch_bounds__(THREADS) void combine_kernel(int64_t count, const From *x, To *y, F f)
{
    float a[ROUNDS<V>][V], b[ROUNDS<V>][V];

#pragma unroll
    for (int round = 0; round < ROUNDS<V>; round++) {
        const int64_t i = run_at<V>(round);

        if (i >= count) continue;
        load(x + i, a[round]);
        if (KEEPS) load(y + i, b[round]);
    }
#pragma unroll
    for (int round = 0; round < ROUNDS<V>; round++) {
        const int64_t i = run_at<V>(round);

        if (i >= count) continue;
#pragma unroll
        for (int j = 0; j < V; j++) b[round][j] = f(a[round][j], b[round][j]);
        store(y + i, b[round]);
    }
}

struct first {
    __device__ float operator()(float a, float) const { return a; }
};
struct product {
    __device__ float operator()(float a, float b) const { return a * b; }
};
struct masked {
    __device__ float operator()(float mask, float x) const { return mask == 0 ? 0 : x; }
};

template <class From, class To, bool KEEPS, class F>
void combine(cuda_device *d, int64_t count, const From *x, To *y, F f)
{
    constexpr int V = RUN<From, To>;
    const bool wide = count % V == 0 && aligned16(x) && aligned16(y);
    auto kernel = wide ? combine_kernel<From, To, V, KEEPS, F> : combine_kernel<From, To, 1, KEEPS, F>;

    kernel<<<wide ? blocks<V>(count) : blocks<1>(count), THREADS, 0, d->stream>>>(count, x, y, f);
}

__global__ void add_doubles_kernel(int64_t count, const double *x, double *y)
{
    for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < count; i += (int64_t)gridDim.x * THREADS)
        y[i] += x[i];
}

void add(struct stream *s, int64_t count, glm52_dtype type, const void *x, void *y)
{
    cuda_device *d = device_of(s);

    count_add(s, count, type);
    if (count == 0) return;
    if (type == GLM52_DTYPE_F64)
        add_doubles_kernel<<<blocks_for(d, count, THREADS), THREADS, 0, d->stream>>>(count, (const double *)x,
                                                                                     (double *)y);
    else
        with_type(type, [&](auto element) {
            using T = decltype(element);
            combine<T, T, true>(d, count, (const T *)x, (T *)y, plus());
        });
    launched(d, "add");
}

void multiply(struct stream *s, int64_t count, const float *x, float *y)
{
    cuda_device *d = device_of(s);

    count_multiply(s, count);
    if (count == 0) return;
    combine<float, float, true>(d, count, x, y, product());
    launched(d, "multiply");
}

void clear_where_zero(struct stream *s, int64_t count, const float *mask, float *x)
{
    cuda_device *d = device_of(s);

    count_clear_where_zero(s, count);
    if (count == 0) return;
    combine<float, float, true>(d, count, mask, x, masked());
    launched(d, "clear_where_zero");
}

void convert(struct stream *s, int64_t count, glm52_dtype from, const void *x, glm52_dtype to, void *y)
{
    cuda_device *d = device_of(s);

    count_convert(s, count, from, to);
    if (count == 0) return;
    with_type(from, [&](auto source) {
        with_type(to, [&](auto target) {
            using From = decltype(source);
            using To = decltype(target);
            combine<From, To, false>(d, count, (const From *)x, (To *)y, first());
        });
    });
    launched(d, "convert");
}

/* ---- sums ---- */

/* V elements at i, or fewer at the end of an array, which then count as 0. */
template <class T, int V, bool WIDE_ACCESS>
__device__ __forceinline__ void load_some(const T *x, int64_t i, int64_t end, float (&value)[V])
{
    if (WIDE_ACCESS && i + V <= end) {
        load(x + i, value);
        return;
    }
#pragma unroll
    for (int j = 0; j < V; j++) value[j] = i + j < end ? get(x[i + j]) : 0;
}

enum factor { ONE, WEIGHT, ITSELF };

/* One block's sum of x[i] times 1, w[i] or x[i]. Which thread adds what and when does not depend on how it is read. */
template <class T, factor BY, bool WIDE_ACCESS>
__global__ __launch_bounds__(SUM_THREADS) void partial_kernel(int64_t count, const T *x, const T *w, double *partial)
{
    constexpr int V = RUN<T>, AHEAD = BY == WEIGHT ? 2 : 4;
    constexpr bool NARROW = BY == ITSELF && sizeof(T) == 2;
    const int64_t first = blockIdx.x * SUM_BLOCK, end = min(first + SUM_BLOCK, count);
    double sum[V] = {};

    for (int64_t i = first + threadIdx.x * V; i < end; i += AHEAD * SUM_THREADS * V) {
        float a[AHEAD][V], b[AHEAD][V];

#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            load_some<T, V, WIDE_ACCESS>(x, i + k * SUM_THREADS * V, end, a[k]);
            if (BY == WEIGHT) load_some<T, V, WIDE_ACCESS>(w, i + k * SUM_THREADS * V, end, b[k]);
        }
#pragma unroll
        for (int k = 0; k < AHEAD; k++)
#pragma unroll
            for (int j = 0; j < V; j += NARROW ? 2 : 1)
                if (NARROW) /* squares of bf16 are exact in fp32; rounding their sum once saves half the conversions */
                    sum[j] += (double)fmaf(a[k][j + 1], a[k][j + 1], a[k][j] * a[k][j]);
                else
                    sum[j] += (double)a[k][j] * (BY == ONE ? 1.0 : (double)(BY == WEIGHT ? b[k][j] : a[k][j]));
    }
#pragma unroll
    for (int j = 1; j < V; j++) sum[0] += sum[j];
    const double all = block_sum<SUM_THREADS>(sum[0]);
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

template <class T, factor BY>
void sum_products(cuda_device *d, int64_t count, const T *x, const T *w, double *out, double *partial)
{
    const int64_t blocks = divided(count, SUM_BLOCK);
    auto kernel = aligned16(x) && aligned16(w) ? partial_kernel<T, BY, true> : partial_kernel<T, BY, false>;

    if (count == 0) return;
    kernel<<<(unsigned)blocks, SUM_THREADS, 0, d->stream>>>(count, x, w, partial);
    finish_kernel<<<1, SUM_THREADS, 0, d->stream>>>(blocks, partial, out);
    launched(d, "sum");
}

void sum(struct stream *s, int64_t count, const float *x, const float *w, double *out, void *workspace)
{
    count_sum(s, count, w != nullptr);
    if (w)
        sum_products<float, WEIGHT>(device_of(s), count, x, w, out, (double *)workspace);
    else
        sum_products<float, ONE>(device_of(s), count, x, nullptr, out, (double *)workspace);
}

void sum_squares(struct stream *s, int64_t count, glm52_dtype type, const void *x, double *out, void *workspace)
{
    cuda_device *d = device_of(s);

    count_sum_squares(s, count, type);
    with_type(type, [&](auto element) {
        using T = decltype(element);
        sum_products<T, ITSELF>(d, count, (const T *)x, nullptr, out, (double *)workspace);
    });
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
