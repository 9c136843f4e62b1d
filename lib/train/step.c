#include "train/step.h"

#include <math.h>
#include <string.h>
#include <time.h>

#include "base/dtype.h"
#include "base/text.h"

enum { SCALAR_NORM, SCALAR_COEFFICIENT, SCALARS };

static double now(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- life ---- */

static glm52_status take(struct step *s, size_t bytes, void **out)
{
    struct stream *stream = s->model->stream;

    return stream->ops->allocate(stream, bytes, MEMORY_WORKSPACE, out);
}

static glm52_status take_update_memory(struct step *s)
{
    struct model *m = s->model;
    void *memory;

    TRY(take(s, (GROUPS + 1) * sizeof *s->squares, &memory));
    s->squares = memory;
    TRY(take(s, SCALARS * sizeof *s->scalars, &memory));
    s->scalars = memory;
    s->workspace_bytes = m->stream->ops->sum_bytes(m->stream, (int64_t)m->parameters.elements);
    return take(s, s->workspace_bytes, &s->workspace);
}

static glm52_status name_log(struct step *s, const char *out)
{
    struct text path;

    text_init(&path, s->model->host);
    text_add(&path, "%s/metrics.jsonl", out);
    glm52_status status = text_status(&path);
    if (!status && !(s->log_path = host_strdup(s->model->host, path.at))) status = GLM52_E_NOMEM;
    text_free(&path);
    return status;
}

glm52_status step_open(struct model *m, struct optimizer *o, const struct config *config, struct step *s)
{
    static const enum keep kept[] = {[RECOMPUTE_NONE] = KEEP_ALL, [RECOMPUTE_LIGHT] = KEEP_DEAR, [RECOMPUTE_LAYERS] = KEEP_INPUTS};
    enum keep keep = o ? kept[config->train.recompute] : KEEP_NOTHING;

    memset(s, 0, sizeof *s);
    if (o && o->stage != m->stage) {
        fail(GLM52_E_STATE, "the optimizer was made before glm52_step_set_stage() changed what is trained");
        return fail_hint("create a new optimizer, or use the one of the step whose stage was set");
    }
    s->model = m;
    m->steps++;
    s->microbatches = config->train.microbatches;
    s->clip = config->train.clip;
    s->spike = config->train.spike;
    s->peak_tflops = config->report.peak_tflops;
    s->skips = config->train.not_finite == NOT_FINITE_SKIP;
    comm_open_single(&s->comm);
    glm52_status status = o ? model_hold_gradients(m) : GLM52_OK;
    if (!status) {
        s->optimizer = o;
        status = network_open(m, config->train.microbatch_tokens, keep, &s->network);
    }
    if (!status && !(s->sum = host_calloc(m->host, (size_t)s->network.sums.count * sizeof *s->sum, MEMORY_HOST)))
        status = GLM52_E_NOMEM;
    if (!status && o) status = take_update_memory(s);
    if (!status && o && config->out[0]) status = name_log(s, config->out);
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
    if (s->squares) stream->ops->release(stream, s->squares, (GROUPS + 1) * sizeof *s->squares, MEMORY_WORKSPACE);
    host_free(s->model->host, s->sum, (size_t)s->network.sums.count * sizeof *s->sum, MEMORY_HOST);
    network_close(&s->network);
    if (s->optimizer) model_release_gradients(s->model);
    s->model->steps--;
    memset(s, 0, sizeof *s);
}

/* ---- passes ---- */

/* Everything that can be wrong with the packs, before anything runs. */
static glm52_status check_packs(const struct step *s, const struct pack *const *packs, uint32_t count,
                                struct input_count *counted, int64_t *tokens)
{
    const struct model_config *c = &s->model->config.model;

    memset(counted, 0, sizeof *counted);
    *tokens = 0;
    for (uint32_t i = 0; i < count; i++) {
        if (pack_validate(packs[i], c->vocab_size, c->max_position_embeddings)) return fail_prefix("microbatch %u", i);
        if (packs[i]->rows > s->network.rows) {
            fail(GLM52_E_INVALID, "microbatch %u has %lld tokens, train.microbatch_tokens = %lld", i,
                 (long long)packs[i]->rows, (long long)s->network.rows);
            return fail_hint("raise train.microbatch_tokens, or split the batch");
        }
        input_count(packs[i], s->network.mtp.depths, counted);
        *tokens += packs[i]->rows;
    }
    if (counted->loss > 0) return GLM52_OK;
    fail(GLM52_E_INVALID, "no token of the %u microbatches has a label with a positive loss_mask", count);
    return fail_hint("give documents of at least two tokens, or check labels and loss_mask");
}

static double share(double whole, double count)
{
    return count > 0 ? whole / count : 0;
}

/* What each row weighs, so that the sums over all microbatches (of all ranks) are the means that the losses are. */
static struct input_scale scale_of(const struct step *s, const struct input_count *n, int backward)
{
    const struct config *c = &s->model->config;
    struct input_scale scale = {.loss = (backward ? c->train.ce_coeff : 1) / n->loss};
    int depths = s->network.mtp.depths, per_token = c->indexer_loss.mean == MEAN_TOKENS;

    scale.kl = share(c->indexer_loss.coeff, per_token ? n->loss : n->rows);
    for (int d = 0; d < depths; d++) {
        scale.mtp_kl[d] = share(c->indexer_loss.coeff, per_token ? n->mtp[d] : n->mtp_rows[d]);
        scale.mtp[d] = c->mtp.loss == MTP_LOSS_TV ? share(c->mtp.factor, n->chain) : share(c->mtp.factor / depths, n->mtp[d]);
    }
    return scale;
}

static glm52_status run_packs(struct step *s, const struct pack *const *packs, uint32_t count,
                              const struct input_count *counted, int backward)
{
    struct stream *stream = s->model->stream;
    struct input_scale scale = scale_of(s, counted, backward);
    size_t sums = (size_t)s->network.sums.count;

    scale.packs = (int)count;
    stream->label = "sums";
    stream->ops->zero(stream, s->network.sum, sums * sizeof *s->network.sum);
    for (uint32_t i = 0; i < count; i++) {
        TRY(host_poll(s->model->host));
        network_run(&s->network, packs[i], &scale, backward, s->tap);
    }
    s->comm.all_reduce_sum(&s->comm, stream, (int64_t)sums, GLM52_DTYPE_F64, s->network.sum);
    return GLM52_OK;
}

/* The sums as they are, and the losses made of them; afterwards s->sum holds means without factors. */
static glm52_status read_sums(struct step *s, const struct input_count *n, int backward)
{
    const struct config *c = &s->model->config;
    struct stream *stream = s->model->stream;
    const struct sums *at = &s->network.sums;
    int depths = s->network.mtp.depths, tv = c->mtp.loss == MTP_LOSS_TV;
    double *sum = s->sum, *metric = s->metric, mtp = 0, kl = 0;

    TRY(stream->ops->synchronize(stream));
    stream->ops->download(stream, sum, s->network.sum, (size_t)at->count * sizeof *sum);
    for (int d = 0; d < depths; d++) mtp += sum[at->mtp + d];
    for (int i = 0; i < s->network.indexers; i++) kl += sum[at->kl + i];
    metric[METRIC_CE] = backward ? share(sum[at->ce], c->train.ce_coeff) : sum[at->ce];
    metric[METRIC_AUXILIARY_LOSS] = sum[at->auxiliary];
    metric[METRIC_LOSS] = c->train.train_only == TRAIN_INDEXER ? kl : sum[at->ce] + mtp + kl + sum[at->auxiliary];
    metric[METRIC_MTP_LOSS] = share(mtp, c->mtp.factor);
    metric[METRIC_INDEXER_LOSS] = share(kl, c->indexer_loss.coeff);
    metric[METRIC_DROPPED] = share(sum[at->dropped], n->tokens * (double)network_assignments(&s->network));
    metric[METRIC_FORCED_BALANCE] = c->moe.force_balance;
    for (int i = 0; i < s->network.indexers; i++) sum[at->kl + i] = share(sum[at->kl + i], c->indexer_loss.coeff);
    for (int d = 0; d < depths; d++) {
        sum[at->mtp + d] = share(sum[at->mtp + d], c->mtp.factor / depths);
        sum[at->accepted + d] = share(sum[at->accepted + d], tv ? n->chain : n->mtp[d]);
        sum[at->accepted_so_far + d] = share(sum[at->accepted_so_far + d], tv ? n->chain : n->mtp[d]);
    }
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

/* Runs of parameters whose gradients have one type, with the gaps between them. */
static void reduce_gradients(struct step *s)
{
    struct model *m = s->model;
    const struct parameters *t = &m->parameters;

    for (uint32_t i = 0, next; i < t->count; i = next) {
        const struct parameter *first = &t->at[i];
        for (next = i + 1; next < t->count && t->at[next].gradient_type == first->gradient_type;) next++;
        uint64_t end = next < t->count ? t->at[next].gradient_offset : t->gradient_bytes;
        int64_t count = (int64_t)((end - first->gradient_offset) / dtype_size(first->gradient_type));
        if (count)
            s->comm.all_reduce_sum(&s->comm, m->stream, count, first->gradient_type, m->gradients + first->gradient_offset);
    }
}

/* Gradients of the step's loss, summed over ranks, in the parameters' gradients. */
static glm52_status accumulate(struct step *s, const struct pack *const *packs, uint32_t count, struct input_count *counted,
                               int64_t *tokens)
{
    struct model *m = s->model;

    TRY(require_optimizer(s, count));
    TRY(check_packs(s, packs, count, counted, tokens));
    m->stream->label = "gradients";
    m->stream->ops->zero(m->stream, m->gradients, m->parameters.gradient_bytes);
    TRY(run_packs(s, packs, count, counted, 1));
    reduce_gradients(s);
    return GLM52_OK;
}

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

    ops->zero(stream, s->squares, (GROUPS + 1) * sizeof *s->squares);
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
            ops->sum_squares(stream, (int64_t)count, first->gradient_type, first->gradient, s->squares + group_of(first),
                             s->workspace);
    }
    for (int i = 0; i < GROUPS; i++) ops->add(stream, 1, GLM52_DTYPE_F64, s->squares + i, s->squares + GROUPS);
}

static void clip_gradients(struct step *s)
{
    struct stream *stream = s->model->stream;

    stream->label = "clip";
    sum_squares(s);
    stream->ops->clip(stream, s->squares + GROUPS, (float)s->clip, s->scalars + SCALAR_NORM, s->scalars + SCALAR_COEFFICIENT);
}

static float read_norms(struct step *s)
{
    struct stream *stream = s->model->stream;
    double squares[GROUPS + 1];

    stream->ops->download(stream, squares, s->squares, sizeof squares);
    for (int i = 0; i < GROUPS; i++) s->group_norm[i] = sqrt(squares[i]);
    return (float)(s->metric[METRIC_GRAD_NORM] = sqrt(squares[GROUPS]));
}

glm52_status step_gradients(struct step *s, const struct pack *const *packs, uint32_t count)
{
    struct input_count counted;
    int64_t tokens;

    TRY(accumulate(s, packs, count, &counted, &tokens));
    clip_gradients(s);
    TRY(read_sums(s, &counted, 1));
    read_norms(s);
    return GLM52_OK;
}

/* May this step move the parameters? Decided from the losses before the update. */
static int is_spike(const struct step *s)
{
    return s->spike > 0 && s->mean_loss > 0 && s->metric[METRIC_LOSS] > s->spike * s->mean_loss;
}

/* ---- the step ---- */

/* The first line opens the file: by then a resumed run knows where it goes on. */
static glm52_status write_log(struct step *s, const char *const *names, const double *values, size_t count, int64_t before)
{
    if (!s->log_path) return GLM52_OK;
    if (!s->log.file) TRY(metrics_log_open(&s->log, s->model->host, s->log_path, (uint64_t)before));
    s->log.stage = s->model->config.train.stage;
    return metrics_log_write(&s->log, names, values, count);
}

static glm52_status log_run(struct step *s)
{
    enum { MOST = 512 };
    const char *names[MOST];
    char name[MOST][64];
    double values[MOST];
    size_t n = 0;

    for (uint32_t i = 0; n < MOST && step_metric_at(s, i, name[n], &values[n]); i++) {
        if (i == METRIC_HELD_OUT_LOSS) continue;
        names[n] = name[n];
        n++;
    }
    return write_log(s, names, values, n, s->optimizer->step - 1);
}

static glm52_status finish(struct step *s, const struct pack *const *packs, uint32_t count, int64_t tokens, double seconds,
                           double lr)
{
    double *metric = s->metric;

    metric[METRIC_STEP] = (double)s->optimizer->step;
    metric[METRIC_LR] = lr;
    metric[METRIC_TOKENS] = (double)tokens;
    metric[METRIC_SECONDS] = seconds;
    metric[METRIC_TOKENS_PER_SECOND] = (double)tokens / seconds;
    step_measure_flops(s, packs, count, seconds);
    metric[METRIC_PEAK_MEMORY] = (double)s->model->host->peak;
    return log_run(s);
}

glm52_status step_run(struct step *s, const struct pack *const *packs, uint32_t count)
{
    double begin = now();
    struct input_count counted;
    int64_t tokens;

    TRY(accumulate(s, packs, count, &counted, &tokens));
    clip_gradients(s);
    TRY(read_sums(s, &counted, 1));
    float norm = read_norms(s);
    int finite = isfinite(s->metric[METRIC_LOSS]) && isfinite(norm), spike = finite && is_spike(s);
    if (!finite && !s->skips) return step_not_finite(s, packs, count);
    double lr = optimizer_lr(s->optimizer);
    if (finite && !spike) {
        optimizer_update(s->optimizer, s->scalars + SCALAR_COEFFICIENT);
        network_balance(&s->network);
        glm52_status status = s->model->stream->ops->synchronize(s->model->stream);
        if (status) {
            fail_detail("state", "lost");
            return status;
        }
        s->mean_loss = s->mean_loss > 0 ? 0.95 * s->mean_loss + 0.05 * s->metric[METRIC_LOSS] : s->metric[METRIC_LOSS];
    } else {
        optimizer_skip(s->optimizer);
        s->metric[METRIC_SKIPPED]++;
        host_log(s->model->host, GLM52_LOG_WARNING, "step %lld skipped: loss %g, gradient norm %g",
                 (long long)s->optimizer->step, s->metric[METRIC_LOSS], (double)norm);
    }
    s->packs += count;
    if (finish(s, packs, count, tokens, now() - begin, lr)) return fail_detail("state", "updated");
    return GLM52_OK;
}

glm52_status step_evaluate(struct step *s, const struct pack *const *packs, uint32_t count, double *loss)
{
    struct input_count counted;
    int64_t tokens;

    if (!count) return fail(GLM52_E_INVALID, "no batch to evaluate");
    TRY(check_packs(s, packs, count, &counted, &tokens));
    TRY(run_packs(s, packs, count, &counted, 0));
    TRY(read_sums(s, &counted, 0));
    *loss = s->metric[METRIC_HELD_OUT_LOSS] = s->metric[METRIC_CE];
    if (!s->optimizer) return GLM52_OK;
    double values[] = {(double)s->optimizer->step, *loss};
    return write_log(s, (const char *[]){"step", "held_out_loss"}, values, 2, s->optimizer->step);
}
