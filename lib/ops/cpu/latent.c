/* The latent of keys and values from its product in fp32: RMSNorm of the first columns, rotation of the others, in one
 * go, so that nothing between the product and what the attention reads is rounded; and back (model.md 2.2).
 *
 * The gain's gradient is a sum over rows: blocks of rows sum for themselves into the workspace, then the blocks are
 * added in order. How many blocks there are depends on the number of rows alone. */
#include <math.h>

#include "ops/count.h"
#include "ops/cpu/cpu.h"
#include "ops/cpu/row.h"

enum { BLOCKS = 64, BLOCK_ROWS = 16 };

static int64_t block_count(int64_t rows)
{
    return least(BLOCKS, (rows + BLOCK_ROWS - 1) / BLOCK_ROWS);
}

static int64_t columns_of(const struct latent *l)
{
    return l->rank + 2 * (int64_t)l->half;
}

static int team_of(const struct stream *s, const struct latent *l)
{
    return cpu_team(s, (double)l->rows * (double)columns_of(l));
}

/* The rotary columns of a row, which begin at `at` in y; sign -1 rotates back. */
static void rotate(const struct latent *l, const float *table, float sign, const float *x, void *y, int64_t at)
{
    float out[CHUNK];

    for (int64_t j = 0; j < 2 * l->half; j += CHUNK) {
        int64_t count = least(CHUNK, 2 * l->half - j);

        for (int64_t i = 0; i < count; i += 2) {
            float cosine = table[j + i], sine = sign * table[j + i + 1];

            out[i] = x[j + i] * cosine - x[j + i + 1] * sine;
            out[i + 1] = x[j + i + 1] * cosine + x[j + i] * sine;
        }
        write_floats(l->type, y, at + j, count, out);
    }
}

void cpu_latent_forward(struct stream *s, const struct latent *l, const float *table, const float *x, const void *gain,
                        void *y, float *rstd)
{
    struct counted call = count_latent_forward(s, l);

#pragma omp parallel for schedule(static) num_threads(team_of(s, l))
    for (int64_t row = 0; row < l->rows; row++) {
        const float *in = x + row * columns_of(l);
        float gain_chunk[CHUNK], out[CHUNK];

        rstd[row] = 1.0f / sqrtf(dot(in, in, l->rank) / (float)l->rank + l->epsilon);
        for (int64_t j = 0; j < l->rank; j += CHUNK) {
            int64_t count = least(CHUNK, l->rank - j);
            const float *factor = load(l->type, gain, j, count, gain_chunk);

            for (int64_t i = 0; i < count; i++) out[i] = in[j + i] * rstd[row] * factor[i];
            write_floats(l->type, y, row * columns_of(l) + j, count, out);
        }
        rotate(l, table + row * 2 * l->half, 1, in + l->rank, y, row * columns_of(l) + l->rank);
    }
    count_end(call);
}

size_t cpu_latent_backward_bytes(struct stream *s, const struct latent *l)
{
    (void)s;
    return (size_t)block_count(l->rows) * (size_t)l->rank * sizeof(float);
}

/* With g = gain * dy: dx = rstd (g - x rstd^2 mean(g x)). dgain is the block's own. */
static void backward_norm(const struct latent *l, const float *x, const void *gain, float rstd, const float *dy,
                          void *dx, int64_t at, float *dgain)
{
    float gain_chunk[CHUNK], out[CHUNK], mean = 0;

    for (int64_t j = 0; j < l->rank; j += CHUNK) {
        int64_t count = least(CHUNK, l->rank - j);
        const float *factor = load(l->type, gain, j, count, gain_chunk);

        for (int64_t i = 0; i < count; i++) {
            out[i] = factor[i] * dy[j + i];
            dgain[j + i] += dy[j + i] * x[j + i] * rstd;
        }
        mean += dot(out, x + j, count);
    }
    mean *= rstd * rstd / (float)l->rank;
    for (int64_t j = 0; j < l->rank; j += CHUNK) {
        int64_t count = least(CHUNK, l->rank - j);
        const float *factor = load(l->type, gain, j, count, gain_chunk);

        for (int64_t i = 0; i < count; i++) out[i] = rstd * (factor[i] * dy[j + i] - x[j + i] * mean);
        write_floats(l->type, dx, at + j, count, out);
    }
}

void cpu_latent_backward(struct stream *s, const struct latent *l, const float *table, const float *x,
                         const void *gain, const float *rstd, const float *dy, void *dx, float *dgain, void *workspace)
{
    struct counted call = count_latent_backward(s, l);
    int64_t blocks = block_count(l->rows), columns = columns_of(l);

#pragma omp parallel for schedule(dynamic, 1) num_threads(team_of(s, l))
    for (int64_t block = 0; block < blocks; block++) {
        float *partial = (float *)workspace + block * l->rank;

        memset(partial, 0, (size_t)l->rank * sizeof *partial);
        for (int64_t row = l->rows * block / blocks; row < l->rows * (block + 1) / blocks; row++) {
            int64_t at = row * columns;

            backward_norm(l, x + at, gain, rstd[row], dy + at, dx, at, partial);
            rotate(l, table + row * 2 * l->half, -1, dy + at + l->rank, dx, at + l->rank);
        }
    }
    for (int64_t block = 0; dgain && block < blocks; block++)
        for (int64_t j = 0; j < l->rank; j++) dgain[j] += ((const float *)workspace)[block * l->rank + j];
    count_end(call);
}
