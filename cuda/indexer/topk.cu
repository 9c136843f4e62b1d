/* A block a row. Every element has a place of its own in the order: 64 bits, the score's rank (fp32
 * scores map to integers of the same order) above the position counted backwards. The lowest place
 * that is selected is found digit by digit:
 *
 * The row is read once for a histogram of the first digit, 11 bits, and again to mark in a bitmap what lies above the
 * digit of the k-th, and to list what shares it; the list, some hundred elements, gives the other digits. Where the
 * list overflows (many scores alike in their leading bits, or equal) further digits come from histograms of the row.
 * Ties need no care of their own: positions are digits too. The bitmap then yields the positions in order.
 *
 * The issue of instructions limits this, not memory; hence the two readings do as little as they can for an element. */
#include "indexer/topk.cuh"

#include <cfloat>

namespace {

constexpr int BINS = 2048;
constexpr int LIST = 192;               /* places a warp can list */
constexpr int QUAD = 4, BLOCK = 32 * QUAD; /* neighbours that a lane, and a warp, reads at once */
constexpr int AHEAD = 2;                /* quads of a lane in flight */
constexpr int64_t WINDOW = 1 << 20;     /* positions that the bitmap holds */

/* Rises with the score; adding 0 turns -0 into +0, and every NaN into one. */
__device__ __forceinline__ uint32_t any_rank_of(float score)
{
    const uint32_t bits = __float_as_uint(score + 0.0f);

    return bits ^ ((uint32_t)((int)bits >> 31) | 0x80000000u);
}

/* The same, but 0 for what is never selected, -inf and NaN. */
__device__ __forceinline__ uint32_t rank_of(float score) { return score >= -FLT_MAX ? any_rank_of(score) : 0; }

/* The score of a rank; scores of the rank and above are >= it. */
__device__ __forceinline__ float score_of(uint32_t rank)
{
    return __uint_as_float(rank ^ (rank >> 31 ? 0x80000000u : 0xffffffffu));
}

/* By the first digit, NaN and -inf have bins of their own. */
constexpr int NAN_BIN = 0xffffffffu >> 21, MINUS_INFINITY_BIN = 0x007fffffu >> 21;

__device__ __forceinline__ uint64_t place_of(uint32_t rank, int position)
{
    return (uint64_t)rank << 32 | ~(uint32_t)position;
}

__host__ __device__ constexpr int shift_of(int digit) /* bits below it */
{
    return digit == 0 ? 53 : digit == 1 ? 42 : digit == 2 ? 32 : digit == 3 ? 21 : digit == 4 ? 10 : 0;
}
__host__ __device__ constexpr int bits_of(int digit) { return digit % 3 == 2 ? 10 : 11; }

/* What is known of the k-th best place: its leading bits, how many of the places that share them
 * are to be taken, and how many there are. */
struct narrowed {
    uint64_t prefix;
    int need, count;
};

/* One row: the positions first .. end - 1, from `base` on, a multiple of BLOCK. aligned: so are the addresses of
 * quads. */
struct row {
    const float *scores;
    int base, first, end;
    bool aligned;
};

__device__ __forceinline__ void read_quad(const row &r, int at, int to, float (&v)[QUAD])
{
    if (r.aligned && at >= r.first && at + QUAD <= to) {
        const float4 x = *(const float4 *)(r.scores + at);

        v[0] = x.x, v[1] = x.y, v[2] = x.z, v[3] = x.w;
    } else {
#pragma unroll
        for (int e = 0; e < QUAD; e++) v[e] = at + e >= r.first && at + e < to ? r.scores[at + e] : -INFINITY;
    }
}

/* Calls visit(scores, position of the first) for every quad of a lane, whole warps at a time;
 * positions that the row does not have score -inf. */
template <int THREADS, class F>
__device__ __forceinline__ void each_quad(const row &r, int from, int to, F &&visit)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

    for (int block = from + warp * BLOCK; block < to; block += THREADS * QUAD * AHEAD) {
        float v[AHEAD][QUAD];

#pragma unroll
        for (int j = 0; j < AHEAD; j++) read_quad(r, block + j * THREADS * QUAD + lane * QUAD, to, v[j]);
#pragma unroll
        for (int j = 0; j < AHEAD; j++)
            if (block + j * THREADS * QUAD < to) visit(v[j], block + j * THREADS * QUAD + lane * QUAD);
    }
}

struct on_chip {
    int bins[BINS];
    narrowed found;
    bool overflow;
};

/* `at` learns the digit that the bins have counted, and the bins are emptied. Returns how many were counted; if fewer
 * than needed, `at` stays. Begins and ends with a barrier. */
template <int THREADS>
__device__ int learn_digit(on_chip *s, narrowed *at, int digit)
{
    constexpr int EACH = BINS / THREADS;
    int own = 0, all, above;

    __syncthreads();
    /* Thread 0 has the highest bins, so that what comes before a thread is above its bins. */
    const int top = BINS - 1 - (int)threadIdx.x * EACH;
#pragma unroll
    for (int j = 0; j < EACH; j++) own += s->bins[top - j];
    above = block_before<THREADS>(own, &all);
    if (above < at->need && at->need <= above + own) {
        int j = 0;

        for (; above + s->bins[top - j] < at->need; j++) above += s->bins[top - j];
        s->found = {at->prefix << bits_of(digit) | (uint64_t)(top - j), at->need - above, s->bins[top - j]};
    }
#pragma unroll
    for (int j = 0; j < EACH; j++) s->bins[top - j] = 0;
    __syncthreads();
    if (all >= at->need) *at = s->found;
    return all;
}

/* Whether a place has the leading digits found so far, and the bin of its next one. */
__device__ __forceinline__ void count_place(on_chip *s, const narrowed &at, uint64_t place, int digit)
{
    if (digit == 0 || place >> (shift_of(digit) + bits_of(digit)) == at.prefix)
        atomicAdd(&s->bins[place >> shift_of(digit) & ((1 << bits_of(digit)) - 1)], 1);
}

/* ---- the bitmap: a word for every QUAD-th position of a BLOCK, as ballots give them ---- */

__device__ __forceinline__ void set_bit(uint32_t *bitmap, int at)
{
    atomicOr(&bitmap[at / BLOCK * QUAD + at % QUAD], 1u << at % BLOCK / QUAD);
}

/* A warp's marks of the block in which `at`, relative to the bitmap, lies. */
__device__ __forceinline__ void write_marks(uint32_t *bitmap, int at, const uint32_t (&marks)[QUAD])
{
    if (threadIdx.x % 32 == 0) *(uint4 *)&bitmap[at / BLOCK * QUAD] = {marks[0], marks[1], marks[2], marks[3]};
}

/* The marks of 32 positions in their order. */
__device__ __forceinline__ uint32_t marks_of(const uint32_t *bitmap, int word)
{
    uint32_t all = 0;

#pragma unroll
    for (int e = 0; e < QUAD; e++) {
        uint32_t x = bitmap[word / QUAD * QUAD + e] >> word % QUAD * 8 & 0xff;

        x = (x | x << 12) & 0x000f000f; /* one bit in every four */
        x = (x | x << 6) & 0x03030303;
        x = (x | x << 3) & 0x11111111;
        all |= x << e;
    }
    return all;
}

/* Writes the marked positions, of which bit 0 is `base`, as selected[n], ...; returns the new n. */
template <int THREADS>
__device__ int emit(const uint32_t *bitmap, int words, int base, int n, int32_t *selected)
{
    for (int from = 0; from < words; from += THREADS) {
        const int w = from + (int)threadIdx.x;
        uint32_t bits = w < words ? marks_of(bitmap, w) : 0;
        int all, at = n + block_before<THREADS>(__popc(bits), &all);

        for (; bits; bits &= bits - 1) selected[at++] = base + w * 32 + __ffs(bits) - 1;
        n += all;
    }
    return n;
}

/* Marks and writes every place from `lowest` on, a window at a time; the row is read once more. */
template <int THREADS>
__device__ int emit_from(const row &r, uint64_t lowest, uint32_t *bitmap, int32_t *selected)
{
    int n = 0;

    for (int64_t window = r.base; window < r.end; window += WINDOW) {
        const int from = (int)window, to = (int)min((int64_t)r.end, window + WINDOW);

        __syncthreads();
        each_quad<THREADS>(r, from, to, [&](const float (&v)[QUAD], int at) {
            uint32_t marks[QUAD];

#pragma unroll
            for (int e = 0; e < QUAD; e++) {
                const uint32_t rank = rank_of(v[e]);

                marks[e] = __ballot_sync(~0u, rank != 0 && place_of(rank, at + e) >= lowest);
            }
            write_marks(bitmap, at - from, marks);
        });
        __syncthreads();
        n = emit<THREADS>(bitmap, (to - from + 31) / 32, from, n, selected);
    }
    return n;
}

/* ---- the list ---- */

/* A warp's. */
struct list {
    uint64_t *place;
    int count;
};

/* All lanes: appends those of their elements that are candidates, of which there are some. */
__device__ __forceinline__ void append(list *l, uint32_t candidates, float score, int position)
{
    const int lane = threadIdx.x % 32, number = l->count + __popc(candidates & ((1u << lane) - 1));

    if (candidates >> lane & 1 && number < LIST) l->place[number] = place_of(rank_of(score), position);
    l->count += __popc(candidates);
}

/* Marks what lies above the digits found, lists what shares them. false: too many to list. LEADING: the first digit
 * alone is known, which is a matter of scores. */
template <int THREADS, bool LEADING>
__device__ bool collect(on_chip *s, const row &r, const narrowed &at, int digit, bool mark, uint32_t *bitmap, list *l)
{
    const float low = score_of((uint32_t)at.prefix << 21),
                high = score_of((uint32_t)(at.prefix + 1) << 21); /* NaN above inf */

    if (threadIdx.x == 0) s->overflow = false;
    __syncthreads();
    l->count = 0;
    each_quad<THREADS>(r, r.base, r.end, [&](const float (&v)[QUAD], int position) {
        uint32_t marks[QUAD];

#pragma unroll
        for (int e = 0; e < QUAD; e++) {
            uint32_t candidates;

            if (LEADING) {
                marks[e] = __ballot_sync(~0u, v[e] >= high);
                candidates = __ballot_sync(~0u, v[e] >= low) & ~marks[e];
            } else {
                const uint64_t lead = place_of(rank_of(v[e]), position + e) >> shift_of(digit);

                marks[e] = __ballot_sync(~0u, lead > at.prefix);
                candidates = __ballot_sync(~0u, lead == at.prefix);
            }
            if (candidates) append(l, candidates, v[e], position + e);
        }
        if (mark) write_marks(bitmap, position - r.base, marks);
    });
    if (l->count > LIST) s->overflow = true;
    __syncthreads();
    return !s->overflow;
}

/* ---- a row ---- */

/* Selects of a row of which more than k elements may be eligible; returns how many there are, at most k. */
template <int THREADS>
__device__ int select_row(on_chip *s, const row &r, int32_t k, uint64_t *lists, uint32_t *bitmap, int32_t *selected)
{
    narrowed at = {0, k, 0};
    list l = {lists + threadIdx.x / 32 * LIST, 0};
    const bool mark = r.end - r.base <= WINDOW;
    int digit = 0;

    for (int b = threadIdx.x; b < BINS; b += THREADS) s->bins[b] = 0;
    __syncthreads();
    each_quad<THREADS>(r, r.base, r.end, [&](const float (&v)[QUAD], int) {
#pragma unroll
        for (int e = 0; e < QUAD; e++) atomicAdd(&s->bins[any_rank_of(v[e]) >> 21], 1);
    });
    __syncthreads();
    if (threadIdx.x == 0) s->bins[NAN_BIN] = s->bins[MINUS_INFINITY_BIN] = 0;
    if (learn_digit<THREADS>(s, &at, 0) <= k) return emit_from<THREADS>(r, 0, bitmap, selected);
    while (at.count > THREADS / 32 * LIST ||
           !(digit == 0 ? collect<THREADS, true>(s, r, at, digit, mark, bitmap, &l)
                        : collect<THREADS, false>(s, r, at, digit, mark, bitmap, &l))) {
        digit++;
        each_quad<THREADS>(r, r.base, r.end, [&](const float (&v)[QUAD], int position) {
#pragma unroll
            for (int e = 0; e < QUAD; e++) {
                const uint32_t rank = rank_of(v[e]);

                if (rank != 0) count_place(s, at, place_of(rank, position + e), digit);
            }
        });
        learn_digit<THREADS>(s, &at, digit);
    }
    while (at.need < at.count) { /* until all that share the digits are taken */
        digit++;
        for (int i = threadIdx.x % 32; i < l.count; i += 32) count_place(s, at, l.place[i], digit);
        learn_digit<THREADS>(s, &at, digit);
    }
    const uint64_t lowest = at.prefix << shift_of(digit);
    if (!mark) return emit_from<THREADS>(r, lowest, bitmap, selected);
    for (int i = threadIdx.x % 32; i < l.count; i += 32)
        if (l.place[i] >= lowest) set_bit(bitmap, (int)~(uint32_t)l.place[i] - r.base);
    __syncthreads();
    return emit<THREADS>(bitmap, (r.end - r.base + 31) / 32, r.base, 0, selected);
}

template <int THREADS>
__global__ __launch_bounds__(THREADS, 2048 / THREADS) void select_kernel(int64_t first_row, int64_t stride, int32_t k,
                                                                        const float *scores, const int32_t *start,
                                                                        const int32_t *end, bool all_short,
                                                                        int32_t *selected, int32_t *length)
{
    extern __shared__ uint64_t memory[];
    __shared__ on_chip s;
    uint64_t *lists = memory;
    uint32_t *bitmap = (uint32_t *)(lists + THREADS / 32 * LIST);
    const int64_t number = first_row + blockIdx.x;
    const float *from = scores + blockIdx.x * stride;
    const row r = {from, start[number] / BLOCK * BLOCK, start[number], max(end[number], start[number]),
                   ((uintptr_t)from & 15) == 0};
    int n = r.end - r.first;

    selected += number * k;
    if (all_short && n <= k)
        for (int j = threadIdx.x; j < n; j += THREADS) selected[j] = r.first + j;
    else
        n = select_row<THREADS>(&s, r, k, lists, bitmap, selected);
    for (int j = n + threadIdx.x; j < k; j += THREADS) selected[j] = -1;
    if (length && threadIdx.x == 0) length[number] = n;
}

template <int THREADS>
void launch(cuda_device *d, int64_t first, int64_t rows, int64_t keys, int64_t stride, int32_t k, const float *scores,
            const int32_t *start, const int32_t *end, bool all_short, int32_t *selected, int32_t *length)
{
    const size_t bitmap = (size_t)(std::min(keys + BLOCK, WINDOW) + BLOCK - 1) / BLOCK * QUAD * sizeof(uint32_t);
    const size_t bytes = THREADS / 32 * LIST * sizeof(uint64_t) + bitmap;

    cudaFuncSetAttribute(select_kernel<THREADS>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
    select_kernel<THREADS><<<(unsigned)rows, THREADS, bytes, d->stream>>>(first, stride, k, scores, start, end,
                                                                          all_short, selected, length);
}

} /* namespace */

void select_rows(cuda_device *d, int64_t first, int64_t rows, int64_t keys, int64_t stride, int32_t k,
                 const float *scores, const int32_t *start, const int32_t *end, bool all_short, int32_t *selected,
                 int32_t *length)
{
    /* Few rows: more threads on each. */
    (rows > 2 * d->multiprocessors ? launch<512> : launch<1024>)(d, first, rows, keys, stride, k, scores, start, end,
                                                                 all_short, selected, length);
}
