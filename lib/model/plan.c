#include "model/plan.h"

enum { ALIGNMENT = 256 };

static void place(struct plan *p, struct slot *slot, enum plan_region region, uint64_t bytes)
{
    slot->region = region;
    slot->offset = p->used[region];
    p->used[region] += (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (p->used[region] > p->peak[region]) p->peak[region] = p->used[region];
}

static uint64_t array_bytes(glm52_dtype type, int64_t rows, int64_t columns)
{
    return (uint64_t)rows * (uint64_t)columns * dtype_size(type);
}

void plan_keep(struct plan *p, struct slot *slot, glm52_dtype type, int64_t rows, int64_t columns)
{
    place(p, slot, REGION_KEPT, array_bytes(type, rows, columns));
}

void plan_save(struct plan *p, struct slot *slot, glm52_dtype type, int64_t rows, int64_t columns)
{
    place(p, slot, p->keep <= KEEP_DEAR ? REGION_KEPT : REGION_REPLAYED, array_bytes(type, rows, columns));
}

void plan_renew(struct plan *p, struct slot *slot, glm52_dtype type, int64_t rows, int64_t columns)
{
    place(p, slot, p->keep == KEEP_ALL ? REGION_KEPT : REGION_REPLAYED, array_bytes(type, rows, columns));
}

void plan_temp(struct plan *p, struct slot *slot, glm52_dtype type, int64_t rows, int64_t columns)
{
    place(p, slot, REGION_TEMPORARY, array_bytes(type, rows, columns));
}

void plan_temp_bytes(struct plan *p, struct slot *slot, size_t bytes)
{
    place(p, slot, REGION_TEMPORARY, bytes);
}

uint64_t plan_mark(const struct plan *p)
{
    return p->used[REGION_TEMPORARY];
}

void plan_release(struct plan *p, uint64_t mark)
{
    p->used[REGION_TEMPORARY] = mark;
}

void plan_next_layer(struct plan *p)
{
    p->used[REGION_REPLAYED] = 0;
}
