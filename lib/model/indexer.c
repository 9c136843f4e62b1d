/* The lightning indexer of a full layer: scores every visible key and selects the best; model.md 2.3. The rotary part
 * is the first of each head here, unlike in the main attention. Its inputs are detached: no gradient leaves it. */
#include "model/parts.h"

#include <math.h>

static struct indexer shape_of(const struct indexer_part *m, int64_t rows, double pairs)
{
    return (struct indexer){.rows = rows, .keys = rows, .heads = (int32_t)m->c->index_n_heads,
                            .width = (int32_t)m->c->index_head_dim, .k = (int32_t)m->c->index_topk, .type = m->type,
                            .pairs = pairs};
}

void indexer_plan(struct indexer_part *m, struct stream *s, struct plan *p)
{
    int64_t heads = m->c->index_n_heads, width = m->c->index_head_dim;
    struct indexer shape = shape_of(m, p->rows, 0);
    uint64_t mark = plan_mark(p);

    plan_temp(p, &m->slots.q, m->type, p->rows, heads * width);
    plan_temp(p, &m->slots.key_raw, m->type, p->rows, width);
    plan_temp(p, &m->slots.key, m->type, p->rows, width);
    plan_temp(p, &m->slots.statistics, GLM52_DTYPE_F32, p->rows, 2);
    plan_temp(p, &m->slots.weight, GLM52_DTYPE_F32, p->rows, heads);
    plan_temp_bytes(p, &m->slots.workspace, s->ops->index_select_bytes(s, &shape));
    plan_release(p, mark);
}

static void rotate_first(const struct indexer_part *m, const struct pass *f, int64_t heads, void *x)
{
    int64_t width = m->c->index_head_dim;
    struct rope r = {.rows = f->rows, .heads = (int32_t)heads, .half = (int32_t)m->c->qk_rope_head_dim / 2,
                     .x_row = heads * width, .x_head = width, .y_row = heads * width, .y_head = width, .type = m->type};

    f->ops->rope(f->stream, &r, f->in->rope, x, x);
}

/* w = (u W^T) heads^-0.5 width^-0.5 */
static void head_weights(const struct indexer_part *m, const struct pass *f, const void *u, float *weight)
{
    const struct parameter *w = m->w->weights;
    int64_t in = w->shape[1], heads = w->shape[0];
    struct gemm g = {.m = f->rows, .n = heads, .k = in, .lda = in, .ldb = in, .ldc = heads, .batch = 1, .transpose_b = 1,
                     .scale = (float)(1 / sqrt((double)(m->c->index_n_heads * m->c->index_head_dim))), .a_type = m->type,
                     .b_type = w->type, .c_type = GLM52_DTYPE_F32};

    f->ops->gemm(f->stream, &g, u, w->value, weight);
}

void indexer_forward(const struct indexer_part *m, const struct pass *f, int layer, const void *u, const void *q_latent,
                     int32_t *selected)
{
    int64_t width = m->c->index_head_dim;
    void *q = at(f, m->slots.q), *key_raw = at(f, m->slots.key_raw), *key = at(f, m->slots.key);
    float *weight = at(f, m->slots.weight);
    struct indexer shape = shape_of(m, f->rows, f->in->pairs);
    struct norm n = {.rows = f->rows, .width = width, .x_stride = width, .y_stride = width,
                     .epsilon = (float)m->c->index_k_norm_eps, .type = m->type};

    label(f, "indexer.project");
    linear_forward(f, m->w->wq_b, q_latent, q, 0);
    linear_forward(f, m->w->wk, u, key_raw, 0);
    f->ops->layernorm_forward(f->stream, &n, key_raw, m->w->k_norm->value, m->w->k_norm_bias->value, key,
                              at(f, m->slots.statistics));
    rotate_first(m, f, m->c->index_n_heads, q);
    rotate_first(m, f, 1, key);
    head_weights(m, f, u, weight);
    label(f, "indexer.select");
    f->ops->index_select(f->stream, &shape, q, key, weight, f->in->start, f->in->end, selected,
                         at(f, m->slots.workspace));
    if (f->tap && f->tap->wants(f->tap->user, "index_scores", layer)) {
        f->ops->index_scores(f->stream, &shape, q, key, weight, f->in->start, f->in->end, f->tap->scores);
        tap(f, "index_scores", layer, GLM52_DTYPE_F32, f->rows, f->tap->scores);
    }
}
