/* Blocks of 128 x 128, and blocks of one row with those of the transpose beside them: a thread block holds 128 x 128
 * elements in registers, 8 x 8 to a thread, reads them once, and turns the transposed codes round in shared memory. */
#include "quantise/codes.cuh"

namespace quantising {
namespace {

constexpr int TILE = 128, THREADS = 256, WARPS = THREADS / 32;
static_assert(TILE * TILE == THREADS * RUN * RUN, "a thread holds RUN x RUN elements");

/* What a thread has of a tile: rows top .. top + RUN - 1, columns left .. left + RUN - 1; zeros outside the matrix. */
template <class T>
struct patch {
    int64_t row, column; /* of the tile */
    int top, left, group; /* group: of columns, 0 .. 15, as the lane in its half of the warp */
    several<T, RUN> at[RUN];

    __device__ __forceinline__ patch(const quantised &q, int64_t along, const T *x)
    {
        row = blockIdx.x / along;
        column = blockIdx.x % along;
        group = threadIdx.x % (TILE / RUN);
        top = threadIdx.x / (TILE / RUN) * RUN;
        left = group * RUN;
        const int64_t from = (row * TILE + top) * q.width + column * TILE + left;
        const bool inside = column * TILE + left < q.width;

#pragma unroll
        for (int i = 0; i < RUN; i++) {
            at[i] = {};
            if (inside && row * TILE + top + i < q.rows) at[i] = *(const several<T, RUN> *)(x + from + i * q.width);
        }
    }
};

/* The largest magnitude of the tile, for every thread. */
template <class T>
__device__ __forceinline__ uint32_t largest_of_tile(const patch<T> &p)
{
    magnitudes<T> m;

#pragma unroll
    for (int i = 0; i < RUN; i++) m.take(p.at[i]);
    return block_largest<THREADS>(m.all());
}

template <code CODE, class T>
__device__ __forceinline__ void store_row(const quantised &q, const patch<T> &p, int i, float by, uint8_t *codes)
{
    const int64_t row = p.row * TILE + p.top + i, column = p.column * TILE + p.left;
    float value[RUN];

    if (row >= q.rows || column >= q.width) return;
#pragma unroll
    for (int j = 0; j < RUN; j++) value[j] = get(p.at[i].at[j]);
    *(uint2 *)(codes + row * q.width + column) = encode_run<CODE>(q.format, value, by);
}

/* Shared memory for the transposed codes: 128 rows of 128 bytes. Words of 8 bytes lie where neither the writes of a
 * column's 8 rows nor the reads of 16 bytes along a row meet in a bank. */
struct turned {
    uint2 at[TILE * TILE / RUN];

    __device__ __forceinline__ void put(int column, int top, uint2 codes)
    {
        at[column * (TILE / RUN) + (top / RUN ^ column / RUN)] = codes;
    }
    __device__ __forceinline__ uint4 get16(int column, int piece) const
    {
        const int turn = column / RUN;
        const uint4 both = *(const uint4 *)&at[column * (TILE / RUN) + 2 * (piece ^ turn / 2)];

        return turn & 1 ? make_uint4(both.z, both.w, both.x, both.y) : both;
    }
};

template <code CODE, class T>
__device__ __forceinline__ void put_columns(const quantised &q, const patch<T> &p, const float (&by)[RUN],
                                            turned *shared)
{
#pragma unroll
    for (int j = 0; j < RUN; j++) {
        float value[RUN];

#pragma unroll
        for (int i = 0; i < RUN; i++) value[i] = get(p.at[i].at[j]);
        shared->put(p.left + j, p.top, encode_run<CODE>(q.format, value, by[j]));
    }
}

/* After a barrier: rows of codes_t, 16 bytes a thread. */
template <class T>
__device__ __forceinline__ void store_turned(const quantised &q, const patch<T> &p, const turned &shared,
                                             uint8_t *codes_t)
{
    constexpr int PIECES = TILE / 16;

#pragma unroll
    for (int k = 0; k < TILE * PIECES / THREADS; k++) {
        const int column = threadIdx.x / PIECES + k * (THREADS / PIECES), piece = threadIdx.x % PIECES;
        const int64_t down = p.column * TILE + column, along = p.row * TILE + piece * 16;

        if (down < q.width && along < q.rows) *(uint4 *)(codes_t + down * q.rows + along) = shared.get16(column, piece);
    }
}

template <class T>
constexpr int RESIDENT = sizeof(T) == 2 ? 3 : 2; /* thread blocks a multiprocessor, by registers */

template <class T, code CODE>
__global__ __launch_bounds__(THREADS, RESIDENT<T>) void square_kernel(const quantised q, int64_t along, int64_t down,
                                                                      const T *x, uint8_t *codes, void *scales,
                                                                      uint8_t *codes_t, void *scales_t)
{
    __shared__ turned shared;
    const patch<T> p(q, along, x);
    const struct scale s = scale_make(q.format, CODE == E5M2, narrow_float(largest_of_tile(p)), 0);

#pragma unroll
    for (int i = 0; i < RUN; i++) store_row<CODE>(q, p, i, s.encode, codes);
    if (threadIdx.x == 0) scale_store(q.format, &s, scales, p.row * along + p.column);
    if (!codes_t) return;
    if (threadIdx.x == 0) scale_store(q.format, &s, scales_t, p.column * down + p.row);
    const float by[RUN] = {s.encode, s.encode, s.encode, s.encode, s.encode, s.encode, s.encode, s.encode};
    put_columns<CODE>(q, p, by, &shared);
    __syncthreads();
    store_turned(q, p, shared, codes_t);
}

/* Scales of the tile's rows in blocks of BLOCK columns, and its codes. */
template <class T, int BLOCK, code CODE>
__device__ __forceinline__ void store_rows(const quantised &q, const patch<T> &p, uint8_t *codes, void *scales)
{
    const int64_t blocks = (q.width + BLOCK - 1) / BLOCK, block = (p.column * TILE + p.left) / BLOCK;
    uint32_t most[RUN];
    float by[RUN];

#pragma unroll
    for (int i = 0; i < RUN; i++) most[i] = largest_of(p.at[i]);
    agree<BLOCK / RUN>(q.format, CODE == E5M2, 0, most, by, [&](int i, const struct scale &s) {
        const int64_t row = p.row * TILE + p.top + i;

        if (row < q.rows && block < blocks) scale_store(q.format, &s, scales, row * blocks + block);
    });
#pragma unroll
    for (int i = 0; i < RUN; i++) store_row<CODE>(q, p, i, by[i], codes);
}

/* Scales of the tile's columns in blocks of BLOCK rows; `by` gets those that encode the thread's own columns. */
template <class T, int BLOCK, code CODE>
__device__ __forceinline__ void scale_columns(const quantised &q, const patch<T> &p, void *scales_t, float (&by)[RUN])
{
    constexpr int DOWN = TILE / BLOCK, PART_ROWS = TILE / WARPS;
    __shared__ uint32_t part[WARPS][TILE];
    __shared__ float encode[DOWN][TILE];
    const int64_t blocks = (q.rows + BLOCK - 1) / BLOCK;

    magnitudes<T> m;

#pragma unroll
    for (int i = 0; i < RUN; i++) m.take(p.at[i]);
#pragma unroll
    for (int j = 0; j < RUN; j++) {
        uint32_t most = m.at(j);

        most = max(most, __shfl_xor_sync(~0u, most, TILE / RUN)); /* the other half of the warp has the next rows */
        if (threadIdx.x % 32 < TILE / RUN) part[threadIdx.x / 32][p.left + j] = most;
    }
    __syncthreads();
    for (int e = threadIdx.x; e < DOWN * TILE; e += THREADS) {
        const int block = e / TILE, column = e % TILE;
        const int64_t down = p.column * TILE + column, along = p.row * DOWN + block;
        uint32_t most = 0;

#pragma unroll
        for (int w = 0; w < BLOCK / PART_ROWS; w++) most = max(most, part[block * (BLOCK / PART_ROWS) + w][column]);
        const struct scale s = scale_make(q.format, CODE == E5M2, narrow_float(most), 0);
        encode[block][column] = s.encode;
        if (down < q.width && along < blocks) scale_store(q.format, &s, scales_t, down * blocks + along);
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < RUN; j++) by[j] = encode[p.top / BLOCK][p.left + j];
}

template <class T, int BLOCK, code CODE>
__global__ __launch_bounds__(THREADS, RESIDENT<T>) void both_kernel(const quantised q, int64_t along, const T *x,
                                                                    uint8_t *codes, void *scales, uint8_t *codes_t,
                                                                    void *scales_t)
{
    __shared__ turned shared;
    const patch<T> p(q, along, x);
    float by[RUN];

    store_rows<T, BLOCK, CODE>(q, p, codes, scales);
    scale_columns<T, BLOCK, CODE>(q, p, scales_t, by);
    put_columns<CODE>(q, p, by, &shared);
    __syncthreads();
    store_turned(q, p, shared, codes_t);
}

} /* namespace */

bool quantise_tiles(cuda_device *d, const quantised &q, const void *x, void *codes, void *scales, void *codes_t,
                    void *scales_t)
{
    const bool square = q.block_rows == TILE && q.block_columns == TILE;
    const bool rows = q.block_rows == 1 && (q.block_columns == TILE || q.block_columns == 32) && codes_t;
    const int64_t along = divided(q.width, TILE), down = divided(q.rows, TILE);

    if (format_is_packed(q.format) || !(square || rows)) return false;
    if (q.width % RUN || (codes_t && q.rows % 16) || !aligned16(x) || !aligned16(codes) || !aligned16(codes_t))
        return false;
    with_type(q.type, [&](auto element) {
        with_code(q, [&](auto code) {
            using T = decltype(element);
            constexpr auto CODE = decltype(code)::value == E5M2 ? E5M2 : E4M3;
            const unsigned grid = (unsigned)(along * down);

            if (square)
                square_kernel<T, CODE><<<grid, THREADS, 0, d->stream>>>(q, along, down, (const T *)x, (uint8_t *)codes,
                                                                        scales, (uint8_t *)codes_t, scales_t);
            else {
                auto kernel = q.block_columns == TILE ? both_kernel<T, TILE, CODE> : both_kernel<T, 32, CODE>;

                kernel<<<grid, THREADS, 0, d->stream>>>(q, along, (const T *)x, (uint8_t *)codes, scales,
                                                        (uint8_t *)codes_t, scales_t);
            }
        });
    });
    return true;
}

} /* namespace quantising */
