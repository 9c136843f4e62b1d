/* Sparse MLA attention, forward (model.md 2.2, absorbed form): per row the logits of the selected keys, softmax in
 * fp32, and the weighted sum of their latents. Rows run in parallel, each in one fixed order of operations. */
#include <math.h>
#include <omp.h>

#include "ops/count.h"
#include "ops/cpu/cpu.h"
#include "ops/cpu/expf.h"
#include "ops/cpu/sparse_mla.h"

struct scratch {
    struct row_scratch row; /* dot: logits, then probabilities */
    float *out;             /* [lanes, columns] */
};

static size_t scratch_layout(const struct sparse_mla *a, const struct padded *p, char *base, struct scratch *scratch)
{
    size_t used = 0;

    row_layout(a, p, base, &used, &scratch->row);
    scratch->out = carve_floats(base, &used, p->lanes * p->columns);
    return used;
}

size_t cpu_sparse_mla_forward_bytes(struct stream *s, const struct sparse_mla *a)
{
    struct padded p = padded_shape(a);
    struct scratch scratch;

    return latent_bytes(a, &p) + (size_t)s->threads * scratch_layout(a, &p, NULL, &scratch);
}

/* Softmax over the n keys of each lane, in place; lse of the first `heads` lanes. */
static void softmax(const struct padded *p, int64_t n, int64_t heads, float *weight, float *lse)
{
    for (int64_t l = 0; l < p->lanes; l += LANES) {
        v8 largest = V8(weight + l);

        for (int64_t i = 1; i < n; i++) {
            v8 x = V8(weight + i * p->lanes + l);
            v8i rises = x > largest;

            largest = (v8)(((v8i)x & rises) | ((v8i)largest & ~rises));
        }
        for (int64_t i = 0; i < n; i++)
            V8(weight + i * p->lanes + l) -= largest;
        for (int64_t h = l; h < heads && h < l + LANES; h++)
            lse[h] = largest[h - l];
    }
    exp_array(weight, n * p->lanes);
    for (int64_t l = 0; l < p->lanes; l += LANES) {
        v8 sum = {0};

        for (int64_t i = 0; i < n; i++)
            sum += V8(weight + i * p->lanes + l);
        for (int64_t i = 0; i < n; i++)
            V8(weight + i * p->lanes + l) /= sum;
        for (int64_t h = l; h < heads && h < l + LANES; h++)
            lse[h] += logf(sum[h - l]);
    }
}

static void attend_row(const struct sparse_mla *a, const struct padded *p, const void *q, const float *kv,
                       const int32_t *selected, void *out, float *lse, const struct scratch *scratch, int64_t t)
{
    int64_t n = find_keys(p, a->k, kv, selected + t * a->k, scratch->row.key);
    float *weight = scratch->row.dot;

    if (n == 0) {
        memset(scratch->out, 0, (size_t)(a->heads * p->columns) * sizeof(float));
        for (int64_t h = 0; h < a->heads; h++)
            lse[t * a->heads + h] = INFINITY;
    } else {
        row_logits(a, p, q, t, n, &scratch->row);
        softmax(p, n, a->heads, weight, lse + t * a->heads);
        weigh_keys(p, scratch->row.key, n, a->heads, weight, p->lanes, round_up(a->kv_rank, LANES), scratch->out);
    }
    for (int64_t h = 0; h < a->heads; h++)
        write_floats(a->type, out, (t * a->heads + h) * a->kv_rank, a->kv_rank, scratch->out + h * p->columns);
}

void cpu_sparse_mla_forward(struct stream *s, const struct sparse_mla *a, const void *q, const void *kv,
                            const int32_t *selected, void *out, float *lse, void *workspace)
{
    struct counted call = count_sparse_mla_forward(s, a);
    struct padded p = padded_shape(a);

#pragma omp parallel num_threads(s->threads)
    {
        struct scratch scratch;
        size_t bytes = scratch_layout(a, &p, NULL, &scratch);
        const float *latent = pad_latent(a, &p, kv, workspace);

        scratch_layout(a, &p, (char *)workspace + latent_bytes(a, &p) + (size_t)omp_get_thread_num() * bytes, &scratch);
#pragma omp for schedule(dynamic, 4)
        for (int64_t t = 0; t < a->rows; t++)
            attend_row(a, &p, q, latent, selected, out, lse, &scratch, t);
    }
    count_end(call);
}
