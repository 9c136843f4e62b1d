/* What forward and backward of dense attention share: the size of their tiles, and operands of one head. */
#ifndef GLM52_OPS_CPU_DENSE_ATTENTION_H
#define GLM52_OPS_CPU_DENSE_ATTENTION_H

#include "ops/cpu/cpu.h"
#include "ops/cpu/visible.h"

enum { ROWS = 128, KEYS = 256 }; /* of a tile: its logits stay in the second-level cache, BLAS runs near its rate */

/* Rows from `row` on of one head's columns in an array [rows, heads, width] of the call's type. */
static inline struct operand of_head(const struct dense_attention *a, const void *array, int64_t width, int64_t row,
                                     int64_t head)
{
    int64_t at = (row * a->heads + head) * width;

    return (struct operand){(const char *)array + at * (int64_t)dtype_size(a->type), a->heads * width, 0, a->type};
}

static inline struct operand in_tile(const float *tile)
{
    return (struct operand){tile, KEYS, 0, GLM52_DTYPE_F32};
}

static inline struct operand transposed(struct operand o)
{
    o.transposed = !o.transposed;
    return o;
}

#endif
