#include "api/object.h"

glm52_status glm52_config_create(glm52_context *context, glm52_config **out)
{
    CHECK(context, CLASS_CONTEXT);
    CHECK_POINTER(out);
    glm52_config *c = object_create(context, CLASS_CONFIG, sizeof *c);
    if (!c) return GLM52_E_NOMEM;
    glm52_status status = config_init(&c->config, &context->host);
    if (status)
        object_destroy(&c->object);
    else
        *out = c;
    return status;
}

glm52_config *glm52_config_ref(glm52_config *self)
{
    return object_ref(self, CLASS_CONFIG);
}

void glm52_config_unref(glm52_config **self)
{
    glm52_config *c;

    if (!object_unref(self, CLASS_CONFIG, &c)) return;
    host_strfree(&c->object.context->host, c->text);
    config_free(&c->config);
    object_destroy(&c->object);
}

glm52_status glm52_config_load_hub(glm52_config *self, const char *path)
{
    CHECK(self, CLASS_CONFIG);
    CHECK_POINTER(path);
    return config_load_hub(&self->config, path);
}

glm52_status glm52_config_load_json(glm52_config *self, const char *json)
{
    CHECK(self, CLASS_CONFIG);
    CHECK_POINTER(json);
    return config_load_json(&self->config, json);
}

glm52_status glm52_config_set(glm52_config *self, const char *key, const char *value)
{
    CHECK(self, CLASS_CONFIG);
    CHECK_POINTER(key);
    CHECK_POINTER(value);
    return config_set(&self->config, key, value);
}

/* Lends a text until the next one. */
static void lend(glm52_config *self, char *text, const char **out)
{
    host_strfree(&self->object.context->host, self->text);
    *out = self->text = text;
}

glm52_status glm52_config_get(glm52_config *self, const char *key, const char **out)
{
    char *text;

    CHECK(self, CLASS_CONFIG);
    CHECK_POINTER(key);
    CHECK_POINTER(out);
    TRY(config_get(&self->config, key, &text));
    lend(self, text, out);
    return GLM52_OK;
}

glm52_status glm52_config_describe(uint32_t index, glm52_option_info *out)
{
    glm52_option_info info = {.struct_size = sizeof info};

    CHECK_STRUCT(out, glm52_option_info, summary);
    TRY(config_describe(index, &info));
    struct_give(out, &info, sizeof info);
    return GLM52_OK;
}

glm52_status glm52_config_validate(glm52_config *self)
{
    CHECK(self, CLASS_CONFIG);
    return config_validate(&self->config);
}

glm52_status glm52_config_dump(glm52_config *self, int32_t hub, const char **out)
{
    char *text;

    CHECK(self, CLASS_CONFIG);
    CHECK_POINTER(out);
    TRY(config_dump(&self->config, hub, &text));
    lend(self, text, out);
    return GLM52_OK;
}
