/* Rotary position (model.md 2, "RoPE tables"), and one row for all heads and back. Where rows are pieces
 * of 8 bf16 columns at 16-byte addresses, a block is a grid of pieces, heads and rows (`tiling`);
 * elsewhere a thread has a pair or a column. */
#include <initializer_list>

#include "device/element.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int ROPE_HEADS = 1, SPREAD_HEADS = 16, SUM_HEADS = 2; /* of a thread, where a block has room for so few */
constexpr unsigned MOST_ROWS = 64; /* of a block: what its third dimension may be */
constexpr int LINE = 128;          /* bytes of the L2 that belong together */

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

/* Pieces apart from each other go to the DRAM the faster the closer together those of one moment lie. So blocks are
 * short, a piece a thread, and follow the addresses; they seldom wait for the DRAM, for blocks before them asked it to
 * bring their rows into the L2; and six of them at most share a multiprocessor, as each holds ROOM of its shared
 * memory, for nothing else. */
constexpr int AHEAD = 18 << 10; /* bytes of x a multiprocessor that are asked for ahead */
constexpr size_t ROOM = 32 << 10;

__device__ __forceinline__ void prefetch(const void *at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

/* Blocks: `parts` for the heads of the same rows, one after the other. */
__global__ __launch_bounds__(THREADS) void rope_pieces_kernel(const struct rope r, unsigned parts, int64_t ahead,
                                                              const float *table, const bf16 *x, bf16 *y)
{
    const int64_t row = blockIdx.x / parts * (int64_t)blockDim.z + threadIdx.z;
    const int head = blockIdx.x % parts * blockDim.y + threadIdx.y, column = threadIdx.x * WIDE;
    float turn[WIDE];

    if (row >= r.rows || head >= r.heads) return;
    x += row * r.x_row + head * r.x_head + column;
    table += row * r.half * 2 + column;
    const piece from = *(const piece *)x;
    load(table, turn);
    if (row + ahead < r.rows) {
        if (column % (LINE / (int)sizeof *x) == 0) prefetch(x + ahead * r.x_row);
        if (head == 0 && column % (LINE / (int)sizeof *table) == 0) prefetch(table + ahead * r.half * 2);
    }
    rotate_piece(r, turn, from, y + row * r.y_row + head * r.y_head + column);
}

__global__ __launch_bounds__(THREADS) void spread_pieces_kernel(const struct spread r, const bf16 *x, bf16 *y)
{
    const int64_t row = blockIdx.x * (int64_t)blockDim.z + threadIdx.z, column = threadIdx.x * WIDE;

    if (row >= r.rows) return;
    const piece all = *(const piece *)(x + row * r.x_row + column);
    for (int head = threadIdx.y; head < r.heads; head += blockDim.y)
        *(piece *)(y + row * r.y_row + head * r.y_head + column) = all;
}

/* Each y of a block sums its heads in order; then the y are added in order, on chip. What is read once leaves the L2
 * first, which keeps it from writing back what others have there. */
__global__ __launch_bounds__(THREADS) void sum_pieces_kernel(const struct spread r, const bf16 *y, float *x)
{
    __shared__ alignas(16) float part[THREADS * WIDE];
    const int64_t top = blockIdx.x * (int64_t)blockDim.z, row = top + threadIdx.z;
    const int step = blockDim.y, columns = blockDim.x * WIDE, column = threadIdx.x * WIDE;
    const int me = threadIdx.x + blockDim.x * (threadIdx.y + step * threadIdx.z);
    float sum[WIDE] = {};

    for (int first = threadIdx.y; row < r.rows && first < r.heads; first += SUM_HEADS * step) {
        piece at_once[SUM_HEADS] = {};

#pragma unroll
        for (int q = 0; q < SUM_HEADS; q++)
            if (first + q * step < r.heads)
                *(int4 *)&at_once[q] =
                    __ldcs((const int4 *)(y + row * r.y_row + (first + q * step) * r.y_head + column));
#pragma unroll
        for (int q = 0; q < SUM_HEADS; q++)
#pragma unroll
            for (int i = 0; i < WIDE; i++) sum[i] += get(at_once[q].at[i]);
    }
    store(part + me * WIDE, sum);
    __syncthreads();
    for (int i = me; i < columns * (int)blockDim.z; i += blockDim.x * step * blockDim.z) {
        const int z = i / columns, j = i - z * columns;
        float all = 0;

        if (top + z >= r.rows) return;
        for (int q = 0; q < step; q++) all += part[(z * step + q) * columns + j];
        x[(top + z) * r.x_row + j] = all;
    }
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

void rope_pieces(cuda_device *d, const struct rope *r, dim3 grid, dim3 block, const float *table, const bf16 *x,
                 bf16 *y)
{
    const unsigned parts = (unsigned)divided(r->heads, block.y);
    const int64_t row_bytes = (int64_t)r->heads * r->half * 2 * (int64_t)sizeof *x;

    rope_pieces_kernel<<<grid.x * parts, block, ROOM, d->stream>>>(
        *r, parts, divided((int64_t)d->multiprocessors * AHEAD, row_bytes), table, x, y);
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
        rope_pieces(d, r, grid, block, table, (const bf16 *)x, (bf16 *)y);
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
