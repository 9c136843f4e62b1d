/* A config as a whole: made, copied, changed all or nothing, read back. */
#include "config/config.h"

#include <stdio.h>
#include <string.h>

#include "config/schema.h"

static char **string_field(struct config *c, const struct option *o)
{
    return (char **)(void *)((char *)c + o->offset);
}

glm52_status config_init(struct config *c, struct host *host)
{
    glm52_status status = GLM52_OK;

    memset(c, 0, sizeof *c);
    c->host = host;
    c->chosen = host_calloc(host, (size_t)option_count, MEMORY_HOST);
    if (!c->chosen) status = GLM52_E_NOMEM;
    for (int i = 0; i < option_count && !status; i++) status = option_reset(c, &options[i]);
    if (status) config_free(c);
    return status;
}

void config_free(struct config *c)
{
    if (!c->host) return;
    for (int i = 0; i < option_count; i++)
        if (options[i].type == OPTION_STRING) host_strfree(c->host, *string_field(c, &options[i]));
    host_free(c->host, c->chosen, (size_t)option_count, MEMORY_HOST);
    json_decref(c->hub_extra);
    memset(c, 0, sizeof *c);
}

glm52_status config_copy(struct config *to, const struct config *from)
{
    int missing = 0;

    *to = *from;
    json_incref(to->hub_extra);
    to->chosen = host_alloc(to->host, (size_t)option_count, MEMORY_HOST);
    if (to->chosen) memcpy(to->chosen, from->chosen, (size_t)option_count);
    else missing = 1;
    for (int i = 0; i < option_count; i++) {
        if (options[i].type != OPTION_STRING) continue;
        char **at = string_field(to, &options[i]);
        *at = missing ? NULL : host_strdup(to->host, *at);
        if (!*at) missing = 1;
    }
    if (missing) config_free(to);
    return missing ? GLM52_E_NOMEM : GLM52_OK;
}

/* ---- the base of the model section ------------------------------------------------------------------- */

glm52_status base_clear(struct config *c)
{
    for (int i = 0; i < option_count; i++)
        if (option_in_section(&options[i], "model") && c->chosen[i] != FROM_USER) TRY(option_reset(c, &options[i]));
    json_decref(c->hub_extra);
    c->hub_extra = NULL;
    return GLM52_OK;
}

/* A preset that is set, changed or taken away takes its values with it. */
static glm52_status preset_changed(struct config *c, int had_preset)
{
    if (!had_preset && !*c->model.preset) return GLM52_OK;
    TRY(base_clear(c));
    return preset_apply(c, c->model.preset);
}

/* ---- changing ---------------------------------------------------------------------------------------- */

static glm52_status choose(struct config *c, const struct option *o, const json_t *json, const char *text)
{
    int had_preset = *c->model.preset != 0;

    TRY(json ? option_from_json(c, o, o->key, json) : option_from_text(c, o, o->key, text));
    c->chosen[o - options] = FROM_USER;
    if (o->offset != offsetof(struct config, model.preset)) return GLM52_OK;
    return preset_changed(c, had_preset);
}

static void replace(struct config *c, struct config *by)
{
    struct config old = *c;

    *c = *by;
    config_free(&old);
}

glm52_status config_set(struct config *c, const char *key, const char *value)
{
    const struct option *o = option_find(key);
    struct config work;

    if (!o && option_is_section(key)) {
        fail(GLM52_E_INVALID, "%s is a section; name one of its options", key);
        return fail_detail("key", "%s", key);
    }
    if (!o) return option_unknown(key);
    TRY(config_copy(&work, c));
    glm52_status status = choose(&work, o, NULL, value);
    if (status) config_free(&work);
    else replace(c, &work);
    return status;
}

static glm52_status load_object(struct config *c, const char *section, const json_t *object, uint8_t *seen)
{
    const char *name;
    json_t *value;

    json_object_foreach((json_t *)object, name, value) {
        char key[256];
        snprintf(key, sizeof key, "%s%s%s", section, *section ? "." : "", name);
        const struct option *o = option_find(key);
        if (o && seen[o - options]++) {
            fail(GLM52_E_INVALID, "%s is given twice", key);
            return fail_detail("key", "%s", key);
        }
        if (o) {
            TRY(choose(c, o, value, NULL));
        } else if (!*section && json_is_object(value) && (json_object_size(value) || option_is_section(key))) {
            TRY(load_object(c, key, value, seen));
        } else if (option_is_section(key)) {
            return refuse(GLM52_E_INVALID, key, value, "is no table of options");
        } else {
            return option_unknown(key);
        }
    }
    return GLM52_OK;
}

static glm52_status load_tree(struct config *c, const json_t *tree)
{
    struct config work;
    uint8_t *seen = NULL;

    if (!json_is_object(tree)) return refuse(GLM52_E_INVALID, "config", tree, "is no JSON object of options");
    TRY(config_copy(&work, c));
    seen = host_calloc(c->host, (size_t)option_count, MEMORY_HOST);
    glm52_status status = seen ? load_object(&work, "", tree, seen) : GLM52_E_NOMEM;
    host_free(c->host, seen, (size_t)option_count, MEMORY_HOST);
    if (status) config_free(&work);
    else replace(c, &work);
    return status;
}

glm52_status config_load_json(struct config *c, const char *json)
{
    json_t *tree;

    TRY(json_read(json, strlen(json), &tree));
    glm52_status status = load_tree(c, tree);
    json_decref(tree);
    return status;
}

/* ---- reading back ------------------------------------------------------------------------------------ */

/* Hands the text over as a string of its own. */
static glm52_status finish(struct text *text, char **out)
{
    glm52_status status = text_status(text);
    char *copy = status ? NULL : host_strdup(text->host, text->at ? text->at : "");

    text_free(text);
    if (!status && !copy) status = GLM52_E_NOMEM;
    if (!status) *out = copy;
    return status;
}

static void add_plain(struct text *text, const json_t *value)
{
    char number[NUMBER_TEXT];

    if (json_is_string(value)) text_add(text, "%s", json_string_value(value));
    else if (json_is_real(value)) text_add(text, "%s", number_text(json_real_value(value), number));
    else json_write(text, value, 0);
}

glm52_status config_get(const struct config *c, const char *key, char **out)
{
    const struct option *o = option_find(key);
    struct text text;

    if (!o) return option_unknown(key);
    json_t *value = option_to_json(c, o);
    if (!value) return json_nomem();
    text_init(&text, c->host);
    if (!json_is_array(value)) add_plain(&text, value);
    for (size_t i = 0; i < json_array_size(value); i++) {
        if (i) text_add(&text, ",");
        add_plain(&text, json_array_get(value, i));
    }
    json_decref(value);
    return finish(&text, out);
}

glm52_status json_finish(struct host *host, json_t *tree, char **out)
{
    struct text text;

    text_init(&text, host);
    json_write(&text, tree, 0);
    text_add(&text, "\n");
    return finish(&text, out);
}

/* Puts "model.hidden_size" into object "model" of the tree. */
static int put(json_t *tree, const char *key, json_t *value)
{
    const char *dot = strchr(key, '.');
    char section[32];

    if (!dot) return json_object_set_new(tree, key, value);
    snprintf(section, sizeof section, "%.*s", (int)(dot - key), key);
    json_t *object = json_object_get(tree, section);
    if (!object && json_object_set_new(tree, section, object = json_object())) object = NULL;
    return json_object_set_new(object, dot + 1, value);
}

glm52_status config_dump(const struct config *c, int hub, char **out)
{
    glm52_status status = GLM52_OK;

    if (hub) return config_dump_hub(c, 0, out);
    json_t *tree = json_object();
    for (int i = 0; i < option_count && !status; i++) {
        /* A number that merely follows from the list must not come back as somebody's choice beside it. */
        if (options[i].offset == offsetof(struct config, model.first_k_dense_replace) && c->model.mlp_layer_count &&
            c->chosen[i] == FROM_DEFAULT)
            continue;
        if (put(tree, options[i].key, option_to_json(c, &options[i]))) status = json_nomem();
    }
    if (!status) status = json_finish(c->host, tree, out);
    json_decref(tree);
    return status;
}

int config_indexer_source(const struct model_config *m, int layer)
{
    while (layer > 0 && m->indexer_types[layer] != INDEXER_FULL) layer--;
    return layer;
}

static glm52_status check_precision(const struct config *to, const char *key, int asked, int held)
{
    if (!to->chosen[option_find(key) - options] || asked == held) return GLM52_OK;
    fail(GLM52_E_INVALID, "%s differs from what the model was made with: it holds %s", key,
         held == PRECISION_BF16 ? "bf16" : "f32");
    fail_hint("leave it out, or load the model anew in the other precision");
    return fail_detail("key", "%s", key);
}

glm52_status config_take_model(struct config *to, const struct config *from)
{
    struct config donor;

    TRY(check_precision(to, "precision.params", to->precision.params, from->precision.params));
    TRY(check_precision(to, "precision.gradients", to->precision.gradients, from->precision.gradients));
    TRY(config_copy(&donor, from));
    to->precision.params = from->precision.params;
    to->precision.gradients = from->precision.gradients;
    struct model_config model = to->model;
    json_t *extra = to->hub_extra;
    to->model = donor.model;
    to->hub_extra = donor.hub_extra;
    donor.model = model;
    donor.hub_extra = extra;
    for (int i = 0; i < option_count; i++)
        if (option_in_section(&options[i], "model")) to->chosen[i] = from->chosen[i];
    config_free(&donor);
    return GLM52_OK;
}

static int decides_stage(const struct option *o)
{
    static const char *const keys[] = {"train.attention", "train.train_only", "train.stage",
                                       "train.rl_safe",   "train.ce_coeff",   "train.deterministic"};

    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        if (!strcmp(o->key, keys[i])) return 1;
    return option_in_section(o, "indexer_loss") || option_in_section(o, "mtp") || option_in_section(o, "moe");
}

const char *config_stage_difference(const struct config *a, const struct config *b)
{
    const char *key = NULL;

    for (int i = 0; i < option_count && !key; i++) {
        if (!decides_stage(&options[i])) continue;
        json_t *left = option_to_json(a, &options[i]), *right = option_to_json(b, &options[i]);
        if (!json_equal(left, right)) key = options[i].key;
        json_decref(left);
        json_decref(right);
    }
    return key;
}
