/* Matrix products, plain and grouped. */
#include "case.h"

struct gemm_case {
    struct gemm shape;
    struct array *a, *b, *c;
    double *want;
};

static int64_t lines_of(int32_t transposed, int64_t rows, int64_t columns)
{
    return transposed ? columns : rows;
}

/* Leading dimensions and batch strides leave gaps; a gap of c must keep what it holds. */
static struct gemm_case gemm_case(struct gemm shape, int64_t gap)
{
    struct gemm *g = &shape;
    int64_t a_lines = lines_of(g->transpose_a, g->m, g->k), b_lines = lines_of(g->transpose_b, g->k, g->n);
    struct gemm_case c;

    g->lda = lines_of(g->transpose_a, g->k, g->m) + gap;
    g->ldb = lines_of(g->transpose_b, g->n, g->k) + 2 * gap;
    g->ldc = g->n + 3 * gap;
    g->stride_a = a_lines * g->lda + gap;
    g->stride_b = b_lines * g->ldb + 2 * gap;
    g->stride_c = g->m * g->ldc + gap;
    c.shape = shape;
    c.a = array_normal(g->a_type, g->batch * g->stride_a, 1);
    c.b = array_normal(g->b_type, g->batch * g->stride_b, 1);
    c.c = g->add ? array_normal(g->c_type, g->batch * g->stride_c, 1) : array_output(g->c_type, g->batch * g->stride_c);
    c.want = doubles(g->batch * g->stride_c);
    for (int64_t i = 0; i < g->batch * g->stride_c; i++) c.want[i] = g->add ? c.c->value[i] : (double)NAN;
    return c;
}

static double element(const double *matrix, int64_t ld, int32_t transposed, int64_t i, int64_t j)
{
    return transposed ? matrix[j * ld + i] : matrix[i * ld + j];
}

static void gemm_oracle(struct gemm_case *c)
{
    const struct gemm *g = &c->shape;

    for (int64_t batch = 0; batch < g->batch; batch++)
        for (int64_t i = 0; i < g->m; i++)
            for (int64_t j = 0; j < g->n; j++) {
                double *to = &c->want[batch * g->stride_c + i * g->ldc + j], sum = 0;

                for (int64_t k = 0; k < g->k; k++)
                    sum += element(c->a->value + batch * g->stride_a, g->lda, g->transpose_a, i, k) *
                           element(c->b->value + batch * g->stride_b, g->ldb, g->transpose_b, k, j);
                *to = (g->add ? *to : 0) + sum * (g->scale == 0 ? 1 : (double)g->scale);
            }
}

static const glm52_dtype F32 = GLM52_DTYPE_F32, BF16 = GLM52_DTYPE_BF16;

/* Added to another array than c, which is only written. */
static void check_from(const struct gemm_case *c, double permitted)
{
    struct gemm g = c->shape;
    struct array *to = array_output(g.c_type, c->c->count);
    double *want = doubles(c->c->count);

    for (int64_t i = 0; i < c->c->count; i++) {
        int64_t at = i % g.stride_c;

        want[i] = at < g.m * g.ldc && at % g.ldc < g.n ? c->want[i] : (double)NAN;
    }
    g.from = c->c->at;
    ops->gemm(device, &g, c->a->at, c->b->at, to->at);
    check_close(to, want, permitted);
}

/* fp32 beside bf16 may count as bf16, or as the sum of two such numbers. */
static void check_gemm(struct gemm shape, int64_t gap)
{
    struct gemm_case c = gemm_case(shape, gap);
    double rounding = shape.a_type == shape.b_type ? 0 : ldexp(1, shape.c_type == BF16 ? -9 : -18);

    gemm_oracle(&c);
    if (shape.add) check_from(&c, tolerance(shape.c_type, shape.k) + rounding);
    ops->gemm(device, &c.shape, c.a->at, c.b->at, c.c->at);
    check_close(c.c, c.want, tolerance(shape.c_type, shape.k) + rounding);
}

static struct gemm shape_of(int64_t m, int64_t n, int64_t k, glm52_dtype type)
{
    return (struct gemm){.m = m, .n = n, .k = k, .batch = 1, .a_type = type, .b_type = type, .c_type = type};
}

CASE(gemm, "every transposition, overwritten and added to, with gaps")
{
    for (int bits = 0; bits < 8; bits++)
        for (int gap = 0; gap < 2; gap++) {
            struct gemm shape = shape_of(37, 29, 53, F32);

            shape.transpose_a = bits & 1;
            shape.transpose_b = bits >> 1 & 1;
            shape.add = bits >> 2;
            shape.scale = bits & 1 ? 0.375f : 0;
            check_gemm(shape, 3 * gap);
        }
}

CASE(gemm, "bf16 in and out, mixed with fp32, every transposition")
{
    for (int bits = 0; bits < 64; bits++) {
        struct gemm shape = shape_of(71, 135, 261, F32);

        shape.a_type = bits & 1 ? BF16 : F32;
        shape.b_type = bits >> 1 & 1 ? BF16 : F32;
        shape.c_type = bits >> 2 & 1 ? BF16 : F32;
        shape.transpose_a = bits >> 3 & 1;
        shape.transpose_b = bits >> 4 & 1;
        shape.add = bits >> 5;
        check_gemm(shape, 5);
    }
}

static void check_mixed(int64_t m, int64_t n, int64_t k, int bits, int64_t gap)
{
    struct gemm shape = shape_of(m, n, k, F32);

    shape.b_type = BF16;
    shape.c_type = bits & 1 ? BF16 : F32;
    shape.transpose_a = bits >> 1 & 1;
    shape.transpose_b = bits >> 2 & 1;
    shape.add = bits >> 3;
    shape.scale = bits & 1 ? 0 : 0.625f;
    check_gemm(shape, gap);
}

CASE(gemm, "fp32 times bf16, large")
{
    for (int bits = 0; bits < 16; bits += 3) check_mixed(512, 264, 520, bits, 8);
    check_mixed(513, 257, 521, 10, 1);
    check_mixed(60001, 8, 304, 8, 0); /* more of fp32 than fits a device's scratch */
    check_mixed(300, 8, 60001, 10, 0);
}

CASE(gemm, "batches")
{
    for (int bits = 0; bits < 4; bits++) {
        struct gemm shape = shape_of(19, 23, 17, bits & 1 ? BF16 : F32);

        shape.batch = 5;
        shape.transpose_b = bits >> 1;
        check_gemm(shape, 1);
    }
}

CASE(gemm, "no rows, one row, one column, no depth, several tiles")
{
    check_gemm(shape_of(0, 7, 5, F32), 0);
    check_gemm(shape_of(1, 301, 43, F32), 0);
    check_gemm(shape_of(307, 1, 43, F32), 2);
    check_gemm(shape_of(5, 7, 0, F32), 2);
    check_gemm(shape_of(5, 7, 0, BF16), 2);
    check_gemm(shape_of(523, 1037, 11, F32), 0);
    check_gemm(shape_of(523, 137, 11, BF16), 0);
}

CASE(gemm, "the same bits for any number of threads")
{
    struct gemm shapes[] = {shape_of(37, 129, 513, F32), shape_of(517, 1031, 67, F32), shape_of(200, 300, 270, BF16)};

    for (int i = 0; i < 3; i++) {
        struct gemm_case c = gemm_case(shapes[i], 0);

        for (int threads = 1; threads <= 3; threads++) {
            device_threads(threads);
            array_poison(c.c);
            ops->gemm(device, &c.shape, c.a->at, c.b->at, c.c->at);
            check_same(c.c);
        }
    }
}

/* ---- grouped ---- */

enum { GROUPS = 6 };
static const int64_t GROUP_ROWS[GROUPS] = {13, 0, 301, 1, 0, 34};

struct grouped_case {
    struct grouped_gemm shape;
    struct array *offsets, *x, *w, *y;
};

/* Rows of y are the forward's result, and the backward's input. `times`: as many rows in every group. */
static struct grouped_case grouped_case_times(int64_t n, int64_t k, glm52_dtype type, int32_t add, glm52_dtype gradient,
                                              int times)
{
    struct grouped_case c = {.shape = {.n = n, .k = k, .stride = n * k + 8, .groups = GROUPS, .add = add, .type = type,
                                       .gradient = gradient}};
    double offsets[GROUPS + 1] = {0};

    for (int g = 0; g < GROUPS; g++) offsets[g + 1] = offsets[g] + (double)(times * GROUP_ROWS[g]);
    c.shape.rows = (int64_t)offsets[GROUPS];
    c.offsets = array_from(GLM52_DTYPE_I32, GROUPS + 1, offsets);
    c.x = array_normal(type, c.shape.rows * c.shape.k, 1);
    c.w = array_normal(type, GROUPS * c.shape.stride, 1);
    c.y = array_normal(type, c.shape.rows * c.shape.n, 1);
    return c;
}

static struct grouped_case grouped_case(int64_t n, int64_t k, glm52_dtype type, int32_t add, glm52_dtype gradient)
{
    return grouped_case_times(n, k, type, add, gradient, 1);
}

static double *copy_of(const struct array *a)
{
    double *copy = doubles(a->count);

    if (a->count) memcpy(copy, a->value, (size_t)a->count * sizeof *copy);
    return copy;
}

/* The matrices of dw, not what lies between them. */
static void clear_matrices(const struct grouped_gemm *g, double *dw)
{
    for (int64_t group = 0; group < g->groups; group++)
        memset(dw + group * g->stride, 0, (size_t)(g->n * g->k) * sizeof *dw);
}

/* Visits (row, column of y, column of x) of every product: all three operations are one sum over them. */
static void grouped_oracle(const struct grouped_case *c, const double *x, const double *w, const double *y, double *dx,
                           double *dw, double *to_y)
{
    const struct grouped_gemm *g = &c->shape;

    for (int64_t group = 0; group < g->groups; group++)
        for (int64_t i = (int64_t)c->offsets->value[group]; i < (int64_t)c->offsets->value[group + 1]; i++)
            for (int64_t n = 0; n < g->n; n++)
                for (int64_t k = 0; k < g->k; k++) {
                    int64_t weight = group * g->stride + n * g->k + k;

                    if (to_y) to_y[i * g->n + n] += x[i * g->k + k] * w[weight];
                    if (dx) dx[i * g->k + k] += y[i * g->n + n] * w[weight];
                    if (dw) dw[weight] += y[i * g->n + n] * x[i * g->k + k];
                }
}

static void check_grouped_shape(struct grouped_case c)
{
    glm52_dtype type = c.shape.type;
    int32_t add = c.shape.add;
    struct array *y = add ? array_normal(type, c.y->count, 1) : array_output(type, c.y->count);
    struct array *dx = add ? array_normal(type, c.x->count, 1) : array_output(type, c.x->count);
    struct array *dw = array_normal(c.shape.gradient, c.w->count, 1);
    double *want_y = add ? copy_of(y) : doubles(y->count), *want_dx = add ? copy_of(dx) : doubles(dx->count);
    double *want_dw = copy_of(dw);

    if (!add) clear_matrices(&c.shape, want_dw);
    grouped_oracle(&c, c.x->value, c.w->value, c.y->value, want_dx, want_dw, want_y);
    ops->grouped_gemm_forward(device, &c.shape, c.offsets->at, c.x->at, c.w->at, y->at);
    ops->grouped_gemm_backward_rows(device, &c.shape, c.offsets->at, c.y->at, c.w->at, dx->at);
    ops->grouped_gemm_backward_weight(device, &c.shape, c.offsets->at, c.y->at, c.x->at, dw->at);
    check_close(y, want_y, tolerance(type, c.shape.k));
    check_close(dx, want_dx, tolerance(type, c.shape.n));
    check_close(dw, want_dw, 2 * tolerance(c.shape.gradient, 301)); /* the product may be rounded before it is added */
}

static void check_grouped(glm52_dtype type, int32_t add)
{
    check_grouped_shape(grouped_case(39, 27, type, add, F32));
}

CASE(grouped_gemm, "forward and both backwards, empty groups, gaps between weights")
{
    check_grouped(F32, 0);
    check_grouped(F32, 1);
}

CASE(grouped_gemm, "bf16")
{
    check_grouped(BF16, 0);
    check_grouped(BF16, 1);
}

CASE(grouped_gemm, "bf16 gradients of weights")
{
    for (int add = 0; add < 2; add++) {
        check_grouped_shape(grouped_case(39, 27, BF16, add, BF16));
        check_grouped_shape(grouped_case(39, 27, F32, add, BF16));
    }
}

CASE(grouped_gemm, "widths that tensor cores take, few rows a group")
{
    for (int add = 0; add < 2; add++) {
        check_grouped_shape(grouped_case(136, 200, BF16, add, F32));
        check_grouped_shape(grouped_case(264, 72, BF16, add, BF16));
        check_grouped_shape(grouped_case(264, 520, BF16, add, F32));
    }
}

CASE(grouped_gemm, "widths that tensor cores take, thousands of rows a group")
{
    for (int add = 0; add < 2; add++) check_grouped_shape(grouped_case_times(136, 72, BF16, add, F32, 18));
}

static void check_no_rows(struct grouped_case c)
{
    glm52_dtype type = c.shape.type;
    struct array *y = array_output(type, 0), *dw = array_normal(c.shape.gradient, c.w->count, 1);
    double *want = copy_of(dw);

    if (!c.shape.add) clear_matrices(&c.shape, want);

    memset(c.offsets->value, 0, (GROUPS + 1) * sizeof(double));
    array_push(c.offsets);
    c.shape.rows = 0;
    ops->grouped_gemm_forward(device, &c.shape, c.offsets->at, c.x->at, c.w->at, y->at);
    ops->grouped_gemm_backward_rows(device, &c.shape, c.offsets->at, c.y->at, c.w->at, y->at);
    ops->grouped_gemm_backward_weight(device, &c.shape, c.offsets->at, c.y->at, c.x->at, dw->at);
    array_fetch(y);
    check_exact(dw, want);
}

CASE(grouped_gemm, "no rows at all")
{
    for (int add = 0; add < 2; add++) {
        check_no_rows(grouped_case(39, 27, F32, add, F32));
        check_no_rows(grouped_case(136, 72, BF16, add, BF16));
    }
}

CASE(grouped_gemm, "the same bits for any number of threads")
{
    struct grouped_case c = grouped_case(39, 27, F32, 0, F32);
    struct array *y = array_output(F32, c.y->count), *dx = array_output(F32, c.x->count),
                 *dw = array_zero(F32, c.w->count);

    for (int threads = 1; threads <= 3; threads++) {
        device_threads(threads);
        memset(dw->value, 0, (size_t)dw->count * sizeof(double));
        array_push(dw);
        ops->grouped_gemm_forward(device, &c.shape, c.offsets->at, c.x->at, c.w->at, y->at);
        ops->grouped_gemm_backward_rows(device, &c.shape, c.offsets->at, c.y->at, c.w->at, dx->at);
        ops->grouped_gemm_backward_weight(device, &c.shape, c.offsets->at, c.y->at, c.x->at, dw->at);
        check_same(y);
        check_same(dx);
        check_same(dw);
    }
}

/* ---- benches: shapes of the preset `bench` ---- */

/* fp32 on the cpu, bf16 where there are tensor cores. */
static glm52_dtype bench_type(void)
{
    return strcmp(ops->name, "cpu") == 0 ? F32 : BF16;
}

static void bench_gemm(struct gemm shape)
{
    struct gemm_case c = gemm_case(shape, 0);

    BENCH_LOOP
        ops->gemm(device, &c.shape, c.a->at, c.b->at, c.c->at);
    bench_rate(2 * (double)shape.m * (double)shape.n * (double)shape.k * (double)shape.batch, 0);
}

static struct gemm weights_of(int64_t m, int64_t n, int64_t k)
{
    struct gemm shape = shape_of(m, n, k, bench_type());

    shape.transpose_b = 1;
    return shape;
}

static struct gemm gradient_of(int64_t m, int64_t n, int64_t k)
{
    struct gemm shape = shape_of(m, n, k, bench_type());

    shape.transpose_a = shape.add = 1;
    shape.c_type = F32;
    return shape;
}

BENCH(gemm, "4096 x 512 x 512")
{
    bench_gemm(weights_of(4096, 512, 512));
}

BENCH(gemm, "4096 x 8192 x 512")
{
    bench_gemm(weights_of(4096, 8192, 512));
}

BENCH(gemm, "4096 x 512 x 8192")
{
    bench_gemm(shape_of(4096, 512, 8192, bench_type()));
}

BENCH(gemm, "512 x 512 x 4096, weight gradient")
{
    bench_gemm(gradient_of(512, 512, 4096));
}

BENCH(gemm, "192 x 512 x 4096, weight gradient")
{
    bench_gemm(gradient_of(192, 512, 4096));
}

BENCH(gemm, "8 x 4096 x 128 x 48, heads")
{
    struct gemm shape = shape_of(4096, 128, 48, bench_type());

    shape.batch = 8;
    bench_gemm(shape);
}

struct grouped_bench {
    struct grouped_gemm shape;
    struct array *offsets, *x, *w, *y, *dw;
};

/* 16 experts of 900 to 1100 rows, 512 -> 1024. */
static struct grouped_bench grouped_bench(void)
{
    struct grouped_bench b = {.shape = {.n = 1024, .k = 512, .stride = 1024 * 512, .groups = 16, .type = bench_type(),
                                        .gradient = F32}};
    double offsets[17] = {0};

    for (int g = 0; g < 16; g++) offsets[g + 1] = offsets[g] + (double)draw_between(900, 1100);
    b.shape.rows = (int64_t)offsets[16];
    b.offsets = array_from(GLM52_DTYPE_I32, 17, offsets);
    b.x = array_normal(b.shape.type, b.shape.rows * b.shape.k, 1);
    b.y = array_normal(b.shape.type, b.shape.rows * b.shape.n, 1);
    b.w = array_normal(b.shape.type, 16 * b.shape.stride, 1);
    b.dw = array_zero(F32, 16 * b.shape.stride);
    return b;
}

static void grouped_rate(const struct grouped_bench *b)
{
    bench_rate(2 * (double)b->shape.rows * (double)b->shape.n * (double)b->shape.k, 0);
}

BENCH(grouped_gemm, "forward, 16 groups of ~1000 x 1024 x 512")
{
    struct grouped_bench b = grouped_bench();

    BENCH_LOOP
        ops->grouped_gemm_forward(device, &b.shape, b.offsets->at, b.x->at, b.w->at, b.y->at);
    grouped_rate(&b);
}

BENCH(grouped_gemm, "backward to rows, 16 groups of ~1000")
{
    struct grouped_bench b = grouped_bench();

    BENCH_LOOP
        ops->grouped_gemm_backward_rows(device, &b.shape, b.offsets->at, b.y->at, b.w->at, b.x->at);
    grouped_rate(&b);
}

BENCH(grouped_gemm, "backward to weights, 16 groups of ~1000")
{
    struct grouped_bench b = grouped_bench();

    BENCH_LOOP
        ops->grouped_gemm_backward_weight(device, &b.shape, b.offsets->at, b.y->at, b.x->at, b.dw->at);
    grouped_rate(&b);
}
