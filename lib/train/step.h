/* One training step: forward and backward of all microbatches, reduction, clipping, update, metrics. */
#ifndef GLM52_TRAIN_STEP_H
#define GLM52_TRAIN_STEP_H

#include "comm/comm.h"
#include "model/network.h"
#include "optim/optimizer.h"
#include "report/metrics_log.h"

enum metric {
    METRIC_STEP,
    METRIC_LOSS,
    METRIC_GRAD_NORM,
    METRIC_LR,
    METRIC_TOKENS,            /* of the run */
    METRIC_TOKENS_PER_SECOND,
    METRIC_SECONDS,
    METRIC_HELD_OUT_LOSS,     /* of the last evaluation */
    METRIC_PEAK_MEMORY,       /* bytes, of the whole context */
    METRICS
};

extern const char *const metric_name[METRICS];

struct step {
    struct model *model;
    struct optimizer *optimizer;  /* NULL: evaluation only */
    struct comm comm;
    struct network network;
    int64_t microbatches;
    double clip;
    double *totals;               /* device: TOTAL_* */
    float *scalars;               /* device: norm, clip coefficient */
    void *workspace;              /* of the norm */
    size_t workspace_bytes;
    uint64_t packs;               /* trained on so far */
    double metric[METRICS];
    struct metrics_log log;       /* opened by the first line */
    char *log_path;               /* NULL without config `out` */
};

/* Takes all memory a step will use. optimizer may be NULL. config: train section and out. */
glm52_status step_open(struct model *m, struct optimizer *o, const struct config *config, struct step *s);
void step_close(struct step *s);
glm52_status step_run(struct step *s, const struct pack *const *packs, uint32_t count);
glm52_status step_gradients(struct step *s, const struct pack *const *packs, uint32_t count);
glm52_status step_evaluate(struct step *s, const struct pack *const *packs, uint32_t count, double *loss);

/* Directory of a resumable state: model, optimizer state, counters. train/state.c says how it is laid out. */
glm52_status step_save(struct step *s, const char *directory);
glm52_status step_resume(struct step *s, const char *directory);

#endif
