/* Indexer loss over selected keys (training.md 1.4). With d[h,u] = q[h] . key[u], score[u] = sum_h weight[h] *
 * relu(d[h,u]) and g = row_weight * (softmax(score) - target):
 *     c[h,u] = g[u] weight[h] [d[h,u] > 0],  dq[h] = sum_u c[h,u] key[u],  dkey[u] += sum_h c[h,u] q[h],
 *     dweight[h] = sum_u g[u] relu(d[h,u]).
 * These are the products of sparse attention, with one value per head instead of a softmax. */
#include <omp.h>

#include "ops/count.h"
#include "ops/cpu/cpu.h"
#include "ops/cpu/index_kl.h"
#include "ops/cpu/sparse_mla.h"

struct scratch {
    const float **key;     /* [slots] */
    float *row;            /* [heads, width], q as it comes */
    float *q;              /* [heads, columns] */
    float *query;          /* [columns, lanes] */
    float *dot;            /* [slots, lanes] d, then c */
    float *weight;         /* [lanes] */
    float *dweight;        /* [lanes] */
    float *score, *slope;  /* [k] */
    float *dq;             /* [lanes, columns] */
};

struct arguments {
    const struct indexer *i;
    const void *q;
    const float *weight;
    const int32_t *selected;
    const float *target, *row_weight;
    float *kl;
    void *dq;
    float *dweight;
};

/* The indexer as an attention, which is how the shared products want it. */
static struct sparse_mla attention_of(const struct indexer *i)
{
    return (struct sparse_mla){.rows = i->rows, .keys = i->keys, .heads = i->heads, .kv_rank = i->width, .k = i->k,
                               .type = i->type};
}

static size_t scratch_layout(const struct sparse_mla *a, const struct padded *p, char *base, struct scratch *scratch)
{
    size_t used = 0;

    scratch->key = carve(base, &used, (size_t)p->slots * sizeof *scratch->key);
    scratch->row = carve_floats(base, &used, a->heads * p->width);
    scratch->q = carve_floats(base, &used, a->heads * p->columns);
    scratch->query = carve_floats(base, &used, p->columns * p->lanes);
    scratch->dot = carve_floats(base, &used, p->slots * p->lanes);
    scratch->weight = carve_floats(base, &used, p->lanes);
    scratch->dweight = carve_floats(base, &used, p->lanes);
    scratch->score = carve_floats(base, &used, a->k);
    scratch->slope = carve_floats(base, &used, a->k);
    scratch->dq = carve_floats(base, &used, p->lanes * p->columns);
    return used;
}

/* The padded keys, and the groups' shares of dkey [groups, keys, columns]. */
static size_t shared_layout(const struct sparse_mla *a, const struct padded *p, char *base, float **key, float **share)
{
    size_t used = 0;

    *key = p->in_place ? NULL : carve_floats(base, &used, a->keys * p->columns);
    *share = carve_floats(base, &used, group_count(a->rows) * a->keys * p->columns);
    return used;
}

size_t cpu_index_kl_selected_bytes(struct stream *s, const struct indexer *i)
{
    struct sparse_mla a = attention_of(i);
    struct padded p = padded_shape(&a);
    struct scratch scratch;
    float *key, *share;

    return shared_layout(&a, &p, NULL, &key, &share) + (size_t)s->threads * scratch_layout(&a, &p, NULL, &scratch);
}

static v8 relu(v8 x)
{
    return (v8)((v8i)x & (x > 0));
}

static void scores(const struct padded *p, int64_t n, const struct scratch *scratch)
{
    for (int64_t u = 0; u < n; u++) {
        v8 sum = {0};

        for (int64_t l = 0; l < p->lanes; l += LANES)
            sum += V8_CONST(scratch->weight + l) * relu(V8_CONST(scratch->dot + u * p->lanes + l));
        scratch->score[u] = lanes_sum(sum);
    }
}

/* dweight, and c in the place of d. */
static void dot_gradients(const struct padded *p, int64_t n, const struct scratch *scratch)
{
    for (int64_t l = 0; l < p->lanes; l += LANES) {
        v8 sum = {0}, weight = V8_CONST(scratch->weight + l);

        for (int64_t u = 0; u < n; u++) {
            v8 *d = &V8(scratch->dot + u * p->lanes + l), c = weight * scratch->slope[u];

            sum += relu(*d) * scratch->slope[u];
            *d = (v8)((v8i)c & (*d > 0));
        }
        V8(scratch->dweight + l) = sum;
    }
}

/* The same where i->open has the last word on what each relu lets through, or is told. */
static void sided_gradients(const struct indexer *i, const struct padded *p, int64_t n, const struct scratch *scratch,
                            int64_t t)
{
    memset(scratch->dweight, 0, (size_t)p->lanes * sizeof(float));
    for (int64_t h = 0; h < i->heads; h++) {
        int32_t *open = i->open + (t * i->heads + h) * i->k;

        for (int64_t u = 0; u < n; u++) {
            float *d = scratch->dot + u * p->lanes + h;

            if (i->sides == 1) open[u] = *d > 0;
            scratch->dweight[h] += *d > 0 ? *d * scratch->slope[u] : 0;
            *d = open[u] ? scratch->weight[h] * scratch->slope[u] : 0;
        }
    }
}

/* Two keys' rows (or one twice) += their coefficients times the queries, from column c on. */
ALWAYS_INLINE void add_queries(const float *q, int64_t heads, int64_t columns, const float *a, const float *b,
                               float *to_a, float *to_b, int64_t c, const int vectors)
{
    v8 sum[2][4];

#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) {
        sum[0][v] = V8(to_a + c + v * LANES);
        sum[1][v] = V8(to_b + c + v * LANES);
    }
    for (int64_t h = 0; h < heads; h++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            sum[0][v] += V8_CONST(q + h * columns + c + v * LANES) * a[h];
            sum[1][v] += V8_CONST(q + h * columns + c + v * LANES) * b[h];
        }
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) {
        V8(to_b + c + v * LANES) = sum[1][v]; /* b first: where both are one key, they are equal */
        V8(to_a + c + v * LANES) = sum[0][v];
    }
}

static void add_to_keys(const struct padded *p, int64_t heads, int64_t n, const int32_t *selected,
                        const struct scratch *scratch, float *share)
{
    for (int64_t u = 0; u < n; u += 2) {
        int64_t other = u + 1 < n ? u + 1 : u, c = 0;
        const float *a = scratch->dot + u * p->lanes, *b = scratch->dot + other * p->lanes;
        float *to_a = share + selected[u] * p->columns, *to_b = share + selected[other] * p->columns;

        for (; c + 4 * LANES <= p->columns; c += 4 * LANES)
            add_queries(scratch->q, heads, p->columns, a, b, to_a, to_b, c, 4);
        for (; c < p->columns; c += LANES) add_queries(scratch->q, heads, p->columns, a, b, to_a, to_b, c, 1);
    }
}

static void load_row(const struct sparse_mla *a, const struct padded *p, const struct arguments *x,
                     const struct scratch *scratch, int64_t t)
{
    read_floats(a->type, x->q, t * a->heads * p->width, a->heads * p->width, scratch->row);
    transpose_heads(p, a->heads, p->width, 1, scratch->row, scratch->query);
    for (int64_t h = 0; h < a->heads; h++) {
        memcpy(scratch->q + h * p->columns, scratch->row + h * p->width, (size_t)p->width * sizeof(float));
        memset(scratch->q + h * p->columns + p->width, 0, (size_t)(p->columns - p->width) * sizeof(float));
    }
    memset(scratch->weight, 0, (size_t)p->lanes * sizeof(float));
    memcpy(scratch->weight, x->weight + t * a->heads, (size_t)a->heads * sizeof(float));
}

static void learn_row(const struct sparse_mla *a, const struct padded *p, const struct arguments *x, const float *key,
                      const struct scratch *scratch, int64_t t, float *share)
{
    const int32_t *selected = x->selected + t * a->k;
    int64_t n = find_keys(p, a->k, key, selected, scratch->key);
    float row_weight = x->row_weight[t];

    x->kl[t] = 0;
    if (n > 0) {
        load_row(a, p, x, scratch, t);
        keys_times_query(p, scratch->key, n, p->columns, scratch->query, scratch->dot);
        scores(p, n, scratch);
        x->kl[t] = kl_row(scratch->score, x->target + t * a->k, n, row_weight, scratch->slope);
    }
    if (n > 0 && row_weight != 0) {
        if (x->i->sides)
            sided_gradients(x->i, p, n, scratch, t);
        else
            dot_gradients(p, n, scratch);
        weigh_keys(p, scratch->key, n, a->heads, scratch->dot, p->lanes, p->columns, scratch->dq);
        add_to_keys(p, a->heads, n, selected, scratch, share);
    } else {
        memset(scratch->dweight, 0, (size_t)p->lanes * sizeof(float));
        memset(scratch->dq, 0, (size_t)(p->lanes * p->columns) * sizeof(float));
    }
    for (int64_t h = 0; h < a->heads; h++)
        write_floats(a->type, x->dq, (t * a->heads + h) * p->width, p->width, scratch->dq + h * p->columns);
    memcpy(x->dweight + t * a->heads, scratch->dweight, (size_t)a->heads * sizeof(float));
}

void cpu_index_kl_selected(struct stream *s, const struct indexer *i, const void *q, const void *key,
                           const float *weight, const int32_t *selected, const float *target, const float *row_weight,
                           float *kl, void *dq, float *dkey, float *dweight, void *workspace)
{
    struct counted call = count_index_kl_selected(s, i);
    struct arguments x = {i, q, weight, selected, target, row_weight, kl, dq, dweight};
    struct sparse_mla a = attention_of(i);
    struct padded p = padded_shape(&a);
    int64_t groups = group_count(a.rows), size = a.keys * p.columns;
    float *copy, *share;
    size_t used = shared_layout(&a, &p, workspace, &copy, &share);

#pragma omp parallel num_threads(s->threads)
    {
        struct scratch scratch;
        size_t bytes = scratch_layout(&a, &p, NULL, &scratch);

        scratch_layout(&a, &p, (char *)workspace + used + (size_t)omp_get_thread_num() * bytes, &scratch);
        const float *keys = pad_latent(&a, &p, key, copy);
#pragma omp for schedule(dynamic, 1)
        for (int64_t g = 0; g < groups; g++) {
            memset(share + g * size, 0, (size_t)size * sizeof *share);
            for (int64_t t = g; t < a.rows; t += groups)
                learn_row(&a, &p, &x, keys, &scratch, t, share + g * size);
        }
        add_groups(groups, a.keys, p.width, p.columns, share, dkey);
    }
    count_end(call);
}
