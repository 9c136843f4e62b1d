/* The way of rows to their experts and back: a stable sort of the assignments by expert, a copy in its order, and the
 * sum over a row's experts. A block a row: it is read once and written k times, or the other way round. */
#include "device/sort.cuh"

namespace {

constexpr int THREADS = 256;

struct assignments {
    const int32_t *chosen;
    int32_t *source, *place;

    __device__ int bin(int64_t i) const { return chosen[i]; }
    __device__ void put(int64_t i, int slot) const
    {
        source[slot] = (int32_t)i;
        place[i] = slot;
    }
};

size_t dispatch_sort_bytes(struct stream *, const struct dispatch *d)
{
    return sort_bytes(d->rows * d->k, d->experts);
}

void dispatch_sort(struct stream *s, const struct dispatch *d, const int32_t *chosen, int32_t *offsets, int32_t *source,
                   int32_t *place, void *workspace)
{
    cuda_device *device = device_of(s);

    count_dispatch_sort(s, d);
    counting_sort(device, d->rows * d->k, d->experts, assignments{chosen, source, place}, (int32_t *)workspace,
                  offsets);
    launched(device, "dispatch_sort");
}

/* ---- moves ---- */

template <class T, int V>
__global__ __launch_bounds__(THREADS) void spread_kernel(const struct dispatch d, const int32_t *place, const T *x,
                                                         T *y)
{
    const T *from = x + blockIdx.x * d.width;

    place += blockIdx.x * (int64_t)d.k;
    for (int64_t c = threadIdx.x * V; c < d.width; c += THREADS * V) {
        const several<T, V> all = *(const several<T, V> *)(from + c);

        for (int32_t j = 0; j < d.k; j++) *(several<T, V> *)(y + place[j] * d.width + c) = all;
    }
}

/* The sum is rounded to the type once. Experts are met AT_ONCE at a time, to have that many
 * loads under way; their order is that of j. */
template <class T, int V>
__global__ __launch_bounds__(THREADS) void collect_kernel(const struct dispatch d, const int32_t *place, const T *x,
                                                          T *y)
{
    constexpr int AT_ONCE = 8;

    const T *from = (d.from ? (const T *)d.from : y) + blockIdx.x * d.width;

    y += blockIdx.x * d.width;
    place += blockIdx.x * (int64_t)d.k;
    for (int64_t c = threadIdx.x * V; c < d.width; c += THREADS * V) {
        float sum[V] = {};

        if (d.add) load(from + c, sum);
        if (d.add > 1) {
            const several<T, V> more = *(const several<T, V> *)(y + c);

#pragma unroll
            for (int i = 0; i < V; i++) sum[i] += get(more.at[i]);
        }
        for (int32_t first = 0; first < d.k; first += AT_ONCE) {
            several<T, V> part[AT_ONCE] = {};

#pragma unroll
            for (int j = 0; j < AT_ONCE; j++)
                if (first + j < d.k) part[j] = *(const several<T, V> *)(x + place[first + j] * d.width + c);
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++)
#pragma unroll
                for (int i = 0; i < V; i++) sum[i] += get(part[j].at[i]);
        }
        store(y + c, sum);
    }
}

bool wide(const struct dispatch *d, const void *x, const void *y)
{
    return d->width % WIDE == 0 && aligned16(x) && aligned16(y) && aligned16(d->from);
}

void dispatch_spread(struct stream *s, const struct dispatch *d, const int32_t *place, const void *x, void *y)
{
    cuda_device *device = device_of(s);

    count_dispatch_spread(s, d);
    if (d->rows == 0) return;
    with_type_and_width(d->type, wide(d, x, y), [&](auto element, auto width) {
        using T = decltype(element);
        constexpr int V = decltype(width)::value;
        spread_kernel<T, V><<<(unsigned)d->rows, THREADS, 0, device->stream>>>(*d, place, (const T *)x, (T *)y);
    });
    launched(device, "dispatch_spread");
}

void dispatch_collect(struct stream *s, const struct dispatch *d, const int32_t *place, const void *x, void *y)
{
    cuda_device *device = device_of(s);

    count_dispatch_collect(s, d);
    if (d->rows == 0) return;
    with_type_and_width(d->type, wide(d, x, y), [&](auto element, auto width) {
        using T = decltype(element);
        constexpr int V = decltype(width)::value;
        collect_kernel<T, V><<<(unsigned)d->rows, THREADS, 0, device->stream>>>(*d, place, (const T *)x, (T *)y);
    });
    launched(device, "dispatch_collect");
}

} /* namespace */

void fill_dispatch(struct ops *t)
{
    t->dispatch_sort_bytes = dispatch_sort_bytes;
    t->dispatch_sort = dispatch_sort;
    t->dispatch_spread = dispatch_spread;
    t->dispatch_collect = dispatch_collect;
}
