/* A stable counting sort of items by a small whole number, two launches: blocks count their items, then each finds
 * from all counts where its own begin and places them in order. The order of the input alone decides the result.
 *
 * A key says what is sorted:
 *     __device__ int bin(int64_t i) const        0 .. bins - 1
 *     __device__ void put(int64_t i, int slot)   item i is number `slot` of the sorted ones */
#pragma once

#include "device/element.cuh"

constexpr int SORT_THREADS = 1024, FEW_SORT_THREADS = 256;
/* So many have room for a place per warp of SORT_THREADS on chip; more, of FEW_SORT_THREADS. */
constexpr int MANY_BINS = 1536;
constexpr int SORT_BLOCKS = 128; /* that share the items: each reads the counts of all */

struct sort_shape {
    int64_t count, per_block; /* items; a multiple of SORT_THREADS */
    int bins, blocks;
};

static inline sort_shape sort_shape_of(int64_t count, int bins)
{
    const int64_t per_block = divided(std::max<int64_t>(1, divided(count, SORT_THREADS)), SORT_BLOCKS) * SORT_THREADS;

    return {count, per_block, bins, (int)divided(count, per_block)};
}

/* Of the counts. */
static inline size_t sort_bytes(int64_t count, int bins)
{
    const sort_shape s = sort_shape_of(count, bins);

    return (size_t)s.blocks * (size_t)s.bins * sizeof(int32_t);
}

/* counts [blocks, bins] */
template <class Key>
__global__ __launch_bounds__(SORT_THREADS) void sort_count_kernel(const sort_shape s, const Key key, int32_t *counts)
{
    extern __shared__ int bins[];
    const int64_t first = blockIdx.x * s.per_block, end = min(first + s.per_block, s.count);

    for (int b = threadIdx.x; b < s.bins; b += SORT_THREADS) bins[b] = 0;
    __syncthreads();
    for (int64_t i = first + threadIdx.x; i < end; i += SORT_THREADS) atomicAdd(&bins[key.bin(i)], 1);
    __syncthreads();
    for (int b = threadIdx.x; b < s.bins; b += SORT_THREADS) counts[(int64_t)blockIdx.x * s.bins + b] = bins[b];
}

/* next[bin]: where the block's first item of a bin goes. Threads share a bin's counts when there are fewer bins. The
 * first block writes offsets [bins+1], unless NULL. */
template <int THREADS>
__device__ void sort_starts(const sort_shape &s, const int32_t *counts, int *next, int32_t *offsets)
{
    __shared__ int before_of[THREADS], all_of[THREADS];
    const bool first_block = offsets && blockIdx.x == 0;
    const int me = threadIdx.x;
    int wide = 32, carry = 0;

    while (wide < s.bins && wide < THREADS) wide *= 2;
    for (int first = 0; first < s.bins; first += wide) {
        const int bin = first + me % wide;
        int before = 0, all = 0, sum;

        if (bin < s.bins) {
#pragma unroll 8
            for (int b = me / wide; b < s.blocks; b += THREADS / wide) {
                const int here = counts[(int64_t)b * s.bins + bin];

                all += here;
                before += b < (int)blockIdx.x ? here : 0;
            }
        }
        before_of[me] = before;
        all_of[me] = all;
        __syncthreads();
        before = all = 0;
        for (int q = me; me < wide && q < THREADS; q += wide) {
            before += before_of[q];
            all += all_of[q];
        }
        const int start = carry + block_before<THREADS>(all, &sum);
        if (me < wide && bin < s.bins) {
            next[bin] = start + before;
            if (first_block) offsets[bin] = start;
        }
        carry += sum;
        __syncthreads();
    }
    if (first_block && me == 0) offsets[s.bins] = carry;
}

/* A thread an item: those of one bin take their places by warp, and within a warp by lane. */
template <int THREADS, class Key>
__global__ __launch_bounds__(THREADS) void sort_place_kernel(const sort_shape s, Key key, const int32_t *counts,
                                                                  int32_t *offsets)
{
    constexpr int WARPS = THREADS / 32;
    extern __shared__ int shared[];
    int *next = shared, *start = shared + s.bins; /* start [warps, bins] */
    const int64_t first = blockIdx.x * s.per_block, end = min(first + s.per_block, s.count);
    const int lane = threadIdx.x % 32;
    int *own = start + threadIdx.x / 32 * s.bins;

    sort_starts<THREADS>(s, counts, next, offsets);
    for (int64_t base = first; base < end; base += THREADS) {
        const int64_t i = base + threadIdx.x;
        const int bin = i < end ? key.bin(i) : -1;
        const unsigned same = __match_any_sync(~0u, bin);
        const int rank = __popc(same & ((1u << lane) - 1));

        for (int b = threadIdx.x; b < s.bins * WARPS; b += THREADS) start[b] = 0;
        __syncthreads();
        if (bin >= 0 && rank == 0) own[bin] = __popc(same);
        __syncthreads();
        for (int b = threadIdx.x; b < s.bins; b += THREADS) {
            int at = next[b];

#pragma unroll
            for (int w = 0; w < WARPS; w++) {
                const int here = start[w * s.bins + b];

                start[w * s.bins + b] = at;
                at += here;
            }
            next[b] = at;
        }
        __syncthreads();
        if (bin >= 0) key.put(i, own[bin] + rank);
        __syncthreads();
    }
}

template <int THREADS, class Key>
static void sort_place(cuda_device *d, const sort_shape &s, const Key &key, const int32_t *counts, int32_t *offsets)
{
    const size_t shared = (size_t)(THREADS / 32 + 1) * (size_t)s.bins * sizeof(int);

    allow_shared(sort_place_kernel<THREADS, Key>, shared);
    sort_place_kernel<THREADS>
        <<<(unsigned)std::max(1, s.blocks), THREADS, shared, d->stream>>>(s, key, counts, offsets);
}

/* counts: sort_bytes. offsets [bins+1], or NULL. */
template <class Key>
static void counting_sort(cuda_device *d, int64_t count, int bins, const Key &key, int32_t *counts, int32_t *offsets)
{
    const sort_shape s = sort_shape_of(count, bins);

    if (s.blocks > 0)
        sort_count_kernel<<<(unsigned)s.blocks, SORT_THREADS, (size_t)bins * sizeof(int), d->stream>>>(s, key, counts);
    if (bins <= MANY_BINS)
        sort_place<SORT_THREADS>(d, s, key, counts, offsets);
    else
        sort_place<FEW_SORT_THREADS>(d, s, key, counts, offsets);
}
