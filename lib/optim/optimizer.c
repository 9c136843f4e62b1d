#include "optim/optimizer.h"

#include <math.h>
#include <string.h>

#include "base/dtype.h"
#include "optim/schedule.h"

/* p lies right behind the span and is treated alike. */
static int continues(const struct span *s, const struct parameter *p)
{
    return s->decays == parameter_decays(p) && s->first->type == p->type &&
           s->first->gradient_offset + s->elements == p->gradient_offset &&
           s->first->offset + s->elements * dtype_size(p->type) == p->offset;
}

/* Counts the spans, and fills `span` if it is not NULL. */
static uint32_t find_spans(struct parameters *t, struct span *span, uint64_t *elements)
{
    struct span current = {0};
    uint32_t spans = 0;

    *elements = 0;
    for (uint32_t i = 0; i < t->count; i++) {
        struct parameter *p = &t->at[i];
        if (!p->trained) continue;
        if (!current.first || !continues(&current, p)) {
            current = (struct span){.first = p, .decays = parameter_decays(p), .state = *elements};
            spans++;
        }
        current.parameters++;
        current.elements += p->count;
        *elements += p->count;
        if (span) span[spans - 1] = current;
    }
    return spans;
}

static glm52_status take(struct optimizer *o, uint64_t elements, float **out)
{
    struct stream *s = o->model->stream;
    void *memory;

    TRY(s->ops->allocate(s, elements * sizeof(float), MEMORY_OPTIMIZER, &memory));
    *out = memory;
    s->ops->zero(s, memory, elements * sizeof(float));
    return GLM52_OK;
}

glm52_status optimizer_open(struct model *m, const struct config *config, struct optimizer *o)
{
    memset(o, 0, sizeof *o);
    o->model = m;
    o->config = config->optim;
    o->total_steps = config->train.steps;
    o->lr_override = -1;
    o->spans = find_spans(&m->parameters, NULL, &o->state_elements);
    o->span = host_alloc(m->host, o->spans * sizeof *o->span, MEMORY_HOST);
    glm52_status status = o->span ? GLM52_OK : GLM52_E_NOMEM;
    if (!status) find_spans(&m->parameters, o->span, &o->state_elements);
    if (!status) status = take(o, o->state_elements, &o->m);
    if (!status) status = take(o, o->state_elements, &o->v);
    if (!status && m->type != GLM52_DTYPE_F32) status = take(o, o->state_elements, &o->master);
    if (!status) status = take(o, RATES, &o->rates);
    if (status)
        optimizer_close(o);
    else
        optimizer_resync(o);
    return status;
}

void optimizer_close(struct optimizer *o)
{
    if (!o->model) return;
    struct stream *s = o->model->stream;
    size_t bytes = o->state_elements * sizeof(float);

    if (o->m) s->ops->release(s, o->m, bytes, MEMORY_OPTIMIZER);
    if (o->v) s->ops->release(s, o->v, bytes, MEMORY_OPTIMIZER);
    if (o->master) s->ops->release(s, o->master, bytes, MEMORY_OPTIMIZER);
    if (o->rates) s->ops->release(s, o->rates, RATES * sizeof(float), MEMORY_OPTIMIZER);
    if (o->span) host_free(s->host, o->span, o->spans * sizeof *o->span, MEMORY_HOST);
    memset(o, 0, sizeof *o);
}

double optimizer_lr(const struct optimizer *o)
{
    return o->lr_override >= 0 ? o->lr_override : schedule_lr(&o->config, o->total_steps, o->step + 1);
}

void optimizer_update(struct optimizer *o, const float *coefficient)
{
    struct stream *s = o->model->stream;
    double t = (double)(o->step + 1);
    float rates[RATES] = {(float)optimizer_lr(o), (float)(1 - pow(o->config.beta1, t)), (float)(1 - pow(o->config.beta2, t))};

    s->label = "optimizer";
    s->ops->upload(s, o->rates, rates, sizeof rates);
    for (uint32_t i = 0; i < o->spans; i++) {
        const struct span *span = &o->span[i];
        struct adamw a = {.count = (int64_t)span->elements, .beta1 = (float)o->config.beta1, .beta2 = (float)o->config.beta2,
                          .epsilon = (float)o->config.epsilon, .decay = span->decays ? (float)o->config.weight_decay : 0,
                          .type = span->first->type};
        s->ops->adamw(s, &a, o->rates, coefficient, span->first->gradient, o->m + span->state, o->v + span->state,
                      o->master ? o->master + span->state : NULL, span->first->value);
    }
    o->step++;
}

void optimizer_resync(struct optimizer *o)
{
    struct stream *s = o->model->stream;

    if (!o->master) return;
    s->label = "optimizer";
    for (uint32_t i = 0; i < o->spans; i++)
        s->ops->convert(s, (int64_t)o->span[i].elements, o->span[i].first->type, o->span[i].first->value, GLM52_DTYPE_F32,
                        o->master + o->span[i].state);
}
