/* One decoder layer: y = middle + mlp(norm(middle)), middle = x + attention(norm(x)); model.md 2.1. */
#include "model/parts.h"

void layer_plan(struct layer *m, struct stream *s, struct plan *p)
{
    int64_t hidden = m->c->hidden_size;

    plan_next_layer(p);
    m->keep = p->keep;
    plan_save(p, &m->slots.input_rstd, GLM52_DTYPE_F32, p->rows, 1);
    plan_renew(p, &m->slots.u, m->type, p->rows, hidden);
    plan_save(p, &m->slots.middle, m->type, p->rows, hidden);
    plan_save(p, &m->slots.post_rstd, GLM52_DTYPE_F32, p->rows, 1);
    plan_renew(p, &m->slots.v, m->type, p->rows, hidden);
    uint64_t mark = plan_mark(p);
    plan_temp_bytes(p, &m->slots.workspace, norm_backward_bytes(s, p->rows, hidden));
    plan_temp(p, &m->slots.dv, m->type, p->rows, hidden);
    if (m->indexes) {
        /* what the attention's backward leaves for the indexer must outlive the attention's own temporaries */
        if (m->indexer.learns && !m->indexer.dense)
            plan_temp(p, &m->indexer.slots.target, GLM52_DTYPE_F32, p->rows, m->c->index_topk);
        indexer_plan(&m->indexer, &m->mla, s, p);
    }
    mla_plan(&m->mla, s, p);
    if (m->sparse)
        moe_plan(&m->moe, s, p);
    else
        mlp_plan(&m->mlp, p);
    plan_release(p, mark);
}

/* Queries, keys and selection of the layer, from the normed hidden u. */
static void prepare_attention(const struct layer *m, const struct pass *f, const void *u, int32_t *selected)
{
    mla_project(&m->mla, f, u);
    if (!m->indexes) return;
    int selects = !m->mla.dense && !f->replay; /* in a replay the selection stands */
    if (selects || m->indexer.learns) indexer_project(&m->indexer, f, u, at(f, m->mla.slots.q_latent));
    if (selects) indexer_select(&m->indexer, f, selected);
}

void layer_forward(const struct layer *m, const struct pass *f, const void *x, int32_t *selected, void *y)
{
    int64_t hidden = m->c->hidden_size;
    void *u = at(f, m->slots.u), *v = at(f, m->slots.v), *middle = at(f, m->slots.middle);

    LABEL(f, "layer");
    norm_forward(f, m->w->input_norm, m->c->rms_norm_eps, x, u, at(f, m->slots.input_rstd));
    prepare_attention(m, f, u, selected);
    if (!m->mla.dense) tap(f, "topk", m->index, GLM52_DTYPE_I32, m->c->index_topk, selected);
    LABEL(f, "layer");
    mla_attend(&m->mla, f, selected, x, middle);

    LABEL(f, "layer");
    norm_forward(f, m->w->post_norm, m->c->rms_norm_eps, middle, v, at(f, m->slots.post_rstd));
    if (m->sparse) {
        moe_forward(&m->moe, f, m->index, v, middle, y);
    } else {
        LABEL(f, "mlp");
        mlp_forward(&m->mlp, f, v, middle, y);
    }
    tap(f, "hidden", m->index, m->type, hidden, y);
}

void layer_restore(const struct layer *m, struct pass *b, const void *x, int32_t *selected, void *y)
{
    if (m->keep == KEEP_INPUTS) {
        b->replay = 1;
        layer_forward(m, b, x, selected, y);
        b->replay = 0;
    }
    if (m->keep != KEEP_DEAR) return;
    LABEL(b, "layer");
    norm_forward(b, m->w->input_norm, m->c->rms_norm_eps, x, at(b, m->slots.u), at(b, m->slots.input_rstd));
    attention_restore(&m->mla, b);
    LABEL(b, "layer");
    norm_forward(b, m->w->post_norm, m->c->rms_norm_eps, at(b, m->slots.middle), at(b, m->slots.v),
                 at(b, m->slots.post_rstd));
}

static void learn(const struct layer *m, const struct pass *b, const int32_t *selected)
{
    indexer_learn(&m->indexer, b, &m->mla, at(b, m->slots.u), at(b, m->mla.slots.q_latent), selected, m->kl);
}

void layer_backward(const struct layer *m, const struct pass *b, const void *x, const int32_t *selected, void *dx)
{
    void *dv = at(b, m->slots.dv), *workspace = at(b, m->slots.workspace);
    int learns = m->indexes && m->indexer.learns;
    float *target = learns && !m->indexer.dense ? at(b, m->indexer.slots.target) : NULL;

    if (m->frozen) {
        if (target) mla_target(&m->mla, b, selected, target);
        if (learns) learn(m, b, selected);
        return;
    }
    if (m->sparse) {
        moe_backward(&m->moe, b, at(b, m->slots.v), dx, dv);
    } else {
        LABEL(b, "mlp");
        mlp_backward(&m->mlp, b, at(b, m->slots.v), dx, dv, 0);
    }
    LABEL(b, "layer");
    norm_backward(b, m->w->post_norm, m->c->rms_norm_eps, at(b, m->slots.middle), at(b, m->slots.post_rstd), dv,
                  dx, 1, workspace);
    mla_backward(&m->mla, b, at(b, m->slots.u), selected, dx, dv, target);
    LABEL(b, "layer");
    norm_backward(b, m->w->input_norm, m->c->rms_norm_eps, x, at(b, m->slots.input_rstd), dv, dx, 1, workspace);
    if (learns) learn(m, b, selected);
}
