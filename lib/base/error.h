/* The calling thread's last error: status, message, hint and key/value details. No memory is taken, so an
 * out-of-memory failure can be reported like any other. */
#ifndef GLM52_BASE_ERROR_H
#define GLM52_BASE_ERROR_H

#include "glm52.h"

#if defined(__GNUC__)
#define PRINTF(text, first) __attribute__((format(printf, text, first)))
#else
#define PRINTF(text, first)
#endif

/* Replaces the last error and returns `status`. Say what happened and with which values. */
glm52_status fail(glm52_status status, const char *format, ...) PRINTF(2, 3);
/* Adds to the last error, returns its status: what to do about it. */
glm52_status fail_hint(const char *format, ...) PRINTF(1, 2);
/* Adds a detail to the last error ("tensor", "byte", "key", "path", ...), returns its status. */
glm52_status fail_detail(const char *key, const char *format, ...) PRINTF(2, 3);
/* Puts "text: " before the message of the last error, returns its status. */
glm52_status fail_prefix(const char *format, ...) PRINTF(1, 2);
glm52_status fail_nomem(size_t bytes, const char *what);

#define TRY(call)                             \
    do {                                      \
        glm52_status try_status_ = (call);    \
        if (try_status_) return try_status_;  \
    } while (0)

#endif
