/* Where a step went wrong: the passes run once more, forward only, with an eye on every layer. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "train/step.h"

struct watch {
    struct stream *stream;
    float *values;              /* host, of one layer's output */
    int64_t elements;
    char first[48];             /* name of the first output that is not finite */
};

static int wants(void *user, const char *name, int layer)
{
    struct watch *w = user;

    (void)layer;
    return !w->first[0] && (!strcmp(name, "hidden") || !strcmp(name, "mtp_hidden"));
}

static void look(void *user, const char *name, int layer, glm52_dtype type, int64_t rows, int64_t columns,
                 const void *values)
{
    struct watch *w = user;
    int64_t count = rows * columns;

    w->stream->ops->download(w->stream, w->values, values, (size_t)count * dtype_size(type));
    for (int64_t i = 0; i < count && !w->first[0]; i++) {
        float x = type == GLM52_DTYPE_BF16 ? bf16_to_f32(((const uint16_t *)(const void *)w->values)[i]) : w->values[i];
        if (!isfinite(x))
            snprintf(w->first, sizeof w->first, "%s %d", strcmp(name, "hidden") ? "MTP depth" : "layer", layer);
    }
}

/* The first layer, in the order of forward, whose output is not finite. */
static void find_layer(struct step *s, const struct pack *const *packs, uint32_t count, char name[48])
{
    struct host *host = s->model->host;
    struct watch w = {.stream = s->model->stream, .elements = s->network.rows * s->model->config.model.hidden_size};
    const struct tap tap = {.user = &w, .wants = wants, .take = look};
    size_t bytes = (size_t)w.elements * sizeof *w.values;

    name[0] = 0;
    if (!(w.values = host_alloc(host, bytes, MEMORY_HOST))) return;
    for (uint32_t i = 0; i < count && !w.first[0]; i++)
        network_run(&s->network, packs[i], &(struct input_scale){0}, 0, &tap);
    memcpy(name, w.first, sizeof w.first);
    host_free(host, w.values, bytes, MEMORY_HOST);
}

/* The first parameter, in the order of backward, whose gradient is not finite; NULL if all are. */
static const struct parameter *find_parameter(struct step *s)
{
    struct stream *stream = s->model->stream;
    struct parameters *t = &s->model->parameters;
    double squares, *sum = s->verdict->squares; /* of the device */

    for (uint32_t i = t->count; i-- > 0;) {
        if (!t->at[i].trained) continue;
        stream->ops->zero(stream, sum, sizeof squares);
        stream->ops->sum_squares(stream, (int64_t)t->at[i].count, t->at[i].gradient_type, t->at[i].gradient, sum,
                                 s->workspace);
        if (stream->ops->synchronize(stream)) return NULL;
        stream->ops->download(stream, &squares, sum, sizeof squares);
        if (!isfinite(squares)) return &t->at[i];
    }
    return NULL;
}

glm52_status step_not_finite(struct step *s, const struct pack *const *packs, uint32_t count)
{
    double loss = s->metric[METRIC_LOSS], norm = s->metric[METRIC_GRAD_NORM];
    char layer[48];

    find_layer(s, packs, count, layer);
    const struct parameter *p = layer[0] ? NULL : find_parameter(s);
    fail(GLM52_E_NUMERIC, "step %lld: loss %g, gradient norm %g: not finite, first in %s%s; nothing was updated",
         (long long)s->optimizer->step + 1, loss, norm, p ? "the gradient of " : "",
         layer[0] ? layer : p ? p->name : "the loss");
    if (layer[0]) fail_detail("layer", "%s", layer);
    if (p) fail_detail("tensor", "%s", p->name);
    return fail_hint(
        "lower optim.lr, check the data, or resume from the last saved state; train.not_finite = skip goes on");
}
