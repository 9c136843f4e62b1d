/* The parts of a layer: plan (declare what is kept and what is temporary), forward, backward. A part's slots belong to
 * one memory layout; the weights belong to the model. */
#ifndef GLM52_MODEL_PARTS_H
#define GLM52_MODEL_PARTS_H

#include "model/pass.h"

/* Multi-head latent attention, over selected keys in absorbed form or over all keys in full; model.md 2.2. */
struct mla {
    const struct mla_weights *w;
    const struct model_config *c;
    glm52_dtype type;
    int dense;                    /* all visible keys */
    int fast;                     /* last bits may differ from run to run */
    int teaches;                  /* backward also wants the target of the indexer loss */
    const struct mla *keys_from;  /* an MTP depth that shares keys: whose; NULL: its own */
    int lends_keys;               /* other depths share its keys: shared_dkv collects their gradient */
    struct {
        struct slot q_latent_raw, q_latent, q_rstd, q, kv_raw, kv_rstd, kv, lse, out; /* kept */
        struct slot absorbed, latent_out;                                             /* kept, sparse */
        struct slot key, value;                                                       /* kept, dense */
        struct slot shared_dkv;                                                       /* kept, if it lends */
        struct slot workspace, attention_workspace, dq, dkv, dkv_raw, dout, dq_latent; /* temporary */
        struct slot dabsorbed, dlatent_out;                                           /* temporary, sparse */
        struct slot dkey, dvalue;                                                     /* temporary, dense */
    } slots;
};

void mla_plan(struct mla *m, struct stream *s, struct plan *p);
/* Latents and queries from the normed hidden u: everything before the selection. Leaves q_latent for the indexer. */
void mla_project(const struct mla *m, const struct pass *f, const void *u);
/* y = from + attention output, keys as selected [rows,index_topk] (not read when dense). */
void mla_attend(const struct mla *m, const struct pass *f, const int32_t *selected, const void *from, void *y);
/* du overwritten. target [rows,index_topk], not NULL: see sparse_mla_backward (sparse only). */
void mla_backward(const struct mla *m, const struct pass *b, const void *u, const int32_t *selected, const void *dy,
                  void *du, float *target);
/* The target alone, from what forward kept (sparse only). */
void mla_target(const struct mla *m, const struct pass *b, const int32_t *selected, float *target);

/* Within mla: the attention itself, between projections and output (attention.c). */
void attention_plan(struct mla *m, struct stream *s, struct plan *p);
void attention_forward(const struct mla *m, const struct pass *f, const int32_t *selected);
/* Absorbed queries and the outputs of the heads, from what was kept. */
void attention_restore(const struct mla *m, const struct pass *b);
/* From dout to dq [rows,heads,qk] before rotation and dkv [rows,kv_rank+rope] fp32,
 * rope part still rotated; gradient of kv_b. */
void attention_backward(const struct mla *m, const struct pass *b, const int32_t *selected, float *target);
struct sparse_mla attention_shape(const struct mla *m, int64_t rows, double pairs);
const void *attention_kv(const struct mla *m, const struct pass *f);

/* Lightning indexer and its loss; model.md 2.3, training.md 1.4. */
struct indexer_part {
    const struct indexer_weights *w;
    const struct model_config *c;
    glm52_dtype type;
    int layer;
    int learns;                   /* indexer_loss.kind is not none */
    int dense;                    /* ... and its support is all visible keys */
    int guided;                   /* its model had a guide when memory was laid out */
    struct {
        struct slot q, key_raw, key, statistics, weight;                          /* kept if it learns */
        struct slot kl;                                                           /* kept, fp32 [rows] */
        struct slot workspace, dq, dkey, dkey_cast, dweight, target, open;        /* temporary */
    } slots;
};

void indexer_plan(struct indexer_part *m, const struct mla *teacher, struct stream *s, struct plan *p);
void indexer_project(const struct indexer_part *m, const struct pass *f, const void *u, const void *q_latent);
void indexer_select(const struct indexer_part *m, const struct pass *f, int32_t *selected);
/* kl of each row, gradients of the five parameters, *total (fp64) += sum of weighted kl. sparse: `selected` and the
 * target in slots.target; dense: from the teacher. */
void indexer_learn(const struct indexer_part *m, const struct pass *b, const struct mla *teacher, const void *u,
                   const void *q_latent, const int32_t *selected, double *total);

/* SwiGLU feed-forward; model.md 2.5. */
struct mlp {
    const struct mlp_weights *w;
    int64_t width;
    glm52_dtype type;
    struct {
        struct slot gate_up, act;
    } slots;
};

void mlp_plan(struct mlp *m, struct plan *p);
/* y = from + the rest; from may be y, or NULL: nothing. */
void mlp_forward(const struct mlp *m, const struct pass *f, const void *x, const void *from, void *y);
/* dx (+)= */
void mlp_backward(const struct mlp *m, const struct pass *b, const void *x, const void *dy, void *dx, int add);

/* Mixture of experts; model.md 2.6, training.md 5. */
struct moe {
    const struct moe_weights *w;
    const struct model_config *c;
    const struct config *config;  /* moe section: balance */
    glm52_dtype type;
    int passes;                   /* how often these weights run in one pass: MTP depths */
    double *counts;               /* device, fp64 [experts]: assignments of the step */
    double *auxiliary;            /* device, fp64: auxiliary losses of the step, coefficients included */
    double *running;              /* device, fp64 [experts+1]: unbiased choices and rows of the step so far */
    double *dropped;              /* device, fp64: assignments beyond the capacity */
    struct mlp shared;
    struct {
        struct slot logits, chosen, weight, offsets, source, place, gate_up; /* kept */
        struct slot wide, act, dweight, dlogits, workspace; /* temporary; wide: [rows*k,hidden], one use at a time */
    } slots;
};

void moe_plan(struct moe *m, struct stream *s, struct plan *p);
/* y = from + the rest; from is not y. */
void moe_forward(const struct moe *m, const struct pass *f, int layer, const void *x, const void *from, void *y);
void moe_backward(const struct moe *m, const struct pass *b, const void *x, const void *dy, void *dx); /* dx = */

/* One decoder layer; model.md 2.1. */
struct layer {
    int index, sparse;
    int indexes;                  /* runs its own indexer */
    int frozen;                   /* backward serves the indexer alone */
    enum keep keep;               /* what its forward leaves for its backward */
    const struct layer_weights *w;
    const struct model_config *c;
    glm52_dtype type;
    struct mla mla;
    struct indexer_part indexer;
    struct mlp mlp;
    struct moe moe;
    double *kl;                   /* device, fp64: sum of weighted kl of this layer */
    struct {
        struct slot input_rstd, u, middle, post_rstd, v; /* kept */
        struct slot dv, workspace;
    } slots;
};

void layer_plan(struct layer *m, struct stream *s, struct plan *p);
/* x [rows,hidden] -> y; `selected` is written by layers that index and read by the others. */
void layer_forward(const struct layer *m, const struct pass *f, const void *x, int32_t *selected, void *y);
/* Before its backward: makes again what was not kept. `selected` stands; y is written where the whole layer runs
 * again. */
void layer_restore(const struct layer *m, struct pass *b, const void *x, int32_t *selected, void *y);
/* dx holds the gradient of y and becomes that of x. */
void layer_backward(const struct layer *m, const struct pass *b, const void *x, const int32_t *selected, void *dx);

#endif
