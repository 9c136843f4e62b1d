/* Clipping by the global norm, and AdamW with decoupled decay. */
#include "device/element.cuh"

namespace {

constexpr int THREADS = 256;

__global__ void clip_kernel(const double *squares, float limit, float *norm, float *coefficient)
{
    const double length = sqrt(*squares), share = (double)limit / (length + 1e-6);

    *norm = (float)length;
    *coefficient = !isfinite(*squares) ? -1.0f : limit <= 0 || share > 1 ? 1.0f : (float)share;
}

void clip(struct stream *s, const double *squares, float limit, float *norm, float *coefficient)
{
    count_clip(s);
    clip_kernel<<<1, 1, 0, device_of(s)->stream>>>(squares, limit, norm, coefficient);
    launched(device_of(s), "clip");
}

/* T: of the parameter where there is a master. */
template <class T, int V>
__global__ void adamw_kernel(const struct adamw a, const float *rates, const float *coefficient, const float *gradient,
                             float *m, float *v, float *w, T *rounded)
{
    const float factor = *coefficient, lr = rates[RATE_LR], keep = 1.0f - lr * a.decay;
    const float correction1 = rates[RATE_CORRECTION1], correction2 = rates[RATE_CORRECTION2];
    const float rest1 = 1.0f - a.beta1, rest2 = 1.0f - a.beta2;

    if (factor < 0) return;
    for (int64_t i = (blockIdx.x * (int64_t)THREADS + threadIdx.x) * V; i < a.count; i += (int64_t)gridDim.x * THREADS * V) {
        float g[V], mean[V], square[V], x[V];

        load(gradient + i, g);
        load(m + i, mean);
        load(v + i, square);
        load(w + i, x);
#pragma unroll
        for (int j = 0; j < V; j++) {
            g[j] *= factor;
            mean[j] = a.beta1 * mean[j] + rest1 * g[j];
            square[j] = a.beta2 * square[j] + rest2 * (g[j] * g[j]);
            x[j] = x[j] * keep - lr * (mean[j] / correction1) / (sqrtf(square[j] / correction2) + a.epsilon);
        }
        store(m + i, mean);
        store(v + i, square);
        store(w + i, x);
        if (rounded) store(rounded + i, x);
    }
}

void run_adamw(struct stream *s, const struct adamw *a, const float *rates, const float *coefficient, const float *gradient,
               float *m, float *v, float *master, void *parameter)
{
    cuda_device *d = device_of(s);
    float *w = master ? master : (float *)parameter;
    const bool wide = a->count % WIDE == 0 && aligned16(gradient) && aligned16(m) && aligned16(v) && aligned16(w) &&
                      aligned16(parameter);

    count_adamw(s, a, master != nullptr);
    if (a->count == 0) return;
    with_type_and_width(a->type, wide, [&](auto element, auto width) {
        using T = decltype(element);
        constexpr int V = decltype(width)::value;
        adamw_kernel<T, V><<<blocks_for(d, a->count / V, THREADS), THREADS, 0, d->stream>>>(
            *a, rates, coefficient, gradient, m, v, w, master ? (T *)parameter : nullptr);
    });
    launched(d, "adamw");
}

} /* namespace */

void fill_adamw(struct ops *t)
{
    t->clip = clip;
    t->adamw = run_adamw;
}
