/* Muon on blocks of every shape and layout. */
#include "case.h"

static const glm52_dtype F32 = GLM52_DTYPE_F32, BF16 = GLM52_DTYPE_BF16;

static const float QUINTIC[5][3] = {{4.0848f, -6.8946f, 2.9270f},
                                    {3.9505f, -6.3029f, 2.6377f},
                                    {3.7418f, -5.5913f, 2.3037f},
                                    {2.8769f, -3.1427f, 1.2046f},
                                    {2.8366f, -3.0525f, 1.2012f}};

/* The five coefficients a multiply what is rounded away along small singular values by up to 490. A device may round
 * to half precision where the parameter is bf16 (semantics.md): by as much more, which random blocks do not come
 * near; seven iterations stretch 16 times as much as five, which random blocks notice. */
static const double TOLERANCE = 490 * 0x1p-24, TOLERANCE_HALF = 490 * 0x1p-11, TOLERANCE_RANDOM = 0x1p-8;

struct muon_case {
    struct muon shape;
    int has_master;
    int64_t count; /* of elements from the first block to the last, gaps between rows and blocks included */
    struct array *rates, *coefficient, *gradient, *momentum, *w, *parameter, *workspace;
    double *want_momentum, *want_w, tolerance;
};

/* Where the contract grants them. */
static int has_half_products(const struct muon *m)
{
    return m->type == BF16 && strcmp(ops->name, "cpu") != 0;
}

/* Blocks of rows that follow one another. */
static struct muon shape_of(int64_t batch, int64_t rows, int64_t columns, glm52_dtype type)
{
    struct muon m = {.batch = batch, .stride = rows * columns, .rows = rows, .columns = columns, .group_rows = rows,
                     .momentum = 0.9f, .decay = 0.1f, .scale = 0.2f * sqrtf((float)(rows > columns ? rows : columns)),
                     .steps = 5, .type = type, .gradient = F32, .moments = F32};

    memcpy(m.coefficient, QUINTIC, sizeof QUINTIC);
    return m;
}

static int64_t at(const struct muon *m, int64_t block, int64_t i, int64_t j)
{
    return block * m->stride + i / m->group_rows * m->group_stride + i % m->group_rows * m->columns + j;
}

/* What lies between the blocks has no gradient that is a number, and must stay. */
static void fill_gradient(struct muon_case *c)
{
    for (int64_t i = 0; i < c->count; i++) c->gradient->value[i] = (double)NAN;
    for (int64_t b = 0; b < c->shape.batch; b++)
        for (int64_t i = 0; i < c->shape.rows; i++)
            for (int64_t j = 0; j < c->shape.columns; j++)
                c->gradient->value[at(&c->shape, b, i, j)] = (double)(1 + b) * draw_normal();
    array_push(c->gradient);
}

static struct muon_case muon_case_of(struct muon shape, int has_master)
{
    struct muon_case c = {.shape = shape, .has_master = has_master, .tolerance = TOLERANCE};
    double rates[RATES] = {0.02, 0, 0}, coefficient = 0.75;
    int empty = shape.batch == 0 || shape.rows == 0;

    if (has_half_products(&shape)) c.tolerance = shape.steps > 5 ? 2 * TOLERANCE_RANDOM : TOLERANCE_RANDOM;

    c.count = empty ? 0 : at(&shape, shape.batch - 1, shape.rows - 1, shape.columns - 1) + 1;
    c.rates = array_from(F32, RATES, rates);
    c.coefficient = array_from(F32, 1, &coefficient);
    c.gradient = array_zero(shape.gradient, c.count);
    c.momentum = array_normal(shape.moments, c.count, 0.5);
    c.w = array_normal(has_master ? F32 : shape.type, c.count, 0.5); /* the master, or the parameter itself */
    c.parameter = has_master ? array_output(shape.type, c.count) : c.w;
    c.workspace = array_workspace(ops->muon_bytes(device, &shape));
    c.want_momentum = doubles(c.count);
    c.want_w = doubles(c.count);
    fill_gradient(&c);
    return c;
}

static struct muon_case muon_case(struct muon shape)
{
    return muon_case_of(shape, shape.type != F32);
}

/* One iteration on x [m,n], m <= n. */
static void iterate(double *x, int64_t m, int64_t n, const float *coefficient)
{
    double *a = doubles(m * m), *b = doubles(m * m), *y = doubles(m * n);

    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < m; j++)
            for (int64_t k = 0; k < n; k++) a[i * m + j] += x[i * n + k] * x[j * n + k];
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < m; j++) {
            double square = 0;

            for (int64_t k = 0; k < m; k++) square += a[i * m + k] * a[j * m + k];
            b[i * m + j] = (double)coefficient[1] * a[i * m + j] + (double)coefficient[2] * square;
        }
    for (int64_t i = 0; i < m; i++)
        for (int64_t k = 0; k < m; k++)
            for (int64_t j = 0; j < n; j++) y[i * n + j] += b[i * m + k] * x[k * n + j];
    for (int64_t i = 0; i < m * n; i++) x[i] = (double)coefficient[0] * x[i] + y[i];
}

/* What becomes of the weights of a block, of the momentum that is kept. */
static void plain_block(struct muon_case *c, int64_t block)
{
    const struct muon *m = &c->shape;
    int tall = m->rows > m->columns;
    int64_t high = tall ? m->columns : m->rows, wide = tall ? m->rows : m->columns;
    double *x = doubles(m->rows * m->columns), squares = 0, lr = c->rates->value[RATE_LR];
    double beta = (double)m->momentum, fresh = m->classic ? 1 : 1 - beta;

    for (int64_t i = 0; i < m->rows; i++)
        for (int64_t j = 0; j < m->columns; j++) {
            double g = fresh * c->gradient->value[at(m, block, i, j)] * 0.75,
                   moved = c->momentum->value[at(m, block, i, j)];
            double u = m->nesterov ? g + beta * moved : moved;

            x[tall ? j * wide + i : i * wide + j] = u;
            squares += u * u;
        }
    for (int64_t i = 0; i < high * wide; i++) x[i] /= fmax(sqrt(squares), 1e-7);
    for (int32_t step = 0; step < m->steps; step++) iterate(x, high, wide, m->coefficient[step]);
    for (int64_t i = 0; i < m->rows; i++)
        for (int64_t j = 0; j < m->columns; j++) {
            double *w = &c->want_w[at(m, block, i, j)];

            *w = *w * (1 - lr * (double)m->decay) - lr * (double)m->scale * x[tall ? j * wide + i : i * wide + j];
        }
}

static void plain_momentum(struct muon_case *c)
{
    const struct muon *m = &c->shape;
    double beta = (double)m->momentum, fresh = m->classic ? 1 : 1 - beta;

    memcpy(c->want_momentum, c->momentum->value, (size_t)c->count * sizeof(double));
    for (int64_t b = 0; b < m->batch; b++)
        for (int64_t i = 0; i < m->rows; i++)
            for (int64_t j = 0; j < m->columns; j++) {
                double *moved = &c->want_momentum[at(m, b, i, j)];

                *moved = beta * *moved + fresh * c->gradient->value[at(m, b, i, j)] * 0.75;
            }
}

static void call(struct muon_case *c)
{
    ops->muon(device, &c->shape, c->rates->at, c->coefficient->at, c->gradient->at, c->momentum->at,
              c->has_master ? c->w->at : NULL, c->parameter->at, c->workspace->at);
}

static void run(struct muon_case *c)
{
    call(c);
    array_fetch(c->workspace);
}

/* One step from what the arrays hold. */
static void check_step(struct muon_case *c)
{
    plain_momentum(c);
    run(c);
    check_close(c->momentum, c->want_momentum, tolerance(c->momentum->type, 8));
    memcpy(c->want_w, c->w->value, (size_t)c->count * sizeof(double));
    for (int64_t b = 0; b < c->shape.batch; b++) plain_block(c, b);
    check_close(c->w, c->want_w, c->tolerance + (c->w->type == BF16 ? 0x1p-8 : 0));
    if (c->has_master) {
        double *rounded = doubles(c->count);

        for (int64_t i = 0; i < c->count; i++)
            rounded[i] = isnan(c->gradient->value[i]) ? (double)NAN
                                                      : (double)bf16_to_f32(f32_to_bf16((float)c->w->value[i]));
        check_exact(c->parameter, rounded);
    }
}

/* Two steps, with lr so large that the weights are mostly update. */
static void check_muon_of(struct muon shape, int has_master)
{
    struct muon_case c = muon_case_of(shape, has_master);

    for (int step = 0; step < 2; step++) {
        c.rates->value[RATE_LR] = 2 - step;
        array_push(c.rates);
        fill_gradient(&c);
        check_step(&c);
    }
}

static void check_muon(struct muon shape)
{
    check_muon_of(shape, shape.type != F32);
}

CASE(muon, "wide, tall, square, one row, one column, one element, no rows, no blocks")
{
    check_muon(shape_of(3, 7, 23, F32));
    check_muon(shape_of(2, 19, 6, F32));
    check_muon(shape_of(2, 11, 11, F32));
    check_muon(shape_of(4, 1, 13, F32));
    check_muon(shape_of(2, 9, 1, F32));
    check_muon(shape_of(3, 1, 1, F32));
    check_muon(shape_of(2, 0, 5, F32));
    check_muon(shape_of(0, 3, 5, F32));
}

CASE(muon, "both momenta, with and without Nesterov, no iteration, other coefficients")
{
    for (int bits = 0; bits < 4; bits++) {
        struct muon shape = shape_of(2, 9, 14, F32);

        shape.nesterov = bits & 1;
        shape.classic = bits >> 1;
        check_muon(shape);
    }
    struct muon shape = shape_of(2, 13, 8, F32);

    shape.steps = 0;
    check_muon(shape);
    shape.steps = 1;
    shape.coefficient[0][1] = 0;
    check_muon(shape);
    shape.coefficient[0][0] = 0;
    check_muon(shape);
}

CASE(muon, "rows of several heads stacked into one block, and one block per head, with gaps")
{
    struct muon joint = shape_of(1, 3 * 5, 11, F32), each = shape_of(3, 4, 17, F32), tall = shape_of(2, 2 * 9, 7, F32);

    joint.group_rows = 5;
    joint.group_stride = 13 * 11;
    check_muon(joint);
    each.stride = 9 * 17;
    check_muon(each);
    tall.group_rows = 9;
    tall.group_stride = 10 * 7 + 3;
    tall.stride = 2 * tall.group_stride + 1;
    check_muon(tall);
}

CASE(muon, "bf16 parameter of an fp32 master")
{
    struct muon shape = shape_of(3, 8, 21, BF16);

    check_muon(shape);
    shape.stride += 5;
    check_muon(shape);
}

CASE(muon, "every mixture of types")
{
    for (int bits = 0; bits < 12; bits++) {
        struct muon shape = shape_of(2, 5 + bits, 9, bits % 3 ? BF16 : F32);

        shape.gradient = bits / 3 & 1 ? BF16 : F32;
        shape.moments = bits / 6 ? BF16 : F32;
        check_muon_of(shape, bits % 3 == 2);
    }
    check_muon_of(shape_of(1, 2, 2051, BF16), 0);
}

CASE(muon, "bf16 parameters of widths that tensor cores take, whole tiles and parts of them")
{
    static const int64_t sizes[][3] = {{3, 8, 8},     {2, 64, 136},  {2, 136, 64},
                                       {3, 192, 328}, {1, 264, 272}, {1, 520, 24}};

    for (int i = 0; i < 6; i++)
        for (int steps = 0; steps <= 7; steps += i == 1 ? 1 : 5) {
            struct muon shape = shape_of(sizes[i][0], sizes[i][1], sizes[i][2], BF16);

            shape.steps = steps;
            memcpy(shape.coefficient[5], QUINTIC, 2 * sizeof QUINTIC[0]);
            check_muon_of(shape, i % 2);
        }
}

/* Gradient and momentum of the first columns times `first`, of the others times `rest`. */
static void check_uneven(int64_t columns, double first, double rest)
{
    struct muon shape = shape_of(2, 136, 648, BF16);
    struct muon_case c;

    shape.nesterov = 1;
    c = muon_case_of(shape, 1);
    for (int64_t i = 0; i < c.count; i++) {
        const double by = i % shape.columns < columns ? first : rest;

        c.gradient->value[i] *= by;
        c.momentum->value[i] *= by;
    }
    array_push(c.gradient);
    array_push(c.momentum);
    c.rates->value[RATE_LR] = 2;
    array_push(c.rates);
    check_step(&c);
}

CASE(muon, "bf16 parameters whose first columns say little of the others' size")
{
    check_uneven(0, 1, 0x1p-40);
    check_uneven(0, 1, 0x1p20);
    check_uneven(200, 0x1p-20, 1);
    check_uneven(200, 0, 0x1p-24);
    check_uneven(200, 0, 0x1p18);
    check_uneven(64, 0x1p-20, 0x1p4);
}

CASE(muon, "bf16 parameters of widths that tensor cores take, every mixture of types, gaps and groups of rows")
{
    for (int bits = 0; bits < 16; bits++) {
        struct muon shape = shape_of(2, bits & 8 ? 80 : 40, 56, BF16);

        shape.gradient = bits & 1 ? BF16 : F32;
        shape.moments = bits & 2 ? BF16 : F32;
        shape.nesterov = bits & 1;
        shape.group_rows = 8;
        shape.group_stride = 11 * 56;
        shape.stride = 12 * shape.group_stride;
        check_muon_of(shape, bits >> 2 & 1);
        shape.rows = 192;
        shape.columns = 200;
        shape.group_rows = bits & 8 ? 64 : 224;
        shape.group_stride = 65 * 200;
        shape.stride = 3 * shape.group_stride;
        shape.steps = 2 + bits % 3;
        check_muon_of(shape, bits >> 2 & 1);
    }
}

/* momentum = sum over r of left[i,r] size(r) right[r,j], no gradient: singular values from 1 down to 10^-decades */
static void check_graded(int64_t rows, int64_t columns, int64_t rank, double decades)
{
    struct muon shape = shape_of(1, rows, columns, BF16);
    struct muon_case c;

    shape.decay = 0;
    c = muon_case_of(shape, 1);
    c.tolerance = has_half_products(&shape) ? TOLERANCE_HALF : 4 * TOLERANCE; /* the squares are rounded too */
    for (int64_t i = 0; i < c.count; i++) c.gradient->value[i] = c.w->value[i] = c.momentum->value[i] = 0;
    for (int64_t r = 0; r < rank; r++) {
        double *left = doubles(rows), *right = doubles(columns), size = pow(10, -decades * (double)r / (double)rank);

        for (int64_t i = 0; i < rows; i++) left[i] = draw_normal();
        for (int64_t j = 0; j < columns; j++) right[j] = draw_normal();
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = 0; j < columns; j++) c.momentum->value[i * columns + j] += size * left[i] * right[j];
    }
    array_push(c.gradient);
    array_push(c.momentum);
    array_push(c.w);
    c.rates->value[RATE_LR] = 1;
    array_push(c.rates);
    check_step(&c);
}

CASE(muon, "bf16 parameters whose update has few, or ever smaller singular values")
{
    check_graded(64, 192, 64, 3);
    check_graded(192, 64, 64, 6);
    check_graded(96, 128, 96, 1);
    check_graded(64, 128, 1, 0);
    check_graded(128, 128, 7, 2);
}

CASE(muon, "a bf16 block without gradient and momentum only decays, exactly")
{
    struct muon_case c = muon_case_of(shape_of(3, 16, 24, BF16), 0);

    for (int64_t i = 384; i < 768; i++) c.gradient->value[i] = c.momentum->value[i] = 0;
    array_push(c.gradient);
    array_push(c.momentum);
    check_step(&c);
    for (int64_t i = 384; i < 768; i++)
        ck_assert(c.w->value[i] == (double)bf16_to_f32(f32_to_bf16((float)c.want_w[i])));
}

CASE(muon, "several tiles, mirrored ones among them")
{
    struct muon wide = shape_of(1, 271, 519, F32), tall = shape_of(1, 531, 263, F32);

    wide.steps = tall.steps = 1;
    check_muon(wide);
    check_muon(tall);
}

CASE(muon, "more blocks than are worked on at a time")
{
    check_muon(shape_of(6, 3, 300007, F32));
}

CASE(muon, "a block without gradient and momentum only decays, exactly")
{
    struct muon_case c = muon_case(shape_of(3, 6, 10, F32));

    for (int64_t i = 60; i < 120; i++) c.gradient->value[i] = c.momentum->value[i] = 0;
    array_push(c.gradient);
    array_push(c.momentum);
    check_step(&c);
    for (int64_t i = 60; i < 120; i++) {
        ck_assert(c.momentum->value[i] == 0);
        ck_assert(c.w->value[i] / c.want_w[i] - 1 < 0x1p-22 && c.want_w[i] / c.w->value[i] - 1 < 0x1p-22);
    }
}

static void check_nothing(struct muon shape)
{
    struct muon_case c = muon_case(shape);
    double *nothing = doubles(c.count);

    for (int64_t i = 0; i < c.count; i++) {
        c.gradient->value[i] = (double)INFINITY;
        nothing[i] = (double)NAN;
    }
    c.coefficient->value[0] = -1;
    array_push(c.gradient);
    array_push(c.coefficient);
    for (int64_t i = 0; i < c.count; i++) {
        c.want_momentum[i] = c.momentum->value[i];
        c.want_w[i] = c.w->value[i];
    }
    run(&c);
    check_exact(c.w, c.want_w);
    check_exact(c.momentum, c.want_momentum);
    check_exact(c.parameter, nothing);
}

CASE(muon, "a negative coefficient leaves everything as it is, whatever the gradient")
{
    check_nothing(shape_of(2, 5, 9, BF16));
    check_nothing(shape_of(2, 72, 136, BF16));
    check_nothing(shape_of(1, 136, 72, BF16));
}

/* Momentum and weights as they were. */
static void restore(struct muon_case *c, const double *momentum, const double *w)
{
    memcpy(c->momentum->value, momentum, (size_t)c->count * sizeof *momentum);
    memcpy(c->w->value, w, (size_t)c->count * sizeof *w);
    array_push(c->momentum);
    array_push(c->w);
}

CASE(muon, "the same bits for any number of threads")
{
    struct muon shapes[] = {shape_of(3, 301, 517, F32), shape_of(5, 48, 256, F32), shape_of(2, 600, 131, BF16),
                            shape_of(2, 520, 304, BF16), shape_of(70, 64, 264, BF16)};

    for (int i = 0; i < 5; i++) {
        struct muon_case c = muon_case(shapes[i]);
        double *momentum = doubles(c.count), *w = doubles(c.count);

        memcpy(momentum, c.momentum->value, (size_t)c.count * sizeof *momentum);
        memcpy(w, c.w->value, (size_t)c.count * sizeof *w);
        for (int threads = 1; threads <= 3; threads++) {
            device_threads(threads);
            restore(&c, momentum, w);
            run(&c);
            check_same(c.momentum);
            check_same(c.w);
        }
    }
}

CASE(muon, "recorded launches, replayed twice, give the bits of a call")
{
    struct muon shapes[] = {shape_of(3, 301, 517, F32), shape_of(3, 192, 520, BF16), shape_of(2, 520, 304, BF16)};

    for (int i = 0; i < 3 && ops->record; i++) {
        struct muon_case c = muon_case(shapes[i]);
        double *momentum = doubles(c.count), *w = doubles(c.count);
        void *graph;

        memcpy(momentum, c.momentum->value, (size_t)c.count * sizeof *momentum);
        memcpy(w, c.w->value, (size_t)c.count * sizeof *w);
        run(&c);
        check_same(c.momentum);
        check_same(c.w);
        ck_assert(ops->record(device) == GLM52_OK);
        call(&c);
        ck_assert(ops->recorded(device, &graph) == GLM52_OK);
        for (int replay = 0; replay < 2; replay++) {
            restore(&c, momentum, w);
            ops->replay(device, graph);
            check_same(c.momentum);
            check_same(c.w);
        }
        ops->forget(device, graph);
    }
}

/* ---- benches: blocks of the preset `bench` ---- */

static double flops_of(const struct muon *m)
{
    double side = (double)(m->rows < m->columns ? m->rows : m->columns), longer = (double)(m->rows + m->columns) - side;

    return m->steps * (4 * side * side * longer + 2 * side * side * side) * (double)m->batch;
}

static void bench_muon(const struct muon *shape, int count)
{
    struct muon_case c[8];
    double flops = 0;

    for (int i = 0; i < count; i++) {
        c[i] = muon_case(shape[i]);
        flops += flops_of(&shape[i]);
    }
    BENCH_LOOP
        for (int i = 0; i < count; i++)
            ops->muon(device, &c[i].shape, c[i].rates->at, c[i].coefficient->at, c[i].gradient->at, c[i].momentum->at,
                      NULL, c[i].w->at, c[i].workspace->at);
    bench_rate(flops, 0);
}

BENCH(muon, "16 x 512 x 512, experts")
{
    bench_muon((struct muon[]){shape_of(16, 512, 512, F32)}, 1);
}

BENCH(muon, "2 x 512 x 2048")
{
    bench_muon((struct muon[]){shape_of(2, 512, 2048, F32)}, 1);
}

BENCH(muon, "8 x 48 x 256, heads")
{
    bench_muon((struct muon[]){shape_of(8, 48, 256, F32)}, 1);
}

BENCH(muon, "8 x 16 x 256, heads")
{
    bench_muon((struct muon[]){shape_of(8, 16, 256, F32)}, 1);
}

BENCH(muon, "8 x 64 x 128, heads")
{
    bench_muon((struct muon[]){shape_of(8, 64, 128, F32)}, 1);
}

BENCH(muon, "a layer: 48 experts, attention by heads")
{
    bench_muon((struct muon[]){shape_of(48, 512, 512, F32), shape_of(1, 512, 2048, F32), shape_of(1, 256, 512, F32),
                               shape_of(8, 48, 256, F32), shape_of(8, 16, 256, F32), shape_of(8, 48, 128, F32),
                               shape_of(8, 64, 128, F32)}, 7);
}

/* ---- at full width: GLM-5.2's experts and heads ---- */

struct muon_types {
    glm52_dtype state; /* of gradient and momentum */
    int has_master;
};
static const struct muon_types NARROW = {GLM52_DTYPE_BF16, 0}, KEPT = {GLM52_DTYPE_F32, 1};

static void bench_full(int64_t batch, int64_t rows, int64_t columns, int64_t stride, struct muon_types types)
{
    struct muon shape = shape_of(batch, rows, columns, BF16);
    struct array *rates = array_from(F32, RATES, (double[RATES]){1e-4, 0, 0}), *coefficient = array_zero(F32, 1);
    struct array *gradient = array_random(types.state, batch * stride),
                 *momentum = array_random(types.state, batch * stride);
    struct array *master = types.has_master ? array_random(F32, batch * stride) : NULL;
    struct array *parameter = array_random(BF16, batch * stride), *workspace;

    shape.stride = stride;
    shape.gradient = shape.moments = types.state;
    workspace = array_workspace(ops->muon_bytes(device, &shape));
    coefficient->value[0] = 0.75;
    array_push(coefficient);
    BENCH_LOOP
        ops->muon(device, &shape, rates->at, coefficient->at, gradient->at, momentum->at, master ? master->at : NULL,
                  parameter->at, workspace->at);
    bench_counted();
}

BENCH_FULL(muon, "32 x 2048 x 6144, bf16 alone", "torch bmm 32 ms, iterations alone")
{
    bench_full(32, 2048, 6144, 2048 * 6144, NARROW);
}

BENCH_FULL(muon, "32 x 2048 x 6144, fp32 kept", "torch bmm 32 ms, iterations alone")
{
    bench_full(32, 2048, 6144, 2048 * 6144, KEPT);
}

BENCH_FULL(muon, "32 x 6144 x 2048, fp32 kept", "")
{
    bench_full(32, 6144, 2048, 2048 * 6144, KEPT);
}

BENCH_FULL(muon, "64 x 192 x 2048, bf16 alone", "torch bmm 0.58 ms, iterations alone")
{
    bench_full(64, 192, 2048, 256 * 2048, NARROW);
}

BENCH_FULL(muon, "64 x 192 x 2048, fp32 kept", "torch bmm 0.58 ms, iterations alone")
{
    bench_full(64, 192, 2048, 256 * 2048, KEPT);
}

BENCH_FULL(muon, "64 x 64 x 2048, fp32 kept", "")
{
    bench_full(64, 64, 2048, 256 * 2048, KEPT);
}

BENCH_FULL(muon, "64 x 192 x 512, fp32 kept", "")
{
    bench_full(64, 192, 512, 448 * 512, KEPT);
}

BENCH_FULL(muon, "64 x 256 x 512, fp32 kept", "torch bmm 0.26 ms, iterations alone")
{
    bench_full(64, 256, 512, 448 * 512, KEPT);
}

BENCH_FULL(muon, "1 x 6144 x 16384, fp32 kept", "")
{
    bench_full(1, 6144, 16384, 6144 * 16384, KEPT);
}

BENCH_FULL(muon, "1 x 128 x 6144, fp32 kept", "")
{
    bench_full(1, 128, 6144, 128 * 6144, KEPT);
}
