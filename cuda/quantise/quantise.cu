/* Narrow floats with a scale for each block (ops/ops.h, ops/scale.h), and back. fours.cu, rows.cu and tiles.cu take
 * the blocks that models have; here is what takes all others, a thread block for each. */
#include "quantise/codes.cuh"

namespace {

using namespace quantising;

constexpr int THREADS = 256, BLOCK_THREADS = 128;

/* Blocks of x, and where codes and scales of x or of x^T go: strides of either for a step down and a step along x. */
struct blocks {
    int64_t rows, columns;
    int64_t down, along;
    int64_t scale_down, scale_along;
    uint8_t *codes;
    void *scales;
};

template <class T>
__global__ __launch_bounds__(BLOCK_THREADS) void blocks_kernel(const quantised q, const struct blocks b,
                                                               const float *global, const T *x)
{
    const bool packed = format_is_packed(q.format);
    const int64_t across = (q.width + b.columns - 1) / b.columns, i = blockIdx.x / across, j = blockIdx.x % across;
    const int64_t rows = min(b.rows, q.rows - i * b.rows), columns = min(b.columns, q.width - j * b.columns);
    const int64_t step = packed ? 2 : 1, from = i * b.rows * q.width + j * b.columns;
    uint32_t most = 0;

    for (int64_t k = threadIdx.x; k < rows * columns; k += BLOCK_THREADS)
        most = max(most, narrow_bits(get(x[from + k / columns * q.width + k % columns])) & 0x7fffffffu);
    most = block_largest<BLOCK_THREADS>(most);
    const struct scale s = scale_make(q.format, q.e5m2, narrow_float(most), packed ? *global : 0);
    if (threadIdx.x == 0) scale_store(q.format, &s, b.scales, i * b.scale_down + j * b.scale_along);
    for (int64_t k = threadIdx.x * step; k < rows * columns; k += BLOCK_THREADS * step) {
        const int64_t row = k / columns, column = k % columns;
        const int64_t at = (i * b.rows + row) * b.down + (j * b.columns + column) * b.along;
        const T *element = x + from + row * q.width + column;
        uint32_t code = code_of(q.format, q.e5m2, s.encode, get(*element));

        if (packed) code |= code_of(q.format, q.e5m2, s.encode, get(element[1])) << 4;
        b.codes[packed ? at / 2 : at] = (uint8_t)code;
    }
}

void quantise_blocks(cuda_device *d, const quantised &q, const float *global, const void *x, const struct blocks &b)
{
    const unsigned grid = (unsigned)(divided(q.rows, b.rows) * divided(q.width, b.columns));

    with_type(q.type, [&](auto element) {
        using T = decltype(element);
        blocks_kernel<T><<<grid, BLOCK_THREADS, 0, d->stream>>>(q, b, global, (const T *)x);
    });
}

void quantise(struct stream *s, const struct quantised *q, const float *global, const void *x, void *codes,
              void *scales, void *codes_t, void *scales_t)
{
    const int64_t r = q->block_rows, c = q->block_columns;
    cuda_device *d = device_of(s);

    count_quantise(s, q, codes_t != nullptr);
    if (q->rows == 0 || q->width == 0) return;
    if (!quantise_tiles(d, *q, x, codes, scales, codes_t, scales_t)) {
        if (!quantise_fours(d, *q, global, x, codes, scales) && !quantise_rows(d, *q, global, x, codes, scales))
            quantise_blocks(d, *q, global, x, {r, c, q->width, 1, divided(q->width, c), 1, (uint8_t *)codes, scales});
        if (codes_t)
            quantise_blocks(d, *q, global, x, {c, r, 1, q->rows, 1, divided(q->rows, c), (uint8_t *)codes_t, scales_t});
    }
    launched(d, "quantise");
}

/* ---- back ---- */

/* V = 16: those of one block, and 32 bits count the runs. */
template <class T, code CODE, int V>
__global__ __launch_bounds__(THREADS) void dequantise_kernel(const quantised q, int64_t count, const float *global,
                                                             const uint8_t *codes, const void *scales, T *y)
{
    using index = typename std::conditional<V == 1, int64_t, uint32_t>::type;
    const index run = (index)blockIdx.x * THREADS + threadIdx.x, width = (index)(q.width / V);
    const index row = run / width, column = run % width * V;
    const index across = (index)((q.width + q.block_columns - 1) / q.block_columns);

    if (run >= (index)count) return;
    const int64_t block = (int64_t)(row / (index)q.block_rows) * across + column / (index)q.block_columns;
    const float by = scale_load(q.format, scales, block, CODE == E2M1 ? *global : 0);
    if (V == 1) {
        const uint8_t byte = codes[CODE == E2M1 ? run / 2 : run];

        y[run] = to<T>(by * code_value(q.format, q.e5m2, CODE == E2M1 && run % 2 ? byte >> 4 : byte));
        return;
    }
    constexpr int BITS = CODE == E2M1 ? 8 : 16, WORDS = CODE == E2M1 ? 2 : 4; /* of a pair; of the run */
    const several<uint32_t, WORDS> word = ((const several<uint32_t, WORDS> *)codes)[run];
    float value[V < 16 ? 16 : V];
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
        const float2 pair = decode_pair<CODE>(word.at[i / 2 * BITS / 32] >> i / 2 * BITS % 32);

        value[i] = by * pair.x;
        value[i + 1] = by * pair.y;
    }
    store(y + (int64_t)run * 16, value);
}

void dequantise(struct stream *s, const struct quantised *q, const float *global, const void *codes, const void *scales,
                void *y)
{
    constexpr int V = 16;
    const int64_t count = q->rows * q->width;
    const bool wide = q->width % V == 0 && q->block_columns % V == 0 && count < (int64_t)V << 31 &&
                      q->block_rows < 1 << 30 && q->block_columns < 1 << 30 && aligned16(codes) && aligned16(y);
    cuda_device *d = device_of(s);

    count_dequantise(s, q);
    if (count == 0) return;
    with_type(q->type, [&](auto element) {
        with_code(*q, [&](auto, auto code) {
            using T = decltype(element);
            constexpr auto CODE = decltype(code)::value;
            const int64_t runs = wide ? count / V : count;
            auto kernel = wide ? dequantise_kernel<T, CODE, V> : dequantise_kernel<T, CODE, 1>;

            kernel<<<(unsigned)divided(runs, THREADS), THREADS, 0, d->stream>>>(*q, runs, global,
                                                                                (const uint8_t *)codes, scales, (T *)y);
        });
    });
    launched(d, "dequantise");
}

} /* namespace */

void fill_quantise(struct ops *t)
{
    t->quantise = quantise;
    t->dequantise = dequantise;
}
