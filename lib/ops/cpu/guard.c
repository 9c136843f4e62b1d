/* Whether a step may move the parameters, from its losses and the norm of its gradients. The mean is written with the
 * fused multiply-add that a compiler may or may not choose, so that every device has the same bits. */
#include <math.h>

#include "ops/count.h"
#include "ops/cpu/cpu.h"

void cpu_guard(struct stream *s, const struct guard *g, const double *sums, const float *norm, double *mean_loss,
               float *coefficient)
{
    struct counted call = count_guard(s, g);
    double loss = 0, mean = *mean_loss;

    for (int32_t i = 0; i < g->parts; i++) {
        double part = 0;

        for (int32_t j = 0; j < g->count[i]; j++) part += sums[g->first[i] + j];
        loss += part;
    }
    if (!isfinite(loss) || !isfinite(*norm) || (g->spike > 0 && mean > 0 && loss > g->spike * mean))
        *coefficient = -1;
    else
        *mean_loss = mean > 0 ? fma(0.05, loss, 0.95 * mean) : loss;
    count_end(call);
}
