/* One training step: forward and backward of all microbatches, reduction, clipping, update, metrics. */
#ifndef GLM52_TRAIN_STEP_H
#define GLM52_TRAIN_STEP_H

#include "comm/comm.h"
#include "model/network.h"
#include "optim/optimizer.h"
#include "report/metrics_log.h"
#include "train/graphs.h"
#include "train/profile.h"

/* Metrics with one fixed name; step_metric() also knows those per MTP depth, layer and group. */
enum metric {
    METRIC_STEP,
    METRIC_LOSS,              /* everything that was minimised */
    METRIC_CE,                /* trunk cross-entropy */
    METRIC_INDEXER_LOSS,      /* sum over indexers of the mean KL, without coefficient */
    METRIC_MTP_LOSS,          /* mean over depths (ce), or the end-to-end loss (tv), without factor */
    METRIC_AUXILIARY_LOSS,    /* balance and z losses, coefficients included */
    METRIC_GRAD_NORM,
    METRIC_LR,
    METRIC_TOKENS,            /* of the run */
    METRIC_TOKENS_PER_SECOND,
    METRIC_SECONDS,
    METRIC_TFLOPS_MEGATRON_6753, /* TFLOP/s of the step's documents, by convention (report/flops.h) */
    METRIC_TFLOPS_EXACT,
    METRIC_HELD_OUT_LOSS,     /* of the last evaluation */
    METRIC_PEAK_MEMORY,       /* bytes, of the whole context */
    METRIC_SKIPPED,           /* updates skipped so far: not finite, or a spike */
    METRIC_DROPPED,           /* share of expert assignments beyond the capacity */
    METRIC_FORCED_BALANCE,    /* 1 where moe.force_balance makes the run a benchmark and no training */
    METRIC_MFU_MEGATRON_6753, /* share of report.peak_tflops; this and those after it only if that is known */
    METRIC_MFU_EXACT,
    METRICS
};

extern const char *const metric_name[METRICS];

/* Groups of parameters whose gradient norms are told apart. */
enum group {
    GROUP_EMBEDDING,
    GROUP_HEAD,
    GROUP_NORMS,
    GROUP_ATTENTION,
    GROUP_ROUTER,
    GROUP_EXPERTS,
    GROUP_MLP,
    GROUP_INDEXER,
    GROUP_MTP,
    GROUPS
};

extern const char *const group_name[GROUPS];

/* What is known of the gradients, and what follows from it. */
struct verdict {
    double squares[GROUPS + 1];   /* of the gradients, per group, then all */
    double mean_loss;             /* before the step; after it, if the update was made */
    float norm, coefficient;      /* coefficient < 0: the update was left out */
};

struct step {
    struct model *model;
    struct optimizer *optimizer;  /* NULL: evaluation only */
    int holds_gradients;
    struct comm comm;
    struct network network;
    int64_t microbatches;
    double clip, spike, peak_tflops;
    int skips;                    /* not_finite = skip */
    struct verdict *verdict;      /* device */
    struct graphs graphs;
    struct profile profile;
    void *workspace;              /* of the norm, behind the verdict */
    size_t update_bytes;          /* of both */
    uint64_t packs;               /* trained on so far */
    double mean_loss;             /* running, for spikes; 0 before the first step */
    double metric[METRICS];
    double *sum;                  /* host copy of the network's sums, without their factors, of the last run */
    double group_norm[GROUPS];    /* of the gradients, by part of the model */
    const struct tap *tap;        /* who looks at the passes; NULL: nobody */
    struct metrics_log log;       /* opened by the first line */
    char *log_path;               /* NULL without config `out` */
};

/* Takes all memory a step will use. optimizer may be NULL. config: train and report sections, and out. */
glm52_status step_open(struct model *m, struct optimizer *o, const struct config *config, struct step *s);
void step_close(struct step *s);
glm52_status step_run(struct step *s, const struct pack *const *packs, uint32_t count);
glm52_status step_gradients(struct step *s, const struct pack *const *packs, uint32_t count);
glm52_status step_evaluate(struct step *s, const struct pack *const *packs, uint32_t count, double *loss);

/* Between gradients that are complete and the metrics: norms and clipping; those and the update, which is left out
 * where the device decides so; what it decided, once the device was waited for; counting what was made or left out. */
void step_clip(struct step *s);
glm52_status step_update(struct step *s);
void step_read_verdict(struct step *s, struct verdict *v);
void step_count(struct step *s, const struct verdict *v);

/* A metric by name; beyond the fixed ones: mtp.D.loss, mtp.D.acceptance, mtp.D.cumulative_acceptance, indexer_loss.L,
 * grad_norm.GROUP, router_load.L (largest share of an expert, 1 = balanced), graph_captures and graph_replays where
 * launches are recorded. Number `index` of all names in *name. */
glm52_status step_metric(const struct step *s, const char *name, double *value);
int step_metric_at(const struct step *s, uint32_t index, char name[64], double *value);

/* Fails with GLM52_E_NUMERIC and what it can find out: the first layer whose output is not finite, else
 * the first parameter whose gradient is not. */
glm52_status step_not_finite(struct step *s, const struct pack *const *packs, uint32_t count);

/* Sets the FLOP rates and utilisations of a step over these packs. */
void step_measure_flops(struct step *s, const struct pack *const *packs, uint32_t count, double seconds);

/* Directory of a resumable state: model, optimizer state, counters. train/state.c says how it is laid out. */
glm52_status step_save(struct step *s, const char *directory);
glm52_status step_resume(struct step *s, const char *directory);
/* Goes on under other options of the same model shape: which parameters are trained, losses, optimizer,
 * schedule. m and o are the step's own; no other step of the model may be open. If there is no memory for
 * the new stage, the step is closed (s->model is NULL) with its counters kept, and calling this again, with
 * any stage, opens it. State of parameters trained before and after is kept, that of others begins at zero;
 * a new train.stage begins a new schedule. */
glm52_status step_set_stage(struct step *s, struct model *m, struct optimizer *o, const struct config *config);

#endif
