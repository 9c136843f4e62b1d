/* Arrays, random numbers and checks behind CASE and BENCH. */
#include "case.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/random.h"
#include "lab.h"

enum { GUARD_BYTES = 256, GUARD = 0xa5, POISON = 0xff };

/* Check's own assertions report success as well, which only a running test may; benches share this code, and end
 * here. */
#define demand(condition, ...)                                      \
    do {                                                            \
        if (condition) break;                                       \
        if (lab_entry()->kind == IS_CASE) ck_abort_msg(__VA_ARGS__); \
        fprintf(stderr, __VA_ARGS__);                               \
        exit(2);                                                    \
    } while (0)

struct stream *device;
const struct ops *ops;

static struct {
    const struct case_entry *entry;
    struct random_key key;
    uint64_t draws;
    struct array *arrays;
    struct scratch {
        struct scratch *next;
        double at[];
    } *scratch;
} lab;

/* ---- one case ---- */

void lab_enter(const struct case_entry *entry, struct stream *stream, uint64_t seed)
{
    lab.entry = entry;
    lab.key = random_key(seed, entry->text);
    lab.draws = 0;
    device = stream;
    ops = stream->ops;
}

const struct case_entry *lab_entry(void)
{
    return lab.entry;
}

size_t array_bytes(const struct array *a)
{
    return (size_t)a->count * dtype_size(a->type);
}

void lab_leave(void)
{
    while (lab.arrays) {
        struct array *a = lab.arrays;

        lab.arrays = a->next;
        ops->release(device, a->block, array_bytes(a) + 2 * GUARD_BYTES, MEMORY_WORKSPACE);
        free(a->value);
        free(a->kept);
        free(a);
    }
    while (lab.scratch) {
        struct scratch *s = lab.scratch;

        lab.scratch = s->next;
        free(s);
    }
}

void device_threads(int threads)
{
    device->threads = threads;
}

void device_wait(void)
{
    demand(ops->synchronize(device) == GLM52_OK, "%s", glm52_error_message(glm52_error_last()));
}

/* ---- random numbers ---- */

double draw_normal(void)
{
    return (double)random_normal(lab.key, lab.draws++);
}

double draw_uniform(void)
{
    return random_uniform(lab.key, lab.draws++);
}

int64_t draw_below(int64_t n)
{
    return (int64_t)random_below(lab.key, lab.draws++, (uint64_t)n);
}

int64_t draw_between(int64_t low, int64_t high)
{
    return low + draw_below(high - low + 1);
}

/* ---- arrays ---- */

static void *must(void *memory)
{
    demand(memory, "no memory");
    return memory;
}

double *doubles(int64_t count)
{
    struct scratch *s = must(calloc(1, sizeof *s + ((size_t)count + 1) * sizeof(double)));

    s->next = lab.scratch;
    lab.scratch = s;
    return s->at;
}

static struct array *array_alone(glm52_dtype type, int64_t count)
{
    struct array *a = must(calloc(1, sizeof *a));
    size_t bytes;

    a->type = type;
    a->count = count;
    bytes = array_bytes(a) + 2 * GUARD_BYTES;
    demand(ops->allocate(device, bytes, MEMORY_WORKSPACE, &a->block) == GLM52_OK, "no device memory");
    a->at = (char *)a->block + GUARD_BYTES;
    a->next = lab.arrays;
    lab.arrays = a;
    return a;
}

static struct array *array_new(glm52_dtype type, int64_t count)
{
    struct array *a = array_alone(type, count);

    if (type != GLM52_DTYPE_U8) a->value = must(calloc((size_t)count + 1, sizeof *a->value));
    return a;
}

/* Sends `bits` with fresh guards around them. */
static void array_send(struct array *a, const void *bits, int fill)
{
    size_t bytes = array_bytes(a);
    unsigned char *block = must(malloc(bytes + 2 * GUARD_BYTES));

    memset(block, GUARD, bytes + 2 * GUARD_BYTES);
    if (bits)
        memcpy(block + GUARD_BYTES, bits, bytes);
    else
        memset(block + GUARD_BYTES, fill, bytes);
    ops->upload(device, a->block, block, bytes + 2 * GUARD_BYTES);
    device_wait(); /* the host block may go only once it has arrived */
    free(block);
}

static void element_put(glm52_dtype type, void *bits, int64_t i, double value)
{
    switch (type) {
    case GLM52_DTYPE_F32: ((float *)bits)[i] = (float)value; break;
    case GLM52_DTYPE_BF16: ((uint16_t *)bits)[i] = f32_to_bf16((float)value); break;
    case GLM52_DTYPE_F64: ((double *)bits)[i] = value; break;
    case GLM52_DTYPE_F8_E4M3: ((uint8_t *)bits)[i] = (uint8_t)value; break;
    default: ((int32_t *)bits)[i] = (int32_t)value;
    }
}

static double element_get(glm52_dtype type, const void *bits, int64_t i)
{
    switch (type) {
    case GLM52_DTYPE_F32: return (double)((const float *)bits)[i];
    case GLM52_DTYPE_BF16: return (double)bf16_to_f32(((const uint16_t *)bits)[i]);
    case GLM52_DTYPE_F64: return ((const double *)bits)[i];
    case GLM52_DTYPE_F8_E4M3: return ((const uint8_t *)bits)[i];
    default: return ((const int32_t *)bits)[i];
    }
}

void array_push(struct array *a)
{
    void *bits = must(malloc(array_bytes(a) + 1));

    for (int64_t i = 0; i < a->count; i++) {
        element_put(a->type, bits, i, a->value[i]);
        a->value[i] = element_get(a->type, bits, i);
    }
    array_send(a, bits, 0);
    free(bits);
}

void array_poison(struct array *a)
{
    array_send(a, NULL, POISON);
}

struct array *array_zero(glm52_dtype type, int64_t count)
{
    struct array *a = array_new(type, count);

    array_push(a);
    return a;
}

struct array *array_from(glm52_dtype type, int64_t count, const double *value)
{
    struct array *a = array_new(type, count);

    if (count)
        memcpy(a->value, value, (size_t)count * sizeof *value);
    array_push(a);
    return a;
}

struct array *array_normal(glm52_dtype type, int64_t count, double deviation)
{
    struct array *a = array_new(type, count);

    for (int64_t i = 0; i < count; i++)
        a->value[i] = deviation * draw_normal();
    array_push(a);
    return a;
}

struct array *array_rotations(int64_t count)
{
    struct array *a = array_zero(GLM52_DTYPE_F32, 2 * count);

    for (int64_t i = 0; i < count; i++) {
        double angle = 6 * draw_uniform();

        a->value[2 * i] = cos(angle);
        a->value[2 * i + 1] = sin(angle);
    }
    array_push(a);
    return a;
}

struct array *array_output(glm52_dtype type, int64_t count)
{
    struct array *a = array_new(type, count);

    array_poison(a);
    return a;
}

struct array *array_workspace(size_t bytes)
{
    return array_output(GLM52_DTYPE_U8, bytes ? (int64_t)bytes : 1);
}

struct array *array_random(glm52_dtype type, int64_t count)
{
    enum { PATTERN = 32 << 20 };
    static uint16_t *pattern; /* as bf16, or as the halves of an fp32: either sign, 1/8 to 2 */
    struct array *a = array_alone(type, count);
    size_t bytes = array_bytes(a), sent = bytes < PATTERN ? bytes : PATTERN;

    if (!pattern) {
        uint64_t state = 1;

        pattern = must(malloc(PATTERN));
        for (size_t i = 0; i < PATTERN / sizeof *pattern; i++) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            pattern[i] = (uint16_t)((state >> 48 & 0x81ff) | 0x3e00);
        }
    }
    ops->upload(device, a->at, pattern, sent);
    for (; sent < bytes; sent *= 2)
        ops->copy(device, (char *)a->at + sent, a->at, sent < bytes - sent ? sent : bytes - sent);
    device_wait();
    return a;
}

/* The bits of a, after checking its guards; freed by the caller. */
static unsigned char *array_receive(struct array *a)
{
    size_t bytes = array_bytes(a);
    unsigned char *block = must(malloc(bytes + 2 * GUARD_BYTES));

    device_wait();
    ops->download(device, block, a->block, bytes + 2 * GUARD_BYTES);
    for (int i = 0; i < GUARD_BYTES; i++) {
        demand(block[i] == GUARD, "byte %d before the array was written", GUARD_BYTES - i);
        demand(block[GUARD_BYTES + bytes + (size_t)i] == GUARD, "byte %d after the array was written", i);
    }
    memmove(block, block + GUARD_BYTES, bytes);
    return block;
}

void array_fetch(struct array *a)
{
    unsigned char *bits = array_receive(a);

    if (a->value)
        for (int64_t i = 0; i < a->count; i++)
            a->value[i] = element_get(a->type, bits, i);
    free(bits);
}

/* ---- checks ---- */

double tolerance(glm52_dtype type, int64_t terms)
{
    double sum = ldexp((double)terms + 8, -24);

    return sum + (type == GLM52_DTYPE_BF16 ? ldexp(1, -8) : 0);
}

void check_close_at(const char *file, int line, const char *name, struct array *a, const double *want, double limit)
{
    double largest = 0;

    array_fetch(a);
    for (int64_t i = 0; i < a->count; i++)
        if (isfinite(want[i]))
            largest = fmax(largest, fabs(want[i]));
    for (int64_t i = 0; i < a->count; i++) {
        double got = a->value[i];
        int good = isfinite(want[i]) ? fabs(got - want[i]) <= limit * largest
                   : isnan(want[i])  ? isnan(got)
                                     : got == want[i];

        if (!good)
            ck_abort_msg("%s:%d: %s[%lld] is %.9g, not %.9g (error %.3g, permitted %.3g)", file, line, name,
                         (long long)i, got, want[i], fabs(got - want[i]), limit * largest);
    }
}

void check_same_at(const char *file, int line, const char *name, struct array *a)
{
    unsigned char *bits = array_receive(a);

    if (!a->kept) {
        a->kept = bits;
        return;
    }
    if (memcmp(a->kept, bits, array_bytes(a)) != 0) {
        free(bits);
        ck_abort_msg("%s:%d: %s differs from the first run", file, line, name);
    }
    free(bits);
}

void differences(double (*objective)(void *problem), void *problem, double *x, int64_t count, double *gradient)
{
    for (int64_t i = 0; i < count; i++) {
        double kept = x[i], h = 1e-5 * fmax(1, fabs(kept)), above, below;

        x[i] = kept + h;
        above = objective(problem);
        x[i] = kept - h;
        below = objective(problem);
        x[i] = kept;
        gradient[i] = (above - below) / (2 * h);
    }
}
