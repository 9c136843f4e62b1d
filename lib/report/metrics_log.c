/* The metrics file: jansson writes the objects, the host's file table the lines. */
#include "report/metrics_log.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "base/text.h"

#define METRICS_LIMIT (UINT64_C(1) << 32) /* bytes of an earlier file that are read back */

enum { SIGNIFICANT_DIGITS = 9 };

static glm52_status append(struct metrics_log *log, const char *data, size_t bytes)
{
    const glm52_files *files = &log->host->files;
    int64_t written = files->write(files->user, log->file, data, bytes, log->bytes);

    if (written >= 0 && (size_t)written < bytes) written = -ENOSPC;
    if (written < 0) return file_fail(written, "write", log->path);
    log->bytes += bytes;
    return GLM52_OK;
}

/* ---- lines of an earlier run ------------------------------------------------------------------------- */

static int line_is_kept(const char *line, size_t bytes, uint64_t resume_step)
{
    json_t *object = json_loadb(line, bytes, 0, NULL);
    json_t *step = json_object_get(object, "step");
    int kept = json_is_object(object) && (!step || (json_is_integer(step) &&
                                                    json_integer_value(step) <= (json_int_t)resume_step));

    json_decref(object);
    return kept;
}

static glm52_status read_kept(struct host *host, const char *path, uint64_t resume_step, struct text *kept)
{
    char *old;
    size_t bytes;
    glm52_status status = file_read_all(host, path, METRICS_LIMIT, &old, &bytes);
    const char *reason = status ? glm52_error_detail(glm52_error_last(), "errno") : NULL;

    if (reason && strtol(reason, NULL, 10) == ENOENT) return GLM52_OK;
    if (status) return status;
    for (const char *line = old, *end; (end = memchr(line, '\n', bytes - (size_t)(line - old))); line = end + 1)
        if (line_is_kept(line, (size_t)(end - line), resume_step))
            text_add_bytes(kept, line, (size_t)(end + 1 - line));
    host_free(host, old, bytes + 1, MEMORY_HOST);
    return text_status(kept);
}

/* ---- open, write, close ------------------------------------------------------------------------------ */

static glm52_status make_folder(struct host *host, const char *path)
{
    const char *slash = strrchr(path, '/');
    char *folder = slash && slash > path ? host_strdup(host, path) : NULL;

    if (!slash || slash == path) return GLM52_OK;
    if (!folder) return GLM52_E_NOMEM;
    folder[slash - path] = 0;
    glm52_status status = file_make_directories(host, folder);
    host_free(host, folder, strlen(path) + 1, MEMORY_HOST); /* its NUL has moved */
    return status;
}

/* The file is made beside its final name and renamed while open: it takes the old one's place at once or not at all. */
static glm52_status create(struct metrics_log *log, const struct text *kept)
{
    const glm52_files *files = &log->host->files;
    char temporary[4096];

    if ((size_t)snprintf(temporary, sizeof temporary, "%s.tmp", log->path) >= sizeof temporary)
        return fail(GLM52_E_INVALID, "path of %zu characters is too long", strlen(log->path));
    int64_t error = files->open(files->user, temporary, 1, &log->file);
    if (error < 0) {
        log->file = NULL;
        return file_fail(error, "create", temporary);
    }
    glm52_status status = kept->length ? append(log, kept->at, kept->length) : GLM52_OK;
    if (!status && (error = files->rename(files->user, temporary, log->path)) < 0)
        status = file_fail(error, "rename to", log->path);
    if (status) {
        files->close(files->user, log->file);
        log->file = NULL;
        files->remove(files->user, temporary);
    }
    return status;
}

glm52_status metrics_log_open(struct metrics_log *log, struct host *host, const char *path, uint64_t resume_step)
{
    struct text kept;

    *log = (struct metrics_log){.host = host, .path = host_strdup(host, path)};
    if (!log->path) return GLM52_E_NOMEM;
    text_init(&kept, host);
    glm52_status status = make_folder(host, path);
    if (!status && resume_step) status = read_kept(host, path, resume_step, &kept);
    if (!status) status = create(log, &kept);
    text_free(&kept);
    if (status) metrics_log_close(log);
    return status;
}

static json_t *number(double value)
{
    if (!isfinite(value)) return json_null();
    if (value == floor(value) && fabs(value) < 0x1p53) return json_integer((json_int_t)value);
    return json_real(value);
}

glm52_status metrics_log_write(struct metrics_log *log, const char *const *names, const double *values,
                               size_t count)
{
    json_t *object = json_object();
    int failed = 0;

    for (size_t i = 0; i < count; i++) {
        failed |= json_object_set_new(object, names[i], number(values[i]));
        if (!i && log->stage && *log->stage)
            failed |= json_object_set_new(object, "stage", json_string_nocheck(log->stage));
    }
    char *line = failed ? NULL : json_dumps(object, JSON_COMPACT | JSON_REAL_PRECISION(SIGNIFICANT_DIGITS));
    json_decref(object);
    if (!line) return fail_nomem(count * sizeof *values, "a line of metrics");

    size_t length = strlen(line);
    line[length] = '\n'; /* in the place of the final NUL: one write, so that no reader sees half a line */
    glm52_status status = append(log, line, length + 1);
    free(line);
    return status;
}

glm52_status metrics_log_close(struct metrics_log *log)
{
    if (!log->host) return GLM52_OK; /* never opened */
    const glm52_files *files = &log->host->files;
    int64_t error = log->file ? files->close(files->user, log->file) : 0;
    glm52_status status = error < 0 ? file_fail(error, "close", log->path) : GLM52_OK;

    log->file = NULL;
    host_strfree(log->host, log->path);
    log->path = NULL;
    return status;
}
