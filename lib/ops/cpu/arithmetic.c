/* Elementwise sums, conversions, and sums in fp64 whose order depends on the count alone. */
#include "ops/count.h"
#include "ops/cpu/cpu.h"
#include "ops/cpu/row.h"

enum { SUM_BLOCK = 1 << 16, SUM_LANES = 16 };

void cpu_add(struct stream *s, int64_t count, glm52_dtype type, const void *x, void *y)
{
    struct counted call = count_add(s, count, type);

    if (type == GLM52_DTYPE_F64) { /* sums: few, never worth threads */
        for (int64_t i = 0; i < count; i++) ((double *)y)[i] += ((const double *)x)[i];
        count_end(call);
        return;
    }
#pragma omp parallel for schedule(static) num_threads(cpu_team(s, (double)count))
    for (int64_t i = 0; i < count; i += CHUNK) {
        float chunk[CHUNK];
        int64_t n = least(CHUNK, count - i);

        store(type, y, i, n, load(type, x, i, n, chunk), 1);
    }
    count_end(call);
}

void cpu_multiply(struct stream *s, int64_t count, const float *x, float *y)
{
    struct counted call = count_multiply(s, count);

#pragma omp parallel for schedule(static) num_threads(cpu_team(s, (double)count))
    for (int64_t i = 0; i < count; i++) y[i] *= x[i];
    count_end(call);
}

void cpu_convert(struct stream *s, int64_t count, glm52_dtype from, const void *x, glm52_dtype to, void *y)
{
    struct counted call = count_convert(s, count, from, to);

#pragma omp parallel for schedule(static) num_threads(cpu_team(s, (double)count))
    for (int64_t i = 0; i < count; i += CHUNK) {
        float chunk[CHUNK];
        int64_t n = least(CHUNK, count - i);

        store(to, y, i, n, load(from, x, i, n, chunk), 0);
    }
    count_end(call);
}

static int64_t sum_blocks(int64_t count)
{
    return (count + SUM_BLOCK - 1) / SUM_BLOCK;
}

size_t cpu_sum_bytes(struct stream *s, int64_t count)
{
    (void)s;
    return (size_t)sum_blocks(count) * sizeof(double);
}

/* sum x[i] y[i], y NULL: sum x[i] */
static double block_sum(const float *x, const float *y, int64_t count)
{
    double lane[SUM_LANES] = {0};
    int64_t i = 0;

    if (y)
        for (; i + SUM_LANES <= count; i += SUM_LANES)
            for (int l = 0; l < SUM_LANES; l++) lane[l] += (double)x[i + l] * (double)y[i + l];
    else
        for (; i + SUM_LANES <= count; i += SUM_LANES)
            for (int l = 0; l < SUM_LANES; l++) lane[l] += (double)x[i + l];
    for (int l = 0; i + l < count; l++) lane[l] += (double)x[i + l] * (y ? (double)y[i + l] : 1.0);
    for (int width = SUM_LANES / 2; width > 0; width /= 2)
        for (int l = 0; l < width; l++) lane[l] += lane[l + width];
    return lane[0];
}

/* The sum of squares of elements at .. at + count; narrow ones are widened a chunk at a time. */
static double block_squares(glm52_dtype type, const void *x, int64_t at, int64_t count)
{
    const float *whole = x;
    float chunk[CHUNK];
    double sum = 0;

    if (type == GLM52_DTYPE_F32) return block_sum(whole + at, whole + at, count);
    for (int64_t i = 0; i < count; i += CHUNK) {
        int64_t n = least(CHUNK, count - i);

        read_floats(type, x, at + i, n, chunk);
        sum += block_sum(chunk, chunk, n);
    }
    return sum;
}

static void add_blocks(int64_t count, const double *partial, double *out)
{
    double sum = 0;

    for (int64_t block = 0; block < sum_blocks(count); block++) sum += partial[block];
    *out += sum;
}

void cpu_sum(struct stream *s, int64_t count, const float *x, const float *w, double *out, void *workspace)
{
    struct counted call = count_sum(s, count, w != NULL);
    double *partial = workspace;

#pragma omp parallel for schedule(static) num_threads(cpu_team(s, (double)count))
    for (int64_t at = 0; at < count; at += SUM_BLOCK)
        partial[at / SUM_BLOCK] = block_sum(x + at, w ? w + at : NULL, least(SUM_BLOCK, count - at));
    add_blocks(count, partial, out);
    count_end(call);
}

void cpu_sum_squares(struct stream *s, int64_t count, glm52_dtype type, const void *x, double *out, void *workspace)
{
    struct counted call = count_sum_squares(s, count, type);
    double *partial = workspace;

#pragma omp parallel for schedule(static) num_threads(cpu_team(s, (double)count))
    for (int64_t at = 0; at < count; at += SUM_BLOCK)
        partial[at / SUM_BLOCK] = block_squares(type, x, at, least(SUM_BLOCK, count - at));
    add_blocks(count, partial, out);
    count_end(call);
}
