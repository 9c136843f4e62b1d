#include "train/graphs.h"

#include <string.h>

struct graph_entry {
    struct graph_shape shape;
    void *graph;        /* NULL: it ran once, and was not recorded */
    uint64_t used;      /* clock */
};

static size_t bytes_of(const struct graphs *g)
{
    return (size_t)g->capacity * sizeof *g->entry;
}

glm52_status graphs_open(struct stream *s, const struct config *config, struct graphs *g)
{
    *g = (struct graphs){.stream = s, .must = config->train.cuda_graph == CUDA_GRAPH_ON};
    if (config->train.cuda_graph == CUDA_GRAPH_OFF) return GLM52_OK;
    if (!s->ops->record) {
        if (!g->must) return GLM52_OK;
        fail(GLM52_E_UNSUPPORTED, "train.cuda_graph = on, but device %s records no launches", s->ops->name);
        fail_hint("use device cuda, or train.cuda_graph = auto");
        return fail_detail("key", "train.cuda_graph");
    }
    /* A shape may begin a step or go on with it; and there is the update. */
    g->capacity = (int)config->train.graph_shapes * (config->train.microbatches > 1 ? 2 : 1) + 1;
    g->entry = host_alloc(s->host, bytes_of(g), MEMORY_HOST);
    return g->entry ? GLM52_OK : GLM52_E_NOMEM;
}

void graphs_close(struct graphs *g)
{
    if (!g->entry) return;
    for (int i = 0; i < g->count; i++)
        if (g->entry[i].graph) g->stream->ops->forget(g->stream, g->entry[i].graph);
    host_free(g->stream->host, g->entry, bytes_of(g), MEMORY_HOST);
    memset(g, 0, sizeof *g);
}

static int same(const struct graph_shape *a, const struct graph_shape *b)
{
    return a->rows == b->rows && a->sequences == b->sequences && a->packs == b->packs && a->first == b->first;
}

/* Those that were never recorded go first: a shape that comes once must not cost one that returns. */
static int goes_before(const struct graph_entry *a, const struct graph_entry *b)
{
    if (!a->graph != !b->graph) return !a->graph;
    return a->used < b->used;
}

static struct graph_entry *find(struct graphs *g, const struct graph_shape *shape, int *is_new)
{
    struct graph_entry *e = NULL;

    *is_new = 0;
    for (int i = 0; i < g->count; i++)
        if (same(&g->entry[i].shape, shape)) return &g->entry[i];
    *is_new = 1;
    if (g->count < g->capacity) {
        e = &g->entry[g->count++];
    } else {
        e = g->entry;
        for (int i = 1; i < g->count; i++)
            if (goes_before(&g->entry[i], e)) e = &g->entry[i];
        if (e->graph) g->stream->ops->forget(g->stream, e->graph);
    }
    *e = (struct graph_entry){.shape = *shape};
    return e;
}

/* Nothing ran where this fails. */
static glm52_status record(struct graphs *g, struct graph_entry *e, void (*work)(void *), void *user)
{
    TRY(g->stream->ops->record(g->stream));
    work(user);
    TRY(g->stream->ops->recorded(g->stream, &e->graph));
    g->captures++;
    return GLM52_OK;
}

glm52_status graphs_run(struct graphs *g, const struct graph_shape *shape, void (*work)(void *), void *user)
{
    int is_new;

    if (!g->entry || g->stream->tally) {
        work(user);
        return GLM52_OK;
    }
    struct graph_entry *e = find(g, shape, &is_new);
    e->used = ++g->clock;
    if (is_new) {
        work(user);
        return GLM52_OK;
    }
    glm52_status status = e->graph ? GLM52_OK : record(g, e, work, user);
    if (status && g->must) return fail_hint("train.cuda_graph = auto goes on without recording");
    if (status) {
        host_log(g->stream->host, GLM52_LOG_NOTICE, "launches are not recorded any more: %s",
                 glm52_error_message(glm52_error_last()));
        graphs_close(g);
        work(user);
        return GLM52_OK;
    }
    g->stream->ops->replay(g->stream, e->graph);
    g->replays++;
    return GLM52_OK;
}
