/* Cases of training semantics, through a training step with a tap on its passes: what their kinds share. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/dtype.h"
#include "training.h"

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
    glm52_view view = {.data = (void *)(uintptr_t)values, .on_device = 1,
                       .bytes = (uint64_t)k->count * dtype_size(type)};
    void *copy = view_on_host(t->context, &view);
    for (int64_t i = 0; i < k->count; i++)
        k->value[i] = number_at(copy, type, i);
    free(copy);
}

void training_forget(struct training *t)
{
    for (int i = 0; i < t->keeps; i++) free(t->kept[i].value);
    t->keeps = 0;
}

const struct kept *training_find(struct training *t, const char *format, int number)
{
    char name[48];

    snprintf(name, sizeof name, format, number);
    for (int i = 0; i < t->keeps; i++)
        if (!strcmp(t->kept[i].name, name)) return &t->kept[i];
    case_fail(t->c, "the library shows no %s", name);
    return NULL;
}

/* ---- options ---- */

const json_t *training_option(const struct golden_case *c, const char *key)
{
    return json_object_get(json_object_get(c->sidecar, "options"), key);
}

static glm52_status set(struct training *t, const char *key, const char *format, double value)
{
    char text[64];

    snprintf(text, sizeof text, format, value);
    return glm52_config_set(t->config, key, text);
}

glm52_status set_number(struct training *t, const char *key, const json_t *value)
{
    return json_is_number(value) ? set(t, key, "%.17g", json_number_value(value)) : GLM52_OK;
}

static glm52_status set_flag(struct training *t, const char *key, const json_t *value)
{
    return json_is_boolean(value) ? glm52_config_set(t->config, key, json_is_true(value) ? "true" : "false") : GLM52_OK;
}

glm52_status set_word(struct training *t, const char *key, const json_t *value)
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

glm52_status set_mtp(struct training *t)
{
    const struct golden_case *c = t->c;
    const json_t *offset = training_option(c, "query_position_offset"), *detach = training_option(c, "detach_heads");

    TRY(set_number(t, "mtp.depths", training_option(c, "depths")));
    TRY(set_number(t, "mtp.factor", training_option(c, "mtp_loss_scaling_factor")));
    TRY(set_flag(t, "mtp.detach_heads", detach ? detach : training_option(c, "mtp_detach_heads")));
    TRY(glm52_config_set(t->config, "mtp.share",
                         json_is_true(training_option(c, "share_index_and_kv")) ? "index_kv" : "none"));
    return glm52_config_set(t->config, "mtp.query_offset", json_is_string(offset) ? "depth" : "none");
}

glm52_status set_optimizer(struct training *t)
{
    const json_t *muon = training_option(t->c, "muon"), *adamw = training_option(t->c, "adamw");

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
    TRY(set_number(t, "train.clip", training_option(t->c, "clip_global_norm")));
    return set_number(t, "moe.bias_update_rate", training_option(t->c, "expert_bias_update_rate"));
}

/* ---- life ---- */

glm52_status open_training(struct training *t, glm52_status (*configure)(struct training *, const void *),
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

void close_training(struct training *t)
{
    training_forget(t);
    if (t->scores)
        t->context->stream.ops->release(&t->context->stream, t->scores, t->score_bytes, MEMORY_WORKSPACE);
    glm52_batch_unref(&t->batch);
    glm52_step_unref(&t->step);
    glm52_optimizer_unref(&t->optimizer);
    glm52_model_unref(&t->model);
    glm52_config_unref(&t->config);
    glm52_context_unref(&t->context);
}

glm52_status training_feed(struct training *t, const int64_t *tokens, int64_t rows, const int64_t *bounds,
                           int64_t count)
{
    TRY(glm52_batch_set(t->batch, "tokens", GLM52_DTYPE_I64, tokens, (uint64_t)rows));
    return glm52_batch_set(t->batch, "cu_seqlens", GLM52_DTYPE_I64, bounds, (uint64_t)count);
}

/* ---- comparing ---- */

void compare_value(struct training *t, const char *tensor, double value)
{
    if (case_has(t->c, tensor)) compare_floats(t->c, tensor, tensor, &value, 1);
}

void compare_metric(struct training *t, const char *tensor, const char *metric, double factor)
{
    double value = 0;

    if (glm52_step_metric(t->step, metric, &value))
        case_fail_last(t->c, tensor);
    else
        compare_value(t, tensor, value * factor);
}

/* Values of a tap against a tensor; rows outside `inside` (if given) are set to `absent` first. */
void compare_kept(struct training *t, const char *tensor, const char *format, int number, const int *inside,
                  double absent)
{
    if (!case_has(t->c, tensor)) return;
    const struct kept *k = training_find(t, format, number);
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
void compare_parameters(struct training *t, const char *prefix, int gradients, int rest_is_zero)
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
int *rows_inside(const struct pack *p, int d)
{
    int *inside = must_allocate((size_t)p->rows, sizeof *inside);

    for (int64_t n = 0; n < p->documents; n++)
        for (int64_t t = p->cu_seqlens[n]; t < p->cu_seqlens[n + 1]; t++) inside[t] = t + 1 + d < p->cu_seqlens[n + 1];
    return inside;
}

/* Loads the pack of the case (or of its base) and runs forward and backward. */
glm52_status load_pack(struct golden_case *c, struct array *tokens, struct array *bounds)
{
    if (case_array(c, "input_ids", tokens) && tokens->integer && case_array(c, "cu_seqlens", bounds) && bounds->integer)
        return GLM52_OK;
    return fail(GLM52_E_INVALID, "input_ids and cu_seqlens must be there, and integers");
}

glm52_status training_run_once(struct training *t, const struct array *tokens, const struct array *bounds)
{
    TRY(training_feed(t, tokens->integer, tokens->count, bounds->integer, bounds->count));
    return glm52_step_gradients(t->step, &t->batch, 1);
}
