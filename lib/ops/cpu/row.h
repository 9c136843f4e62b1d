/* Rows of any type, a chunk at a time in fp32, and sums over them whose order depends on nothing but their length. */
#ifndef GLM52_OPS_CPU_ROW_H
#define GLM52_OPS_CPU_ROW_H

#include "ops/cpu/vector.h"

enum { CHUNK = 1024 }; /* elements; a few such buffers stay in the first-level cache */

static inline int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* `count` elements from `at` on as fp32: in place if they are, else converted into buffer. */
static inline const float *load(glm52_dtype type, const void *array, int64_t at, int64_t count, float *buffer)
{
    if (type == GLM52_DTYPE_F32) return (const float *)array + at;
    read_floats(type, array, at, count, buffer);
    return buffer;
}

/* Writes count <= CHUNK elements, or adds to them. */
static inline void store(glm52_dtype type, void *array, int64_t at, int64_t count, const float *value, int add)
{
    float sum[CHUNK];

    if (!add) {
        write_floats(type, array, at, count, value);
        return;
    }
    read_floats(type, array, at, count, sum);
    for (int64_t i = 0; i < count; i++) sum[i] += value[i];
    write_floats(type, array, at, count, sum);
}

static inline float lanes_sum(v8 a)
{
    return ((a[0] + a[4]) + (a[1] + a[5])) + ((a[2] + a[6]) + (a[3] + a[7]));
}

/* sum x[i] y[i] */
static inline float dot(const float *x, const float *y, int64_t count)
{
    v8 a = {0}, b = {0}, c = {0}, d = {0};
    int64_t i = 0;
    float rest = 0;

    for (; i + 4 * LANES <= count; i += 4 * LANES) {
        a += V8_CONST(x + i) * V8_CONST(y + i);
        b += V8_CONST(x + i + LANES) * V8_CONST(y + i + LANES);
        c += V8_CONST(x + i + 2 * LANES) * V8_CONST(y + i + 2 * LANES);
        d += V8_CONST(x + i + 3 * LANES) * V8_CONST(y + i + 3 * LANES);
    }
    for (; i + LANES <= count; i += LANES) a += V8_CONST(x + i) * V8_CONST(y + i);
    for (; i < count; i++) rest += x[i] * y[i];
    return lanes_sum((a + b) + (c + d)) + rest;
}

/* sum x[i] */
static inline float total(const float *x, int64_t count)
{
    v8 a = {0}, b = {0};
    int64_t i = 0;
    float rest = 0;

    for (; i + 2 * LANES <= count; i += 2 * LANES) {
        a += V8_CONST(x + i);
        b += V8_CONST(x + i + LANES);
    }
    for (; i < count; i++) rest += x[i];
    return lanes_sum(a + b) + rest;
}

/* The largest of count >= 1 elements. */
static inline float largest(const float *x, int64_t count)
{
    float best[2 * LANES], most;
    int64_t i = 0;

    for (int lane = 0; lane < 2 * LANES; lane++) best[lane] = x[0];
    for (; i + 2 * LANES <= count; i += 2 * LANES)
        for (int lane = 0; lane < 2 * LANES; lane++) best[lane] = x[i + lane] > best[lane] ? x[i + lane] : best[lane];
    most = best[0];
    for (int lane = 1; lane < 2 * LANES; lane++) most = best[lane] > most ? best[lane] : most;
    for (; i < count; i++) most = x[i] > most ? x[i] : most;
    return most;
}

#endif
