/* Multi-head latent attention: projections in and out, around the attention of attention.c; model.md 2.2. Rows of q_b
 * per head: no-position, then rotary; rows of kv_b per head: K, then V. */
#include "model/parts.h"

static int64_t qk_width(const struct mla *m)
{
    return m->c->qk_nope_head_dim + m->c->qk_rope_head_dim;
}

static int64_t kv_width(const struct mla *m)
{
    return m->c->kv_lora_rank + m->c->qk_rope_head_dim;
}

static int64_t widest_head(const struct mla *m)
{
    return m->c->v_head_dim > qk_width(m) ? m->c->v_head_dim : qk_width(m);
}

static size_t most(size_t a, size_t b)
{
    return a > b ? a : b;
}

static struct latent latent_shape(const struct mla *m, int64_t rows)
{
    return (struct latent){.rows = rows, .rank = (int32_t)m->c->kv_lora_rank,
                           .half = (int32_t)m->c->qk_rope_head_dim / 2, .epsilon = (float)m->c->latent_norm_eps,
                           .type = m->type};
}

void mla_plan(struct mla *m, struct stream *s, struct plan *p)
{
    const struct model_config *c = m->c;
    int64_t heads = c->num_attention_heads, kv = kv_width(m);

    plan_save(p, &m->slots.q_latent_raw, m->type, p->rows, c->q_lora_rank);
    plan_save(p, &m->slots.q_latent, m->type, p->rows, c->q_lora_rank);
    plan_save(p, &m->slots.q_rstd, GLM52_DTYPE_F32, p->rows, 1);
    plan_save(p, &m->slots.q, m->type, p->rows, heads * qk_width(m));
    if (!m->keys_from) {
        plan_save(p, &m->slots.kv_raw, GLM52_DTYPE_F32, p->rows, kv);
        plan_save(p, &m->slots.kv_rstd, GLM52_DTYPE_F32, p->rows, 1);
        if (m->lends_keys) { /* other depths read it in their own forward and backward */
            plan_keep(p, &m->slots.kv, m->type, p->rows, kv);
            if (p->keep != KEEP_NOTHING) plan_keep(p, &m->slots.shared_dkv, GLM52_DTYPE_F32, p->rows, kv);
        } else {
            plan_save(p, &m->slots.kv, m->type, p->rows, kv);
        }
    }
    plan_save(p, &m->slots.lse, GLM52_DTYPE_F32, p->rows, heads);
    if (m->dense)
        plan_save(p, &m->slots.out, m->type, p->rows, heads * c->v_head_dim);
    else /* made of the latent output */
        plan_renew(p, &m->slots.out, m->type, p->rows, heads * c->v_head_dim);

    uint64_t mark = plan_mark(p);
    struct latent latent = latent_shape(m, p->rows);
    size_t norms = most(norm_backward_bytes(s, p->rows, c->q_lora_rank), s->ops->latent_backward_bytes(s, &latent));
    plan_temp(p, &m->slots.dkv, GLM52_DTYPE_F32, p->rows, kv);
    plan_temp(p, &m->slots.dq, m->type, p->rows, heads * (m->dense ? qk_width(m) : widest_head(m)));
    uint64_t inner = plan_mark(p);
    if (m->dense)
        plan_temp(p, &m->slots.dout, m->type, p->rows, heads * c->v_head_dim);
    else /* absorbed, it is dead before dq begins */
        m->slots.dout = m->slots.dq;
    attention_plan(m, s, p);
    plan_release(p, inner); /* the attention is done when these begin */
    plan_temp_bytes(p, &m->slots.workspace, norms);
    plan_temp(p, &m->slots.dq_latent, m->type, p->rows, c->q_lora_rank);
    plan_temp(p, &m->slots.dkv_raw, m->type, p->rows, kv);
    plan_release(p, mark);
}

void mla_project(const struct mla *m, const struct pass *f, const void *u)
{
    const struct model_config *c = m->c;
    struct latent latent = latent_shape(m, f->rows);

    LABEL(f, "mla.q_a");
    linear_forward(f, m->w->q_a, u, NULL, at(f, m->slots.q_latent_raw));
    norm_forward(f, m->w->q_a_norm, c->latent_norm_eps, at(f, m->slots.q_latent_raw),
                 at(f, m->slots.q_latent), at(f, m->slots.q_rstd));
    LABEL(f, "mla.q_b");
    linear_forward(f, m->w->q_b, at(f, m->slots.q_latent), NULL, at(f, m->slots.q));
    if (m->keys_from) return;
    LABEL(f, "mla.kv_a");
    linear_forward_float(f, m->w->kv_a, u, at(f, m->slots.kv_raw));
    f->ops->latent_forward(f->stream, &latent, f->in->rope, at(f, m->slots.kv_raw), m->w->kv_a_norm->value,
                           at(f, m->slots.kv), at(f, m->slots.kv_rstd));
}

void mla_attend(const struct mla *m, const struct pass *f, const int32_t *selected, const void *from, void *y)
{
    attention_forward(m, f, selected);
    LABEL(f, "mla.o");
    linear_forward(f, m->w->o, at(f, m->slots.out), from, y);
}

static void backward_queries(const struct mla *m, const struct pass *b, const void *u, void *du)
{
    const struct model_config *c = m->c;
    void *dq_latent = at(b, m->slots.dq_latent);

    LABEL(b, "mla.q_b");
    linear_backward(b, m->w->q_b, at(b, m->slots.q_latent), at(b, m->slots.dq), dq_latent, 0);
    norm_backward(b, m->w->q_a_norm, c->latent_norm_eps, at(b, m->slots.q_latent_raw),
                  at(b, m->slots.q_rstd), dq_latent, dq_latent, 0, at(b, m->slots.workspace));
    LABEL(b, "mla.q_a");
    linear_backward(b, m->w->q_a, u, dq_latent, du, 0);
}

/* Keys of its own: through norm and rotation to kv_a. Shared keys: into the lender's sum. */
static void backward_keys(const struct mla *m, const struct pass *b, const void *u, void *du)
{
    struct latent latent = latent_shape(m, b->rows);
    int64_t kv = kv_width(m);
    float *dkv = at(b, m->slots.dkv);
    void *dkv_raw = at(b, m->slots.dkv_raw);

    LABEL(b, "mla.kv_a");
    if (m->keys_from) {
        b->ops->add(b->stream, b->rows * kv, GLM52_DTYPE_F32, dkv, at(b, m->keys_from->slots.shared_dkv));
        return;
    }
    if (m->lends_keys) b->ops->add(b->stream, b->rows * kv, GLM52_DTYPE_F32, at(b, m->slots.shared_dkv), dkv);
    b->ops->latent_backward(b->stream, &latent, b->in->rope, at(b, m->slots.kv_raw), m->w->kv_a_norm->value,
                            at(b, m->slots.kv_rstd), dkv, dkv_raw, gradient_sum(b, m->w->kv_a_norm),
                            at(b, m->slots.workspace));
    linear_backward(b, m->w->kv_a, u, dkv_raw, du, 1);
}

void mla_backward(const struct mla *m, const struct pass *b, const void *u, const int32_t *selected, const void *dy,
                  void *du, float *target)
{
    LABEL(b, "mla.o");
    linear_backward(b, m->w->o, at(b, m->slots.out), dy, at(b, m->slots.dout), 0);
    attention_backward(m, b, selected, target);
    backward_queries(m, b, u, du);
    backward_keys(m, b, u, du);
}
