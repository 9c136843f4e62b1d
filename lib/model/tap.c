#include "model/tap.h"

#include <stdio.h>

#include "model/pass.h"

static int name_of(const struct pass *f, const char *name, int layer, char full[48])
{
    snprintf(full, 48, "%s%s", f->depth < 0 ? "" : "mtp_", name);
    return f->depth < 0 ? layer : f->depth;
}

int tapped(const struct pass *f, const char *name, int layer)
{
    char full[48];

    if (!f->tap || f->replay) return 0;
    layer = name_of(f, name, layer, full);
    return f->tap->wants(f->tap->user, full, layer);
}

int given(const struct pass *f, const char *name, int layer, int64_t columns, int32_t *values)
{
    const struct guide *g = f->model->guide;
    char full[48];

    if (!g) return 0;
    layer = name_of(f, name, layer, full);
    return g->give(g->user, full, layer, f->rows, columns, values);
}

void made(const struct pass *f, const char *name, int layer, int64_t columns, const int32_t *values)
{
    const struct guide *g = f->model->guide;
    char full[48];

    if (!g) return;
    layer = name_of(f, name, layer, full);
    g->note(g->user, full, layer, f->rows, columns, values);
}

void tap(const struct pass *f, const char *name, int layer, glm52_dtype type, int64_t columns, const void *values)
{
    char full[48];

    if (!tapped(f, name, layer)) return;
    layer = name_of(f, name, layer, full);
    f->tap->take(f->tap->user, full, layer, type, f->rows, columns, values);
}
