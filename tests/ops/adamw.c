/* Clipping and AdamW. */
#include "case.h"

static const glm52_dtype F32 = GLM52_DTYPE_F32, BF16 = GLM52_DTYPE_BF16;

static void check_clip(double squares, float limit, double want)
{
    struct array *in = array_from(GLM52_DTYPE_F64, 1, &squares), *norm = array_output(F32, 1),
                 *factor = array_output(F32, 1);
    double length = sqrt(squares);

    ops->clip(device, in->at, limit, norm->at, factor->at);
    check_close(norm, &length, tolerance(F32, 1));
    check_close(factor, &want, tolerance(F32, 1));
}

CASE(clip, "above, below and at the limit, no limit, no gradient, not finite")
{
    check_clip(9.0, 1.5f, 1.5 / (3 + 1e-6));
    check_clip(9.0, 4.0f, 1);
    check_clip(9.0, 0.0f, 1);
    check_clip(9.0, -1.0f, 1);
    check_clip(0.0, 1.0f, 1);
    check_clip(1.0, 1.0f, 1 / (1 + 1e-6));
    check_clip(NAN, 1.0f, -1);
    check_clip(INFINITY, 0.0f, -1);
    check_clip(INFINITY, 1.0f, -1); /* not finite: the update is to be skipped */
}

struct adamw_case {
    struct adamw shape;
    int has_master;
    struct array *rates, *coefficient, *gradient, *m, *v, *w, *parameter;
    double *want_m, *want_v, *want_w;
};

/* Types of the parameter, whether it has a master, of the gradient and of the moments. */
struct types {
    glm52_dtype parameter, gradient, moments;
    int has_master;
};
static const struct types IN_F32 = {GLM52_DTYPE_F32, GLM52_DTYPE_F32, GLM52_DTYPE_F32, 0};
static const struct types WITH_MASTER = {GLM52_DTYPE_BF16, GLM52_DTYPE_F32, GLM52_DTYPE_F32, 1};

static struct adamw_case adamw_case(int64_t count, struct types types)
{
    glm52_dtype type = types.parameter, weight = types.has_master ? F32 : type;
    struct adamw_case c = {.shape = {count, 0.9f, 0.95f, 1e-8f, 0.1f, type, types.gradient, types.moments},
                           .has_master = types.has_master};

    c.rates = array_zero(F32, RATES);
    c.coefficient = array_zero(F32, 1);
    c.coefficient->value[0] = 0.75;
    array_push(c.coefficient);
    c.gradient = array_zero(types.gradient, count);
    c.m = array_zero(types.moments, count);
    c.v = array_zero(types.moments, count);
    c.w = array_normal(weight, count, 1); /* the master, or the parameter itself */
    c.parameter = types.has_master ? array_output(type, count) : c.w;
    c.want_m = doubles(count);
    c.want_v = doubles(count);
    c.want_w = doubles(count);
    return c;
}

/* Step t, counted from 1, with a new gradient, from what the arrays hold: an oracle that went its own way would
 * differ wherever the last step was rounded the other way. */
static void step(struct adamw_case *c, int t)
{
    double beta1 = (double)c->shape.beta1, beta2 = (double)c->shape.beta2, lr = 0.01 * t;

    c->rates->value[RATE_LR] = lr;
    c->rates->value[RATE_CORRECTION1] = 1 - pow(beta1, t);
    c->rates->value[RATE_CORRECTION2] = 1 - pow(beta2, t);
    array_push(c->rates);
    for (int64_t i = 0; i < c->shape.count; i++) c->gradient->value[i] = draw_normal();
    array_push(c->gradient);
    for (int64_t i = 0; i < c->shape.count; i++) {
        double g = c->gradient->value[i] * 0.75;

        c->want_m[i] = beta1 * c->m->value[i] + (1 - beta1) * g;
        c->want_v[i] = beta2 * c->v->value[i] + (1 - beta2) * g * g;
        c->want_w[i] = c->w->value[i] * (1 - lr * (double)c->shape.decay) -
                       lr * (c->want_m[i] / (1 - pow(beta1, t))) /
                           (sqrt(c->want_v[i] / (1 - pow(beta2, t))) + (double)c->shape.epsilon);
    }
    ops->adamw(device, &c->shape, c->rates->at, c->coefficient->at, c->gradient->at, c->m->at, c->v->at,
               c->has_master ? c->w->at : NULL, c->parameter->at);
    check_close(c->m, c->want_m, tolerance(c->m->type, 8));
    check_close(c->v, c->want_v, tolerance(c->v->type, 8));
    check_close(c->w, c->want_w, tolerance(c->w->type, 16));
}

static void check_adamw(int64_t count, struct types types)
{
    struct adamw_case c = adamw_case(count, types);

    for (int t = 1; t <= 4; t++) step(&c, t);
    if (types.has_master) {
        double *want = doubles(count);

        for (int64_t i = 0; i < count; i++)
            want[i] = types.parameter == BF16 ? (double)bf16_to_f32(f32_to_bf16((float)c.w->value[i])) : c.w->value[i];
        check_exact(c.parameter, want);
    }
}

CASE(adamw, "four steps in fp32, odd counts, none")
{
    check_adamw(2501, IN_F32);
    check_adamw(1, IN_F32);
    check_adamw(0, IN_F32);
}

CASE(adamw, "four steps of an fp32 master and its bf16 parameter")
{
    check_adamw(1301, WITH_MASTER);
}

CASE(adamw, "every mixture of types, counts that fit wide accesses and that do not")
{
    for (int bits = 0; bits < 12; bits++) {
        struct types types = {bits % 3 ? BF16 : F32, bits / 3 & 1 ? BF16 : F32, bits / 6 ? BF16 : F32, bits % 3 == 2};

        check_adamw(8192 + 16, types);
        check_adamw(1027, types);
        check_adamw(1, types);
    }
}

CASE(adamw, "no gradient and no decay leave a parameter alone")
{
    struct adamw_case c = adamw_case(37, IN_F32);
    double *before = doubles(37);

    memcpy(before, c.w->value, 37 * sizeof(double));
    c.shape.decay = 0;
    for (int i = 0; i < RATES; i++) c.rates->value[i] = 0.1;
    array_push(c.rates);
    ops->adamw(device, &c.shape, c.rates->at, c.coefficient->at, c.gradient->at, c.m->at, c.v->at, NULL, c.w->at);
    check_exact(c.w, before);
}

CASE(adamw, "a negative coefficient leaves everything as it is, whatever the gradient")
{
    struct adamw_case c = adamw_case(1301, WITH_MASTER);
    double *before = doubles(1301), *zero = doubles(1301);

    memcpy(before, c.w->value, 1301 * sizeof(double));
    for (int i = 0; i < 1301; i++) {
        c.parameter->value[i] = 3;
        c.gradient->value[i] = NAN;
        zero[i] = 0;
    }
    for (int i = 0; i < RATES; i++) c.rates->value[i] = 0.1;
    c.coefficient->value[0] = -1;
    array_push(c.parameter);
    array_push(c.gradient);
    array_push(c.rates);
    array_push(c.coefficient);
    ops->adamw(device, &c.shape, c.rates->at, c.coefficient->at, c.gradient->at, c.m->at, c.v->at, c.w->at,
               c.parameter->at);
    check_exact(c.w, before);
    check_exact(c.m, zero);
    check_exact(c.v, zero);
    for (int i = 0; i < 1301; i++) before[i] = 3;
    check_exact(c.parameter, before);
}

CASE(adamw, "a negative coefficient leaves everything as it is")
{
    struct adamw_case c = adamw_case(41, IN_F32);
    double *before = doubles(41), *zero = doubles(41);

    memcpy(before, c.w->value, 41 * sizeof(double));
    c.coefficient->value[0] = -1;
    array_push(c.coefficient);
    for (int64_t i = 0; i < 41; i++) c.gradient->value[i] = NAN;
    array_push(c.gradient);
    ops->adamw(device, &c.shape, c.rates->at, c.coefficient->at, c.gradient->at, c.m->at, c.v->at, NULL, c.w->at);
    check_exact(c.w, before);
    check_exact(c.m, zero);
    check_exact(c.v, zero);
}

BENCH(adamw, "8M in fp32")
{
    struct adamw_case c = adamw_case(1 << 23, IN_F32);

    for (int i = 0; i < RATES; i++) c.rates->value[i] = 0.1;
    array_push(c.rates);
    BENCH_LOOP
        ops->adamw(device, &c.shape, c.rates->at, c.coefficient->at, c.gradient->at, c.m->at, c.v->at, NULL, c.w->at);
    bench_rate(0, 28.0 * (1 << 23));
}

/* ---- at full width: the weights of one projection of 32 experts ---- */

enum { MANY = 32 * 2048 * 6144 };

/* The moments begin with zeros: the rounds that warm up fill them. */
static void bench_full(int64_t count, struct types types)
{
    struct adamw shape = {count, 0.9f, 0.95f, 1e-8f, 0.1f, types.parameter, types.gradient, types.moments};
    struct array *rates = array_from(F32, RATES, (double[RATES]){1e-4, 0.1, 0.05}), *coefficient = array_zero(F32, 1);
    struct array *gradient = array_random(types.gradient, count), *parameter = array_random(types.parameter, count);
    struct array *master = types.has_master ? array_random(F32, count) : NULL;
    struct array *m = array_random(types.moments, count), *v = array_random(types.moments, count);

    coefficient->value[0] = 0.75;
    array_push(coefficient);
    ops->zero(device, m->at, (size_t)count * dtype_size(m->type));
    ops->zero(device, v->at, (size_t)count * dtype_size(v->type));
    BENCH_LOOP
        ops->adamw(device, &shape, rates->at, coefficient->at, gradient->at, m->at, v->at, master ? master->at : NULL,
                   parameter->at);
    bench_counted();
}

BENCH_FULL(adamw, "403M in bf16, no master", "torch fused 2.5 TB/s (whole model)")
{
    bench_full(MANY, (struct types){BF16, BF16, BF16, 0});
}

BENCH_FULL(adamw, "403M in bf16, the rest fp32", "")
{
    bench_full(MANY, WITH_MASTER);
}

BENCH_FULL(adamw, "403M in bf16, moments too, fp32 master", "")
{
    bench_full(MANY, (struct types){BF16, F32, BF16, 1});
}

BENCH_FULL(adamw, "12.6M in bf16, no master", "")
{
    bench_full(2048 * 6144, (struct types){BF16, BF16, BF16, 0});
}

BENCH_FULL(adamw, "6144 in bf16, the rest fp32", "")
{
    bench_full(6144, WITH_MASTER);
}
