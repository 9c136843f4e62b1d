/* Functions that the Lua tests call by a signature. */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "glm52.h"

#define SHOWN __attribute__((visibility("default")))

SHOWN double score(const int32_t *tokens, int64_t count);
SHOWN float mix(int32_t a, uint32_t b, int64_t c, uint64_t d, float e, double f);
SHOWN const char *echo(const char *text);
SHOWN void halve(float *values, int64_t count);
SHOWN int32_t documents(glm52_batch *batch);
SHOWN void *itself(void *pointer);
SHOWN int64_t counting(int64_t pack, int32_t *tokens, int64_t capacity);
SHOWN int64_t failing(int64_t pack, int32_t *tokens, int64_t capacity);
SHOWN int32_t stop_at_three(int64_t step, double loss);
SHOWN void keep_log(void *user, int32_t level, const char *message);
SHOWN const char *kept_log(void);

double score(const int32_t *tokens, int64_t count)
{
    double sum = 0;

    for (int64_t i = 0; i < count; i++) sum += tokens[i];
    return count ? sum / (double)count : -1;
}

float mix(int32_t a, uint32_t b, int64_t c, uint64_t d, float e, double f)
{
    return (float)a + (float)b + (float)c + (float)d + e + (float)f;
}

const char *echo(const char *text)
{
    return text;
}

void halve(float *values, int64_t count)
{
    for (int64_t i = 0; i < count; i++) values[i] /= 2;
}

int32_t documents(glm52_batch *batch)
{
    uint64_t count = 0;

    return glm52_batch_tokens(batch, NULL, &count) ? -1 : (int32_t)count;
}

void *itself(void *pointer)
{
    return pointer;
}

int64_t counting(int64_t pack, int32_t *tokens, int64_t capacity)
{
    for (int64_t i = 0; i < capacity; i++) tokens[i] = (int32_t)((pack + i) % 30);
    return capacity - pack % 2;
}

int64_t failing(int64_t pack, int32_t *tokens, int64_t capacity)
{
    return pack < 2 ? counting(pack, tokens, capacity) : -7;
}

int32_t stop_at_three(int64_t step, double loss)
{
    return step == 3 && loss > 0;
}

static char last[512];

void keep_log(void *user, int32_t level, const char *message)
{
    (void)user;
    snprintf(last, sizeof last, "%d %s", level, message);
}

const char *kept_log(void)
{
    return last;
}
