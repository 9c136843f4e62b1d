/* silu(gate) * up, weighted per row for routed experts (model.md 2.5, 2.6), and its backward; a block a row. */
#include "device/element.cuh"

namespace {

constexpr int THREADS = 256;

template <class T>
__device__ __forceinline__ float sigmoid_of(float x)
{
    return 1.0f / (1.0f + expf(-x));
}

/* For results that are rounded to 8 bits: two instructions instead of the exact functions' thirty. */
template <>
__device__ __forceinline__ float sigmoid_of<bf16>(float x)
{
    return __fdividef(1.0f, 1.0f + __expf(-x));
}

/* A row's weight comes by two loads, one after the other: it is asked for after those of the row, so that they do not wait. */
template <class T, int V>
__global__ __launch_bounds__(THREADS, 8) void forward_kernel(const struct swiglu g, const T *gate_up, const float *weight,
                                                             const int32_t *source, T *act)
{
    const int64_t row = blockIdx.x;
    const int32_t from = weight ? source[row] : 0;

    gate_up += row * 2 * g.width;
    act += row * g.width;
    for (int64_t j = threadIdx.x * V; j < g.width; j += THREADS * V) {
        const several<T, V> gate = *(const several<T, V> *)(gate_up + j), up = *(const several<T, V> *)(gate_up + g.width + j);
        const float p = weight ? weight[from] : 1.0f;
        float a[V];

#pragma unroll
        for (int i = 0; i < V; i++) {
            const float x = get(gate.at[i]);

            a[i] = x * sigmoid_of<T>(x) * get(up.at[i]) * p;
        }
        store(act + j, a);
    }
}

/* dgate_up may be gate_up and act dact: a thread reads its columns before it writes them. */
template <class T, int V>
__global__ __launch_bounds__(THREADS, 4) void backward_kernel(const struct swiglu g, const T *gate_up, const float *weight,
                                                              const int32_t *source, const T *dact, T *dgate_up,
                                                              float *dweight, T *act)
{
    __shared__ float part[THREADS / 32];
    const int64_t row = blockIdx.x, first = row * g.width;
    const int32_t from = weight ? source[row] : 0;
    float sum = 0;

    for (int64_t j = threadIdx.x * V; j < g.width; j += THREADS * V) {
        const several<T, V> gate = *(const several<T, V> *)(gate_up + 2 * first + j);
        const several<T, V> up = *(const several<T, V> *)(gate_up + 2 * first + g.width + j);
        const several<T, V> d = *(const several<T, V> *)(dact + first + j);
        const float p = weight ? weight[from] : 1.0f;
        float dgate[V], dup[V], again[V];

#pragma unroll
        for (int i = 0; i < V; i++) {
            const float x = get(gate.at[i]), y = get(up.at[i]), down = get(d.at[i]), slope = down * p;
            const float sigmoid = sigmoid_of<T>(x), silu = x * sigmoid;

            sum += silu * y * down;
            dup[i] = slope * silu;
            dgate[i] = slope * y * (sigmoid + silu * (1.0f - sigmoid));
            again[i] = silu * y * p;
        }
        store(dgate_up + 2 * first + j, dgate);
        store(dgate_up + 2 * first + g.width + j, dup);
        if (act) store(act + first + j, again);
    }
    if (!weight) return;
    sum = warp_reduce(sum, plus());
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x != 0) return;
    float all = 0;
#pragma unroll
    for (int w = 0; w < THREADS / 32; w++) all += part[w];
    dweight[from] = all;
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
        forward_kernel<T, V><<<(unsigned)g->rows, THREADS, 0, d->stream>>>(
            *g, (const T *)gate_up, weight, source, (T *)act);
    });
    launched(d, "swiglu_forward");
}

void swiglu_backward(struct stream *s, const struct swiglu *g, const void *gate_up, const float *weight,
                     const int32_t *source, const void *dact, void *dgate_up, float *dweight, void *act)
{
    cuda_device *d = device_of(s);
    const bool wide = g->width % WIDE == 0 && aligned16(gate_up) && aligned16(dact) && aligned16(dgate_up) &&
                      aligned16(act);

    count_swiglu_backward(s, g, weight != nullptr, act != nullptr);
    if (g->rows == 0) return;
    with_type_and_width(g->type, wide, [&](auto element, auto width) {
        using T = decltype(element);
        constexpr int V = decltype(width)::value;
        backward_kernel<T, V><<<(unsigned)g->rows, THREADS, 0, d->stream>>>(
            *g, (const T *)gate_up, weight, source, (const T *)dact, (T *)dgate_up, dweight, (T *)act);
    });
    launched(d, "swiglu_backward");
}

} /* namespace */

void fill_swiglu(struct ops *t)
{
    t->swiglu_forward = swiglu_forward;
    t->swiglu_backward = swiglu_backward;
}
