/* The parts of a layer: plan (declare what is kept and what is temporary), forward, backward. A part's slots belong to
 * one memory layout; the weights belong to the model. */
#ifndef GLM52_MODEL_PARTS_H
#define GLM52_MODEL_PARTS_H

#include "model/pass.h"

/* Multi-head latent attention over selected keys, absorbed form; model.md 2.2. */
struct mla {
    const struct mla_weights *w;
    const struct model_config *c;
    glm52_dtype type;
    struct {
        struct slot q_latent_raw, q_latent, q_rstd, q, kv_raw, kv_rstd, kv, absorbed, latent_out, lse, out; /* kept */
        struct slot workspace, dq, dabsorbed, dkv, dkv_cast, dkv_raw, dout, dlatent_out, dq_latent;        /* temporary */
    } slots;
};

void mla_plan(struct mla *m, struct stream *s, struct plan *p);
/* Latents and queries from the normed hidden u: everything before the selection. Leaves q_latent for the indexer. */
void mla_project(const struct mla *m, const struct pass *f, const void *u);
/* y += attention output, keys as selected [rows,index_topk]. */
void mla_attend(const struct mla *m, const struct pass *f, const int32_t *selected, void *y);
/* du overwritten. */
void mla_backward(const struct mla *m, const struct pass *b, const void *u, const int32_t *selected, const void *dy,
                  void *du);

/* Lightning indexer; model.md 2.3. */
struct indexer_part {
    const struct indexer_weights *w;
    const struct model_config *c;
    glm52_dtype type;
    struct {
        struct slot q, key_raw, key, statistics, weight, workspace;
    } slots;
};

void indexer_plan(struct indexer_part *m, struct stream *s, struct plan *p);
void indexer_forward(const struct indexer_part *m, const struct pass *f, int layer, const void *u, const void *q_latent,
                     int32_t *selected);

/* SwiGLU feed-forward; model.md 2.5. */
struct mlp {
    const struct mlp_weights *w;
    int64_t width;
    glm52_dtype type;
    struct {
        struct slot gate_up, act, dact, dgate_up;
    } slots;
};

void mlp_plan(struct mlp *m, struct plan *p);
void mlp_forward(const struct mlp *m, const struct pass *f, const void *x, void *y);                            /* y += */
void mlp_backward(const struct mlp *m, const struct pass *b, const void *x, const void *dy, void *dx, int add); /* dx (+)= */

/* Mixture of experts; model.md 2.6. */
struct moe {
    const struct moe_weights *w;
    const struct model_config *c;
    glm52_dtype type;
    struct mlp shared;
    struct {
        struct slot logits, chosen, weight, offsets, source, place, gate_up; /* kept */
        struct slot wide, act, dact, dgate_up, dweight, dlogits, workspace; /* temporary; wide: [rows*k,hidden], one use at a time */
    } slots;
};

void moe_plan(struct moe *m, struct stream *s, struct plan *p);
void moe_forward(const struct moe *m, const struct pass *f, int layer, const void *x, void *y); /* y += */
void moe_backward(const struct moe *m, const struct pass *b, const void *x, const void *dy, void *dx); /* dx = */

/* One decoder layer; model.md 2.1. */
struct layer {
    int index, sparse, full;
    const struct layer_weights *w;
    const struct model_config *c;
    glm52_dtype type;
    struct mla mla;
    struct indexer_part indexer;
    struct mlp mlp;
    struct moe moe;
    struct {
        struct slot input_rstd, u, middle, post_rstd, v; /* kept */
        struct slot dv, workspace;
    } slots;
};

void layer_plan(struct layer *m, struct stream *s, struct plan *p);
/* x [rows,hidden] -> y; `selected` is written by full layers and read by the others. */
void layer_forward(const struct layer *m, const struct pass *f, const void *x, int32_t *selected, void *y);
/* dx holds the gradient of y and becomes that of x. */
void layer_backward(const struct layer *m, const struct pass *b, const void *x, const int32_t *selected, void *dx);

#endif
