/* Rows of the embedding table by token, and the sum of gradients back into them: the first row that has a token adds up
 * every row that has it, in order, so that a table row has one writer. */
#include "device/element.cuh"

namespace {

constexpr int THREADS = 256;

template <class T, int V>
__global__ __launch_bounds__(THREADS) void forward_kernel(const struct embed e, const int32_t *token, const T *table, T *y)
{
    const int64_t row = blockIdx.x;
    const int32_t at = token[row];
    several<T, V> none = {};

    for (int64_t j = threadIdx.x * V; j < e.width; j += THREADS * V)
        *(several<T, V> *)(y + row * e.width + j) = at < 0 ? none : *(const several<T, V> *)(table + at * e.width + j);
}

void embed_forward(struct stream *s, const struct embed *e, const int32_t *token, const void *table, void *y)
{
    cuda_device *d = device_of(s);
    const bool wide = e->width % WIDE == 0 && aligned16(table) && aligned16(y);

    count_embed_forward(s, e);
    if (e->rows == 0) return;
    with_type_and_width(e->type, wide, [&](auto element, auto width) {
        using T = decltype(element);
        constexpr int V = decltype(width)::value;
        forward_kernel<T, V><<<(unsigned)e->rows, THREADS, 0, d->stream>>>(*e, token, (const T *)table, (T *)y);
    });
    launched(d, "embed_forward");
}

/* Whether some row before `row` has the token. */
__device__ bool came_before(const int32_t *token, int64_t row, int32_t mine)
{
    for (int64_t first = 0; first < row; first += THREADS) {
        const int64_t i = first + threadIdx.x;

        if (__syncthreads_or(i < row && token[i] == mine)) return true;
    }
    return false;
}

template <class T, int V>
__global__ __launch_bounds__(THREADS) void backward_kernel(const struct embed e, const int32_t *token, const T *dy,
                                                           float *dtable)
{
    __shared__ unsigned mask[THREADS / 32];
    const int32_t mine = token[blockIdx.x];

    if (mine < 0 || came_before(token, blockIdx.x, mine)) return;
    for (int64_t first = blockIdx.x; first < e.rows; first += THREADS) {
        const int64_t i = first + threadIdx.x;
        const unsigned here = __ballot_sync(~0u, i < e.rows && token[i] == mine);

        __syncthreads();
        if (threadIdx.x % 32 == 0) mask[threadIdx.x / 32] = here;
        __syncthreads();
        for (int w = 0; w < THREADS / 32; w++)
            for (unsigned left = mask[w]; left; left &= left - 1) {
                const T *from = dy + (first + w * 32 + __ffs(left) - 1) * e.width;

                for (int64_t j = threadIdx.x * V; j < e.width; j += THREADS * V) {
                    float a[V];

                    load(from + j, a);
                    store(dtable + mine * e.width + j, a, true);
                }
            }
    }
}

void embed_backward(struct stream *s, const struct embed *e, const int32_t *token, const void *dy, float *dtable)
{
    cuda_device *d = device_of(s);
    const bool wide = e->width % WIDE == 0 && aligned16(dy) && aligned16(dtable);

    count_embed_backward(s, e);
    if (e->rows == 0) return;
    with_type_and_width(e->type, wide, [&](auto element, auto width) {
        using T = decltype(element);
        constexpr int V = decltype(width)::value;
        backward_kernel<T, V><<<(unsigned)e->rows, THREADS, 0, d->stream>>>(*e, token, (const T *)dy, dtable);
    });
    launched(d, "embed_backward");
}

} /* namespace */

void fill_embed(struct ops *t)
{
    t->embed_forward = embed_forward;
    t->embed_backward = embed_backward;
}
