/* Head and cross-entropy in one, and which token it holds for the likeliest. */
#include <string.h>

#include "case.h"

static const glm52_dtype F32 = GLM52_DTYPE_F32, BF16 = GLM52_DTYPE_BF16;

struct head_case {
    struct head shape;
    struct array *x, *w, *label, *weight;
};

/* Every seventh label is absent. */
static struct head_case head_case(int64_t rows, int64_t width, int64_t vocabulary, glm52_dtype type)
{
    struct head_case c = {.shape = {rows, width, vocabulary, type, F32}};

    c.x = array_normal(type, rows * width, 1);
    c.w = array_normal(type, vocabulary * width, 0.5);
    c.weight = array_normal(F32, rows, 1);
    c.label = array_zero(GLM52_DTYPE_I32, rows);
    for (int64_t i = 0; i < rows; i++) c.label->value[i] = i % 7 == 3 ? -1 : (double)draw_below(vocabulary);
    array_push(c.label);
    return c;
}

static double logit(const struct head_case *c, int64_t row, int64_t token)
{
    double sum = 0;

    for (int64_t j = 0; j < c->shape.width; j++)
        sum += c->x->value[row * c->shape.width + j] * c->w->value[token * c->shape.width + j];
    return sum;
}

static double row_loss(const struct head_case *c, int64_t row)
{
    int64_t label = (int64_t)c->label->value[row];
    double most = -INFINITY, sum = 0;

    if (label < 0) return 0;
    for (int64_t t = 0; t < c->shape.vocabulary; t++) most = fmax(most, logit(c, row, t));
    for (int64_t t = 0; t < c->shape.vocabulary; t++) sum += exp(logit(c, row, t) - most);
    return log(sum) + most - logit(c, row, label);
}

static double objective(void *problem)
{
    const struct head_case *c = problem;
    double sum = 0;

    for (int64_t row = 0; row < c->shape.rows; row++) sum += c->weight->value[row] * row_loss(c, row);
    return sum;
}

static void run(const struct head_case *c, struct array *loss, struct array *hit, struct array *dx, struct array *dw)
{
    struct array *workspace = array_workspace(ops->head_loss_bytes(device, &c->shape));

    ops->head_loss(device, &c->shape, c->x->at, c->w->at, c->label->at, dx ? c->weight->at : NULL, loss->at,
                   hit ? hit->at : NULL, dx ? dx->at : NULL, dw ? dw->at : NULL, workspace->at);
    array_fetch(workspace);
}

static void check_head(int64_t rows, int64_t width, int64_t vocabulary, glm52_dtype type)
{
    struct head_case c = head_case(rows, width, vocabulary, type);
    struct array *loss = array_output(F32, rows), *dx = array_output(type, c.x->count),
                 *dw = array_normal(F32, c.w->count, 1);
    double *want = doubles(rows), *want_dx = doubles(c.x->count), *want_dw = doubles(c.w->count);

    for (int64_t row = 0; row < rows; row++) want[row] = row_loss(&c, row);
    differences(objective, &c, c.x->value, c.x->count, want_dx);
    differences(objective, &c, c.w->value, c.w->count, want_dw);
    for (int64_t i = 0; i < dw->count; i++) want_dw[i] += dw->value[i];
    run(&c, loss, NULL, NULL, NULL);
    check_close(loss, want, tolerance(F32, 4 * width));
    array_poison(loss);
    run(&c, loss, NULL, dx, dw);
    check_close(loss, want, tolerance(F32, 4 * width));
    check_close(dx, want_dx, tolerance(type, vocabulary));
    check_close(dw, want_dw, tolerance(type, rows));
    array_poison(dx);
    run(&c, loss, NULL, dx, NULL);
    check_close(dx, want_dx, tolerance(type, vocabulary));
}

/* The gradients and hits of a case that is too large for differences, written out: dlogits = weight (softmax - one at
 * the label). Returns the largest |logit|. */
static double plain_gradients(const struct head_case *c, double *loss, double *hit, double *dx, double *dw)
{
    const struct head *h = &c->shape;
    double *p = doubles(h->vocabulary), largest = 0;

    for (int64_t row = 0; row < h->rows; row++) {
        const double *x = c->x->value + row * h->width;
        double most = -INFINITY, sum = 0;
        int64_t label = (int64_t)c->label->value[row], best = 0;

        if (label < 0) continue;
        for (int64_t t = 0; t < h->vocabulary; t++) {
            p[t] = logit(c, row, t);
            if (p[t] > p[best]) best = t;
            largest = fmax(largest, fabs(p[t]));
        }
        most = p[best];
        loss[row] = most - p[label];
        hit[row] = best == label;
        for (int64_t t = 0; t < h->vocabulary; t++) sum += p[t] = exp(p[t] - most);
        loss[row] += log(sum);
        for (int64_t t = 0; t < h->vocabulary; t++) {
            double slope = c->weight->value[row] * (p[t] / sum - (t == label));

            for (int64_t j = 0; j < h->width; j++) {
                dx[row * h->width + j] += slope * c->w->value[t * h->width + j];
                dw[t * h->width + j] += slope * x[j];
            }
        }
    }
    return largest;
}

/* By how much the label's logit exceeds all others, relative to it. */
static double lead(const struct head_case *c, int64_t row, int64_t label)
{
    double other = -INFINITY, mine = logit(c, row, label);

    for (int64_t t = 0; t < c->shape.vocabulary; t++)
        if (t != label) other = fmax(other, logit(c, row, t));
    return (mine - other) / fabs(mine);
}

/* Some rows have no weight; in every fifth the label's logit is large, and no label is so close to
 * being the largest that rounding could decide. */
static struct head_case wide_case(int64_t rows, int64_t width, int64_t vocabulary, glm52_dtype gradient)
{
    struct head_case c = head_case(rows, width, vocabulary, BF16);

    c.shape.gradient = gradient;
    for (int64_t row = 0; row < rows; row++) {
        int64_t label = (int64_t)c.label->value[row];

        if (row % 11 == 5) c.weight->value[row] = 0;
        for (int64_t j = 0; label >= 0 && row % 5 == 0 && j < width; j++)
            c.x->value[row * width + j] = 3 * c.w->value[label * width + j];
    }
    array_push(c.weight);
    array_push(c.x);
    for (int64_t row = 0; row < rows; row++)
        if (c.label->value[row] >= 0 && fabs(lead(&c, row, (int64_t)c.label->value[row])) < ldexp(1, -6))
            c.label->value[row] = -1;
    array_push(c.label);
    return c;
}

/* Logits of bf16 may be off by 2^-9 of the largest; the loss is off by as much at most, and a probability by twice its
 * share of that. */
static void check_wide(int64_t rows, int64_t width, int64_t vocabulary, glm52_dtype gradient)
{
    struct head_case c = wide_case(rows, width, vocabulary, gradient);
    struct array *loss = array_output(F32, rows), *hit = array_output(F32, rows), *dx = array_output(BF16, c.x->count);
    struct array *dw = array_normal(gradient, c.w->count, 1);
    double *want = doubles(rows), *want_hit = doubles(rows), *want_dx = doubles(c.x->count),
           *want_dw = doubles(c.w->count);
    double rounding, largest = 0;

    memcpy(want_dw, dw->value, (size_t)dw->count * sizeof *want_dw);
    rounding = ldexp(plain_gradients(&c, want, want_hit, want_dx, want_dw), -9);
    for (int64_t row = 0; row < rows; row++) largest = fmax(largest, want[row]);
    for (int round = 0; round < 2; round++) {
        run(&c, loss, hit, round ? dx : NULL, round ? dw : NULL);
        check_close(loss, want, tolerance(F32, 4 * width) + rounding / fmax(largest, 1e-3));
        check_exact(hit, want_hit);
        array_poison(loss);
        array_poison(hit);
    }
    check_close(dx, want_dx, tolerance(BF16, vocabulary) + 2 * rounding);
    check_close(dw, want_dw, tolerance(BF16, rows) * (gradient == BF16 ? 4 : 1) + 2 * rounding);
    for (int i = 0; i < 3; i++) {
        for (int64_t j = 0; j < dw->count; j++) dw->value[j] = 0;
        array_push(dw);
        run(&c, loss, hit, dx, dw);
        check_same(loss);
        check_same(hit);
        check_same(dx);
        check_same(dw);
    }
}

CASE(head_loss, "bf16 of wide rows: a vocabulary that is a multiple of nothing, one token, one row, none")
{
    check_wide(37, 40, 1097, F32);
    check_wide(13, 24, 1, F32);
    check_wide(1, 8, 9, F32);
    check_wide(0, 8, 100, BF16);
}

CASE(head_loss, "bf16 of wide rows: GLM-5.2's vocabulary, several chunks, several passes over a row")
{
    check_wide(5, 16, 154880, BF16);
    check_wide(2309, 8, 203, BF16);
    check_wide(37, 40, 4097, F32);
}

CASE(head_loss, "odd shapes, absent labels, one row, none, one token")
{
    check_head(23, 11, 37, F32);
    check_head(1, 5, 7, F32);
    check_head(5, 3, 1, F32);
    check_head(0, 5, 7, F32);
}

CASE(head_loss, "bf16")
{
    check_head(17, 13, 41, BF16);
}

CASE(head_loss, "logits far from zero")
{
    struct head_case c = head_case(9, 7, 29, F32);
    struct array *loss = array_output(F32, 9);
    double *want = doubles(9);

    for (int64_t i = 0; i < c.x->count; i++) c.x->value[i] *= 200;
    array_push(c.x);
    for (int64_t row = 0; row < 9; row++) want[row] = row_loss(&c, row);
    run(&c, loss, NULL, NULL, NULL);
    check_close(loss, want, tolerance(F32, 28));
}

CASE(head_loss, "bf16, logits far from zero")
{
    struct head_case c = head_case(9, 8, 331, BF16);
    struct array *loss = array_output(F32, 9), *dx = array_output(BF16, c.x->count);
    double *want = doubles(9), *want_dx = doubles(c.x->count), *unused = doubles(c.w->count), *hit = doubles(9),
           largest = 0;

    for (int64_t i = 0; i < c.x->count; i++) c.x->value[i] *= 1000;
    array_push(c.x);
    double rounding = ldexp(plain_gradients(&c, want, hit, want_dx, unused), -9);
    for (int64_t row = 0; row < 9; row++) largest = fmax(largest, want[row]);
    run(&c, loss, NULL, dx, NULL);
    check_close(loss, want, tolerance(F32, 32) + rounding / largest);
    check_close(dx, want_dx, 1); /* finite; of logits this size rounding may move all probability to another token */
}

CASE(head_loss, "several chunks of rows, the same bits for any number of threads")
{
    struct head_case c = head_case(1201, 17, 97, F32);
    struct array *loss = array_output(F32, 1201), *dx = array_output(F32, c.x->count),
                 *dw = array_zero(F32, c.w->count);
    double *want = doubles(1201);

    for (int64_t row = 0; row < 1201; row++) want[row] = row_loss(&c, row);
    for (int threads = 1; threads <= 3; threads++) {
        device_threads(threads);
        memset(dw->value, 0, (size_t)dw->count * sizeof(double));
        array_push(dw);
        run(&c, loss, NULL, dx, dw);
        check_same(loss);
        check_same(dx);
        check_same(dw);
    }
    check_close(loss, want, tolerance(F32, 68));
}

/* 1 where the first of the largest logits is the label's. */
static double plain_hit(const struct head_case *c, int64_t row)
{
    int64_t best = 0;

    for (int64_t t = 1; t < c->shape.vocabulary; t++)
        if (logit(c, row, t) > logit(c, row, best)) best = t;
    return best == (int64_t)c->label->value[row];
}

static void check_hit(struct head_case c)
{
    struct array *hit = array_output(F32, c.shape.rows), *loss = array_output(F32, c.shape.rows);
    double *want = doubles(c.shape.rows);

    for (int64_t row = 0; row < c.shape.rows; row++) want[row] = plain_hit(&c, row);
    for (int threads = 1; threads <= 3; threads++) {
        device_threads(threads);
        run(&c, loss, hit, NULL, NULL);
        check_exact(hit, want);
    }
}

/* Every third label that is there becomes that of the largest logit. */
static struct head_case hit_case(int64_t rows, int64_t width, int64_t vocabulary, glm52_dtype type)
{
    struct head_case c = head_case(rows, width, vocabulary, type);

    for (int64_t row = 0; row < rows; row += 3)
        for (int64_t t = 0; t < vocabulary && c.label->value[row] >= 0 && !plain_hit(&c, row); t++)
            c.label->value[row] = (double)t;
    array_push(c.label);
    return c;
}

CASE(head_loss, "hits: odd shapes, absent labels, one row, none, one token, several chunks, bf16")
{
    check_hit(hit_case(23, 11, 37, F32));
    check_hit(hit_case(1, 5, 7, F32));
    check_hit(hit_case(5, 3, 1, F32));
    check_hit(hit_case(0, 5, 7, F32));
    check_hit(hit_case(1203, 3, 19, F32));
    check_hit(hit_case(17, 13, 41, BF16));
}

/* Whole numbers, so that many logits are equal, in bf16 too. */
static void check_equal_logits(int64_t width, glm52_dtype type)
{
    struct head_case c = head_case(61, width, 53, type);

    for (int64_t i = 0; i < c.x->count; i++) c.x->value[i] = (double)draw_between(-1, 1);
    for (int64_t i = 0; i < c.w->count; i++) c.w->value[i] = (double)draw_between(-1, 1);
    array_push(c.x);
    array_push(c.w);
    for (int64_t row = 0; row < 61; row++) { /* one of the largest, the first of them in every other row */
        int64_t best = 0;

        for (int64_t t = 1; t < 53; t++)
            if (logit(&c, row, t) >= logit(&c, row, best) + (row % 2 ? 0 : 0.5)) best = t;
        c.label->value[row] = (double)best;
    }
    array_push(c.label);
    check_hit(c);
}

CASE(head_loss, "hits: of equal logits the first counts")
{
    check_equal_logits(3, F32);
    check_equal_logits(8, BF16);
}

BENCH(head_loss, "with gradient, 4096 x 512 to 8192")
{
    struct head_case c = head_case(4096, 512, 8192, strcmp(ops->name, "cpu") == 0 ? F32 : BF16);
    struct array *loss = array_output(F32, 4096), *dx = array_output(c.shape.type, c.x->count);
    struct array *dw = array_zero(F32, c.w->count),
                 *workspace = array_workspace(ops->head_loss_bytes(device, &c.shape));

    BENCH_LOOP
        ops->head_loss(device, &c.shape, c.x->at, c.w->at, c.label->at, c.weight->at, loss->at, NULL, dx->at,
                       dw->at, workspace->at);
    bench_rate(6.0 * 4096 * 512 * 8192, 0);
}

/* Logits of about -3 to 3, so that no probability is 0, as with gradients of zeros products would run faster. */
static void bench_full(int64_t rows, glm52_dtype gradient, int wanted)
{
    enum { WIDTH = 6144, VOCABULARY = 154880 };
    struct head h = {rows, WIDTH, VOCABULARY, BF16, gradient};
    struct array *x = array_zero(BF16, rows * WIDTH), *w = array_random(BF16, (int64_t)VOCABULARY * WIDTH);
    struct array *label = array_zero(GLM52_DTYPE_I32, rows), *weight = array_random(F32, rows);
    struct array *loss = array_output(F32, rows), *hit = array_output(F32, rows),
                 *dx = array_random(BF16, rows * WIDTH);
    struct array *dw = array_random(gradient, wanted > 1 ? (int64_t)VOCABULARY * WIDTH : 1);
    struct array *workspace = array_random(BF16, (int64_t)ops->head_loss_bytes(device, &h) / 2);

    for (int64_t i = 0; i < rows; i++) label->value[i] = (double)draw_below(VOCABULARY);
    array_push(label);
    for (int64_t i = 0; i < x->count; i++) x->value[i] = (double)((i * 2654435761 >> 7) % 4093 - 2046) / 65536;
    array_push(x);
    BENCH_LOOP
        ops->head_loss(device, &h, x->at, w->at, label->at, weight->at, loss->at, hit->at, wanted ? dx->at : NULL,
                       wanted > 1 ? dw->at : NULL, workspace->at);
    bench_counted();
}

BENCH_FULL(head_loss, "8192 x 6144 to 154880, no gradient", "")
{
    bench_full(8192, F32, 0);
}

BENCH_FULL(head_loss, "8192 x 6144 to 154880, dx", "")
{
    bench_full(8192, F32, 1);
}

BENCH_FULL(head_loss, "8192 x 6144 to 154880, fp32 dw", "")
{
    bench_full(8192, F32, 2);
}

BENCH_FULL(head_loss, "8192 x 6144 to 154880, bf16 dw", "compiled torch 70.4 ms, 4.5 GB")
{
    bench_full(8192, BF16, 2);
}

BENCH_FULL(head_loss, "4096 x 6144 to 154880, fp32 dw", "")
{
    bench_full(4096, F32, 2);
}
