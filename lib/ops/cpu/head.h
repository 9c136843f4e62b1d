/* What the operations of the head share. */
#ifndef GLM52_OPS_CPU_HEAD_H
#define GLM52_OPS_CPU_HEAD_H

#include "ops/cpu/cpu.h"
#include "ops/cpu/row.h"

/* Rows whose logits exist at a time. */
static inline int64_t head_chunk_rows(const struct head *h)
{
    /* 16 MB of logits, but enough rows that the weights are worth reading, and no more than products profit from. */
    enum { CHUNK_LOGITS = 1 << 22, FEWEST_ROWS = 32, MOST_ROWS = 512 };
    int64_t rows = CHUNK_LOGITS / h->vocabulary;

    rows = rows < FEWEST_ROWS ? FEWEST_ROWS : least(rows, MOST_ROWS);
    return least(rows, h->rows);
}

/* head_loss without being counted. */
void head_loss_run(struct stream *s, const struct head *h, const void *x, const void *w, const int32_t *label,
                   const float *weight, float *loss, float *hit, void *dx, void *dw, void *workspace);

#endif
