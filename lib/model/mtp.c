#include "model/mtp.h"

static size_t row_bytes(const struct mtp *m)
{
    return (size_t)m->config->model.hidden_size * dtype_size(m->type);
}

void *mtp_out(const struct mtp *m, const struct pass *f, int depth)
{
    return (char *)at(f, m->out) + (size_t)depth * (size_t)f->rows * row_bytes(m);
}

void *mtp_dout(const struct mtp *m, const struct pass *f, int depth)
{
    return (char *)at(f, m->dout) + (size_t)depth * (size_t)f->rows * row_bytes(m);
}

static int32_t *selected_of(const struct mtp *m, const struct pass *f, int depth)
{
    int own = m->config->mtp.share == MTP_SHARE_NONE;

    return (int32_t *)at(f, m->selected) + (own ? depth : 0) * f->rows * m->config->model.index_topk;
}

void mtp_build(struct mtp *m, const struct config *config, const struct parameters *parameters,
               const struct layer *first)
{
    int share = config->mtp.share;

    *m = (struct mtp){.config = config, .parameters = parameters, .w = &parameters->mtp, .type = first->type,
                      .depths = (int)config->mtp.depths};
    for (int d = 0; d < m->depths; d++) {
        struct layer *l = &m->depth[d].layer;
        *l = *first;
        l->kl = first->kl ? first->kl + d : NULL;
        if (!d) {
            l->mla.lends_keys = share == MTP_SHARE_INDEX_KV && m->depths > 1;
            continue;
        }
        if (share != MTP_SHARE_NONE) l->indexes = 0;
        if (share == MTP_SHARE_INDEX_KV) l->mla.keys_from = &m->depth[0].layer.mla;
    }
}

void mtp_plan(struct mtp *m, struct stream *s, struct plan *p)
{
    const struct model_config *c = &m->config->model;
    int64_t hidden = c->hidden_size;
    int selections = m->config->mtp.share == MTP_SHARE_NONE ? m->depths : 1;

    plan_keep(p, &m->out, m->type, p->rows * m->depths, hidden);
    if (p->keep != KEEP_NOTHING) plan_keep(p, &m->dout, m->type, p->rows * m->depths, hidden);
    plan_keep(p, &m->selected, GLM52_DTYPE_I32, p->rows * selections, c->index_topk);
    for (int d = 0; d < m->depths; d++) {
        struct mtp_depth *q = &m->depth[d];
        plan_keep(p, &q->embedded, m->type, p->rows, hidden);
        plan_keep(p, &q->embedded_rstd, GLM52_DTYPE_F32, p->rows, 1);
        plan_keep(p, &q->hidden_rstd, GLM52_DTYPE_F32, p->rows, 1);
        plan_keep(p, &q->joined, m->type, p->rows, 2 * hidden);
        plan_keep(p, &q->x, m->type, p->rows, hidden);
        plan_keep(p, &q->y, m->type, p->rows, hidden);
        plan_keep(p, &q->out_rstd, GLM52_DTYPE_F32, p->rows, 1);
        layer_plan(&q->layer, s, p);
    }
    uint64_t mark = plan_mark(p);
    plan_temp_bytes(p, &m->workspace, norm_backward_bytes(s, p->rows, hidden));
    plan_temp(p, &m->djoined, m->type, p->rows, 2 * hidden);
    plan_release(p, mark);
}

/* One half of `joined`: rows of `hidden` columns, twice as far apart. */
static struct norm half_norm(const struct mtp *m, int64_t rows, int add)
{
    int64_t hidden = m->config->model.hidden_size;

    return (struct norm){.rows = rows, .width = hidden, .x_stride = hidden, .y_stride = 2 * hidden,
                         .epsilon = (float)m->config->model.rms_norm_eps, .add = add, .type = m->type};
}

static void depth_forward(const struct mtp *m, const struct pass *f, int d, const void *before)
{
    const struct mtp_depth *q = &m->depth[d];
    const struct model_config *c = &m->config->model;
    struct embed e = {.rows = f->rows, .width = c->hidden_size, .vocabulary = c->vocab_size, .type = m->type};
    struct norm n = half_norm(m, f->rows, 0);
    char *joined = at(f, q->joined);

    LABEL(f, "input");
    f->ops->embed_forward(f->stream, &e, f->in->token, m->parameters->embedding->value, at(f, q->embedded));
    f->ops->rmsnorm_forward(f->stream, &n, at(f, q->embedded), m->w->enorm->value, joined, at(f, q->embedded_rstd));
    f->ops->rmsnorm_forward(f->stream, &n, before, m->w->hnorm->value, joined + row_bytes(m), at(f, q->hidden_rstd));
    linear_forward(f, m->w->eh_proj, joined, NULL, at(f, q->x));
    layer_forward(&q->layer, f, at(f, q->x), selected_of(m, f, d), at(f, q->y));
    LABEL(f, "head");
    norm_forward(f, m->w->norm, c->rms_norm_eps, at(f, q->y), mtp_out(m, f, d), at(f, q->out_rstd));
    tap(f, "out", -1, m->type, c->hidden_size, mtp_out(m, f, d));
}

void mtp_forward(const struct mtp *m, struct pass *f, const struct input *in, const void *hidden)
{
    const struct input *trunk = f->in;

    for (int d = 0; d < m->depths; d++) {
        f->in = &in[d];
        f->depth = d;
        depth_forward(m, f, d, d ? mtp_out(m, f, d - 1) : hidden);
    }
    f->in = trunk;
    f->depth = -1;
}

/* dout of depth d is complete; leaves the gradient of what the depth before passed on in dbefore (added). */
static void depth_backward(const struct mtp *m, struct pass *b, int d, const void *before, void *dbefore)
{
    const struct mtp_depth *q = &m->depth[d];
    const struct model_config *c = &m->config->model;
    struct embed e = {.rows = b->rows, .width = c->hidden_size, .vocabulary = c->vocab_size, .type = m->type,
                      .gradient = m->parameters->embedding->gradient_type};
    struct norm n = half_norm(m, b->rows, 0), added = half_norm(m, b->rows, 1);
    char *djoined = at(b, m->djoined);
    void *dx = mtp_dout(m, b, d), *workspace = at(b, m->workspace);
    void *dembedding = m->config->mtp.detach_heads ? NULL : gradient_sum(b, m->parameters->embedding);

    if (!q->layer.frozen) {
        LABEL(b, "head");
        norm_backward(b, m->w->norm, c->rms_norm_eps, at(b, q->y), at(b, q->out_rstd), dx, dx, 0,
                      workspace);
    }
    if (q->layer.frozen && !(q->layer.indexes && q->layer.indexer.learns)) return;
    layer_restore(&q->layer, b, at(b, q->x), selected_of(m, b, d), at(b, q->y));
    layer_backward(&q->layer, b, at(b, q->x), selected_of(m, b, d), dx);
    if (q->layer.frozen) return;
    LABEL(b, "input");
    linear_backward(b, m->w->eh_proj, at(b, q->joined), dx, djoined, 0);
    if (dbefore)
        b->ops->rmsnorm_backward(b->stream, &added, before, m->w->hnorm->value, at(b, q->hidden_rstd),
                                 djoined + row_bytes(m), dbefore, gradient_sum(b, m->w->hnorm), workspace);
    else /* detached: only the gain learns; the other gradient goes where nobody looks */
        b->ops->rmsnorm_backward(b->stream, &n, before, m->w->hnorm->value, at(b, q->hidden_rstd),
                                 djoined + row_bytes(m), dx, gradient_sum(b, m->w->hnorm), workspace);
    b->ops->rmsnorm_backward(b->stream, &n, at(b, q->embedded), m->w->enorm->value, at(b, q->embedded_rstd), djoined,
                             dx, gradient_sum(b, m->w->enorm), workspace);
    if (dembedding) b->ops->embed_backward(b->stream, &e, b->in->token, dx, dembedding);
}

void mtp_backward(const struct mtp *m, struct pass *b, const struct input *in, const void *hidden, void *dhidden)
{
    const struct input *trunk = b->in;
    const struct mla *first = &m->depth[0].layer.mla;
    int64_t kv = m->config->model.kv_lora_rank + m->config->model.qk_rope_head_dim;

    if (first->lends_keys)
        b->ops->zero(b->stream, at(b, first->slots.shared_dkv), (size_t)(b->rows * kv) * sizeof(float));
    for (int d = m->depths - 1; d >= 0; d--) {
        b->in = &in[d];
        b->depth = d;
        depth_backward(m, b, d, d ? mtp_out(m, b, d - 1) : hidden, d ? mtp_dout(m, b, d - 1) : dhidden);
    }
    b->in = trunk;
    b->depth = -1;
}
