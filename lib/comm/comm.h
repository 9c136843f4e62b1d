/* The second seam: collectives over a group of ranks. `single` is a group of one, where they are no work at all. */
#ifndef GLM52_COMM_COMM_H
#define GLM52_COMM_COMM_H

#include "ops/ops.h"

struct comm {
    const char *name;
    int rank, ranks;
    void *state;
    /* Sums `count` elements over the group, in place, in device memory, ordered on the stream. */
    void (*all_reduce_sum)(const struct comm *c, struct stream *s, int64_t count, glm52_dtype type, void *values);
    glm52_status (*barrier)(const struct comm *c);
};

void comm_open_single(struct comm *c);

#endif
