/* The last error of each thread, in fixed thread-local storage: reporting a failure never needs memory. */
#include "base/error.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DETAILS = 8, MAGIC = 0x474C4D45 };

struct glm52_error {
    uint32_t magic; /* where other handles have theirs, and another one */
    glm52_status status;
    char message[1024], hint[512];
    int details;
    struct {
        char key[24], value[512];
    } detail[DETAILS];
};

static _Thread_local struct glm52_error last;
static _Thread_local int failed;

glm52_status fail(glm52_status status, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    vsnprintf(last.message, sizeof last.message, format, args);
    va_end(args);
    last.magic = MAGIC;
    last.status = status;
    last.hint[0] = 0;
    last.details = 0;
    failed = 1;
    return status;
}

glm52_status fail_hint(const char *format, ...)
{
    va_list args;

    va_start(args, format);
    vsnprintf(last.hint, sizeof last.hint, format, args);
    va_end(args);
    return last.status;
}

glm52_status fail_detail(const char *key, const char *format, ...)
{
    va_list args;
    int i = 0;

    while (i < last.details && strcmp(last.detail[i].key, key)) i++;
    if (i == DETAILS) return last.status;
    snprintf(last.detail[i].key, sizeof last.detail[i].key, "%s", key);
    va_start(args, format);
    vsnprintf(last.detail[i].value, sizeof last.detail[i].value, format, args);
    va_end(args);
    if (i == last.details) last.details++;
    return last.status;
}

glm52_status fail_prefix(const char *format, ...)
{
    char old[sizeof last.message];
    va_list args;

    memcpy(old, last.message, sizeof old);
    va_start(args, format);
    int length = vsnprintf(last.message, sizeof last.message, format, args);
    va_end(args);
    if (length >= 0 && (size_t)length < sizeof last.message)
        snprintf(last.message + length, sizeof last.message - (size_t)length, ": %s", old);
    return last.status;
}

glm52_status fail_nomem(size_t bytes, const char *what)
{
    fail(GLM52_E_NOMEM, "no memory for %s (%zu bytes)", what, bytes);
    return fail_hint(
        "make the model, the microbatch or the number of ranks' shares smaller, or give the process more memory");
}

const glm52_error *glm52_error_last(void)
{
    return failed ? &last : NULL;
}

glm52_error *glm52_error_take(void)
{
    glm52_error *copy = failed ? malloc(sizeof *copy) : NULL;

    if (copy) {
        *copy = last;
        failed = 0;
    }
    return copy;
}

static int is_error(const glm52_error *self)
{
    return self && self->magic == MAGIC;
}

void glm52_error_unref(glm52_error **self)
{
    if (!self || !is_error(*self)) return;
    if (*self != &last) {
        (*self)->magic = 0;
        free(*self);
    }
    *self = NULL;
}

glm52_status glm52_error_status(const glm52_error *self)
{
    if (!self) return GLM52_OK;
    return is_error(self) ? self->status : fail(GLM52_E_HANDLE, "another handle given where a glm52_error is needed");
}

const char *glm52_error_message(const glm52_error *self)
{
    return is_error(self) ? self->message : "";
}

const char *glm52_error_hint(const glm52_error *self)
{
    return is_error(self) ? self->hint : "";
}

const char *glm52_error_detail(const glm52_error *self, const char *key)
{
    if (!is_error(self) || !key) return NULL;
    for (int i = 0; i < self->details; i++)
        if (!strcmp(self->detail[i].key, key)) return self->detail[i].value;
    return NULL;
}
