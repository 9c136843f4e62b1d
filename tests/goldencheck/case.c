#include "case.h"

#include "api/object.h"

#include <float.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Of the largest magnitude, for float tensors without atol. */
static const double default_tolerance = 2e-4;
/* Of a bf16 run, on the tolerance of fp32: 2^17 times the error that fp32 makes.
 * Transformers in bf16 stays within 4100. */
static const double bf16_band = 6500;

void *must_allocate(size_t count, size_t size)
{
    void *memory = calloc(count ? count : 1, size);

    if (!memory) {
        fprintf(stderr, "golden_check: no memory\n");
        exit(2);
    }
    return memory;
}

void case_fail(struct golden_case *c, const char *format, ...)
{
    va_list args;

    printf("  ");
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    printf("  FAILED\n");
    c->failures++;
}

void case_fail_last(struct golden_case *c, const char *what)
{
    const glm52_error *e = glm52_error_last();

    case_fail(c, "%s: %s (%s)", what, glm52_error_message(e), glm52_error_hint(e));
}

const char *golden_device = "cpu";

int case_stream(struct golden_case *c, struct stream *s)
{
    int is_cuda = !strncmp(golden_device, "cuda", 4);

    if (!(is_cuda ? stream_open_cuda(s, &c->host, 0) : stream_open_cpu(s, &c->host, 0))) return 1;
    case_fail_last(c, golden_device);
    return 0;
}

glm52_status case_context(glm52_context **out)
{
    glm52_context_options options = {.struct_size = sizeof options, .device = golden_device};

    return glm52_context_create(&options, out);
}

void *view_on_host(glm52_context *context, const glm52_view *v)
{
    void *copy = must_allocate((size_t)v->bytes, 1);

    if (v->data && v->on_device)
        context->stream.ops->download(&context->stream, copy, v->data, (size_t)v->bytes);
    else if (v->data)
        memcpy(copy, v->data, (size_t)v->bytes);
    return copy;
}

void *on_device(struct mirror *m, const void *host, size_t bytes)
{
    int i = m->count++;

    m->at[i].host = (void *)(uintptr_t)host;
    m->at[i].bytes = bytes;
    if (m->s->ops->allocate(m->s, bytes, MEMORY_WORKSPACE, &m->at[i].device)) {
        fprintf(stderr, "golden_check: no memory on the device\n");
        exit(2);
    }
    m->s->ops->upload(m->s, m->at[i].device, host, bytes);
    return m->at[i].device;
}

void back_from_device(struct mirror *m)
{
    for (int i = 0; i < m->count; i++) {
        m->s->ops->download(m->s, m->at[i].host, m->at[i].device, m->at[i].bytes);
        m->s->ops->release(m->s, m->at[i].device, m->at[i].bytes, MEMORY_WORKSPACE);
    }
    m->count = 0;
    if (m->s->ops->synchronize(m->s)) {
        fprintf(stderr, "golden_check: %s\n", glm52_error_message(glm52_error_last()));
        exit(2);
    }
}

static const json_t *listed(const struct golden_case *c)
{
    return json_object_get(c->sidecar, "tensors");
}

int case_open(struct golden_case *c, const char *path, json_t *sidecar)
{
    const char *slash = strrchr(path, '/'), *base = slash ? slash + 1 : path, *name;
    char file[1300];
    json_t *entry;

    memset(c, 0, sizeof *c);
    c->sidecar = sidecar;
    snprintf(c->directory, sizeof c->directory, "%.*s", slash ? (int)(slash - path) : 1, slash ? path : ".");
    snprintf(c->name, sizeof c->name, "%.*s", (int)(strlen(base) - strlen(".json")), base);
    snprintf(file, sizeof file, "%s/%s.safetensors", c->directory, c->name);
    int has_file = listed(c) || !access(file, F_OK);
    if (host_open(&c->host, NULL) || (has_file && safetensors_open(&c->host, file, &c->file))) {
        case_fail_last(c, c->name);
        return 0;
    }
    c->used = must_allocate(c->file.tensors, 1);
    json_object_foreach((json_t *)listed(c), name, entry)
        if (!case_has(c, name)) case_fail(c, "%s is listed in the sidecar, and not in %s", name, file);
    return 1;
}

void case_close(struct golden_case *c)
{
    if (c->file.host) safetensors_close(&c->file);
    free(c->used);
    json_decref(c->sidecar);
}

int case_has(const struct golden_case *c, const char *name)
{
    return safetensors_find(&c->file, name) != NULL;
}

/* Narrow floats count as the codes that they are. */
static int is_integer(const struct safetensor *t)
{
    return t->dtype == GLM52_DTYPE_I32 || t->dtype == GLM52_DTYPE_I64 || t->dtype == GLM52_DTYPE_U8 ||
           t->dtype == GLM52_DTYPE_F8_E4M3;
}

static glm52_status read_integers(const struct golden_case *c, const struct safetensor *t, struct array *out)
{
    void *raw = must_allocate((size_t)t->bytes, 1);
    glm52_status status = safetensors_read(&c->file, t, 0, (uint64_t)out->count, raw);

    out->integer = must_allocate((size_t)out->count, sizeof *out->integer);
    for (int64_t i = 0; i < out->count && !status; i++) {
        out->integer[i] = t->dtype == GLM52_DTYPE_I32   ? ((int32_t *)raw)[i]
                          : t->dtype == GLM52_DTYPE_I64 ? ((int64_t *)raw)[i]
                                                        : ((uint8_t *)raw)[i];
        out->value[i] = (double)out->integer[i];
    }
    free(raw);
    return status;
}

static glm52_status read_floats(const struct golden_case *c, const struct safetensor *t, struct array *out)
{
    float *narrow;
    glm52_status status;

    if (t->dtype == GLM52_DTYPE_F64) return safetensors_read(&c->file, t, 0, (uint64_t)out->count, out->value);
    narrow = must_allocate((size_t)out->count, sizeof *narrow);
    status = safetensors_read_f32(&c->file, t, 0, (uint64_t)out->count, narrow);
    for (int64_t i = 0; i < out->count && !status; i++) out->value[i] = (double)narrow[i];
    free(narrow);
    return status;
}

int case_array(struct golden_case *c, const char *name, struct array *out)
{
    const struct safetensor *t = safetensors_find(&c->file, name);

    memset(out, 0, sizeof *out);
    if (!t) {
        case_fail(c, "%s is missing in the case", name);
        return 0;
    }
    c->used[t - c->file.tensor] = 1;
    out->count = (int64_t)safetensors_elements(t);
    out->dimensions = t->dimensions;
    memcpy(out->shape, t->shape, sizeof out->shape);
    out->value = must_allocate((size_t)out->count, sizeof *out->value);
    if (!(is_integer(t) ? read_integers : read_floats)(c, t, out)) return 1;
    case_fail_last(c, name);
    array_free(out);
    return 0;
}

void array_free(struct array *a)
{
    free(a->value);
    free(a->integer);
    memset(a, 0, sizeof *a);
}

float *array_floats(const struct array *a)
{
    float *out = must_allocate((size_t)a->count, sizeof *out);

    for (int64_t i = 0; i < a->count; i++) out[i] = (float)a->value[i];
    return out;
}

int32_t *array_int32s(const struct array *a)
{
    int32_t *out = must_allocate((size_t)a->count, sizeof *out);

    for (int64_t i = 0; i < a->count; i++) out[i] = (int32_t)a->value[i];
    return out;
}

static double largest(const double *x, int64_t count)
{
    double most = 0;

    for (int64_t i = 0; i < count; i++)
        if (isfinite(x[i])) most = fmax(most, fabs(x[i]));
    return most;
}

/* Infinite where one is NaN or infinite and the other is not the same. */
static double difference(double got, double expected)
{
    if (got == expected || (isnan(got) && isnan(expected))) return 0;
    return isfinite(got) && isfinite(expected) ? fabs(got - expected) : INFINITY;
}

static void report_floats(struct golden_case *c, const char *label, const struct array *expected, const double *got,
                          int64_t count, double tolerance)
{
    double error = 0;
    int64_t at = 0;
    int judged = !c->unjudged;

    if (c->bf16) {
        tolerance *= bf16_band;
        judged &= tolerance <= largest(expected->value, expected->count) / 2 || tolerance == 0;
    }
    c->compared += judged;
    if (count != expected->count) {
        case_fail(c, "%s: %lld values where the case has %lld", label, (long long)count, (long long)expected->count);
        return;
    }
    for (int64_t i = 0; i < count; i++) {
        double d = difference(got[i], expected->value[i]);
        if (d > error) {
            error = d;
            at = i;
        }
    }
    if (c->own_sides) {
        if (!judged || error <= tolerance) return;
        c->beyond++;
        printf("  bf16, own sides: %-56s error %-10.3g tolerance %-10.3g shown\n", label, error, tolerance);
        return;
    }
    printf("  %s%-*s error %-10.3g tolerance %-10.3g", c->bf16 ? "bf16 " : "", c->bf16 ? 67 : 72, label, error,
           tolerance);
    if (!judged) {
        printf(" not judged\n");
        return;
    }
    if (error <= tolerance) {
        printf(" ok\n");
        return;
    }
    printf(" FAILED at %lld: %.9g, expected %.9g\n", (long long)at, got[at], expected->value[at]);
    c->failures++;
}

void compare_floats(struct golden_case *c, const char *label, const char *name, const double *got, int64_t count)
{
    const json_t *atol = json_object_get(json_object_get(listed(c), name), "atol");
    struct array expected;

    if (!case_array(c, name, &expected)) return;
    report_floats(c, label, &expected, got, count,
                  json_is_number(atol) ? json_number_value(atol)
                                       : default_tolerance * largest(expected.value, expected.count));
    array_free(&expected);
}

void compare_first(struct golden_case *c, const char *name, const double *got, int64_t count)
{
    const json_t *atol = json_object_get(json_object_get(listed(c), name), "atol");
    struct array expected;

    if (!case_array(c, name, &expected)) return;
    if (expected.count >= count) {
        double tolerance = json_is_number(atol) ? json_number_value(atol)
                                                : default_tolerance * largest(expected.value, count);
        expected.count = count;
        report_floats(c, name, &expected, got, count, tolerance);
    } else {
        case_fail(c, "%s: %lld values where the case has %lld", name, (long long)count, (long long)expected.count);
    }
    array_free(&expected);
}

void compare_within(struct golden_case *c, const char *name, const double *got, int64_t count, double tolerance)
{
    struct array expected;

    if (!case_array(c, name, &expected)) return;
    report_floats(c, name, &expected, got, count, tolerance);
    array_free(&expected);
}

void compare_bounded(struct golden_case *c, const char *name, const double *got, const double *bound, int64_t count)
{
    double *scaled = must_allocate((size_t)count, sizeof *scaled);
    struct array expected;

    if (case_array(c, name, &expected)) {
        for (int64_t i = 0; i < count && i < expected.count; i++) {
            const double unit = bound[i] > 0 ? bound[i] : DBL_MIN;

            scaled[i] = got[i] / unit;
            expected.value[i] /= unit;
        }
        report_floats(c, name, &expected, scaled, count, 1);
        array_free(&expected);
    }
    free(scaled);
}

void compare_zero(struct golden_case *c, const char *label, const double *got, int64_t count)
{
    struct array zero = {.count = count, .value = must_allocate((size_t)count, sizeof(double))};

    report_floats(c, label, &zero, got, count, 0);
    array_free(&zero);
}

void compare_integers(struct golden_case *c, const char *label, const char *name, const int64_t *got, int64_t count)
{
    struct array expected;
    int64_t wrong = 0, at = 0;

    if (!case_array(c, name, &expected)) return;
    c->compared++;
    if (!expected.integer || count != expected.count) {
        case_fail(c, "%s: %lld integers where the case has %lld %s", label, (long long)count, (long long)expected.count,
                  expected.integer ? "integers" : "floats");
        array_free(&expected);
        return;
    }
    for (int64_t i = count - 1; i >= 0; i--)
        if (got[i] != expected.integer[i]) {
            wrong++;
            at = i;
        }
    if (c->own_sides && !wrong) {
        array_free(&expected);
        return;
    }
    printf("  %-72s error %-10s tolerance %-10s", label, wrong ? "differs" : "0", "exact");
    if (!wrong) {
        printf(" ok\n");
    } else {
        printf(" FAILED in %lld of %lld, first at %lld: %lld, expected %lld\n", (long long)wrong, (long long)count,
               (long long)at, (long long)got[at], (long long)expected.integer[at]);
        c->failures++;
    }
    array_free(&expected);
}

void case_leave_out(struct golden_case *c, const char *name)
{
    const struct safetensor *t = safetensors_find(&c->file, name);

    if (t) c->used[t - c->file.tensor] = 1;
}

void case_check_used(struct golden_case *c, int all)
{
    for (size_t i = 0; i < c->file.tensors; i++) {
        if (c->used[i]) continue;
        if (all)
            case_fail(c, "%s is in the case, and this kind has no such quantity", c->file.tensor[i].name);
        else
            printf("  %-72s not compared\n", c->file.tensor[i].name);
    }
}
