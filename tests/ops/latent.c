/* The latent of keys and values: norm and rotation of a product's rows in fp32. */
#include "case.h"

static const glm52_dtype F32 = GLM52_DTYPE_F32, BF16 = GLM52_DTYPE_BF16;

struct latent_case {
    struct latent shape;
    int64_t columns;
    struct array *table, *x, *gain, *dy, *rstd;
};

static struct latent_case latent_case(int64_t rows, int32_t rank, int32_t half, glm52_dtype type)
{
    struct latent_case c = {.shape = {.rows = rows, .rank = rank, .half = half, .epsilon = 1e-3f, .type = type},
                            .columns = rank + 2 * half};

    c.table = array_rotations(rows * half);
    c.x = array_normal(F32, rows * c.columns, 1.5);
    c.gain = array_normal(type, rank, 1);
    c.dy = array_normal(F32, rows * c.columns, 1);
    c.rstd = array_output(F32, rows);
    return c;
}

/* Columns behind the rank; sign -1 turns back. */
static void turn(const struct latent_case *c, const double *x, double sign, double *y)
{
    for (int64_t row = 0; row < c->shape.rows; row++)
        for (int64_t j = 0; j < 2 * c->shape.half; j += 2) {
            int64_t at = row * c->columns + c->shape.rank + j;
            double cosine = c->table->value[row * 2 * c->shape.half + j];
            double sine = sign * c->table->value[row * 2 * c->shape.half + j + 1];

            y[at] = x[at] * cosine - x[at + 1] * sine;
            y[at + 1] = x[at + 1] * cosine + x[at] * sine;
        }
}

static void plain_forward(const struct latent_case *c, double *y, double *rstd)
{
    const struct latent *l = &c->shape;

    for (int64_t row = 0; row < l->rows; row++) {
        const double *x = c->x->value + row * c->columns;
        double squares = 0;

        for (int32_t j = 0; j < l->rank; j++) squares += x[j] * x[j];
        rstd[row] = 1 / sqrt(squares / l->rank + (double)l->epsilon);
        for (int32_t j = 0; j < l->rank; j++) y[row * c->columns + j] = x[j] * rstd[row] * c->gain->value[j];
    }
    turn(c, c->x->value, 1, y);
}

static void check_forward(const struct latent_case *c)
{
    const struct latent *l = &c->shape;
    struct array *y = array_output(l->type, c->x->count);
    double *want = doubles(c->x->count), *rstd = doubles(l->rows);

    plain_forward(c, want, rstd);
    ops->latent_forward(device, l, c->table->at, c->x->at, c->gain->at, y->at, c->rstd->at);
    check_close(y, want, tolerance(l->type, l->rank));
    check_close(c->rstd, rstd, tolerance(F32, l->rank));
}

/* With g = gain * dy and h = x rstd: dx = rstd (g - h mean(g h)), dgain += dy h. */
static void plain_backward(const struct latent_case *c, double *dx, double *dgain)
{
    const struct latent *l = &c->shape;

    for (int64_t row = 0; row < l->rows; row++) {
        const double *x = c->x->value + row * c->columns, *dy = c->dy->value + row * c->columns;
        double rstd = c->rstd->value[row], mean = 0;

        for (int32_t j = 0; j < l->rank; j++) mean += c->gain->value[j] * dy[j] * x[j] * rstd / l->rank;
        for (int32_t j = 0; j < l->rank; j++) {
            dx[row * c->columns + j] = rstd * (c->gain->value[j] * dy[j] - x[j] * rstd * mean);
            dgain[j] += dy[j] * x[j] * rstd;
        }
    }
    turn(c, c->dy->value, -1, dx);
}

/* gain: with the gradient of the gain; want_gain is that which is added. */
static void check_backward(const struct latent_case *c, int gain, const double *want, const double *want_gain)
{
    const struct latent *l = &c->shape;
    struct array *dx = array_output(l->type, c->x->count), *dgain = array_normal(F32, l->rank, 1);
    struct array *workspace = array_workspace(ops->latent_backward_bytes(device, l));
    double *sum = doubles(l->rank);

    for (int32_t j = 0; j < l->rank; j++) sum[j] = dgain->value[j] + (gain ? want_gain[j] : 0);
    ops->latent_backward(device, l, c->table->at, c->x->at, c->gain->at, c->rstd->at, c->dy->at, dx->at,
                         gain ? dgain->at : NULL, workspace->at);
    array_fetch(workspace);
    check_close(dx, want, tolerance(l->type, 4 * l->rank));
    check_close(dgain, sum, tolerance(F32, l->rows + l->rank));
}

static void check_latent(int64_t rows, int32_t rank, int32_t half)
{
    for (int bits = 0; bits < 4; bits++) {
        struct latent_case c = latent_case(rows, rank, half, bits & 1 ? BF16 : F32);

        double *dx = doubles(c.x->count), *dgain = doubles(rank);

        check_forward(&c);
        plain_backward(&c, dx, dgain);
        check_backward(&c, bits >> 1, dx, dgain);
    }
}

static double objective(void *problem)
{
    const struct latent_case *c = problem;
    double *y = doubles(c->x->count), sum = 0;

    plain_forward(c, y, doubles(c->shape.rows));
    for (int64_t i = 0; i < c->x->count; i++) sum += c->dy->value[i] * y[i];
    return sum;
}

CASE(latent, "differences")
{
    struct latent_case c = latent_case(3, 7, 2, F32);
    double *dx = doubles(c.x->count), *dgain = doubles(c.shape.rank);

    differences(objective, &c, c.x->value, c.x->count, dx);
    differences(objective, &c, c.gain->value, c.shape.rank, dgain);
    check_forward(&c);
    check_backward(&c, 1, dx, dgain);
}

CASE(latent, "there and back, in both types")
{
    check_latent(37, 29, 5);
    check_latent(19, 12, 3);
    check_latent(3, 1031, 1);
    check_latent(1, 4, 2);
    check_latent(0, 16, 2);
}

CASE(latent, "widths of GLM-5.2, and rows that are a multiple of nothing")
{
    check_latent(45, 512, 32);
    check_latent(2203, 24, 6);
    check_latent(7, 640, 34);
}

static void bench_full(int64_t rows, int back)
{
    struct latent l = {.rows = rows, .rank = 512, .half = 32, .epsilon = 1e-5f, .type = BF16};
    int64_t count = rows * 576;
    struct array *table = array_random(F32, rows * 64), *x = array_random(F32, count), *dy = array_random(F32, count);
    struct array *gain = array_random(BF16, 512), *y = array_random(BF16, count), *rstd = array_random(F32, rows);
    struct array *dgain = array_random(F32, 512), *workspace = array_workspace(ops->latent_backward_bytes(device, &l));

    BENCH_LOOP {
        if (back)
            ops->latent_backward(device, &l, table->at, x->at, gain->at, rstd->at, dy->at, y->at, dgain->at,
                                 workspace->at);
        else
            ops->latent_forward(device, &l, table->at, x->at, gain->at, y->at, rstd->at);
    }
    bench_counted();
}

BENCH_FULL(latent_forward, "8192 x (512 + 64)", "")
{
    bench_full(8192, 0);
}

BENCH_FULL(latent_backward, "8192 x (512 + 64)", "")
{
    bench_full(8192, 1);
}
