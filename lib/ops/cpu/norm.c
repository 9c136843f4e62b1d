/* RMSNorm and LayerNorm with their backward (model.md 2, 2.3). Statistics are fp32 whatever the rows are.
 *
 * Gradients of gain and bias are sums over rows: blocks of rows sum for themselves into the workspace, then the blocks
 * are added in order. How many blocks there are depends on the number of rows alone. */
#include <math.h>

#include "ops/count.h"
#include "ops/cpu/cpu.h"
#include "ops/cpu/parts.h"
#include "ops/cpu/row.h"

enum { BLOCKS = 64, BLOCK_ROWS = 16, SLICE = 256 };

int64_t norm_blocks(int64_t rows)
{
    return least(BLOCKS, (rows + BLOCK_ROWS - 1) / BLOCK_ROWS);
}

static int team_of(const struct stream *s, const struct norm *n)
{
    return cpu_team(s, (double)n->rows * (double)n->width);
}

size_t cpu_norm_backward_bytes(struct stream *s, const struct norm *n)
{
    (void)s;
    return (size_t)norm_blocks(n->rows) * 2 * (size_t)n->width * sizeof(float);
}

/* dgain[j] += sum over blocks of partial[block][0][j]; dbias likewise with [1], if wanted. */
void norm_add_blocks(struct stream *s, const struct norm *n, const float *partial, float *dgain, float *dbias)
{
    int64_t blocks = norm_blocks(n->rows), width = n->width;

#pragma omp parallel for schedule(static) num_threads(cpu_team(s, (double)(blocks * width)))
    for (int64_t first = 0; first < width; first += SLICE)
        for (int which = 0; which < (dbias ? 2 : 1); which++) {
            int64_t count = least(SLICE, width - first);
            float sum[SLICE] = {0}, *to = (which ? dbias : dgain) + first;

            for (int64_t block = 0; block < blocks; block++) {
                const float *from = partial + (2 * block + which) * width + first;

                for (int64_t j = 0; j < count; j++) sum[j] += from[j];
            }
            for (int64_t j = 0; j < count; j++) to[j] += sum[j];
        }
}

/* ---- RMSNorm ---- */

float rmsnorm_row(const struct norm *n, glm52_dtype in, const void *x, const void *gain, void *y, int64_t row)
{
    float x_chunk[CHUNK], gain_chunk[CHUNK], out[CHUNK], squares = 0, rstd;

    for (int64_t j = 0; j < n->width; j += CHUNK) {
        int64_t count = least(CHUNK, n->width - j);
        const float *from = load(in, x, row * n->x_stride + j, count, x_chunk);

        squares += dot(from, from, count);
    }
    rstd = 1.0f / sqrtf(squares / (float)n->width + n->epsilon);
    for (int64_t j = 0; j < n->width; j += CHUNK) {
        int64_t count = least(CHUNK, n->width - j);
        const float *from = load(in, x, row * n->x_stride + j, count, x_chunk);
        const float *factor = load(n->type, gain, j, count, gain_chunk);

        for (int64_t i = 0; i < count; i++) out[i] = from[i] * rstd * factor[i];
        store(n->type, y, row * n->y_stride + j, count, out, n->add);
    }
    return rstd;
}

void cpu_rmsnorm_forward(struct stream *s, const struct norm *n, const void *x, const void *gain, void *y, float *rstd)
{
    struct counted call = count_rmsnorm_forward(s, n);

#pragma omp parallel for schedule(static) num_threads(team_of(s, n))
    for (int64_t row = 0; row < n->rows; row++) rstd[row] = rmsnorm_row(n, n->type, x, gain, y, row);
    count_end(call);
}

/* With g = gain * dy: dx = rstd (g - x rstd^2 mean(g x)). dgain is the block's own. */
void rmsnorm_backward_row(const struct norm *n, glm52_dtype in, const void *x, const void *gain, float rstd,
                          const void *dy, void *dx, float *dgain, int64_t row)
{
    float x_chunk[CHUNK], gain_chunk[CHUNK], dy_chunk[CHUNK], out[CHUNK], mean = 0;

    for (int64_t j = 0; j < n->width; j += CHUNK) {
        int64_t count = least(CHUNK, n->width - j);
        const float *from = load(in, x, row * n->x_stride + j, count, x_chunk);
        const float *factor = load(n->type, gain, j, count, gain_chunk);
        const float *up = load(in, dy, row * n->y_stride + j, count, dy_chunk);

        for (int64_t i = 0; i < count; i++) {
            out[i] = factor[i] * up[i];
            dgain[j + i] += up[i] * from[i] * rstd;
        }
        mean += dot(out, from, count);
    }
    mean *= rstd * rstd / (float)n->width;
    for (int64_t j = 0; j < n->width; j += CHUNK) {
        int64_t count = least(CHUNK, n->width - j);
        const float *from = load(in, x, row * n->x_stride + j, count, x_chunk);
        const float *factor = load(n->type, gain, j, count, gain_chunk);
        const float *up = load(in, dy, row * n->y_stride + j, count, dy_chunk);

        for (int64_t i = 0; i < count; i++) out[i] = rstd * (factor[i] * up[i] - from[i] * mean);
        store(n->type, dx, row * n->x_stride + j, count, out, n->add);
    }
}

void cpu_rmsnorm_backward(struct stream *s, const struct norm *n, const void *x, const void *gain, const float *rstd,
                          const void *dy, void *dx, float *dgain, void *workspace)
{
    struct counted call = count_rmsnorm_backward(s, n);
    int64_t blocks = norm_blocks(n->rows);

#pragma omp parallel for schedule(dynamic, 1) num_threads(team_of(s, n))
    for (int64_t block = 0; block < blocks; block++) {
        float *partial = (float *)workspace + 2 * block * n->width;

        memset(partial, 0, (size_t)n->width * sizeof *partial);
        for (int64_t row = n->rows * block / blocks; row < n->rows * (block + 1) / blocks; row++)
            rmsnorm_backward_row(n, n->type, x, gain, rstd[row], dy, dx, partial, row);
    }
    if (dgain) norm_add_blocks(s, n, workspace, dgain, NULL);
    count_end(call);
}

/* ---- LayerNorm ---- */

/* statistics[0] = mean, [1] = rstd; the variance is that of the differences from the mean. */
static void layernorm_statistics(const struct norm *n, const void *x, int64_t row, float *statistics)
{
    float x_chunk[CHUNK], apart[CHUNK], mean = 0, squares = 0;

    for (int64_t j = 0; j < n->width; j += CHUNK) {
        int64_t count = least(CHUNK, n->width - j);

        mean += total(load(n->type, x, row * n->x_stride + j, count, x_chunk), count);
    }
    mean /= (float)n->width;
    for (int64_t j = 0; j < n->width; j += CHUNK) {
        int64_t count = least(CHUNK, n->width - j);
        const float *in = load(n->type, x, row * n->x_stride + j, count, x_chunk);

        for (int64_t i = 0; i < count; i++) apart[i] = in[i] - mean;
        squares += dot(apart, apart, count);
    }
    statistics[0] = mean;
    statistics[1] = 1.0f / sqrtf(squares / (float)n->width + n->epsilon);
}

void cpu_layernorm_forward(struct stream *s, const struct norm *n, const void *x, const void *gain, const void *bias,
                           void *y, float *statistics)
{
    struct counted call = count_layernorm_forward(s, n);

#pragma omp parallel for schedule(static) num_threads(team_of(s, n))
    for (int64_t row = 0; row < n->rows; row++) {
        float x_chunk[CHUNK], gain_chunk[CHUNK], bias_chunk[CHUNK], out[CHUNK], mean, rstd;

        layernorm_statistics(n, x, row, statistics + 2 * row);
        mean = statistics[2 * row];
        rstd = statistics[2 * row + 1];
        for (int64_t j = 0; j < n->width; j += CHUNK) {
            int64_t count = least(CHUNK, n->width - j);
            const float *in = load(n->type, x, row * n->x_stride + j, count, x_chunk);
            const float *factor = load(n->type, gain, j, count, gain_chunk);
            const float *shift = load(n->type, bias, j, count, bias_chunk);

            for (int64_t i = 0; i < count; i++) out[i] = (in[i] - mean) * rstd * factor[i] + shift[i];
            store(n->type, y, row * n->y_stride + j, count, out, n->add);
        }
    }
    count_end(call);
}

/* With g = gain * dy and h = (x - mean) rstd: dx = rstd (g - mean(g) - h mean(g h)). dgain, dbias are the block's
 * own. */
static void layernorm_backward_row(const struct norm *n, const void *x, const void *gain, const float *statistics,
                                   const void *dy, void *dx, float *dgain, float *dbias, int64_t row)
{
    float x_chunk[CHUNK], gain_chunk[CHUNK], dy_chunk[CHUNK], normed[CHUNK], out[CHUNK];
    float mean = statistics[2 * row], rstd = statistics[2 * row + 1], mean_g = 0, mean_gh = 0;

    for (int64_t j = 0; j < n->width; j += CHUNK) {
        int64_t count = least(CHUNK, n->width - j);
        const float *in = load(n->type, x, row * n->x_stride + j, count, x_chunk);
        const float *factor = load(n->type, gain, j, count, gain_chunk);
        const float *up = load(n->type, dy, row * n->y_stride + j, count, dy_chunk);

        for (int64_t i = 0; i < count; i++) {
            normed[i] = (in[i] - mean) * rstd;
            out[i] = factor[i] * up[i];
            dgain[j + i] += up[i] * normed[i];
            dbias[j + i] += up[i];
        }
        mean_g += total(out, count);
        mean_gh += dot(out, normed, count);
    }
    mean_g /= (float)n->width;
    mean_gh /= (float)n->width;
    for (int64_t j = 0; j < n->width; j += CHUNK) {
        int64_t count = least(CHUNK, n->width - j);
        const float *in = load(n->type, x, row * n->x_stride + j, count, x_chunk);
        const float *factor = load(n->type, gain, j, count, gain_chunk);
        const float *up = load(n->type, dy, row * n->y_stride + j, count, dy_chunk);

        for (int64_t i = 0; i < count; i++)
            out[i] = rstd * (factor[i] * up[i] - mean_g - (in[i] - mean) * rstd * mean_gh);
        store(n->type, dx, row * n->x_stride + j, count, out, n->add);
    }
}

void cpu_layernorm_backward(struct stream *s, const struct norm *n, const void *x, const void *gain,
                            const float *statistics, const void *dy, void *dx, float *dgain, float *dbias,
                            void *workspace)
{
    struct counted call = count_layernorm_backward(s, n);
    int64_t blocks = norm_blocks(n->rows);

#pragma omp parallel for schedule(dynamic, 1) num_threads(team_of(s, n))
    for (int64_t block = 0; block < blocks; block++) {
        float *partial = (float *)workspace + 2 * block * n->width;

        memset(partial, 0, 2 * (size_t)n->width * sizeof *partial);
        for (int64_t row = n->rows * block / blocks; row < n->rows * (block + 1) / blocks; row++)
            layernorm_backward_row(n, x, gain, statistics, dy, dx, partial, partial + n->width, row);
    }
    norm_add_blocks(s, n, workspace, dgain, dbias);
    count_end(call);
}
