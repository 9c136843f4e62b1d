/* Metrics of a run as a file of JSON lines: {"step":10,"loss":2.5}. Every line is in the file once it was written. */
#ifndef GLM52_REPORT_METRICS_LOG_H
#define GLM52_REPORT_METRICS_LOG_H

#include "base/host.h"

struct metrics_log {
    struct host *host;
    void *file;      /* of the host's file table; NULL when closed */
    char *path;
    uint64_t bytes;  /* written so far */
    const char *stage; /* told in every line behind its first number; NULL or "": none. Borrowed; set after opening */
};

/* Starts the file anew, or with resume_step > 0 goes on after the lines of an earlier run, less those whose "step" is
 * above resume_step and those that are torn. Its folder is made if need be. The earlier file survives a failure. */
glm52_status metrics_log_open(struct metrics_log *log, struct host *host, const char *path, uint64_t resume_step);
/* One line. Whole numbers are written as integers; NaN and infinities, which JSON does not have, as null. */
glm52_status metrics_log_write(struct metrics_log *log, const char *const *names, const double *values,
                               size_t count);
/* May be called twice, and after a failed open. */
glm52_status metrics_log_close(struct metrics_log *log);

#endif
