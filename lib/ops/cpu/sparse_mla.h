/* What forward, backward and target of sparse MLA attention share: the padded view of a call, the three small products
 * that all of it is made of, and a row's logits and probabilities. Each product takes a query's keys as pointers to
 * their rows of the latent array, so that nothing is gathered; each sums in one fixed order. */
#ifndef GLM52_OPS_CPU_SPARSE_MLA_H
#define GLM52_OPS_CPU_SPARSE_MLA_H

#include <math.h>

#include "ops/cpu/expf.h"
#include "ops/cpu/vector.h"
#include "ops/ops.h"

enum { KEYS = 12 }; /* of one trip of keys_times_query: as many sums as registers allow */

/* Columns are padded to whole vectors, heads to whole vectors of lanes; what is added is 0. */
struct padded {
    int64_t width, columns; /* kv_rank + rope, and padded */
    int64_t lanes;          /* heads padded */
    int64_t slots;          /* k, rounded up to KEYS */
    int in_place;           /* the latent array of the call serves as it is */
};

static inline struct padded padded_shape(const struct sparse_mla *a)
{
    struct padded p = {.width = a->kv_rank + a->rope};

    p.columns = round_up(p.width, LANES);
    p.lanes = round_up(a->heads, LANES);
    p.slots = round_up(a->k, KEYS);
    p.in_place = a->type == GLM52_DTYPE_F32 && p.width == p.columns;
    return p;
}

/* Of the latent array's padded copy; 0 where it serves as it is. */
static inline size_t latent_bytes(const struct sparse_mla *a, const struct padded *p)
{
    size_t used = 0;

    if (!p->in_place)
        carve_floats(NULL, &used, a->keys * p->columns);
    return used;
}

/* The latent array in fp32 with padded rows: its copy at `to`, or itself. For use in a parallel region; ends with a
 * barrier if it copies. */
static inline const float *pad_latent(const struct sparse_mla *a, const struct padded *p, const void *kv, float *to)
{
    if (p->in_place) return kv;
#pragma omp for schedule(static)
    for (int64_t u = 0; u < a->keys; u++) {
        read_floats(a->type, kv, u * p->width, p->width, to + u * p->columns);
        memset(to + u * p->columns + p->width, 0, (size_t)(p->columns - p->width) * sizeof *to);
    }
    return to;
}

/* The rows of a query's keys; returns their number. Slots up to the next multiple of KEYS repeat the first. */
static inline int64_t find_keys(const struct padded *p, int32_t k, const float *kv, const int32_t *selected,
                                const float **key)
{
    int64_t n = 0, filled;

    for (; n < k && selected[n] >= 0; n++)
        key[n] = kv + selected[n] * p->columns;
    for (filled = n; filled < round_up(n, KEYS); filled++)
        key[filled] = key[0];
    return n;
}

/* to[columns, lanes] = scale * from[heads, count]^T, 0 elsewhere. */
static inline void transpose_heads(const struct padded *p, int64_t heads, int64_t count, float scale, const float *from,
                                   float *to)
{
    memset(to, 0, (size_t)(p->columns * p->lanes) * sizeof *to);
    for (int64_t h = 0; h < heads; h++)
        for (int64_t c = 0; c < count; c++)
            to[c * p->lanes + h] = scale * from[h * count + c];
}

/* ---- dot[n, lanes] = key[n, columns] query[columns, lanes] ---- */

ALWAYS_INLINE void keys_times_query_block(const float *const *key, const float *query, int64_t lanes, int64_t columns,
                                          float *dot, const int keys, const int vectors)
{
    v8 sum[KEYS] = {{0}};

    for (int64_t c = 0; c < columns; c += LANES)
#pragma GCC unroll 8
        for (int d = 0; d < LANES; d++) /* so that a pointer that found no register is read once for all of these */
#pragma GCC unroll 12
            for (int i = 0; i < keys; i++)
#pragma GCC unroll 2
                for (int v = 0; v < vectors; v++)
                    sum[i * vectors + v] += V8_CONST(query + (c + d) * lanes + v * LANES) * key[i][c + d];
#pragma GCC unroll 12
    for (int i = 0; i < keys; i++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++)
            V8(dot + i * lanes + v * LANES) = sum[i * vectors + v];
}

/* n is rounded up to KEYS. columns: as many as matter, in whole vectors. */
static inline void keys_times_query(const struct padded *p, const float *const *key, int64_t n, int64_t columns,
                                    const float *query, float *dot)
{
    for (int64_t i = 0; i < n; i += KEYS) {
        int64_t l = 0;

        for (; l + 2 * LANES <= p->lanes; l += 2 * LANES) {
            keys_times_query_block(key + i, query + l, p->lanes, columns, dot + i * p->lanes + l, KEYS / 2, 2);
            keys_times_query_block(key + i + KEYS / 2, query + l, p->lanes, columns,
                                   dot + (i + KEYS / 2) * p->lanes + l, KEYS / 2, 2);
        }
        if (l < p->lanes)
            keys_times_query_block(key + i, query + l, p->lanes, columns, dot + i * p->lanes + l, KEYS, 1);
    }
}

/* dot[n, lanes] becomes exp(dot - lse). Lanes without a head have lse = +inf. */
static inline void logits_to_probabilities(const struct padded *p, int64_t n, const float *lse, float *dot)
{
    for (int64_t i = 0; i < n; i++)
        for (int64_t l = 0; l < p->lanes; l += LANES)
            V8(dot + i * p->lanes + l) -= V8_CONST(lse + l);
    exp_array(dot, n * p->lanes);
}

/* ---- the logits of a row ---- */

/* A thread's memory for one row at a time. */
struct row_scratch {
    const float **key; /* [slots] */
    float *input;      /* [heads, width], as it comes */
    float *query;      /* [columns, lanes] of q, then of what else meets the keys */
    float *dot;        /* [slots, lanes] of the keys with it */
};

static inline void row_layout(const struct sparse_mla *a, const struct padded *p, char *base, size_t *used,
                              struct row_scratch *s)
{
    s->key = carve(base, used, (size_t)p->slots * sizeof *s->key);
    s->input = carve_floats(base, used, a->heads * p->width);
    s->query = carve_floats(base, used, p->columns * p->lanes);
    s->dot = carve_floats(base, used, p->slots * p->lanes);
}

/* Logits of row t with its n keys, which find_keys has found, into s->dot; s->input is the row of q. */
static inline void row_logits(const struct sparse_mla *a, const struct padded *p, const void *q, int64_t t, int64_t n,
                              const struct row_scratch *s)
{
    read_floats(a->type, q, t * a->heads * p->width, a->heads * p->width, s->input);
    transpose_heads(p, a->heads, p->width, a->scale, s->input, s->query);
    keys_times_query(p, s->key, n, p->columns, s->query, s->dot);
}

/* Logits become probabilities, by the lse [rows, heads] that forward left; lanes: [lanes], for the row's own. */
static inline void row_probabilities(const struct sparse_mla *a, const struct padded *p, const float *lse, int64_t t,
                                     int64_t n, const struct row_scratch *s, float *lanes)
{
    for (int64_t l = 0; l < p->lanes; l++)
        lanes[l] = l < a->heads ? lse[t * a->heads + l] : INFINITY;
    logits_to_probabilities(p, n, lanes, s->dot);
}

/* target[k]: the mean over heads of the n keys' probabilities [n, lanes], then 0. */
static inline void mean_over_heads(const struct sparse_mla *a, const struct padded *p, int64_t n,
                                   const float *probability, float *target)
{
    for (int64_t i = 0; i < n; i++) {
        float sum = 0;

        for (int64_t h = 0; h < a->heads; h++)
            sum += probability[i * p->lanes + h];
        target[i] = sum / (float)a->heads;
    }
    for (int64_t i = n; i < a->k; i++)
        target[i] = 0;
}

/* ---- sum[lanes, columns] = coefficient[n, lanes]^T key[n, columns] ---- */

ALWAYS_INLINE void weigh_keys_block(const float *const *key, int64_t n, const float *coefficient, int64_t stride,
                                    int64_t c, int64_t columns, float *to, const int vectors)
{
    v8 sum[4][3] = {{{0}}};

    for (int64_t i = 0; i < n; i++) {
        v8 row[3];

#pragma GCC unroll 3
        for (int v = 0; v < vectors; v++) {
            row[v] = V8_CONST(key[i] + c + v * LANES);
            V8_HOLD(row[v]);
        }
#pragma GCC unroll 4
        for (int h = 0; h < 4; h++)
#pragma GCC unroll 3
            for (int v = 0; v < vectors; v++)
                sum[h][v] += row[v] * coefficient[i * stride + h];
    }
#pragma GCC unroll 4
    for (int h = 0; h < 4; h++)
#pragma GCC unroll 3
        for (int v = 0; v < vectors; v++)
            V8(to + h * columns + c + v * LANES) = sum[h][v];
}

/* count: columns that matter, in whole vectors. Rows of `to` are p->columns apart; heads are done four at a time. */
static inline void weigh_keys(const struct padded *p, const float *const *key, int64_t n, int64_t heads,
                              const float *coefficient, int64_t stride, int64_t count, float *to)
{
    int64_t c = 0;

    for (; c + 3 * LANES <= count; c += 3 * LANES)
        for (int64_t h = 0; h < heads; h += 4)
            weigh_keys_block(key, n, coefficient + h, stride, c, p->columns, to + h * p->columns, 3);
    for (; c < count; c += LANES)
        for (int64_t h = 0; h < heads; h += 4)
            weigh_keys_block(key, n, coefficient + h, stride, c, p->columns, to + h * p->columns, 1);
}

#endif
