/* Mixture of experts: sigmoid router, dropless grouped experts, one shared expert; model.md 2.6. The routing weight
 * multiplies the activation before the down projection, which is the same product, and lets backward do without the
 * experts' outputs. The sum over a row's experts comes last, in fp32 and with all else that it is added to: what would
 * be rounded before is the larger part of the result. */
#include <math.h>

#include "model/parts.h"

static int64_t assignments(const struct moe *m, int64_t rows)
{
    return rows * m->c->num_experts_per_tok;
}

static struct dispatch dispatch_shape(const struct moe *m, int64_t rows, int add)
{
    return (struct dispatch){.rows = rows, .width = m->c->hidden_size, .k = (int32_t)m->c->num_experts_per_tok,
                             .experts = (int32_t)m->c->n_routed_experts, .add = add, .type = m->type};
}

/* n outputs from k inputs per row, for matrices that lie one expert's size apart. */
static struct grouped_gemm grouped(const struct moe *m, int64_t rows, int64_t n, int64_t k)
{
    return (struct grouped_gemm){.rows = assignments(m, rows), .n = n, .k = k,
                                 .stride = 3 * m->c->moe_intermediate_size * m->c->hidden_size,
                                 .groups = (int32_t)m->c->n_routed_experts, .type = m->type,
                                 .gradient = m->w->expert0.gate->gradient_type};
}

void moe_plan(struct moe *m, struct stream *s, struct plan *p)
{
    const struct model_config *c = m->c;
    int64_t all = assignments(m, p->rows), width = c->moe_intermediate_size, hidden = c->hidden_size;
    struct dispatch d = dispatch_shape(m, p->rows, 0);

    plan_save(p, &m->slots.logits, GLM52_DTYPE_F32, p->rows, c->n_routed_experts);
    plan_save(p, &m->slots.chosen, GLM52_DTYPE_I32, p->rows, c->num_experts_per_tok);
    plan_save(p, &m->slots.weight, GLM52_DTYPE_F32, p->rows, c->num_experts_per_tok);
    plan_save(p, &m->slots.offsets, GLM52_DTYPE_I32, 1, c->n_routed_experts + 1);
    plan_save(p, &m->slots.source, GLM52_DTYPE_I32, all, 1);
    plan_save(p, &m->slots.place, GLM52_DTYPE_I32, all, 1);
    plan_save(p, &m->slots.gate_up, m->type, all, 2 * width);

    uint64_t mark = plan_mark(p);
    plan_temp_bytes(p, &m->slots.workspace, s->ops->dispatch_sort_bytes(s, &d));
    plan_temp(p, &m->slots.wide, m->type, all, hidden);
    mlp_plan(&m->shared, p); /* its activation lies where what follows does, which is dead while it is needed */
    plan_temp(p, &m->slots.act, m->type, all, width);
    plan_temp(p, &m->slots.dweight, GLM52_DTYPE_F32, p->rows, c->num_experts_per_tok);
    plan_temp(p, &m->slots.dlogits, GLM52_DTYPE_F32, p->rows, c->n_routed_experts);
    plan_release(p, mark);
}

static struct route route_shape(const struct moe *m, int64_t rows)
{
    return (struct route){.rows = rows, .experts = (int32_t)m->c->n_routed_experts,
                          .k = (int32_t)m->c->num_experts_per_tok, .normalize = m->c->norm_topk_prob,
                          .forced = m->config->moe.force_balance, .scale = (float)m->c->routed_scaling_factor};
}

/* Most assignments of an expert; 0: no limit. */
static int64_t capacity_of(const struct moe *m, int64_t rows)
{
    double share = (double)assignments(m, rows) / (double)m->c->n_routed_experts;

    return m->config->moe.capacity_factor > 0 ? (int64_t)ceil(m->config->moe.capacity_factor * share) : 0;
}

static void choose_experts(const struct moe *m, const struct pass *f, int layer, const void *x)
{
    const struct parameter *w = m->w->router;
    struct route r = route_shape(m, f->rows);
    struct dispatch d = dispatch_shape(m, f->rows, 0);
    float *logits = at(f, m->slots.logits), *weight = at(f, m->slots.weight);
    int32_t *chosen = at(f, m->slots.chosen);

    LABEL(f, "moe.router");
    linear_forward_float(f, w, x, logits);
    r.given = given(f, "router_idx", layer, r.k, chosen);
    f->ops->route_forward(f->stream, &r, logits, (const float *)m->w->bias->value, chosen, weight);
    if (!r.given) made(f, "router_idx", layer, r.k, chosen);
    int64_t capacity = capacity_of(m, f->rows);
    if (capacity)
        f->ops->limit_capacity(f->stream, &r, capacity, m->config->moe.capacity_policy, chosen, weight,
                               f->replay ? NULL : m->dropped);
    f->ops->dispatch_sort(f->stream, &d, chosen, at(f, m->slots.offsets), at(f, m->slots.source), at(f, m->slots.place),
                          at(f, m->slots.workspace));
    if (f->training && !f->replay) f->ops->count_experts(f->stream, &r, chosen, f->in->counted, m->counts);
    tap(f, "router_logits", layer, GLM52_DTYPE_F32, w->shape[0], logits);
    tap(f, "router_idx", layer, GLM52_DTYPE_I32, r.k, chosen);
    tap(f, "router_w", layer, GLM52_DTYPE_F32, r.k, weight);
}

void moe_forward(const struct moe *m, const struct pass *f, int layer, const void *x, const void *from, void *y)
{
    int64_t width = m->c->moe_intermediate_size, hidden = m->c->hidden_size;
    struct dispatch d = dispatch_shape(m, f->rows, 2);
    struct grouped_gemm up = grouped(m, f->rows, 2 * width, hidden), down = grouped(m, f->rows, hidden, width);
    struct swiglu g = {.rows = up.rows, .width = width, .type = m->type};
    const int32_t *offsets = at(f, m->slots.offsets), *place = at(f, m->slots.place);
    void *wide = at(f, m->slots.wide), *gate_up = at(f, m->slots.gate_up), *act = at(f, m->slots.act);

    d.from = from;
    LABEL(f, "moe.shared");
    mlp_forward(&m->shared, f, x, NULL, y);
    choose_experts(m, f, layer, x);
    LABEL(f, "moe.experts");
    f->ops->dispatch_spread(f->stream, &d, place, x, wide);
    f->ops->grouped_gemm_forward(f->stream, &up, offsets, wide, m->w->expert0.gate->value, gate_up);
    f->ops->swiglu_forward(f->stream, &g, gate_up, at(f, m->slots.weight), at(f, m->slots.source), act);
    f->ops->grouped_gemm_forward(f->stream, &down, offsets, act, m->w->expert0.down->value, wide);
    f->ops->dispatch_collect(f->stream, &d, place, wide, y);
}

/* gradient_add() for `count` matrices of every expert, those of the first at w. */
static int experts_add(const struct moe *m, const struct pass *b, const struct parameter *w, int count)
{
    int add = 1;

    for (int64_t e = 0; e < m->c->n_routed_experts; e++) add = gradient_add(b, w + 3 * e, count);
    return add;
}

/* Through the experts, up to the rows of `wide` that each passes back; and the gradient of the routing weights. */
static void experts_backward(const struct moe *m, const struct pass *b, const void *x, const void *dy)
{
    int64_t width = m->c->moe_intermediate_size, hidden = m->c->hidden_size;
    struct dispatch d = dispatch_shape(m, b->rows, 0);
    struct grouped_gemm up = grouped(m, b->rows, 2 * width, hidden), down = grouped(m, b->rows, hidden, width);
    struct swiglu g = {.rows = up.rows, .width = width, .type = m->type};
    const int32_t *offsets = at(b, m->slots.offsets), *place = at(b, m->slots.place);
    void *wide = at(b, m->slots.wide), *gate_up = at(b, m->slots.gate_up), *dgate_up = gate_up; /* its last use */
    void *act = at(b, m->slots.act), *dact = act; /* act takes the place of its gradient */

    LABEL(b, "moe.experts");
    b->ops->dispatch_spread(b->stream, &d, place, dy, wide);
    b->ops->grouped_gemm_backward_rows(b->stream, &down, offsets, wide, m->w->expert0.down->value, dact);
    b->ops->swiglu_backward(b->stream, &g, gate_up, at(b, m->slots.weight), at(b, m->slots.source), dact,
                            dgate_up, at(b, m->slots.dweight), act);
    if (m->w->expert0.down->gradient) {
        down.add = experts_add(m, b, m->w->expert0.down, 1);
        b->ops->grouped_gemm_backward_weight(b->stream, &down, offsets, wide, act, m->w->expert0.down->gradient);
    }
    b->ops->dispatch_spread(b->stream, &d, place, x, wide);
    if (m->w->expert0.gate->gradient) {
        struct grouped_gemm weight = up;
        weight.add = experts_add(m, b, m->w->expert0.gate, 2);
        b->ops->grouped_gemm_backward_weight(b->stream, &weight, offsets, dgate_up, wide, m->w->expert0.gate->gradient);
    }
    b->ops->grouped_gemm_backward_rows(b->stream, &up, offsets, dgate_up, m->w->expert0.gate->value, wide);
}

/* Balance and z losses act on the logits alone. Each microbatch and each pass over the weights has its share. */
static void add_auxiliary(const struct moe *m, const struct pass *b, float *dlogits)
{
    const struct moe_config *c = &m->config->moe;
    float share = 1.0f / (float)(b->microbatches * m->passes);
    struct route_auxiliary a = {.rows = b->rows, .experts = (int32_t)m->c->n_routed_experts,
                                .k = (int32_t)m->c->num_experts_per_tok, .sequences = b->in->sequences,
                                .coefficient =
                                    c->auxiliary_loss == AUXILIARY_NONE ? 0 : (float)c->auxiliary_coeff * share,
                                .z_coefficient = (float)c->z_coeff * share};

    if (a.coefficient > 0 || a.z_coefficient > 0)
        b->ops->route_auxiliary(b->stream, &a, at(b, m->slots.logits), b->in->sequence, dlogits, m->auxiliary,
                                c->auxiliary_loss == AUXILIARY_GLOBAL ? m->running : NULL);
}

static void router_backward(const struct moe *m, const struct pass *b, const void *x, void *dx)
{
    const struct parameter *w = m->w->router;
    int64_t in = w->shape[1], experts = w->shape[0];
    struct route r = route_shape(m, b->rows);
    struct gemm rows = {.m = b->rows, .n = in, .k = experts, .lda = experts, .ldb = in, .ldc = in, .batch = 1,
                        .a_type = GLM52_DTYPE_F32, .b_type = w->type, .c_type = m->type};
    struct gemm weight = {.m = experts, .n = in, .k = b->rows, .lda = experts, .ldb = in, .ldc = in, .batch = 1,
                          .transpose_a = 1, .a_type = GLM52_DTYPE_F32, .b_type = m->type, .c_type = w->gradient_type};
    float *dlogits = at(b, m->slots.dlogits);

    LABEL(b, "moe.router");
    if (m->config->moe.capacity_factor > 0) /* a dropped assignment has no weight that could learn */
        b->ops->clear_where_zero(b->stream, b->rows * r.k, at(b, m->slots.weight), at(b, m->slots.dweight));
    b->ops->route_backward(b->stream, &r, at(b, m->slots.logits), at(b, m->slots.chosen), at(b, m->slots.dweight),
                           dlogits);
    add_auxiliary(m, b, dlogits);
    b->ops->gemm(b->stream, &rows, dlogits, w->value, dx);
    if (!w->gradient) return;
    weight.add = gradient_add(b, w, 1);
    b->ops->gemm(b->stream, &weight, dlogits, x, w->gradient);
}

void moe_backward(const struct moe *m, const struct pass *b, const void *x, const void *dy, void *dx)
{
    struct dispatch d = dispatch_shape(m, b->rows, 1);

    experts_backward(m, b, x, dy);
    router_backward(m, b, x, dx);
    LABEL(b, "moe.shared");
    mlp_backward(&m->shared, b, x, dy, dx, 1);
    LABEL(b, "moe.experts");
    b->ops->dispatch_collect(b->stream, &d, at(b, m->slots.place), at(b, m->slots.wide), dx);
}
