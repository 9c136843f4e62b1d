/* Sigmoid router (model.md 2.6): the correction bias takes part in the choice alone, the weights are the chosen
 * sigmoids, normalised and scaled. */
#include <math.h>

#include "ops/count.h"
#include "ops/cpu/route.h"

void route_choose(int32_t experts, int32_t k, const float *logit, const float *bias, int32_t *chosen, float *score)
{
    int32_t n = 0;

    for (int32_t e = 0; e < experts; e++) {
        float x = sigmoid(logit[e]) + (bias ? bias[e] : 0.0f);
        int32_t j;

        if (isnan(x))
            x = -INFINITY;
        if (n == k && !(x > score[k - 1]))
            continue;
        n += n < k;
        for (j = n - 1; j > 0 && x > score[j - 1]; j--) {
            score[j] = score[j - 1];
            chosen[j] = chosen[j - 1];
        }
        score[j] = x;
        chosen[j] = e;
    }
}

static void sort_ascending(int32_t *value, int32_t n)
{
    for (int32_t i = 1; i < n; i++) {
        int32_t x = value[i], j = i;

        for (; j > 0 && value[j - 1] > x; j--)
            value[j] = value[j - 1];
        value[j] = x;
    }
}

void cpu_route_forward(struct stream *s, const struct route *r, const float *logits, const float *bias, int32_t *chosen,
                       float *weight)
{
    struct counted call = count_route_forward(s, r);

#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t t = 0; t < r->rows; t++) {
        const float *logit = logits + t * r->experts;
        int32_t *expert = chosen + t * r->k;
        float *w = weight + t * r->k, sum = 0;

        if (r->forced && !r->given)
            for (int32_t j = 0; j < r->k; j++) expert[j] = (int32_t)((t * r->k + j) % r->experts);
        else if (!r->given)
            route_choose(r->experts, r->k, logit, bias, expert, w);
        sort_ascending(expert, r->k);
        for (int32_t j = 0; j < r->k; j++)
            sum += w[j] = sigmoid(logit[expert[j]]);
        for (int32_t j = 0; j < r->k; j++)
            w[j] *= r->normalize ? r->scale / (sum + ROUTE_SUM_FLOOR) : r->scale;
    }
    count_end(call);
}

/* With S = sum of the chosen sigmoids, weight_j = scale s_j / S; so
 *     ds_j = scale (dweight_j - sum_i dweight_i s_i / S) / S. */
void cpu_route_backward(struct stream *s, const struct route *r, const float *logits, const int32_t *chosen,
                        const float *dweight, float *dlogits)
{
    struct counted call = count_route_backward(s, r);

#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t t = 0; t < r->rows; t++) {
        const float *logit = logits + t * r->experts, *dw = dweight + t * r->k;
        const int32_t *expert = chosen + t * r->k;
        float *dlogit = dlogits + t * r->experts, sum = 0, mean = 0, factor = r->scale;

        for (int32_t e = 0; e < r->experts; e++)
            dlogit[e] = 0;
        if (r->normalize) {
            for (int32_t j = 0; j < r->k; j++) {
                float sigma = sigmoid(logit[expert[j]]);

                sum += sigma;
                mean += dw[j] * sigma;
            }
            mean /= sum + ROUTE_SUM_FLOOR;
            factor /= sum + ROUTE_SUM_FLOOR;
        }
        for (int32_t j = 0; j < r->k; j++)
            dlogit[expert[j]] = factor * (dw[j] - mean) * sigmoid_slope(logit[expert[j]]);
    }
    count_end(call);
}
