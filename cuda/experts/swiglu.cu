/* silu(gate) * up, weighted per row for routed experts (model.md 2.5, 2.6), and its backward; a block a row. */
#include "device/element.cuh"

namespace {

constexpr int THREADS = 256;

__device__ __forceinline__ float sigmoid_of(float x)
{
    return 1.0f / (1.0f + expf(-x));
}

template <class T, int V>
__global__ __launch_bounds__(THREADS) void forward_kernel(const struct swiglu g, const T *gate_up, const float *weight,
                                                          const int32_t *source, T *act)
{
    const int64_t row = blockIdx.x;
    const float p = weight ? weight[source[row]] : 1.0f;
    const T *gate = gate_up + row * 2 * g.width, *up = gate + g.width;

    for (int64_t j = threadIdx.x * V; j < g.width; j += THREADS * V) {
        float a[V], b[V];

        load(gate + j, a);
        load(up + j, b);
#pragma unroll
        for (int i = 0; i < V; i++) a[i] = a[i] / (1.0f + expf(-a[i])) * b[i] * p;
        store(act + row * g.width + j, a);
    }
}

/* dgate_up may be gate_up: a thread reads its columns before it writes them. */
template <class T, int V>
__global__ __launch_bounds__(THREADS) void backward_kernel(const struct swiglu g, const T *gate_up, const float *weight,
                                                           const int32_t *source, const T *dact, T *dgate_up, float *dweight)
{
    const int64_t row = blockIdx.x, at = row * 2 * g.width;
    const float p = weight ? weight[source[row]] : 1.0f;
    float sum = 0;

    for (int64_t j = threadIdx.x * V; j < g.width; j += THREADS * V) {
        float gate[V], up[V], d[V], dgate[V], dup[V];

        load(gate_up + at + j, gate);
        load(gate_up + at + g.width + j, up);
        load(dact + row * g.width + j, d);
#pragma unroll
        for (int i = 0; i < V; i++) {
            const float sigmoid = sigmoid_of(gate[i]), silu = gate[i] * sigmoid, slope = d[i] * p;

            sum += silu * up[i] * d[i];
            dup[i] = slope * silu;
            dgate[i] = slope * up[i] * (sigmoid + silu * (1.0f - sigmoid));
        }
        store(dgate_up + at + j, dgate);
        store(dgate_up + at + g.width + j, dup);
    }
    if (!weight) return;
    sum = block_sum<THREADS>(sum);
    if (threadIdx.x == 0) dweight[source[row]] = sum;
}

void swiglu_forward(struct stream *s, const struct swiglu *g, const void *gate_up, const float *weight,
                    const int32_t *source, void *act)
{
    cuda_device *d = device_of(s);
    const bool wide = g->width % WIDE == 0 && aligned16(gate_up) && aligned16(act);

    count_swiglu_forward(s, g, weight != nullptr);
    if (g->rows == 0) return;
    with_type_and_width(g->type, wide, [&](auto element, auto width) {
        using T = decltype(element);
        constexpr int V = decltype(width)::value;
        forward_kernel<T, V><<<(unsigned)g->rows, THREADS, 0, d->stream>>>(*g, (const T *)gate_up, weight, source, (T *)act);
    });
    launched(d, "swiglu_forward");
}

void swiglu_backward(struct stream *s, const struct swiglu *g, const void *gate_up, const float *weight,
                     const int32_t *source, const void *dact, void *dgate_up, float *dweight)
{
    cuda_device *d = device_of(s);
    const bool wide = g->width % WIDE == 0 && aligned16(gate_up) && aligned16(dact) && aligned16(dgate_up);

    count_swiglu_backward(s, g, weight != nullptr);
    if (g->rows == 0) return;
    with_type_and_width(g->type, wide, [&](auto element, auto width) {
        using T = decltype(element);
        constexpr int V = decltype(width)::value;
        backward_kernel<T, V><<<(unsigned)g->rows, THREADS, 0, d->stream>>>(*g, (const T *)gate_up, weight, source,
                                                                            (const T *)dact, (T *)dgate_up, dweight);
    });
    launched(d, "swiglu_backward");
}

} /* namespace */

void fill_swiglu(struct ops *t)
{
    t->swiglu_forward = swiglu_forward;
    t->swiglu_backward = swiglu_backward;
}
