#include <string.h>

#include "api/object.h"
#include "checkpoint/hub.h"
#include "rl/generate.h"

static glm52_status finish_create(glm52_model *m, glm52_status status, glm52_model **out)
{
    if (status)
        object_destroy(&m->object);
    else
        *out = m;
    return status;
}

glm52_status glm52_model_create(glm52_context *context, glm52_config *config, glm52_model **out)
{
    CHECK(context, CLASS_CONTEXT);
    CHECK(config, CLASS_CONFIG);
    CHECK_SAME(context, config);
    CHECK_POINTER(out);
    if (config->config.model.hub[0]) return glm52_model_load(context, config, config->config.model.hub, out);
    glm52_model *m = object_create(context, CLASS_MODEL, sizeof *m);
    if (!m) return GLM52_E_NOMEM;
    glm52_status status = model_open(&context->stream, &config->config, &m->model);
    if (!status) {
        status = model_initialize(&m->model);
        if (status) model_close(&m->model);
    }
    return finish_create(m, status, out);
}

glm52_status glm52_model_load(glm52_context *context, glm52_config *config, const char *directory, glm52_model **out)
{
    CHECK(context, CLASS_CONTEXT);
    if (config) CHECK(config, CLASS_CONFIG);
    if (config) CHECK_SAME(context, config);
    CHECK_POINTER(directory);
    CHECK_POINTER(out);
    glm52_model *m = object_create(context, CLASS_MODEL, sizeof *m);
    if (!m) return GLM52_E_NOMEM;
    return finish_create(m, hub_load(&context->stream, config ? &config->config : NULL, directory, &m->model), out);
}

glm52_model *glm52_model_ref(glm52_model *self)
{
    return object_ref(self, CLASS_MODEL);
}

void glm52_model_unref(glm52_model **self)
{
    glm52_model *m;

    if (!object_unref(self, CLASS_MODEL, &m)) return;
    model_close(&m->model);
    object_destroy(&m->object);
}

glm52_status glm52_model_save(glm52_model *self, const char *directory, glm52_dtype dtype)
{
    CHECK(self, CLASS_MODEL);
    CHECK_POINTER(directory);
    return hub_save(&self->model, directory, dtype, (uint64_t)self->model.config.shard_bytes);
}

glm52_status glm52_model_describe(glm52_model *self, const char **out)
{
    CHECK(self, CLASS_MODEL);
    CHECK_POINTER(out);
    model_describe(&self->model, self->line, sizeof self->line);
    *out = self->line;
    return GLM52_OK;
}

glm52_status glm52_model_parameter_count(glm52_model *self, uint32_t *tensors, uint64_t *elements)
{
    CHECK(self, CLASS_MODEL);
    if (tensors) *tensors = self->model.parameters.count;
    if (elements) *elements = self->model.parameters.elements;
    return GLM52_OK;
}

static glm52_view view_of(const struct parameter *p, glm52_dtype dtype, void *data, int on_device)
{
    glm52_view view = {.struct_size = sizeof view, .data = data, .dtype = dtype, .on_device = on_device,
                       .dimensions = p->dimensions};

    for (int i = 0; i < p->dimensions; i++) view.shape[i] = p->shape[i];
    view.bytes = p->count * dtype_size(dtype);
    return view;
}

static const char *policy_of(const glm52_model *self, const struct parameter *p)
{
    enum rule rule;

    if (!p->trained || optimizer_rule(&self->model.config, p, &rule)) return "none";
    return rule == RULE_MUON ? "muon" : rule == RULE_ADAMW ? "adamw" : "none";
}

glm52_status glm52_model_parameter(glm52_model *self, uint32_t index, glm52_parameter_info *out)
{
    CHECK(self, CLASS_MODEL);
    CHECK_STRUCT(out, glm52_parameter_info, gradient);
    const struct parameters *t = &self->model.parameters;
    if (index >= t->count)
        return fail(GLM52_E_INVALID, "parameter %u does not exist, the model has %u", index, t->count);
    const struct parameter *p = &t->at[index];
    int on_device = strcmp(self->model.stream->ops->name, "cpu") != 0;
    glm52_parameter_info info = {.name = p->name, .policy = policy_of(self, p),
                                 .value = view_of(p, p->type, p->value, on_device),
                                 .gradient = view_of(p, p->gradient_type, p->gradient, on_device)};
    struct_give(out, &info, sizeof info);
    return GLM52_OK;
}

glm52_status glm52_model_parameter_find(glm52_model *self, const char *name, uint32_t *index)
{
    CHECK(self, CLASS_MODEL);
    CHECK_POINTER(name);
    CHECK_POINTER(index);
    const struct parameter *p = parameters_find(&self->model.parameters, name);
    if (!p) return fail(GLM52_E_INVALID, "the model has no parameter %.128s", name);
    *index = (uint32_t)(p - self->model.parameters.at);
    return GLM52_OK;
}

glm52_status glm52_model_generate(glm52_model *self, const int32_t *prompt, uint64_t count, uint64_t limit,
                                  double temperature, uint64_t seed, int32_t *tokens, uint64_t *produced)
{
    CHECK(self, CLASS_MODEL);
    CHECK_POINTER(prompt);
    CHECK_POINTER(tokens);
    CHECK_POINTER(produced);
    return generate(&self->model, prompt, count, limit, &(struct sampling){temperature, seed}, tokens, produced);
}
