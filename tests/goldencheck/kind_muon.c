/* Muon: single matrices over coefficients, momenta and steps; matrices cut into blocks by head. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/text.h"
#include "case.h"
#include "ops/ops.h"

enum { NAME = 160, MOST_TUPLES = 16 };

/* The polynomial families of training.md 4.1, for cases that name one without giving it. */
static const struct family {
    const char *name;
    int tuples, last_repeats; /* else they start over */
    double tuple[MOST_TUPLES][3];
} published[] = {
    {"quintic", 5, 0, {{4.0848, -6.8946, 2.9270}, {3.9505, -6.3029, 2.6377}, {3.7418, -5.5913, 2.3037},
                       {2.8769, -3.1427, 1.2046}, {2.8366, -3.0525, 1.2012}}},
    {"simple", 1, 0, {{3.4445, -4.7750, 2.0315}}},
    {"polar_express", 8, 1, {{8.2051, -22.9019, 16.4607}, {4.0664, -2.8612, 0.5184}, {3.9096, -2.8234, 0.5250},
                             {3.2856, -2.4153, 0.4853}, {2.2779, -1.6198, 0.3985}, {1.8726, -1.2307, 0.3585},
                             {1.8564, -1.2132, 0.3568}, {1.8750, -1.2500, 0.3750}}},
};

static double number(const json_t *object, const char *key)
{
    return json_number_value(json_object_get(object, key));
}

static int64_t whole(const json_t *object, const char *key)
{
    return (int64_t)json_integer_value(json_object_get(object, key));
}

/* The family of that name: its tuples from the case if it has them. 1, or 0 with the failure reported. */
static int find_family(struct golden_case *c, const char *name, struct family *out)
{
    const json_t *given = json_object_get(json_object_get(c->sidecar, "coefficients"), name), *tuple;
    size_t i;

    *out = (struct family){.name = name};
    for (i = 0; name && i < sizeof published / sizeof *published; i++)
        if (!strcmp(published[i].name, name)) *out = published[i];
    if (given && json_array_size(given) <= MOST_TUPLES) {
        out->tuples = (int)json_array_size(given);
        json_array_foreach(given, i, tuple)
            for (size_t j = 0; j < 3; j++) out->tuple[i][j] = json_number_value(json_array_get(tuple, j));
    }
    if (out->tuples == 0) case_fail(c, "coefficients %s: neither given in the case nor published", name ? name : "?");
    return out->tuples > 0;
}

static void set_iterations(struct muon *m, const struct family *family, int steps)
{
    int at = 0;

    m->steps = steps;
    for (int k = 0; k < steps; k++) {
        for (int j = 0; j < 3; j++) m->coefficient[k][j] = (float)family->tuple[at][j];
        if (at + 1 < family->tuples)
            at++;
        else if (!family->last_repeats)
            at = 0;
    }
}

/* ---- a matrix and what updates it ---- */

/* Blocks from element `offset` on, moved by Muon or, if by_adamw, row group by row group by AdamW. */
struct piece {
    int64_t offset;
    struct muon blocks;
    int by_adamw;
};

struct matrix {
    struct stream *stream;
    int64_t rows, columns;
    float *weight, *momentum, *m, *v;
    struct adamw adamw;
    double adamw_lr;
    int64_t steps; /* taken */
};

static void matrix_open(struct matrix *x, struct stream *stream, int64_t rows, int64_t columns,
                        const struct array *start)
{
    size_t count = (size_t)(rows * columns);

    *x = (struct matrix){.stream = stream, .rows = rows, .columns = columns};
    x->weight = start ? array_floats(start) : must_allocate(count, sizeof(float));
    x->momentum = must_allocate(count, sizeof(float));
    x->m = must_allocate(count, sizeof(float));
    x->v = must_allocate(count, sizeof(float));
}

static void matrix_close(struct matrix *x)
{
    free(x->weight);
    free(x->momentum);
    free(x->m);
    free(x->v);
}

static void move_by_muon(struct matrix *x, const struct piece *p, float lr, const float *gradient)
{
    const struct ops *ops = x->stream->ops;
    float rates[RATES] = {[RATE_LR] = lr}, all = 1;
    size_t bytes = ops->muon_bytes(x->stream, &p->blocks);
    size_t whole = (size_t)(x->rows * x->columns) * sizeof(float);
    void *workspace = must_allocate(bytes, 1);
    struct mirror m = {.s = x->stream};

    ops->muon(x->stream, &p->blocks, on_device(&m, rates, sizeof rates), on_device(&m, &all, sizeof all),
              (float *)on_device(&m, gradient, whole) + p->offset,
              (float *)on_device(&m, x->momentum, whole) + p->offset, NULL,
              (float *)on_device(&m, x->weight, whole) + p->offset, on_device(&m, workspace, bytes));
    back_from_device(&m);
    free(workspace);
}

static void move_by_adamw(struct matrix *x, const struct piece *p, const float *gradient)
{
    struct adamw a = x->adamw;
    double t = (double)(x->steps + 1);
    float rates[RATES] = {[RATE_LR] = (float)x->adamw_lr,
                          [RATE_CORRECTION1] = (float)(1 - pow((double)a.beta1, t)),
                          [RATE_CORRECTION2] = (float)(1 - pow((double)a.beta2, t))};
    float all = 1;

    a.count = p->blocks.rows * p->blocks.columns;
    for (int64_t block = 0; block < p->blocks.batch; block++) {
        int64_t at = p->offset + block * p->blocks.stride;

        size_t bytes = (size_t)a.count * sizeof(float);
        struct mirror m = {.s = x->stream};

        x->stream->ops->adamw(x->stream, &a, on_device(&m, rates, sizeof rates), on_device(&m, &all, sizeof all),
                              on_device(&m, gradient + at, bytes), on_device(&m, x->m + at, bytes),
                              on_device(&m, x->v + at, bytes), NULL, on_device(&m, x->weight + at, bytes));
        back_from_device(&m);
    }
}

static void matrix_step(struct matrix *x, const struct piece *piece, int pieces, float lr, const float *gradient)
{
    for (int i = 0; i < pieces; i++) {
        if (piece[i].by_adamw)
            move_by_adamw(x, &piece[i], gradient);
        else
            move_by_muon(x, &piece[i], lr, gradient);
    }
    x->steps++;
}

/* Compares x[i] * factor with the tensor of that name, if the case has it. */
static void compare(struct golden_case *c, const char *name, const float *x, int64_t count, double factor)
{
    double *wide;

    if (!case_has(c, name)) return;
    wide = must_allocate((size_t)count, sizeof *wide);
    for (int64_t i = 0; i < count; i++) wide[i] = factor * (double)x[i];
    compare_floats(c, name, name, wide, count);
    free(wide);
}

/* ---- runs ---- */

/* The scaled update of the first gradient: what is taken from zero weights at rate 1. Rows of AdamW have none. */
static void check_update(struct golden_case *c, struct stream *s, const char *name, const struct array *gradient,
                         const struct piece *piece, int pieces)
{
    float *g;
    struct matrix x;

    if (!case_has(c, name)) return;
    g = array_floats(gradient);
    matrix_open(&x, s, gradient->shape[0], gradient->shape[1], NULL);
    for (int i = 0; i < pieces; i++) {
        struct piece still = piece[i];

        still.blocks.decay = 0;
        if (!still.by_adamw) move_by_muon(&x, &still, 1, g);
    }
    compare(c, name, x.weight, gradient->count, -1);
    matrix_close(&x);
    free(g);
}

/* Steps with gradients PREFIX.G1, G2, ...; compares LABEL.Wn and LABEL.Mn wherever the case has them. */
static void check_steps(struct golden_case *c, struct matrix *x, const char *prefix, const char *label,
                        const struct piece *piece, int pieces)
{
    float lr = (float)number(json_object_get(c->sidecar, "options"), "lr");
    char name[4 * NAME];

    for (int step = 1; snprintf(name, sizeof name, "%s.G%d", prefix, step), case_has(c, name); step++) {
        struct array gradient;
        float *g;

        if (!case_array(c, name, &gradient)) return;
        if (gradient.count != x->rows * x->columns) {
            case_fail(c, "%s is not shaped like %s.W0", name, prefix);
            array_free(&gradient);
            return;
        }
        g = array_floats(&gradient);
        matrix_step(x, piece, pieces, lr, g);
        snprintf(name, sizeof name, "%s.W%d", label, step);
        compare(c, name, x->weight, gradient.count, 1);
        snprintf(name, sizeof name, "%s.M%d", label, step);
        compare(c, name, x->momentum, gradient.count, 1);
        free(g);
        array_free(&gradient);
    }
}

/* `batch` blocks of rows that follow one another, `stride` apart. */
static struct muon blocks_of(const json_t *options, int64_t batch, int64_t stride, int64_t rows, int64_t columns)
{
    return (struct muon){.batch = batch, .stride = stride, .rows = rows, .columns = columns, .group_rows = rows,
                         .momentum = (float)number(options, "momentum"),
                         .decay = (float)number(options, "weight_decay"),
                         .scale = (float)(0.2 * sqrt((double)(rows > columns ? rows : columns))),
                         .type = GLM52_DTYPE_F32, .gradient = GLM52_DTYPE_F32, .moments = GLM52_DTYPE_F32};
}

static int is_matrix(struct golden_case *c, const struct array *a, const char *name)
{
    if (a->dimensions == 2) return 1;
    case_fail(c, "%s is not a matrix", name);
    return 0;
}

/* ---- muon ---- */

/* One matrix, one family, one number of iterations: update alone, then steps by every momentum. */
static void check_iterations(struct golden_case *c, struct stream *s, const char *shape, const struct array *start,
                             const struct family *family, int iterations)
{
    static const char *const momenta[] = {"ema", "classic"}, *const forms[] = {"plain", "nest"};
    const json_t *options = json_object_get(c->sidecar, "options");
    struct piece piece = {.blocks = blocks_of(options, 1, 0, start->shape[0], start->shape[1])};
    char prefix[2 * NAME], label[3 * NAME], name[3 * NAME];
    struct array gradient;

    snprintf(prefix, sizeof prefix, "in.%s", shape);
    snprintf(label, sizeof label, "ns.%s.%s.%d", shape, family->name, iterations);
    snprintf(name, sizeof name, "%s.G1", prefix);
    set_iterations(&piece.blocks, family, iterations);
    if (case_has(c, label) && case_array(c, name, &gradient)) {
        check_update(c, s, label, &gradient, &piece, 1);
        array_free(&gradient);
    }
    for (int which = 0; which < 4; which++) {
        struct matrix x;

        piece.blocks.classic = which / 2;
        piece.blocks.nesterov = which % 2;
        snprintf(label, sizeof label, "%s.%s.%s.%d.%s", momenta[which / 2], shape, family->name, iterations,
                 forms[which % 2]);
        matrix_open(&x, s, start->shape[0], start->shape[1], start);
        check_steps(c, &x, prefix, label, &piece, 1);
        matrix_close(&x);
    }
}

/* zero.W1: one of the matrices after a step with a gradient of zero. The case does not say which: the nearest one. */
static void check_zero(struct golden_case *c, struct stream *s, const struct array *start, double *nearest,
                       float *result)
{
    const json_t *options = json_object_get(c->sidecar, "options");
    struct piece piece = {.blocks = blocks_of(options, 1, 0, start->shape[0], start->shape[1])};
    float *zero = must_allocate((size_t)start->count, sizeof *zero);
    struct array expected;
    struct family family;
    struct matrix x;
    double distance = 0;

    if (case_array(c, "zero.W1", &expected) && find_family(c, "quintic", &family) && expected.count == start->count) {
        set_iterations(&piece.blocks, &family, 5);
        matrix_open(&x, s, start->shape[0], start->shape[1], start);
        matrix_step(&x, &piece, 1, (float)number(options, "lr"), zero);
        for (int64_t i = 0; i < expected.count; i++)
            distance = fmax(distance, fabs((double)x.weight[i] - expected.value[i]));
        if (distance < *nearest) {
            *nearest = distance;
            memcpy(result, x.weight, (size_t)expected.count * sizeof *result);
        }
        matrix_close(&x);
    }
    array_free(&expected);
    free(zero);
}

static void check_shape(struct golden_case *c, struct stream *s, const char *shape, const struct array *start)
{
    const char *name;
    json_t *tuples;
    struct family family;

    json_object_foreach(json_object_get(c->sidecar, "coefficients"), name, tuples)
        if (find_family(c, name, &family))
            for (int iterations = 1; iterations <= MUON_STEPS; iterations++)
                check_iterations(c, s, shape, start, &family, iterations);
}

void run_muon(struct golden_case *c)
{
    static const char before[] = "in.", after[] = ".W0";
    double nearest = INFINITY;
    float *zero = NULL;
    struct array start;
    struct stream stream;

    if (!case_stream(c, &stream)) return;
    if (case_has(c, "zero.W1") && case_array(c, "zero.W1", &start)) {
        zero = array_floats(&start);
        array_free(&start);
    }
    for (size_t i = 0; i < c->file.tensors; i++) {
        const char *name = c->file.tensor[i].name;
        char shape[NAME];

        if (!text_starts_with(name, before) || !text_ends_with(name, after) || strlen(name) >= NAME) continue;
        if (!case_array(c, name, &start)) break;
        snprintf(shape, sizeof shape, "%.*s", (int)(strlen(name) - strlen(before) - strlen(after)),
                 name + strlen(before));
        if (is_matrix(c, &start, name)) {
            check_shape(c, &stream, shape, &start);
            if (zero) check_zero(c, &stream, &start, &nearest, zero);
        }
        array_free(&start);
    }
    if (zero && nearest < INFINITY && case_array(c, "zero.W1", &start)) {
        compare(c, "zero.W1", zero, start.count, 1);
        array_free(&start);
    }
    free(zero);
    stream_close(&stream);
    case_check_used(c, 1);
}

/* ---- muon_split ---- */

/* A matrix of `heads` times `first` rows, then `second` rows. */
struct layout {
    const char *name;
    int64_t heads, first, second, columns;
};

/* Cuts the matrix as the policy has it; the number of pieces, 0 for an unknown policy. */
static int cut(const json_t *options, const struct layout *l, const char *policy, struct piece *out)
{
    int64_t stride = (l->first + l->second) * l->columns;

    out[0] = (struct piece){.blocks = blocks_of(options, l->heads, stride, l->first, l->columns)};
    out[1] = (struct piece){l->first * l->columns, blocks_of(options, l->heads, stride, l->second, l->columns),
                            !strcmp(policy, "adamw")};
    if (!strcmp(policy, "per_head") || !strcmp(policy, "split") || !strcmp(policy, "adamw")) return 2;
    if (!strcmp(policy, "none")) {
        out[0].blocks = blocks_of(options, 1, 0, l->heads * (l->first + l->second), l->columns);
        return 1;
    }
    if (strcmp(policy, "joint") != 0) return 0;
    out[1].blocks = blocks_of(options, 1, 0, l->heads * l->second, l->columns);
    out[1].blocks.group_rows = l->second;
    out[1].blocks.group_stride = stride;
    return 2;
}

static void set_adamw(struct matrix *x, const json_t *options)
{
    x->adamw_lr = number(options, "lr");
    x->adamw = (struct adamw){.beta1 = (float)number(options, "beta1"), .beta2 = (float)number(options, "beta2"),
                              .epsilon = (float)number(options, "eps"), .decay = (float)number(options, "weight_decay"),
                              .type = GLM52_DTYPE_F32, .gradient = GLM52_DTYPE_F32, .moments = GLM52_DTYPE_F32};
}

static void check_policy(struct golden_case *c, struct stream *s, const struct layout *l, const char *policy,
                         const struct array *start, const struct family *family)
{
    const json_t *options = json_object_get(c->sidecar, "options");
    char prefix[NAME], label[NAME], name[2 * NAME];
    struct piece piece[2];
    int pieces = cut(options, l, policy, piece);
    struct array gradient;
    struct matrix x;

    for (int i = 0; i < pieces; i++) set_iterations(&piece[i].blocks, family, (int)whole(options, "ns_steps"));
    snprintf(prefix, sizeof prefix, "in.%s", l->name);
    snprintf(label, sizeof label, "%s.%s", l->name, policy);
    snprintf(name, sizeof name, "%s.G1", prefix);
    if (case_array(c, name, &gradient)) {
        snprintf(name, sizeof name, "%s.O1", label);
        check_update(c, s, name, &gradient, piece, pieces);
        array_free(&gradient);
    }
    matrix_open(&x, s, start->shape[0], start->shape[1], start);
    set_adamw(&x, json_object_get(options, "adamw"));
    check_steps(c, &x, prefix, label, piece, pieces);
    matrix_close(&x);
}

static void check_layout(struct golden_case *c, struct stream *s, const struct layout *l, const struct family *family)
{
    static const char *const policies[] = {"per_head", "joint", "adamw", "split", "none"};
    char name[NAME];
    struct array start;

    snprintf(name, sizeof name, "in.%s.W0", l->name);
    if (!case_has(c, name) || !case_array(c, name, &start)) return;
    if (is_matrix(c, &start, name)) {
        if (start.shape[0] != l->heads * (l->first + l->second) || start.shape[1] != l->columns)
            case_fail(c, "%s does not have the shape that the options say", name);
        else
            for (size_t i = 0; i < sizeof policies / sizeof *policies; i++)
                check_policy(c, s, l, policies[i], &start, family);
    }
    array_free(&start);
}

void run_muon_split(struct golden_case *c)
{
    const json_t *o = json_object_get(c->sidecar, "options");
    int64_t heads = whole(o, "heads"), nope = whole(o, "qk_nope_head_dim"), steps = whole(o, "ns_steps");
    struct layout q_b = {"q_b", heads, nope, whole(o, "qk_rope_head_dim"), whole(o, "q_lora_rank")};
    struct layout kv_b = {"kv_b", heads, nope, whole(o, "v_head_dim"), whole(o, "kv_lora_rank")};
    struct family family;
    struct stream stream;

    if (steps < 0 || steps > MUON_STEPS) {
        case_fail(c, "ns_steps must be 0 .. %d", MUON_STEPS);
        return;
    }
    if (!find_family(c, json_string_value(json_object_get(o, "coefficient_type")), &family)) return;
    if (!case_stream(c, &stream)) return;
    check_layout(c, &stream, &q_b, &family);
    check_layout(c, &stream, &kv_b, &family);
    stream_close(&stream);
    case_check_used(c, 1);
}
