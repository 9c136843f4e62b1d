/* The selection rule, for the operations that select. */
#ifndef GLM52_OPS_CPU_TOPK_H
#define GLM52_OPS_CPU_TOPK_H

#include <stdint.h>

/* scores[0 .. count) belong to keys first, first + 1, ...: writes the k best to selected, score descending then key
 * ascending, emitted ascending, -1 padded; returns how many there are. -inf and NaN are never selected. */
int32_t topk_row(const float *scores, int64_t count, int32_t first, int32_t k, int32_t *selected);
/* The same when all of first .. first + count - 1 are to be taken, count <= k. */
void topk_all(int64_t count, int32_t first, int32_t k, int32_t *selected);

#endif
