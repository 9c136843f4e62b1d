/* The lightning indexer of a layer: scores every visible key and selects the best; model.md 2.3. The rotary part is the
 * first of each head here, unlike in the main attention. It learns the main attention's distribution (training.md 1.4);
 * its inputs are detached: no gradient leaves it. */
#include <math.h>

#include "model/parts.h"

static struct indexer shape_of(const struct indexer_part *m, int64_t rows, double pairs)
{
    return (struct indexer){.rows = rows, .keys = rows, .heads = (int32_t)m->c->index_n_heads,
                            .width = (int32_t)m->c->index_head_dim, .k = (int32_t)m->c->index_topk, .type = m->type,
                            .pairs = pairs};
}

static struct teacher teacher_shape(const struct mla *t)
{
    struct sparse_mla a = attention_shape(t, 0, 0);
    int32_t qk = (int32_t)(t->c->qk_nope_head_dim + t->c->qk_rope_head_dim);

    return (struct teacher){.heads = a.heads, .key_heads = t->dense ? a.heads : 1,
                            .width = t->dense ? qk : a.kv_rank + a.rope, .scale = a.scale};
}

static struct norm norm_of(const struct indexer_part *m, int64_t rows)
{
    int64_t width = m->c->index_head_dim;

    return (struct norm){.rows = rows, .width = width, .x_stride = width, .y_stride = width,
                         .epsilon = (float)m->c->index_k_norm_eps, .type = m->type};
}

static size_t most(size_t a, size_t b)
{
    return a > b ? a : b;
}

/* Relus of a row: one for each head and key of the support. */
static int64_t relus(const struct indexer_part *m, int64_t rows)
{
    return m->c->index_n_heads * (m->dense ? rows : m->c->index_topk);
}

void indexer_plan(struct indexer_part *m, const struct mla *teacher, struct stream *s, struct plan *p)
{
    int64_t heads = m->c->index_n_heads, width = m->c->index_head_dim;
    void (*place)(struct plan *, struct slot *, glm52_dtype, int64_t, int64_t) = m->learns ? plan_save : plan_temp;
    struct indexer shape = shape_of(m, p->rows, 0);
    struct teacher t = teacher_shape(teacher);
    struct norm n = norm_of(m, p->rows);
    uint64_t mark = plan_mark(p);

    shape.sides = m->guided;
    place(p, &m->slots.q, m->type, p->rows, heads * width);
    place(p, &m->slots.key_raw, m->type, p->rows, width);
    place(p, &m->slots.key, m->type, p->rows, width);
    place(p, &m->slots.statistics, GLM52_DTYPE_F32, p->rows, 2);
    place(p, &m->slots.weight, GLM52_DTYPE_F32, p->rows, heads);
    size_t bytes = teacher->dense ? 0 : s->ops->index_select_bytes(s, &shape);
    if (m->learns) {
        size_t learn = m->dense ? s->ops->index_kl_dense_bytes(s, &shape, &t)
                                : s->ops->index_kl_selected_bytes(s, &shape);
        bytes = most(most(bytes, learn), most(s->ops->norm_backward_bytes(s, &n), s->ops->sum_bytes(s, p->rows)));
        plan_temp(p, &m->slots.kl, GLM52_DTYPE_F32, p->rows, 1);
        plan_temp(p, &m->slots.dq, m->type, p->rows, heads * width);
        plan_temp(p, &m->slots.dkey, GLM52_DTYPE_F32, p->rows, width);
        plan_temp(p, &m->slots.dkey_cast, m->type, p->rows, width);
        plan_temp(p, &m->slots.dweight, GLM52_DTYPE_F32, p->rows, heads);
        if (m->guided) plan_temp(p, &m->slots.open, GLM52_DTYPE_I32, p->rows, relus(m, p->rows));
    }
    plan_temp_bytes(p, &m->slots.workspace, bytes);
    plan_release(p, mark);
}

static void rotate_first(const struct indexer_part *m, const struct pass *f, int64_t heads, void *x, int inverse)
{
    int64_t width = m->c->index_head_dim;
    struct rope r = {.rows = f->rows, .heads = (int32_t)heads, .half = (int32_t)m->c->qk_rope_head_dim / 2,
                     .x_row = heads * width, .x_head = width, .y_row = heads * width, .y_head = width,
                     .inverse = inverse, .type = m->type};

    f->ops->rope(f->stream, &r, f->in->rope, x, x);
}

/* heads^-0.5 width^-0.5, which turns products into scores. */
static float weight_scale(const struct indexer_part *m)
{
    return (float)(1 / sqrt((double)(m->c->index_n_heads * m->c->index_head_dim)));
}

void indexer_project(const struct indexer_part *m, const struct pass *f, const void *u, const void *q_latent)
{
    const struct parameter *w = m->w->weights;
    int64_t in = w->shape[1], heads = w->shape[0];
    struct norm n = norm_of(m, f->rows);
    struct gemm g = {.m = f->rows, .n = heads, .k = in, .lda = in, .ldb = in, .ldc = heads, .batch = 1,
                     .transpose_b = 1, .scale = weight_scale(m), .a_type = m->type, .b_type = w->type,
                     .c_type = GLM52_DTYPE_F32};

    LABEL(f, "indexer.project");
    linear_forward(f, m->w->wq_b, q_latent, NULL, at(f, m->slots.q));
    linear_forward(f, m->w->wk, u, NULL, at(f, m->slots.key_raw));
    f->ops->layernorm_forward(f->stream, &n, at(f, m->slots.key_raw), m->w->k_norm->value, m->w->k_norm_bias->value,
                              at(f, m->slots.key), at(f, m->slots.statistics));
    rotate_first(m, f, heads, at(f, m->slots.q), 0);
    rotate_first(m, f, 1, at(f, m->slots.key), 0);
    f->ops->gemm(f->stream, &g, u, w->value, at(f, m->slots.weight));
}

void indexer_select(const struct indexer_part *m, const struct pass *f, int32_t *selected)
{
    int layer = m->layer;
    struct indexer shape = shape_of(m, f->rows, f->in->pairs);

    LABEL(f, "indexer.select");
    if (!given(f, "topk", layer, m->c->index_topk, selected)) {
        f->ops->index_select(f->stream, &shape, at(f, m->slots.q), at(f, m->slots.key), at(f, m->slots.weight),
                             f->in->start, f->in->end, selected, at(f, m->slots.workspace));
        made(f, "topk", layer, m->c->index_topk, selected);
    }
    if (tapped(f, "index_scores", layer)) {
        f->ops->index_scores(f->stream, &shape, at(f, m->slots.q), at(f, m->slots.key), at(f, m->slots.weight),
                             f->in->start, f->in->end, f->tap->scores);
        tap(f, "index_scores", layer, GLM52_DTYPE_F32, f->rows, f->tap->scores);
    }
}

/* From the gradients of q, key and weight to those of the five parameters. */
static void backward_projections(const struct indexer_part *m, const struct pass *b, const void *u,
                                 const void *q_latent)
{
    int64_t heads = m->c->index_n_heads, width = m->c->index_head_dim, hidden = m->c->hidden_size;
    void *dq = at(b, m->slots.dq), *dkey = at(b, m->slots.dkey_cast);
    struct norm n = norm_of(m, b->rows);
    struct gemm weights = {.m = heads, .n = hidden, .k = b->rows, .lda = heads, .ldb = hidden, .ldc = hidden,
                           .batch = 1, .transpose_a = 1, .add = gradient_add(b, m->w->weights, 1),
                           .scale = weight_scale(m), .a_type = GLM52_DTYPE_F32, .b_type = m->type,
                           .c_type = m->w->weights->gradient_type};

    LABEL(b, "indexer.project");
    rotate_first(m, b, heads, dq, 1);
    linear_gradient(b, m->w->wq_b, q_latent, dq);
    b->ops->convert(b->stream, b->rows * width, GLM52_DTYPE_F32, at(b, m->slots.dkey), m->type, dkey);
    rotate_first(m, b, 1, dkey, 1);
    b->ops->layernorm_backward(b->stream, &n, at(b, m->slots.key_raw), m->w->k_norm->value, at(b, m->slots.statistics),
                               dkey, dkey, gradient_sum(b, m->w->k_norm), gradient_sum(b, m->w->k_norm_bias),
                               at(b, m->slots.workspace));
    linear_gradient(b, m->w->wk, u, dkey);
    b->ops->gemm(b->stream, &weights, at(b, m->slots.dweight), u, m->w->weights->gradient);
}

/* Which relus are open decides over the gradient as a selection does: a guide may have it. */
static void take_sides(const struct indexer_part *m, const struct pass *b, struct indexer *shape)
{
    shape->open = at(b, m->slots.open);
    shape->sides = given(b, "relu_side", m->layer, relus(m, b->rows), shape->open) ? 2 : 1;
    if (shape->sides == 1)
        b->ops->zero(b->stream, shape->open, (size_t)(b->rows * relus(m, b->rows)) * sizeof *shape->open);
}

void indexer_learn(const struct indexer_part *m, const struct pass *b, const struct mla *teacher, const void *u,
                   const void *q_latent, const int32_t *selected, double *total)
{
    struct indexer shape = shape_of(m, b->rows, m->dense ? b->in->pairs : b->in->selected_pairs);
    struct teacher t = teacher_shape(teacher);
    void *q = at(b, m->slots.q), *key = at(b, m->slots.key), *workspace = at(b, m->slots.workspace);
    float *weight = at(b, m->slots.weight), *kl = at(b, m->slots.kl), *dkey = at(b, m->slots.dkey);
    float *dweight = at(b, m->slots.dweight);

    LABEL(b, "indexer.loss");
    if (m->guided) take_sides(m, b, &shape);
    if (m->dense)
        b->ops->index_kl_dense(b->stream, &shape, &t, q, key, weight,
                               at(b, teacher->dense ? teacher->slots.q : teacher->slots.absorbed),
                               teacher->dense ? at(b, teacher->slots.key) : attention_kv(teacher, b),
                               teacher->dense ? at(b, teacher->slots.lse) : NULL, b->in->start, b->in->end,
                               b->in->kl_weight, kl, at(b, m->slots.dq), dkey, dweight, workspace);
    else
        b->ops->index_kl_selected(b->stream, &shape, q, key, weight, selected, at(b, m->slots.target), b->in->kl_weight,
                                  kl, at(b, m->slots.dq), dkey, dweight, workspace);
    if (shape.sides == 1) made(b, "relu_side", m->layer, relus(m, b->rows), shape.open);
    b->ops->sum(b->stream, b->rows, kl, b->in->kl_weight, total, workspace);
    tap(b, "kl_rows", m->layer, GLM52_DTYPE_F32, 1, kl);
    backward_projections(m, b, u, q_latent);
}
