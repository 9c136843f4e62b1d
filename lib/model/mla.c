/* Multi-head latent attention, absorbed: keys and values are the shared latent, the per-head up-projections act on
 * queries and outputs; model.md 2.2. Rows of q_b per head: no-position, then rotary; rows of kv_b per head: K, then V. */
#include "model/parts.h"

#include <math.h>

static int64_t qk_width(const struct mla *m)
{
    return m->c->qk_nope_head_dim + m->c->qk_rope_head_dim;
}

static int64_t kv_width(const struct mla *m)
{
    return m->c->kv_lora_rank + m->c->qk_rope_head_dim;
}

static struct sparse_mla attention_shape(const struct mla *m, int64_t rows, double pairs)
{
    return (struct sparse_mla){.rows = rows, .keys = rows, .heads = (int32_t)m->c->num_attention_heads,
                               .kv_rank = (int32_t)m->c->kv_lora_rank, .rope = (int32_t)m->c->qk_rope_head_dim,
                               .k = (int32_t)m->c->index_topk, .scale = (float)(1 / sqrt((double)qk_width(m))),
                               .type = m->type, .pairs = pairs};
}

void mla_plan(struct mla *m, struct stream *s, struct plan *p)
{
    const struct model_config *c = m->c;
    int64_t heads = c->num_attention_heads, kv = kv_width(m);
    struct sparse_mla shape = attention_shape(m, p->rows, 0);

    plan_save(p, &m->slots.q_latent_raw, m->type, p->rows, c->q_lora_rank);
    plan_save(p, &m->slots.q_latent, m->type, p->rows, c->q_lora_rank);
    plan_save(p, &m->slots.q_rstd, GLM52_DTYPE_F32, p->rows, 1);
    plan_save(p, &m->slots.q, m->type, p->rows, heads * qk_width(m));
    plan_save(p, &m->slots.kv_raw, m->type, p->rows, kv);
    plan_save(p, &m->slots.kv_rstd, GLM52_DTYPE_F32, p->rows, 1);
    plan_save(p, &m->slots.kv, m->type, p->rows, kv);
    plan_save(p, &m->slots.absorbed, m->type, p->rows, heads * kv);
    plan_save(p, &m->slots.latent_out, m->type, p->rows, heads * c->kv_lora_rank);
    plan_save(p, &m->slots.lse, GLM52_DTYPE_F32, p->rows, heads);
    plan_save(p, &m->slots.out, m->type, p->rows, heads * c->v_head_dim);

    uint64_t mark = plan_mark(p);
    plan_temp_bytes(p, &m->slots.workspace, s->ops->sparse_mla_forward_bytes(s, &shape));
    plan_release(p, mark);

    size_t attention = s->ops->sparse_mla_backward_bytes(s, &shape), norm = norm_backward_bytes(s, p->rows, c->q_lora_rank);
    size_t kv_norm = norm_backward_bytes(s, p->rows, c->kv_lora_rank);
    attention = attention > norm ? attention : norm;
    plan_temp_bytes(p, &m->slots.workspace, attention > kv_norm ? attention : kv_norm);
    plan_temp(p, &m->slots.dabsorbed, m->type, p->rows, heads * kv);
    plan_temp(p, &m->slots.dkv, GLM52_DTYPE_F32, p->rows, kv);
    uint64_t inner = plan_mark(p);
    plan_temp(p, &m->slots.dout, m->type, p->rows, heads * c->v_head_dim);
    plan_temp(p, &m->slots.dlatent_out, m->type, p->rows, heads * c->kv_lora_rank);
    plan_release(p, inner);
    plan_temp(p, &m->slots.dq, m->type, p->rows, heads * qk_width(m));
    plan_temp(p, &m->slots.dq_latent, m->type, p->rows, c->q_lora_rank);
    plan_temp(p, &m->slots.dkv_cast, m->type, p->rows, kv);
    plan_temp(p, &m->slots.dkv_raw, m->type, p->rows, kv);
    plan_release(p, mark);
}

/* The rotary part of `heads` heads: `width` columns per head in x, `out` in y, starting at the given columns. */
static void rotate(const struct mla *m, const struct pass *f, int64_t heads, int64_t width, int64_t from, const void *x,
                   int64_t out, int64_t to, void *y, int inverse)
{
    size_t size = dtype_size(m->type);
    struct rope r = {.rows = f->rows, .heads = (int32_t)heads, .half = (int32_t)m->c->qk_rope_head_dim / 2,
                     .x_row = heads * width, .x_head = width, .y_row = heads * out, .y_head = out, .inverse = inverse,
                     .type = m->type};

    f->ops->rope(f->stream, &r, f->in->rope, (const char *)x + (size_t)from * size, (char *)y + (size_t)to * size);
}

void mla_project(const struct mla *m, const struct pass *f, const void *u)
{
    const struct model_config *c = m->c;
    int64_t heads = c->num_attention_heads, nope = c->qk_nope_head_dim, qk = qk_width(m), rank = c->kv_lora_rank;
    int64_t kv = kv_width(m), up = nope + c->v_head_dim;
    void *q = at(f, m->slots.q), *absorbed = at(f, m->slots.absorbed);

    label(f, "mla.q_a");
    linear_forward(f, m->w->q_a, u, at(f, m->slots.q_latent_raw), 0);
    norm_forward(f, m->w->q_a_norm, c->latent_norm_eps, c->q_lora_rank, at(f, m->slots.q_latent_raw),
                 at(f, m->slots.q_latent), at(f, m->slots.q_rstd));
    label(f, "mla.q_b");
    linear_forward(f, m->w->q_b, at(f, m->slots.q_latent), q, 0);
    label(f, "mla.kv_a");
    linear_forward(f, m->w->kv_a, u, at(f, m->slots.kv_raw), 0);
    norm_forward(f, m->w->kv_a_norm, c->latent_norm_eps, kv, at(f, m->slots.kv_raw), at(f, m->slots.kv),
                 at(f, m->slots.kv_rstd));
    rotate(m, f, 1, kv, rank, at(f, m->slots.kv_raw), kv, rank, at(f, m->slots.kv), 0);

    label(f, "mla.absorb");
    struct gemm g = {.m = f->rows, .n = rank, .k = nope, .lda = heads * qk, .ldb = rank, .ldc = heads * kv, .batch = heads,
                     .stride_a = qk, .stride_b = up * rank, .stride_c = kv, .a_type = m->type, .b_type = m->type,
                     .c_type = m->type};
    f->ops->gemm(f->stream, &g, q, m->w->kv_b->value, absorbed);
    rotate(m, f, heads, qk, nope, q, kv, rank, absorbed, 0);
}

void mla_attend(const struct mla *m, const struct pass *f, const int32_t *selected, void *y)
{
    const struct model_config *c = m->c;
    int64_t heads = c->num_attention_heads, nope = c->qk_nope_head_dim, dv = c->v_head_dim, rank = c->kv_lora_rank;
    struct sparse_mla shape = attention_shape(m, f->rows, f->in->selected_pairs);
    size_t size = dtype_size(m->type);

    label(f, "mla.attention");
    f->ops->sparse_mla_forward(f->stream, &shape, at(f, m->slots.absorbed), at(f, m->slots.kv), selected,
                               at(f, m->slots.latent_out), at(f, m->slots.lse), at(f, m->slots.workspace));
    label(f, "mla.unabsorb");
    struct gemm g = {.m = f->rows, .n = dv, .k = rank, .lda = heads * rank, .ldb = rank, .ldc = heads * dv, .batch = heads,
                     .stride_a = rank, .stride_b = (nope + dv) * rank, .stride_c = dv, .transpose_b = 1,
                     .a_type = m->type, .b_type = m->type, .c_type = m->type};
    f->ops->gemm(f->stream, &g, at(f, m->slots.latent_out), m->w->kv_b->value + (size_t)(nope * rank) * size,
                 at(f, m->slots.out));
    label(f, "mla.o");
    linear_forward(f, m->w->o, at(f, m->slots.out), y, 1);
}

/* Through o_proj and the value half of kv_b to the gradient of the latent output. */
static void backward_output(const struct mla *m, const struct pass *b, const void *dy)
{
    int64_t heads = m->c->num_attention_heads, nope = m->c->qk_nope_head_dim, dv = m->c->v_head_dim;
    int64_t rank = m->c->kv_lora_rank, up = (nope + dv) * rank;
    void *dout = at(b, m->slots.dout);
    size_t size = dtype_size(m->type);

    label(b, "mla.o");
    linear_backward(b, m->w->o, at(b, m->slots.out), dy, dout, 0);
    label(b, "mla.unabsorb");
    struct gemm rows = {.m = b->rows, .n = rank, .k = dv, .lda = heads * dv, .ldb = rank, .ldc = heads * rank,
                        .batch = heads, .stride_a = dv, .stride_b = up, .stride_c = rank, .a_type = m->type,
                        .b_type = m->type, .c_type = m->type};
    b->ops->gemm(b->stream, &rows, dout, m->w->kv_b->value + (size_t)(nope * rank) * size, at(b, m->slots.dlatent_out));
    struct gemm weight = {.m = dv, .n = rank, .k = b->rows, .lda = heads * dv, .ldb = heads * rank, .ldc = rank,
                          .batch = heads, .stride_a = dv, .stride_b = rank, .stride_c = up, .transpose_a = 1, .add = 1,
                          .a_type = m->type, .b_type = m->type, .c_type = GLM52_DTYPE_F32};
    if (m->w->kv_b->gradient)
        b->ops->gemm(b->stream, &weight, dout, at(b, m->slots.latent_out), m->w->kv_b->gradient + nope * rank);
}

/* From the gradient of the absorbed queries to that of q, and the key half of kv_b. */
static void backward_absorb(const struct mla *m, const struct pass *b)
{
    int64_t heads = m->c->num_attention_heads, nope = m->c->qk_nope_head_dim, qk = qk_width(m), rank = m->c->kv_lora_rank;
    int64_t kv = kv_width(m), up = (nope + m->c->v_head_dim) * rank;
    void *dabsorbed = at(b, m->slots.dabsorbed), *dq = at(b, m->slots.dq);

    label(b, "mla.absorb");
    struct gemm rows = {.m = b->rows, .n = nope, .k = rank, .lda = heads * kv, .ldb = rank, .ldc = heads * qk,
                        .batch = heads, .stride_a = kv, .stride_b = up, .stride_c = qk, .transpose_b = 1,
                        .a_type = m->type, .b_type = m->type, .c_type = m->type};
    b->ops->gemm(b->stream, &rows, dabsorbed, m->w->kv_b->value, dq);
    struct gemm weight = {.m = nope, .n = rank, .k = b->rows, .lda = heads * qk, .ldb = heads * kv, .ldc = rank,
                          .batch = heads, .stride_a = qk, .stride_b = kv, .stride_c = up, .transpose_a = 1, .add = 1,
                          .a_type = m->type, .b_type = m->type, .c_type = GLM52_DTYPE_F32};
    if (m->w->kv_b->gradient)
        b->ops->gemm(b->stream, &weight, at(b, m->slots.q), dabsorbed, m->w->kv_b->gradient);
    rotate(m, b, heads, kv, rank, dabsorbed, qk, nope, dq, 1);
}

void mla_backward(const struct mla *m, const struct pass *b, const void *u, const int32_t *selected, const void *dy,
                  void *du)
{
    const struct model_config *c = m->c;
    struct sparse_mla shape = attention_shape(m, b->rows, b->in->selected_pairs);
    int64_t kv = kv_width(m), rank = c->kv_lora_rank;
    float *dkv = at(b, m->slots.dkv);
    void *workspace = at(b, m->slots.workspace), *dkv_cast = at(b, m->slots.dkv_cast), *dkv_raw = at(b, m->slots.dkv_raw);
    void *dq_latent = at(b, m->slots.dq_latent);

    backward_output(m, b, dy);
    label(b, "mla.attention");
    b->ops->sparse_mla_backward(b->stream, &shape, at(b, m->slots.absorbed), at(b, m->slots.kv), selected,
                                at(b, m->slots.latent_out), at(b, m->slots.lse), at(b, m->slots.dlatent_out),
                                at(b, m->slots.dabsorbed), dkv, NULL, workspace);
    backward_absorb(m, b);

    label(b, "mla.q_b");
    linear_backward(b, m->w->q_b, at(b, m->slots.q_latent), at(b, m->slots.dq), dq_latent, 0);
    norm_backward(b, m->w->q_a_norm, c->latent_norm_eps, c->q_lora_rank, at(b, m->slots.q_latent_raw),
                  at(b, m->slots.q_rstd), dq_latent, dq_latent, 0, workspace);
    label(b, "mla.q_a");
    linear_backward(b, m->w->q_a, u, dq_latent, du, 0);

    label(b, "mla.kv_a");
    b->ops->convert(b->stream, b->rows * kv, GLM52_DTYPE_F32, dkv, m->type, dkv_cast);
    norm_backward(b, m->w->kv_a_norm, c->latent_norm_eps, kv, at(b, m->slots.kv_raw), at(b, m->slots.kv_rstd), dkv_cast,
                  dkv_raw, 0, workspace);
    rotate(m, b, 1, kv, rank, dkv_cast, kv, rank, dkv_raw, 1);
    linear_backward(b, m->w->kv_a, u, dkv_raw, du, 1);
}
