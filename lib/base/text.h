/* A growing string, and the small questions one asks of strings. */
#ifndef GLM52_BASE_TEXT_H
#define GLM52_BASE_TEXT_H

#include "base/host.h"

struct text {
    struct host *host;
    char *at;        /* NUL-terminated once something was added; NULL before */
    size_t length, capacity;
    int failed;      /* an addition ran out of memory; later additions do nothing */
};

void text_init(struct text *text, struct host *host);
void text_add(struct text *text, const char *format, ...) PRINTF(2, 3);
void text_add_bytes(struct text *text, const void *bytes, size_t count);
void text_clear(struct text *text);
void text_free(struct text *text);
glm52_status text_status(const struct text *text); /* NOMEM if an addition failed */

int text_starts_with(const char *text, const char *prefix);
int text_ends_with(const char *text, const char *suffix);
/* Levenshtein distance with transpositions, cut off at 64 characters. For "did you mean". */
unsigned text_distance(const char *a, const char *b);

#endif
