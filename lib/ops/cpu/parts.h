/* A row of RMSNorm and a head of RoPE, for operations that join them. What is read besides gain (x, and dy) is of type
 * `in`, which the shape's own type need not be. */
#ifndef GLM52_OPS_CPU_PARTS_H
#define GLM52_OPS_CPU_PARTS_H

#include "ops/ops.h"

/* Returns rstd. */
float rmsnorm_row(const struct norm *n, glm52_dtype in, const void *x, const void *gain, void *y, int64_t row);
/* dgain is the block's own. */
void rmsnorm_backward_row(const struct norm *n, glm52_dtype in, const void *x, const void *gain, float rstd,
                          const void *dy, void *dx, float *dgain, int64_t row);

/* Sums over rows go by blocks, whose number depends on that of the rows alone; each has [2, width] of the workspace. */
int64_t norm_blocks(int64_t rows);
void norm_add_blocks(struct stream *s, const struct norm *n, const float *partial, float *dgain, float *dbias);

void rope_head(const struct rope *r, glm52_dtype in, const float *table, const void *x, int64_t x_at, void *y,
               int64_t y_at);

#endif
