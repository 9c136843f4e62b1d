/* Lightning indexer: score[t,u] = sum_h weight[t,h] * relu(q[t,h] . key[u]), then the best k keys (model.md 2.3).
 *
 * Keys are packed once into panels of PANEL keys, one vector lane per key. A thread takes BLOCK query rows at a time
 * and scores them panel by panel, heads in registers, into a strip [BLOCK, keys]; no more than that ever exists of
 * rows x keys. A score's arithmetic does not depend on the block, the panel or the thread it falls to. */
#include <math.h>
#include <omp.h>

#include "ops/count.h"
#include "ops/cpu/cpu.h"
#include "ops/cpu/topk.h"
#include "ops/cpu/vector.h"

enum {
    VECTORS = 3,             /* 4 x 3 sums, 3 keys and 1 query fill the 16 registers of AVX2 */
    PANEL = VECTORS * LANES,
    HEADS = 4,
    BLOCK = 16,              /* rows that share one trip over the keys */
};

struct strip {
    int64_t heads;           /* rounded up to HEADS; those beyond have weight 0 */
    float *q, *weight;       /* [BLOCK, heads, width], [BLOCK, heads] */
    float *scores;           /* [BLOCK, keys rounded up to PANEL] */
};

static size_t strip_layout(const struct indexer *i, char *base, struct strip *strip)
{
    size_t used = 0;

    strip->heads = round_up(i->heads, HEADS);
    strip->q = carve_floats(base, &used, BLOCK * strip->heads * i->width);
    strip->weight = carve_floats(base, &used, BLOCK * strip->heads);
    strip->scores = carve_floats(base, &used, BLOCK * round_up(i->keys, PANEL));
    return used;
}

static size_t panels_bytes(const struct indexer *i)
{
    size_t used = 0;

    carve_floats(NULL, &used, round_up(i->keys, PANEL) * i->width);
    return used;
}

size_t cpu_index_select_bytes(struct stream *s, const struct indexer *i)
{
    struct strip strip;

    return panels_bytes(i) + (size_t)s->threads * strip_layout(i, NULL, &strip);
}

/* Panel p, [width, PANEL]: column u is key p * PANEL + u, 0 past the last key. */
static void pack_panel(const struct indexer *i, const void *key, int64_t p, float *panel)
{
    int64_t count = i->keys - p * PANEL < PANEL ? i->keys - p * PANEL : PANEL;
    float part[LANES];

    if (count < PANEL)
        memset(panel, 0, (size_t)(PANEL * i->width) * sizeof *panel);
    for (int64_t u = 0; u < count; u++)
        for (int64_t c = 0; c < i->width; c += LANES) {
            int64_t n = i->width - c < LANES ? i->width - c : LANES;

            read_floats(i->type, key, (p * PANEL + u) * i->width + c, n, part);
            for (int64_t j = 0; j < n; j++)
                panel[(c + j) * PANEL + u] = part[j];
        }
}

/* dot[HEADS, PANEL] = q[HEADS, width] panel[width, PANEL]. On its own, because every register is taken: with a caller's
 * constants around it, compilers reload the keys for each head. */
static __attribute__((noinline)) void dot_panel(int64_t width, const float *q, const float *panel, float *dot)
{
    v8 sum[HEADS][VECTORS] = {{{0}}};

    for (int64_t c = 0; c < width; c++) {
        v8 key[VECTORS];

#pragma GCC unroll 3
        for (int v = 0; v < VECTORS; v++) {
            key[v] = V8_CONST(panel + c * PANEL + v * LANES);
            V8_HOLD(key[v]);
        }
#pragma GCC unroll 4
        for (int h = 0; h < HEADS; h++)
#pragma GCC unroll 3
            for (int v = 0; v < VECTORS; v++)
                sum[h][v] += key[v] * q[h * width + c];
    }
#pragma GCC unroll 4
    for (int h = 0; h < HEADS; h++)
#pragma GCC unroll 3
        for (int v = 0; v < VECTORS; v++)
            V8(dot + h * PANEL + v * LANES) = sum[h][v];
}

/* The scores of one query row for the keys of one panel. */
static void score_panel(const struct strip *strip, int64_t width, const float *q, const float *weight,
                        const float *panel, float *scores)
{
    float dot[HEADS * PANEL];
    v8 total[VECTORS] = {{0}};

    for (int64_t h = 0; h < strip->heads; h += HEADS) {
        dot_panel(width, q + h * width, panel, dot);
        for (int j = 0; j < HEADS; j++)
            for (int v = 0; v < VECTORS; v++) { /* relu lets NaN through */
                v8 x = V8(dot + j * PANEL + v * LANES);

                total[v] += weight[h + j] * (v8)((v8i)x & ~(x < 0));
            }
    }
    for (int v = 0; v < VECTORS; v++)
        V8(scores + v * LANES) = total[v];
}

/* Queries and weights of rows t .. t + n - 1 into the strip. */
static void load_rows(const struct indexer *i, const void *q, const float *weight, int64_t t, int64_t n,
                      const struct strip *strip)
{
    int64_t spare = strip->heads - i->heads;

    for (int64_t r = 0; r < n; r++) {
        float *row = strip->q + r * strip->heads * i->width, *w = strip->weight + r * strip->heads;

        read_floats(i->type, q, (t + r) * i->heads * i->width, i->heads * i->width, row);
        memset(row + i->heads * i->width, 0, (size_t)(spare * i->width) * sizeof *row);
        memcpy(w, weight + (t + r) * i->heads, (size_t)i->heads * sizeof *w);
        memset(w + i->heads, 0, (size_t)spare * sizeof *w);
    }
}

/* Scores rows t .. t + n - 1, each for the panels that hold its keys; key u stands at column u - *first. */
static void score_rows(const struct indexer *i, const float *panels, int64_t t, int64_t n, const int32_t *start,
                       const int32_t *end, const struct strip *strip, int64_t *first)
{
    int64_t low = INT64_MAX, high = 0, columns = round_up(i->keys, PANEL);

    for (int64_t r = t; r < t + n; r++)
        if (end[r] - start[r] > i->k) {
            low = start[r] / PANEL < low ? start[r] / PANEL : low;
            high = (end[r] - 1) / PANEL + 1 > high ? (end[r] - 1) / PANEL + 1 : high;
        }
    *first = low < high ? low * PANEL : 0;
    for (int64_t p = low; p < high; p++)
        for (int64_t r = 0; r < n; r++) {
            if (end[t + r] - start[t + r] <= i->k || end[t + r] <= p * PANEL || start[t + r] >= (p + 1) * PANEL)
                continue;
            score_panel(strip, i->width, strip->q + r * strip->heads * i->width, strip->weight + r * strip->heads,
                        panels + p * PANEL * i->width, strip->scores + r * columns + p * PANEL - *first);
        }
}

static void select_rows(const struct indexer *i, int64_t t, int64_t n, const int32_t *start, const int32_t *end,
                        const struct strip *strip, int64_t first, int32_t *selected)
{
    int64_t columns = round_up(i->keys, PANEL);

    for (int64_t r = 0; r < n; r++) {
        int64_t count = end[t + r] - start[t + r];

        if (count <= i->k) /* no score decides anything */
            topk_all(count, start[t + r], i->k, selected + (t + r) * i->k);
        else
            topk_row(strip->scores + r * columns + start[t + r] - first, count, start[t + r], i->k,
                     selected + (t + r) * i->k);
    }
}

void cpu_index_select(struct stream *s, const struct indexer *i, const void *q, const void *key, const float *weight,
                      const int32_t *start, const int32_t *end, int32_t *selected, void *workspace)
{
    struct counted call = count_index_select(s, i);
    float *panels = workspace;
    int64_t panel_count = round_up(i->keys, PANEL) / PANEL;

#pragma omp parallel num_threads(s->threads)
    {
        struct strip strip;
        size_t bytes = strip_layout(i, NULL, &strip);

        strip_layout(i, (char *)workspace + panels_bytes(i) + (size_t)omp_get_thread_num() * bytes, &strip);
#pragma omp for schedule(static)
        for (int64_t p = 0; p < panel_count; p++)
            pack_panel(i, key, p, panels + p * PANEL * i->width);
#pragma omp for schedule(dynamic, 1)
        for (int64_t t = 0; t < i->rows; t += BLOCK) {
            int64_t n = i->rows - t < BLOCK ? i->rows - t : BLOCK, first;

            load_rows(i, q, weight, t, n, &strip);
            score_rows(i, panels, t, n, start, end, &strip, &first);
            select_rows(i, t, n, start, end, &strip, first, selected);
        }
    }
    count_end(call);
}

/* One score, in the order of score_panel. */
static float score(const struct indexer *i, const void *q, const void *key, const float *weight, int64_t t, int64_t u)
{
    float total = 0, a[LANES], b[LANES];

    for (int64_t h = 0; h < i->heads; h++) {
        float dot = 0;

        for (int64_t c = 0; c < i->width; c += LANES) {
            int64_t n = i->width - c < LANES ? i->width - c : LANES;

            read_floats(i->type, q, (t * i->heads + h) * i->width + c, n, a);
            read_floats(i->type, key, u * i->width + c, n, b);
            for (int64_t j = 0; j < n; j++)
                dot += a[j] * b[j];
        }
        total += weight[t * i->heads + h] * (dot < 0 ? 0 : dot);
    }
    return total;
}

void cpu_index_scores(struct stream *s, const struct indexer *i, const void *q, const void *key, const float *weight,
                      const int32_t *start, const int32_t *end, float *scores)
{
    struct counted call = count_index_scores(s, i);

#pragma omp parallel for schedule(dynamic, 4) num_threads(s->threads)
    for (int64_t t = 0; t < i->rows; t++)
        for (int64_t u = 0; u < i->keys; u++)
            scores[t * i->keys + u] = u >= start[t] && u < end[t] ? score(i, q, key, weight, t, u) : -INFINITY;
    count_end(call);
}
