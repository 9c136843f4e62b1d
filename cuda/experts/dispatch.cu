/* The way of rows to their experts and back: a stable counting sort of the assignments, a copy in its order, and the sum over
 * a row's experts. */
#include "device/element.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int BLOCK = 1024;        /* assignments that one warp counts and places, in order */
constexpr int SCAN_THREADS = 1024;

int64_t block_count(const struct dispatch *d)
{
    return divided(d->rows * d->k, BLOCK);
}

size_t dispatch_sort_bytes(struct stream *, const struct dispatch *d)
{
    return (size_t)(block_count(d) * d->experts) * sizeof(int32_t);
}

/* slot[block][expert]: how many the block has. */
__global__ void count_kernel(const struct dispatch d, const int32_t *chosen, int32_t *slot)
{
    extern __shared__ int bins[];
    const int64_t first = blockIdx.x * (int64_t)BLOCK, end = min(first + BLOCK, d.rows * d.k);

    for (int e = threadIdx.x; e < d.experts; e += THREADS) bins[e] = 0;
    __syncthreads();
    for (int64_t i = first + threadIdx.x; i < end; i += THREADS) atomicAdd(&bins[chosen[i]], 1);
    __syncthreads();
    for (int e = threadIdx.x; e < d.experts; e += THREADS) slot[blockIdx.x * (int64_t)d.experts + e] = bins[e];
}

/* Counts become the slot where each block's first assignment of an expert goes. One block. */
__global__ __launch_bounds__(SCAN_THREADS) void slots_kernel(const struct dispatch d, int64_t blocks, int32_t *slot,
                                                             int32_t *offsets)
{
    int before = 0;

    for (int first = 0; first < d.experts; first += SCAN_THREADS) {
        const int e = first + threadIdx.x;
        int count = 0, all, next;

        for (int64_t b = 0; e < d.experts && b < blocks; b++) count += slot[b * d.experts + e];
        next = before + block_before<SCAN_THREADS>(count, &all);
        if (e < d.experts) offsets[e] = next;
        for (int64_t b = 0; e < d.experts && b < blocks; b++) {
            const int here = slot[b * d.experts + e];

            slot[b * d.experts + e] = next;
            next += here;
        }
        before += all;
    }
    if (threadIdx.x == 0) offsets[d.experts] = before;
}

/* A warp a block: of 32 neighbours, those of one expert take its next slots in order. */
__global__ void place_kernel(const struct dispatch d, const int32_t *chosen, const int32_t *slot, int32_t *source,
                             int32_t *place)
{
    extern __shared__ int next[];
    const int64_t first = blockIdx.x * (int64_t)BLOCK, end = min(first + BLOCK, d.rows * d.k);
    const int lane = threadIdx.x;

    for (int e = lane; e < d.experts; e += 32) next[e] = slot[blockIdx.x * (int64_t)d.experts + e];
    __syncwarp();
    for (int64_t base = first; base < end; base += 32) {
        const int64_t i = base + lane;
        const int expert = i < end ? chosen[i] : -1;
        const unsigned same = __match_any_sync(~0u, expert);
        const int rank = __popc(same & ((1u << lane) - 1));

        if (expert >= 0) {
            const int at = next[expert] + rank;

            source[at] = (int32_t)i;
            place[i] = at;
        }
        __syncwarp();
        if (expert >= 0 && rank == 0) next[expert] += __popc(same);
        __syncwarp();
    }
}

void dispatch_sort(struct stream *s, const struct dispatch *d, const int32_t *chosen, int32_t *offsets, int32_t *source,
                   int32_t *place, void *workspace)
{
    cuda_device *device = device_of(s);
    const int64_t blocks = block_count(d);
    const size_t bins = (size_t)d->experts * sizeof(int);
    int32_t *slot = (int32_t *)workspace;

    count_dispatch_sort(s, d);
    if (blocks > 0) count_kernel<<<(unsigned)blocks, THREADS, bins, device->stream>>>(*d, chosen, slot);
    slots_kernel<<<1, SCAN_THREADS, 0, device->stream>>>(*d, blocks, slot, offsets);
    if (blocks > 0) place_kernel<<<(unsigned)blocks, 32, bins, device->stream>>>(*d, chosen, slot, source, place);
    launched(device, "dispatch_sort");
}

/* ---- moves ---- */

template <class T, int V>
__global__ __launch_bounds__(THREADS) void spread_kernel(const struct dispatch d, const int32_t *source, const T *x, T *y)
{
    const T *from = x + source[blockIdx.x] / d.k * d.width;

    for (int64_t j = threadIdx.x * V; j < d.width; j += THREADS * V)
        *(several<T, V> *)(y + blockIdx.x * d.width + j) = *(const several<T, V> *)(from + j);
}

/* The sum is rounded to the type once. */
template <class T, int V>
__global__ __launch_bounds__(THREADS) void collect_kernel(const struct dispatch d, const int32_t *place, const T *x, T *y)
{
    const int64_t row = blockIdx.x;

    for (int64_t c = threadIdx.x * V; c < d.width; c += THREADS * V) {
        float sum[V] = {}, part[V];

        if (d.add) load(y + row * d.width + c, sum);
        for (int32_t j = 0; j < d.k; j++) {
            load(x + (int64_t)place[row * d.k + j] * d.width + c, part);
#pragma unroll
            for (int i = 0; i < V; i++) sum[i] += part[i];
        }
        store(y + row * d.width + c, sum);
    }
}

bool wide(const struct dispatch *d, const void *x, const void *y)
{
    return d->width % WIDE == 0 && aligned16(x) && aligned16(y);
}

void dispatch_spread(struct stream *s, const struct dispatch *d, const int32_t *source, const void *x, void *y)
{
    cuda_device *device = device_of(s);

    count_dispatch_spread(s, d);
    if (d->rows == 0) return;
    with_type_and_width(d->type, wide(d, x, y), [&](auto element, auto width) {
        using T = decltype(element);
        constexpr int V = decltype(width)::value;
        spread_kernel<T, V><<<(unsigned)(d->rows * d->k), THREADS, 0, device->stream>>>(*d, source, (const T *)x, (T *)y);
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
