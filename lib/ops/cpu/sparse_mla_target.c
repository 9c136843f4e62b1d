/* What sparse MLA attention teaches the indexer: per row the mean over heads of each selected key's probability,
 * exp(logit - lse) with the lse that forward left. The same arithmetic as in backward, hence the same bits. */
#include <omp.h>

#include "ops/count.h"
#include "ops/cpu/cpu.h"
#include "ops/cpu/sparse_mla.h"

struct scratch {
    struct row_scratch row; /* dot: logits, then probabilities */
    float *lse;             /* [lanes] */
};

static size_t scratch_layout(const struct sparse_mla *a, const struct padded *p, char *base, struct scratch *scratch)
{
    size_t used = 0;

    row_layout(a, p, base, &used, &scratch->row);
    scratch->lse = carve_floats(base, &used, p->lanes);
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
    int64_t n = find_keys(p, a->k, kv, selected + t * a->k, scratch->row.key);

    if (n > 0) {
        row_logits(a, p, q, t, n, &scratch->row);
        row_probabilities(a, p, lse, t, n, &scratch->row, scratch->lse);
    }
    mean_over_heads(a, p, n, scratch->row.dot, target + t * a->k);
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
        const float *latent = pad_latent(a, &p, kv, workspace);

        scratch_layout(a, &p, (char *)workspace + latent_bytes(a, &p) + (size_t)omp_get_thread_num() * bytes, &scratch);
#pragma omp for schedule(dynamic, 4)
        for (int64_t t = 0; t < a->rows; t++)
            target_row(a, &p, q, latent, selected, lse, target, &scratch, t);
    }
    count_end(call);
}
