/* Top-k selection: score descending, then position ascending, emitted ascending (model.md 2.3).
 *
 * The k-th best score is found exactly: fp32 scores map to integers of the same order, a histogram of their leading
 * bits finds the bin of the k-th best, the next bits refine it until few candidates are left, and bisection over the
 * bits of those finishes. One pass in order of position then emits what lies above it, and ties until k are there. */
#include "ops/cpu/topk.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "ops/count.h"
#include "ops/cpu/cpu.h"

enum {
    DIGIT_BITS = 11,
    BINS = 1 << DIGIT_BITS,
    BLOCK = 64,       /* scores mapped at a time, so that the mapping vectorises */
    CANDIDATES = 512, /* so few are bisected rather than counted again */
};

/* Rises with the score; 0 for what is never selected, -inf and NaN. Adding 0 turns -0 into +0. */
static inline uint32_t rank_of(float score)
{
    uint32_t bits, rank;

    score += 0.0f;
    memcpy(&bits, &score, sizeof bits);
    rank = bits ^ ((bits >> 31) ? 0xffffffffu : 0x80000000u);
    return score >= -FLT_MAX ? rank : 0;
}

static inline float score_of(uint32_t rank)
{
    uint32_t bits = rank ^ ((rank >> 31) ? 0x80000000u : 0xffffffffu);
    float score;

    memcpy(&score, &bits, sizeof score);
    return score;
}

/* What is known of the k-th best rank: its bits from `shift` up are `prefix`, and it is the need-th best of the `count`
 * ranks with that prefix. */
struct narrowed {
    uint32_t prefix;
    int shift;
    int64_t need, count;
};

static inline int has_prefix(const struct narrowed *at, uint32_t rank)
{
    return rank >> (at->shift - 1) >> 1 == at->prefix; /* in two steps, for shift = 32 */
}

/* Ranks of up to BLOCK scores from i on; returns how many. */
static inline int64_t rank_block(const float *scores, int64_t i, int64_t count, uint32_t *rank)
{
    int64_t n = count - i < BLOCK ? count - i : BLOCK;

    for (int64_t j = 0; j < n; j++)
        rank[j] = rank_of(scores[i + j]);
    return n;
}

/* Learns the next digit below `shift`. Two histograms, because equal neighbours would wait for each other. */
static void narrow(struct narrowed *at, const float *scores, int64_t count)
{
    uint32_t bins[2][BINS] = {{0}}, rank[BLOCK];
    int bits = at->shift < DIGIT_BITS ? at->shift : DIGIT_BITS, below = at->shift - bits;
    int64_t above = 0;
    int bin = 1 << bits;

    for (int64_t i = 0; i < count; i += BLOCK) {
        int64_t n = rank_block(scores, i, count, rank);

        for (int64_t j = 0; j < n; j++)
            if (has_prefix(at, rank[j]))
                bins[j & 1][rank[j] >> below & ((1u << bits) - 1)]++;
    }
    do {
        bin--;
        at->count = (int64_t)bins[0][bin] + bins[1][bin];
        above += at->count;
    } while (above < at->need);
    at->need -= above - at->count;
    at->prefix = at->prefix << bits | (uint32_t)bin;
    at->shift = below;
}

/* Learns all remaining bits from the few ranks that still have the prefix. */
static void bisect(struct narrowed *at, const float *scores, int64_t count)
{
    uint32_t candidate[CANDIDATES + 1], rank[BLOCK]; /* one more: every rank is stored, few advance */
    int64_t n = 0;

    for (int64_t i = 0; i < count; i += BLOCK) {
        int64_t ranks = rank_block(scores, i, count, rank);

        for (int64_t j = 0; j < ranks; j++) {
            candidate[n] = rank[j];
            n += has_prefix(at, rank[j]);
        }
    }
    at->prefix = at->shift < 32 ? at->prefix << at->shift : 0;
    while (at->shift > 0) {
        uint32_t trial = at->prefix | 1u << --at->shift;
        int64_t reached = 0;

        for (int64_t i = 0; i < n; i++)
            reached += candidate[i] >= trial;
        if (reached >= at->need)
            at->prefix = trial;
    }
    at->count = 0; /* of those equal to it; the ones above it are chosen before */
    for (int64_t i = 0; i < n; i++) {
        at->need -= candidate[i] > at->prefix;
        at->count += candidate[i] == at->prefix;
    }
}

void topk_all(int64_t count, int32_t first, int32_t k, int32_t *selected)
{
    for (int32_t j = 0; j < k; j++)
        selected[j] = j < count ? first + j : -1;
}

int32_t topk_row(const float *scores, int64_t count, int32_t first, int32_t k, int32_t *selected)
{
    struct narrowed at = {.shift = 32, .count = count};
    float threshold = -FLT_MAX;
    int32_t n = 0;
    int64_t valid = 0, ties = INT64_MAX, i = 0;

    for (int64_t u = 0; u < count; u++)
        valid += scores[u] >= -FLT_MAX;
    if (valid > k) {
        at.need = k;
        while (at.shift > 0)
            if (at.count > CANDIDATES)
                narrow(&at, scores, count);
            else
                bisect(&at, scores, count);
        threshold = score_of(at.prefix);
        if (at.count > at.need)
            ties = at.need;
    }
    /* A score is stored before it is known to stay, and the row has no place for a (k+1)-th: hence n < k. */
    for (; ties < INT64_MAX && i < count && n < k; i++) {
        int tie = scores[i] == threshold;

        selected[n] = first + (int32_t)i;
        n += scores[i] > threshold || (tie && ties > 0);
        ties -= tie;
    }
    for (; i < count && n < k; i++) {
        selected[n] = first + (int32_t)i;
        n += scores[i] >= threshold;
    }
    for (int32_t j = n; j < k; j++)
        selected[j] = -1;
    return n;
}

void cpu_select_topk(struct stream *s, int64_t rows, int64_t keys, int32_t k, const float *scores, const int32_t *start,
                     const int32_t *end, int32_t *selected, int32_t *length)
{
    struct counted call = count_select_topk(s, rows, keys, k);

#pragma omp parallel for schedule(dynamic, 4) num_threads(s->threads)
    for (int64_t t = 0; t < rows; t++)
        length[t] = topk_row(scores + t * keys + start[t], end[t] - start[t], start[t], k, selected + t * k);
    count_end(call);
}
