/* silu(gate) * up, weighted per row for routed experts (model.md 2.5, 2.6), and its backward. A block takes some rows
 * at once, so that a thread has several loads under way before it needs the first. */
#include "device/element.cuh"

namespace {

constexpr int THREADS = 128;
constexpr int BLOCKS = 8; /* of a multiprocessor at once, which leaves a thread 64 registers */

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

/* The rows of a block, from `first` on. Their weights are asked for after the first loads of a thread: they come by
 * two loads, one after the other, and nothing of the row waits for them. */
template <int ROWS>
struct block_rows {
    int64_t first;
    int count;
    int32_t source[ROWS];
    float p[ROWS];

    __device__ block_rows(const struct swiglu &g, const float *weight, const int32_t *from)
    {
        first = blockIdx.x * (int64_t)ROWS;
        count = (int)min((int64_t)ROWS, g.rows - first);
#pragma unroll
        for (int r = 0; r < ROWS; r++) source[r] = weight && r < count ? from[first + r] : 0;
    }
    __device__ __forceinline__ void weigh(const float *weight)
    {
#pragma unroll
        for (int r = 0; r < ROWS; r++) p[r] = weight ? weight[source[r]] : 1.0f;
    }
};

template <class T, int V, int ROWS>
__global__ __launch_bounds__(THREADS, BLOCKS) void forward_kernel(const struct swiglu g, const T *gate_up,
                                                                  const float *weight, const int32_t *source, T *act)
{
    block_rows<ROWS> rows(g, weight, source);

    gate_up += rows.first * 2 * g.width;
    act += rows.first * g.width;
    for (int64_t j = threadIdx.x * V; j < g.width; j += THREADS * V) {
        several<T, V> gate[ROWS], up[ROWS];

#pragma unroll
        for (int r = 0; r < ROWS; r++)
            if (r < rows.count) {
                gate[r] = *(const several<T, V> *)(gate_up + 2 * r * g.width + j);
                up[r] = *(const several<T, V> *)(gate_up + (2 * r + 1) * g.width + j);
            }
        rows.weigh(weight);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float a[V];

            if (r >= rows.count) break;
#pragma unroll
            for (int i = 0; i < V; i++) {
                const float x = get(gate[r].at[i]);

                a[i] = x * sigmoid_of<T>(x) * get(up[r].at[i]) * rows.p[r];
            }
            store(act + r * g.width + j, a);
        }
    }
}

template <class T, int V, int ROWS>
__global__ __launch_bounds__(THREADS, BLOCKS) void backward_kernel(const struct swiglu g, const T *gate_up,
                                                                   const float *weight, const int32_t *source,
                                                                   const T *dact, T *dgate_up, float *dweight, T *act)
{
    __shared__ float part[ROWS][THREADS / 32];
    block_rows<ROWS> rows(g, weight, source);
    const int64_t first = rows.first * g.width;
    float sum[ROWS] = {};

    for (int64_t j = threadIdx.x * V; j < g.width; j += THREADS * V) {
        several<T, V> gate[ROWS], up[ROWS], d[ROWS];

#pragma unroll
        for (int r = 0; r < ROWS; r++)
            if (r < rows.count) {
                gate[r] = *(const several<T, V> *)(gate_up + 2 * first + 2 * r * g.width + j);
                up[r] = *(const several<T, V> *)(gate_up + 2 * first + (2 * r + 1) * g.width + j);
                d[r] = *(const several<T, V> *)(dact + first + r * g.width + j);
            }
        rows.weigh(weight);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float dgate[V], dup[V], again[V];

            if (r >= rows.count) break;
#pragma unroll
            for (int i = 0; i < V; i++) {
                const float x = get(gate[r].at[i]), y = get(up[r].at[i]), down = get(d[r].at[i]),
                            slope = down * rows.p[r];
                const float sigmoid = sigmoid_of<T>(x), silu = x * sigmoid;

                sum[r] += silu * y * down;
                dup[i] = slope * silu;
                dgate[i] = slope * y * (sigmoid + silu * (1.0f - sigmoid));
                again[i] = silu * y * rows.p[r];
            }
            store(dgate_up + 2 * first + 2 * r * g.width + j, dgate);
            store(dgate_up + 2 * first + (2 * r + 1) * g.width + j, dup);
            if (act) store(act + first + r * g.width + j, again);
        }
    }
    if (!weight) return;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        sum[r] = warp_reduce(sum[r], plus());
        if (threadIdx.x % 32 == 0) part[r][threadIdx.x / 32] = sum[r];
    }
    __syncthreads();
    if ((int)threadIdx.x >= rows.count) return;
    float all = 0;
#pragma unroll
    for (int w = 0; w < THREADS / 32; w++) all += part[threadIdx.x][w];
    dweight[source[rows.first + threadIdx.x]] = all;
}

void swiglu_forward(struct stream *s, const struct swiglu *g, const void *gate_up, const float *weight,
                    const int32_t *source, void *act)
{
    constexpr int ROWS = 2;
    cuda_device *d = device_of(s);
    const bool wide = g->width % WIDE == 0 && aligned16(gate_up) && aligned16(act);

    count_swiglu_forward(s, g, weight != nullptr);
    if (g->rows == 0) return;
    with_type_and_width(g->type, wide, [&](auto element, auto width) {
        using T = decltype(element);
        constexpr int V = decltype(width)::value;
        forward_kernel<T, V, ROWS><<<(unsigned)divided(g->rows, ROWS), THREADS, 0, d->stream>>>(
            *g, (const T *)gate_up, weight, source, (T *)act);
    });
    launched(d, "swiglu_forward");
}

void swiglu_backward(struct stream *s, const struct swiglu *g, const void *gate_up, const float *weight,
                     const int32_t *source, const void *dact, void *dgate_up, float *dweight, void *act)
{
    constexpr int ROWS = 1;
    cuda_device *d = device_of(s);
    const bool wide = g->width % WIDE == 0 && aligned16(gate_up) && aligned16(dact) && aligned16(dgate_up) &&
                      aligned16(act);

    count_swiglu_backward(s, g, weight != nullptr, act != nullptr);
    if (g->rows == 0) return;
    with_type_and_width(g->type, wide, [&](auto element, auto width) {
        using T = decltype(element);
        constexpr int V = decltype(width)::value;
        backward_kernel<T, V, ROWS><<<(unsigned)divided(g->rows, ROWS), THREADS, 0, d->stream>>>(
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
