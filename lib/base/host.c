/* Memory through the host's allocator with accounting per class, the log, and the wish to cancel. */
#include "base/host.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/struct.h"
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

static glm52_status take_allocator(glm52_allocator *a, const glm52_allocator *given)
{
    TRY(struct_take(a, sizeof *a, given, SIZE_UP_TO(glm52_allocator, release), "glm52_allocator"));
    if (!a->allocate || !a->release)
        return fail(GLM52_E_INVALID, "glm52_allocator: allocate and release must both be given");
    return GLM52_OK;
}

static glm52_status take_files(glm52_files *f, const glm52_files *given)
{
    TRY(struct_take(f, sizeof *f, given, SIZE_UP_TO(glm52_files, sync_directory), "glm52_files"));
    if (!f->open || !f->size || !f->read || !f->write || !f->sync || !f->close || !f->rename || !f->remove ||
        !f->make_directory || !f->sync_directory)
        return fail(GLM52_E_INVALID, "glm52_files: every function must be given");
    return GLM52_OK;
}

glm52_status host_open(struct host *host, const glm52_context_options *options)
{
    memset(host, 0, sizeof *host);
    host->allocator = system_allocator;
    host->files = system_files;
    if (!options) return GLM52_OK;
    if (options->allocator) TRY(take_allocator(&host->allocator, options->allocator));
    if (options->files) TRY(take_files(&host->files, options->files));
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
