/* The trunk's cross-entropy and the end-to-end total variation of drafts against it. */
#include "case.h"

static const glm52_dtype F32 = GLM52_DTYPE_F32, BF16 = GLM52_DTYPE_BF16;

struct tv_case {
    struct head_tv shape;
    struct array *target, *draft, *w, *weight, *alpha, *loss, *dx;
    struct array *label, *trunk_weight, *trunk_loss, *trunk_dx, *dw; /* of the trunk's own loss; dw NULL: not wanted */
    struct array *side; /* NULL: not wanted */
    int given;
    double *p, *q; /* probabilities: trunk [rows,vocabulary], drafts [depths,rows,vocabulary] */
    double rounding; /* of a logit, where logits may be bf16; else 0 */
};

/* The last `depths` rows have no complete chain, nor has every fifth. */
static struct tv_case tv_case(struct head_tv shape)
{
    struct tv_case c = {.shape = shape};

    c.target = array_normal(shape.type, shape.rows * shape.width, 1);
    c.draft = array_normal(shape.type, shape.depths * shape.rows * shape.width, 1);
    c.w = array_normal(shape.type, shape.vocabulary * shape.width, 0.5);
    c.weight = array_normal(F32, shape.rows, 1);
    for (int64_t t = 0; t < shape.rows; t++)
        if (t % 5 == 2 || t + shape.depths >= shape.rows) c.weight->value[t] = 0;
    array_push(c.weight);
    c.alpha = array_output(F32, shape.depths * shape.rows);
    c.loss = array_output(F32, shape.rows);
    c.dx = array_output(shape.type, c.draft->count);
    c.label = array_zero(GLM52_DTYPE_I32, shape.rows);
    for (int64_t t = 0; t < shape.rows; t++) c.label->value[t] = t % 6 == 1 ? -1 : (double)draw_below(shape.vocabulary);
    array_push(c.label);
    c.trunk_weight = array_normal(F32, shape.rows, 1);
    c.trunk_loss = array_output(F32, shape.rows);
    c.trunk_dx = array_output(shape.type, c.target->count);
    c.dw = array_zero(F32, c.w->count);
    c.p = doubles(shape.rows * shape.vocabulary);
    c.q = doubles(shape.depths * shape.rows * shape.vocabulary);
    return c;
}

static void softmax(const struct head_tv *h, const double *x, const double *w, double *p)
{
    double most = -INFINITY, sum = 0;

    for (int64_t v = 0; v < h->vocabulary; v++) {
        p[v] = 0;
        for (int64_t j = 0; j < h->width; j++) p[v] += x[j] * w[v * h->width + j];
        most = fmax(most, p[v]);
    }
    for (int64_t v = 0; v < h->vocabulary; v++) sum += p[v] = exp(p[v] - most);
    for (int64_t v = 0; v < h->vocabulary; v++) p[v] /= sum;
}

static double *draft_row(const struct tv_case *c, int32_t d, int64_t t)
{
    return c->q + (d * c->shape.rows + t) * c->shape.vocabulary;
}

static void fill_trunk(struct tv_case *c)
{
    const struct head_tv *h = &c->shape;

    for (int64_t t = 0; t < h->rows; t++)
        softmax(h, c->target->value + t * h->width, c->w->value, c->p + t * h->vocabulary);
}

static void fill_drafts(struct tv_case *c)
{
    const struct head_tv *h = &c->shape;

    for (int64_t i = 0; i < h->depths * h->rows; i++)
        softmax(h, c->draft->value + i * h->width, c->w->value, c->q + i * h->vocabulary);
}

static double plain_alpha(const struct tv_case *c, int32_t d, int64_t t)
{
    double sum = 0;

    if (c->weight->value[t] == 0) return 0;
    for (int64_t v = 0; v < c->shape.vocabulary; v++)
        sum += fmin(c->p[(t + d + 1) * c->shape.vocabulary + v], draft_row(c, d, t)[v]);
    return sum;
}

static double plain_loss(const struct tv_case *c, int64_t t)
{
    double prefix = 1, sum = 0;

    if (c->weight->value[t] == 0) return 0;
    for (int32_t d = 0; d < c->shape.depths; d++) sum += prefix *= plain_alpha(c, d, t);
    return 1 - sum / c->shape.depths;
}

static double objective(void *problem)
{
    struct tv_case *c = problem;
    double sum = 0;

    fill_drafts(c);
    for (int64_t t = 0; t < c->shape.rows; t++) sum += c->weight->value[t] * plain_loss(c, t);
    return sum;
}

static int on_draft(const struct tv_case *c, int64_t v, int32_t k, int64_t t, const double *p, const double *q)
{
    return c->given ? c->side->value[(k * c->shape.rows + t) * c->shape.vocabulary + v] != 0 : q[v] <= p[v];
}

/* training.md 3.4 in its own words; where q = p, differences see a kink. */
static void plain_gradient(const struct tv_case *c, double *dx)
{
    const struct head_tv *h = &c->shape;

    for (int64_t t = 0; t < h->rows; t++)
        for (int32_t k = 0; k < h->depths; k++) {
            const double *q = draft_row(c, k, t), *p = c->p + (t + k + 1) * h->vocabulary;
            double before = 1, after = 1, product = 1, below = 0;

            if (c->weight->value[t] == 0) continue;
            for (int32_t i = 0; i < k; i++) before *= plain_alpha(c, i, t);
            for (int32_t j = k + 1; j < h->depths; j++) after += product *= plain_alpha(c, j, t);
            for (int64_t v = 0; v < h->vocabulary; v++) below += on_draft(c, v, k, t, p, q) ? q[v] : 0;
            for (int64_t v = 0; v < h->vocabulary; v++)
                for (int64_t j = 0; j < h->width; j++)
                    dx[(k * h->rows + t) * h->width + j] +=
                        c->weight->value[t] * before * after / h->depths * q[v] * (below - on_draft(c, v, k, t, p, q)) *
                        c->w->value[v * h->width + j];
        }
}

/* with_gradient: 1 of both sides, 2 of the drafts alone, 3 of the trunk alone. */
static void run(struct tv_case *c, int with_gradient)
{
    struct array *workspace = array_workspace(ops->head_tv_bytes(device, &c->shape));
    int of_trunk = with_gradient & 1;
    struct head_trunk trunk = {c->target->at, c->label->at, c->trunk_weight->at, c->trunk_loss->at,
                               of_trunk ? c->trunk_dx->at : NULL, of_trunk && c->dw ? c->dw->at : NULL};
    struct head_drafts drafts = {c->draft->at, c->weight->at, c->alpha->at, c->loss->at,
                                 with_gradient && with_gradient < 3 ? c->dx->at : NULL, c->side ? c->side->at : NULL,
                                 c->given};

    ops->head_tv(device, &c->shape, &trunk, &drafts, c->w->at, workspace->at);
    array_fetch(workspace);
}

/* Once more from gradients of 0; every run must leave the bits of the first. */
static void run_again(struct tv_case *c)
{
    for (int64_t j = 0; j < c->dw->count; j++) c->dw->value[j] = 0;
    array_push(c->dw);
    run(c, 1);
    check_same(c->alpha);
    check_same(c->loss);
    check_same(c->dx);
    check_same(c->trunk_loss);
    check_same(c->trunk_dx);
    check_same(c->dw);
}

/* The trunk's results are those of head_loss, which has a test of its own; dw begins with what it holds. */
static void check_trunk(struct tv_case *c)
{
    const struct head_tv *h = &c->shape;
    struct head plain = {h->rows, h->width, h->vocabulary, h->type, h->gradient};
    struct array *loss = array_output(F32, h->rows), *dx = array_output(h->type, c->target->count);
    struct array *dw = array_normal(h->gradient, c->w->count, 1);
    struct array *workspace = array_workspace(ops->head_loss_bytes(device, &plain));
    double rounding = 4 * c->rounding;

    c->dw = array_from(h->gradient, dw->count, dw->value);
    ops->head_loss(device, &plain, c->target->at, c->w->at, c->label->at, c->trunk_weight->at, loss->at, NULL, dx->at,
                   dw->at, workspace->at);
    array_fetch(loss);
    array_fetch(dx);
    array_fetch(dw);
    array_poison(c->trunk_loss);
    array_poison(c->trunk_dx);
    array_poison(c->dx);
    run(c, 3);
    check_close(c->trunk_loss, loss->value, tolerance(F32, 8 * h->width) + rounding);
    check_close(c->trunk_dx, dx->value, tolerance(h->type, h->vocabulary) + rounding);
    check_close(c->dw, dw->value, tolerance(h->gradient, h->rows) * (h->gradient == BF16 ? 4 : 1) + rounding);
}

static void check_losses(struct tv_case *c)
{
    const struct head_tv *h = &c->shape;
    double *alpha = doubles(h->depths * h->rows), *loss = doubles(h->rows);

    for (int64_t t = 0; t < h->rows; t++) {
        loss[t] = plain_loss(c, t);
        for (int32_t d = 0; d < h->depths; d++) alpha[d * h->rows + t] = plain_alpha(c, d, t);
    }
    check_close(c->alpha, alpha, tolerance(F32, 8 * h->width) + 2 * c->rounding);
    check_close(c->loss, loss, tolerance(F32, 8 * h->width) + 2 * h->depths * c->rounding);
}

/* want: the gradient, or NULL for that of differences. */
static void check_case(struct tv_case *c, double *want)
{
    if (!want) {
        want = doubles(c->draft->count);
        differences(objective, c, c->draft->value, c->draft->count, want);
        fill_drafts(c);
    }
    run(c, 0);
    check_losses(c);
    array_poison(c->alpha);
    array_poison(c->loss);
    run(c, 2);
    check_losses(c);
    array_poison(c->alpha);
    array_poison(c->dx);
    run(c, 1);
    check_losses(c);
    check_close(c->dx, want, tolerance(c->shape.type, 2 * c->shape.vocabulary) + 4 * c->rounding);
}

/* Where rounding may decide, either side is right. */
static void check_side(const struct tv_case *c)
{
    const struct head_tv *h = &c->shape;
    double slack = tolerance(F32, 8 * h->width) + 4 * c->rounding;

    array_fetch(c->side);
    for (int32_t d = 0; d < h->depths; d++)
        for (int64_t t = 0; t < h->rows; t++)
            for (int64_t v = 0; v < h->vocabulary; v++) {
                double got = c->side->value[(d * h->rows + t) * h->vocabulary + v], q = draft_row(c, d, t)[v], p;

                if (c->weight->value[t] == 0) {
                    ck_assert(got == 0);
                    continue;
                }
                p = c->p[(t + d + 1) * h->vocabulary + v];
                ck_assert_msg(got == (q <= p) || (fabs(q - p) <= slack * (q + p) && got == (q > p)),
                              "side %g of depth %d, row %d, token %d: q %g, p %g", got, (int)d, (int)t, (int)v, q, p);
            }
}

/* Keeping sides changes nothing; drawn ones rule the gradient and nothing else. Where logits are bf16, q, its sum over
 * the sides and both factors of a chain are each off by up to two roundings. */
static void check_sides(struct tv_case *c)
{
    double *want = doubles(c->draft->count), *drawn = doubles(c->shape.depths * c->shape.rows * c->shape.vocabulary);

    check_same(c->alpha);
    check_same(c->loss);
    check_same(c->dx);
    c->side = array_output(GLM52_DTYPE_I32, c->shape.depths * c->shape.rows * c->shape.vocabulary);
    run(c, 2);
    check_same(c->alpha);
    check_same(c->loss);
    check_same(c->dx);
    check_side(c);
    for (int64_t i = 0; i < c->side->count; i++) c->side->value[i] = drawn[i] = (double)draw_below(2);
    array_push(c->side);
    c->given = 1;
    plain_gradient(c, want);
    array_poison(c->alpha);
    array_poison(c->loss);
    array_poison(c->dx);
    run(c, 1);
    check_losses(c);
    check_close(c->dx, want, tolerance(c->shape.type, 2 * c->shape.vocabulary) + 8 * c->rounding);
    check_exact(c->side, drawn);
    c->side = NULL;
    c->given = 0;
}

static void check_tv(struct head_tv shape)
{
    struct tv_case c = tv_case(shape);

    fill_trunk(&c);
    check_case(&c, NULL);
    check_sides(&c);
    check_trunk(&c);
}

CASE(head_tv, "odd shapes, broken chains, one depth, fewer rows than depths, one row, none, one token")
{
    check_tv((struct head_tv){17, 5, 23, 3, F32, F32});
    check_tv((struct head_tv){9, 4, 13, 1, F32, F32});
    check_tv((struct head_tv){3, 5, 7, 4, F32, F32});
    check_tv((struct head_tv){1, 5, 7, 2, F32, F32});
    check_tv((struct head_tv){0, 5, 7, 2, F32, F32});
    check_tv((struct head_tv){7, 3, 1, 2, F32, F32});
}

CASE(head_tv, "bf16")
{
    check_tv((struct head_tv){13, 7, 19, 2, BF16, F32});
}

static double largest_logit(const struct head_tv *h, const struct array *x, const struct array *w)
{
    double most = 0;

    for (int64_t i = 0; i < x->count / h->width; i++)
        for (int64_t v = 0; v < h->vocabulary; v++) {
            double sum = 0;

            for (int64_t j = 0; j < h->width; j++) sum += x->value[i * h->width + j] * w->value[v * h->width + j];
            most = fmax(most, fabs(sum));
        }
    return most;
}

/* The gradient on the sides that the device takes, which where logits are rounded to bf16 need not be those of
 * double. */
static double *gradient_on_own_sides(struct tv_case *c)
{
    double *want = doubles(c->draft->count);

    c->side = array_output(GLM52_DTYPE_I32, c->shape.depths * c->shape.rows * c->shape.vocabulary);
    run(c, 2);
    check_side(c);
    c->given = 1;
    plain_gradient(c, want);
    c->given = 0;
    c->side = NULL;
    return want;
}

static void check_wide(struct head_tv shape)
{
    struct tv_case c = tv_case(shape);
    double *want;

    c.rounding = ldexp(fmax(largest_logit(&shape, c.target, c.w), largest_logit(&shape, c.draft, c.w)), -9);
    fill_trunk(&c);
    fill_drafts(&c);
    want = gradient_on_own_sides(&c);
    check_case(&c, want);
    check_sides(&c);
    check_trunk(&c);
    for (int i = 0; i < 3; i++) {
        array_poison(c.dx);
        run_again(&c);
    }
}

CASE(head_tv, "bf16 of wide rows: a vocabulary that is a multiple of nothing, GLM-5.2's, several chunks, one token")
{
    check_wide((struct head_tv){29, 40, 4097, 3, BF16, F32});
    check_wide((struct head_tv){5, 16, 154880, 1, BF16, BF16});
    check_wide((struct head_tv){1309, 8, 67, 2, BF16, BF16});
    check_wide((struct head_tv){9, 24, 1, 2, BF16, F32});
    check_wide((struct head_tv){3, 8, 9, 4, BF16, F32});
    check_wide((struct head_tv){1, 8, 9, 2, BF16, F32});
    check_wide((struct head_tv){0, 8, 100, 1, BF16, F32});
}

CASE(head_tv, "trunk rows that no complete chain looks at are not numbers")
{
    struct tv_case c = tv_case((struct head_tv){15, 6, 21, 2, F32, F32});

    for (int64_t t = 0; t < 15; t++)
        if (t != 4 && t != 5) c.weight->value[t] = 0;
    for (int64_t t = 0; t < 15; t++)
        for (int64_t j = 0; j < 6; j++)
            if (t < 5 || t > 7) c.target->value[t * 6 + j] = (double)NAN;
    for (int64_t t = 0; t < 15; t++) c.label->value[t] = -1;
    array_push(c.label);
    array_push(c.weight);
    array_push(c.target);
    c.dw = NULL; /* to which no weight of 0 would keep what is not a number */
    fill_trunk(&c);
    check_case(&c, NULL);
}

/* Whole numbers make logits exact on any device, so that equal ones are equal. */
static void whole(struct array *a, int64_t most)
{
    for (int64_t i = 0; i < a->count; i++) a->value[i] = (double)draw_between(-most, most);
    array_push(a);
}

CASE(head_tv, "drafts equal to the trunk, in all tokens and in some: equal counts as below")
{
    struct tv_case c = tv_case((struct head_tv){16, 3, 5, 2, F32, F32});
    double *want = doubles(c.draft->count);

    whole(c.target, 1);
    whole(c.w, 1);
    for (int64_t v = 0; v < 2; v++) /* tokens 0 and 1 trade places when a state's last number changes sign */
        for (int64_t j = 0; j < 3; j++) c.w->value[v * 3 + j] = j < 2 ? 0 : 1 - 2 * (double)v;
    for (int64_t v = 2; v < 5; v++) c.w->value[v * 3 + 2] = 0;
    array_push(c.w);
    for (int32_t d = 0; d < 2; d++)
        for (int64_t t = 0; t + d + 1 < 16; t++)
            for (int64_t j = 0; j < 3; j++)
                c.draft->value[(d * 16 + t) * 3 + j] = c.target->value[(t + d + 1) * 3 + j] *
                                                       (j == 2 && t % 3 ? -1 : 1);
    array_push(c.draft);
    fill_trunk(&c);
    fill_drafts(&c);
    plain_gradient(&c, want);
    check_case(&c, want);
}

CASE(head_tv, "acceptances of 0 leave the gradient of the others finite")
{
    struct tv_case c = tv_case((struct head_tv){12, 4, 9, 3, F32, F32});
    double *want = doubles(c.draft->count);

    for (int64_t t = 0; t < 12; t++) /* trunk and middle draft sure of different tokens in some rows */
        for (int64_t j = 0; j < 4; j++)
            if (t % 2) {
                c.target->value[t * 4 + j] = c.w->value[t % 9 * 4 + j] * 900;
                c.draft->value[(12 + t) * 4 + j] = c.w->value[(t + 1) % 9 * 4 + j] * 900;
            }
    array_push(c.target);
    array_push(c.draft);
    fill_trunk(&c);
    fill_drafts(&c);
    plain_gradient(&c, want);
    check_case(&c, want);
}

CASE(head_tv, "several chunks of rows, the same bits for any number of threads")
{
    struct tv_case c = tv_case((struct head_tv){401, 11, 67, 3, F32, F32});
    double *want = doubles(c.draft->count);

    fill_trunk(&c);
    fill_drafts(&c);
    plain_gradient(&c, want);
    for (int threads = 1; threads <= 3; threads++) {
        device_threads(threads);
        run_again(&c);
    }
    check_case(&c, want);
    check_trunk(&c);
}

CASE(head_tv, "no more memory than head_loss takes")
{
    int64_t rows[] = {4096, 700, 96}, vocabulary[] = {8192, 97, 154880};
    glm52_dtype types[] = {F32, BF16};

    for (int i = 0; i < 6; i++)
        for (int32_t depths = 1; depths < 8; depths++) {
            struct head_tv tv = {rows[i % 3], 512, vocabulary[i % 3], depths, types[i / 3], F32};
            struct head plain = {rows[i % 3], 512, vocabulary[i % 3], types[i / 3], F32};
            size_t kept = (size_t)depths * (size_t)(vocabulary[i % 3] + 64) * 2; /* of the rows that follow a chunk */

            /* 96 KB: sums of the rows, which are not as wide as the vocabulary */
            ck_assert_uint_le(ops->head_tv_bytes(device, &tv),
                              ops->head_loss_bytes(device, &plain) + kept + (96 << 10));
        }
}

CASE(head_tv, "at GLM-5.2's width less than 0.7 GB beyond the gradients, for the loss too")
{
    for (int64_t rows = 1024; rows <= 65536; rows *= 4)
        for (int32_t depths = 1; depths < 8; depths += 3) {
            struct head_tv tv = {rows, 6144, 154880, depths, BF16, F32};
            struct head plain = {rows, 6144, 154880, BF16, F32};

            ck_assert_uint_lt(ops->head_tv_bytes(device, &tv), 700000000);
            ck_assert_uint_lt(ops->head_loss_bytes(device, &plain), 700000000);
        }
}

BENCH(head_tv, "both gradients, 7 depths, 2048 x 512 to 8192")
{
    struct tv_case c = tv_case((struct head_tv){2048, 512, 8192, 7, F32, F32});
    struct array *workspace = array_workspace(ops->head_tv_bytes(device, &c.shape));
    struct head_trunk trunk = {c.target->at,     c.label->at,    c.trunk_weight->at,
                               c.trunk_loss->at, c.trunk_dx->at, c.dw->at};
    struct head_drafts drafts = {c.draft->at, c.weight->at, c.alpha->at, c.loss->at, c.dx->at, NULL, 0};

    BENCH_LOOP
        ops->head_tv(device, &c.shape, &trunk, &drafts, c.w->at, workspace->at);
    bench_rate(2.0 * 2048 * 512 * 8192 * (3 + 14), 0);
}

/* Logits of about -3 to 3, so that no probability is 0, as with gradients of zeros products would run faster. */
static void bench_full(int64_t rows, int32_t depths, glm52_dtype gradient)
{
    enum { WIDTH = 6144, VOCABULARY = 154880 };
    struct head_tv h = {rows, WIDTH, VOCABULARY, depths, BF16, gradient};
    struct array *target = array_zero(BF16, rows * WIDTH), *draft = array_zero(BF16, depths * rows * WIDTH);
    struct array *w = array_random(BF16, (int64_t)VOCABULARY * WIDTH), *dw = array_random(gradient, w->count);
    struct array *weight = array_random(F32, rows), *label = array_zero(GLM52_DTYPE_I32, rows);
    struct array *alpha = array_output(F32, depths * rows), *loss = array_output(F32, 2 * rows);
    struct array *dx = array_random(BF16, draft->count + target->count);
    struct array *workspace = array_random(BF16, (int64_t)ops->head_tv_bytes(device, &h) / 2);
    struct head_trunk trunk = {target->at, label->at, weight->at, loss->at, dx->at, dw->at};
    struct head_drafts drafts = {draft->at, weight->at, alpha->at, (float *)loss->at + rows,
                                 (uint16_t *)dx->at + target->count, NULL, 0};

    for (int64_t i = 0; i < draft->count; i++) draft->value[i] = (double)((i * 2654435761 >> 7) % 4093 - 2046) / 65536;
    for (int64_t i = 0; i < target->count; i++)
        target->value[i] = (double)((i * 2654435761 >> 9) % 4091 - 2045) / 65536;
    for (int64_t i = 0; i < rows; i++) label->value[i] = (double)draw_below(VOCABULARY);
    array_push(draft);
    array_push(target);
    array_push(label);
    BENCH_LOOP
        ops->head_tv(device, &h, &trunk, &drafts, w->at, workspace->at);
    bench_counted();
}

BENCH_FULL(head_tv, "8192 x 6144 to 154880, 1 depth, fp32 dw", "")
{
    bench_full(8192, 1, F32);
}

BENCH_FULL(head_tv, "8192 x 6144 to 154880, 1 depth, bf16 dw", "")
{
    bench_full(8192, 1, BF16);
}

BENCH_FULL(head_tv, "4096 x 6144 to 154880, 3 depths, bf16 dw", "")
{
    bench_full(4096, 3, BF16);
}
