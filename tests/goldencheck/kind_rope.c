/* Rotary tables: the inverse frequencies bit for bit, cos and sin as fp32 makes them of fp32 angles. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/text.h"
#include "case.h"
#include "model/rope.h"
#include "ops/ops.h"

/* Two fp32 cosines of one fp32 angle differ in the last bits of values up to 1. */
static const double table_tolerance = 0x1p-22;

/* Tables of one theta: prefix is "theta10000". */
static void check_theta(struct golden_case *c, struct stream *stream, const struct array *positions, const char *prefix,
                        double theta, int64_t half)
{
    int64_t rows = positions->count, count = rows * half;
    int32_t *position = array_int32s(positions);
    float *frequency = must_allocate((size_t)half, sizeof *frequency);
    float *table = must_allocate((size_t)(2 * count), sizeof *table);
    double *part = must_allocate((size_t)(count > half ? count : half), sizeof *part);
    static const char *const name[] = {"cos", "sin"};
    char tensor[300];

    model_inverse_frequency(theta, (int)half, frequency);
    for (int64_t i = 0; i < half; i++) part[i] = (double)frequency[i];
    snprintf(tensor, sizeof tensor, "%s.inv_freq", prefix);
    compare_within(c, tensor, part, half, 0);
    struct mirror m = {.s = stream};
    stream->ops->rope_table(stream, rows, (int32_t)half, on_device(&m, position, (size_t)rows * sizeof *position),
                            on_device(&m, frequency, (size_t)half * sizeof *frequency),
                            on_device(&m, table, (size_t)(2 * count) * sizeof *table));
    back_from_device(&m);
    for (int which = 0; which < 2; which++) {
        for (int64_t i = 0; i < count; i++) part[i] = (double)table[2 * i + which];
        snprintf(tensor, sizeof tensor, "%s.%s", prefix, name[which]);
        compare_within(c, tensor, part, count, table_tolerance);
        snprintf(tensor, sizeof tensor, "%s.%s64", prefix, name[which]);
        case_leave_out(c, tensor); /* of exact angles, which fp32 tables at large positions do not have */
    }
    free(position);
    free(frequency);
    free(table);
    free(part);
}

void run_rope(struct golden_case *c)
{
    static const char suffix[] = ".inv_freq", start[] = "theta";
    struct array positions;
    struct stream stream;

    if (!case_array(c, "positions", &positions)) return;
    if (!case_stream(c, &stream)) {
        array_free(&positions);
        return;
    }
    for (size_t i = 0; i < c->file.tensors; i++) {
        const struct safetensor *t = &c->file.tensor[i];
        char prefix[256], *rest;
        if (!text_starts_with(t->name, start) || !text_ends_with(t->name, suffix) || strlen(t->name) >= sizeof prefix)
            continue;
        snprintf(prefix, sizeof prefix, "%.*s", (int)(strlen(t->name) - strlen(suffix)), t->name);
        double theta = strtod(prefix + strlen(start), &rest);
        if (*rest || theta <= 0)
            case_fail(c, "%s: no theta in the name", t->name);
        else
            check_theta(c, &stream, &positions, prefix, theta, (int64_t)safetensors_elements(t));
    }
    stream_close(&stream);
    array_free(&positions);
    case_check_used(c, 1);
}
