/* The attention of an MLA part. Sparse: absorbed, one shared key row of latent and rotary part, the per-head
 * up-projections act on queries and outputs. Dense: keys and values of every head in full. */
#include <math.h>

#include "base/dtype.h"
#include "model/parts.h"

static int64_t qk_width(const struct mla *m)
{
    return m->c->qk_nope_head_dim + m->c->qk_rope_head_dim;
}

static int64_t kv_width(const struct mla *m)
{
    return m->c->kv_lora_rank + m->c->qk_rope_head_dim;
}

/* Rows of kv_b per head. */
static int64_t up_rows(const struct mla *m)
{
    return m->c->qk_nope_head_dim + m->c->v_head_dim;
}

struct sparse_mla attention_shape(const struct mla *m, int64_t rows, double pairs)
{
    return (struct sparse_mla){.rows = rows, .keys = rows, .heads = (int32_t)m->c->num_attention_heads,
                               .kv_rank = (int32_t)m->c->kv_lora_rank, .rope = (int32_t)m->c->qk_rope_head_dim,
                               .k = (int32_t)m->c->index_topk, .scale = (float)(1 / sqrt((double)qk_width(m))),
                               .fast = m->fast, .type = m->type, .pairs = pairs};
}

static struct dense_attention dense_shape(const struct mla *m, int64_t rows, double pairs)
{
    return (struct dense_attention){.rows = rows, .keys = rows, .heads = (int32_t)m->c->num_attention_heads,
                                    .qk = (int32_t)qk_width(m), .v = (int32_t)m->c->v_head_dim,
                                    .scale = (float)(1 / sqrt((double)qk_width(m))), .fast = m->fast, .type = m->type,
                                    .pairs = pairs};
}

static size_t most(size_t a, size_t b)
{
    return a > b ? a : b;
}

void attention_plan(struct mla *m, struct stream *s, struct plan *p)
{
    int64_t heads = m->c->num_attention_heads, kv = kv_width(m);

    if (m->dense) {
        struct dense_attention shape = dense_shape(m, p->rows, 0);
        plan_save(p, &m->slots.key, m->type, p->rows, heads * qk_width(m));
        plan_save(p, &m->slots.value, m->type, p->rows, heads * m->c->v_head_dim);
        plan_temp_bytes(p, &m->slots.attention_workspace, most(s->ops->dense_attention_forward_bytes(s, &shape),
                                                               s->ops->dense_attention_backward_bytes(s, &shape)));
        plan_temp(p, &m->slots.dkey, m->type, p->rows, heads * qk_width(m));
        plan_temp(p, &m->slots.dvalue, m->type, p->rows, heads * m->c->v_head_dim);
        return;
    }
    struct sparse_mla shape = attention_shape(m, p->rows, 0);
    plan_renew(p, &m->slots.absorbed, m->type, p->rows, heads * kv);
    plan_save(p, &m->slots.latent_out, m->type, p->rows, heads * m->c->kv_lora_rank);
    size_t passes = most(s->ops->sparse_mla_forward_bytes(s, &shape), s->ops->sparse_mla_backward_bytes(s, &shape));
    plan_temp_bytes(p, &m->slots.attention_workspace, most(passes, s->ops->sparse_mla_target_bytes(s, &shape)));
    plan_temp(p, &m->slots.dabsorbed, m->type, p->rows, heads * kv);
    plan_temp(p, &m->slots.dlatent_out, m->type, p->rows, heads * m->c->kv_lora_rank);
}

/* The rotary columns of all heads' queries: `width` columns a head in x, `out` in y, starting at the given ones. */
static void rotate_queries(const struct mla *m, const struct pass *f, int64_t width, int64_t from, const void *x,
                           int64_t out, int64_t to, void *y, int inverse)
{
    int64_t heads = m->c->num_attention_heads;
    size_t size = dtype_size(m->type);
    struct rope r = {.rows = f->rows, .heads = (int32_t)heads, .half = (int32_t)m->c->qk_rope_head_dim / 2,
                     .x_row = heads * width, .x_head = width, .y_row = heads * out, .y_head = out, .inverse = inverse,
                     .type = m->type};

    f->ops->rope(f->stream, &r, f->in->rope_query, (const char *)x + (size_t)from * size,
                 (char *)y + (size_t)to * size);
}

const void *attention_kv(const struct mla *m, const struct pass *f)
{
    return at(f, m->keys_from ? m->keys_from->slots.kv : m->slots.kv);
}

/* ---- sparse ---- */

/* One of the two halves of kv_b, for all heads at once: rows from `first` of each head. */
static struct gemm per_head(const struct mla *m, int64_t rows, int64_t n, int64_t k)
{
    return (struct gemm){.m = rows, .n = n, .k = k, .ldb = m->c->kv_lora_rank, .batch = m->c->num_attention_heads,
                         .stride_b = up_rows(m) * m->c->kv_lora_rank, .a_type = m->type, .b_type = m->type,
                         .c_type = m->type};
}

static const void *half_of_kv_b(const struct mla *m, int values)
{
    size_t skipped = values ? (size_t)(m->c->qk_nope_head_dim * m->c->kv_lora_rank) : 0;

    return m->w->kv_b->value + skipped * dtype_size(m->type);
}

static void absorb_queries(const struct mla *m, const struct pass *f)
{
    int64_t heads = m->c->num_attention_heads, nope = m->c->qk_nope_head_dim, rank = m->c->kv_lora_rank;
    int64_t qk = qk_width(m), kv = kv_width(m);
    struct gemm absorb = per_head(m, f->rows, rank, nope);
    void *absorbed = at(f, m->slots.absorbed);

    LABEL(f, "mla.absorb");
    absorb.lda = heads * qk, absorb.stride_a = qk, absorb.ldc = heads * kv, absorb.stride_c = kv;
    f->ops->gemm(f->stream, &absorb, at(f, m->slots.q), half_of_kv_b(m, 0), absorbed);
    rotate_queries(m, f, qk, nope, at(f, m->slots.q), kv, rank, absorbed, 0);
}

static void unabsorb_outputs(const struct mla *m, const struct pass *f)
{
    int64_t heads = m->c->num_attention_heads, dv = m->c->v_head_dim, rank = m->c->kv_lora_rank;
    struct gemm unabsorb = per_head(m, f->rows, dv, rank);

    LABEL(f, "mla.unabsorb");
    unabsorb.lda = heads * rank, unabsorb.stride_a = rank, unabsorb.ldc = heads * dv, unabsorb.stride_c = dv;
    unabsorb.transpose_b = 1;
    f->ops->gemm(f->stream, &unabsorb, at(f, m->slots.latent_out), half_of_kv_b(m, 1), at(f, m->slots.out));
}

static void sparse_forward(const struct mla *m, const struct pass *f, const int32_t *selected)
{
    struct sparse_mla shape = attention_shape(m, f->rows, f->in->selected_pairs);

    absorb_queries(m, f);
    LABEL(f, "mla.attention");
    f->ops->sparse_mla_forward(f->stream, &shape, at(f, m->slots.absorbed), attention_kv(m, f), selected,
                               at(f, m->slots.latent_out), at(f, m->slots.lse), at(f, m->slots.attention_workspace));
    unabsorb_outputs(m, f);
}

void attention_restore(const struct mla *m, const struct pass *b)
{
    if (m->dense) return;
    absorb_queries(m, b);
    unabsorb_outputs(m, b);
}

/* dW of one half of kv_b, per head: a [rows, lda] transposed times b [rows, ldb]. */
static void kv_b_gradient(const struct mla *m, const struct pass *b, int64_t n, int values, const void *x, int64_t ldx,
                          int64_t stride_x, const void *y, int64_t ldy, int64_t stride_y)
{
    int64_t rank = m->c->kv_lora_rank;
    struct gemm g = {.m = n, .n = rank, .k = b->rows, .lda = ldx, .ldb = ldy, .ldc = rank,
                     .batch = m->c->num_attention_heads, .stride_a = stride_x, .stride_b = stride_y,
                     .stride_c = up_rows(m) * rank, .transpose_a = 1, .add = 1, .a_type = m->type, .b_type = m->type,
                     .c_type = m->w->kv_b->gradient_type};
    int64_t first = values ? m->c->qk_nope_head_dim * rank : 0;
    char *gradient = gradient_sum(b, m->w->kv_b); /* whose other half has its own product */

    if (gradient) b->ops->gemm(b->stream, &g, x, y, gradient + first * (int64_t)dtype_size(g.c_type));
}

static void sparse_backward(const struct mla *m, const struct pass *b, const int32_t *selected, float *target)
{
    int64_t heads = m->c->num_attention_heads, nope = m->c->qk_nope_head_dim, dv = m->c->v_head_dim;
    int64_t rank = m->c->kv_lora_rank, qk = qk_width(m), kv = kv_width(m);
    struct sparse_mla shape = attention_shape(m, b->rows, b->in->selected_pairs);
    struct gemm unabsorb = per_head(m, b->rows, rank, dv), absorb = per_head(m, b->rows, nope, rank);
    void *dout = at(b, m->slots.dout), *dlatent = at(b, m->slots.dlatent_out), *dabsorbed = at(b, m->slots.dabsorbed);
    void *dq = at(b, m->slots.dq);

    LABEL(b, "mla.unabsorb");
    unabsorb.lda = heads * dv, unabsorb.stride_a = dv, unabsorb.ldc = heads * rank, unabsorb.stride_c = rank;
    b->ops->gemm(b->stream, &unabsorb, dout, half_of_kv_b(m, 1), dlatent);
    kv_b_gradient(m, b, dv, 1, dout, heads * dv, dv, at(b, m->slots.latent_out), heads * rank, rank);
    LABEL(b, "mla.attention");
    b->ops->sparse_mla_backward(b->stream, &shape, at(b, m->slots.absorbed), attention_kv(m, b), selected,
                                at(b, m->slots.latent_out), at(b, m->slots.lse), dlatent, dabsorbed,
                                at(b, m->slots.dkv), target, at(b, m->slots.attention_workspace));
    LABEL(b, "mla.absorb");
    absorb.lda = heads * kv, absorb.stride_a = kv, absorb.ldc = heads * qk, absorb.stride_c = qk,
    absorb.transpose_b = 1;
    b->ops->gemm(b->stream, &absorb, dabsorbed, half_of_kv_b(m, 0), dq);
    kv_b_gradient(m, b, nope, 0, at(b, m->slots.q), heads * qk, qk, dabsorbed, heads * kv, kv);
    rotate_queries(m, b, kv, rank, dabsorbed, qk, nope, dq, 1);
}

void mla_target(const struct mla *m, const struct pass *b, const int32_t *selected, float *target)
{
    struct sparse_mla shape = attention_shape(m, b->rows, b->in->selected_pairs);

    LABEL(b, "indexer.target");
    b->ops->sparse_mla_target(b->stream, &shape, at(b, m->slots.absorbed), attention_kv(m, b), selected,
                              at(b, m->slots.lse), target, at(b, m->slots.attention_workspace));
}

/* ---- dense ---- */

static void dense_forward(const struct mla *m, const struct pass *f)
{
    int64_t heads = m->c->num_attention_heads, nope = m->c->qk_nope_head_dim, dv = m->c->v_head_dim;
    int64_t rank = m->c->kv_lora_rank, qk = qk_width(m), kv = kv_width(m), rope = m->c->qk_rope_head_dim;
    struct dense_attention shape = dense_shape(m, f->rows, f->in->pairs);
    struct gemm keys = per_head(m, f->rows, nope, rank), values = per_head(m, f->rows, dv, rank);
    const char *latent = attention_kv(m, f);
    char *key = at(f, m->slots.key), *q = at(f, m->slots.q);
    size_t size = dtype_size(m->type);

    LABEL(f, "mla.kv_b");
    keys.lda = values.lda = kv, keys.transpose_b = values.transpose_b = 1;
    keys.ldc = heads * qk, keys.stride_c = qk, values.ldc = heads * dv, values.stride_c = dv;
    f->ops->gemm(f->stream, &keys, latent, half_of_kv_b(m, 0), key);
    f->ops->gemm(f->stream, &values, latent, half_of_kv_b(m, 1), at(f, m->slots.value));
    struct spread r = {.rows = f->rows, .heads = (int32_t)heads, .width = rope, .x_row = kv, .y_row = heads * qk,
                       .y_head = qk, .type = m->type};
    f->ops->spread_heads(f->stream, &r, latent + (size_t)rank * size, key + (size_t)nope * size);
    rotate_queries(m, f, qk, nope, q, qk, nope, q, 0);
    LABEL(f, "mla.attention");
    f->ops->dense_attention_forward(f->stream, &shape, q, key, at(f, m->slots.value), f->in->start, f->in->end,
                                    at(f, m->slots.out), at(f, m->slots.lse), at(f, m->slots.attention_workspace));
}

/* dkv[:, :rank] (+)= sum over heads of d [rows,heads,n] times that half of kv_b. */
static void dense_latent_gradient(const struct mla *m, const struct pass *b, int64_t n, int values, const void *d,
                                  int64_t row, int64_t head, float *dkv, int add)
{
    int64_t rank = m->c->kv_lora_rank;
    size_t size = dtype_size(m->type);
    const char *w = half_of_kv_b(m, values);

    for (int64_t h = 0; h < m->c->num_attention_heads; h++) {
        struct gemm g = {.m = b->rows, .n = rank, .k = n, .lda = row, .ldb = rank, .ldc = kv_width(m), .batch = 1,
                         .add = add || h, .a_type = m->type, .b_type = m->type, .c_type = GLM52_DTYPE_F32};
        b->ops->gemm(b->stream, &g, (const char *)d + (size_t)(h * head) * size,
                     w + (size_t)(h * up_rows(m) * rank) * size, dkv);
    }
}

static void dense_backward(const struct mla *m, const struct pass *b)
{
    int64_t heads = m->c->num_attention_heads, nope = m->c->qk_nope_head_dim, dv = m->c->v_head_dim;
    int64_t rank = m->c->kv_lora_rank, qk = qk_width(m), kv = kv_width(m);
    struct dense_attention shape = dense_shape(m, b->rows, b->in->pairs);
    char *dkey = at(b, m->slots.dkey), *dvalue = at(b, m->slots.dvalue), *dq = at(b, m->slots.dq);
    const void *latent = attention_kv(m, b);
    float *dkv = at(b, m->slots.dkv);

    LABEL(b, "mla.attention");
    b->ops->dense_attention_backward(b->stream, &shape, at(b, m->slots.q), at(b, m->slots.key), at(b, m->slots.value),
                                     b->in->start, b->in->end, at(b, m->slots.out), at(b, m->slots.lse),
                                     at(b, m->slots.dout), dq, dkey, dvalue, at(b, m->slots.attention_workspace));
    rotate_queries(m, b, qk, nope, dq, qk, nope, dq, 1);
    LABEL(b, "mla.kv_b");
    dense_latent_gradient(m, b, nope, 0, dkey, heads * qk, qk, dkv, 0);
    dense_latent_gradient(m, b, dv, 1, dvalue, heads * dv, dv, dkv, 1);
    kv_b_gradient(m, b, nope, 0, dkey, heads * qk, qk, latent, kv, 0);
    kv_b_gradient(m, b, dv, 1, dvalue, heads * dv, dv, latent, kv, 0);
    struct spread r = {.rows = b->rows, .heads = (int32_t)heads, .width = m->c->qk_rope_head_dim, .x_row = kv,
                       .y_row = heads * qk, .y_head = qk, .type = m->type};
    b->ops->sum_heads(b->stream, &r, dkey + (size_t)nope * dtype_size(m->type), dkv + rank);
}

void attention_forward(const struct mla *m, const struct pass *f, const int32_t *selected)
{
    if (m->dense)
        dense_forward(m, f);
    else
        sparse_forward(m, f, selected);
}

void attention_backward(const struct mla *m, const struct pass *b, const int32_t *selected, float *target)
{
    if (m->dense)
        dense_backward(m, b);
    else
        sparse_backward(m, b, selected, target);
}
