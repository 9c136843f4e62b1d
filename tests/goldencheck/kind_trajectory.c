/* trajectory: every step of a training run: losses, decisions, biases, final weights. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/text.h"
#include "training.h"

/* Everything of all steps, in the shapes of the case's tensors. */
struct record {
    const char *tensor;
    int64_t count;    /* filled so far */
    double *value;
};

enum { LOSS, CE, MTP_CE, KL, GRAD_NORM, CLIP_COEFF, TOPK, ROUTER, MTP_TOPK, MTP_ROUTER, BIAS, RECORDS };

static const char *const record_name[RECORDS] = {"loss", "ce",     "mtp_ce",   "kl",         "grad_norm", "clip_coeff",
                                                 "topk", "router", "mtp_topk", "mtp_router", "bias"};

static glm52_status configure_trajectory(struct training *t, const void *with)
{
    (void)with;
    TRY(set_mtp(t));
    TRY(set_word(t, "indexer_loss.kind", training_option(t->c, "indexer_kl")));
    TRY(set_number(t, "indexer_loss.coeff", training_option(t->c, "indexer_kl_coeff")));
    return set_optimizer(t);
}

static void record_one(struct record *r, double value)
{
    r->value[r->count++] = value;
}

static void record_kept(struct training *t, struct record *r, const char *format, int number, const int *inside)
{
    const struct kept *k = training_find(t, format, number);
    int64_t width = k ? k->count / t->batch->pack.rows : 0;

    for (int64_t i = 0; k && i < k->count; i++) record_one(r, inside && !inside[i / width] ? -1 : k->value[i]);
}

static void record_metric(struct training *t, struct record *r, const char *format, int number)
{
    char name[64];
    double value = NAN;

    snprintf(name, sizeof name, format, number);
    if (glm52_step_metric(t->step, name, &value)) case_fail_last(t->c, name);
    record_one(r, value);
}

static void record_bias(struct training *t, struct record *r, const struct parameter *bias)
{
    glm52_view view = {.data = bias->value, .on_device = 1, .bytes = bias->count * sizeof(float)};
    float *values = view_on_host(t->context, &view);

    for (uint64_t i = 0; i < bias->count; i++) record_one(r, (double)values[i]);
    free(values);
}

static void record_step(struct training *t, struct record *r)
{
    const struct network *n = &t->step->step.network;
    const struct config *c = &t->model->model.config;
    double norm = t->step->step.metric[METRIC_GRAD_NORM];
    int executions = n->mtp.depths && c->mtp.share == MTP_SHARE_NONE ? n->mtp.depths : n->mtp.depths > 0;

    record_metric(t, &r[LOSS], "loss", 0);
    record_metric(t, &r[CE], "ce", 0);
    record_one(&r[GRAD_NORM], norm);
    record_one(&r[CLIP_COEFF], fmin(1, c->train.clip / (norm + 1e-6)));
    for (int layer = 0; layer < n->layers; layer++) {
        if (n->layer[layer].indexes) {
            record_metric(t, &r[KL], "indexer_loss.%d", layer);
            record_kept(t, &r[TOPK], "topk.%d", layer, NULL);
        }
        if (!n->layer[layer].sparse) continue;
        record_kept(t, &r[ROUTER], "router_idx.%d", layer, NULL);
        record_bias(t, &r[BIAS], n->layer[layer].w->moe.bias);
    }
    for (int d = 0; d < executions; d++) record_metric(t, &r[KL], "indexer_loss.%d", n->layers + d);
    for (int d = 0; d < n->mtp.depths; d++) {
        int *inside = rows_inside(&t->batch->pack, d);
        record_metric(t, &r[MTP_CE], "mtp.%d.loss", d);
        record_kept(t, &r[MTP_TOPK], "mtp_topk.%d", d, inside);
        record_kept(t, &r[MTP_ROUTER], "mtp_router_idx.%d", d, inside);
        free(inside);
    }
    if (n->mtp.depths) record_bias(t, &r[BIAS], n->mtp.w->layer.moe.bias);
}

static void compare_record(struct golden_case *c, const struct record *r)
{
    const struct safetensor *s = safetensors_find(&c->file, r->tensor);

    if (s->dtype == GLM52_DTYPE_I32 || s->dtype == GLM52_DTYPE_I64) {
        int64_t *integer = must_allocate((size_t)r->count, sizeof *integer);
        for (int64_t i = 0; i < r->count; i++) integer[i] = (int64_t)r->value[i];
        compare_integers(c, r->tensor, r->tensor, integer, r->count);
        free(integer);
    } else {
        compare_floats(c, r->tensor, r->tensor, r->value, r->count);
    }
}

static int has_prefix(const struct golden_case *c, const char *prefix)
{
    for (size_t i = 0; i < c->file.tensors; i++)
        if (text_starts_with(c->file.tensor[i].name, prefix)) return 1;
    return 0;
}

/* In fp32 nobody looks into the update, nor guides it, so that it may be a replay:
 * gradients alone are looked into before. */
static glm52_status run_step(struct training *t)
{
    const struct guide *guide = t->model->model.guide;

    if (t->c->bf16) return glm52_step_run(t->step, &t->batch, 1);
    TRY(glm52_step_gradients(t->step, &t->batch, 1));
    t->step->step.tap = NULL;
    t->model->model.guide = NULL;
    glm52_status status = glm52_step_run(t->step, &t->batch, 1);
    t->step->step.tap = &t->tap;
    t->model->model.guide = guide;
    return status;
}

static glm52_status train(struct training *t, const struct array *tokens, const struct array *bounds,
                          const struct array *lr, struct record *records)
{
    int64_t steps = tokens->shape[0], rows = tokens->shape[1], count = bounds->shape[1];

    for (int64_t n = 0; n < steps; n++) {
        training_forget(t);
        TRY(training_feed(t, tokens->integer + n * rows, rows, bounds->integer + n * count, count));
        if (!n && has_prefix(t->c, "step1.grad.")) {
            TRY(glm52_step_gradients(t->step, &t->batch, 1));
            compare_parameters(t, "step1.grad.", 1, 0);
            training_forget(t);
        }
        TRY(glm52_optimizer_set_lr(t->optimizer, lr->value[n]));
        TRY(run_step(t));
        record_step(t, records);
    }
    if (t->step->step.graphs.entry && !t->c->bf16 && !t->step->step.graphs.replays)
        return fail(GLM52_E_INTERNAL, "no step of %lld was replayed", (long long)steps);
    return GLM52_OK;
}

void run_trajectory(struct golden_case *c)
{
    struct array tokens = {0}, bounds = {0}, lr = {0};
    struct record records[RECORDS] = {0};
    struct training t = {.c = c};

    glm52_status status = load_pack(c, &tokens, &bounds);
    if (!status && (tokens.dimensions != 2 || bounds.dimensions != 2 || !case_array(c, "lr", &lr)))
        status = fail(GLM52_E_INVALID, "input_ids, cu_seqlens and lr must have a row per step");
    for (int i = 0; i < RECORDS && !status; i++) {
        const struct safetensor *s = safetensors_find(&c->file, record_name[i]);
        if (!s) status = fail(GLM52_E_INVALID, "there is no tensor %s", record_name[i]);
        records[i].tensor = record_name[i];
        /* more than the tensor may come, if the library runs other layers than the case; comparing says so */
        if (s) records[i].value = must_allocate((size_t)safetensors_elements(s) * 4 + 65536, sizeof(double));
    }
    if (!status) status = open_training(&t, configure_trajectory, NULL, tokens.shape[1]);
    if (!status) status = train(&t, &tokens, &bounds, &lr, records);
    if (status) {
        case_fail_last(c, "training");
    } else {
        /* In bf16 the first step is judged, and the rest shown. */
        for (int i = 0; i < RECORDS && c->bf16; i++)
            if (i < TOPK || i == BIAS)
                compare_first(c, record_name[i], records[i].value, records[i].count / tokens.shape[0]);
        c->unjudged = c->bf16;
        for (int i = 0; i < RECORDS; i++) compare_record(c, &records[i]);
        compare_parameters(&t, "final.", 0, 0);
        c->unjudged = 0;
    }
    for (int i = 0; i < RECORDS; i++) free(records[i].value);
    close_training(&t);
    array_free(&tokens);
    array_free(&bounds);
    array_free(&lr);
}
