/* bf16 in fp32: a model's operations, each result rounded to the bf16 that the real one would leave; forward and
 * backward of sparse attention. The grid may be shifted: x becomes round(x c) / c, with a c from 1 to 2 that is drawn
 * anew for each result. Such a run is no worse a bf16 than the real one (c = 1, the same bits on the cpu), so many of
 * them show how far from the exact values bf16 may be by chance. */
#include <string.h>

#include "base/dtype.h"
#include "case.h"

static const struct ops *exact;
static struct ops rounded;
static uint64_t state;

static float draw_shift(void)
{
    if (!state) return 1;
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return 1 + (float)(state >> 40) / (1 << 24);
}

static void to_grid(void *values, int64_t rows, int64_t stride, int64_t width, float shift)
{
    float *x = values;

    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = i * stride; j < i * stride + width; j++) x[j] = bf16_to_f32(f32_to_bf16(x[j] * shift)) / shift;
}

static void to_one_grid(void *values, int64_t rows, int64_t width)
{
    to_grid(values, rows, width, width, draw_shift());
}

/* Gradients of parameters stay fp32, and so do indexer weights, logits of router and head, and what makes keys. */
static int stays_fp32(const struct stream *s, const struct gemm *g)
{
    int forward = g->transpose_b && (!strcmp(s->label, "moe.router") || !strcmp(s->label, "mla.kv_a"));

    return g->transpose_a || g->scale != 0 || !strcmp(s->label, "head") || forward;
}

static void gemm(struct stream *s, const struct gemm *g, const void *a, const void *b, void *c)
{
    exact->gemm(s, g, a, b, c);
    if (stays_fp32(s, g)) return;
    float shift = draw_shift();
    for (int64_t i = 0; i < g->batch; i++) to_grid((float *)c + i * g->stride_c, g->m, g->ldc, g->n, shift);
}

static void grouped_forward(struct stream *s, const struct grouped_gemm *g, const int32_t *offsets, const void *x,
                            const void *w, void *y)
{
    exact->grouped_gemm_forward(s, g, offsets, x, w, y);
    to_one_grid(y, offsets[g->groups], g->n);
}

static void grouped_rows(struct stream *s, const struct grouped_gemm *g, const int32_t *offsets, const void *dy,
                         const void *w, void *dx)
{
    exact->grouped_gemm_backward_rows(s, g, offsets, dy, w, dx);
    to_one_grid(dx, offsets[g->groups], g->k);
}

static void norm_forward(struct stream *s, const struct norm *n, const void *x, const void *gain, void *y, float *rstd)
{
    exact->rmsnorm_forward(s, n, x, gain, y, rstd);
    to_grid(y, n->rows, n->y_stride, n->width, draw_shift());
}

static void norm_backward(struct stream *s, const struct norm *n, const void *x, const void *gain, const float *rstd,
                          const void *dy, void *dx, float *dgain, void *workspace)
{
    exact->rmsnorm_backward(s, n, x, gain, rstd, dy, dx, dgain, workspace);
    to_grid(dx, n->rows, n->x_stride, n->width, draw_shift());
}

static void layernorm_forward(struct stream *s, const struct norm *n, const void *x, const void *gain, const void *bias,
                              void *y, float *statistics)
{
    exact->layernorm_forward(s, n, x, gain, bias, y, statistics);
    to_grid(y, n->rows, n->y_stride, n->width, draw_shift());
}

static void rope(struct stream *s, const struct rope *r, const float *table, const void *x, void *y)
{
    exact->rope(s, r, table, x, y);
    float shift = draw_shift();
    for (int32_t h = 0; h < r->heads; h++) to_grid((float *)y + h * r->y_head, r->rows, r->y_row, 2 * r->half, shift);
}

static void latent_forward(struct stream *s, const struct latent *l, const float *table, const float *x,
                           const void *gain, void *y, float *rstd)
{
    exact->latent_forward(s, l, table, x, gain, y, rstd);
    to_one_grid(y, l->rows, l->rank + 2 * l->half);
}

static void latent_backward(struct stream *s, const struct latent *l, const float *table, const float *x,
                            const void *gain, const float *rstd, const float *dy, void *dx, float *dgain,
                            void *workspace)
{
    exact->latent_backward(s, l, table, x, gain, rstd, dy, dx, dgain, workspace);
    to_one_grid(dx, l->rows, l->rank + 2 * l->half);
}

static void attention_forward(struct stream *s, const struct sparse_mla *a, const void *q, const void *kv,
                              const int32_t *selected, void *out, float *lse, void *workspace)
{
    exact->sparse_mla_forward(s, a, q, kv, selected, out, lse, workspace);
    to_one_grid(out, a->rows * a->heads, a->kv_rank);
}

static void attention_backward(struct stream *s, const struct sparse_mla *a, const void *q, const void *kv,
                               const int32_t *selected, const void *out, const float *lse, const void *dout, void *dq,
                               float *dkv, float *target, void *workspace)
{
    exact->sparse_mla_backward(s, a, q, kv, selected, out, lse, dout, dq, dkv, target, workspace);
    to_one_grid(dq, a->rows * a->heads, a->kv_rank + a->rope);
}

static void convert(struct stream *s, int64_t count, glm52_dtype from, const void *x, glm52_dtype to, void *y)
{
    exact->convert(s, count, from, x, to, y);
    to_one_grid(y, 1, count);
}

static void collect(struct stream *s, const struct dispatch *d, const int32_t *place, const void *x, void *y)
{
    exact->dispatch_collect(s, d, place, x, y);
    to_one_grid(y, d->rows, d->width);
}

static void swiglu_forward(struct stream *s, const struct swiglu *g, const void *gate_up, const float *weight,
                           const int32_t *source, void *act)
{
    exact->swiglu_forward(s, g, gate_up, weight, source, act);
    to_one_grid(act, g->rows, g->width);
}

static void swiglu_backward(struct stream *s, const struct swiglu *g, const void *gate_up, const float *weight,
                            const int32_t *source, const void *dact, void *dgate_up, float *dweight, void *act)
{
    exact->swiglu_backward(s, g, gate_up, weight, source, dact, dgate_up, dweight, act);
    to_one_grid(dgate_up, g->rows, 2 * g->width);
    if (act) to_one_grid(act, g->rows, g->width);
}

static void head_loss(struct stream *s, const struct head *h, const void *x, const void *w, const int32_t *label,
                      const float *weight, float *loss, float *hit, void *dx, void *dw, void *workspace)
{
    exact->head_loss(s, h, x, w, label, weight, loss, hit, dx, dw, workspace);
    if (dx) to_one_grid(dx, h->rows, h->width);
}

void grid_model(struct stream *s, int seed)
{
    exact = s->ops;
    rounded = *exact;
    state = (uint64_t)seed * 0x9e3779b97f4a7c15;
    rounded.gemm = gemm;
    rounded.grouped_gemm_forward = grouped_forward;
    rounded.grouped_gemm_backward_rows = grouped_rows;
    rounded.rmsnorm_forward = norm_forward;
    rounded.rmsnorm_backward = norm_backward;
    rounded.layernorm_forward = layernorm_forward;
    rounded.rope = rope;
    rounded.latent_forward = latent_forward;
    rounded.latent_backward = latent_backward;
    rounded.sparse_mla_forward = attention_forward;
    rounded.sparse_mla_backward = attention_backward;
    rounded.convert = convert;
    rounded.dispatch_collect = collect;
    rounded.swiglu_forward = swiglu_forward;
    rounded.swiglu_backward = swiglu_backward;
    rounded.head_loss = head_loss;
    s->ops = &rounded;
}
