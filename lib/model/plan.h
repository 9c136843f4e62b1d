/* Where a pass keeps its arrays. The parts declare them in the order in which they will run, before the first step;
 * afterwards addresses do not move.
 *
 * Three regions: kept (from forward to backward), replayed (what backward makes again, or what a layer needs between
 * its own forward and backward; one layer's worth), temporary (dead at the end of the part). */
#ifndef GLM52_MODEL_PLAN_H
#define GLM52_MODEL_PLAN_H

#include "base/dtype.h"

enum plan_region { REGION_KEPT, REGION_REPLAYED, REGION_TEMPORARY, REGIONS };

/* What survives from a layer's forward to its backward: all, all but what is cheap to make again, its input,
 * nothing. */
enum keep { KEEP_ALL, KEEP_DEAR, KEEP_INPUTS, KEEP_NOTHING };

struct slot {
    enum plan_region region;
    uint64_t offset;
};

struct plan {
    int64_t rows;               /* capacity: tokens of a pack */
    enum keep keep;
    uint64_t used[REGIONS], peak[REGIONS]; /* bytes */
};

/* [rows, columns] of the type. */
void plan_keep(struct plan *p, struct slot *slot, glm52_dtype type, int64_t rows, int64_t columns);
/* Kept from the layer's forward to its backward. */
void plan_save(struct plan *p, struct slot *slot, glm52_dtype type, int64_t rows, int64_t columns);
/* Likewise, but cheap to make again: layer_restore() does, unless all is kept. */
void plan_renew(struct plan *p, struct slot *slot, glm52_dtype type, int64_t rows, int64_t columns);
void plan_temp(struct plan *p, struct slot *slot, glm52_dtype type, int64_t rows, int64_t columns);
void plan_temp_bytes(struct plan *p, struct slot *slot, size_t bytes);
/* Temporaries declared after the mark end at the release. */
uint64_t plan_mark(const struct plan *p);
void plan_release(struct plan *p, uint64_t mark);
/* Before each layer: what is not kept may overlay the previous layer's. */
void plan_next_layer(struct plan *p);

#endif
