/* The parts of all layers of a model with one memory layout: what a pass runs on. A training step has one that keeps
 * what backward needs; evaluation and generation have one that keeps nothing. */
#ifndef GLM52_MODEL_NETWORK_H
#define GLM52_MODEL_NETWORK_H

#include "model/parts.h"

struct network {
    struct model *model;
    int64_t rows;                /* capacity */
    enum keep keep;
    struct plan plan;
    struct input_plan input;
    struct layer *layer;
    int layers;
    struct slot *x;              /* [layers + 1] the residual stream before each layer and after the last */
    struct slot *selected;       /* [layers] of the source layer where shared */
    struct slot final, final_rstd, dx, loss, head_workspace;
    unsigned char *base[REGIONS];
    struct input_stage stage;
};

/* Lays out and takes all memory of passes over up to `rows` tokens. */
glm52_status network_open(struct model *m, int64_t rows, enum keep keep, struct network *n);
void network_close(struct network *n);
/* Runs the pack forward; *total (device, fp64) += sum of weight * loss. scale multiplies the pack's loss mask. With
 * `backward`, gradients of the same sum are added to the parameters' (keep must not be KEEP_NOTHING). */
void network_run(struct network *n, const struct pack *pack, double scale, int backward, const struct tap *tap,
                 double *total);

#endif
