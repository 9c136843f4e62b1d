/* SwiGLU feed-forward: down(silu(gate(x)) * up(x)); model.md 2.5. gate and up lie in memory one after the other. */
#include "model/parts.h"

void mlp_plan(struct mlp *m, struct plan *p)
{
    plan_save(p, &m->slots.gate_up, m->type, p->rows, 2 * m->width); /* backward redoes silu */
    uint64_t mark = plan_mark(p);
    plan_temp(p, &m->slots.act, m->type, p->rows, m->width);
    plan_release(p, mark);
}

void mlp_forward(const struct mlp *m, const struct pass *f, const void *x, const void *from, void *y)
{
    struct swiglu g = {.rows = f->rows, .width = m->width, .type = m->type};
    void *gate_up = at(f, m->slots.gate_up), *act = at(f, m->slots.act);

    linear_forward_wide(f, m->w->gate, 2 * m->width, x, NULL, gate_up);
    f->ops->swiglu_forward(f->stream, &g, gate_up, NULL, NULL, act);
    linear_forward(f, m->w->down, act, from, y);
}

void mlp_backward(const struct mlp *m, const struct pass *b, const void *x, const void *dy, void *dx, int add)
{
    struct swiglu g = {.rows = b->rows, .width = m->width, .type = m->type};
    void *gate_up = at(b, m->slots.gate_up), *dgate_up = gate_up; /* its last use */
    void *act = at(b, m->slots.act), *dact = act; /* act takes the place of its gradient */

    linear_backward_rows(b, m->w->down, dy, dact, 0);
    b->ops->swiglu_backward(b->stream, &g, gate_up, NULL, NULL, dact, dgate_up, NULL, act);
    linear_gradient(b, m->w->down, act, dy);
    linear_backward_wide(b, m->w->gate, 2 * m->width, x, dgate_up, dx, add);
}
