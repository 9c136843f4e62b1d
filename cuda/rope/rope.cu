/* Rotary position (model.md 2, "RoPE tables"), and one row for all heads and back. */
#include "device/element.cuh"

namespace {

constexpr int THREADS = 256;

__global__ void table_kernel(int64_t rows, int32_t half, const int32_t *position, const float *inverse_frequency,
                             float *table)
{
    for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < rows * half; i += (int64_t)gridDim.x * THREADS) {
        const float angle = __fmul_rn((float)position[i / half], inverse_frequency[i % half]);

        table[2 * i] = cosf(angle);
        table[2 * i + 1] = sinf(angle);
    }
}

void rope_table(struct stream *s, int64_t rows, int32_t half, const int32_t *position, const float *inverse_frequency,
                float *table)
{
    cuda_device *d = device_of(s);

    count_rope_table(s, rows, half);
    if (rows == 0) return;
    table_kernel<<<blocks_for(d, rows * half, THREADS), THREADS, 0, d->stream>>>(rows, half, position, inverse_frequency,
                                                                                 table);
    launched(d, "rope_table");
}

/* A thread a pair. */
template <class T>
__global__ void rope_kernel(const struct rope r, const float *table, const T *x, T *y)
{
    const int64_t count = r.rows * r.heads * r.half;

    for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < count; i += (int64_t)gridDim.x * THREADS) {
        const int64_t pair = i % r.half, head = i / r.half % r.heads, row = i / r.half / r.heads;
        const T *from = x + row * r.x_row + head * r.x_head + 2 * pair;
        T *at = y + row * r.y_row + head * r.y_head + 2 * pair;
        const float cosine = table[(row * r.half + pair) * 2], sine = table[(row * r.half + pair) * 2 + 1];
        const float a = get(from[0]), b = get(from[1]), turned = r.inverse ? -sine : sine;
        const float first = a * cosine - b * turned, second = b * cosine + a * turned;

        at[0] = to<T>(r.add ? get(at[0]) + first : first);
        at[1] = to<T>(r.add ? get(at[1]) + second : second);
    }
}

void rotate(struct stream *s, const struct rope *r, const float *table, const void *x, void *y)
{
    cuda_device *d = device_of(s);
    const int64_t count = r->rows * r->heads * r->half;

    count_rope(s, r);
    if (count == 0) return;
    with_type(r->type, [&](auto element) {
        using T = decltype(element);
        rope_kernel<T><<<blocks_for(d, count, THREADS), THREADS, 0, d->stream>>>(*r, table, (const T *)x, (T *)y);
    });
    launched(d, "rope");
}

template <class T>
__global__ void spread_kernel(const struct spread r, const T *x, T *y)
{
    const int64_t count = r.rows * r.heads * r.width;

    for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < count; i += (int64_t)gridDim.x * THREADS) {
        const int64_t j = i % r.width, head = i / r.width % r.heads, row = i / r.width / r.heads;

        y[row * r.y_row + head * r.y_head + j] = x[row * r.x_row + j];
    }
}

void spread_heads(struct stream *s, const struct spread *r, const void *x, void *y)
{
    cuda_device *d = device_of(s);
    const int64_t count = r->rows * r->heads * r->width;

    count_spread_heads(s, r);
    if (count == 0) return;
    with_type(r->type, [&](auto element) {
        using T = decltype(element);
        spread_kernel<T><<<blocks_for(d, count, THREADS), THREADS, 0, d->stream>>>(*r, (const T *)x, (T *)y);
    });
    launched(d, "spread_heads");
}

/* A thread a column: its heads in order. */
template <class T>
__global__ void sum_kernel(const struct spread r, const T *y, float *x)
{
    for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < r.rows * r.width; i += (int64_t)gridDim.x * THREADS) {
        const int64_t j = i % r.width, row = i / r.width;
        float sum = 0;

        for (int32_t h = 0; h < r.heads; h++) sum += get(y[row * r.y_row + h * r.y_head + j]);
        x[row * r.x_row + j] = sum;
    }
}

void sum_heads(struct stream *s, const struct spread *r, const void *y, float *x)
{
    cuda_device *d = device_of(s);

    count_sum_heads(s, r);
    if (r->rows * r->width == 0) return;
    with_type(r->type, [&](auto element) {
        using T = decltype(element);
        sum_kernel<T><<<blocks_for(d, r->rows * r->width, THREADS), THREADS, 0, d->stream>>>(*r, (const T *)y, x);
    });
    launched(d, "sum_heads");
}

} /* namespace */

void fill_rope(struct ops *t)
{
    t->rope_table = rope_table;
    t->rope = rotate;
    t->spread_heads = spread_heads;
    t->sum_heads = sum_heads;
}
