/* Values of a pass that somebody asked to see: the parts offer them by name, a tap without the name ignores them. */
#ifndef GLM52_MODEL_TAP_H
#define GLM52_MODEL_TAP_H

#include "glm52.h"

/* Replays another run's decisions: selections ("topk") and expert choices ("router_idx"), in device memory. */
struct guide {
    void *user;
    /* 1: put there, the pass makes none of its own. */
    int (*give)(void *user, const char *name, int layer, int64_t rows, int64_t columns, int32_t *values);
    /* What the pass has made itself. */
    void (*note)(void *user, const char *name, int layer, int64_t rows, int64_t columns, const int32_t *values);
};

struct tap {
    void *user;
    /* layer < 0: "name", else "name.layer". */
    int (*wants)(void *user, const char *name, int layer);
    /* Device memory, valid during the call. */
    void (*take)(void *user, const char *name, int layer, glm52_dtype type, int64_t rows, int64_t columns,
                 const void *values);
    float *scores; /* device memory [rows, max(rows, vocabulary)] for index_scores and logits, if wanted */
};

#endif
