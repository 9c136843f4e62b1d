/* The parts of all layers of a model with one memory layout: what a pass runs on. A training step has one that keeps
 * what backward needs; evaluation and generation have one that keeps nothing. */
#ifndef GLM52_MODEL_NETWORK_H
#define GLM52_MODEL_NETWORK_H

#include "model/mtp.h"

/* What passes add up, as indices into an array of fp64 on the device. Losses come with all their factors. */
struct sums {
    int ce;                 /* trunk cross-entropy */
    int auxiliary;          /* balance and z losses */
    int mtp;                /* [depths] */
    int accepted;           /* [depths] rows (ce) or probability mass (tv) accepted at each depth */
    int accepted_so_far;    /* [depths] ... at all depths up to it */
    int kl;                 /* [executions of indexers that learn] trunk layers in order, then MTP depths */
    int dropped;            /* assignments beyond the experts' capacity */
    int counts;             /* [sparse layers, then MTP][experts] */
    int running;            /* [sparse layers, then MTP][experts + 1] unbiased choices, and rows, so far */
    int count;
};

struct network {
    struct model *model;
    int64_t rows;                /* capacity */
    enum keep keep;
    struct plan plan;
    struct input_plan input;
    struct layer *layer;
    struct mtp mtp;
    int layers;
    int indexers, sparse_layers; /* executions of learning indexers; rows of counts */
    struct slot *x;              /* [layers + 1] the residual stream before each layer and after the last */
    struct slot *selected;       /* [layers] of the source layer where shared */
    struct slot final, final_rstd, dx, loss, head_workspace, alpha, hit, side;
    unsigned char *base[REGIONS];
    struct input_stage stage;
    struct input in[MTP_DEPTHS + 1]; /* what was fed last: the trunk's view, then those of the MTP depths */
    int guided;                  /* its model had a guide when memory was laid out */
    int microbatches;            /* of its step */
    int first;                   /* the next pass begins a step: its gradients take the place of those there are */
    unsigned char *written;      /* [parameters] during that pass: the gradient is of this step */
    struct sums sums;
    double *sum;                 /* device */
};

/* Lays out and takes all memory of passes over up to `rows` tokens. */
glm52_status network_open(struct model *m, int64_t rows, enum keep keep, struct network *n);
void network_close(struct network *n);
/* Device memory that network_open() would take; 0 if the host has none to find out. */
uint64_t network_bytes(struct model *m, int64_t rows, enum keep keep);
/* Sends a pack for the next pass. The pass itself has no other arguments than what lies on the device, the
 * pack's rows, the number of its sequences, in auxiliary losses `packs` of the scale, and `first`: where those
 * return, a recorded pass can be replayed. */
void network_feed(struct network *n, const struct pack *pack, const struct input_scale *scale);
void network_pass(struct network *n, int backward, const struct tap *tap);
/* Both: runs the pack forward, adding to `sum`. With `backward`, gradients of the losses are added to the parameters',
 * or take their place in a `first` pass (keep must not be KEEP_NOTHING). The MTP depths run if the config trains
 * them. */
void network_run(struct network *n, const struct pack *pack, const struct input_scale *scale, int backward,
                 const struct tap *tap);
/* Assignments to experts that one token makes in a pass, the MTP depths included. */
int64_t network_assignments(const struct network *n);
/* Moves the selection biases by the counts of the step, unless *coefficient (device memory) is negative; the caller
 * zeroes `sum`. */
void network_balance(struct network *n, const float *coefficient);

#endif
