/* RMSNorm and LayerNorm. One oracle serves both: RMSNorm is LayerNorm without mean and bias. */
#include "case.h"

static const glm52_dtype F32 = GLM52_DTYPE_F32, BF16 = GLM52_DTYPE_BF16;

struct norm_case {
    struct norm shape;
    int layer;
    struct array *x, *gain, *bias, *dy, *statistics; /* rstd, or mean and rstd */
};

static struct norm_case norm_case(int layer, int64_t rows, int64_t width, int64_t gap, glm52_dtype type)
{
    struct norm_case c = {.layer = layer, .shape = {.rows = rows, .width = width, .x_stride = width + gap,
                                                    .y_stride = width + 2 * gap, .epsilon = 1e-3f, .type = type}};

    c.x = array_normal(type, rows * c.shape.x_stride, 1.5);
    for (int64_t i = 0; i < c.x->count; i++) c.x->value[i] += 0.5; /* so that the mean matters */
    array_push(c.x);
    c.gain = array_normal(type, width, 1);
    c.bias = array_normal(type, width, 1);
    c.dy = array_normal(type, rows * c.shape.y_stride, 1);
    c.statistics = array_output(F32, rows * (layer ? 2 : 1));
    return c;
}

/* The mean (0 for RMSNorm) and 1 / deviation of a row. */
static void row_statistics(const struct norm_case *c, int64_t row, double *mean, double *rstd)
{
    const double *x = c->x->value + row * c->shape.x_stride;
    double sum = 0, squares = 0;

    for (int64_t j = 0; j < c->shape.width; j++) sum += x[j];
    *mean = c->layer ? sum / (double)c->shape.width : 0;
    for (int64_t j = 0; j < c->shape.width; j++) squares += (x[j] - *mean) * (x[j] - *mean);
    *rstd = 1 / sqrt(squares / (double)c->shape.width + (double)c->shape.epsilon);
}

static double element(const struct norm_case *c, int64_t row, int64_t j, double mean, double rstd)
{
    return (c->x->value[row * c->shape.x_stride + j] - mean) * rstd * c->gain->value[j] +
           (c->layer ? c->bias->value[j] : 0);
}

/* sum of dy * y */
static double objective(void *problem)
{
    const struct norm_case *c = problem;
    double sum = 0, mean, rstd;

    for (int64_t row = 0; row < c->shape.rows; row++) {
        row_statistics(c, row, &mean, &rstd);
        for (int64_t j = 0; j < c->shape.width; j++)
            sum += c->dy->value[row * c->shape.y_stride + j] * element(c, row, j, mean, rstd);
    }
    return sum;
}

static void forward(const struct norm_case *c, struct array *y)
{
    if (c->layer)
        ops->layernorm_forward(device, &c->shape, c->x->at, c->gain->at, c->bias->at, y->at, c->statistics->at);
    else
        ops->rmsnorm_forward(device, &c->shape, c->x->at, c->gain->at, y->at, c->statistics->at);
}

static void backward(const struct norm_case *c, struct array *dx, struct array *dgain, struct array *dbias)
{
    struct array *workspace = array_workspace(ops->norm_backward_bytes(device, &c->shape));

    if (c->layer)
        ops->layernorm_backward(device, &c->shape, c->x->at, c->gain->at, c->statistics->at, c->dy->at, dx->at,
                                dgain->at, dbias->at, workspace->at);
    else
        ops->rmsnorm_backward(device, &c->shape, c->x->at, c->gain->at, c->statistics->at, c->dy->at, dx->at, dgain->at,
                              workspace->at);
    array_fetch(workspace);
}

static void check_forward(struct norm_case *c)
{
    int64_t count = c->shape.rows * c->shape.y_stride, width = c->shape.width;
    struct array *y = c->shape.add ? array_normal(c->shape.type, count, 1) : array_output(c->shape.type, count);
    double *want = doubles(count), *statistics = doubles(c->statistics->count), mean, rstd;

    for (int64_t i = 0; i < count; i++) want[i] = c->shape.add ? y->value[i] : (double)NAN;
    for (int64_t row = 0; row < c->shape.rows; row++) {
        double *to = want + row * c->shape.y_stride;

        row_statistics(c, row, &mean, &rstd);
        for (int64_t j = 0; j < width; j++) to[j] = (c->shape.add ? to[j] : 0) + element(c, row, j, mean, rstd);
        if (c->layer) statistics[2 * row] = mean;
        statistics[c->layer ? 2 * row + 1 : row] = rstd;
    }
    forward(c, y);
    check_close(y, want, tolerance(c->shape.type, width));
    check_close(c->statistics, statistics, tolerance(F32, width));
}

static void check_backward(struct norm_case *c)
{
    int64_t width = c->shape.width, stride = c->shape.x_stride;
    struct array *dx = c->shape.add ? array_normal(c->shape.type, c->x->count, 1)
                                    : array_output(c->shape.type, c->x->count);
    struct array *dgain = array_normal(F32, width, 1), *dbias = array_normal(F32, width, 1);
    double *slope = doubles(c->x->count), *want = doubles(c->x->count), *want_gain = doubles(width);
    double *want_bias = doubles(width);

    differences(objective, c, c->x->value, c->x->count, slope);
    differences(objective, c, c->gain->value, width, want_gain);
    differences(objective, c, c->bias->value, width, want_bias);
    for (int64_t j = 0; j < width; j++) {
        want_gain[j] += dgain->value[j];
        want_bias[j] += dbias->value[j];
    }
    for (int64_t i = 0; i < c->x->count; i++) {
        want[i] = c->shape.add ? dx->value[i] : (double)NAN;
        if (i % stride < width) want[i] = slope[i] + (c->shape.add ? want[i] : 0);
    }
    backward(c, dx, dgain, dbias);
    check_close(dx, want, tolerance(c->shape.type, 4 * width));
    check_close(dgain, want_gain, tolerance(F32, c->shape.rows + width));
    check_close(dbias, want_bias, tolerance(F32, c->shape.rows));
}

static void check_norm(int layer, int64_t rows, int64_t width, int64_t gap, glm52_dtype type)
{
    for (int32_t add = 0; add < 2; add++) {
        struct norm_case c = norm_case(layer, rows, width, gap, type);

        c.shape.add = add;
        check_forward(&c);
        check_backward(&c);
    }
}

static void check_shapes(int layer)
{
    check_norm(layer, 37, 29, 0, F32);
    check_norm(layer, 19, 43, 5, F32);
    check_norm(layer, 17, 51, 7, BF16);
    check_norm(layer, 13, 40, 8, BF16); /* pieces of 16 bytes, a warp a row */
    check_norm(layer, 5, 264, 0, BF16);
    check_norm(layer, 11, 48, 4, BF16);
    check_norm(layer, 1, 67, 0, F32);
    check_norm(layer, 3, 5, 2, F32);
    check_norm(layer, 0, 31, 0, F32);
}

static void check_long_rows(int layer)
{
    struct norm_case c = norm_case(layer, 3, 2309, 1, F32);

    check_forward(&c);
    for (int i = 0; i < 6; i++) { /* a block a row, of two to four pieces a thread; more than fits */
        c = norm_case(layer, 3, (const int64_t[]){1032, 2048, 4112, 6144, 8192, 8200}[i], 8, BF16);
        check_forward(&c);
    }
    c = norm_case(layer, 2, 1103, 0, BF16);
    check_forward(&c);
    check_backward(&c);
}

/* The gradients in double, by their formula; dx and the others are those before. */
static void plain_backward(const struct norm_case *c, double *dx, double *dgain, double *dbias)
{
    double width = (double)c->shape.width;

    for (int64_t row = 0; row < c->shape.rows; row++) {
        const double *x = c->x->value + row * c->shape.x_stride, *dy = c->dy->value + row * c->shape.y_stride;
        double mean, rstd, sum_g = 0, sum_gh = 0;

        row_statistics(c, row, &mean, &rstd);
        for (int64_t j = 0; j < c->shape.width; j++) {
            double g = c->gain->value[j] * dy[j], h = (x[j] - mean) * rstd;

            sum_g += c->layer ? g : 0;
            sum_gh += g * h;
            dgain[j] += dy[j] * h;
            dbias[j] += dy[j];
        }
        for (int64_t j = 0; j < c->shape.width; j++)
            dx[row * c->shape.x_stride + j] +=
                rstd * (c->gain->value[j] * dy[j] - sum_g / width - (x[j] - mean) * rstd * sum_gh / width);
    }
}

/* Shapes too large for differences: many rows of every number of pieces, dx added to and not. */
static void check_wide_backward(int layer, int64_t rows, int64_t width, int32_t add)
{
    struct norm_case c = norm_case(layer, rows, width, 16, BF16);
    struct array *y = array_output(BF16, c.dy->count), *dgain = array_normal(F32, width, 1);
    struct array *dx = add ? array_normal(BF16, c.x->count, 1) : array_output(BF16, c.x->count);
    struct array *dbias = array_normal(F32, width, 1);
    double *want = doubles(c.x->count), *want_gain = doubles(width), *want_bias = doubles(width);

    c.shape.add = add;
    for (int64_t i = 0; i < c.x->count; i++)
        want[i] = add ? dx->value[i] : i % c.shape.x_stride < width ? 0 : (double)NAN;
    memcpy(want_gain, dgain->value, (size_t)width * sizeof(double));
    memcpy(want_bias, dbias->value, (size_t)width * sizeof(double));
    plain_backward(&c, want, want_gain, want_bias);
    c.shape.add = 0;
    forward(&c, y);
    c.shape.add = add;
    backward(&c, dx, dgain, dbias);
    check_close(dx, want, tolerance(BF16, width));
    check_close(dgain, want_gain, tolerance(F32, rows + width));
    if (layer) check_close(dbias, want_bias, tolerance(F32, rows));
}

static void check_wide(int layer)
{
    check_wide_backward(layer, 2300, 128, 0);
    check_wide_backward(layer, 4500, 512, 1);
    check_wide_backward(layer, 5, 1032, 1);
    check_wide_backward(layer, 1100, 2048, 0);
    check_wide_backward(layer, 3, 4112, 1);
    check_wide_backward(layer, 1400, 6144, 1);
    check_wide_backward(layer, 2, 8192, 0);
}

/* More rows than one block of them has, and the same bits for 1, 2 and 3 threads. */
static void check_threads(int layer)
{
    struct norm_case c = norm_case(layer, 1501, 131, 0, F32);
    struct array *y = array_output(F32, c.dy->count), *dx = array_output(F32, c.x->count);
    struct array *dgain = array_zero(F32, c.shape.width), *dbias = array_zero(F32, c.shape.width);

    for (int threads = 1; threads <= 3; threads++) {
        device_threads(threads);
        memset(dgain->value, 0, (size_t)dgain->count * sizeof(double));
        memset(dbias->value, 0, (size_t)dbias->count * sizeof(double));
        array_push(dgain);
        array_push(dbias);
        forward(&c, y);
        backward(&c, dx, dgain, dbias);
        check_same(y);
        check_same(c.statistics);
        check_same(dx);
        check_same(dgain);
        check_same(dbias);
    }
}

CASE(rmsnorm, "odd shapes, gaps, bf16, no rows")
{
    check_shapes(0);
}

CASE(rmsnorm, "rows longer than a chunk")
{
    check_long_rows(0);
}

CASE(rmsnorm, "backward, wide rows and many")
{
    check_wide(0);
}

CASE(layernorm, "backward, wide rows and many")
{
    check_wide(1);
}

CASE(rmsnorm, "backward in place of dy, without the gradient of the gain")
{
    struct norm_case c = norm_case(0, 37, 1031, 0, F32);
    struct array *y = array_output(F32, c.dy->count), *dx = array_output(F32, c.x->count);
    struct array *dgain = array_zero(F32, 1031),
                 *workspace = array_workspace(ops->norm_backward_bytes(device, &c.shape));

    forward(&c, y);
    backward(&c, dx, dgain, NULL);
    ops->rmsnorm_backward(device, &c.shape, c.x->at, c.gain->at, c.statistics->at, c.dy->at, c.dy->at, NULL,
                          workspace->at);
    array_fetch(dx);
    check_exact(c.dy, dx->value);
}

CASE(rmsnorm, "the same bits for any number of threads")
{
    check_threads(0);
}

CASE(layernorm, "odd shapes, gaps, bf16, no rows")
{
    check_shapes(1);
}

CASE(layernorm, "rows longer than a chunk")
{
    check_long_rows(1);
}

CASE(layernorm, "the same bits for any number of threads")
{
    check_threads(1);
}

CASE(layernorm, "a mean far above the deviation")
{
    struct norm_case c = norm_case(1, 5, 97, 0, F32);
    struct array *y = array_output(F32, c.dy->count);
    double *want = doubles(c.dy->count), mean, rstd;

    for (int64_t i = 0; i < c.x->count; i++) c.x->value[i] += 300;
    array_push(c.x);
    for (int64_t i = 0; i < c.dy->count; i++) {
        row_statistics(&c, i / 97, &mean, &rstd);
        want[i] = element(&c, i / 97, i % 97, mean, rstd);
    }
    forward(&c, y);
    check_close(y, want, 300 * tolerance(F32, 97)); /* the mean's own rounding, relative to a deviation of about 1 */
}

static void bench(int layer, int with_backward)
{
    struct norm_case c = norm_case(layer, 4096, 512, 0, strcmp(ops->name, "cpu") == 0 ? F32 : BF16);
    struct array *y = array_output(c.shape.type, c.x->count), *dgain = array_zero(F32, 512),
                 *dbias = array_zero(F32, 512);
    double array = (double)(c.x->count * (int64_t)dtype_size(c.shape.type));
    struct array *workspace = array_workspace(ops->norm_backward_bytes(device, &c.shape));

    forward(&c, y);
    BENCH_LOOP {
        if (!with_backward)
            forward(&c, y);
        else if (layer)
            ops->layernorm_backward(device, &c.shape, c.x->at, c.gain->at, c.statistics->at, c.dy->at, y->at, dgain->at,
                                    dbias->at, workspace->at);
        else
            ops->rmsnorm_backward(device, &c.shape, c.x->at, c.gain->at, c.statistics->at, c.dy->at, y->at, dgain->at,
                                  workspace->at);
    }
    bench_rate(0, array * (with_backward ? 3 : 2));
}

BENCH(rmsnorm, "forward, 4096 x 512")
{
    bench(0, 0);
}

BENCH(rmsnorm, "backward, 4096 x 512")
{
    bench(0, 1);
}

BENCH(layernorm, "forward, 4096 x 512")
{
    bench(1, 0);
}

BENCH(layernorm, "backward, 4096 x 512")
{
    bench(1, 1);
}

static void bench_full(int layer, int with_backward, int64_t rows, int64_t width, int64_t stride, int32_t add)
{
    struct norm n = {.rows = rows, .width = width, .x_stride = stride, .y_stride = stride, .epsilon = 1e-5f, .add = add,
                     .type = BF16};
    struct array *x = array_random(BF16, rows * stride), *y = array_random(BF16, rows * stride);
    struct array *dx = array_random(BF16, rows * stride), *gain = array_random(BF16, width);
    struct array *bias = array_random(BF16, width), *dgain = array_zero(F32, width), *dbias = array_zero(F32, width);
    struct array *statistics = array_random(F32, 2 * rows),
                 *workspace = array_workspace(ops->norm_backward_bytes(device, &n));

    BENCH_LOOP {
        if (!with_backward && layer)
            ops->layernorm_forward(device, &n, x->at, gain->at, bias->at, y->at, statistics->at);
        else if (!with_backward)
            ops->rmsnorm_forward(device, &n, x->at, gain->at, y->at, statistics->at);
        else if (layer)
            ops->layernorm_backward(device, &n, x->at, gain->at, statistics->at, y->at, dx->at, dgain->at, dbias->at,
                                    workspace->at);
        else
            ops->rmsnorm_backward(device, &n, x->at, gain->at, statistics->at, y->at, dx->at, dgain->at, workspace->at);
    }
    bench_counted();
}

BENCH_FULL(rmsnorm_forward, "16384 x 6144", "compiled torch 4.06 TB/s")
{
    bench_full(0, 0, 16384, 6144, 6144, 0);
}

BENCH_FULL(rmsnorm_forward, "8192 x 6144", "")
{
    bench_full(0, 0, 8192, 6144, 6144, 0);
}

BENCH_FULL(rmsnorm_forward, "4096 x 6144", "")
{
    bench_full(0, 0, 4096, 6144, 6144, 0);
}

BENCH_FULL(rmsnorm_forward, "8192 x 2048", "")
{
    bench_full(0, 0, 8192, 2048, 2048, 0);
}

BENCH_FULL(rmsnorm_forward, "16384 x 2048", "")
{
    bench_full(0, 0, 16384, 2048, 2048, 0);
}

BENCH_FULL(rmsnorm_forward, "8192 x 512 of 576", "")
{
    bench_full(0, 0, 8192, 512, 576, 0);
}

BENCH_FULL(rmsnorm_backward, "16384 x 6144, added", "")
{
    bench_full(0, 1, 16384, 6144, 6144, 1);
}

BENCH_FULL(rmsnorm_backward, "8192 x 6144, added", "")
{
    bench_full(0, 1, 8192, 6144, 6144, 1);
}

BENCH_FULL(rmsnorm_backward, "4096 x 6144, added", "")
{
    bench_full(0, 1, 4096, 6144, 6144, 1);
}

BENCH_FULL(rmsnorm_backward, "8192 x 6144", "cuDNN 3.4 to 3.8 TB/s (published)")
{
    bench_full(0, 1, 8192, 6144, 6144, 0);
}

BENCH_FULL(rmsnorm_backward, "8192 x 2048", "")
{
    bench_full(0, 1, 8192, 2048, 2048, 0);
}

BENCH_FULL(rmsnorm_backward, "8192 x 512 of 576", "")
{
    bench_full(0, 1, 8192, 512, 576, 0);
}

BENCH_FULL(rmsnorm_backward, "16384 x 6144", "")
{
    bench_full(0, 1, 16384, 6144, 6144, 0);
}

BENCH_FULL(rmsnorm_backward, "4096 x 6144", "")
{
    bench_full(0, 1, 4096, 6144, 6144, 0);
}

BENCH_FULL(rmsnorm_backward, "16384 x 2048", "")
{
    bench_full(0, 1, 16384, 2048, 2048, 0);
}

BENCH_FULL(rmsnorm_backward, "16384 x 512 of 576", "")
{
    bench_full(0, 1, 16384, 512, 576, 0);
}

BENCH_FULL(rmsnorm_backward, "32768 x 512 of 576", "")
{
    bench_full(0, 1, 32768, 512, 576, 0);
}

BENCH_FULL(layernorm_forward, "16384 x 6144", "")
{
    bench_full(1, 0, 16384, 6144, 6144, 0);
}

BENCH_FULL(layernorm_backward, "16384 x 6144", "")
{
    bench_full(1, 1, 16384, 6144, 6144, 0);
}

BENCH_FULL(layernorm_forward, "8192 x 128", "")
{
    bench_full(1, 0, 8192, 128, 128, 0);
}

BENCH_FULL(layernorm_backward, "8192 x 128", "")
{
    bench_full(1, 1, 8192, 128, 128, 0);
}
