/* Cases of training semantics, through a training step with a tap on its passes:
 *   indexer_kl       KL rows, means, loss and gradients of each variant
 *   mtp_base         the trunk alone, as ref_model
 *   mtp_ce, mtp_tv   values per depth, the MTP term's gradients alone, the MTP indexer's KL
 *   trajectory       every step of a training run: losses, decisions, biases, final weights */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "api/object.h"
#include "base/dtype.h"
#include "base/text.h"
#include "case.h"

enum { KEPT = 256 };

struct kept {
    char name[48];
    int64_t count;
    double *value;
};

struct training {
    struct golden_case *c;
    glm52_context *context;
    glm52_config *config;
    glm52_model *model;
    glm52_optimizer *optimizer;
    glm52_step *step;
    glm52_batch *batch;
    struct kept kept[KEPT];
    int keeps;
    float *scores; /* on the device, `score_bytes` of them */
    size_t score_bytes;
    struct tap tap;
};

/* ---- tap: everything a pass offers, as doubles ---- */

static int wants(void *user, const char *name, int layer)
{
    (void)user, (void)name, (void)layer;
    return 1;
}

static double number_at(const void *values, glm52_dtype type, int64_t i)
{
    if (type == GLM52_DTYPE_I32) return (double)((const int32_t *)values)[i];
    if (type == GLM52_DTYPE_BF16) return (double)bf16_to_f32(((const uint16_t *)values)[i]);
    return (double)((const float *)values)[i];
}

static void take(void *user, const char *name, int layer, glm52_dtype type, int64_t rows, int64_t columns,
                 const void *values)
{
    struct training *t = user;
    struct kept *k = &t->kept[t->keeps];

    if (t->keeps == KEPT) return;
    t->keeps++;
    if (layer < 0)
        snprintf(k->name, sizeof k->name, "%s", name);
    else
        snprintf(k->name, sizeof k->name, "%s.%d", name, layer);
    k->count = rows * columns;
    k->value = must_allocate((size_t)k->count, sizeof *k->value);
    glm52_view view = {.data = (void *)(uintptr_t)values, .on_device = 1, .bytes = (uint64_t)k->count * dtype_size(type)};
    void *copy = view_on_host(t->context, &view);
    for (int64_t i = 0; i < k->count; i++)
        k->value[i] = number_at(copy, type, i);
    free(copy);
}

static void forget(struct training *t)
{
    for (int i = 0; i < t->keeps; i++) free(t->kept[i].value);
    t->keeps = 0;
}

static const struct kept *find(struct training *t, const char *format, int number)
{
    char name[48];

    snprintf(name, sizeof name, format, number);
    for (int i = 0; i < t->keeps; i++)
        if (!strcmp(t->kept[i].name, name)) return &t->kept[i];
    case_fail(t->c, "the library shows no %s", name);
    return NULL;
}

/* ---- options ---- */

static const json_t *option(const struct golden_case *c, const char *key)
{
    return json_object_get(json_object_get(c->sidecar, "options"), key);
}

static glm52_status set(struct training *t, const char *key, const char *format, double value)
{
    char text[64];

    snprintf(text, sizeof text, format, value);
    return glm52_config_set(t->config, key, text);
}

static glm52_status set_number(struct training *t, const char *key, const json_t *value)
{
    return json_is_number(value) ? set(t, key, "%.17g", json_number_value(value)) : GLM52_OK;
}

static glm52_status set_flag(struct training *t, const char *key, const json_t *value)
{
    return json_is_boolean(value) ? glm52_config_set(t->config, key, json_is_true(value) ? "true" : "false") : GLM52_OK;
}

static glm52_status set_word(struct training *t, const char *key, const json_t *value)
{
    return json_is_string(value) ? glm52_config_set(t->config, key, json_string_value(value)) : GLM52_OK;
}

/* Epsilons, and a microbatch for the longest row. */
static glm52_status set_common(struct training *t, int64_t rows)
{
    const json_t *config = json_object_get(t->c->sidecar, "config");

    TRY(set_number(t, "model.latent_norm_eps", json_object_get(config, "latent_norm_eps")));
    TRY(set_number(t, "model.index_k_norm_eps", json_object_get(config, "index_k_norm_eps")));
    TRY(set(t, "train.microbatch_tokens", "%.0f", (double)rows));
    return set(t, "data.pack_tokens", "%.0f", (double)rows);
}

static glm52_status set_mtp(struct training *t)
{
    const struct golden_case *c = t->c;
    const json_t *offset = option(c, "query_position_offset"), *detach = option(c, "detach_heads");

    TRY(set_number(t, "mtp.depths", option(c, "depths")));
    TRY(set_number(t, "mtp.factor", option(c, "mtp_loss_scaling_factor")));
    TRY(set_flag(t, "mtp.detach_heads", detach ? detach : option(c, "mtp_detach_heads")));
    TRY(glm52_config_set(t->config, "mtp.share", json_is_true(option(c, "share_index_and_kv")) ? "index_kv" : "none"));
    return glm52_config_set(t->config, "mtp.query_offset", json_is_string(offset) ? "depth" : "none");
}

static glm52_status set_optimizer(struct training *t)
{
    const json_t *muon = option(t->c, "muon"), *adamw = option(t->c, "adamw");

    TRY(glm52_config_set(t->config, "optim.policy", "glm5"));
    TRY(set_number(t, "optim.muon_momentum", json_object_get(muon, "momentum")));
    TRY(set_word(t, "optim.muon_convention", json_object_get(muon, "momentum_convention")));
    TRY(set_flag(t, "optim.muon_nesterov", json_object_get(muon, "nesterov")));
    TRY(set_word(t, "optim.muon_coefficients", json_object_get(muon, "coefficient_type")));
    TRY(set_number(t, "optim.muon_steps", json_object_get(muon, "ns_steps")));
    TRY(set_number(t, "optim.muon_scale", json_object_get(muon, "extra_scale")));
    TRY(set_word(t, "optim.muon_rope", json_object_get(muon, "q_b_rope")));
    TRY(set_number(t, "optim.weight_decay", json_object_get(muon, "weight_decay")));
    TRY(set_number(t, "optim.beta1", json_object_get(adamw, "beta1")));
    TRY(set_number(t, "optim.beta2", json_object_get(adamw, "beta2")));
    TRY(set_number(t, "optim.epsilon", json_object_get(adamw, "eps")));
    TRY(set_number(t, "train.clip", option(t->c, "clip_global_norm")));
    return set_number(t, "moe.bias_update_rate", option(t->c, "expert_bias_update_rate"));
}

/* ---- life ---- */

static glm52_status open_training(struct training *t, glm52_status (*configure)(struct training *, const void *),
                                  const void *with, int64_t rows)
{
    const char *weights = json_string_value(json_object_get(t->c->sidecar, "weights"));
    char path[2100];

    snprintf(path, sizeof path, "%s/%s", t->c->directory, weights ? weights : "?");
    TRY(case_context(&t->context));
    TRY(glm52_config_create(t->context, &t->config));
    TRY(set_common(t, rows));
    TRY(configure(t, with));
    if (t->c->bf16) TRY(glm52_config_set(t->config, "precision.params", "bf16"));
    TRY(glm52_model_load(t->context, t->config, path, &t->model));
    guide_model(&t->context->stream, &t->model->model);
    TRY(glm52_optimizer_create(t->model, NULL, &t->optimizer));
    TRY(glm52_step_create(t->model, t->optimizer, NULL, &t->step));
    int64_t vocabulary = t->model->model.config.model.vocab_size;
    struct stream *s = &t->context->stream;
    void *scores;
    t->score_bytes = (size_t)(rows * (rows > vocabulary ? rows : vocabulary)) * sizeof *t->scores;
    TRY(s->ops->allocate(s, t->score_bytes, MEMORY_WORKSPACE, &scores));
    t->scores = scores;
    t->tap = (struct tap){.user = t, .wants = wants, .take = take, .scores = t->scores};
    t->step->step.tap = &t->tap;
    return glm52_batch_create(t->context, &t->batch);
}

static void close_training(struct training *t)
{
    forget(t);
    if (t->scores)
        t->context->stream.ops->release(&t->context->stream, t->scores, t->score_bytes, MEMORY_WORKSPACE);
    glm52_batch_unref(&t->batch);
    glm52_step_unref(&t->step);
    glm52_optimizer_unref(&t->optimizer);
    glm52_model_unref(&t->model);
    glm52_config_unref(&t->config);
    glm52_context_unref(&t->context);
}

static glm52_status feed(struct training *t, const int64_t *tokens, int64_t rows, const int64_t *bounds, int64_t count)
{
    TRY(glm52_batch_set(t->batch, "tokens", GLM52_DTYPE_I64, tokens, (uint64_t)rows));
    return glm52_batch_set(t->batch, "cu_seqlens", GLM52_DTYPE_I64, bounds, (uint64_t)count);
}

/* ---- comparing ---- */

static void compare_value(struct training *t, const char *tensor, double value)
{
    if (case_has(t->c, tensor)) compare_floats(t->c, tensor, tensor, &value, 1);
}

static void compare_metric(struct training *t, const char *tensor, const char *metric, double factor)
{
    double value = 0;

    if (glm52_step_metric(t->step, metric, &value))
        case_fail_last(t->c, tensor);
    else
        compare_value(t, tensor, value * factor);
}

/* Values of a tap against a tensor; rows outside `inside` (if given) are set to `absent` first. */
static void compare_kept(struct training *t, const char *tensor, const char *format, int number, const int *inside,
                         double absent)
{
    if (!case_has(t->c, tensor)) return;
    const struct kept *k = find(t, format, number);
    if (!k) return;
    int64_t rows = t->batch->pack.rows, width = k->count / rows;
    double *value = must_allocate((size_t)k->count, sizeof *value);
    int64_t *integer = must_allocate((size_t)k->count, sizeof *integer);
    for (int64_t i = 0; i < k->count; i++) {
        value[i] = inside && !inside[i / width] ? absent : k->value[i];
        integer[i] = (int64_t)value[i];
    }
    const struct safetensor *s = safetensors_find(&t->c->file, tensor);
    if (s->dtype == GLM52_DTYPE_I32 || s->dtype == GLM52_DTYPE_I64)
        compare_integers(t->c, tensor, tensor, integer, k->count);
    else
        compare_floats(t->c, tensor, tensor, value, k->count);
    free(value);
    free(integer);
}

static double *parameter_values(const struct training *t, const glm52_view *v, int64_t *count)
{
    *count = (int64_t)(v->bytes / dtype_size(v->dtype));
    double *out = must_allocate((size_t)*count, sizeof *out);
    void *values = view_on_host(t->context, v);

    for (int64_t i = 0; i < *count; i++) out[i] = number_at(values, v->dtype, i);
    free(values);
    return out;
}

/* PREFIX.NAME of every parameter; those that are not listed must have gradient zero, if `rest_is_zero`. */
static void compare_parameters(struct training *t, const char *prefix, int gradients, int rest_is_zero)
{
    char tensor[300];
    uint32_t tensors = 0;
    uint64_t elements;

    glm52_model_parameter_count(t->model, &tensors, &elements);
    double *others = must_allocate(tensors, sizeof *others);
    uint32_t unlisted = 0;
    for (uint32_t i = 0; i < tensors; i++) {
        glm52_parameter_info info = {.struct_size = sizeof info};
        int64_t count;
        if (glm52_model_parameter(t->model, i, &info)) continue;
        double *values = parameter_values(t, gradients ? &info.gradient : &info.value, &count);
        snprintf(tensor, sizeof tensor, "%s%s", prefix, info.name);
        if (case_has(t->c, tensor))
            compare_floats(t->c, tensor, tensor, values, count);
        else
            for (int64_t j = 0; j < count; j++)
                if (fabs(values[j]) > others[unlisted]) others[unlisted] = fabs(values[j]);
        unlisted += !case_has(t->c, tensor);
        free(values);
    }
    snprintf(tensor, sizeof tensor, "%s of the parameters that are not listed", prefix);
    if (rest_is_zero) compare_zero(t->c, tensor, others, unlisted);
    free(others);
}

/* Rows whose input token t + 1 + d lies inside the document. */
static int *rows_inside(const struct pack *p, int d)
{
    int *inside = must_allocate((size_t)p->rows, sizeof *inside);

    for (int64_t n = 0; n < p->documents; n++)
        for (int64_t t = p->cu_seqlens[n]; t < p->cu_seqlens[n + 1]; t++) inside[t] = t + 1 + d < p->cu_seqlens[n + 1];
    return inside;
}

/* Loads the pack of the case (or of its base) and runs forward and backward. */
static glm52_status load_pack(struct golden_case *c, struct array *tokens, struct array *bounds)
{
    if (case_array(c, "input_ids", tokens) && tokens->integer && case_array(c, "cu_seqlens", bounds) && bounds->integer)
        return GLM52_OK;
    return fail(GLM52_E_INVALID, "input_ids and cu_seqlens must be there, and integers");
}

static glm52_status run_once(struct training *t, const struct array *tokens, const struct array *bounds)
{
    TRY(feed(t, tokens->integer, tokens->count, bounds->integer, bounds->count));
    return glm52_step_gradients(t->step, &t->batch, 1);
}

/* ---- indexer_kl ---- */

static glm52_status configure_kl(struct training *t, const void *with)
{
    const json_t *variant = with;

    TRY(glm52_config_set(t->config, "train.ce_coeff", "0"));
    TRY(set_word(t, "train.attention", json_object_get(variant, "attention")));
    TRY(set_word(t, "indexer_loss.kind", json_object_get(variant, "kl")));
    return set_number(t, "indexer_loss.coeff", option(t->c, "coefficient"));
}

static glm52_status mask_rows(struct training *t, const json_t *variant)
{
    const char *name = json_string_value(json_object_get(variant, "rows"));
    struct array mask = {0};

    if (!name || !strcmp(name, "all")) return GLM52_OK;
    if (!case_array(t->c, name, &mask)) return fail(GLM52_E_INVALID, "there is no row mask %s", name);
    float *values = array_floats(&mask);
    glm52_status status = glm52_batch_set(t->batch, "row_mask", GLM52_DTYPE_F32, values, (uint64_t)mask.count);
    free(values);
    array_free(&mask);
    return status;
}

static void compare_variant(struct training *t, const char *variant)
{
    const struct model_config *m = &t->model->model.config.model;
    char tensor[300], metric[64];

    for (int layer = 0; layer < (int)m->num_hidden_layers; layer++) {
        if (m->indexer_types[layer] != INDEXER_FULL) continue;
        snprintf(tensor, sizeof tensor, "%s.kl_rows.%d", variant, layer);
        compare_kept(t, tensor, "kl_rows.%d", layer, NULL, 0);
        snprintf(tensor, sizeof tensor, "%s.kl.%d", variant, layer);
        snprintf(metric, sizeof metric, "indexer_loss.%d", layer);
        compare_metric(t, tensor, metric, 1);
    }
    snprintf(tensor, sizeof tensor, "%s.loss", variant);
    compare_metric(t, tensor, "loss", 1);
    snprintf(tensor, sizeof tensor, "%s.grad.", variant);
    compare_parameters(t, tensor, 1, 1);
}

void run_indexer_kl(struct golden_case *c)
{
    json_t *variants = json_object_get(c->sidecar, "variants"), *variant;
    struct array tokens = {0}, bounds = {0};
    const char *name;

    if (load_pack(c, &tokens, &bounds))
        case_fail_last(c, "pack");
    else
        json_object_foreach(variants, name, variant)
        {
            struct training t = {.c = c};
            glm52_status status = open_training(&t, configure_kl, variant, tokens.count);
            if (!status) status = feed(&t, tokens.integer, tokens.count, bounds.integer, bounds.count);
            if (!status) status = mask_rows(&t, variant);
            if (!status) status = glm52_step_gradients(t.step, &t.batch, 1);
            if (status)
                case_fail_last(c, name);
            else
                compare_variant(&t, name);
            close_training(&t);
        }
    array_free(&tokens);
    array_free(&bounds);
}

/* ---- multi-token prediction ---- */

/* The pack stands in the case's base. */
static glm52_status load_base(struct golden_case *c, struct array *tokens, struct array *bounds)
{
    const char *base = json_string_value(json_object_get(c->sidecar, "base"));
    char path[2100];
    struct golden_case other;

    if (!base) return load_pack(c, tokens, bounds);
    snprintf(path, sizeof path, "%s/%s.json", c->directory, base);
    json_t *sidecar = json_load_file(path, 0, NULL);
    if (!sidecar || !case_open(&other, path, sidecar)) return fail(GLM52_E_IO, "cannot open the base %s", path);
    glm52_status status = load_pack(&other, tokens, bounds);
    case_close(&other);
    return status;
}

static glm52_status configure_mtp(struct training *t, const void *with)
{
    const char *loss = with;

    TRY(glm52_config_set(t->config, "train.ce_coeff", "0"));
    TRY(set_mtp(t));
    if (!strcmp(loss, "kl")) {
        TRY(glm52_config_set(t->config, "mtp.factor", "0"));
        TRY(glm52_config_set(t->config, "indexer_loss.coeff", "0.5")); /* stands in the meaning of kl_loss */
        return glm52_config_set(t->config, "indexer_loss.kind", "sparse");
    }
    return glm52_config_set(t->config, "mtp.loss", loss);
}

static void compare_depths(struct training *t)
{
    char tensor[64], metric[64];

    for (int d = 0; d < t->step->step.network.mtp.depths; d++) {
        int *inside = rows_inside(&t->batch->pack, d);
        static const struct {
            const char *tensor, *tap;
            double absent;
        } value[] = {{"h.%d", "mtp_out.%d", 0},       {"logits.%d", "mtp_logits.%d", 0},
                     {"topk.%d", "mtp_topk.%d", -1},  {"router_idx.%d", "mtp_router_idx.%d", -1},
                     {"router_w.%d", "mtp_router_w.%d", 0}, {"ce_rows.%d", "mtp_ce_rows.%d", 0}};
        for (size_t i = 0; i < sizeof value / sizeof *value; i++) {
            snprintf(tensor, sizeof tensor, value[i].tensor, d);
            compare_kept(t, tensor, value[i].tap, d, inside, value[i].absent);
        }
        snprintf(tensor, sizeof tensor, "loss.%d", d);
        snprintf(metric, sizeof metric, "mtp.%d.loss", d);
        if (case_has(t->c, tensor)) compare_metric(t, tensor, metric, 1);
        free(inside);
    }
}

static void compare_mtp_kl(struct training *t)
{
    char tensor[64], metric[64];
    int layers = t->step->step.network.layers;

    for (int d = 0; d < t->step->step.network.mtp.depths; d++) {
        int *inside = rows_inside(&t->batch->pack, d);
        snprintf(tensor, sizeof tensor, "kl_rows.%d", d);
        compare_kept(t, tensor, "mtp_kl_rows.%d", d, inside, 0);
        snprintf(tensor, sizeof tensor, "kl.%d", d);
        snprintf(metric, sizeof metric, "indexer_loss.%d", layers + d);
        if (case_has(t->c, tensor)) compare_metric(t, tensor, metric, 1);
        free(inside);
    }
}

/* kl_loss and grad_kl are of the MTP layer's indexer alone; the trunk's learn beside it and are not compared. */
static void run_mtp_kl(struct golden_case *c, const struct array *tokens, const struct array *bounds)
{
    struct training t = {.c = c};
    double kl = 0, loss = 0;
    char metric[64];

    glm52_status status = open_training(&t, configure_mtp, "kl", tokens->count);
    if (!status) status = run_once(&t, tokens, bounds);
    if (status) {
        case_fail_last(c, "kl");
    } else {
        compare_mtp_kl(&t);
        for (int d = 0; d < t.step->step.network.mtp.depths; d++) {
            snprintf(metric, sizeof metric, "indexer_loss.%d", t.step->step.network.layers + d);
            if (!glm52_step_metric(t.step, metric, &kl)) loss += 0.5 * kl;
        }
        compare_value(&t, "kl_loss", loss);
        compare_parameters(&t, "grad_kl.", 1, 0);
    }
    close_training(&t);
}

static void run_mtp(struct golden_case *c, const char *loss)
{
    struct array tokens = {0}, bounds = {0};
    struct training t = {.c = c};

    glm52_status status = load_base(c, &tokens, &bounds);
    if (!status) status = open_training(&t, configure_mtp, loss, tokens.count);
    if (!status) status = run_once(&t, &tokens, &bounds);
    if (status) {
        case_fail_last(c, loss);
    } else {
        compare_depths(&t);
        compare_metric(&t, "loss", "loss", 1);
        compare_parameters(&t, "grad.", 1, 1);
        if (!strcmp(loss, "tv")) {
            compare_kept(&t, "L", "tv_rows", 0, NULL, 0);
            double *alpha = must_allocate((size_t)(t.step->step.network.mtp.depths * tokens.count), sizeof *alpha);
            for (int d = 0; d < t.step->step.network.mtp.depths; d++) {
                const struct kept *k = find(&t, "mtp_alpha.%d", d);
                if (k) memcpy(alpha + d * tokens.count, k->value, (size_t)tokens.count * sizeof *alpha);
            }
            compare_floats(c, "alpha", "alpha", alpha, t.step->step.network.mtp.depths * tokens.count);
            free(alpha);
        }
    }
    close_training(&t);
    if (!status && case_has(c, "kl_loss")) run_mtp_kl(c, &tokens, &bounds);
    array_free(&tokens);
    array_free(&bounds);
}

void run_mtp_ce(struct golden_case *c)
{
    run_mtp(c, "ce");
}

void run_mtp_tv(struct golden_case *c)
{
    run_mtp(c, "tv");
}

static glm52_status configure_base(struct training *t, const void *with)
{
    (void)t, (void)with;
    return GLM52_OK;
}

void run_mtp_base(struct golden_case *c)
{
    struct array tokens = {0}, bounds = {0};
    struct training t = {.c = c};
    char tensor[64];

    glm52_status status = load_pack(c, &tokens, &bounds);
    if (!status) status = open_training(&t, configure_base, NULL, tokens.count);
    if (!status) status = run_once(&t, &tokens, &bounds);
    if (status) {
        case_fail_last(c, "trunk");
    } else {
        compare_kept(&t, "h", "final_hidden", 0, NULL, 0);
        compare_kept(&t, "logits", "logits", 0, NULL, 0);
        compare_kept(&t, "ce_rows", "ce_rows", 0, NULL, 0);
        compare_metric(&t, "loss", "loss", 1);
        for (int layer = 0; layer < t.step->step.network.layers; layer++) {
            static const char *const names[] = {"topk.%d", "router_idx.%d", "router_w.%d"};
            for (int i = 0; i < 3; i++) {
                snprintf(tensor, sizeof tensor, names[i], layer);
                compare_kept(&t, tensor, names[i], layer, NULL, 0);
            }
        }
        compare_parameters(&t, "grad.", 1, 1);
    }
    close_training(&t);
    array_free(&tokens);
    array_free(&bounds);
}

/* ---- trajectory ---- */

/* Everything of all steps, in the shapes of the case's tensors. */
struct record {
    const char *tensor;
    int64_t count;    /* filled so far */
    double *value;
};

enum { LOSS, CE, MTP_CE, KL, GRAD_NORM, CLIP_COEFF, TOPK, ROUTER, MTP_TOPK, MTP_ROUTER, BIAS, RECORDS };

static const char *const record_name[RECORDS] = {"loss", "ce", "mtp_ce", "kl", "grad_norm", "clip_coeff", "topk", "router",
                                                 "mtp_topk", "mtp_router", "bias"};

static glm52_status configure_trajectory(struct training *t, const void *with)
{
    (void)with;
    TRY(set_mtp(t));
    TRY(set_word(t, "indexer_loss.kind", option(t->c, "indexer_kl")));
    TRY(set_number(t, "indexer_loss.coeff", option(t->c, "indexer_kl_coeff")));
    return set_optimizer(t);
}

static void record_one(struct record *r, double value)
{
    r->value[r->count++] = value;
}

static void record_kept(struct training *t, struct record *r, const char *format, int number, const int *inside)
{
    const struct kept *k = find(t, format, number);
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

/* In fp32 nobody looks into the update, nor guides it, so that it may be a replay: gradients alone are looked into before. */
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

static glm52_status train(struct training *t, const struct array *tokens, const struct array *bounds, const struct array *lr,
                          struct record *records)
{
    int64_t steps = tokens->shape[0], rows = tokens->shape[1], count = bounds->shape[1];

    for (int64_t n = 0; n < steps; n++) {
        forget(t);
        TRY(feed(t, tokens->integer + n * rows, rows, bounds->integer + n * count, count));
        if (!n && has_prefix(t->c, "step1.grad.")) {
            TRY(glm52_step_gradients(t->step, &t->batch, 1));
            compare_parameters(t, "step1.grad.", 1, 0);
            forget(t);
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
            if (i < TOPK || i == BIAS) compare_first(c, record_name[i], records[i].value, records[i].count / tokens.shape[0]);
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
