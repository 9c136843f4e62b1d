/* Cases of the whole model, through the public API: forward outputs by name, and the gradient of every parameter.
 *   hf_forward  input_ids [n, length] as n documents of a row; also with every directory of same_values
 *   ref_model   a packed row with cu_seqlens; and the sequences A.input_ids as documents
 *   hf_bf16     in f32 against its float64 part; in bf16 the distance from that, against Hugging Face's own */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "api/object.h"
#include "base/dtype.h"
#include "base/text.h"
#include "case.h"
#include "glm52.h"

struct model_run {
    struct golden_case *c;
    const char *label;      /* put before the names in the report */
    glm52_context *context;
    glm52_model *model;
    glm52_batch *batch;
    int64_t rows;
    int64_t length;         /* of each document, where input_ids was [n, length]; else 0 */
    const char *precision;  /* NULL: f32 */
    struct array tokens;
};

/* What glm52_model_forward() keeps, as far as cases know it; a name that ends with a dot is followed by a layer. */
static const char *const quantity[] = {"logits", "loss", "ce_rows", "final_hidden", "hidden.", "topk.", "index_scores.",
                                       "router_logits.", "router_idx.", "router_w."};

static int is_quantity(const char *name)
{
    for (size_t i = 0; i < sizeof quantity / sizeof *quantity; i++) {
        size_t length = strlen(quantity[i]);
        if (!strncmp(name, quantity[i], length) && (quantity[i][length - 1] == '.' || !name[length])) return 1;
    }
    return 0;
}

/* ---- model and batch --------------------------------------------------------------------------------- */

/* Options that no hub file has come from the sidecar. */
static glm52_status set_epsilons(const struct golden_case *c, glm52_config *config)
{
    static const char *const key[] = {"latent_norm_eps", "index_k_norm_eps"};
    char name[64], value[64];

    for (int i = 0; i < 2; i++) {
        const json_t *given = json_object_get(json_object_get(c->sidecar, "config"), key[i]);
        if (!json_is_number(given)) continue;
        snprintf(name, sizeof name, "model.%s", key[i]);
        snprintf(value, sizeof value, "%.17g", json_number_value(given));
        TRY(glm52_config_set(config, name, value));
    }
    return GLM52_OK;
}

/* A microbatch holds the longest row of the case. */
static glm52_status set_rows(const struct golden_case *c, glm52_config *config)
{
    uint64_t rows = 1;
    char value[32];

    for (size_t i = 0; i < c->file.tensors; i++)
        if (text_ends_with(c->file.tensor[i].name, "input_ids") && safetensors_elements(&c->file.tensor[i]) > rows)
            rows = safetensors_elements(&c->file.tensor[i]);
    snprintf(value, sizeof value, "%llu", (unsigned long long)rows);
    TRY(glm52_config_set(config, "data.pack_tokens", value));
    TRY(glm52_config_set(config, "train.microbatch_tokens", value));
    return glm52_config_set(config, "train.microbatches", "1");
}

static glm52_status open_model(struct model_run *r, const char *directory)
{
    char path[2100];
    glm52_config *config = NULL;
    glm52_status status = case_context(&r->context);

    snprintf(path, sizeof path, "%s/%s", r->c->directory, directory);
    if (!status) status = glm52_config_create(r->context, &config);
    if (!status) status = set_epsilons(r->c, config);
    if (!status) status = set_rows(r->c, config);
    int grid = r->c->bf16 && golden_grid >= 0;
    const char *precision = r->c->bf16 && !grid ? "bf16" : r->precision;
    if (!status && precision) status = glm52_config_set(config, "precision.params", precision);
    if (!status) status = glm52_model_load(r->context, config, path, &r->model);
    if (!status) guide_model(&r->context->stream, &r->model->model);
    if (!status && grid) grid_model(&r->context->stream, golden_grid);
    glm52_config_unref(&config);
    return status;
}

static void close_run(struct model_run *r)
{
    glm52_batch_unref(&r->batch);
    glm52_model_unref(&r->model);
    glm52_context_unref(&r->context);
    array_free(&r->tokens);
}

static glm52_status set_integers(glm52_batch *batch, const char *field, const struct array *a)
{
    return glm52_batch_set(batch, field, GLM52_DTYPE_I64, a->integer, (uint64_t)a->count);
}

/* Makes the batch of PREFIXinput_ids: a packed row with cu_seqlens, or sequences that become documents. */
static glm52_status feed(struct model_run *r, const char *prefix)
{
    char name[64];
    struct array bounds = {0};
    glm52_status status;

    snprintf(name, sizeof name, "%sinput_ids", prefix);
    array_free(&r->tokens);
    glm52_batch_unref(&r->batch);
    if (!case_array(r->c, name, &r->tokens) || !r->tokens.integer)
        return fail(GLM52_E_INVALID, "%s must be there, and integers", name);
    r->rows = r->tokens.count;
    r->length = r->tokens.dimensions == 2 ? r->tokens.shape[1] : 0;
    snprintf(name, sizeof name, "%scu_seqlens", prefix);
    if (r->length) {
        bounds.count = r->tokens.shape[0] + 1;
        bounds.integer = must_allocate((size_t)bounds.count, sizeof *bounds.integer);
        for (int64_t i = 0; i < bounds.count; i++) bounds.integer[i] = i * r->length;
    } else if (case_has(r->c, name) && (!case_array(r->c, name, &bounds) || !bounds.integer)) {
        array_free(&bounds);
        return fail(GLM52_E_INVALID, "%s must be integers", name);
    }
    status = glm52_batch_create(r->context, &r->batch);
    if (!status) status = set_integers(r->batch, "tokens", &r->tokens);
    if (!status && bounds.integer) status = set_integers(r->batch, "cu_seqlens", &bounds);
    array_free(&bounds);
    return status;
}

/* ---- comparing --------------------------------------------------------------------------------------- */

static int64_t view_count(const glm52_view *v)
{
    int64_t count = 1;

    for (int i = 0; i < v->dimensions; i++) count *= v->shape[i];
    return count;
}

static struct array view_array(const struct model_run *r, const glm52_view *v)
{
    struct array a = {.count = view_count(v)};
    void *values = view_on_host(r->context, v);
    int is_integer = v->dtype == GLM52_DTYPE_I32 || v->dtype == GLM52_DTYPE_I64;

    a.value = must_allocate((size_t)a.count, sizeof *a.value);
    if (is_integer) a.integer = must_allocate((size_t)a.count, sizeof *a.integer);
    for (int64_t i = 0; i < a.count; i++) {
        if (is_integer)
            a.integer[i] = v->dtype == GLM52_DTYPE_I32 ? ((int32_t *)values)[i] : ((int64_t *)values)[i];
        else if (v->dtype == GLM52_DTYPE_BF16)
            a.value[i] = (double)bf16_to_f32(((uint16_t *)values)[i]);
        else
            a.value[i] = v->dtype == GLM52_DTYPE_F64 ? ((double *)values)[i] : (double)((float *)values)[i];
    }
    free(values);
    return a;
}

/* Selected keys are rows of the pack; cases of sequences count from the beginning of each. */
static void count_from_document(const struct model_run *r, struct array *keys)
{
    int64_t k = r->rows ? keys->count / r->rows : 0;

    for (int64_t i = 0; i < keys->count; i++)
        if (keys->integer[i] >= 0) keys->integer[i] -= i / k / r->length * r->length;
}

static void compare_output(struct model_run *r, const char *tensor, const char *output)
{
    char label[400];
    glm52_view view = {.struct_size = sizeof view};

    snprintf(label, sizeof label, "%s%s", r->label, tensor);
    if (glm52_batch_get(r->batch, output, &view)) {
        case_fail_last(r->c, label);
        return;
    }
    struct array got = view_array(r, &view);
    if (got.integer && r->length && text_starts_with(output, "topk.")) count_from_document(r, &got);
    for (int64_t i = 0; got.integer && !strcmp(output, "labels") && i < got.count; i++)
        if (got.integer[i] < 0) got.integer[i] = -100;
    if (got.integer)
        compare_integers(r->c, label, tensor, got.integer, got.count);
    else
        compare_floats(r->c, label, tensor, got.value, got.count);
    array_free(&got);
}

/* Runs the model for every quantity that the case has under the prefix. */
static void compare_outputs(struct model_run *r, const char *prefix)
{
    struct golden_case *c = r->c;
    struct text wanted;
    char labels[64];

    text_init(&wanted, &c->host);
    for (size_t i = 0; i < c->file.tensors; i++) {
        const char *name = c->file.tensor[i].name;
        if (text_starts_with(name, prefix) && is_quantity(name + strlen(prefix)))
            text_add(&wanted, "%s%s", wanted.length ? " " : "", name + strlen(prefix));
    }
    if (glm52_model_forward(r->model, r->batch, wanted.at ? wanted.at : "")) {
        case_fail_last(c, "forward");
    } else {
        for (size_t i = 0; i < c->file.tensors; i++) {
            const char *name = c->file.tensor[i].name;
            if (text_starts_with(name, prefix) && is_quantity(name + strlen(prefix)))
                compare_output(r, name, name + strlen(prefix));
        }
        snprintf(labels, sizeof labels, "%slabels", prefix);
        if (case_has(c, labels)) compare_output(r, labels, "labels");
    }
    text_free(&wanted);
}

/* One backward through a training step; the gradients stay in the views of the parameters. */
static glm52_status compute_gradients(struct model_run *r, glm52_optimizer **optimizer, glm52_step **step)
{
    TRY(glm52_optimizer_create(r->model, NULL, optimizer));
    TRY(glm52_step_create(r->model, *optimizer, NULL, step));
    return glm52_step_gradients(*step, &r->batch, 1);
}

/* Hugging Face leaves the row of the padding token out of the embedding's gradient, where the token occurs. */
static void drop_padding_row(const struct model_run *r, const char *parameter, const glm52_view *shape,
                             struct array *got)
{
    const json_t *pad = json_object_get(json_object_get(r->c->sidecar, "config"), "pad_token_id");
    int64_t id = json_is_integer(pad) ? json_integer_value(pad) : -1, width = shape->shape[1];
    int occurs = 0;

    if (!json_object_get(r->c->sidecar, "padding_idx") || strcmp(parameter, "model.embed_tokens.weight")) return;
    for (int64_t i = 0; i < r->tokens.count; i++) occurs |= r->tokens.integer[i] == id;
    for (int64_t i = 0; occurs && i < width && (id + 1) * width <= got->count; i++) got->value[id * width + i] = 0;
}

static double largest_gradient(const struct model_run *r, const glm52_view *v)
{
    double most = 0;

    if (!v->data) return 0;
    struct array a = view_array(r, v);
    for (int64_t i = 0; i < a.count; i++) most = isnan(a.value[i]) ? INFINITY : fmax(most, fabs(a.value[i]));
    array_free(&a);
    return most;
}

/* Listed gradients one by one; all others must be zero. */
static void compare_parameters(struct model_run *r, const char *prefix)
{
    char tensor[300], label[400];
    uint32_t tensors = 0, unlisted = 0;
    uint64_t elements;

    if (glm52_model_parameter_count(r->model, &tensors, &elements)) case_fail_last(r->c, "parameters");
    double *other = must_allocate(tensors, sizeof *other);
    for (uint32_t i = 0; i < tensors; i++) {
        glm52_parameter_info info = {.struct_size = sizeof info};
        if (glm52_model_parameter(r->model, i, &info)) {
            case_fail_last(r->c, "parameter");
            continue;
        }
        snprintf(tensor, sizeof tensor, "%sgrad.%s", prefix, info.name);
        snprintf(label, sizeof label, "%s%s", r->label, tensor);
        if (!case_has(r->c, tensor)) {
            other[unlisted++] = largest_gradient(r, &info.gradient);
        } else if (!info.gradient.data) {
            case_fail(r->c, "%s: the library has no gradient of it", label);
        } else {
            struct array got = view_array(r, &info.gradient);
            drop_padding_row(r, info.name, &info.gradient, &got);
            compare_floats(r->c, label, tensor, got.value, got.count);
            array_free(&got);
        }
    }
    snprintf(label, sizeof label, "%s%sgrad of the %u parameters that are not listed", r->label, prefix, unlisted);
    compare_zero(r->c, label, other, unlisted);
    free(other);
}

static int has_gradients(const struct golden_case *c, const char *prefix)
{
    char start[64];

    snprintf(start, sizeof start, "%sgrad.", prefix);
    for (size_t i = 0; i < c->file.tensors; i++)
        if (text_starts_with(c->file.tensor[i].name, start)) return 1;
    return 0;
}

static void compare_gradients(struct model_run *r, const char *prefix)
{
    glm52_optimizer *optimizer = NULL;
    glm52_step *step = NULL;

    if (!has_gradients(r->c, prefix)) return;
    if (compute_gradients(r, &optimizer, &step))
        case_fail_last(r->c, "gradients");
    else
        compare_parameters(r, prefix);
    glm52_step_unref(&step);
    glm52_optimizer_unref(&optimizer);
}

/* ---- the kinds --------------------------------------------------------------------------------------- */

/* inputs: prefix of input_ids; outputs: of everything to compare. */
static void run_batch(struct model_run *r, const char *inputs, const char *outputs)
{
    if (feed(r, inputs)) {
        case_fail_last(r->c, "batch");
        return;
    }
    compare_outputs(r, outputs);
    compare_gradients(r, outputs);
}

/* Opens the directory and runs its batches: pairs of prefixes, ended by NULL. */
static void run_directory(struct golden_case *c, const char *directory, const char *label, const char *const *prefixes)
{
    struct model_run r = {.c = c, .label = label};

    if (!directory)
        case_fail(c, "weights is missing in the sidecar");
    else if (open_model(&r, directory))
        case_fail_last(c, directory);
    else
        for (; *prefixes; prefixes += 2) run_batch(&r, prefixes[0], prefixes[1]);
    close_run(&r);
}

static const char *weights(const struct golden_case *c)
{
    return json_string_value(json_object_get(c->sidecar, "weights"));
}

void run_hf_forward(struct golden_case *c)
{
    static const char *const prefixes[] = {"", "", NULL};
    const json_t *same = json_object_get(c->sidecar, "same_values");

    run_directory(c, weights(c), "", prefixes);
    for (size_t i = 0; i < json_array_size(same); i++) {
        const char *directory = json_string_value(json_array_get(same, i));
        char label[300];
        snprintf(label, sizeof label, "%s: ", directory ? directory : "?");
        run_directory(c, directory, label, prefixes);
    }
    case_check_used(c, 0);
}

void run_ref_model(struct golden_case *c)
{
    static const char *const pack[] = {"", "", NULL}, *const both[] = {"", "", "A.", "A.", NULL};

    run_directory(c, weights(c), "", case_has(c, "A.input_ids") ? both : pack);
    case_check_used(c, 1);
}

/* The bf16 part is a yardstick for implementations that compute in bf16. */
/* ---- bf16: how far from exact ---- */

struct distance {
    double largest, squares, norm;
    int64_t count;
};

/* Of a tensor of the case from what the library has. */
static struct distance distance_of(const struct model_run *r, const char *tensor, const glm52_view *view)
{
    struct golden_case *c = r->c;
    struct array exact = {0}, got = view_array(r, view);
    struct distance d = {0};

    if (!case_array(c, tensor, &exact) || exact.count != got.count) {
        case_fail(c, "%s: %lld values, the library has %lld", tensor, (long long)exact.count, (long long)got.count);
    } else {
        for (int64_t i = 0; i < got.count; i++) {
            double apart = fabs(got.value[i] - exact.value[i]);
            d.largest = apart <= d.largest ? d.largest : apart; /* a NaN is far */
            d.squares += apart * apart;
            d.norm += exact.value[i] * exact.value[i];
        }
        d.count = got.count;
    }
    array_free(&exact);
    array_free(&got);
    return d;
}

/* Twice what Hugging Face's bf16 deviates by. */
static void check_band(struct golden_case *c, const char *what, double found)
{
    double band = json_number_value(json_object_get(json_object_get(c->sidecar, "bf16_deviation"), what));

    printf("  bf16 %-67s error %-10.3g tolerance %-10.3g %s\n", what, found, 2 * band,
           found <= 2 * band ? "ok" : "FAILED");
    if (!(found <= 2 * band)) case_fail(c, "bf16 %s deviates by %g, twice %g is allowed", what, found, band);
}

static void check_bf16_outputs(struct model_run *r)
{
    glm52_view logits = {.struct_size = sizeof logits}, loss = logits;

    if (glm52_model_forward(r->model, r->batch, "logits loss") || glm52_batch_get(r->batch, "logits", &logits) ||
        glm52_batch_get(r->batch, "loss", &loss)) {
        case_fail_last(r->c, "bf16 forward");
        return;
    }
    struct distance d = distance_of(r, "f64.logits", &logits);
    check_band(r->c, "logits (max)", d.largest);
    check_band(r->c, "logits (rms)", sqrt(d.squares / (double)d.count));
    check_band(r->c, "loss", distance_of(r, "f64.loss", &loss).largest);
}

static void check_bf16_gradients(struct model_run *r)
{
    glm52_optimizer *optimizer = NULL;
    glm52_step *step = NULL;
    uint32_t tensors = 0;
    uint64_t elements;
    char tensor[300];
    double worst = 0;

    if (compute_gradients(r, &optimizer, &step)) case_fail_last(r->c, "bf16 gradients");
    glm52_model_parameter_count(r->model, &tensors, &elements);
    for (uint32_t i = 0; step && i < tensors; i++) {
        glm52_parameter_info info = {.struct_size = sizeof info};
        if (glm52_model_parameter(r->model, i, &info)) continue;
        snprintf(tensor, sizeof tensor, "f64.grad.%s", info.name);
        if (!case_has(r->c, tensor) || !info.gradient.data) continue;
        struct distance d = distance_of(r, tensor, &info.gradient);
        double relative = sqrt(d.squares / d.norm);
        worst = relative <= worst ? worst : relative;
    }
    check_band(r->c, "gradient (worst relative norm of the difference)", worst);
    glm52_step_unref(&step);
    glm52_optimizer_unref(&optimizer);
}

static void run_bf16(struct golden_case *c)
{
    struct model_run r = {.c = c, .label = "bf16 ", .precision = "bf16"};
    const char *directory = weights(c);

    if (!directory || open_model(&r, directory) || feed(&r, "")) {
        case_fail_last(c, "bf16");
    } else {
        check_bf16_outputs(&r);
        check_bf16_gradients(&r);
    }
    close_run(&r);
}

void run_hf_bf16(struct golden_case *c)
{
    static const char *const prefixes[] = {"", "f64.", NULL};

    run_directory(c, weights(c), "", prefixes);
    run_bf16(c);
    for (size_t i = 0; i < c->file.tensors; i++)
        if (text_starts_with(c->file.tensor[i].name, "bf16.")) case_leave_out(c, c->file.tensor[i].name);
    case_check_used(c, 0);
}
