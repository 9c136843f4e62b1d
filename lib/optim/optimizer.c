#include "optim/optimizer.h"

#include <math.h>
#include <string.h>

#include "base/dtype.h"
#include "optim/moves.h"
#include "optim/schedule.h"

/* Of the rates, which lie before the first moments: a device may have no small pieces of memory. */
enum { RATE_BYTES = (PARTS * RATES * sizeof(float) + 255) / 256 * 256 };

static glm52_status take(struct optimizer *o, size_t bytes, void **out)
{
    struct stream *s = o->model->stream;

    TRY(s->ops->allocate(s, bytes, MEMORY_OPTIMIZER, out));
    s->ops->zero(s, *out, bytes);
    return GLM52_OK;
}

static size_t first_bytes(const struct optimizer *o)
{
    return RATE_BYTES + o->state_elements * dtype_size(o->moment_type);
}

static size_t second_bytes(const struct optimizer *o)
{
    return o->second_elements * dtype_size(o->moment_type);
}

static size_t master_bytes(const struct optimizer *o)
{
    return o->state_elements * sizeof(float);
}

static glm52_status take_memory(struct optimizer *o, int masters)
{
    void *memory;

    TRY(take(o, first_bytes(o), &memory));
    o->rates = memory;
    o->m = (unsigned char *)memory + RATE_BYTES;
    TRY(take(o, second_bytes(o), &memory));
    o->v = memory;
    if (masters && o->model->type != GLM52_DTYPE_F32) {
        TRY(take(o, master_bytes(o), &memory));
        o->master = memory;
    }
    for (uint32_t i = 0; i < o->moves; i++) {
        size_t bytes = o->move[i].rule == RULE_MUON
                           ? o->model->stream->ops->muon_bytes(o->model->stream, &o->move[i].muon)
                           : 0;
        if (bytes > o->workspace_bytes) o->workspace_bytes = bytes;
    }
    if (!o->workspace_bytes) return GLM52_OK;
    TRY(o->model->stream->ops->allocate(o->model->stream, o->workspace_bytes, MEMORY_WORKSPACE, &o->workspace));
    return GLM52_OK;
}

glm52_status optimizer_open(struct model *m, const struct config *config, struct optimizer *o)
{
    memset(o, 0, sizeof *o);
    o->model = m;
    o->config = config->optim;
    o->total_steps = config->train.steps;
    o->stage = m->stage;
    o->lr_override = -1;
    o->moment_type = config->precision.moments == PRECISION_BF16 ? GLM52_DTYPE_BF16 : GLM52_DTYPE_F32;
    glm52_status status = plan_moves(o, config);
    if (!status) status = take_memory(o, config->precision.masters);
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

    if (o->rates) s->ops->release(s, o->rates, first_bytes(o), MEMORY_OPTIMIZER);
    if (o->v) s->ops->release(s, o->v, second_bytes(o), MEMORY_OPTIMIZER);
    if (o->master) s->ops->release(s, o->master, master_bytes(o), MEMORY_OPTIMIZER);
    if (o->workspace) s->ops->release(s, o->workspace, o->workspace_bytes, MEMORY_WORKSPACE);
    host_free(s->host, o->placed, o->count * sizeof *o->placed, MEMORY_HOST);
    host_free(s->host, o->move, o->moves * sizeof *o->move, MEMORY_HOST);
    memset(o, 0, sizeof *o);
}

double optimizer_lr(const struct optimizer *o)
{
    return o->lr_override >= 0 ? o->lr_override
                               : schedule_lr(&o->config, o->total_steps, o->step - o->schedule_begin + 1);
}

/* Rates of every part: the learning rate is one, the age of the state differs. */
void optimizer_prepare(struct optimizer *o)
{
    struct stream *s = o->model->stream;
    double beta1 = (double)(float)o->config.beta1, beta2 = (double)(float)o->config.beta2;
    float rates[PARTS][RATES];

    for (int part = 0; part < PARTS; part++) {
        double t = (double)(o->updates[part] + 1);
        rates[part][RATE_LR] = (float)optimizer_lr(o);
        rates[part][RATE_CORRECTION1] = (float)(1 - pow(beta1, t));
        rates[part][RATE_CORRECTION2] = (float)(1 - pow(beta2, t));
    }
    s->ops->upload(s, o->rates, rates, sizeof rates);
}

static void apply(struct optimizer *o, const struct move *move, const float *coefficient)
{
    struct stream *s = o->model->stream;
    struct parameter *p = move->first;
    size_t size = dtype_size(o->moment_type);
    const float *rates = o->rates + p->part * RATES;
    const void *gradient = (const char *)p->gradient + move->from * dtype_size(p->gradient_type);
    void *m = o->m + move->state * size, *v = o->v + move->second * size;
    float *master = o->master ? o->master + move->state : NULL;
    unsigned char *value = p->value + move->from * dtype_size(p->type);

    if (move->rule == RULE_MUON)
        s->ops->muon(s, &move->muon, rates, coefficient, gradient, m, master, value, o->workspace);
    else
        s->ops->adamw(s, &move->adamw, rates, coefficient, gradient, m, v, master, value);
}

void optimizer_update(struct optimizer *o, const float *coefficient)
{
    struct stream *s = o->model->stream;

    for (uint32_t i = 0; i < o->moves; i++) {
        s->label = o->move[i].rule == RULE_MUON ? "optimizer.muon" : "optimizer.adamw";
        apply(o, &o->move[i], coefficient);
    }
}

void optimizer_count(struct optimizer *o, int made)
{
    int moved[PARTS] = {0};

    for (uint32_t i = 0; i < o->moves; i++) moved[o->move[i].first->part] = made;
    for (int part = 0; part < PARTS; part++) o->updates[part] += moved[part];
    o->step++;
}

void optimizer_resync(struct optimizer *o)
{
    struct stream *s = o->model->stream;

    if (!o->master) return;
    s->label = "optimizer";
    for (uint32_t i = 0; i < o->count; i++) {
        struct parameter *p = o->placed[i].parameter;
        s->ops->convert(s, (int64_t)p->count, p->type, p->value, GLM52_DTYPE_F32, o->master + o->placed[i].state);
    }
}

/* Both may hold their moments in another type. */
static void copy_moment(struct stream *s, const struct parameter *p, struct optimizer *to, unsigned char *into,
                        uint64_t at, const struct optimizer *from, const unsigned char *of, uint64_t from_at)
{
    s->ops->convert(s, (int64_t)p->count, from->moment_type, of + from_at * dtype_size(from->moment_type),
                    to->moment_type, into + at * dtype_size(to->moment_type));
}

void optimizer_adopt(struct optimizer *o, const struct optimizer *before)
{
    struct stream *s = o->model->stream;
    int continues[PARTS] = {0};

    o->step = before->step;
    s->label = "optimizer";
    for (uint32_t i = 0, j = 0; i < o->count; i++) { /* both lists are in table order */
        while (j < before->count && before->placed[j].parameter < o->placed[i].parameter) j++;
        if (j == before->count) break;
        const struct placed *to = &o->placed[i], *from = &before->placed[j];
        if (from->parameter != to->parameter || from->rule != to->rule) continue;
        copy_moment(s, to->parameter, o, o->m, to->state, before, before->m, from->state);
        if (to->has_second && from->has_second)
            copy_moment(s, to->parameter, o, o->v, to->second, before, before->v, from->second);
        if (o->master && before->master)
            s->ops->copy(s, o->master + to->state, before->master + from->state, to->parameter->count * sizeof(float));
        continues[to->parameter->part] = 1;
    }
    for (int part = 0; part < PARTS; part++) o->updates[part] = continues[part] ? before->updates[part] : 0;
}
