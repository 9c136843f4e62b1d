#include "train/step.h"

#include <math.h>
#include <string.h>
#include <time.h>

#include "base/dtype.h"
#include "base/text.h"

static double now(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- memory ---- */

enum { VERDICT_BYTES = (sizeof(struct verdict) + 255) / 256 * 256 };

/* The verdict, and behind it the workspace of sums. */
static size_t update_bytes(struct model *m)
{
    return VERDICT_BYTES + m->stream->ops->sum_bytes(m->stream, (int64_t)m->parameters.elements);
}

static glm52_status take_update_memory(struct step *s)
{
    struct stream *stream = s->model->stream;
    void *memory;

    s->update_bytes = update_bytes(s->model);
    TRY(stream->ops->allocate(stream, s->update_bytes, MEMORY_WORKSPACE, &memory));
    s->verdict = memory;
    s->workspace = (unsigned char *)memory + VERDICT_BYTES;
    return GLM52_OK;
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

/* ---- too little memory ---- */

static enum keep keep_of(int recompute)
{
    return recompute == RECOMPUTE_LAYERS ? KEEP_INPUTS : recompute == RECOMPUTE_LIGHT ? KEEP_DEAR : KEEP_ALL;
}

/* Device memory of a step with an optimizer, and some for code and recorded launches, which come later. */
static uint64_t bytes_of(struct model *m, int64_t rows, int recompute)
{
    enum { SPARE = 16 << 20 };
    struct stream *s = m->stream;
    uint64_t gradients = m->gradient_holders ? 0 : s->ops->taken_bytes(s, m->parameters.gradient_bytes);

    return gradients + network_bytes(m, rows, keep_of(recompute)) + s->ops->taken_bytes(s, update_bytes(m)) + SPARE;
}

/* The most tokens per microbatch that fit, up to `most`. */
static int64_t rows_that_fit(struct model *m, uint64_t free, int64_t most, int recompute)
{
    int64_t fits = 0;

    for (int64_t step = most; step > 0; step /= 2)
        while (fits + step <= most && bytes_of(m, fits + step, recompute) <= free) fits += step;
    return fits;
}

/* After a step found no room: what it needs, what there is, and what would fit. */
static glm52_status refuse(struct model *m, const struct config *config)
{
    int64_t rows = config->train.microbatch_tokens;
    uint64_t free, all;

    if (!m->stream->ops->memory) return GLM52_E_NOMEM;
    m->stream->ops->memory(m->stream, &free, &all);
    int64_t fits = rows_that_fit(m, free, rows, config->train.recompute);
    if (fits == rows) return GLM52_E_NOMEM; /* of the host's memory, that is */
    int64_t recomputed = rows_that_fit(m, free, rows, RECOMPUTE_LAYERS);
    fail(GLM52_E_NOMEM,
         "a step of %lld tokens per microbatch needs %.2f GiB beside model and optimizer; %.2f of %.2f GiB are "
         "free",
         (long long)rows, ldexp((double)bytes_of(m, rows, config->train.recompute), -30), ldexp((double)free, -30),
         ldexp((double)all, -30));
    if (!recomputed) return fail_hint("not even one token fits: take a smaller model, or a GPU with more memory");
    if (recomputed == fits) return fail_hint("train.microbatch_tokens = %lld fits", (long long)fits);
    return fail_hint("train.microbatch_tokens = %lld fits, %lld with train.recompute = layers", (long long)fits,
                     (long long)recomputed);
}

static glm52_status take_step(struct step *s, const struct config *config)
{
    struct model *m = s->model;
    int trains = s->optimizer != NULL;
    enum keep keep = trains ? keep_of(config->train.recompute) : KEEP_NOTHING;

    if (trains) TRY(model_hold_gradients(m));
    s->holds_gradients = trains;
    TRY(network_open(m, config->train.microbatch_tokens, keep, &s->network));
    if (!(s->sum = host_calloc(m->host, (size_t)s->network.sums.count * sizeof *s->sum, MEMORY_HOST)))
        return GLM52_E_NOMEM;
    if (!trains) return GLM52_OK;
    TRY(take_update_memory(s));
    TRY(graphs_open(m->stream, config, &s->graphs));
    TRY(profile_open(m->stream, config, &s->profile));
    return config->out[0] ? name_log(s, config->out) : GLM52_OK;
}

/* ---- life ---- */

glm52_status step_open(struct model *m, struct optimizer *o, const struct config *config, struct step *s)
{
    memset(s, 0, sizeof *s);
    if (o && o->stage != m->stage) {
        fail(GLM52_E_STATE, "the optimizer was made before glm52_step_set_stage() changed what is trained");
        return fail_hint("create a new optimizer, or use the one of the step whose stage was set");
    }
    s->model = m;
    s->optimizer = o;
    m->steps++;
    s->microbatches = config->train.microbatches;
    s->clip = config->train.clip;
    s->spike = config->train.spike;
    s->peak_tflops = config->report.peak_tflops;
    s->skips = config->train.not_finite == NOT_FINITE_SKIP;
    comm_open_single(&s->comm);
    glm52_status status = take_step(s, config);
    if (!status) return GLM52_OK;
    step_close(s);
    return o && status == GLM52_E_NOMEM ? refuse(m, config) : status;
}

void step_close(struct step *s)
{
    if (!s->model) return;
    struct stream *stream = s->model->stream;

    metrics_log_close(&s->log);
    host_strfree(s->model->host, s->log_path);
    graphs_close(&s->graphs);
    profile_close(&s->profile);
    if (s->verdict) stream->ops->release(stream, s->verdict, s->update_bytes, MEMORY_WORKSPACE);
    host_free(s->model->host, s->sum, (size_t)s->network.sums.count * sizeof *s->sum, MEMORY_HOST);
    network_close(&s->network);
    if (s->holds_gradients) model_release_gradients(s->model);
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
        scale.mtp[d] = c->mtp.loss == MTP_LOSS_TV ? share(c->mtp.factor, n->chain)
                                                  : share(c->mtp.factor / depths, n->mtp[d]);
    }
    return scale;
}

static void pass(void *user)
{
    struct step *s = user;

    network_pass(&s->network, 1, s->tap);
}

/* Forward and backward of what was fed. Who looks at values wants them as they come: nothing is recorded then. */
static glm52_status train_pass(struct step *s)
{
    const struct moe_config *c = &s->model->config.moe;
    int auxiliary = c->auxiliary_loss != AUXILIARY_NONE || c->z_coeff > 0;
    struct graph_shape shape = {.rows = s->network.in->rows, .sequences = s->network.in->sequences,
                                .packs = auxiliary ? s->network.microbatches : 0, .first = s->network.first};

    if (!s->tap && !s->model->guide) return graphs_run(&s->graphs, &shape, pass, s);
    pass(s);
    return GLM52_OK;
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
        network_feed(&s->network, packs[i], &scale);
        s->network.first = !i;
        if (backward)
            TRY(train_pass(s));
        else
            network_pass(&s->network, 0, s->tap);
    }
    s->comm.all_reduce_sum(&s->comm, stream, (int64_t)sums, GLM52_DTYPE_F64, s->network.sum);
    return GLM52_OK;
}

/* The sums as they are, and the losses made of them; afterwards s->sum holds means without factors. */
static void read_sums(struct step *s, const struct input_count *n, int backward)
{
    const struct config *c = &s->model->config;
    struct stream *stream = s->model->stream;
    const struct sums *at = &s->network.sums;
    int depths = s->network.mtp.depths, tv = c->mtp.loss == MTP_LOSS_TV;
    double *sum = s->sum, *metric = s->metric, mtp = 0, kl = 0;

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
            s->comm.all_reduce_sum(&s->comm, m->stream, count, first->gradient_type,
                                   m->gradients + first->gradient_offset);
    }
}

/* Gradients of the step's loss, summed over ranks, in the parameters' gradients. */
static glm52_status accumulate(struct step *s, const struct pack *const *packs, uint32_t count,
                               struct input_count *counted, int64_t *tokens)
{
    TRY(require_optimizer(s, count));
    TRY(check_packs(s, packs, count, counted, tokens));
    TRY(run_packs(s, packs, count, counted, 1));
    reduce_gradients(s);
    return GLM52_OK;
}

glm52_status step_gradients(struct step *s, const struct pack *const *packs, uint32_t count)
{
    struct input_count counted;
    struct verdict verdict;
    int64_t tokens;

    TRY(accumulate(s, packs, count, &counted, &tokens));
    step_clip(s);
    TRY(s->model->stream->ops->synchronize(s->model->stream));
    read_sums(s, &counted, 1);
    step_read_verdict(s, &verdict);
    return GLM52_OK;
}

/* ---- the step ---- */

/* The first line opens the file: by then a resumed run knows where it goes on. */
static glm52_status write_log(struct step *s, const char *const *names, const double *values, size_t count,
                              int64_t before)
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

static glm52_status finish(struct step *s, const struct pack *const *packs, uint32_t count, int64_t tokens,
                           double seconds, double lr)
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

/* The host waits once, at the end: what it reads then was decided on the device. */
static glm52_status run_step(struct step *s, const struct pack *const *packs, uint32_t count)
{
    double begin = now();
    struct input_count counted;
    struct verdict verdict;
    int64_t tokens;

    TRY(accumulate(s, packs, count, &counted, &tokens));
    TRY(step_update(s));
    read_sums(s, &counted, 1);
    step_read_verdict(s, &verdict);
    if (!s->skips && !(isfinite(s->metric[METRIC_LOSS]) && isfinite(verdict.norm)))
        return step_not_finite(s, packs, count);
    double lr = optimizer_lr(s->optimizer);
    step_count(s, &verdict);
    s->packs += count;
    if (finish(s, packs, count, tokens, now() - begin, lr)) return fail_detail("state", "updated");
    return GLM52_OK;
}

glm52_status step_run(struct step *s, const struct pack *const *packs, uint32_t count)
{
    TRY(profile_begin(&s->profile));
    glm52_status status = run_step(s, packs, count), told = profile_end(&s->profile, s->metric[METRIC_SECONDS]);

    if (!status && told) return fail_detail("state", "updated");
    return status;
}

glm52_status step_evaluate(struct step *s, const struct pack *const *packs, uint32_t count, double *loss)
{
    struct input_count counted;
    int64_t tokens;

    if (!count) return fail(GLM52_E_INVALID, "no batch to evaluate");
    TRY(check_packs(s, packs, count, &counted, &tokens));
    TRY(run_packs(s, packs, count, &counted, 0));
    TRY(s->model->stream->ops->synchronize(s->model->stream));
    read_sums(s, &counted, 0);
    *loss = s->metric[METRIC_HELD_OUT_LOSS] = s->metric[METRIC_CE];
    if (!s->optimizer) return GLM52_OK;
    double values[] = {(double)s->optimizer->step, *loss};
    return write_log(s, (const char *[]){"step", "held_out_loss"}, values, 2, s->optimizer->step);
}
