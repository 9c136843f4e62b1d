/* The optimizer: which rule moves which parameter, its state, and one update. The state is laid out like the gradients,
 * span by span: neighbours in memory that share rule, decay and type are updated in one call. */
#ifndef GLM52_OPTIM_OPTIMIZER_H
#define GLM52_OPTIM_OPTIMIZER_H

#include "model/model.h"

struct span {
    struct parameter *first;
    uint32_t parameters;
    uint64_t elements;      /* without gaps */
    int decays;
    uint64_t state;         /* element offset into m, v, master */
};

struct optimizer {
    struct model *model;
    struct optim_config config; /* numbers only; strings belong to the model's config */
    int64_t total_steps;    /* of the schedule */
    int64_t step;           /* updates done */
    double lr_override;     /* negative: the schedule's */
    struct span *span;
    uint32_t spans;
    uint64_t state_elements;
    float *m, *v, *master;  /* device; master is NULL for fp32 parameters */
    float *rates;           /* device, RATES */
};

glm52_status optimizer_open(struct model *m, const struct config *config, struct optimizer *o);
void optimizer_close(struct optimizer *o);
/* Learning rate of the next update. */
double optimizer_lr(const struct optimizer *o);
/* Applies the model's gradients times *coefficient (device memory) and counts the update. */
void optimizer_update(struct optimizer *o, const float *coefficient);
/* Masters anew from the parameters. */
void optimizer_resync(struct optimizer *o);

#endif
