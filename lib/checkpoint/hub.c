#include "checkpoint/hub.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/text.h"
#include "checkpoint/safetensors.h"

enum { PIECE = 1 << 16, PATH = 4096 }; /* elements moved at a time */

static glm52_status join(char path[PATH], const char *directory, const char *name)
{
    if (snprintf(path, PATH, "%s/%s", directory, name) < PATH) return GLM52_OK;
    return fail(GLM52_E_INVALID, "path of %zu characters is too long", strlen(directory) + strlen(name));
}

static void shape_text(char *text, size_t bytes, int dimensions, const int64_t *shape)
{
    size_t used = 0;

    text[0] = 0;
    for (int i = 0; i < dimensions && used < bytes; i++)
        used += (size_t)snprintf(text + used, bytes - used, "%s%lld", i ? ", " : "", (long long)shape[i]);
}

static glm52_status check_tensor(const struct safetensor *t, const struct parameter *p)
{
    int same = t->dimensions == p->dimensions;
    char has[160], needs[64];

    for (int i = 0; same && i < t->dimensions; i++) same = t->shape[i] == p->shape[i];
    if (!same) {
        shape_text(has, sizeof has, t->dimensions, t->shape);
        shape_text(needs, sizeof needs, p->dimensions, p->shape);
        fail(GLM52_E_CORRUPT, "tensor %s at byte %llu has shape [%s], config.json makes it [%s]", p->name,
             (unsigned long long)t->offset, has, needs);
        fail_detail("byte", "%llu", (unsigned long long)t->offset);
        return fail_detail("tensor", "%s", p->name);
    }
    if (t->dtype == GLM52_DTYPE_F32 || t->dtype == GLM52_DTYPE_BF16 || t->dtype == GLM52_DTYPE_F16) return GLM52_OK;
    fail(GLM52_E_UNSUPPORTED, "tensor %s at byte %llu is %s; F32, BF16 and F16 can be loaded", p->name,
         (unsigned long long)t->offset, dtype_name(t->dtype));
    fail_detail("byte", "%llu", (unsigned long long)t->offset);
    return fail_detail("tensor", "%s", p->name);
}

/* A file may hold layers beyond the config's (the MTP layer, when it is not wanted); any other stranger is a misnamed
 * tensor. */
static glm52_status check_strangers(const struct model *m, const struct safetensors *file)
{
    int ignored = 0;

    for (size_t i = 0; i < file->tensors; i++) {
        const char *name = file->tensor[i].name;
        int layer = -1;
        if (parameters_find(&m->parameters, name)) continue;
        if (sscanf(name, "model.layers.%d.", &layer) == 1 && layer >= m->parameters.layers) {
            ignored++;
            continue;
        }
        const char *nearest = NULL;
        unsigned best = 12;
        for (uint32_t j = 0; j < m->parameters.count; j++) {
            unsigned distance = text_distance(name, m->parameters.at[j].name);
            if (distance < best) best = distance, nearest = m->parameters.at[j].name;
        }
        fail(GLM52_E_CORRUPT, "tensor %s at byte %llu does not belong to this model%s%s", name,
             (unsigned long long)file->tensor[i].offset, nearest ? "; did you mean " : "", nearest ? nearest : "");
        fail_detail("byte", "%llu", (unsigned long long)file->tensor[i].offset);
        return fail_detail("tensor", "%s", name);
    }
    if (ignored)
        host_log(m->host, GLM52_LOG_NOTICE, "%d tensors of layers beyond model.num_hidden_layers = %d were not loaded",
                 ignored, m->parameters.layers);
    return GLM52_OK;
}

static glm52_status check_parameters(const struct model *m, const struct safetensors *file)
{
    TRY(check_strangers(m, file));
    for (uint32_t i = 0; i < m->parameters.count; i++) {
        const struct parameter *p = &m->parameters.at[i];
        const struct safetensor *t = safetensors_find(file, p->name);
        if (!t) {
            fail(GLM52_E_CORRUPT, "tensor %s is missing", p->name);
            fail_hint("the directory is incomplete, or config.json describes another model");
            return fail_detail("tensor", "%s", p->name);
        }
        TRY(check_tensor(t, p));
    }
    return GLM52_OK;
}

static glm52_status read_parameter(struct model *m, const struct safetensors *file, struct parameter *p, float *values,
                                   void *buffer)
{
    const struct safetensor *t = safetensors_find(file, p->name);

    for (uint64_t first = 0; first < p->count; first += PIECE) {
        uint64_t count = p->count - first < PIECE ? p->count - first : PIECE;
        TRY(safetensors_read_f32(file, t, first, count, values));
        stream_write(m->stream, p->type, p->value + first * dtype_size(p->type), count, values, buffer);
    }
    return host_poll(m->host);
}

glm52_status hub_open_values(struct model *m, const char *directory, struct safetensors *file)
{
    TRY(safetensors_open(m->host, directory, file));
    glm52_status status = check_parameters(m, file);
    if (status) safetensors_close(file);
    return status;
}

glm52_status hub_read_values(struct model *m, const struct safetensors *file)
{
    size_t bytes = 2 * PIECE * sizeof(float);
    float *values = host_alloc(m->host, bytes, MEMORY_HOST);
    glm52_status status = values ? GLM52_OK : GLM52_E_NOMEM;

    for (uint32_t i = 0; i < m->parameters.count && !status; i++)
        status = read_parameter(m, file, &m->parameters.at[i], values, values + PIECE);
    if (values) host_free(m->host, values, bytes, MEMORY_HOST);
    return status ? status : m->stream->ops->synchronize(m->stream);
}

glm52_status hub_load(struct stream *stream, const struct config *config, const char *directory, struct model *out)
{
    struct safetensors file;
    struct config c;
    char path[PATH];

    TRY(join(path, directory, "config.json"));
    if (config)
        TRY(config_copy(&c, config));
    else
        TRY(config_init(&c, stream->host));
    glm52_status status = config_load_hub(&c, path);
    if (!status) status = model_open(stream, &c, out);
    config_free(&c);
    if (status) return status;
    status = hub_open_values(out, directory, &file);
    if (!status) {
        status = hub_read_values(out, &file);
        safetensors_close(&file);
    }
    if (status) model_close(out);
    return status;
}

static glm52_status write_parameter(struct model *m, struct safetensors_writer *w, const struct parameter *p,
                                    glm52_dtype dtype, float *values, void *buffer)
{
    for (uint64_t first = 0; first < p->count; first += PIECE) {
        uint64_t count = p->count - first < PIECE ? p->count - first : PIECE;
        stream_read(m->stream, p->type, p->value + first * dtype_size(p->type), count, values, buffer);
        if (dtype == GLM52_DTYPE_BF16)
            for (uint64_t i = 0; i < count; i++) ((uint16_t *)buffer)[i] = f32_to_bf16(values[i]);
        TRY(safetensors_writer_write(w, dtype == GLM52_DTYPE_BF16 ? buffer : values, count * dtype_size(dtype)));
    }
    return host_poll(m->host);
}

static glm52_dtype stored_type(const struct parameter *p, glm52_dtype dtype)
{
    return p->kind == KIND_SELECTION_BIAS ? GLM52_DTYPE_F32 : dtype ? dtype : p->type;
}

static glm52_status write_values(struct model *m, struct safetensors_writer *w, glm52_dtype dtype, float *values)
{
    for (uint32_t i = 0; i < m->parameters.count; i++) {
        const struct parameter *p = &m->parameters.at[i];
        TRY(safetensors_writer_declare(w, p->name, stored_type(p, dtype), p->dimensions, p->shape));
    }
    for (uint32_t i = 0; i < m->parameters.count; i++) {
        const struct parameter *p = &m->parameters.at[i];
        TRY(write_parameter(m, w, p, stored_type(p, dtype), values, values + PIECE));
    }
    return GLM52_OK;
}

static glm52_status add_config(struct model *m, struct safetensors_writer *w, glm52_dtype dtype)
{
    char *json;

    TRY(config_dump_hub(&m->config, dtype, &json));
    glm52_status status = safetensors_writer_companion(w, "config.json", json);
    host_strfree(m->host, json);
    return status;
}

glm52_status hub_save(struct model *m, const char *directory, glm52_dtype dtype, uint64_t shard_bytes)
{
    size_t bytes = 2 * PIECE * sizeof(float);
    struct safetensors_writer *w = NULL;

    if (dtype && dtype != GLM52_DTYPE_F32 && dtype != GLM52_DTYPE_BF16) {
        fail(GLM52_E_UNSUPPORTED, "a model cannot be saved as %s", dtype_name(dtype));
        return fail_hint("use F32 or BF16");
    }
    TRY(file_make_directories(m->host, directory));
    TRY(safetensors_writer_create(m->host, directory, "model", shard_bytes, &w));
    float *values = host_alloc(m->host, bytes, MEMORY_HOST);
    glm52_status status = values ? add_config(m, w, dtype ? dtype : m->type) : GLM52_E_NOMEM;
    if (!status) status = write_values(m, w, dtype, values);
    if (values) host_free(m->host, values, bytes, MEMORY_HOST);
    if (status)
        safetensors_writer_abort(&w);
    else
        status = safetensors_writer_finish(&w);
    return status;
}
