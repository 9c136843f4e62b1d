#include "train/profile.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

glm52_status profile_open(struct stream *s, const struct config *config, struct profile *p)
{
    struct text path;

    *p = (struct profile){.stream = s};
    if (!config->report.profile) return GLM52_OK;
    if (!(p->tally = host_calloc(s->host, sizeof *p->tally, MEMORY_HOST))) return GLM52_E_NOMEM;
    if (!config->out[0]) return GLM52_OK;
    text_init(&path, s->host);
    text_add(&path, "%s/profile.jsonl", config->out);
    glm52_status status = text_status(&path);
    if (!status && !(p->path = host_strdup(s->host, path.at))) status = GLM52_E_NOMEM;
    text_free(&path);
    return status;
}

/* ---- what is told ---- */

static int slower(const void *a, const void *b)
{
    double x = (*(const struct tally_row *const *)a)->seconds, y = (*(const struct tally_row *const *)b)->seconds;

    return (x < y) - (x > y);
}

/* Rows by falling time; their number. */
static int sort_rows(struct profile *p, struct tally_row *sorted[TALLY_ROWS])
{
    for (int i = 0; i < p->tally->rows; i++) sorted[i] = &p->tally->row[i];
    qsort(sorted, (size_t)p->tally->rows, sizeof *sorted, slower);
    return p->tally->rows;
}

/* A step's mean, in milliseconds, GFLOP and GB; rates of the operation's own time. */
static void add_row(const struct profile *p, const struct tally_row *row, struct text *text)
{
    double steps = (double)p->steps, seconds = row->seconds / steps;

    text_add(text, "{\"label\":\"%s\",\"operation\":\"%s\",\"calls\":%.6g,\"ms\":%.6g,\"share\":%.4f,\"gflop\":%.6g,"
                   "\"gbyte\":%.6g",
             row->label, row->operation, (double)row->calls / steps, 1e3 * seconds, row->seconds / p->seconds,
             1e-9 * row->flops / steps, 1e-9 * row->bytes / steps);
    if (row->seconds > 0)
        text_add(text, ",\"tflops\":%.4g,\"tbytes_per_second\":%.4g", 1e-12 * row->flops / row->seconds,
                 1e-12 * row->bytes / row->seconds);
    text_add(text, "}\n");
}

static glm52_status write_file(struct profile *p)
{
    struct tally_row *row[TALLY_ROWS];
    struct text text;
    double timed = 0;
    int rows = sort_rows(p, row);

    if (!p->path) return GLM52_OK;
    for (int i = 0; i < rows; i++) timed += row[i]->seconds;
    text_init(&text, p->stream->host);
    text_add(&text, "{\"steps\":%llu,\"ms\":%.6g,\"timed_ms\":%.6g}\n", (unsigned long long)p->steps,
             1e3 * p->seconds / (double)p->steps, 1e3 * timed / (double)p->steps);
    for (int i = 0; i < rows; i++) add_row(p, row[i], &text);
    glm52_status status = text_status(&text);
    if (!status) status = file_write_all(p->stream->host, p->path, text.at, text.length);
    text_free(&text);
    return status;
}

/* Without a file, the log gets the slowest. */
static void log_rows(struct profile *p)
{
    enum { MOST = 20 };
    struct tally_row *row[TALLY_ROWS];
    int rows = sort_rows(p, row);

    for (int i = 0; i < rows && i < MOST; i++)
        host_log(p->stream->host, GLM52_LOG_NOTICE, "%-20s %-28s %8.3f ms %5.1f%%", row[i]->label, row[i]->operation,
                 1e3 * row[i]->seconds / (double)p->steps, 100 * row[i]->seconds / p->seconds);
}

void profile_close(struct profile *p)
{
    if (!p->tally) return;
    if (!p->path && p->steps) log_rows(p);
    host_strfree(p->stream->host, p->path);
    host_free(p->stream->host, p->tally, sizeof *p->tally, MEMORY_HOST);
    memset(p, 0, sizeof *p);
}

/* ---- around a step ---- */

glm52_status profile_begin(struct profile *p)
{
    if (!p->tally || p->stream->tally) return GLM52_OK; /* somebody counts already */
    p->stream->tally = p->tally;
    return p->stream->ops->time_begin ? p->stream->ops->time_begin(p->stream) : GLM52_OK;
}

glm52_status profile_end(struct profile *p, double seconds)
{
    if (!p->tally || p->stream->tally != p->tally) return GLM52_OK;
    glm52_status status = p->stream->ops->time_end ? p->stream->ops->time_end(p->stream) : GLM52_OK;
    p->stream->tally = NULL;
    if (!p->warm) memset(p->tally, 0, sizeof *p->tally);
    if (status || !p->warm) {
        p->warm = !status;
        return status;
    }
    p->steps++;
    p->seconds += seconds;
    return write_file(p);
}
