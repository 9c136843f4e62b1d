/* Blocks of 128 x 128, and blocks of one row where rows end within one, or with those of the transpose beside them: a
 * thread block holds 128 x 128 elements in registers, 8 x 8 to a thread, reads them once, and turns the transposed
 * codes round in shared memory. */
#include "quantise/codes.cuh"

namespace quantising {
namespace {

constexpr int TILE = 128, THREADS = 256, WARPS = THREADS / 32;
static_assert(TILE * TILE == THREADS * RUN * RUN, "a thread holds RUN x RUN elements");

/* What a thread has of a tile: rows top .. top + RUN - 1, columns left .. left + RUN - 1; zeros outside the matrix. */
template <class T>
struct patch {
    int64_t row, column; /* where the tile begins */
    int top, left, rows; /* in the tile; rows: those within the matrix */
    several<T, RUN> at[RUN];

    __device__ __forceinline__ patch()
    {
        top = threadIdx.x / (TILE / RUN) * RUN;
        left = threadIdx.x % (TILE / RUN) * RUN;
    }
    __device__ __forceinline__ void move(const quantised &q, uint32_t tile, uint32_t along)
    {
        row = (int64_t)(tile / along) * TILE;
        column = (int64_t)(tile % along) * TILE;
        rows = left < q.width - column ? (int)max((int64_t)0, min((int64_t)RUN, q.rows - row - top)) : 0;
    }
    /* Where the patch begins in rows of the matrix: of the tile for all threads alike, and from there 32 bits. */
    __device__ __forceinline__ int64_t origin(const quantised &q) const { return row * q.width + column; }
    __device__ __forceinline__ uint32_t offset(const quantised &q, int i) const
    {
        return (uint32_t)(top + i) * (uint32_t)q.width + left;
    }
    __device__ __forceinline__ void load(const quantised &q, const T *x)
    {
#pragma unroll
        for (int i = 0; i < RUN; i++) {
            at[i] = {};
            if (i < rows) at[i] = *(const several<T, RUN> *)(x + origin(q) + offset(q, i));
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

template <code CODE, class T, class Scaling>
__device__ __forceinline__ void store_row(const quantised &q, const patch<T> &p, int i, Scaling by, uint8_t *codes)
{
    float value[RUN];

#pragma unroll
    for (int j = 0; j < RUN; j++) value[j] = element_of(p.at[i], j);
    const uint2 coded = encode_run<CODE>(value, by);
    if (i < p.rows) *(uint2 *)(codes + p.origin(q) + p.offset(q, i)) = coded;
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

template <code CODE, class T, class Scaling>
__device__ __forceinline__ void put_columns(const patch<T> &p, const Scaling (&by)[RUN], turned *shared)
{
#pragma unroll
    for (int j = 0; j < RUN; j++) {
        float value[RUN];

#pragma unroll
        for (int i = 0; i < RUN; i++) value[i] = element_of(p.at[i], j);
        shared->put(p.left + j, p.top, encode_run<CODE>(value, by[j]));
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
        uint8_t *to = codes_t + p.column * q.rows + p.row; /* of the tile; from there 32 bits do */

        if (column < q.width - p.column && piece * 16 < q.rows - p.row)
            *(uint4 *)(to + ((uint32_t)column * (uint32_t)q.rows + piece * 16)) = shared.get16(column, piece);
    }
}

template <class T>
constexpr int RESIDENT = sizeof(T) == 2 ? 3 : 2; /* thread blocks a multiprocessor, by registers */

template <code CODE, class T, class Scaling>
__device__ __forceinline__ void store_square(const quantised &q, const patch<T> &p, Scaling by, uint8_t *codes,
                                             uint8_t *codes_t, turned *shared)
{
#pragma unroll
    for (int i = 0; i < RUN; i++) store_row<CODE>(q, p, i, by, codes);
    if (!codes_t) return;
    const Scaling alike[RUN] = {by, by, by, by, by, by, by, by};
    put_columns<CODE>(p, alike, shared);
    __syncthreads();
    store_turned(q, p, *shared, codes_t);
}

template <class T, int FAMILY, code CODE>
__global__ __launch_bounds__(THREADS, RESIDENT<T>) void square_kernel(const quantised q, uint32_t along, uint32_t down,
                                                                      const T *x, uint8_t *codes, void *scales,
                                                                      uint8_t *codes_t, void *scales_t)
{
    __shared__ turned shared;
    patch<T> p;

    p.move(q, blockIdx.x, along);
    p.load(q, x);
    const int format = format_within<FAMILY>(q.format);
    const float largest = narrow_float(largest_of_tile(p));
    const struct scale s = scale_make(format, CODE == E5M2, largest, 0);

    if (threadIdx.x == 0) scale_store(format, &s, scales, p.row / TILE * along + p.column / TILE);
    if (threadIdx.x == 0 && codes_t) scale_store(format, &s, scales_t, p.column / TILE * down + p.row / TILE);
    if (IS_DIVIDED<FAMILY> && sizeof(T) == 2) {
        const known_divisor by(s.encode);

        if (by.serves(largest)) return store_square<CODE>(q, p, by, codes, codes_t, &shared);
    }
    store_square<CODE>(q, p, scaling_of<FAMILY>{s.encode}, codes, codes_t, &shared);
}

/* Scales of a tile in blocks of BLOCK, of its rows and of its columns. Those of one byte are gathered, so that all
 * that a row or a column has of them goes at once. */
template <int FAMILY, int BLOCK>
struct tile_scales {
    static constexpr int ALONG = TILE / BLOCK;
    static constexpr bool GATHERED = FAMILY == MXFP8 && ALONG == 4;
    alignas(4) uint8_t code[GATHERED ? 2 : 1][GATHERED ? TILE : 1][ALONG];

    /* Of block `block` of line `line` of the tile's rows (side 0) or columns; from: of the first line's first block. */
    __device__ __forceinline__ void put(int format, const struct scale &s, int side, int line, int block,
                                        int64_t lines, int64_t blocks, int64_t across, int64_t from, void *scales)
    {
        if (GATHERED)
            code[side][line][block] = s.code;
        else if (line < lines && block < blocks)
            scale_store(format, &s, scales, from + (uint32_t)line * (uint32_t)across + block);
    }
    /* After a barrier: a thread a line. */
    __device__ __forceinline__ void store(int side, int line, int64_t lines, int64_t blocks, int64_t across,
                                          int64_t from, uint8_t *scales) const
    {
        uint8_t *to = scales + from + (uint32_t)line * (uint32_t)across;

        if (!GATHERED || line >= lines) return;
        if (((uintptr_t)scales | across) % 4 == 0)
            *(uint32_t *)to = *(const uint32_t *)code[side][line];
        else
#pragma unroll 1
            for (int i = 0; i < ALONG && i < blocks; i++) to[i] = code[side][line][i];
    }
};

/* Scales of the tile's rows in blocks of BLOCK columns, and its codes. */
template <class T, int BLOCK, int FAMILY, code CODE>
__device__ __forceinline__ void store_rows(const quantised &q, const patch<T> &p, tile_scales<FAMILY, BLOCK> *gathered,
                                           uint8_t *codes, void *scales)
{
    const int format = format_within<FAMILY>(q.format);
    const int64_t across = (q.width + BLOCK - 1) / BLOCK, first = p.column / BLOCK;
    uint32_t most[RUN];
    float by[RUN];

#pragma unroll
    for (int i = 0; i < RUN; i++) most[i] = largest_of(p.at[i]);
    agree<BLOCK / RUN>(format, CODE == E5M2, 0, most, by, [&](int i, const struct scale &s) {
        gathered->put(format, s, 0, p.top + i, p.left / BLOCK, q.rows - p.row, across - first, across,
                      p.row * across + first, scales);
    });
#pragma unroll
    for (int i = 0; i < RUN; i++) store_row<CODE>(q, p, i, scaling_of<FAMILY>{by[i]}, codes);
}

/* Scales of the tile's columns in blocks of BLOCK rows; `by` gets those that encode the thread's own columns. */
template <class T, int BLOCK, int FAMILY, code CODE>
__device__ __forceinline__ void scale_columns(const quantised &q, const patch<T> &p,
                                              tile_scales<FAMILY, BLOCK> *gathered, void *scales_t,
                                              scaling_of<FAMILY> (&by)[RUN])
{
    constexpr int DOWN = TILE / BLOCK, PART_ROWS = TILE / WARPS;
    __shared__ magnitudes<T> part[WARPS][TILE / RUN];
    __shared__ several<float, RUN> encode[DOWN][TILE / RUN];
    const int format = format_within<FAMILY>(q.format);
    const int64_t across = (q.rows + BLOCK - 1) / BLOCK, first = p.row / BLOCK;
    magnitudes<T> m;

#pragma unroll
    for (int i = 0; i < RUN; i++) m.take(p.at[i]);
    m.take_from(TILE / RUN); /* the other half of the warp has the next rows */
    if (threadIdx.x % 32 < TILE / RUN) part[threadIdx.x / 32][p.left / RUN] = m;
    __syncthreads();
    for (int e = threadIdx.x; e < DOWN * TILE; e += THREADS) {
        const int block = e / TILE, column = e % TILE;
        uint32_t most = 0;

#pragma unroll
        for (int w = 0; w < BLOCK / PART_ROWS; w++)
            most = max(most, part[block * (BLOCK / PART_ROWS) + w][column / RUN].at(column % RUN));
        const struct scale s = scale_make(format, CODE == E5M2, narrow_float(most), 0);
        encode[block][column / RUN].at[column % RUN] = s.encode;
        gathered->put(format, s, 1, column, block, q.width - p.column, across - first, across,
                      p.column * across + first, scales_t);
    }
    __syncthreads();
    const several<float, RUN> own = encode[p.top / BLOCK][p.left / RUN];
#pragma unroll
    for (int j = 0; j < RUN; j++) by[j] = {own.at[j]};
}

/* After a barrier: the scales that were gathered. */
template <class T, int BLOCK, int FAMILY>
__device__ __forceinline__ void store_scales(const quantised &q, const patch<T> &p,
                                             const tile_scales<FAMILY, BLOCK> &gathered, void *scales, void *scales_t)
{
    const int side = threadIdx.x / TILE, line = threadIdx.x % TILE;
    const int64_t lines = side ? q.width - p.column : q.rows - p.row, row = p.row / BLOCK, column = p.column / BLOCK;
    const int64_t across = ((side ? q.rows : q.width) + BLOCK - 1) / BLOCK, first = side ? row : column;

    if (!side || scales_t)
        gathered.store(side, line, lines, across - first, across, (side ? p.column : p.row) * across + first,
                       (uint8_t *)(side ? scales_t : scales));
}

template <class T, int BLOCK>
constexpr int BOTH_RESIDENT = BLOCK == TILE ? RESIDENT<T> : 2; /* more scales at a time, more registers */

template <class T, int BLOCK, int FAMILY, code CODE>
__global__ __launch_bounds__(THREADS, BOTH_RESIDENT<T, BLOCK>) void both_kernel(const quantised q, uint32_t along,
                                                                                const T *x, uint8_t *codes,
                                                                                void *scales, uint8_t *codes_t,
                                                                                void *scales_t)
{
    __shared__ turned shared;
    __shared__ tile_scales<FAMILY, BLOCK> gathered;
    patch<T> p;
    scaling_of<FAMILY> by[RUN];

    p.move(q, blockIdx.x, along);
    p.load(q, x);
    store_rows<T, BLOCK, FAMILY, CODE>(q, p, &gathered, codes, scales);
    if (!codes_t) {
        __syncthreads();
        return store_scales(q, p, gathered, scales, scales_t);
    }
    scale_columns<T, BLOCK, FAMILY, CODE>(q, p, &gathered, scales_t, by);
    store_scales(q, p, gathered, scales, scales_t);
    put_columns<CODE>(p, by, &shared);
    __syncthreads();
    store_turned(q, p, shared, codes_t);
}

} /* namespace */

bool quantise_tiles(cuda_device *d, const quantised &q, const void *x, void *codes, void *scales, void *codes_t,
                    void *scales_t)
{
    const bool square = q.block_rows == TILE && q.block_columns == TILE;
    const bool rows = q.block_rows == 1 && (q.block_columns == TILE || q.block_columns == 32) &&
                      (codes_t || q.width % q.block_columns);
    const int64_t along = divided(q.width, TILE), down = divided(q.rows, TILE);

    if (format_is_packed(q.format) || !(square || rows)) return false;
    if (q.width >> 24 || q.rows >> 24) return false; /* within a tile, 32 bits count */
    if (q.width % RUN || (codes_t && q.rows % 16) || !aligned16(x) || !aligned16(codes) || !aligned16(codes_t))
        return false;
    with_type(q.type, [&](auto element) {
        with_code(q, [&](auto family, auto code) {
            using T = decltype(element);
            constexpr auto CODE = decltype(code)::value == E5M2 ? E5M2 : E4M3;
            constexpr int FAMILY = decltype(family)::value >= NVFP4 ? MXFP8 : decltype(family)::value;
            const auto tiles = (uint32_t)(along * down);

            if (square) {
                square_kernel<T, FAMILY, CODE><<<tiles, THREADS, 0, d->stream>>>(q, (uint32_t)along, (uint32_t)down,
                                                                                 (const T *)x, (uint8_t *)codes, scales,
                                                                                 (uint8_t *)codes_t, scales_t);
                return;
            }
            auto kernel = q.block_columns == 32 ? both_kernel<T, 32, FAMILY, CODE> : both_kernel<T, TILE, FAMILY, CODE>;
            kernel<<<tiles, THREADS, 0, d->stream>>>(q, (uint32_t)along, (const T *)x, (uint8_t *)codes, scales,
                                                     (uint8_t *)codes_t, scales_t);
        });
    });
    return true;
}

} /* namespace quantising */
