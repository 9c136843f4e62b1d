/* What a running pass carries from part to part, and the two operations that every part is made of. */
#ifndef GLM52_MODEL_PASS_H
#define GLM52_MODEL_PASS_H

#include "model/input.h"
#include "model/tap.h"

struct pass {
    const struct ops *ops;
    struct stream *stream;
    const struct model *model;
    const struct input *in;
    int64_t rows;
    unsigned char *base[REGIONS];
    int depth;              /* MTP depth; -1: the trunk */
    int microbatches;       /* of the step; this pass is one of them */
    int training;           /* a backward follows: experts are counted */
    unsigned char *written; /* [parameters] has a gradient of this step; NULL: all have */
    int replay;             /* 1 while a recomputed layer's forward runs again: selections stand */
    const struct tap *tap;  /* NULL: nobody asks */
};

static inline void *at(const struct pass *f, struct slot slot)
{
    return f->base[slot.region] + slot.offset;
}

/* Says which part asks, by a literal; the parts of MTP depths have names of their own. */
#define LABEL(f, text) ((f)->stream->label = (f)->depth < 0 ? text : "mtp." text)

/* Is somebody interested? Values of MTP depth d are called mtp_NAME.d, those of layer i of the trunk NAME.i. */
int tapped(const struct pass *f, const char *name, int layer);
void tap(const struct pass *f, const char *name, int layer, glm52_dtype type, int64_t columns, const void *values);

/* The model's guide: has it given these integers? If not, it is shown what the pass made. Replayed layers ask too. */
int given(const struct pass *f, const char *name, int layer, int64_t columns, int32_t *values);
void made(const struct pass *f, const char *name, int layer, int64_t columns, const int32_t *values);

/* Whether a product is added to the gradients of w and the count - 1 parameters behind it: 0 once a step, where it
 * overwrites them. */
int gradient_add(const struct pass *b, const struct parameter *w, int count);
/* The gradient of w for what can only add, cleared where this step has not added to it yet; NULL if it has none. */
void *gradient_sum(const struct pass *b, const struct parameter *w);
/* After the step's first backward: gradients of parameters that it does not reach are 0. */
void gradient_clear_rest(const struct pass *b);

/* y[rows,out] = from + x[rows,in] W^T, W = [out,in]; from may be y, or NULL for nothing; all contiguous. */
void linear_forward(const struct pass *f, const struct parameter *w, const void *x, const void *from, void *y);
/* y = x W^T, left in fp32. */
void linear_forward_float(const struct pass *f, const struct parameter *w, const void *x, float *y);
/* dx[rows,in] (+)= dy[rows,out] W; dW (+)= dy^T x, as gradient_add() has it. */
void linear_backward(const struct pass *f, const struct parameter *w, const void *x, const void *dy, void *dx, int add);
/* dx alone. */
void linear_backward_rows(const struct pass *f, const struct parameter *w, const void *dy, void *dx, int add);
/* dW (+)= dy^T x alone. */
void linear_gradient(const struct pass *f, const struct parameter *w, const void *x, const void *dy);
/* The same for W and the `more` parameters that follow it in memory, as one matrix of `out` rows. */
void linear_forward_wide(const struct pass *f, const struct parameter *w, int64_t out, const void *x, const void *from,
                         void *y);
void linear_backward_wide(const struct pass *f, const struct parameter *w, int64_t out, const void *x, const void *dy,
                          void *dx, int add);

/* RMSNorm over rows as wide as the gain; rstd is kept for backward. */
void norm_forward(const struct pass *f, const struct parameter *gain, double epsilon, const void *x,
                  void *y, float *rstd);
void norm_backward(const struct pass *f, const struct parameter *gain, double epsilon, const void *x,
                   const float *rstd, const void *dy, void *dx, int add, void *workspace);
/* Workspace of norm_backward for rows of that width. */
size_t norm_backward_bytes(struct stream *s, int64_t rows, int64_t width);

#endif
