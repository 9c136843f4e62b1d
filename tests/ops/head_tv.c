/* End-to-end total variation of drafts against the trunk. */
#include "case.h"

static const glm52_dtype F32 = GLM52_DTYPE_F32, BF16 = GLM52_DTYPE_BF16;

struct tv_case {
    struct head_tv shape;
    struct array *target, *draft, *w, *weight, *alpha, *loss, *dx;
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
            for (int64_t v = 0; v < h->vocabulary; v++) below += q[v] <= p[v] ? q[v] : 0;
            for (int64_t v = 0; v < h->vocabulary; v++)
                for (int64_t j = 0; j < h->width; j++)
                    dx[(k * h->rows + t) * h->width + j] += c->weight->value[t] * before * after / h->depths * q[v] *
                                                            (below - (q[v] <= p[v])) * c->w->value[v * h->width + j];
        }
}

static void run(struct tv_case *c, int with_gradient)
{
    struct array *workspace = array_workspace(ops->head_tv_bytes(device, &c->shape));

    ops->head_tv(device, &c->shape, c->target->at, c->draft->at, c->w->at, c->weight->at, c->alpha->at, c->loss->at,
                 with_gradient ? c->dx->at : NULL, workspace->at);
    array_fetch(workspace);
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
    run(c, 1);
    check_losses(c);
    check_close(c->dx, want, tolerance(c->shape.type, 2 * c->shape.vocabulary) + 4 * c->rounding);
}

static void check_tv(struct head_tv shape)
{
    struct tv_case c = tv_case(shape);

    fill_trunk(&c);
    check_case(&c, NULL);
}

CASE(head_tv, "odd shapes, broken chains, one depth, fewer rows than depths, one row, none, one token")
{
    check_tv((struct head_tv){17, 5, 23, 3, F32});
    check_tv((struct head_tv){9, 4, 13, 1, F32});
    check_tv((struct head_tv){3, 5, 7, 4, F32});
    check_tv((struct head_tv){1, 5, 7, 2, F32});
    check_tv((struct head_tv){0, 5, 7, 2, F32});
    check_tv((struct head_tv){7, 3, 1, 2, F32});
}

CASE(head_tv, "bf16")
{
    check_tv((struct head_tv){13, 7, 19, 2, BF16});
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

/* Logits may be rounded to bf16; where that decides whether q exceeds p, both are close, and the gradient moves little. */
static void check_wide(struct head_tv shape)
{
    struct tv_case c = tv_case(shape);
    double *want = doubles(c.draft->count);

    c.rounding = ldexp(fmax(largest_logit(&shape, c.target, c.w), largest_logit(&shape, c.draft, c.w)), -9);
    fill_trunk(&c);
    fill_drafts(&c);
    plain_gradient(&c, want);
    check_case(&c, want);
    for (int i = 0; i < 3; i++) {
        array_poison(c.dx);
        run(&c, 1);
        check_same(c.alpha);
        check_same(c.loss);
        check_same(c.dx);
    }
}

CASE(head_tv, "bf16 of wide rows: a vocabulary that is a multiple of nothing, GLM-5.2's, several chunks, one token")
{
    check_wide((struct head_tv){29, 40, 4097, 3, BF16});
    check_wide((struct head_tv){5, 16, 154880, 1, BF16});
    check_wide((struct head_tv){1309, 8, 67, 2, BF16});
    check_wide((struct head_tv){9, 24, 1, 2, BF16});
    check_wide((struct head_tv){3, 8, 9, 4, BF16});
    check_wide((struct head_tv){1, 8, 9, 2, BF16});
    check_wide((struct head_tv){0, 8, 100, 1, BF16});
}

CASE(head_tv, "trunk rows that no complete chain looks at are not numbers")
{
    struct tv_case c = tv_case((struct head_tv){15, 6, 21, 2, F32});

    for (int64_t t = 0; t < 15; t++)
        if (t != 4 && t != 5) c.weight->value[t] = 0;
    for (int64_t t = 0; t < 15; t++)
        for (int64_t j = 0; j < 6; j++)
            if (t < 5 || t > 7) c.target->value[t * 6 + j] = (double)NAN;
    array_push(c.weight);
    array_push(c.target);
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
    struct tv_case c = tv_case((struct head_tv){16, 3, 5, 2, F32});
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
                c.draft->value[(d * 16 + t) * 3 + j] = c.target->value[(t + d + 1) * 3 + j] * (j == 2 && t % 3 ? -1 : 1);
    array_push(c.draft);
    fill_trunk(&c);
    fill_drafts(&c);
    plain_gradient(&c, want);
    check_case(&c, want);
}

CASE(head_tv, "acceptances of 0 leave the gradient of the others finite")
{
    struct tv_case c = tv_case((struct head_tv){12, 4, 9, 3, F32});
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
    struct tv_case c = tv_case((struct head_tv){401, 11, 67, 3, F32});
    double *want = doubles(c.draft->count);

    fill_trunk(&c);
    fill_drafts(&c);
    plain_gradient(&c, want);
    for (int threads = 1; threads <= 3; threads++) {
        device_threads(threads);
        run(&c, 1);
        check_same(c.alpha);
        check_same(c.loss);
        check_same(c.dx);
    }
    check_case(&c, want);
}

CASE(head_tv, "no more memory than head_loss takes")
{
    int64_t rows[] = {4096, 700, 96}, vocabulary[] = {8192, 97, 154880};
    glm52_dtype types[] = {F32, BF16};

    for (int i = 0; i < 6; i++)
        for (int32_t depths = 1; depths < 8; depths++) {
            struct head_tv tv = {rows[i % 3], 512, vocabulary[i % 3], depths, types[i / 3]};
            struct head plain = {rows[i % 3], 512, vocabulary[i % 3], types[i / 3], F32};

            /* 64 KB: sums of the rows, which are not as wide as the vocabulary */
            ck_assert_uint_le(ops->head_tv_bytes(device, &tv), ops->head_loss_bytes(device, &plain) + 65536);
        }
}

BENCH(head_tv, "with gradient, 7 depths, 2048 x 512 to 8192")
{
    struct tv_case c = tv_case((struct head_tv){2048, 512, 8192, 7, strcmp(ops->name, "cpu") == 0 ? F32 : BF16});
    struct array *workspace = array_workspace(ops->head_tv_bytes(device, &c.shape));

    BENCH_LOOP
        ops->head_tv(device, &c.shape, c.target->at, c.draft->at, c.w->at, c.weight->at, c.alpha->at, c.loss->at, c.dx->at,
                     workspace->at);
    bench_rate(2.0 * 2048 * 512 * 8192 * 15, 0);
}

/* Logits of about -3 to 3, so that no probability is 0, as with gradients of zeros products would run faster. */
static void bench_full(int64_t rows, int32_t depths)
{
    enum { WIDTH = 6144, VOCABULARY = 154880 };
    struct head_tv h = {rows, WIDTH, VOCABULARY, depths, BF16};
    struct array *target = array_zero(BF16, rows * WIDTH), *draft = array_zero(BF16, depths * rows * WIDTH);
    struct array *w = array_random(BF16, (int64_t)VOCABULARY * WIDTH), *weight = array_random(F32, rows);
    struct array *alpha = array_output(F32, depths * rows), *loss = array_output(F32, rows);
    struct array *dx = array_random(BF16, draft->count);
    struct array *workspace = array_random(BF16, (int64_t)ops->head_tv_bytes(device, &h) / 2);

    for (int64_t i = 0; i < draft->count; i++) draft->value[i] = (double)((i * 2654435761 >> 7) % 4093 - 2046) / 65536;
    for (int64_t i = 0; i < target->count; i++) target->value[i] = (double)((i * 2654435761 >> 9) % 4091 - 2045) / 65536;
    array_push(draft);
    array_push(target);
    BENCH_LOOP
        ops->head_tv(device, &h, target->at, draft->at, w->at, weight->at, alpha->at, loss->at, dx->at, workspace->at);
    bench_counted();
}

BENCH_FULL(head_tv, "8192 x 6144 to 154880, one depth", "")
{
    bench_full(8192, 1);
}

BENCH_FULL(head_tv, "4096 x 6144 to 154880, 3 depths", "")
{
    bench_full(4096, 3);
}
