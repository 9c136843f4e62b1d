/* AdamW step by step, clipping by the global norm, learning-rate tables. A case may have any of the three. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/text.h"
#include "case.h"
#include "ops/ops.h"
#include "optim/schedule.h"

static double number(const json_t *object, const char *key)
{
    return json_number_value(json_object_get(object, key));
}

static void check_adamw(struct golden_case *c, struct stream *s)
{
    const json_t *options = json_object_get(c->sidecar, "adamw");
    struct array start, gradients;

    if (!(case_array(c, "adamw.W0", &start) & case_array(c, "adamw.G", &gradients)) || !start.count ||
        gradients.count % start.count) {
        case_fail(c, "adamw.W0 must be [n], adamw.G [steps, n]");
        array_free(&start);
        array_free(&gradients);
        return;
    }
    int64_t n = start.count, steps = gradients.count / n;
    double beta1 = number(options, "beta1"), beta2 = number(options, "beta2");
    struct adamw a = {.count = n, .beta1 = (float)beta1, .beta2 = (float)beta2,
                      .epsilon = (float)number(options, "eps"), .decay = (float)number(options, "weight_decay"),
                      .type = GLM52_DTYPE_F32, .gradient = GLM52_DTYPE_F32, .moments = GLM52_DTYPE_F32};
    float rates[RATES] = {[RATE_LR] = (float)number(options, "lr")}, coefficient = 1;
    float *weight = array_floats(&start), *gradient = array_floats(&gradients);
    float *m = must_allocate((size_t)n, sizeof *m), *v = must_allocate((size_t)n, sizeof *v);
    double *w_all = must_allocate((size_t)(steps * n), sizeof(double));
    double *m_all = must_allocate((size_t)(steps * n), sizeof(double));
    double *v_all = must_allocate((size_t)(steps * n), sizeof(double));

    for (int64_t t = 0; t < steps; t++) {
        rates[RATE_CORRECTION1] = (float)(1 - pow(beta1, (double)(t + 1)));
        rates[RATE_CORRECTION2] = (float)(1 - pow(beta2, (double)(t + 1)));
        struct mirror on = {.s = s};
        size_t bytes = (size_t)n * sizeof(float);
        s->ops->adamw(s, &a, on_device(&on, rates, sizeof rates), on_device(&on, &coefficient, sizeof coefficient),
                      on_device(&on, gradient + t * n, bytes), on_device(&on, m, bytes), on_device(&on, v, bytes), NULL,
                      on_device(&on, weight, bytes));
        back_from_device(&on);
        for (int64_t i = 0; i < n; i++) {
            w_all[t * n + i] = (double)weight[i];
            m_all[t * n + i] = (double)m[i];
            v_all[t * n + i] = (double)v[i];
        }
    }
    compare_floats(c, "adamw.W", "adamw.W", w_all, steps * n);
    compare_floats(c, "adamw.m", "adamw.m", m_all, steps * n);
    compare_floats(c, "adamw.v", "adamw.v", v_all, steps * n);
    array_free(&start);
    array_free(&gradients);
    free(weight);
    free(gradient);
    free(m);
    free(v);
    free(w_all);
    free(m_all);
    free(v_all);
}

/* Adds the squares of clip.g0, clip.g1, ... */
static void add_squares(struct golden_case *c, struct stream *s, double *squares)
{
    char name[64];

    for (int g = 0; snprintf(name, sizeof name, "clip.g%d", g), case_has(c, name); g++) {
        struct array gradient;
        if (!case_array(c, name, &gradient)) return;
        float *x = array_floats(&gradient);
        struct mirror m = {.s = s};
        size_t bytes = s->ops->sum_bytes(s, gradient.count);
        void *workspace = must_allocate(bytes, 1);
        s->ops->sum_squares(s, gradient.count, GLM52_DTYPE_F32, on_device(&m, x, (size_t)gradient.count * sizeof *x),
                            on_device(&m, squares, sizeof *squares), on_device(&m, workspace, bytes));
        back_from_device(&m);
        free(workspace);
        free(x);
        array_free(&gradient);
    }
}

static void check_clipped(struct golden_case *c, int limit, float coefficient)
{
    char name[64];

    for (int g = 0; snprintf(name, sizeof name, "clip.g%d", g), case_has(c, name); g++) {
        struct array gradient;
        if (!case_array(c, name, &gradient)) return;
        for (int64_t i = 0; i < gradient.count; i++)
            gradient.value[i] = (double)((float)gradient.value[i] * coefficient);
        snprintf(name, sizeof name, "clip.%d.g%d", limit, g);
        compare_floats(c, name, name, gradient.value, gradient.count);
        array_free(&gradient);
    }
}

static void check_clip(struct golden_case *c, struct stream *s)
{
    struct array limits;
    double squares = 0, wide;
    float norm = 0, coefficient = 0;

    if (!case_array(c, "clip.max_norm", &limits)) return;
    add_squares(c, s, &squares);
    double *coefficients = must_allocate((size_t)limits.count, sizeof *coefficients);
    for (int64_t i = 0; i < limits.count; i++) {
        struct mirror m = {.s = s};
        s->ops->clip(s, on_device(&m, &squares, sizeof squares), (float)limits.value[i],
                     on_device(&m, &norm, sizeof norm), on_device(&m, &coefficient, sizeof coefficient));
        back_from_device(&m);
        coefficients[i] = (double)coefficient;
        check_clipped(c, (int)i, coefficient);
    }
    wide = (double)norm;
    compare_floats(c, "clip.norm", "clip.norm", &wide, 1);
    compare_floats(c, "clip.coeff", "clip.coeff", coefficients, limits.count);
    free(coefficients);
    array_free(&limits);
}

/* Number of `name` in a list that NULL ends; -1 if it is not there. */
static int choice(const char *name, const char *const *list)
{
    for (int i = 0; name && list[i]; i++)
        if (!strcmp(name, list[i])) return i;
    return -1;
}

static void check_schedule(struct golden_case *c, const char *name, const json_t *options)
{
    static const char *const styles[] = {[SCHEDULE_CONSTANT] = "constant", [SCHEDULE_COSINE] = "cosine",
                                         [SCHEDULE_LINEAR] = "linear", [SCHEDULE_WSD] = "wsd", NULL};
    static const char *const wsd_styles[] = {[WSD_LINEAR] = "linear", [WSD_COSINE] = "cosine",
                                             [WSD_EXPONENTIAL] = "exponential", [WSD_MINUS_SQRT] = "minus_sqrt", NULL};
    struct optim_config o = {.lr = number(options, "max_lr"), .min_lr = number(options, "min_lr"),
                             .warmup = (int64_t)number(options, "warmup_steps"),
                             .decay_steps = (int64_t)number(options, "decay_steps"),
                             .wsd_decay_steps = (int64_t)number(options, "wsd_decay_steps")};
    char tensor[256];
    struct array expected;

    snprintf(tensor, sizeof tensor, "lr.%s", name);
    o.schedule = choice(json_string_value(json_object_get(options, "style")), styles);
    o.wsd_style = choice(json_string_value(json_object_get(options, "wsd_style")), wsd_styles);
    if (o.schedule < 0 || (o.schedule == SCHEDULE_WSD && o.wsd_style < 0) || number(options, "init_lr") != 0) {
        case_fail(c, "%s: a style this library does not have, or an init_lr other than 0", tensor);
        return;
    }
    if (!case_array(c, tensor, &expected)) return;
    for (int64_t s = 0; s < expected.count; s++) expected.value[s] = schedule_lr(&o, o.decay_steps, s);
    compare_floats(c, tensor, tensor, expected.value, expected.count);
    array_free(&expected);
}

void run_adamw_clip_lr(struct golden_case *c)
{
    struct stream stream;
    const char *name;
    json_t *options;

    if (!case_stream(c, &stream)) return;
    if (json_object_get(c->sidecar, "adamw")) check_adamw(c, &stream);
    if (case_has(c, "clip.max_norm")) check_clip(c, &stream);
    json_object_foreach(json_object_get(c->sidecar, "schedules"), name, options) check_schedule(c, name, options);
    stream_close(&stream);
    case_check_used(c, 1);
}
