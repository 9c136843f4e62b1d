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

void cpu_adamw(struct stream *s, const struct adamw *a, const float *rates, const float *coefficient,
               const float *gradient, float *m, float *v, float *master, void *parameter)
{
    struct counted call = count_adamw(s, a, master != NULL);

    int64_t moved = *coefficient < 0 ? 0 : a->count;

#pragma omp parallel for schedule(static) num_threads(cpu_team(s, (double)moved * 4))
    for (int64_t i = 0; i < moved; i += CHUNK) {
        float *w = master ? master + i : (float *)parameter + i;
        int64_t count = least(CHUNK, moved - i);

        update(a, rates, *coefficient, count, gradient + i, m + i, v + i, w);
        if (master) store(a->type, parameter, i, count, w, 0);
    }
    count_end(call);
}
