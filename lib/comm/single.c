#include "comm/comm.h"

static void all_reduce_sum(const struct comm *c, struct stream *s, int64_t count, glm52_dtype type, void *values)
{
    (void)c, (void)s, (void)count, (void)type, (void)values; /* the sum over one rank is there already */
}

static glm52_status barrier(const struct comm *c)
{
    (void)c;
    return GLM52_OK;
}

void comm_open_single(struct comm *c)
{
    *c = (struct comm){.name = "single", .rank = 0, .ranks = 1, .all_reduce_sum = all_reduce_sum, .barrier = barrier};
}
