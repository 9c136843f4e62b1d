/* A block a row. The k-th best score is found exactly: fp32 scores map to integers of the same order, a histogram of their
 * leading 11 bits finds the bin of the k-th best, those of the next 11 and the last 10 refine it. One pass in order of
 * position then emits what lies above it, and ties until k are there. */
#include "indexer/topk.cuh"

#include <cfloat>

namespace {

constexpr int THREADS = 512, BINS = 2048, EACH = BINS / THREADS;

/* Rises with the score; 0 for what is never selected, -inf and NaN. Adding 0 turns -0 into +0. */
__device__ __forceinline__ uint32_t rank_of(float score)
{
    const uint32_t bits = __float_as_uint(score + 0.0f);

    return score >= -FLT_MAX ? bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u) : 0;
}

/* What is known of the k-th best rank: its bits from the last shift up, and how many with these bits are to be taken. */
struct narrowed {
    uint32_t prefix;
    int need;
};

/* Learns `bits` more bits at `shift`. Returns how many ranks were counted. */
__device__ int narrow(narrowed *at, const float *scores, int count, int shift, int bits)
{
    __shared__ int bins[BINS];
    __shared__ narrowed found;
    int own = 0, all, above;

    __syncthreads();
    for (int b = threadIdx.x; b < BINS; b += THREADS) bins[b] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += THREADS) {
        const uint32_t rank = rank_of(scores[i]);

        if (rank != 0 && (shift + bits == 32 || rank >> (shift + bits) == at->prefix))
            atomicAdd(&bins[rank >> shift & ((1u << bits) - 1)], 1);
    }
    __syncthreads();
    /* Thread 0 has the highest bins, so that what comes before a thread is above its bins. */
    const int top = BINS - 1 - (int)threadIdx.x * EACH;
    for (int j = 0; j < EACH; j++) own += bins[top - j];
    above = block_before<THREADS>(own, &all);
    if (above < at->need && at->need <= above + own) {
        int j = 0;

        for (; above + bins[top - j] < at->need; j++) above += bins[top - j];
        found = {at->prefix << bits | (uint32_t)(top - j), at->need - above};
    }
    __syncthreads();
    if (all >= at->need) *at = found;
    return all;
}

/* Writes the positions of what is above the threshold, and of the first ties; returns their number. */
__device__ int emit(const narrowed &at, bool everything, const float *scores, int count, int first, int32_t *selected)
{
    int n = 0, ties = 0;

    for (int base = 0; base < count; base += THREADS) {
        const int i = base + threadIdx.x;
        const uint32_t rank = i < count ? rank_of(scores[i]) : 0;
        const bool tie = !everything && rank != 0 && rank == at.prefix;
        int all_ties = 0, all;

        const int tie_number = everything ? 0 : ties + block_before<THREADS>(tie, &all_ties);
        const bool taken = everything ? rank != 0 : rank > at.prefix || (tie && tie_number < at.need);
        const int number = n + block_before<THREADS>(taken, &all);

        if (taken) selected[number] = first + i;
        ties += all_ties;
        n += all;
    }
    return n;
}

__global__ __launch_bounds__(THREADS) void select_kernel(int64_t first_row, int64_t keys, int32_t k, const float *scores,
                                                         const int32_t *start, const int32_t *end, bool all_short,
                                                         int32_t *selected, int32_t *length)
{
    const int64_t row = first_row + blockIdx.x;
    const int first = start[row], count = max(end[row] - first, 0);
    narrowed at = {0, k};
    int n = count;

    scores += blockIdx.x * keys + first;
    selected += row * k;
    if (all_short && count <= k) {
        for (int j = threadIdx.x; j < count; j += THREADS) selected[j] = first + j;
    } else {
        const bool everything = narrow(&at, scores, count, 21, 11) <= k;

        if (!everything) {
            narrow(&at, scores, count, 10, 11);
            narrow(&at, scores, count, 0, 10);
        }
        n = emit(at, everything, scores, count, first, selected);
    }
    for (int j = n + threadIdx.x; j < k; j += THREADS) selected[j] = -1;
    if (length && threadIdx.x == 0) length[row] = n;
}

} /* namespace */

void select_rows(cuda_device *d, int64_t first, int64_t rows, int64_t keys, int32_t k, const float *scores,
                 const int32_t *start, const int32_t *end, bool all_short, int32_t *selected, int32_t *length)
{
    select_kernel<<<(unsigned)rows, THREADS, 0, d->stream>>>(first, keys, k, scores, start, end, all_short, selected, length);
}
