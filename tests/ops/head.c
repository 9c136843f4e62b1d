/* Head and cross-entropy in one; which token it holds for the likeliest. */
#include "case.h"

static const glm52_dtype F32 = GLM52_DTYPE_F32, BF16 = GLM52_DTYPE_BF16;

struct head_case {
    struct head shape;
    struct array *x, *w, *label, *weight;
};

/* Every seventh label is absent. */
static struct head_case head_case(int64_t rows, int64_t width, int64_t vocabulary, glm52_dtype type)
{
    struct head_case c = {.shape = {rows, width, vocabulary, type}};

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

static void run(const struct head_case *c, struct array *loss, struct array *dx, struct array *dw)
{
    struct array *workspace = array_workspace(ops->head_loss_bytes(device, &c->shape));

    ops->head_loss(device, &c->shape, c->x->at, c->w->at, c->label->at, dx ? c->weight->at : NULL, loss->at,
                   dx ? dx->at : NULL, dw ? dw->at : NULL, workspace->at);
    array_fetch(workspace);
}

static void check_head(int64_t rows, int64_t width, int64_t vocabulary, glm52_dtype type)
{
    struct head_case c = head_case(rows, width, vocabulary, type);
    struct array *loss = array_output(F32, rows), *dx = array_output(type, c.x->count), *dw = array_normal(F32, c.w->count, 1);
    double *want = doubles(rows), *want_dx = doubles(c.x->count), *want_dw = doubles(c.w->count);

    for (int64_t row = 0; row < rows; row++) want[row] = row_loss(&c, row);
    differences(objective, &c, c.x->value, c.x->count, want_dx);
    differences(objective, &c, c.w->value, c.w->count, want_dw);
    for (int64_t i = 0; i < dw->count; i++) want_dw[i] += dw->value[i];
    run(&c, loss, NULL, NULL);
    check_close(loss, want, tolerance(F32, 4 * width));
    array_poison(loss);
    run(&c, loss, dx, dw);
    check_close(loss, want, tolerance(F32, 4 * width));
    check_close(dx, want_dx, tolerance(type, vocabulary));
    check_close(dw, want_dw, tolerance(type, rows));
    array_poison(dx);
    run(&c, loss, dx, NULL);
    check_close(dx, want_dx, tolerance(type, vocabulary));
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
    run(&c, loss, NULL, NULL);
    check_close(loss, want, tolerance(F32, 28));
}

CASE(head_loss, "several chunks of rows, the same bits for any number of threads")
{
    struct head_case c = head_case(1201, 17, 97, F32);
    struct array *loss = array_output(F32, 1201), *dx = array_output(F32, c.x->count), *dw = array_zero(F32, c.w->count);
    double *want = doubles(1201);

    for (int64_t row = 0; row < 1201; row++) want[row] = row_loss(&c, row);
    for (int threads = 1; threads <= 3; threads++) {
        device_threads(threads);
        memset(dw->value, 0, (size_t)dw->count * sizeof(double));
        array_push(dw);
        run(&c, loss, dx, dw);
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
    struct array *hit = array_output(F32, c.shape.rows);
    struct array *workspace = array_workspace(ops->head_loss_bytes(device, &c.shape));
    double *want = doubles(c.shape.rows);

    for (int64_t row = 0; row < c.shape.rows; row++) want[row] = plain_hit(&c, row);
    for (int threads = 1; threads <= 3; threads++) {
        device_threads(threads);
        ops->head_hit(device, &c.shape, c.x->at, c.w->at, c.label->at, hit->at, workspace->at);
        array_fetch(workspace);
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

CASE(head_hit, "odd shapes, absent labels, one row, none, one token, several chunks, bf16")
{
    check_hit(hit_case(23, 11, 37, F32));
    check_hit(hit_case(1, 5, 7, F32));
    check_hit(hit_case(5, 3, 1, F32));
    check_hit(hit_case(0, 5, 7, F32));
    check_hit(hit_case(1203, 3, 19, F32));
    check_hit(hit_case(17, 13, 41, BF16));
}

CASE(head_hit, "of equal logits the first counts")
{
    struct head_case c = head_case(61, 3, 53, F32);

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

BENCH(head_hit, "4096 x 512 to 8192")
{
    struct head_case c = head_case(4096, 512, 8192, strcmp(ops->name, "cpu") == 0 ? F32 : BF16);
    struct array *hit = array_output(F32, 4096), *workspace = array_workspace(ops->head_loss_bytes(device, &c.shape));

    BENCH_LOOP
        ops->head_hit(device, &c.shape, c.x->at, c.w->at, c.label->at, hit->at, workspace->at);
    bench_rate(2.0 * 4096 * 512 * 8192, 0);
}

BENCH(head_loss, "with gradient, 4096 x 512 to 8192")
{
    struct head_case c = head_case(4096, 512, 8192, strcmp(ops->name, "cpu") == 0 ? F32 : BF16);
    struct array *loss = array_output(F32, 4096), *dx = array_output(c.shape.type, c.x->count);
    struct array *dw = array_zero(F32, c.w->count), *workspace = array_workspace(ops->head_loss_bytes(device, &c.shape));

    BENCH_LOOP
        ops->head_loss(device, &c.shape, c.x->at, c.w->at, c.label->at, c.weight->at, loss->at, dx->at, dw->at,
                       workspace->at);
    bench_rate(6.0 * 4096 * 512 * 8192, 0);
}
