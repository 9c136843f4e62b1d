/* The optimizer: which rule moves which parameter, its state, and one update.
 *
 * A move is one call of an operation: neighbours in memory that share rule, decay and type are moved by one AdamW; Muon
 * takes blocks of equal shape that lie at equal distances together. Blocks come from the parameter table, never from
 * how a parameter happens to be stored: per head the no-position and rotary rows of q_b_proj and the K and V rows of
 * kv_b_proj, each expert's gate, up and down on their own. */
#ifndef GLM52_OPTIM_OPTIMIZER_H
#define GLM52_OPTIM_OPTIMIZER_H

#include "model/model.h"

enum rule { RULE_NONE, RULE_ADAMW, RULE_MUON };

struct move {
    enum rule rule;
    struct parameter *first;
    uint64_t from;              /* element of `first` at which it begins */
    uint64_t state, second;     /* element offsets of that into m and master, and into v */
    union {
        struct adamw adamw;
        struct muon muon;
    };
};

/* Where a parameter's state lies: elements into m and master, and into v if it has a second moment. */
struct placed {
    struct parameter *parameter;
    enum rule rule;
    int has_second;
    uint64_t state, second;
};

struct optimizer {
    struct model *model;
    struct optim_config config; /* numbers only; strings belong to the model's config */
    int64_t total_steps;        /* of the schedule */
    int stage;                  /* of the model, for which its state was planned */
    int64_t step;               /* updates done, skipped ones included */
    int64_t schedule_begin;     /* step at which this schedule began */
    int64_t updates[PARTS];     /* of each part since its state began: bias correction */
    double lr_override;         /* negative: the schedule's */
    struct placed *placed;
    uint32_t count;             /* of placed */
    struct move *move;
    uint32_t moves;
    uint64_t state_elements, second_elements;
    glm52_dtype moment_type;
    unsigned char *m, *v;       /* device, of moment_type */
    float *master;              /* device; NULL for fp32 parameters, and without precision.masters */
    float *rates;               /* device, RATES per part */
    void *workspace;            /* of Muon */
    size_t workspace_bytes;
};

glm52_status optimizer_open(struct model *m, const struct config *config, struct optimizer *o);
void optimizer_close(struct optimizer *o);
/* Learning rate of the next update. */
double optimizer_lr(const struct optimizer *o);
/* An update in three: what it needs from the host is sent; the model's gradients times *coefficient (device memory) are
 * applied, or nothing is where that is negative; it is counted, as one that was made or one that was left out.
 * Whether it was made need not be known before the last of them. */
void optimizer_prepare(struct optimizer *o);
void optimizer_update(struct optimizer *o, const float *coefficient);
void optimizer_count(struct optimizer *o, int made);
/* Masters anew from the parameters. */
void optimizer_resync(struct optimizer *o);
/* Takes over what `before` knows of the same model: counters, and the state of parameters that both move by the same
 * rule. */
void optimizer_adopt(struct optimizer *o, const struct optimizer *before);
/* The rule of a parameter under a config; for descriptions. */
glm52_status optimizer_rule(const struct config *config, const struct parameter *p, enum rule *rule);

#endif
