/* What the router and its auxiliary losses share. */
#pragma once

#include "device/element.cuh"

constexpr float ROUTE_SUM_FLOOR = 1e-20f; /* as published code has it */

__device__ __forceinline__ float sigmoid(float x)
{
    return 1.0f / (1.0f + expf(-x));
}

/* sigmoid'(x), without the cancellation of 1 - sigmoid. */
__device__ __forceinline__ float sigmoid_slope(float x)
{
    const float e = expf(-fabsf(x));

    return e / ((1.0f + e) * (1.0f + e));
}

/* In order of choice: score descending, then expert ascending. */
struct candidate {
    float score;
    int32_t expert;
};

__device__ __forceinline__ bool better(candidate a, candidate b)
{
    return a.score > b.score || (a.score == b.score && a.expert < b.expert);
}

/* sigmoid + bias (NULL: none) as the choice sees it; what is not a number comes last. */
__device__ __forceinline__ float choice_score(const float *logit, const float *bias, int32_t e)
{
    const float x = sigmoid(logit[e]) + (bias ? bias[e] : 0.0f);

    return isnan(x) ? -INFINITY : x;
}

/* The best of a row that comes after `last`, for a whole warp; begin with {INFINITY, -1}. */
__device__ __forceinline__ candidate next_best(const float *logit, const float *bias, int32_t experts, candidate last)
{
    candidate best = {-INFINITY, INT32_MAX};

    for (int32_t e = threadIdx.x % 32; e < experts; e += 32) {
        const candidate x = {choice_score(logit, bias, e), e};

        if (better(last, x) && better(x, best)) best = x;
    }
    for (int apart = 16; apart; apart /= 2) {
        const candidate other = {__shfl_xor_sync(~0u, best.score, apart), __shfl_xor_sync(~0u, best.expert, apart)};

        if (better(other, best)) best = other;
    }
    return best;
}

void route_auxiliary_losses(struct stream *s, const struct route_auxiliary *a, const float *logits, const int32_t *sequence,
                            float *dlogits, double *loss, double *running);
