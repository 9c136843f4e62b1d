/* What forward and backward of dense attention share: the size of their tiles, and operands of one head. */
#ifndef GLM52_OPS_CPU_DENSE_ATTENTION_H
#define GLM52_OPS_CPU_DENSE_ATTENTION_H

#include "ops/cpu/cpu.h"
#include "ops/cpu/visible.h"

enum { ROWS = 128, KEYS = 256 }; /* of a tile: its logits stay in the second-level cache, BLAS runs near its rate */

/* Rows from `row` on of one head in an array of the call. */
static inline struct operand of_head(const struct dense_attention *a, const void *array, int64_t width, int64_t row,
                                     int64_t head)
{
    return operand_of_head(a->type, array, a->heads, width, row, head);
}

static inline struct operand in_tile(const float *tile)
{
    return (struct operand){tile, KEYS, 0, GLM52_DTYPE_F32};
}

#endif
