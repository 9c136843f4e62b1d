/* What the host gives the library: memory, files, a log, the wish to cancel. One per context; every room that
 * needs one of these takes a struct host. */
#ifndef GLM52_BASE_HOST_H
#define GLM52_BASE_HOST_H

#include <stdatomic.h>

#include "base/error.h"
#include "base/memory.h"

struct host {
    glm52_allocator allocator;
    glm52_files files;
    glm52_log_function log;
    void *log_user;
    atomic_int cancelled;
    /* Accounting in bytes: all memory taken through the context, on the host or its device. */
    _Atomic uint64_t used[MEMORY_CLASSES], total, peak;
};

/* Defaults where an option is absent. Refuses incomplete tables. */
glm52_status host_open(struct host *host, const glm52_context_options *options);

/* 64-byte aligned; NULL and a last error when there is none. bytes = 0 gives a valid pointer. */
void *host_alloc(struct host *host, size_t bytes, enum memory_class class);
void *host_calloc(struct host *host, size_t bytes, enum memory_class class);
/* Contents up to the smaller size are kept; on failure the old block stays valid. */
void *host_realloc(struct host *host, void *memory, size_t old_bytes, size_t bytes, enum memory_class class);
void host_free(struct host *host, void *memory, size_t bytes, enum memory_class class);
char *host_strdup(struct host *host, const char *text); /* class MEMORY_HOST; free with host_strfree */
void host_strfree(struct host *host, char *text);

/* Counting alone, for device memory: the meta device counts what it never takes. */
void host_account(struct host *host, enum memory_class class, int64_t bytes);

void host_log(struct host *host, glm52_log_level level, const char *format, ...) PRINTF(3, 4);

/* GLM52_E_CANCELLED once after each request, else GLM52_OK. */
glm52_status host_poll(struct host *host);

/* Whole files through the file table. A failure names path and errno. Text read has NUL after its end, and is freed by
 * host_free(bytes + 1, MEMORY_HOST). */
glm52_status file_read_all(struct host *host, const char *path, uint64_t limit, char **text, size_t *bytes);
/* Writes path.tmp, syncs, renames: the old file survives any failure. */
glm52_status file_write_all(struct host *host, const char *path, const void *data, size_t bytes);
glm52_status file_fail(int64_t error, const char *verb, const char *path); /* negative errno -> status */
glm52_status file_make_directories(struct host *host, const char *path);    /* with parents */

/* Returns 0, or the negative errno that a test armed for the named point (build option failpoints). */
#if GLM52_FAILPOINTS
int failpoint(const char *name);
/* Arms `name` to fail with -error from its `skip`-th hit on, once; error = 0 disarms. hits: how often passed. */
void failpoint_arm(const char *name, int error, int skip);
int failpoint_hits(const char *name);
#else
#define failpoint(name) 0
#endif

#endif
