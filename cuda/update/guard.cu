/* Whether a step may move the parameters. */
#include "device/device.cuh"

namespace {

__global__ void guard_kernel(const struct guard g, const double *sums, const float *norm, double *mean_loss,
                             float *coefficient)
{
    const double mean = *mean_loss;
    double loss = 0;

    for (int32_t i = 0; i < g.parts; i++) {
        double part = 0;

        for (int32_t j = 0; j < g.count[i]; j++) part += sums[g.first[i] + j];
        loss += part;
    }
    if (!isfinite(loss) || !isfinite(*norm) || (g.spike > 0 && mean > 0 && loss > g.spike * mean))
        *coefficient = -1.0f;
    else
        *mean_loss = mean > 0 ? fma(0.05, loss, __dmul_rn(0.95, mean)) : loss;
}

void run_guard(struct stream *s, const struct guard *g, const double *sums, const float *norm, double *mean_loss,
               float *coefficient)
{
    cuda_device *d = device_of(s);

    count_guard(s, g);
    guard_kernel<<<1, 1, 0, d->stream>>>(*g, sums, norm, mean_loss, coefficient);
    launched(d, "guard");
}

} /* namespace */

void fill_guard(struct ops *t)
{
    t->guard = run_guard;
}
