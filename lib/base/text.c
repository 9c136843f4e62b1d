#include "base/text.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

void text_init(struct text *text, struct host *host)
{
    memset(text, 0, sizeof *text);
    text->host = host;
}

static int make_room(struct text *text, size_t more)
{
    size_t needed = text->length + more + 1, capacity = text->capacity ? text->capacity : 256;

    if (text->failed) return 0;
    if (needed <= text->capacity) return 1;
    while (capacity < needed) capacity *= 2;
    char *grown = host_realloc(text->host, text->at, text->capacity, capacity, MEMORY_HOST);
    if (!grown) {
        text->failed = 1;
        return 0;
    }
    text->at = grown;
    text->capacity = capacity;
    return 1;
}

void text_add_bytes(struct text *text, const void *bytes, size_t count)
{
    if (!make_room(text, count)) return;
    memcpy(text->at + text->length, bytes, count);
    text->length += count;
    text->at[text->length] = 0;
}

void text_add(struct text *text, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    int length = vsnprintf(NULL, 0, format, args);
    va_end(args);
    if (length < 0 || !make_room(text, (size_t)length)) return;
    va_start(args, format);
    vsnprintf(text->at + text->length, (size_t)length + 1, format, args);
    va_end(args);
    text->length += (size_t)length;
}

void text_clear(struct text *text)
{
    text->length = 0;
    text->failed = 0;
    if (text->at) text->at[0] = 0;
}

void text_free(struct text *text)
{
    host_free(text->host, text->at, text->capacity, MEMORY_HOST);
    text_init(text, text->host);
}

glm52_status text_status(const struct text *text)
{
    return text->failed ? fail_nomem(text->capacity * 2, "text") : GLM52_OK;
}

int text_starts_with(const char *text, const char *prefix)
{
    return !strncmp(text, prefix, strlen(prefix));
}

int text_ends_with(const char *text, const char *suffix)
{
    size_t length = strlen(text), tail = strlen(suffix);

    return length >= tail && !strcmp(text + length - tail, suffix);
}

static unsigned smaller(unsigned a, unsigned b)
{
    return a < b ? a : b;
}

unsigned text_distance(const char *a, const char *b)
{
    enum { LONGEST = 64 };
    unsigned row[3][LONGEST + 1];
    size_t la = strlen(a), lb = strlen(b);

    if (la > LONGEST) la = LONGEST;
    if (lb > LONGEST) lb = LONGEST;
    for (size_t j = 0; j <= lb; j++) row[0][j] = (unsigned)j;
    for (size_t i = 1; i <= la; i++) {
        unsigned *now = row[i % 3], *before = row[(i - 1) % 3], *earlier = row[(i + 1) % 3];
        now[0] = (unsigned)i;
        for (size_t j = 1; j <= lb; j++) {
            now[j] = smaller(smaller(before[j], now[j - 1]) + 1, before[j - 1] + (a[i - 1] != b[j - 1]));
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
                now[j] = smaller(now[j], earlier[j - 2] + 1);
        }
    }
    return row[la % 3][lb];
}
