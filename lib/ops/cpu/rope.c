/* Rotary position: the table of cosines and sines, and the rotation of interleaved pairs (model.md 2, "RoPE
 * tables"). */
#include <math.h>

#include "ops/count.h"
#include "ops/cpu/cpu.h"
#include "ops/cpu/parts.h"
#include "ops/cpu/row.h"

enum { ANGLE_WORK = 32 }; /* a cosine and a sine cost about so many multiplications */

void cpu_rope_table(struct stream *s, int64_t rows, int32_t half, const int32_t *position,
                    const float *inverse_frequency, float *table)
{
    struct counted call = count_rope_table(s, rows, half);

#pragma omp parallel for schedule(static) num_threads(cpu_team(s, (double)rows * half * ANGLE_WORK))
    for (int64_t row = 0; row < rows; row++)
        for (int32_t j = 0; j < half; j++) {
            float angle = (float)position[row] * inverse_frequency[j];

            table[(row * half + j) * 2] = cosf(angle);
            table[(row * half + j) * 2 + 1] = sinf(angle);
        }
    count_end(call);
}

/* One head of one row; a chunk of pairs at a time, read whole before it is written. */
void rope_head(const struct rope *r, glm52_dtype in, const float *table, const void *x, int64_t x_at, void *y,
               int64_t y_at)
{
    float x_chunk[CHUNK], out[CHUNK], sign = r->inverse ? -1.0f : 1.0f;

    for (int64_t j = 0; j < 2 * r->half; j += CHUNK) {
        int64_t count = least(CHUNK, 2 * r->half - j);
        const float *from = load(in, x, x_at + j, count, x_chunk);

        for (int64_t i = 0; i < count; i += 2) {
            float cosine = table[j + i], sine = sign * table[j + i + 1];

            out[i] = from[i] * cosine - from[i + 1] * sine;
            out[i + 1] = from[i + 1] * cosine + from[i] * sine;
        }
        store(r->type, y, y_at + j, count, out, r->add);
    }
}

void cpu_rope(struct stream *s, const struct rope *r, const float *table, const void *x, void *y)
{
    struct counted call = count_rope(s, r);

#pragma omp parallel for schedule(static) num_threads(cpu_team(s, (double)r->rows * r->heads * r->half * 4))
    for (int64_t row = 0; row < r->rows; row++)
        for (int64_t head = 0; head < r->heads; head++)
            rope_head(r, r->type, table + row * r->half * 2, x, row * r->x_row + head * r->x_head, y,
                      row * r->y_row + head * r->y_head);
    count_end(call);
}

void cpu_spread_heads(struct stream *s, const struct spread *r, const void *x, void *y)
{
    struct counted call = count_spread_heads(s, r);
    size_t size = dtype_size(r->type), bytes = (size_t)r->width * size;

#pragma omp parallel for schedule(static) num_threads(cpu_team(s, (double)r->rows * (double)r->width * r->heads))
    for (int64_t t = 0; t < r->rows; t++)
        for (int32_t h = 0; h < r->heads; h++)
            memcpy((char *)y + (size_t)(t * r->y_row + h * r->y_head) * size,
                   (const char *)x + (size_t)(t * r->x_row) * size, bytes);
    count_end(call);
}

void cpu_sum_heads(struct stream *s, const struct spread *r, const void *y, float *x)
{
    struct counted call = count_sum_heads(s, r);

#pragma omp parallel for schedule(static) num_threads(cpu_team(s, (double)r->rows * (double)r->width * r->heads))
    for (int64_t t = 0; t < r->rows; t++)
        for (int64_t j = 0; j < r->width; j += CHUNK) {
            int64_t count = least(CHUNK, r->width - j);
            float chunk[CHUNK], *to = x + t * r->x_row + j;

            memset(to, 0, (size_t)count * sizeof *to);
            for (int32_t h = 0; h < r->heads; h++)
                store(GLM52_DTYPE_F32, to, 0, count, load(r->type, y, t * r->y_row + h * r->y_head + j, count, chunk),
                      1);
        }
    count_end(call);
}
