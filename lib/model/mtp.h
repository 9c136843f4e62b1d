/* Repeated multi-token prediction: one physical layer, run `depths` times; model.md 2.8, training.md 3. Depth d, row t:
 * the embedding of token t + 1 + d and the hidden state of depth d - 1 (the trunk's, after its
 * norm, at depth 0) predict token t + d + 2. */
#ifndef GLM52_MODEL_MTP_H
#define GLM52_MODEL_MTP_H

#include "model/parts.h"

struct mtp_depth {
    struct layer layer;
    struct slot embedded, embedded_rstd, hidden_rstd, joined, x, y, out_rstd; /* kept; joined: [rows,2*hidden] */
};

struct mtp {
    const struct config *config;
    const struct parameters *parameters;
    const struct mtp_weights *w;
    glm52_dtype type;
    int depths;
    struct mtp_depth depth[MTP_DEPTHS];
    struct slot out, dout;          /* kept, [depths,rows,hidden]: after shared_head.norm, and its gradient */
    struct slot selected;           /* kept, [depths,rows,index_topk], or of depth 0 alone where it is shared */
    struct slot djoined, workspace; /* temporary */
};

/* Builds the depths; `first` is a layer built like the trunk's, with the MTP layer's weights. */
void mtp_build(struct mtp *m, const struct config *config, const struct parameters *parameters,
               const struct layer *first);
void mtp_plan(struct mtp *m, struct stream *s, struct plan *p);
/* hidden: [rows,hidden] after the trunk's final norm. in: views of the depths. */
void mtp_forward(const struct mtp *m, struct pass *f, const struct input *in, const void *hidden);
/* From the gradients in `dout` of all depths; those of the trunk's hidden state are added to dhidden (NULL:
 * detached). */
void mtp_backward(const struct mtp *m, struct pass *b, const struct input *in, const void *hidden, void *dhidden);
void *mtp_out(const struct mtp *m, const struct pass *f, int depth);
void *mtp_dout(const struct mtp *m, const struct pass *f, int depth);

#endif
