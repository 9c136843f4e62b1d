/* What both forms of the indexer's loss share (training.md 1.4): the loss of one row, and how the gradient of the keys
 * is summed. Rows are dealt to at most GROUPS groups by number alone. A group sums in order of its rows, and the groups
 * are added in their order, so the result does not depend on who computes which. */
#ifndef GLM52_OPS_CPU_INDEX_KL_H
#define GLM52_OPS_CPU_INDEX_KL_H

#include <math.h>

#include "ops/cpu/expf.h"
#include "ops/cpu/row.h"

enum { GROUPS = 16 }; /* enough to share out */

/* The loss of a row over the n >= 1 keys of its support: score are the student's scores, p the teacher's probabilities;
 * slope gets weight * (q - p), which is the gradient of the scores, and may be p. score does not survive. The sum is
 * one of differences that cancel as the student learns, hence double. */
static inline float kl_row(float *score, const float *p, int64_t n, float weight, float *slope)
{
    float top = largest(score, n), sum = 0, log_sum, e[CHUNK];
    double kl = 0;

    for (int64_t i = 0; i < n; i++) score[i] -= top;
    for (int64_t i = 0; i < n; i += CHUNK) {
        int64_t count = least(CHUNK, n - i);

        for (int64_t j = 0; j < count; j++) e[j] = exp_f32(score[i + j]);
        sum += total(e, count);
    }
    log_sum = logf(sum);
    for (int64_t i = 0; i < n; i++) score[i] -= log_sum;
    for (int64_t i = 0; i < n; i++)
        if (p[i] != 0) kl += (double)(p[i] * (logf(p[i] < 1e-10f ? 1e-10f : p[i]) - score[i]));
    for (int64_t i = 0; i < n; i++) slope[i] = weight == 0 ? 0 : weight * (exp_f32(score[i]) - p[i]);
    return (float)kl;
}

/* Groups for a number of rows or blocks of rows. */
static inline int64_t group_count(int64_t units)
{
    return units < 1 ? 1 : least(units, GROUPS);
}

/* dkey [keys, width] = the sum of shares [groups, keys, stride]. For use in a parallel region; ends with a barrier. */
static inline void add_groups(int64_t groups, int64_t keys, int64_t width, int64_t stride, const float *share,
                              float *dkey)
{
#pragma omp for schedule(static)
    for (int64_t u = 0; u < keys; u++) {
        float *to = dkey + u * width;

        memcpy(to, share + u * stride, (size_t)width * sizeof *to);
        for (int64_t g = 1; g < groups; g++) {
            const float *from = share + (g * keys + u) * stride;

            for (int64_t c = 0; c < width; c++) to[c] += from[c];
        }
    }
}

#endif
