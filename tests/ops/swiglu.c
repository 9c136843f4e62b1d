/* SwiGLU with and without a weight per row. */
#include "case.h"

static const glm52_dtype F32 = GLM52_DTYPE_F32, BF16 = GLM52_DTYPE_BF16;

struct swiglu_case {
    struct swiglu shape;
    struct array *gate_up, *weight, *source, *dact;
    int weighted;
};

static struct swiglu_case swiglu_case(int64_t rows, int64_t width, int weighted, glm52_dtype type)
{
    struct swiglu_case c = {.shape = {rows, width, type}, .weighted = weighted};

    c.gate_up = array_normal(type, rows * 2 * width, 2);
    c.weight = array_normal(F32, rows, 1);
    c.dact = array_normal(type, rows * width, 1);
    c.source = array_zero(GLM52_DTYPE_I32, rows);
    for (int64_t i = 0; i < rows; i++) { /* a random permutation */
        int64_t j = draw_below(i + 1);

        c.source->value[i] = c.source->value[j];
        c.source->value[j] = (double)i;
    }
    array_push(c.source);
    return c;
}

static double act(const struct swiglu_case *c, int64_t row, int64_t j)
{
    const double *gate = c->gate_up->value + row * 2 * c->shape.width;

    return gate[j] / (1 + exp(-gate[j])) * gate[c->shape.width + j] *
           (c->weighted ? c->weight->value[(int64_t)c->source->value[row]] : 1);
}

static double objective(void *problem)
{
    const struct swiglu_case *c = problem;
    double sum = 0;

    for (int64_t i = 0; i < c->dact->count; i++)
        sum += c->dact->value[i] * act(c, i / c->shape.width, i % c->shape.width);
    return sum;
}

static void forward(const struct swiglu_case *c, struct array *y)
{
    ops->swiglu_forward(device, &c->shape, c->gate_up->at, c->weighted ? c->weight->at : NULL,
                        c->weighted ? c->source->at : NULL, y->at);
}

/* act, if not NULL, gets the activation again. */
static void backward_act(const struct swiglu_case *c, struct array *dgate_up, struct array *dweight, struct array *act)
{
    ops->swiglu_backward(device, &c->shape, c->gate_up->at, c->weighted ? c->weight->at : NULL,
                         c->weighted ? c->source->at : NULL, c->dact->at, dgate_up->at,
                         c->weighted ? dweight->at : NULL, act ? act->at : NULL);
}

static void backward(const struct swiglu_case *c, struct array *dgate_up, struct array *dweight)
{
    backward_act(c, dgate_up, dweight, NULL);
}

static void check_swiglu(int64_t rows, int64_t width, int weighted, glm52_dtype type)
{
    struct swiglu_case c = swiglu_case(rows, width, weighted, type);
    struct array *y = array_output(type, rows * width), *dgate_up = array_output(type, rows * 2 * width);
    struct array *dweight = array_output(F32, rows);
    double *want = doubles(y->count), *want_gate_up = doubles(dgate_up->count), *want_weight = doubles(rows);

    for (int64_t i = 0; i < y->count; i++) want[i] = act(&c, i / width, i % width);
    differences(objective, &c, c.gate_up->value, c.gate_up->count, want_gate_up);
    differences(objective, &c, c.weight->value, rows, want_weight);
    forward(&c, y);
    check_close(y, want, tolerance(type, 8));
    backward(&c, dgate_up, dweight);
    check_close(dgate_up, want_gate_up, tolerance(type, 16));
    if (weighted) check_close(dweight, want_weight, tolerance(F32, width));
    backward_act(&c, c.gate_up, dweight, c.dact); /* in place of both; the activation to the bit */
    array_fetch(dgate_up);
    check_exact(c.gate_up, dgate_up->value);
    array_fetch(y);
    check_exact(c.dact, y->value);
}

CASE(swiglu, "plain, odd shapes, one row, none")
{
    check_swiglu(17, 29, 0, F32);
    check_swiglu(1, 3, 0, F32);
    check_swiglu(0, 3, 0, F32);
}

CASE(swiglu, "weighted by the row each slot came from")
{
    check_swiglu(19, 31, 1, F32);
    check_swiglu(0, 31, 1, F32);
}

CASE(swiglu, "bf16, widths of 16 bytes and others, more columns than a block has threads")
{
    check_swiglu(13, 37, 0, BF16);
    check_swiglu(7, 40, 0, BF16);
    check_swiglu(9, 48, 1, BF16);
    check_swiglu(3, 2104, 1, BF16);
    check_swiglu(11, 41, 1, BF16);
}

CASE(swiglu, "gates so large that the exponential overflows")
{
    static const double gate_up[] = {-200, -90, -60, 0, 60, 90, 200, 1, 2, 3, 4, 5, 6, 7};
    struct swiglu_case c = swiglu_case(1, 7, 0, F32);
    struct array *y = array_output(F32, 7);
    double *want = doubles(7);

    memcpy(c.gate_up->value, gate_up, sizeof gate_up);
    array_push(c.gate_up);
    for (int64_t j = 0; j < 7; j++) want[j] = act(&c, 0, j);
    forward(&c, y);
    check_close(y, want, tolerance(F32, 8));
    for (int64_t j = 0; j < 7; j++)
        ck_assert_msg(fabs(y->value[j] - want[j]) <= 1e-6 * fabs(want[j]) + 1e-36, "%lld", (long long)j);
}

CASE(swiglu, "rows longer than a chunk, backward in place, the same bits for any number of threads")
{
    struct swiglu_case c = swiglu_case(47, 1501, 1, F32);
    struct array *y = array_output(F32, 47 * 1501), *dgate_up = array_output(F32, 2 * 47 * 1501);
    struct array *dweight = array_output(F32, 47);

    for (int threads = 1; threads <= 3; threads++) {
        device_threads(threads);
        forward(&c, y);
        backward(&c, dgate_up, dweight);
        check_same(y);
        check_same(dgate_up);
        check_same(dweight);
    }
    backward(&c, c.gate_up, dweight);
    array_fetch(dgate_up);
    check_exact(c.gate_up, dgate_up->value);
}

static void bench(int with_backward)
{
    struct swiglu_case c = swiglu_case(16384, 512, 1, strcmp(ops->name, "cpu") == 0 ? F32 : BF16);
    struct array *y = array_output(c.shape.type, 16384 * 512), *dweight = array_output(F32, 16384);

    BENCH_LOOP {
        if (with_backward)
            backward(&c, c.gate_up, dweight);
        else
            forward(&c, y);
    }
    bench_rate(0, 16384.0 * 512 * (double)dtype_size(c.shape.type) * (with_backward ? 5 : 3));
}

BENCH(swiglu, "forward, 16384 x 512")
{
    bench(0);
}

BENCH(swiglu, "backward, 16384 x 512")
{
    bench(1);
}

static void bench_full(int with_backward, int64_t rows, int64_t width, int weighted)
{
    struct swiglu g = {rows, width, BF16};
    struct array *gate_up = array_random(BF16, rows * 2 * width), *act = array_random(BF16, rows * width);
    struct array *dgate_up = array_random(BF16, rows * 2 * width), *weight = array_random(F32, rows);
    struct array *source = array_zero(GLM52_DTYPE_I32, rows), *dweight = array_output(F32, rows);
    float *p = weighted ? weight->at : NULL, *dp = weighted ? dweight->at : NULL;

    for (int64_t i = 0; i < rows; i++) source->value[i] = (double)(i * 8191 % rows);
    array_push(source);
    BENCH_LOOP {
        if (with_backward)
            ops->swiglu_backward(device, &g, gate_up->at, p, source->at, act->at, dgate_up->at, dp, act->at);
        else
            ops->swiglu_forward(device, &g, gate_up->at, p, source->at, act->at);
    }
    bench_counted();
}

BENCH_FULL(swiglu_forward, "65536 x 2048, weighted", "")
{
    bench_full(0, 65536, 2048, 1);
}

BENCH_FULL(swiglu_forward, "32768 x 2048, weighted", "")
{
    bench_full(0, 32768, 2048, 1);
}

BENCH_FULL(swiglu_forward, "8192 x 12288", "")
{
    bench_full(0, 8192, 12288, 0);
}

BENCH_FULL(swiglu_backward, "65536 x 2048, weighted", "")
{
    bench_full(1, 65536, 2048, 1);
}

BENCH_FULL(swiglu_backward, "32768 x 2048, weighted", "")
{
    bench_full(1, 32768, 2048, 1);
}

BENCH_FULL(swiglu_backward, "8192 x 12288", "")
{
    bench_full(1, 8192, 12288, 0);
}
