/* A model case in bf16: it decides as its fp32 run did, for a decision that falls the other way is no error of a
 * value. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/text.h"
#include "case.h"

/* In the order of the run: the second one asks for the same. */
struct decision {
    struct decision *next;
    char name[32];
    size_t bytes;
    int32_t values[];
};

static struct stream *device_of_model;
static struct decision *first, **end = &first, *at;
static int giving, strange;
static const char *own;         /* what the second one is not given, but decides and is compared in; NULL: nothing */
static struct decision *own_at; /* the next of that kind that will be noted */
static int64_t otherwise, of;   /* of its numbers, how many are others */

static struct decision *of_kind(struct decision *d, const char *kind)
{
    while (d && !text_ends_with(d->name, kind)) d = d->next;
    return d;
}

static int give(void *user, const char *name, int layer, int64_t rows, int64_t columns, int32_t *values)
{
    size_t bytes = (size_t)(rows * columns) * sizeof *values;
    const struct decision *d = at;

    (void)user, (void)layer;
    if (!giving) return 0;
    if (!d || d->bytes != bytes || strcmp(d->name, name)) {
        strange = 1;
        return 0;
    }
    at = at->next;
    if (own && text_ends_with(name, own)) return 0;
    device_of_model->ops->upload(device_of_model, values, d->values, bytes);
    return 1;
}

static void count_otherwise(const int32_t *values, size_t bytes)
{
    int32_t *made = must_allocate(1, bytes);

    device_of_model->ops->download(device_of_model, made, values, bytes);
    for (size_t i = 0; i < bytes / sizeof *made; i++) otherwise += made[i] != own_at->values[i];
    of += (int64_t)(bytes / sizeof *made);
    own_at = of_kind(own_at->next, own);
    free(made);
}

static void note(void *user, const char *name, int layer, int64_t rows, int64_t columns, const int32_t *values)
{
    size_t bytes = (size_t)(rows * columns) * sizeof *values;

    (void)user, (void)layer;
    if (giving) {
        if (own_at && own_at->bytes == bytes && !strcmp(name, own_at->name)) count_otherwise(values, bytes);
        return;
    }
    struct decision *d = must_allocate(1, sizeof *d + bytes);
    snprintf(d->name, sizeof d->name, "%s", name);
    d->bytes = bytes;
    device_of_model->ops->download(device_of_model, d->values, values, bytes);
    *end = d;
    end = &d->next;
}

void guide_model(struct stream *s, struct model *m)
{
    static const struct guide guide = {.give = give, .note = note};

    device_of_model = s;
    m->guide = &guide;
}

void guide_give(const char *but)
{
    giving = 1;
    strange = 0;
    at = first;
    own = but;
    own_at = own ? of_kind(first, own) : NULL;
    otherwise = of = 0;
}

int guide_followed(void)
{
    return !strange && !at;
}

int guide_has(const char *kind)
{
    return of_kind(first, kind) != NULL;
}

void guide_otherwise(int64_t *numbers, int64_t *of_all)
{
    *numbers = otherwise;
    *of_all = of;
}

void guide_forget(void)
{
    while (first) {
        struct decision *next = first->next;
        free(first);
        first = next;
    }
    end = &first;
    at = NULL;
    giving = 0;
    own = NULL;
}
