/* FLOPs and bytes of every operation. */
#include "ops/count.h"

#include <time.h>

#include "base/dtype.h"

enum { WORD = 4 }; /* bytes of an fp32 or int32 element */

static double now(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static struct counted count(struct stream *s, const char *operation, double flops, double bytes)
{
    struct counted call = {NULL, 0};

    if (!s->tally) return call;
    call.row = tally_row(s->tally, s->label ? s->label : "", operation);
    call.row->calls++;
    call.row->flops += flops;
    call.row->bytes += bytes;
    if (s->tally->begins) s->tally->begins(s->tally->user, call.row);
    call.began = now();
    return call;
}

void count_end(struct counted call)
{
    if (call.row) call.row->seconds += now() - call.began;
}

static double size(glm52_dtype type)
{
    return (double)dtype_size(type);
}

struct counted count_copy(struct stream *s, size_t bytes)
{
    return count(s, "copy", 0, 2.0 * (double)bytes);
}

struct counted count_zero(struct stream *s, size_t bytes)
{
    return count(s, "zero", 0, (double)bytes);
}

/* ---- dense ---- */

struct counted count_gemm(struct stream *s, const struct gemm *g)
{
    double m = (double)g->m, n = (double)g->n, k = (double)g->k, batch = (double)g->batch;
    double bytes = m * k * size(g->a_type) + k * n * size(g->b_type) + m * n * size(g->c_type) * (g->add ? 2 : 1);

    return count(s, "gemm", 2 * m * n * k * batch, bytes * batch);
}

static struct counted count_grouped(struct stream *s, const char *operation, const struct grouped_gemm *g, double bytes)
{
    return count(s, operation, 2 * (double)g->rows * (double)g->n * (double)g->k, bytes);
}

struct counted count_grouped_gemm_forward(struct stream *s, const struct grouped_gemm *g)
{
    double rows = (double)g->rows, n = (double)g->n, k = (double)g->k;

    return count_grouped(s, "grouped_gemm_forward", g,
                         size(g->type) * (rows * k + rows * n * (g->add ? 2 : 1) + g->groups * n * k));
}

struct counted count_grouped_gemm_backward_rows(struct stream *s, const struct grouped_gemm *g)
{
    double rows = (double)g->rows, n = (double)g->n, k = (double)g->k;

    return count_grouped(s, "grouped_gemm_backward_rows", g,
                         size(g->type) * (rows * n + rows * k * (g->add ? 2 : 1) + g->groups * n * k));
}

struct counted count_grouped_gemm_backward_weight(struct stream *s, const struct grouped_gemm *g)
{
    double rows = (double)g->rows, n = (double)g->n, k = (double)g->k;

    return count_grouped(s, "grouped_gemm_backward_weight", g,
                         size(g->type) * rows * (n + k) + size(g->gradient) * g->groups * n * k * (g->add ? 2 : 1));
}

/* ---- norms ---- */

/* `passes` arrays of rows x width, `vectors` of width, `statistics` per row. */
static struct counted count_norm(struct stream *s, const char *operation, const struct norm *n, int passes, int vectors,
                                 int statistics)
{
    double rows = (double)n->rows, width = (double)n->width;

    return count(s, operation, 0,
                 size(n->type) * rows * width * (passes + (n->add ? 1 : 0)) + vectors * WORD * width +
                     statistics * WORD * rows);
}

struct counted count_rmsnorm_forward(struct stream *s, const struct norm *n)
{
    return count_norm(s, "rmsnorm_forward", n, 2, 1, 1);
}

struct counted count_rmsnorm_backward(struct stream *s, const struct norm *n)
{
    return count_norm(s, "rmsnorm_backward", n, 3, 3, 1);
}

struct counted count_layernorm_forward(struct stream *s, const struct norm *n)
{
    return count_norm(s, "layernorm_forward", n, 2, 2, 2);
}

struct counted count_layernorm_backward(struct stream *s, const struct norm *n)
{
    return count_norm(s, "layernorm_backward", n, 3, 5, 2);
}

/* ---- position and tokens ---- */

struct counted count_rope_table(struct stream *s, int64_t rows, int32_t half)
{
    return count(s, "rope_table", 0, WORD * ((double)rows * (1 + 2 * (double)half) + half));
}

struct counted count_rope(struct stream *s, const struct rope *r)
{
    double pairs = (double)r->rows * r->half;

    return count(s, "rope", 0, pairs * r->heads * 2 * size(r->type) * (r->add ? 3 : 2) + pairs * 2 * WORD);
}

/* `wide` fp32 arrays of all columns and one of the type; `vectors` of rank; each row's statistic and table. */
static struct counted count_latent(struct stream *s, const char *operation, const struct latent *l, int wide,
                                   int vectors)
{
    double rows = (double)l->rows, columns = (double)l->rank + 2 * (double)l->half;

    return count(s, operation, 0,
                 rows * columns * (wide * WORD + size(l->type)) + vectors * WORD * (double)l->rank +
                     WORD * rows * (1 + 2 * (double)l->half));
}

struct counted count_latent_forward(struct stream *s, const struct latent *l)
{
    return count_latent(s, "latent_forward", l, 1, 1);
}

struct counted count_latent_backward(struct stream *s, const struct latent *l)
{
    return count_latent(s, "latent_backward", l, 2, 3);
}

struct counted count_spread_heads(struct stream *s, const struct spread *r)
{
    return count(s, "spread_heads", 0, (double)r->rows * (double)r->width * (1 + r->heads) * size(r->type));
}

struct counted count_sum_heads(struct stream *s, const struct spread *r)
{
    return count(s, "sum_heads", 0, (double)r->rows * (double)r->width * (WORD + r->heads * size(r->type)));
}

struct counted count_multiply(struct stream *s, int64_t elements)
{
    return count(s, "multiply", 0, 3 * WORD * (double)elements);
}

struct counted count_embed_forward(struct stream *s, const struct embed *e)
{
    return count(s, "embed_forward", 0, (double)e->rows * (2 * size(e->type) * (double)e->width + WORD));
}

struct counted count_embed_backward(struct stream *s, const struct embed *e)
{
    return count(s, "embed_backward", 0,
                 (double)e->rows * ((size(e->type) + 2 * size(e->gradient)) * (double)e->width + WORD));
}

/* ---- selection and attention ---- */

static double indexer_inputs(const struct indexer *i)
{
    return size(i->type) * i->width * ((double)i->rows * i->heads + (double)i->keys) +
           WORD * (double)i->rows * (i->heads + 2);
}

struct counted count_index_select(struct stream *s, const struct indexer *i)
{
    return count(s, "index_select", 2 * i->pairs * i->heads * i->width,
                 indexer_inputs(i) + WORD * (double)i->rows * i->k);
}

struct counted count_index_scores(struct stream *s, const struct indexer *i)
{
    return count(s, "index_scores", 2 * i->pairs * i->heads * i->width,
                 indexer_inputs(i) + WORD * (double)i->rows * (double)i->keys);
}

struct counted count_select_topk(struct stream *s, int64_t rows, int64_t keys, int32_t k)
{
    return count(s, "select_topk", 0, WORD * (double)rows * ((double)keys + k + 3));
}

static double attention_rows(const struct sparse_mla *a, double columns)
{
    return size(a->type) * (double)a->rows * a->heads * columns;
}

struct counted count_sparse_mla_forward(struct stream *s, const struct sparse_mla *a)
{
    double key = a->kv_rank + a->rope, rows = (double)a->rows;

    return count(s, "sparse_mla_forward", 2 * a->pairs * a->heads * (2.0 * a->kv_rank + a->rope),
                 attention_rows(a, key + a->kv_rank) + size(a->type) * (double)a->keys * key +
                     WORD * rows * (a->k + a->heads));
}

struct counted count_sparse_mla_backward(struct stream *s, const struct sparse_mla *a, int with_target)
{
    double key = a->kv_rank + a->rope, rows = (double)a->rows;

    return count(s, "sparse_mla_backward", 2 * a->pairs * a->heads * (3 * key + 2.0 * a->kv_rank),
                 attention_rows(a, 2 * key + 2.0 * a->kv_rank) + (size(a->type) + WORD) * (double)a->keys * key +
                     WORD * rows * (a->k * (with_target ? 2.0 : 1.0) + a->heads));
}

struct counted count_sparse_mla_target(struct stream *s, const struct sparse_mla *a)
{
    double key = a->kv_rank + a->rope;

    return count(s, "sparse_mla_target", 2 * a->pairs * a->heads * key,
                 attention_rows(a, key) + size(a->type) * (double)a->keys * key +
                     WORD * (double)a->rows * (2.0 * a->k + a->heads));
}

/* `query` columns of the queries, `key` of the keys, per head. */
static double dense_bytes(const struct dense_attention *a, double query, double key)
{
    return size(a->type) * a->heads * ((double)a->rows * query + (double)a->keys * key) +
           WORD * (double)a->rows * (a->heads + 2.0);
}

struct counted count_dense_attention_forward(struct stream *s, const struct dense_attention *a)
{
    double qk = a->qk, v = a->v;

    return count(s, "dense_attention_forward", 2 * a->pairs * a->heads * (qk + v), dense_bytes(a, qk + v, qk + v));
}

struct counted count_dense_attention_backward(struct stream *s, const struct dense_attention *a)
{
    double qk = a->qk, v = a->v;

    return count(s, "dense_attention_backward", 2 * a->pairs * a->heads * (3 * qk + 2 * v),
                 dense_bytes(a, 2 * (qk + v), 2 * (qk + v)));
}

/* ---- indexer loss ---- */

/* Scores, and gradients of queries and keys. */
static double index_kl_flops(const struct indexer *i)
{
    return 3 * 2 * i->pairs * i->heads * i->width;
}

/* Of what both have: q, key, weight and their gradients, row_weight, kl. */
static double index_kl_bytes(const struct indexer *i)
{
    double rows = (double)i->rows, keys = (double)i->keys, width = i->width;

    return size(i->type) * width * (2 * rows * i->heads + keys) + WORD * (keys * width + 2 * rows * (i->heads + 1.0));
}

struct counted count_index_kl_selected(struct stream *s, const struct indexer *i)
{
    return count(s, "index_kl_selected", index_kl_flops(i), index_kl_bytes(i) + 2 * WORD * (double)i->rows * i->k);
}

struct counted count_index_kl_dense(struct stream *s, const struct indexer *i, const struct teacher *t, int with_lse)
{
    double teacher = (double)i->rows * t->heads + (double)i->keys * t->key_heads, lse = with_lse ? t->heads : 0;

    return count(s, "index_kl_dense", index_kl_flops(i) + 2 * i->pairs * t->heads * t->width,
                 index_kl_bytes(i) + size(i->type) * teacher * t->width + WORD * (double)i->rows * (2 + lse));
}

/* ---- experts ---- */

struct counted count_route_forward(struct stream *s, const struct route *r)
{
    return count(s, "route_forward", 0, WORD * ((double)r->rows * (r->experts + 2.0 * r->k) + r->experts));
}

struct counted count_route_backward(struct stream *s, const struct route *r)
{
    return count(s, "route_backward", 0, WORD * (double)r->rows * 2 * ((double)r->experts + r->k));
}

struct counted count_limit_capacity(struct stream *s, const struct route *r)
{
    return count(s, "limit_capacity", 0, (double)r->rows * r->k * 3 * WORD + 2 * sizeof(double));
}

struct counted count_clear_where_zero(struct stream *s, int64_t elements)
{
    return count(s, "clear_where_zero", 0, 3 * WORD * (double)elements);
}

struct counted count_route_auxiliary(struct stream *s, const struct route_auxiliary *a)
{
    double elements = (double)a->rows * a->experts;

    return count(s, "route_auxiliary", 0, WORD * (3 * elements + a->sequences + 1) + 2 * sizeof(double));
}

struct counted count_count_experts(struct stream *s, const struct route *r, int masked)
{
    return count(s, "count_experts", 0,
                 WORD * (double)r->rows * (r->k + (masked ? 1 : 0)) + 2 * (double)sizeof(double) * r->experts);
}

struct counted count_balance_bias(struct stream *s, int32_t experts)
{
    return count(s, "balance_bias", 0, (double)experts * (sizeof(double) + 2 * WORD));
}

struct counted count_dispatch_sort(struct stream *s, const struct dispatch *d)
{
    return count(s, "dispatch_sort", 0, WORD * ((double)d->rows * d->k * 3 + d->experts + 1));
}

struct counted count_dispatch_spread(struct stream *s, const struct dispatch *d)
{
    double rows = (double)d->rows, width = (double)d->width;

    return count(s, "dispatch_spread", 0, size(d->type) * rows * width * (1.0 + d->k) + WORD * rows * d->k);
}

struct counted count_dispatch_collect(struct stream *s, const struct dispatch *d)
{
    double rows = (double)d->rows, width = (double)d->width;

    return count(s, "dispatch_collect", 0,
                 size(d->type) * rows * width * (1.0 + d->add + d->k) + WORD * rows * d->k);
}

struct counted count_swiglu_forward(struct stream *s, const struct swiglu *g, int weighted)
{
    return count(s, "swiglu_forward", 0,
                 (double)g->rows * (3 * size(g->type) * (double)g->width + (weighted ? 2 * WORD : 0)));
}

struct counted count_swiglu_backward(struct stream *s, const struct swiglu *g, int weighted, int with_act)
{
    return count(s, "swiglu_backward", 0,
                 (double)g->rows * ((with_act ? 6 : 5) * size(g->type) * (double)g->width + (weighted ? 3 * WORD : 0)));
}

/* ---- loss ---- */

/* gradients: none, of the rows, or of rows and weights. */
struct counted count_head_loss(struct stream *s, const struct head *h, int hits, int gradients)
{
    double rows = (double)h->rows, width = (double)h->width, vocabulary = (double)h->vocabulary;
    double bytes = size(h->type) * width * (rows + vocabulary) + (hits ? 3 : 2) * WORD * rows;

    if (gradients) bytes += size(h->type) * rows * width + WORD * rows;
    if (gradients > 1) bytes += 2 * size(h->gradient) * vocabulary * width;
    return count(s, "head_loss", 2 * rows * width * vocabulary * (1 + gradients), bytes);
}

/* of_trunk: gradients as in head_loss; of_drafts: whether theirs are wanted. */
struct counted count_head_tv(struct stream *s, const struct head_tv *h, int of_trunk, int of_drafts)
{
    double rows = (double)h->rows, width = (double)h->width, vocabulary = (double)h->vocabulary, depths = h->depths;
    double bytes = size(h->type) * width * (rows * (1 + depths) + vocabulary) + WORD * rows * (4 + depths);

    if (of_trunk) bytes += size(h->type) * rows * width + WORD * rows;
    if (of_trunk > 1) bytes += 2 * size(h->gradient) * vocabulary * width;
    if (of_drafts) bytes += size(h->type) * width * rows * depths;
    return count(s, "head_tv", 2 * rows * width * vocabulary * (1 + of_trunk + depths * (of_drafts ? 2 : 1)), bytes);
}

/* ---- arithmetic and update ---- */

struct counted count_add(struct stream *s, int64_t elements, glm52_dtype type)
{
    return count(s, "add", 0, 3 * size(type) * (double)elements);
}

struct counted count_convert(struct stream *s, int64_t elements, glm52_dtype from, glm52_dtype to)
{
    return count(s, "convert", 0, (size(from) + size(to)) * (double)elements);
}

/* Of codes and scales. */
static double quantised_bytes(const struct quantised *q, int64_t rows, int64_t width)
{
    const int packed = q->format >= NVFP4, narrow = q->format >= MXFP8;
    int64_t down = (rows + q->block_rows - 1) / q->block_rows,
            across = (width + q->block_columns - 1) / q->block_columns;

    return (double)rows * (double)width / (packed ? 2 : 1) + (double)(down * across) * (narrow ? 1 : WORD);
}

struct counted count_quantise(struct stream *s, const struct quantised *q, int transposed_too)
{
    double bytes = (double)q->rows * (double)q->width * size(q->type) + quantised_bytes(q, q->rows, q->width);

    if (transposed_too) bytes += quantised_bytes(q, q->width, q->rows);
    return count(s, "quantise", 0, bytes);
}

struct counted count_dequantise(struct stream *s, const struct quantised *q)
{
    double bytes = (double)q->rows * (double)q->width * size(q->type) + quantised_bytes(q, q->rows, q->width);

    return count(s, "dequantise", 0, bytes);
}

struct counted count_sum(struct stream *s, int64_t elements, int weighted)
{
    return count(s, "sum", 0, WORD * (double)elements * (weighted ? 2 : 1));
}

struct counted count_sum_squares(struct stream *s, int64_t elements, glm52_dtype type)
{
    return count(s, "sum_squares", 0, size(type) * (double)elements);
}

struct counted count_clip(struct stream *s)
{
    return count(s, "clip", 0, sizeof(double) + 2 * WORD);
}

struct counted count_guard(struct stream *s, const struct guard *g)
{
    int32_t sums = 0;

    for (int32_t i = 0; i < g->parts; i++) sums += g->count[i];
    return count(s, "guard", 0, (sums + 2) * (double)sizeof(double) + 3 * WORD);
}

struct counted count_adamw(struct stream *s, const struct adamw *a, int with_master)
{
    double parameter = with_master ? 2 * WORD + size(a->type) : 2 * size(a->type);

    return count(s, "adamw", 0, (double)a->count * (size(a->gradient) + 4 * size(a->moments) + parameter));
}

/* With m the shorter side, an iteration is X X^T, A A and B X; symmetry is not counted. */
struct counted count_muon(struct stream *s, const struct muon *u, int with_master)
{
    double rows = (double)u->rows, columns = (double)u->columns, batch = (double)u->batch;
    double m = rows < columns ? rows : columns, n = rows < columns ? columns : rows;
    double parameter = with_master ? 2 * WORD + size(u->type) : 2 * size(u->type);

    return count(s, "muon", u->steps * (4 * m * m * n + 2 * m * m * m) * batch,
                 batch * rows * columns * (size(u->gradient) + 2 * size(u->moments) + parameter));
}
