/* Router: choice, weights, auxiliary losses and their gradients, updates of the correction bias. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "case.h"
#include "ops/ops.h"

enum { NAME = 80 };

struct router {
    struct golden_case *c;
    struct stream stream;
    int64_t rows, hidden;
    int32_t experts, k;
    float scale, *x, *w, *bias, *logits;
};

static double option(const struct router *r, const char *key)
{
    return json_number_value(json_object_get(json_object_get(r->c->sidecar, "options"), key));
}

static void compare(struct router *r, const char *name, const float *got, int64_t count)
{
    double *wide;

    if (!case_has(r->c, name)) return;
    wide = must_allocate((size_t)count, sizeof *wide);
    for (int64_t i = 0; i < count; i++) wide[i] = (double)got[i];
    compare_floats(r->c, name, name, wide, count);
    free(wide);
}

/* c[m,n] = a b; a is stored [k,m] if transpose_a, b [n,k] if transpose_b. */
static void product(struct router *r, int64_t m, int64_t n, int64_t k, const float *a, int transpose_a, const float *b,
                    int transpose_b, float *c)
{
    struct gemm g = {.m = m, .n = n, .k = k, .lda = transpose_a ? m : k, .ldb = transpose_b ? k : n, .ldc = n,
                     .batch = 1, .transpose_a = transpose_a, .transpose_b = transpose_b, .a_type = GLM52_DTYPE_F32,
                     .b_type = GLM52_DTYPE_F32, .c_type = GLM52_DTYPE_F32};

    struct mirror on = {.s = &r->stream};

    r->stream.ops->gemm(&r->stream, &g, on_device(&on, a, (size_t)(m * k) * sizeof *a),
                        on_device(&on, b, (size_t)(k * n) * sizeof *b), on_device(&on, c, (size_t)(m * n) * sizeof *c));
    back_from_device(&on);
}

/* ---- choice ---- */

static struct route route_of(const struct router *r, int32_t k, float scale)
{
    return (struct route){.rows = r->rows, .experts = r->experts, .k = k, .normalize = 1, .scale = scale};
}

static void choose(struct router *r, const struct route *shape, const float *bias, int32_t *chosen, float *weight)
{
    size_t count = (size_t)(r->rows * shape->k);
    struct mirror m = {.s = &r->stream};

    r->stream.ops->route_forward(&r->stream, shape,
                                 on_device(&m, r->logits, (size_t)(r->rows * r->experts) * sizeof *r->logits),
                                 on_device(&m, bias, (size_t)r->experts * sizeof *bias),
                                 on_device(&m, chosen, count * sizeof *chosen),
                                 on_device(&m, weight, count * sizeof *weight));
    back_from_device(&m);
}

static void check_choice(struct router *r, int32_t *chosen)
{
    int64_t count = r->rows * r->k;
    struct route shape = route_of(r, r->k, r->scale);
    float *weight = must_allocate((size_t)count, sizeof *weight);
    int64_t *wide = must_allocate((size_t)count, sizeof *wide);

    choose(r, &shape, r->bias, chosen, weight);
    for (int64_t i = 0; i < count; i++) wide[i] = chosen[i];
    compare_integers(r->c, "idx", "idx", wide, count);
    compare(r, "weights", weight, count);
    free(weight);
    free(wide);
}

/* What the auxiliary losses see: the choice without bias, and the weights if every expert were chosen. */
static void check_unbiased(struct router *r)
{
    int64_t count = r->rows * r->experts;
    struct route few = route_of(r, r->k, 1), all = route_of(r, r->experts, 1);
    float *none = must_allocate((size_t)r->experts, sizeof *none);
    float *weight = must_allocate((size_t)count, sizeof *weight);
    int32_t *chosen = must_allocate((size_t)count, sizeof *chosen);
    int64_t *map = must_allocate((size_t)count, sizeof *map);

    choose(r, &few, none, chosen, weight);
    for (int64_t i = 0; i < r->rows * r->k; i++) map[i / r->k * r->experts + chosen[i]] = 1;
    if (case_has(r->c, "aux_map")) compare_integers(r->c, "aux_map", "aux_map", map, count);
    choose(r, &all, none, chosen, weight);
    compare(r, "aux_scores", weight, count);
    free(none);
    free(weight);
    free(chosen);
    free(map);
}

static void check_choice_gradient(struct router *r, const int32_t *chosen)
{
    struct route shape = route_of(r, r->k, r->scale);
    struct array cotangent;
    float *dweight, *dlogits;

    if (!case_has(r->c, "route_grad.cot") || !case_array(r->c, "route_grad.cot", &cotangent)) return;
    if (cotangent.count == r->rows * r->k) {
        dweight = array_floats(&cotangent);
        dlogits = must_allocate((size_t)(r->rows * r->experts), sizeof *dlogits);
        struct mirror m = {.s = &r->stream};
        size_t all = (size_t)(r->rows * r->experts) * sizeof(float), few = (size_t)(r->rows * r->k) * sizeof(float);
        r->stream.ops->route_backward(&r->stream, &shape, on_device(&m, r->logits, all), on_device(&m, chosen, few),
                                      on_device(&m, dweight, few), on_device(&m, dlogits, all));
        back_from_device(&m);
        compare(r, "route_grad.grad_logits", dlogits, r->rows * r->experts);
        free(dweight);
        free(dlogits);
    } else {
        case_fail(r->c, "route_grad.cot must be [rows, topk]");
    }
    array_free(&cotangent);
}

/* ---- auxiliary losses ---- */

/* Compares PREFIX.loss, PREFIX.grad_logits, PREFIX.grad_W and PREFIX.grad_x. */
static void check_loss(struct router *r, const char *prefix, double coefficient, double z_coefficient,
                       int32_t sequences, const int32_t *sequence)
{
    struct route_auxiliary shape = {.rows = r->rows, .experts = r->experts, .k = r->k, .sequences = sequences,
                                    .coefficient = (float)coefficient, .z_coefficient = (float)z_coefficient};
    float *dlogits = must_allocate((size_t)(r->rows * r->experts), sizeof *dlogits);
    float *dw = must_allocate((size_t)(r->experts * r->hidden), sizeof *dw);
    float *dx = must_allocate((size_t)(r->rows * r->hidden), sizeof *dx);
    char name[NAME];
    double loss = 0;

    struct mirror m = {.s = &r->stream};
    size_t all = (size_t)(r->rows * r->experts) * sizeof(float);

    r->stream.ops->route_auxiliary(&r->stream, &shape, on_device(&m, r->logits, all),
                                   on_device(&m, sequence, (size_t)(sequences + 1) * sizeof *sequence),
                                   on_device(&m, dlogits, all), on_device(&m, &loss, sizeof loss), NULL);
    back_from_device(&m);
    product(r, r->experts, r->hidden, r->rows, dlogits, 1, r->x, 0, dw);
    product(r, r->rows, r->hidden, r->experts, dlogits, 0, r->w, 0, dx);
    snprintf(name, sizeof name, "%s.loss", prefix);
    if (case_has(r->c, name)) compare_floats(r->c, name, name, &loss, 1);
    snprintf(name, sizeof name, "%s.grad_logits", prefix);
    compare(r, name, dlogits, r->rows * r->experts);
    snprintf(name, sizeof name, "%s.grad_W", prefix);
    compare(r, name, dw, r->experts * r->hidden);
    snprintf(name, sizeof name, "%s.grad_x", prefix);
    compare(r, name, dx, r->rows * r->hidden);
    free(dlogits);
    free(dw);
    free(dx);
}

/* The balance loss over the sequences [first, end) that the option lists. */
static void check_listed(struct router *r, const char *prefix, const char *key)
{
    const json_t *list = json_object_get(json_object_get(r->c->sidecar, "options"), key), *pair;
    int32_t *sequence = must_allocate(json_array_size(list) + 1, sizeof *sequence);
    size_t n;

    json_array_foreach(list, n, pair) {
        int32_t first = (int32_t)json_integer_value(json_array_get(pair, 0));

        if (n == 0) sequence[0] = first;
        if (first != sequence[n]) case_fail(r->c, "%s: a sequence begins elsewhere than the one before it ends", key);
        sequence[n + 1] = (int32_t)json_integer_value(json_array_get(pair, 1));
        if (sequence[n + 1] < first || sequence[n + 1] > r->rows) case_fail(r->c, "%s: not within the rows", key);
    }
    if (list && !r->c->failures)
        check_loss(r, prefix, option(r, "aux_coeff"), 0, (int32_t)json_array_size(list), sequence);
    free(sequence);
}

/* ---- bias ---- */

static void check_bias(struct router *r)
{
    struct array counts, bias;
    int given = case_has(r->c, "bias_seq.counts") && case_array(r->c, "bias_seq.counts", &counts);
    int64_t experts = r->experts;

    if (!given) return;
    if (case_array(r->c, "bias_seq.bias", &bias)) {
        if (bias.count == counts.count + experts) {
            float *moved = array_floats(&bias);

            for (int64_t step = 0; step < counts.count / experts; step++) {
                float *next = moved + (step + 1) * experts;

                memcpy(next, next - experts, (size_t)experts * sizeof *next);
                struct mirror m = {.s = &r->stream};
                r->stream.ops->balance_bias(&r->stream, r->experts, (float)option(r, "bias_update_rate"), NULL,
                                            on_device(&m, counts.value + step * experts,
                                                      (size_t)experts * sizeof(double)),
                                            on_device(&m, next, (size_t)experts * sizeof *next));
                back_from_device(&m);
            }
            compare(r, "bias_seq.bias", moved, bias.count);
            free(moved);
        } else {
            case_fail(r->c, "bias_seq.bias must have one row more than bias_seq.counts");
        }
        array_free(&bias);
    }
    array_free(&counts);
}

static void check_router(struct router *r)
{
    int32_t *chosen = must_allocate((size_t)(r->rows * r->k), sizeof *chosen);
    int32_t whole[2] = {0, (int32_t)r->rows};

    product(r, r->rows, r->experts, r->hidden, r->x, 0, r->w, 1, r->logits);
    compare(r, "logits", r->logits, r->rows * r->experts);
    check_choice(r, chosen);
    check_unbiased(r);
    check_choice_gradient(r, chosen);
    check_loss(r, "aux", option(r, "aux_coeff"), 0, 1, whole);
    check_listed(r, "seq_aux", "batch_sequences");
    check_listed(r, "doc_aux", "pack_documents");
    check_loss(r, "z", 0, option(r, "z_coeff"), 1, whole);
    check_bias(r);
    free(chosen);
}

void run_router_aux(struct golden_case *c)
{
    struct router r = {.c = c};
    struct array x, w, bias;

    r.k = (int32_t)option(&r, "topk");
    r.scale = (float)option(&r, "routed_scaling_factor");
    if (case_array(c, "x", &x) & case_array(c, "W", &w) & case_array(c, "bias", &bias)) {
        r.rows = x.shape[0];
        r.hidden = x.shape[1];
        r.experts = (int32_t)bias.count;
        if (x.dimensions != 2 || w.count != r.experts * r.hidden || r.k < 1 || r.k > r.experts) {
            case_fail(c, "x must be [rows, hidden], W [experts, hidden], bias [experts], topk at most experts");
        } else if (case_stream(c, &r.stream)) {
            r.x = array_floats(&x);
            r.w = array_floats(&w);
            r.bias = array_floats(&bias);
            r.logits = must_allocate((size_t)(r.rows * r.experts), sizeof(float));
            check_router(&r);
            stream_close(&r.stream);
            free(r.x);
            free(r.w);
            free(r.bias);
            free(r.logits);
            case_check_used(c, 1);
        }
    }
    array_free(&x);
    array_free(&w);
    array_free(&bias);
}
