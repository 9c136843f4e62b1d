/* Clipping by the global norm, and AdamW with decoupled decay. */
#include <math.h>

#include "ops/count.h"
#include "ops/cpu/cpu.h"
#include "ops/cpu/row.h"

void cpu_clip(struct stream *s, const double *squares, float limit, float *norm, float *coefficient)
{
    struct counted call = count_clip(s);
    double length = sqrt(*squares), share = (double)limit / (length + 1e-6);

    *norm = (float)length;
    *coefficient = !isfinite(*squares) ? -1.0f : limit <= 0 || share > 1 ? 1.0f : (float)share;
    count_end(call);
}

/* W of `count` elements; the other arrays start where W does. Constants are copied first: as far as the compiler knows,
 * a store to W might change the shape. */
static void update(const struct adamw *a, const float *rates, float coefficient, int64_t count,
                   const float *restrict gradient, float *restrict m, float *restrict v, float *restrict w)
{
    float beta1 = a->beta1, beta2 = a->beta2, rest1 = 1.0f - beta1, rest2 = 1.0f - beta2, epsilon = a->epsilon;
    float lr = rates[RATE_LR], correction1 = rates[RATE_CORRECTION1], correction2 = rates[RATE_CORRECTION2];
    float keep = 1.0f - lr * a->decay;

    for (int64_t i = 0; i < count; i++) {
        float g = gradient[i] * coefficient;

        m[i] = beta1 * m[i] + rest1 * g;
        v[i] = beta2 * v[i] + rest2 * (g * g);
        w[i] = w[i] * keep - lr * (m[i] / correction1) / (sqrtf(v[i] / correction2) + epsilon);
    }
}

/* Elements at .. at + count of an array that is read and written: in place if they are fp32, else through buffer. */
static float *open_chunk(glm52_dtype type, void *array, int64_t at, int64_t count, float *buffer)
{
    if (type == GLM52_DTYPE_F32) return (float *)array + at;
    read_floats(type, array, at, count, buffer);
    return buffer;
}

static void close_chunk(glm52_dtype type, void *array, int64_t at, int64_t count, const float *chunk)
{
    if (type != GLM52_DTYPE_F32) write_floats(type, array, at, count, chunk);
}

void cpu_adamw(struct stream *s, const struct adamw *a, const float *rates, const float *coefficient,
               const void *gradient, void *m, void *v, float *master, void *parameter)
{
    struct counted call = count_adamw(s, a, master != NULL);

    int64_t moved = *coefficient < 0 ? 0 : a->count;

#pragma omp parallel for schedule(static) num_threads(cpu_team(s, (double)moved * 4))
    for (int64_t i = 0; i < moved; i += CHUNK) {
        int64_t count = least(CHUNK, moved - i);
        float buffer[4][CHUNK];
        const float *g = load(a->gradient, gradient, i, count, buffer[0]);
        float *mean = open_chunk(a->moments, m, i, count, buffer[1]),
              *square = open_chunk(a->moments, v, i, count, buffer[2]);
        float *w = master ? master + i : open_chunk(a->type, parameter, i, count, buffer[3]);

        update(a, rates, *coefficient, count, g, mean, square, w);
        close_chunk(a->moments, m, i, count, mean);
        close_chunk(a->moments, v, i, count, square);
        if (master)
            write_floats(a->type, parameter, i, count, w);
        else
            close_chunk(a->type, parameter, i, count, w);
    }
    count_end(call);
}
