/* Sigmoid router. */
#include "case.h"

struct problem {
    struct route shape;
    struct array *logits, *bias, *chosen, *dweight;
};

static struct problem problem(struct route shape)
{
    return (struct problem){shape, array_normal(GLM52_DTYPE_F32, shape.rows * shape.experts, 2),
                            array_normal(GLM52_DTYPE_F32, shape.experts, 0.2),
                            array_output(GLM52_DTYPE_I32, shape.rows * shape.k),
                            array_normal(GLM52_DTYPE_F32, shape.rows * shape.k, 1)};
}

static double sigmoid(double x)
{
    return 1 / (1 + exp(-x));
}

/* k rounds of taking the best that is left, the lower one of equals; written ascending. */
static void plain_choose(const struct problem *p, int64_t t, double *chosen)
{
    const double *logit = p->logits->value + t * p->shape.experts;
    char taken[1100] = {0};
    int32_t n = 0;

    for (int32_t j = 0; j < p->shape.k; j++) {
        int32_t best = -1;
        double most = 0;

        for (int32_t e = 0; e < p->shape.experts; e++) {
            double x = sigmoid(logit[e]) + p->bias->value[e];

            if (!taken[e] && (best < 0 || x > most)) {
                best = e;
                most = x;
            }
        }
        taken[best] = 1;
    }
    for (int32_t e = 0; e < p->shape.experts; e++)
        if (taken[e])
            chosen[n++] = e;
}

static void plain_weights(const struct problem *p, const double *chosen, double *weight)
{
    for (int64_t t = 0; t < p->shape.rows; t++) {
        double sum = 1e-20;

        for (int32_t j = 0; j < p->shape.k; j++)
            sum += weight[t * p->shape.k + j] =
                sigmoid(p->logits->value[t * p->shape.experts + (int64_t)chosen[t * p->shape.k + j]]);
        for (int32_t j = 0; j < p->shape.k; j++)
            weight[t * p->shape.k + j] *= (double)p->shape.scale / (p->shape.normalize ? sum : 1);
    }
}

/* sum of weight * dweight with the choice as it was made. */
static double objective(void *argument)
{
    static double weight[1024];
    const struct problem *p = argument;
    double sum = 0;

    plain_weights(p, p->chosen->value, weight);
    for (int64_t i = 0; i < p->shape.rows * p->shape.k; i++)
        sum += weight[i] * p->dweight->value[i];
    return sum;
}

static void check(struct problem p)
{
    struct array *weight = array_output(GLM52_DTYPE_F32, p.shape.rows * p.shape.k);
    struct array *dlogits = array_output(GLM52_DTYPE_F32, p.shape.rows * p.shape.experts);
    double *chosen = doubles(p.chosen->count), *want = doubles(weight->count), *dwant = doubles(dlogits->count);

    for (int64_t t = 0; t < p.shape.rows; t++)
        plain_choose(&p, t, chosen + t * p.shape.k);
    plain_weights(&p, chosen, want);
    for (int threads = 1; threads <= 3; threads++) {
        device_threads(threads);
        ops->route_forward(device, &p.shape, p.logits->at, p.bias->at, p.chosen->at, weight->at);
        check_exact(p.chosen, chosen);
        check_same(weight);
        ops->route_backward(device, &p.shape, p.logits->at, p.chosen->at, p.dweight->at, dlogits->at);
        check_same(dlogits);
    }
    check_close(weight, want, tolerance(GLM52_DTYPE_F32, p.shape.k));
    differences(objective, &p, p.logits->value, p.logits->count, dwant);
    check_close(dlogits, dwant, 4 * tolerance(GLM52_DTYPE_F32, p.shape.k));
}

CASE(route, "normalised weights, odd numbers")
{
    check(problem((struct route){.rows = 53, .experts = 17, .k = 5, .normalize = 1, .scale = 2.5f}));
}

CASE(route, "weights as they are")
{
    check(problem((struct route){.rows = 31, .experts = 11, .k = 3, .normalize = 0, .scale = 1.5f}));
}

CASE(route, "as many experts as GLM-5.2 has, and more than a warp takes in registers of its own")
{
    check(problem((struct route){.rows = 21, .experts = 256, .k = 8, .normalize = 1, .scale = 2.5f}));
    check(problem((struct route){.rows = 33, .experts = 128, .k = 8, .normalize = 1, .scale = 2.5f}));
    check(problem((struct route){.rows = 5, .experts = 100, .k = 40, .normalize = 1, .scale = 2.5f}));
    check(problem((struct route){.rows = 3, .experts = 300, .k = 8, .normalize = 0, .scale = 1}));
    check(problem((struct route){.rows = 2, .experts = 1030, .k = 5, .normalize = 1, .scale = 1}));
}

CASE(route, "experts in turn where that is wanted, with the weights of their logits")
{
    struct problem p =
        problem((struct route){.rows = 7, .experts = 10, .k = 4, .normalize = 1, .forced = 1, .scale = 2});
    struct array *weight = array_output(GLM52_DTYPE_F32, 7 * 4);
    double *chosen = doubles(7 * 4), *want = doubles(7 * 4);

    for (int64_t t = 0; t < 7; t++)
        for (int64_t e = 0, n = 0; e < 10; e++)
            if ((e - t * 4 % 10 + 10) % 10 < 4) chosen[t * 4 + n++] = (double)e;
    plain_weights(&p, chosen, want);
    ops->route_forward(device, &p.shape, p.logits->at, p.bias->at, p.chosen->at, weight->at);
    check_exact(p.chosen, chosen);
    check_close(weight, want, tolerance(GLM52_DTYPE_F32, 4));
}

/* Experts k apart, from another place in each row. */
static void check_given(int32_t experts, int32_t k, int32_t forced)
{
    struct problem p = problem((struct route){.rows = 9, .experts = experts, .k = k, .normalize = 1, .scale = 2,
                                              .forced = forced, .given = 1});
    struct array *weight = array_output(GLM52_DTYPE_F32, 9 * k);
    double *chosen = doubles(9 * k), *want = doubles(9 * k);

    for (int64_t t = 0; t < 9; t++)
        for (int64_t j = 0; j < k; j++) chosen[t * k + j] = (double)(t % (experts / k) + j * (experts / k));
    p.chosen = array_from(GLM52_DTYPE_I32, 9 * k, chosen);
    plain_weights(&p, chosen, want);
    ops->route_forward(device, &p.shape, p.logits->at, p.bias->at, p.chosen->at, weight->at);
    check_exact(p.chosen, chosen);
    check_close(weight, want, tolerance(GLM52_DTYPE_F32, k));
}

CASE(route, "a choice that is given")
{
    check_given(17, 5, 0);
    check_given(256, 8, 1);
    check_given(1030, 40, 0);
}

CASE(route, "all experts, one expert, no rows")
{
    check(problem((struct route){.rows = 13, .experts = 7, .k = 7, .normalize = 1, .scale = 2.5f}));
    check(problem((struct route){.rows = 19, .experts = 9, .k = 1, .normalize = 0, .scale = 2.5f}));
    check(problem((struct route){.rows = 0, .experts = 9, .k = 2, .normalize = 1, .scale = 2.5f}));
}

CASE(route, "equal experts: the lower ones are chosen")
{
    struct problem p = problem((struct route){.rows = 23, .experts = 19, .k = 6, .normalize = 1, .scale = 1});

    for (int64_t i = 0; i < p.logits->count; i++)
        p.logits->value[i] = (double)draw_below(2);
    for (int64_t e = 0; e < p.bias->count; e++)
        p.bias->value[e] = 0;
    array_push(p.logits);
    array_push(p.bias);
    check(p);
}

CASE(route, "a logit that is not a number still leaves k experts within range")
{
    struct problem p = problem((struct route){.rows = 3, .experts = 5, .k = 4, .normalize = 1, .scale = 1});
    struct array *weight = array_output(GLM52_DTYPE_F32, 12);

    for (int64_t i = 0; i < p.logits->count; i += 2)
        p.logits->value[i] = NAN;
    array_push(p.logits);
    ops->route_forward(device, &p.shape, p.logits->at, p.bias->at, p.chosen->at, weight->at);
    array_fetch(p.chosen);
    for (int64_t i = 0; i < 12; i++) {
        ck_assert(p.chosen->value[i] >= 0 && p.chosen->value[i] < 5);
        ck_assert(i % 4 == 0 || p.chosen->value[i] > p.chosen->value[i - 1]);
    }
}

BENCH(route_forward, "8 of 256 experts")
{
    struct problem p = problem((struct route){.rows = 4096, .experts = 256, .k = 8, .normalize = 1, .scale = 2.5f});
    struct array *weight = array_output(GLM52_DTYPE_F32, 4096 * 8);

    BENCH_LOOP
        ops->route_forward(device, &p.shape, p.logits->at, p.bias->at, p.chosen->at, weight->at);
    bench_rate(0, 4.0 * 4096 * (256 + 16));
}

/* what: 0 forward, 1 backward. */
static void bench_full(int what)
{
    enum { ROWS = 8192, EXPERTS = 256, K = 8 };
    struct problem p = problem((struct route){.rows = ROWS, .experts = EXPERTS, .k = K, .normalize = 1, .scale = 2.5f});
    struct array *weight = array_output(GLM52_DTYPE_F32, ROWS * K),
                 *dlogits = array_output(GLM52_DTYPE_F32, ROWS * EXPERTS);

    ops->route_forward(device, &p.shape, p.logits->at, p.bias->at, p.chosen->at, weight->at);
    BENCH_LOOP {
        if (what)
            ops->route_backward(device, &p.shape, p.logits->at, p.chosen->at, p.dweight->at, dlogits->at);
        else
            ops->route_forward(device, &p.shape, p.logits->at, p.bias->at, p.chosen->at, weight->at);
    }
    bench_counted();
}

BENCH_FULL(route_forward, "8192 rows, 8 of 256", "")
{
    bench_full(0);
}

BENCH_FULL(route_backward, "8192 rows, 8 of 256", "")
{
    bench_full(1);
}
