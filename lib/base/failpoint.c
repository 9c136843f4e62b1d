/* Named points where a test makes an operation fail; empty unless the build option asks for them. */
#include "base/host.h"

#if GLM52_FAILPOINTS
#include <string.h>

static struct {
    char name[48];
    int error, skip, hits;
} points[64];

static int find(const char *name)
{
    int i = 0;

    while (i < 63 && points[i].name[0] && strcmp(points[i].name, name)) i++;
    strncpy(points[i].name, name, sizeof points[i].name - 1);
    return i;
}

int failpoint(const char *name)
{
    int i = find(name);

    points[i].hits++;
    if (!points[i].error || points[i].skip-- > 0) return 0;
    int error = points[i].error;
    points[i].error = 0;
    return -error;
}

void failpoint_arm(const char *name, int error, int skip)
{
    int i = find(name);

    points[i].error = error;
    points[i].skip = skip;
}

int failpoint_hits(const char *name)
{
    return points[find(name)].hits;
}
#else
typedef int failpoint_unused; /* ISO C wants a declaration in every file */
#endif
