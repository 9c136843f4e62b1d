/* The second half of a step: what is known of its gradients, and the update that follows from it. */
#include <math.h>
#include <string.h>

#include "base/dtype.h"
#include "train/step.h"

/* ---- gradient norms ---- */

static enum group group_of(const struct parameter *p)
{
    if (p->part == PART_MTP || p->part == PART_MTP_INDEXER) return GROUP_MTP;
    if (p->part == PART_INDEXER) return GROUP_INDEXER;
    if (p->kind == KIND_EMBEDDING) return GROUP_EMBEDDING;
    if (p->kind == KIND_HEAD) return GROUP_HEAD;
    if (p->kind == KIND_NORM) return GROUP_NORMS;
    if (strstr(p->name, "self_attn.")) return GROUP_ATTENTION;
    if (strstr(p->name, "mlp.gate.weight")) return GROUP_ROUTER;
    return strstr(p->name, "experts") ? GROUP_EXPERTS : GROUP_MLP;
}

/* Neighbours in memory of one group are summed in one call. */
static void sum_squares(struct step *s)
{
    const struct ops *ops = s->model->stream->ops;
    struct stream *stream = s->model->stream;
    struct parameters *t = &s->model->parameters;
    double *squares = s->verdict->squares; /* an address on the device */

    ops->zero(stream, squares, (GROUPS + 1) * sizeof *squares);
    for (uint32_t i = 0, next; i < t->count; i = next) {
        const struct parameter *first = &t->at[i];
        uint64_t count = first->count, size = dtype_size(first->gradient_type);
        for (next = i + 1; next < t->count && t->at[next].trained == first->trained &&
                           t->at[next].gradient_type == first->gradient_type &&
                           t->at[next].gradient_offset == first->gradient_offset + count * size &&
                           group_of(&t->at[next]) == group_of(first);
             next++)
            count += t->at[next].count;
        if (first->trained)
            ops->sum_squares(stream, (int64_t)count, first->gradient_type, first->gradient, squares + group_of(first),
                             s->workspace);
    }
    for (int i = 0; i < GROUPS; i++) ops->add(stream, 1, GLM52_DTYPE_F64, squares + i, squares + GROUPS);
}

void step_clip(struct step *s)
{
    struct stream *stream = s->model->stream;
    struct verdict *v = s->verdict;

    stream->label = "clip";
    sum_squares(s);
    stream->ops->clip(stream, v->squares + GROUPS, (float)s->clip, &v->norm, &v->coefficient);
}

void step_read_verdict(struct step *s, struct verdict *v)
{
    struct stream *stream = s->model->stream;

    stream->ops->download(stream, v, s->verdict, sizeof *v);
    for (int i = 0; i < GROUPS; i++) s->group_norm[i] = sqrt(v->squares[i]);
    s->metric[METRIC_GRAD_NORM] = sqrt(v->squares[GROUPS]);
}

/* ---- the update ---- */

/* The sums that make up METRIC_LOSS, in the order in which read_sums() adds them. */
static struct guard guard_of(const struct step *s)
{
    const struct sums *at = &s->network.sums;
    int32_t depths = s->network.mtp.depths, indexers = s->network.indexers;

    if (s->model->config.train.train_only == TRAIN_INDEXER)
        return (struct guard){.parts = 1, .first = {at->kl}, .count = {indexers}, .spike = s->spike};
    return (struct guard){.parts = 4, .first = {at->ce, at->mtp, at->kl, at->auxiliary},
                          .count = {1, depths, indexers, 1}, .spike = s->spike};
}

/* Launches alone: whether anything moves is decided on the device. */
static void update(void *user)
{
    struct step *s = user;
    struct stream *stream = s->model->stream;
    struct verdict *v = s->verdict;
    struct guard guard = guard_of(s);

    step_clip(s);
    stream->ops->guard(stream, &guard, s->network.sum, &v->norm, &v->mean_loss, &v->coefficient);
    optimizer_update(s->optimizer, &v->coefficient);
    network_balance(&s->network, &v->coefficient);
}

glm52_status step_update(struct step *s)
{
    struct stream *stream = s->model->stream;

    optimizer_prepare(s->optimizer);
    stream->ops->upload(stream, &s->verdict->mean_loss, &s->mean_loss, sizeof s->mean_loss);
    TRY(graphs_run(&s->graphs, &(struct graph_shape){0}, update, s));
    glm52_status status = stream->ops->synchronize(stream);
    if (status) fail_detail("state", "lost");
    return status;
}

void step_count(struct step *s, const struct verdict *v)
{
    int made = v->coefficient >= 0;

    optimizer_count(s->optimizer, made);
    if (made) {
        s->mean_loss = v->mean_loss;
        return;
    }
    s->metric[METRIC_SKIPPED]++;
    host_log(s->model->host, GLM52_LOG_WARNING, "step %lld skipped: loss %g, gradient norm %g",
             (long long)s->optimizer->step, s->metric[METRIC_LOSS], (double)v->norm);
}
