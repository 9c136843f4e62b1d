#include "faults.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/system_files.h"

static int due(struct faults *f)
{
    return f->calls++ == f->fail_call;
}

static void *allocate(void *user, size_t bytes, size_t alignment)
{
    struct faults *f = user;

    if (f->allocations++ == f->fail_allocation) return NULL;
    f->held += (int64_t)bytes;
    return aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}

static void release(void *user, void *memory, size_t bytes)
{
    struct faults *f = user;

    f->held -= (int64_t)bytes;
    free(memory);
}

static int64_t fault_open(void *user, const char *path, int32_t for_writing, void **file)
{
    struct faults *f = user;
    int64_t error = due(f) ? -f->error : system_files.open(NULL, path, for_writing, file);

    if (error >= 0) f->open_files++;
    return error;
}

static int64_t fault_size(void *user, void *file)
{
    struct faults *f = user;

    return due(f) ? -f->error : system_files.size(NULL, file);
}

static int64_t fault_read(void *user, void *file, void *buffer, size_t bytes, uint64_t offset)
{
    struct faults *f = user;

    if (due(f)) {
        if (f->kind == FAULT_ERROR) return -f->error;
        bytes = f->kind == FAULT_SHORT ? (bytes + 1) / 2 : 0;
    }
    return system_files.read(NULL, file, buffer, bytes, offset);
}

static int64_t fault_write(void *user, void *file, const void *buffer, size_t bytes, uint64_t offset)
{
    struct faults *f = user;

    if (due(f)) {
        if (f->kind == FAULT_ERROR) return -f->error;
        bytes = f->kind == FAULT_SHORT ? (bytes + 1) / 2 : 0;
    }
    return system_files.write(NULL, file, buffer, bytes, offset);
}

/* Syncing for real would only cost time: these tests do not cut the power. */
static int64_t fault_sync(void *user, void *file)
{
    struct faults *f = user;

    (void)file;
    return due(f) ? -f->error : 0;
}

static int64_t fault_close(void *user, void *file)
{
    struct faults *f = user;

    f->open_files--;
    int64_t error = system_files.close(NULL, file);
    return f->closes && due(f) ? -f->error : error;
}

static int64_t fault_rename(void *user, const char *from, const char *to)
{
    struct faults *f = user;

    return due(f) ? -f->error : system_files.rename(NULL, from, to);
}

static int64_t fault_remove(void *user, const char *path)
{
    (void)user;
    return system_files.remove(NULL, path);
}

static int64_t fault_make_directory(void *user, const char *path)
{
    struct faults *f = user;

    return due(f) ? -f->error : system_files.make_directory(NULL, path);
}

static int64_t fault_sync_directory(void *user, const char *path)
{
    struct faults *f = user;

    (void)path;
    return due(f) ? -f->error : 0;
}

static void note(void *user, glm52_log_level level, const char *message)
{
    struct faults *f = user;

    if (level > GLM52_LOG_WARNING) return;
    f->warnings++;
    snprintf(f->warning, sizeof f->warning, "%s", message);
}

void faults_options(struct faults *f, glm52_context_options *options)
{
    memset(f, 0, sizeof *f);
    f->fail_call = f->fail_allocation = -1;
    f->error = 5; /* EIO */
    f->allocator = (glm52_allocator){sizeof f->allocator, 0, f, allocate, release};
    f->files = (glm52_files){sizeof f->files, 0, f, fault_open, fault_size, fault_read, fault_write, fault_sync,
                             fault_close, fault_rename, fault_remove, fault_make_directory, fault_sync_directory};
    *options = (glm52_context_options){.struct_size = sizeof *options, .allocator = &f->allocator, .files = &f->files,
                                       .log = note, .log_user = f};
}

void faults_open(struct faults *f)
{
    glm52_context_options options;

    faults_options(f, &options);
    if (host_open(&f->host, &options)) abort();
}
