/* Recorded launches of a step, by the shape they depend on: a bank of bounded size. */
#ifndef GLM52_TRAIN_GRAPHS_H
#define GLM52_TRAIN_GRAPHS_H

#include "config/config.h"
#include "ops/ops.h"

/* What launches depend on beside the step they belong to. Fields that do not matter are 0. */
struct graph_shape {
    int64_t rows;       /* of the microbatch; 0: the update */
    int64_t sequences;  /* of the balance loss */
    int64_t packs;      /* of the step */
    int first;          /* the step's gradients begin with it */
};

struct graph_entry;

struct graphs {
    struct stream *stream;
    struct graph_entry *entry; /* NULL: nothing is ever recorded */
    int count, capacity, must; /* must: a failure to record is one of the step */
    uint64_t clock, captures, replays;
};

/* Refuses train.cuda_graph = on where the device records nothing. */
glm52_status graphs_open(struct stream *s, const struct config *config, struct graphs *g);
void graphs_close(struct graphs *g);
/* Does the work, which is nothing but launches and the same for equal shapes: the first time as
 * it is, then by recording and replaying it. */
glm52_status graphs_run(struct graphs *g, const struct graph_shape *shape, void (*work)(void *), void *user);

#endif
