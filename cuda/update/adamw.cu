/* Clipping by the global norm, and AdamW with decoupled decay. */
#include "update/neighbours.cuh"

namespace {

using namespace neighbours;

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

/* Types of the weight, of its rounded copy (NULL: none), of the gradient and of the moments. What is loaded before a
 * skipped update is known to be one is not used. */
template <class W, class Copy, class G, class M, int V>
__global__ __launch_bounds__(THREADS) void adamw_kernel(const struct adamw a, const float *rates,
                                                        const float *coefficient, const G *gradient, M *m, M *v, W *w,
                                                        Copy *copy)
{
    float g[ROUNDS<V>][V], mean[ROUNDS<V>][V], square[ROUNDS<V>][V], x[ROUNDS<V>][V];

#pragma unroll
    for (int round = 0; round < ROUNDS<V>; round++) {
        const int64_t i = run_at<V>(round);

        if (i >= a.count) continue;
        load(gradient + i, g[round]);
        load(m + i, mean[round]);
        load(v + i, square[round]);
        load(w + i, x[round]);
    }
    const float factor = *coefficient, lr = rates[RATE_LR], keep = 1.0f - lr * a.decay;
    const float step = lr / rates[RATE_CORRECTION1], scale = rsqrtf(rates[RATE_CORRECTION2]);
    const float rest1 = 1.0f - a.beta1, rest2 = 1.0f - a.beta2;

    if (factor < 0) return;
#pragma unroll
    for (int round = 0; round < ROUNDS<V>; round++) {
        const int64_t i = run_at<V>(round);

        if (i >= a.count) continue;
#pragma unroll
        for (int j = 0; j < V; j++) {
            const float scaled = g[round][j] * factor;
            float &one = mean[round][j], &two = square[round][j];

            one = a.beta1 * one + rest1 * scaled;
            two = a.beta2 * two + rest2 * (scaled * scaled);
            x[round][j] = x[round][j] * keep - step * one / (sqrtf(two) * scale + a.epsilon);
        }
        store(m + i, mean[round]);
        store(v + i, square[round]);
        store(w + i, x[round]);
        if (copy) store(copy + i, x[round]);
    }
}

struct adamw_call {
    const struct adamw *shape;
    const float *rates, *coefficient;
    const void *gradient;
    void *m, *v, *weight, *copy;
};

template <class W, class Copy, class G, class M>
void launch(cuda_device *d, const adamw_call &c)
{
    constexpr int V = RUN<W, Copy, G, M>;
    const int64_t count = c.shape->count;
    const bool wide = count % V == 0 && aligned16(c.gradient) && aligned16(c.m) && aligned16(c.v) &&
                      aligned16(c.weight) && aligned16(c.copy);
    auto kernel = wide ? adamw_kernel<W, Copy, G, M, V> : adamw_kernel<W, Copy, G, M, 1>;

    const unsigned grid = wide ? blocks<V>(count) : blocks<1>(count);

    kernel<<<grid, THREADS, 0, d->stream>>>(*c.shape, c.rates, c.coefficient, (const G *)c.gradient, (M *)c.m, (M *)c.v,
                                            (W *)c.weight, (Copy *)c.copy);
}

void run_adamw(struct stream *s, const struct adamw *a, const float *rates, const float *coefficient,
               const void *gradient, void *m, void *v, float *master, void *parameter)
{
    const adamw_call c =
        {a, rates, coefficient, gradient, m, v, master ? master : parameter, master ? parameter : nullptr};
    cuda_device *d = device_of(s);

    count_adamw(s, a, master != nullptr);
    if (a->count == 0) return;
    with_type(a->gradient, [&](auto g) {
        with_type(a->moments, [&](auto moment) {
            with_type(a->type, [&](auto p) {
                using G = decltype(g);
                using M = decltype(moment);
                using P = decltype(p);
                if (master)
                    launch<float, P, G, M>(d, c);
                else
                    launch<P, P, G, M>(d, c);
            });
        });
    });
    launched(d, "adamw");
}

} /* namespace */

void fill_adamw(struct ops *t)
{
    t->clip = clip;
    t->adamw = run_adamw;
}
