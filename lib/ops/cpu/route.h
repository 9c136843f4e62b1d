/* What the router and its balance share. */
#ifndef GLM52_OPS_CPU_ROUTE_H
#define GLM52_OPS_CPU_ROUTE_H

#include <math.h>

#include "ops/cpu/cpu.h"
#include "ops/cpu/expf.h"

static const float ROUTE_SUM_FLOOR = 1e-20f; /* as published code has it */

static inline float sigmoid(float x)
{
    return 1.0f / (1.0f + exp_f32(-x));
}

/* sigmoid'(x), without the cancellation of 1 - sigmoid. */
static inline float sigmoid_slope(float x)
{
    float e = exp_f32(-fabsf(x));

    return e / ((1.0f + e) * (1.0f + e));
}

/* Keeps the k best experts by sigmoid + bias (NULL: no bias), best first, in chosen, and their scores in score; the
 * lower of equals is better. A NaN never displaces anything. */
void route_choose(int32_t experts, int32_t k, const float *logit, const float *bias, int32_t *chosen, float *score);

#endif
