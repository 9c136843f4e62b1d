/* What both forms of the indexer's loss share (training.md 1.4): which heads let a gradient through, and the loss
 * of one row. */
#pragma once

#include "device/element.cuh"

/* Whether the relu of a head and a key, at `at` in i.open, lets a gradient through. */
__device__ __forceinline__ bool relu_open(const struct indexer &i, int64_t at, float dot)
{
    if (i.sides == 0) return dot > 0;
    if (i.sides == 1) i.open[at] = dot > 0;
    return i.open[at] != 0;
}

/* By a block of THREADS: the loss of a row over the n >= 1 keys of its support. score are the student's scores, p the
 * teacher's probabilities; slope gets weight * (q - p), which is the gradient of the scores, and may be p. The sum is
 * one of differences that cancel as the student learns, hence double. Ends without a barrier. */
template <int THREADS>
__device__ float kl_row(const float *score, const float *p, int64_t n, float weight, float *slope)
{
    float top = -INFINITY, sum = 0;
    double kl = 0;

    for (int64_t i = threadIdx.x; i < n; i += THREADS) top = fmaxf(top, score[i]);
    top = block_largest<THREADS>(top);
    for (int64_t i = threadIdx.x; i < n; i += THREADS) sum += expf(score[i] - top);
    const float log_sum = logf(block_sum<THREADS>(sum));
    for (int64_t i = threadIdx.x; i < n; i += THREADS) {
        const float log_q = score[i] - top - log_sum, target = p[i];

        if (target != 0) kl += (double)(target * (logf(target < 1e-10f ? 1e-10f : target) - log_q));
        slope[i] = weight == 0 ? 0 : weight * (expf(log_q) - target);
    }
    return (float)block_sum<THREADS>(kl);
}
