/* What sparse MLA attention teaches the indexer: per row the mean over heads of each selected key's probability,
 * exp(logit - lse) with the lse that forward left. The same arithmetic as in backward, hence the same bits. */
#include <math.h>
#include <omp.h>

#include "ops/count.h"
#include "ops/cpu/cpu.h"
#include "ops/cpu/sparse_mla.h"

struct scratch {
    const float **key; /* [slots] */
    float *row;        /* [heads, width], q as it comes */
    float *query;      /* [columns, lanes] */
    float *dot;        /* [slots, lanes] logits, then probabilities */
    float *lse;        /* [lanes] */
};

static size_t scratch_layout(const struct sparse_mla *a, const struct padded *p, char *base, struct scratch *scratch)
{
    size_t used = 0;

    scratch->key = carve(base, &used, (size_t)p->slots * sizeof *scratch->key);
    scratch->row = carve_floats(base, &used, a->heads * p->width);
    scratch->query = carve_floats(base, &used, p->columns * p->lanes);
    scratch->dot = carve_floats(base, &used, p->slots * p->lanes);
    scratch->lse = carve_floats(base, &used, p->lanes);
    return used;
}

static size_t latent_bytes(const struct sparse_mla *a, const struct padded *p)
{
    size_t used = 0;

    if (!p->in_place)
        carve_floats(NULL, &used, a->keys * p->columns);
    return used;
}

size_t cpu_sparse_mla_target_bytes(struct stream *s, const struct sparse_mla *a)
{
    struct padded p = padded_shape(a);
    struct scratch scratch;

    return latent_bytes(a, &p) + (size_t)s->threads * scratch_layout(a, &p, NULL, &scratch);
}

static void target_row(const struct sparse_mla *a, const struct padded *p, const void *q, const float *kv,
                       const int32_t *selected, const float *lse, float *target, const struct scratch *scratch,
                       int64_t t)
{
    int64_t n = find_keys(p, a->k, kv, selected + t * a->k, scratch->key);

    if (n > 0) {
        read_floats(a->type, q, t * a->heads * p->width, a->heads * p->width, scratch->row);
        transpose_heads(p, a->heads, p->width, a->scale, scratch->row, scratch->query);
        keys_times_query(p, scratch->key, n, p->columns, scratch->query, scratch->dot);
        for (int64_t l = 0; l < p->lanes; l++)
            scratch->lse[l] = l < a->heads ? lse[t * a->heads + l] : INFINITY;
        logits_to_probabilities(p, n, scratch->lse, scratch->dot);
    }
    mean_over_heads(a, p, n, scratch->dot, target + t * a->k);
}

void cpu_sparse_mla_target(struct stream *s, const struct sparse_mla *a, const void *q, const void *kv,
                           const int32_t *selected, const float *lse, float *target, void *workspace)
{
    struct counted call = count_sparse_mla_target(s, a);
    struct padded p = padded_shape(a);

#pragma omp parallel num_threads(s->threads)
    {
        struct scratch scratch;
        size_t bytes = scratch_layout(a, &p, NULL, &scratch);
        const float *latent = p.in_place ? kv : workspace;

        scratch_layout(a, &p, (char *)workspace + latent_bytes(a, &p) + (size_t)omp_get_thread_num() * bytes, &scratch);
        if (!p.in_place)
            pad_latent(a, &p, kv, workspace);
#pragma omp for schedule(dynamic, 4)
        for (int64_t t = 0; t < a->rows; t++)
            target_row(a, &p, q, latent, selected, lse, target, &scratch, t);
    }
    count_end(call);
}
