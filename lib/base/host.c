/* Memory through the host's allocator with accounting per class, the log, and the wish to cancel. */
#include "base/host.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/system_files.h"

const char *const memory_class_name[MEMORY_CLASSES] = {
    "parameters", "gradients", "optimizer", "activations", "workspace", "comm", "host"};

static void *system_allocate(void *user, size_t bytes, size_t alignment)
{
    (void)user;
    return aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}

static void system_release(void *user, void *memory, size_t bytes)
{
    (void)user;
    (void)bytes;
    free(memory);
}

static const glm52_allocator system_allocator = {sizeof(glm52_allocator), 0, NULL, system_allocate, system_release};

static glm52_status check_struct(const char *name, const void *given, uint32_t size, uint32_t expected, uint32_t flags)
{
    if (size < expected)
        return fail(GLM52_E_VERSION, "%s.struct_size is %u, at least %u is needed", name, size, expected);
    for (uint32_t i = expected; i < size; i++)
        if (((const unsigned char *)given)[i])
            return fail(GLM52_E_VERSION, "%s has a member at byte %u that this library does not know", name, i);
    if (flags) return fail(GLM52_E_INVALID, "%s.flags is %u, must be 0", name, flags);
    return GLM52_OK;
}

glm52_status host_open(struct host *host, const glm52_context_options *options)
{
    memset(host, 0, sizeof *host);
    host->allocator = system_allocator;
    host->files = system_files;
    if (!options) return GLM52_OK;
    if (options->allocator) {
        const glm52_allocator *a = options->allocator;
        TRY(check_struct("allocator", a, a->struct_size, sizeof *a, a->flags));
        if (!a->allocate || !a->release) return fail(GLM52_E_INVALID, "allocator: allocate and release must both be given");
        host->allocator = *a;
    }
    if (options->files) {
        const glm52_files *f = options->files;
        TRY(check_struct("files", f, f->struct_size, sizeof *f, f->flags));
        if (!f->open || !f->size || !f->read || !f->write || !f->sync || !f->close || !f->rename || !f->remove ||
            !f->make_directory || !f->sync_directory)
            return fail(GLM52_E_INVALID, "files: every function must be given");
        host->files = *f;
    }
    host->log = options->log;
    host->log_user = options->log_user;
    return GLM52_OK;
}

void host_account(struct host *host, enum memory_class class, int64_t bytes)
{
    atomic_fetch_add(&host->used[class], (uint64_t)bytes);
    uint64_t total = atomic_fetch_add(&host->total, (uint64_t)bytes) + (uint64_t)bytes;
    uint64_t peak = atomic_load(&host->peak);

    while (bytes > 0 && total > peak && !atomic_compare_exchange_weak(&host->peak, &peak, total)) continue;
}

void *host_alloc(struct host *host, size_t bytes, enum memory_class class)
{
    void *memory = bytes > PTRDIFF_MAX ? NULL
                                       : host->allocator.allocate(host->allocator.user, bytes ? bytes : 1, 64);

    if (!memory) {
        fail_nomem(bytes, memory_class_name[class]);
        return NULL;
    }
    host_account(host, class, (int64_t)bytes);
    return memory;
}

void *host_calloc(struct host *host, size_t bytes, enum memory_class class)
{
    void *memory = host_alloc(host, bytes, class);

    if (memory) memset(memory, 0, bytes);
    return memory;
}

void *host_realloc(struct host *host, void *memory, size_t old_bytes, size_t bytes, enum memory_class class)
{
    void *grown = host_alloc(host, bytes, class);

    if (grown && memory) {
        memcpy(grown, memory, old_bytes < bytes ? old_bytes : bytes);
        host_free(host, memory, old_bytes, class);
    }
    return grown;
}

void host_free(struct host *host, void *memory, size_t bytes, enum memory_class class)
{
    if (!memory) return;
    host_account(host, class, -(int64_t)bytes);
    host->allocator.release(host->allocator.user, memory, bytes ? bytes : 1);
}

char *host_strdup(struct host *host, const char *text)
{
    size_t bytes = strlen(text) + 1;
    char *copy = host_alloc(host, bytes, MEMORY_HOST);

    return copy ? memcpy(copy, text, bytes) : NULL;
}

void host_strfree(struct host *host, char *text)
{
    if (text) host_free(host, text, strlen(text) + 1, MEMORY_HOST);
}

void host_log(struct host *host, glm52_log_level level, const char *format, ...)
{
    char message[1024];
    va_list args;

    if (!host->log) return;
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
    host->log(host->log_user, level, message);
}

glm52_status host_poll(struct host *host)
{
    if (atomic_exchange(&host->cancelled, 0)) return fail(GLM52_E_CANCELLED, "cancelled by the host");
    return GLM52_OK;
}
