/* Rotary position (model.md 2, "RoPE tables"), and one row for all heads and back. Where rows are pieces
 * of 8 bf16 columns at 16-byte addresses, a block is a grid of pieces, heads and rows (`tiling`);
 * elsewhere a thread has a pair or a column. */
#include <initializer_list>

#include "device/element.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int ROPE_HEADS = 2, SPREAD_HEADS = 16, SUM_HEADS = 4; /* of a thread, where a block has room for so few */
constexpr unsigned MOST_ROWS = 64; /* of a block: what its third dimension may be */

__global__ void table_kernel(int64_t rows, int32_t half, const int32_t *position, const float *inverse_frequency,
                             float *table)
{
    for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < rows * half; i += (int64_t)gridDim.x * THREADS) {
        const float angle = __fmul_rn((float)position[i / half], inverse_frequency[i % half]);

        sincosf(angle, &table[2 * i + 1], &table[2 * i]);
    }
}

void rope_table(struct stream *s, int64_t rows, int32_t half, const int32_t *position, const float *inverse_frequency,
                float *table)
{
    cuda_device *d = device_of(s);

    count_rope_table(s, rows, half);
    if (rows == 0) return;
    table_kernel<<<blocks_for(d, rows * half, THREADS), THREADS, 0, d->stream>>>(rows, half, position,
                                                                                 inverse_frequency, table);
    launched(d, "rope_table");
}

/* ---- pieces ---- */

bool in_pieces(glm52_dtype type, std::initializer_list<int64_t> strides, std::initializer_list<const void *> addresses)
{
    bool good = type == GLM52_DTYPE_BF16;

    for (int64_t stride : strides) good = good && stride % WIDE == 0;
    for (const void *address : addresses) good = good && aligned16(address);
    return good;
}

/* A block of x = pieces of a head, y = heads at once, z = rows; all powers of two but
 * x. A thread shall have `each` heads. */
bool tiling(int64_t rows, int64_t columns, int32_t heads, int each, dim3 *grid, dim3 *block)
{
    const int64_t pieces = columns / WIDE;
    unsigned y = 1, z = 1;

    if (columns % WIDE != 0 || pieces > THREADS / 8) return false;
    while (y * each < (unsigned)heads && pieces * y * 2 <= THREADS) y *= 2;
    while (pieces * y * z * 2 <= THREADS && z < MOST_ROWS) z *= 2;
    *block = dim3((unsigned)pieces, y, z);
    *grid = dim3((unsigned)divided(rows, z));
    return true;
}

typedef several<bf16, WIDE> piece;

/* Rotates four pairs of a piece by table [4,2]. */
__device__ __forceinline__ void rotate_piece(const struct rope &r, const float (&table)[WIDE], const piece &x, bf16 *at)
{
    float out[WIDE];

#pragma unroll
    for (int i = 0; i < WIDE; i += 2) {
        const float a = get(x.at[i]), b = get(x.at[i + 1]), turned = r.inverse ? -table[i + 1] : table[i + 1];

        out[i] = a * table[i] - b * turned;
        out[i + 1] = b * table[i] + a * turned;
    }
    store(at, out, r.add);
}

/* As many heads at a time as shall be under way. */
template <int HEADS>
__global__ __launch_bounds__(THREADS) void rope_pieces_kernel(const struct rope r, const float *table, const bf16 *x,
                                                              bf16 *y)
{
    const int64_t row = blockIdx.x * (int64_t)blockDim.z + threadIdx.z, column = threadIdx.x * WIDE;
    const int step = blockDim.y;
    float turn[WIDE];

    if (row >= r.rows) return;
    x += row * r.x_row + column;
    y += row * r.y_row + column;
    load(table + row * r.half * 2 + column, turn);
    for (int first = threadIdx.y; first < r.heads; first += HEADS * step) {
        piece at_once[HEADS] = {};

#pragma unroll
        for (int q = 0; q < HEADS; q++)
            if (first + q * step < r.heads) at_once[q] = *(const piece *)(x + (first + q * step) * r.x_head);
#pragma unroll
        for (int q = 0; q < HEADS; q++)
            if (first + q * step < r.heads) rotate_piece(r, turn, at_once[q], y + (first + q * step) * r.y_head);
    }
}

__global__ __launch_bounds__(THREADS) void spread_pieces_kernel(const struct spread r, const bf16 *x, bf16 *y)
{
    const int64_t row = blockIdx.x * (int64_t)blockDim.z + threadIdx.z, column = threadIdx.x * WIDE;

    if (row >= r.rows) return;
    const piece all = *(const piece *)(x + row * r.x_row + column);
    for (int head = threadIdx.y; head < r.heads; head += blockDim.y)
        *(piece *)(y + row * r.y_row + head * r.y_head + column) = all;
}

/* Each y of a block sums its heads in order; then the y are added in order, on chip. */
__global__ __launch_bounds__(THREADS) void sum_pieces_kernel(const struct spread r, const bf16 *y, float *x)
{
    __shared__ float part[THREADS][WIDE + 1];
    const int64_t row = blockIdx.x * (int64_t)blockDim.z + threadIdx.z, column = threadIdx.x * WIDE;
    const int step = blockDim.y, me = threadIdx.x + blockDim.x * (threadIdx.y + step * threadIdx.z);
    float sum[WIDE] = {};

    for (int first = threadIdx.y; row < r.rows && first < r.heads; first += SUM_HEADS * step) {
        piece at_once[SUM_HEADS] = {};

#pragma unroll
        for (int q = 0; q < SUM_HEADS; q++)
            if (first + q * step < r.heads)
                at_once[q] = *(const piece *)(y + row * r.y_row + (first + q * step) * r.y_head + column);
#pragma unroll
        for (int q = 0; q < SUM_HEADS; q++)
#pragma unroll
            for (int i = 0; i < WIDE; i++) sum[i] += get(at_once[q].at[i]);
    }
#pragma unroll
    for (int i = 0; i < WIDE; i++) part[me][i] = sum[i];
    __syncthreads();
    if (row >= r.rows || threadIdx.y != 0) return;
    for (int q = 1; q < step; q++)
#pragma unroll
        for (int i = 0; i < WIDE; i++) sum[i] += part[me + q * blockDim.x][i];
    store(x + row * r.x_row + column, sum);
}

/* ---- any type and shape ---- */

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
    dim3 grid, block;

    count_rope(s, r);
    if (count == 0) return;
    if (in_pieces(r->type, {r->x_row, r->x_head, r->y_row, r->y_head}, {x, y, table}) &&
        tiling(r->rows, 2 * r->half, r->heads, ROPE_HEADS, &grid, &block))
        rope_pieces_kernel<ROPE_HEADS><<<grid, block, 0, d->stream>>>(*r, table, (const bf16 *)x, (bf16 *)y);
    else
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
    dim3 grid, block;

    count_spread_heads(s, r);
    if (count == 0) return;
    if (in_pieces(r->type, {r->x_row, r->y_row, r->y_head}, {x, y}) &&
        tiling(r->rows, r->width, r->heads, SPREAD_HEADS, &grid, &block))
        spread_pieces_kernel<<<grid, block, 0, d->stream>>>(*r, (const bf16 *)x, (bf16 *)y);
    else
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
    for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < r.rows * r.width;
         i += (int64_t)gridDim.x * THREADS) {
        const int64_t j = i % r.width, row = i / r.width;
        float sum = 0;

        for (int32_t h = 0; h < r.heads; h++) sum += get(y[row * r.y_row + h * r.y_head + j]);
        x[row * r.x_row + j] = sum;
    }
}

void sum_heads(struct stream *s, const struct spread *r, const void *y, float *x)
{
    cuda_device *d = device_of(s);
    dim3 grid, block;

    count_sum_heads(s, r);
    if (r->rows * r->width == 0) return;
    if (in_pieces(r->type, {r->x_row, r->y_row, r->y_head}, {x, y}) &&
        tiling(r->rows, r->width, r->heads, SUM_HEADS, &grid, &block))
        sum_pieces_kernel<<<grid, block, 0, d->stream>>>(*r, (const bf16 *)y, x);
    else
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
