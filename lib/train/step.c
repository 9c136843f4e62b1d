#include "train/step.h"

#include <math.h>
#include <string.h>
#include <time.h>

#include "base/text.h"

enum { TOTAL_LOSS, TOTAL_SQUARES, TOTALS };
enum { SCALAR_NORM, SCALAR_COEFFICIENT, SCALARS };

const char *const metric_name[METRICS] = {"step",  "loss",              "grad_norm", "lr", "tokens", "tokens_per_second",
                                          "seconds", "held_out_loss", "peak_memory"};

static double now(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static glm52_status take(struct step *s, size_t bytes, void **out)
{
    struct stream *stream = s->model->stream;

    return stream->ops->allocate(stream, bytes, MEMORY_WORKSPACE, out);
}

glm52_status step_open(struct model *m, struct optimizer *o, const struct config *config, struct step *s)
{
    void *totals = NULL, *scalars = NULL;
    enum keep keep = !o ? KEEP_NOTHING : config->train.recompute == RECOMPUTE_LAYERS ? KEEP_INPUTS : KEEP_ALL;

    memset(s, 0, sizeof *s);
    s->model = m;
    s->microbatches = config->train.microbatches;
    s->clip = config->train.clip;
    comm_open_single(&s->comm);
    glm52_status status = o ? model_hold_gradients(m) : GLM52_OK;
    if (!status) {
        s->optimizer = o;
        status = network_open(m, config->train.microbatch_tokens, keep, &s->network);
    }
    if (!status) status = take(s, TOTALS * sizeof *s->totals, &totals);
    s->totals = totals;
    if (!status) status = take(s, SCALARS * sizeof *s->scalars, &scalars);
    s->scalars = scalars;
    if (!status && o) {
        s->workspace_bytes = m->stream->ops->sum_bytes(m->stream, (int64_t)m->parameters.gradient_elements);
        status = take(s, s->workspace_bytes, &s->workspace);
    }
    if (!status && o && config->out[0]) {
        struct text path;
        text_init(&path, m->host);
        text_add(&path, "%s/metrics.jsonl", config->out);
        status = text_status(&path);
        if (!status && !(s->log_path = host_strdup(m->host, path.at))) status = GLM52_E_NOMEM;
        text_free(&path);
    }
    if (status) step_close(s);
    return status;
}

void step_close(struct step *s)
{
    if (!s->model) return;
    struct stream *stream = s->model->stream;

    metrics_log_close(&s->log);
    host_strfree(s->model->host, s->log_path);
    if (s->workspace) stream->ops->release(stream, s->workspace, s->workspace_bytes, MEMORY_WORKSPACE);
    if (s->scalars) stream->ops->release(stream, s->scalars, SCALARS * sizeof *s->scalars, MEMORY_WORKSPACE);
    if (s->totals) stream->ops->release(stream, s->totals, TOTALS * sizeof *s->totals, MEMORY_WORKSPACE);
    network_close(&s->network);
    if (s->optimizer) model_release_gradients(s->model);
    memset(s, 0, sizeof *s);
}

/* Everything that can be wrong with the packs, before anything runs. *weight: of all labelled tokens. */
static glm52_status check_packs(const struct step *s, const struct pack *const *packs, uint32_t count, double *weight,
                                int64_t *tokens)
{
    *weight = 0;
    *tokens = 0;
    for (uint32_t i = 0; i < count; i++) {
        if (pack_validate(packs[i], s->model->config.model.vocab_size)) return fail_prefix("microbatch %u", i);
        if (packs[i]->rows > s->network.rows) {
            fail(GLM52_E_INVALID, "microbatch %u has %lld tokens, train.microbatch_tokens = %lld", i,
                 (long long)packs[i]->rows, (long long)s->network.rows);
            return fail_hint("raise train.microbatch_tokens, or split the batch");
        }
        *weight += pack_loss_weight(packs[i]);
        *tokens += packs[i]->rows;
    }
    if (*weight > 0) return GLM52_OK;
    fail(GLM52_E_INVALID, "no token of the %u microbatches has a label with a positive loss_mask", count);
    return fail_hint("give documents of at least two tokens, or check labels and loss_mask");
}

static glm52_status run_packs(struct step *s, const struct pack *const *packs, uint32_t count, double weight, int backward)
{
    struct stream *stream = s->model->stream;

    stream->ops->zero(stream, s->totals, TOTALS * sizeof *s->totals);
    for (uint32_t i = 0; i < count; i++) {
        TRY(host_poll(s->model->host));
        network_run(&s->network, packs[i], 1 / weight, backward, NULL, s->totals + TOTAL_LOSS);
    }
    s->comm.all_reduce_sum(&s->comm, stream, 1, GLM52_DTYPE_F64, s->totals + TOTAL_LOSS);
    return GLM52_OK;
}

static glm52_status read_loss(struct step *s, double *loss)
{
    struct stream *stream = s->model->stream;

    TRY(stream->ops->synchronize(stream));
    stream->ops->download(stream, loss, s->totals + TOTAL_LOSS, sizeof *loss);
    return GLM52_OK;
}

static glm52_status require_optimizer(const struct step *s, uint32_t count)
{
    if (!s->optimizer) {
        fail(GLM52_E_STATE, "this step was created without an optimizer: it can only evaluate");
        return fail_hint("create the step with an optimizer");
    }
    if (count >= 1 && count <= s->microbatches) return GLM52_OK;
    fail(GLM52_E_INVALID, "%u microbatches given, train.microbatches = %lld", count, (long long)s->microbatches);
    return fail_hint("give 1 to %lld batches", (long long)s->microbatches);
}

/* Gradients of the mean loss, summed over ranks, in the parameters' gradients. */
static glm52_status accumulate(struct step *s, const struct pack *const *packs, uint32_t count, int64_t *tokens)
{
    struct model *m = s->model;
    double weight;

    TRY(require_optimizer(s, count));
    TRY(check_packs(s, packs, count, &weight, tokens));
    m->stream->label = "gradients";
    m->stream->ops->zero(m->stream, m->gradients, m->parameters.gradient_elements * sizeof(float));
    TRY(run_packs(s, packs, count, weight, 1));
    s->comm.all_reduce_sum(&s->comm, m->stream, (int64_t)m->parameters.gradient_elements, GLM52_DTYPE_F32, m->gradients);
    return GLM52_OK;
}

glm52_status step_gradients(struct step *s, const struct pack *const *packs, uint32_t count)
{
    int64_t tokens;

    TRY(accumulate(s, packs, count, &tokens));
    return read_loss(s, &s->metric[METRIC_LOSS]);
}

static void clip_gradients(struct step *s)
{
    struct model *m = s->model;
    const struct ops *ops = m->stream->ops;

    m->stream->label = "clip";
    ops->sum_squares(m->stream, (int64_t)m->parameters.gradient_elements, m->gradients, s->totals + TOTAL_SQUARES,
                     s->workspace);
    ops->clip(m->stream, s->totals + TOTAL_SQUARES, (float)s->clip, s->scalars + SCALAR_NORM,
              s->scalars + SCALAR_COEFFICIENT);
}

static glm52_status not_finite(const struct step *s, double loss, float norm)
{
    fail(GLM52_E_NUMERIC, "step %lld: loss %g, gradient norm %g: not finite; nothing was updated",
         (long long)s->optimizer->step + 1, loss, (double)norm);
    return fail_hint("lower optim.lr, check the data, or resume from the last saved state");
}

/* The first line opens the file: by then a resumed run knows where it goes on. */
static glm52_status write_log(struct step *s, const char *const *names, const double *values, size_t count)
{
    if (!s->log_path) return GLM52_OK;
    if (!s->log.file) {
        int64_t before = s->optimizer->step - (strcmp(names[count - 1], "held_out_loss") ? 1 : 0);
        TRY(metrics_log_open(&s->log, s->model->host, s->log_path, (uint64_t)before));
    }
    return metrics_log_write(&s->log, names, values, count);
}

static glm52_status report(struct step *s, int64_t tokens, double seconds, double lr, double loss, float norm)
{
    double *metric = s->metric;

    metric[METRIC_STEP] = (double)s->optimizer->step;
    metric[METRIC_LOSS] = loss;
    metric[METRIC_GRAD_NORM] = (double)norm;
    metric[METRIC_LR] = lr;
    metric[METRIC_TOKENS] = (double)tokens;
    metric[METRIC_SECONDS] = seconds;
    metric[METRIC_TOKENS_PER_SECOND] = (double)tokens / seconds;
    metric[METRIC_PEAK_MEMORY] = (double)s->model->host->peak;
    static const enum metric order[] = {METRIC_STEP, METRIC_LOSS, METRIC_GRAD_NORM, METRIC_LR, METRIC_TOKENS,
                                        METRIC_TOKENS_PER_SECOND, METRIC_SECONDS, METRIC_PEAK_MEMORY};
    const char *names[METRICS];
    double values[METRICS];
    uint32_t n = sizeof order / sizeof *order;
    for (uint32_t i = 0; i < n; i++) {
        names[i] = metric_name[order[i]];
        values[i] = metric[order[i]];
    }
    return write_log(s, names, values, n);
}

glm52_status step_run(struct step *s, const struct pack *const *packs, uint32_t count)
{
    struct stream *stream = s->model->stream;
    double begin = now(), loss = 0;
    float scalars[SCALARS] = {0};
    int64_t tokens;

    TRY(accumulate(s, packs, count, &tokens));
    clip_gradients(s);
    double lr = optimizer_lr(s->optimizer);
    optimizer_update(s->optimizer, s->scalars + SCALAR_COEFFICIENT);
    glm52_status status = read_loss(s, &loss);
    if (status) {
        s->optimizer->step--;
        fail_detail("state", "lost");
        return status;
    }
    stream->ops->download(stream, scalars, s->scalars, sizeof scalars);
    if (!isfinite(loss) || !isfinite(scalars[SCALAR_NORM])) {
        s->optimizer->step--; /* the update did nothing, see clip */
        return not_finite(s, loss, scalars[SCALAR_NORM]);
    }
    s->packs += count;
    return report(s, tokens, now() - begin, lr, loss, scalars[SCALAR_NORM]);
}

glm52_status step_evaluate(struct step *s, const struct pack *const *packs, uint32_t count, double *loss)
{
    double weight, value = 0;
    int64_t tokens;

    if (!count) return fail(GLM52_E_INVALID, "no batch to evaluate");
    TRY(check_packs(s, packs, count, &weight, &tokens));
    TRY(run_packs(s, packs, count, weight, 0));
    TRY(read_loss(s, &value));
    *loss = s->metric[METRIC_HELD_OUT_LOSS] = value;
    if (!s->optimizer) return GLM52_OK;
    double values[] = {(double)s->optimizer->step, value};
    return write_log(s, (const char *[]){"step", "held_out_loss"}, values, 2);
}
