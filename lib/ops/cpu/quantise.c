/* Narrow floats with a scale for each block; ops/scale.h has the rules. */
#include "ops/count.h"
#include "ops/cpu/cpu.h"
#include "ops/cpu/row.h"
#include "ops/scale.h"

/* Blocks of x, and where codes and scales of x or of x^T go: strides of either for a step down and a step along x. */
struct blocks {
    int64_t rows, columns;           /* of a block of x */
    int64_t down, along;             /* of codes, in elements */
    int64_t scale_down, scale_along; /* of scales */
    uint8_t *codes;
    void *scales;
};

static int64_t divided(int64_t count, int64_t by)
{
    return (count + by - 1) / by;
}

/* The largest magnitude, NaN if there is one: as whole numbers, bits of magnitudes have their order. */
static float block_largest(const struct quantised *q, const void *x, int64_t at, int64_t rows, int64_t columns)
{
    float chunk[CHUNK];
    uint32_t most = 0;

    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j += CHUNK) {
            int64_t n = least(CHUNK, columns - j);
            const float *part = load(q->type, x, at + i * q->width + j, n, chunk);

            for (int64_t k = 0; k < n; k++) {
                uint32_t magnitude = narrow_bits(part[k]) & 0x7fffffffu;

                most = magnitude > most ? magnitude : most;
            }
        }
    return narrow_float(most);
}

/* Codes of count <= CHUNK neighbours in a row of x. */
static void encode(const struct quantised *q, float by, const float *x, int64_t count, uint8_t *codes, int64_t along)
{
    uint8_t code[CHUNK];
    float scaled[CHUNK];

    if (format_is_packed(q->format)) {
        for (int64_t k = 0; k < count; k += 2)
            codes[k / 2] = (uint8_t)(code_of(q->format, 0, by, x[k]) | code_of(q->format, 0, by, x[k + 1]) << 4);
        return;
    }
    if (format_divides(q->format))
        for (int64_t k = 0; k < count; k++) scaled[k] = x[k] / by;
    else
        for (int64_t k = 0; k < count; k++) scaled[k] = x[k] * by;
    if (q->e5m2)
        for (int64_t k = 0; k < count; k++) code[k] = f32_to_e5m2(scaled[k]);
    else
        for (int64_t k = 0; k < count; k++) code[k] = f32_to_e4m3(scaled[k]);
    for (int64_t k = 0; k < count; k++) codes[k * along] = code[k];
}

static void quantise_block(const struct quantised *q, float global, const void *x, const struct blocks *b, int64_t i,
                           int64_t j)
{
    const int64_t top = i * b->rows, left = j * b->columns;
    const int64_t rows = least(b->rows, q->rows - top), columns = least(b->columns, q->width - left);
    const float amax = block_largest(q, x, top * q->width + left, rows, columns);
    const struct scale s = scale_make(q->format, q->e5m2, amax, global);
    float chunk[CHUNK];

    scale_store(q->format, &s, b->scales, i * b->scale_down + j * b->scale_along);
    for (int64_t row = top; row < top + rows; row++)
        for (int64_t k = left; k < left + columns; k += CHUNK) {
            int64_t n = least(CHUNK, left + columns - k), at = row * b->down + k * b->along;

            encode(q, s.encode, load(q->type, x, row * q->width + k, n, chunk), n,
                   b->codes + (format_is_packed(q->format) ? at / 2 : at), b->along);
        }
}

static void quantise_blocks(struct stream *s, const struct quantised *q, float global, const void *x,
                            const struct blocks *b)
{
    const int64_t down = divided(q->rows, b->rows), along = divided(q->width, b->columns);

#pragma omp parallel for collapse(2) schedule(static) num_threads(cpu_team(s, 4 * (double)q->rows * (double)q->width))
    for (int64_t i = 0; i < down; i++)
        for (int64_t j = 0; j < along; j++) quantise_block(q, global, x, b, i, j);
}

void cpu_quantise(struct stream *s, const struct quantised *q, const float *global, const void *x, void *codes,
                  void *scales, void *codes_t, void *scales_t)
{
    struct counted call = count_quantise(s, q, codes_t != NULL);
    const float of_all = format_is_packed(q->format) ? *global : 0;
    const int64_t r = q->block_rows, c = q->block_columns;
    const struct blocks b = {r, c, q->width, 1, divided(q->width, c), 1, codes, scales};
    const struct blocks t = {c, r, 1, q->rows, 1, divided(q->rows, c), codes_t, scales_t};

    quantise_blocks(s, q, of_all, x, &b);
    if (codes_t) quantise_blocks(s, q, of_all, x, &t);
    count_end(call);
}

void cpu_dequantise(struct stream *s, const struct quantised *q, const float *global, const void *codes,
                    const void *scales, void *y)
{
    struct counted call = count_dequantise(s, q);
    const int packed = format_is_packed(q->format);
    const int64_t along = divided(q->width, q->block_columns), step = least(CHUNK, q->block_columns);

#pragma omp parallel for schedule(static) num_threads(cpu_team(s, 4 * (double)q->rows * (double)q->width))
    for (int64_t row = 0; row < q->rows; row++)
        for (int64_t block = 0; block < along; block++) {
            const float by = scale_load(q->format, scales, row / q->block_rows * along + block, packed ? *global : 0);
            const int64_t end = least(q->width, (block + 1) * q->block_columns);
            float chunk[CHUNK];

            for (int64_t j = block * q->block_columns; j < end; j += step) {
                const int64_t n = least(step, end - j), at = row * q->width + j;

                for (int64_t k = 0; k < n; k++) {
                    const uint8_t byte = ((const uint8_t *)codes)[packed ? (at + k) / 2 : at + k];

                    chunk[k] = by * code_value(q->format, q->e5m2, (uint8_t)(packed && k & 1 ? byte >> 4 : byte));
                }
                store(q->type, y, at, n, chunk, 0);
            }
        }
    count_end(call);
}
