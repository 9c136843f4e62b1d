/* A hub config.json (model_type glm_moe_dsa, model.md 1.1) as the base of the model section, and back. Keys that are
 * options are rows of the schema; what else a hub file may say is declared here. */
#include <stdio.h>
#include <string.h>

#include "config/schema.h"

enum { CONFIG_FILE_LIMIT = 16 << 20 };
#define MODEL_TYPE "glm_moe_dsa"

/* Keys that could describe another model than ours: any other value is refused. Null stands for the value. */
static const struct fixed {
    const char *key, *value; /* as JSON */
    int written;             /* in GLM-5.2's own config.json */
} fixed[] = {
    {"moe_layer_freq", "1", 1},
    {"scoring_func", "\"sigmoid\"", 1},
    {"topk_method", "\"noaux_tc\"", 1},
    {"n_group", "1", 1},
    {"topk_group", "1", 1},
    {"moe_router_dtype", "\"float32\"", 1},
    {"attention_bias", "false", 1},
    {"attention_dropout", "0.0", 1},
    {"mlp_bias", "false", 0},
    {"hidden_act", "\"silu\"", 1},
    {"rope_interleave", "true", 1},
    {"indexer_rope_interleave", "true", 1},
    {"rope_scaling", "null", 0},
    {"index_topk_pattern", "null", 1},
    {"tie_word_embeddings", "false", 1},
    {"quantization_config", "null", 0},
    {"compression_config", "null", 0},
};

/* Keys that other keys imply, written anew at every dump. layer_types is checked, head_dim is wrong on the hub. */
static const char *const implied[] = {"architectures",  "model_type", "rope_parameters",     "rope_theta",
                                      "layer_types",    "head_dim",   "num_key_value_heads", "qk_head_dim"};
/* Keys without a meaning for training: kept without a word. */
static const char *const inert[] = {"dtype",          "transformers_version", "use_cache", "ep_size",
                                    "pretraining_tp", "bos_token_id",         "_name_or_path"};

static int is_one_of(const char *key, const char *const *keys, size_t count)
{
    while (count--)
        if (!strcmp(key, keys[count])) return 1;
    return 0;
}

#define ONE_OF(key, keys) is_one_of(key, keys, sizeof(keys) / sizeof *(keys))

/* ---- reading ----------------------------------------------------------------------------------------- */

static int same_value(const json_t *a, const json_t *b)
{
    if (json_is_number(a) && json_is_number(b)) return json_number_value(a) == json_number_value(b);
    return json_equal(a, b);
}

static glm52_status unsupported(const char *key, const json_t *value, const char *only)
{
    refuse(GLM52_E_UNSUPPORTED, key, value, "is not supported; only %s is", only);
    return fail_hint(
        "the file describes another architecture than GLM-5.2, or a variant of it this library does not train");
}

static glm52_status check_fixed(const struct fixed *f, const json_t *value)
{
    json_t *ours;

    if (json_is_null(value)) return GLM52_OK;
    if (strstr(f->key, "tion_config")) {
        fail(GLM52_E_UNSUPPORTED, "%s: quantised checkpoints cannot be read yet", f->key);
        fail_hint("use the BF16 release of the model");
        return fail_detail("key", "%s", f->key);
    }
    TRY(json_read(f->value, strlen(f->value), &ours));
    int same = same_value(value, ours);
    json_decref(ours);
    return same ? GLM52_OK : unsupported(f->key, value, f->value);
}

/* A size that two others fix, compared within the file. */
static glm52_status check_implied(const json_t *file, const char *key, const char *a, const char *b)
{
    const json_t *value = json_object_get(file, key);
    const json_t *left = json_object_get(file, a), *right = json_object_get(file, b);
    json_int_t implied_value = json_integer_value(left) + (b ? json_integer_value(right) : 0);

    if (!value || json_is_null(value) || !json_is_integer(left) || (b && !json_is_integer(right))) return GLM52_OK;
    if (json_is_number(value) && json_number_value(value) == (double)implied_value) return GLM52_OK;
    return refuse(GLM52_E_UNSUPPORTED, key, value, "must equal %s%s%s = %lld", a, b ? " + " : "", b ? b : "",
                  (long long)implied_value);
}

static glm52_status check_layer_types(const json_t *value)
{
    const char *only = "deepseek_sparse_attention";

    if (value && !json_is_null(value) && !json_is_array(value))
        return refuse(GLM52_E_INVALID, "layer_types", value, "is not a list");
    for (size_t i = 0; i < json_array_size(value); i++) {
        const json_t *one = json_array_get(value, i);
        if (!json_is_string(one) || strcmp(json_string_value(one), only))
            return unsupported("layer_types", one, only);
    }
    return GLM52_OK;
}

static glm52_status check_model_type(const json_t *file)
{
    const json_t *type = json_object_get(file, "model_type");

    if (type && json_is_string(type) && !strcmp(json_string_value(type), MODEL_TYPE)) return GLM52_OK;
    if (type) return unsupported("model_type", type, MODEL_TYPE);
    fail(GLM52_E_INVALID, "model_type is missing; a GLM-5.2 config.json has \"" MODEL_TYPE "\"");
    return fail_detail("key", "model_type");
}

static glm52_status take(struct config *c, const struct option *o, const char *label, const json_t *value)
{
    if (c->chosen[o - options] == FROM_USER) return GLM52_OK;
    if (json_is_null(value) && !(o->flags & OPTION_REQUIRED)) return GLM52_OK;
    TRY(option_from_json(c, o, label, value));
    c->chosen[o - options] = FROM_BASE;
    return GLM52_OK;
}

/* {"rope_type": "default", "rope_theta": 8000000}, or rope_theta at the top level of older files. */
static glm52_status take_rope(struct config *c, const json_t *file)
{
    const struct option *theta = option_find("model.rope_theta");
    const json_t *flat = json_object_get(file, "rope_theta"), *parameters = json_object_get(file, "rope_parameters");
    const char *key;
    json_t *value;

    if (flat) TRY(take(c, theta, "rope_theta", flat));
    if (!parameters || json_is_null(parameters)) return GLM52_OK;
    if (!json_is_object(parameters))
        return refuse(GLM52_E_INVALID, "rope_parameters", parameters, "is not an object");
    json_object_foreach((json_t *)parameters, key, value) {
        char label[96];
        snprintf(label, sizeof label, "rope_parameters.%s", key);
        if (!strcmp(key, "rope_theta")) {
            if (flat && !same_value(flat, value))
                return refuse(GLM52_E_INVALID, label, value, "contradicts rope_theta at the top level");
            TRY(take(c, theta, label, value));
        } else if (!strcmp(key, "rope_type") || !strcmp(key, "type")) {
            if (!json_is_string(value) || strcmp(json_string_value(value), "default"))
                return unsupported(label, value, "default");
        } else if (!json_is_null(value) &&
                   !(!strcmp(key, "partial_rotary_factor") && json_number_value(value) == 1)) {
            return unsupported(label, value, "plain rotation without scaling");
        }
    }
    return GLM52_OK;
}

/* "a, b, c" in the log, once per file. */
static void log_kept(struct config *c, const char *where)
{
    struct text names;
    const char *key;
    json_t *value;

    text_init(&names, c->host);
    json_object_foreach(c->hub_extra, key, value) {
        if (ONE_OF(key, inert)) continue;
        text_add(&names, "%s%s", names.length ? ", " : "", key);
    }
    if (names.length)
        host_log(c->host, GLM52_LOG_NOTICE, "%s: unknown keys are kept as they are: %.800s", where, names.at);
    text_free(&names);
}

static glm52_status take_key(struct config *c, const char *key, json_t *value)
{
    char name[96];

    for (size_t i = 0; i < sizeof fixed / sizeof *fixed; i++)
        if (!strcmp(key, fixed[i].key)) return check_fixed(&fixed[i], value);
    if (ONE_OF(key, implied)) return GLM52_OK;
    snprintf(name, sizeof name, "model.%s", key);
    const struct option *o = option_find(name);
    if (o && !(o->flags & OPTION_NOT_HUB)) return take(c, o, key, value);
    if (!strcmp(key, "torch_dtype")) key = "dtype"; /* its older name */
    return json_object_set(c->hub_extra, key, value) ? json_nomem() : GLM52_OK;
}

static glm52_status take_file(struct config *c, const json_t *file, const char *where)
{
    const char *key;
    json_t *value;

    if (!json_is_object(file)) return fail(GLM52_E_CORRUPT, "not a JSON object");
    TRY(check_model_type(file));
    c->chosen[option_find("model.preset") - options] = FROM_DEFAULT; /* the file replaces it */
    TRY(base_clear(c));
    c->hub_extra = json_object();
    if (!c->hub_extra) return json_nomem();
    json_object_foreach((json_t *)file, key, value) TRY(take_key(c, key, value));
    TRY(take_rope(c, file));
    TRY(check_layer_types(json_object_get(file, "layer_types")));
    TRY(check_implied(file, "num_key_value_heads", "num_attention_heads", NULL));
    TRY(check_implied(file, "qk_head_dim", "qk_nope_head_dim", "qk_rope_head_dim"));
    TRY(config_validate_model(c));
    log_kept(c, where);
    return GLM52_OK;
}

glm52_status config_load_hub_text(struct config *c, const char *text, size_t bytes, const char *where)
{
    json_t *file = NULL;
    struct config work, old = *c;
    glm52_status status = config_copy(&work, c);

    if (status) return status;
    status = json_read(text, bytes, &file);
    if (!status) status = take_file(&work, file, where);
    json_decref(file);
    if (status) {
        config_free(&work);
        if (status == GLM52_E_NOMEM) return status;
        fail_prefix("%s", where);
        return fail_detail("path", "%s", where);
    }
    *c = work;
    config_free(&old);
    return GLM52_OK;
}

glm52_status config_load_hub(struct config *c, const char *path)
{
    char *text;
    size_t bytes;

    TRY(file_read_all(c->host, path, CONFIG_FILE_LIMIT, &text, &bytes));
    glm52_status status = config_load_hub_text(c, text, bytes, path);
    host_free(c->host, text, bytes + 1, MEMORY_HOST);
    return status;
}

/* ---- writing ----------------------------------------------------------------------------------------- */

static const char *hub_dtype(glm52_dtype dtype)
{
    switch (dtype) {
    case GLM52_DTYPE_F32: return "float32";
    case GLM52_DTYPE_F16: return "float16";
    case GLM52_DTYPE_F64: return "float64";
    default: return "bfloat16";
    }
}

/* Takes over `value`; true on failure, as jansson has it. */
static int put(json_t *file, const char *key, json_t *value)
{
    return json_object_set_new(file, key, value) != 0;
}

/* Does first_k_dense_replace say what the list says? */
static int dense_layers_lead(const struct model_config *m)
{
    for (int i = 0; i < m->mlp_layer_count; i++)
        if ((m->mlp_layer_types[i] == MLP_DENSE) != (i < m->first_k_dense_replace)) return 0;
    return 1;
}

static int hub_has(const struct config *c, const struct option *o)
{
    const struct model_config *m = &c->model;

    if (!option_in_section(o, "model") || o->flags & OPTION_NOT_HUB) return 0;
    switch (o->offset) {
    case offsetof(struct config, model.rope_theta): return 0; /* in rope_parameters */
    case offsetof(struct config, model.pad_token_id): return m->pad_token_id >= 0;
    case offsetof(struct config, model.eos_token_id): return m->eos_count > 0;
    case offsetof(struct config, model.first_k_dense_replace): return dense_layers_lead(m);
    }
    return 1;
}

static int put_options(json_t *file, const struct config *c)
{
    int bad = 0;

    for (int i = 0; i < option_count; i++) {
        const struct option *o = &options[i];
        if (!hub_has(c, o)) continue;
        bad |= put(file, o->key + strlen("model."), option_to_json(c, o));
    }
    return bad;
}

static int put_implied(json_t *file, const struct model_config *m)
{
    json_t *rope = json_object();
    int bad = put(rope, "rope_type", json_string("default")) | put(rope, "rope_theta", json_real(m->rope_theta));

    bad |= put(file, "rope_parameters", rope);
    bad |= put(file, "num_key_value_heads", json_integer(m->num_attention_heads));
    bad |= put(file, "qk_head_dim", json_integer(m->qk_nope_head_dim + m->qk_rope_head_dim));
    bad |= put(file, "head_dim", json_integer(m->qk_nope_head_dim));
    for (size_t i = 0; i < sizeof fixed / sizeof *fixed; i++)
        if (fixed[i].written) bad |= put(file, fixed[i].key, json_loads(fixed[i].value, JSON_DECODE_ANY, NULL));
    return bad;
}

static json_t *hub_tree(const struct config *c, glm52_dtype dtype)
{
    json_t *file = json_object(), *names = json_array();
    int bad = json_array_append_new(names, json_string("GlmMoeDsaForCausalLM"));

    bad |= put(file, "architectures", names);
    bad |= put(file, "model_type", json_string(MODEL_TYPE));
    bad |= put(file, "dtype", json_string(hub_dtype(dtype)));
    bad |= put_options(file, c);
    bad |= put_implied(file, &c->model);
    if (c->hub_extra)
        bad |= dtype ? json_object_update_missing(file, c->hub_extra) : json_object_update(file, c->hub_extra);
    if (!bad) return file;
    json_decref(file);
    return NULL;
}

glm52_status config_dump_hub(const struct config *c, glm52_dtype dtype, char **out)
{
    struct config work;
    json_t *file = NULL;

    TRY(config_copy(&work, c));
    glm52_status status = config_validate_model(&work);
    if (!status) {
        /* A hub file spells its lists out, even where ours follow the formulas. */
        work.model.mlp_layer_count = work.model.indexer_count = (int)work.model.num_hidden_layers;
        file = hub_tree(&work, dtype);
        if (!file) status = json_nomem();
    }
    if (!status) status = json_finish(work.host, file, out);
    json_decref(file);
    config_free(&work);
    return status;
}
