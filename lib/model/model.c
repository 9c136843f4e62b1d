#include "model/model.h"

#include <stdio.h>
#include <string.h>

#include "base/dtype.h"
#include "base/random.h"

enum { PIECE = 1 << 16 }; /* elements moved at a time */

glm52_status model_open(struct stream *stream, const struct config *config, struct model *m)
{
    void *values;

    memset(m, 0, sizeof *m);
    m->host = stream->host;
    m->stream = stream;
    TRY(config_copy(&m->config, config));
    m->type = config->precision.params == PRECISION_BF16 ? GLM52_DTYPE_BF16 : GLM52_DTYPE_F32;
    glm52_status status = config_validate(&m->config);
    if (!status) status = parameters_declare(m->host, &m->config.model, m->type, &m->parameters);
    if (!status) parameters_select(&m->parameters, &m->config);
    if (!status)
        status = stream->ops->allocate(stream, m->parameters.value_bytes, MEMORY_PARAMETERS, &values);
    if (status) {
        model_close(m);
        return status;
    }
    m->values = values;
    for (uint32_t i = 0; i < m->parameters.count; i++)
        m->parameters.at[i].value = m->values + m->parameters.at[i].offset;
    return GLM52_OK;
}

void model_close(struct model *m)
{
    if (m->values) m->stream->ops->release(m->stream, m->values, m->parameters.value_bytes, MEMORY_PARAMETERS);
    parameters_free(&m->parameters);
    config_free(&m->config);
    memset(m, 0, sizeof *m);
}

glm52_status model_hold_gradients(struct model *m)
{
    const struct ops *ops = m->stream->ops;
    size_t bytes = m->parameters.gradient_bytes;
    void *gradients;

    if (m->gradient_holders++) return GLM52_OK;
    glm52_status status = ops->allocate(m->stream, bytes, MEMORY_GRADIENTS, &gradients);
    if (status) {
        m->gradient_holders = 0;
        return status;
    }
    m->gradients = gradients;
    m->gradient_bytes = bytes;
    ops->zero(m->stream, gradients, bytes);
    for (uint32_t i = 0; i < m->parameters.count; i++) {
        struct parameter *p = &m->parameters.at[i];
        p->gradient = p->trained ? m->gradients + p->gradient_offset : NULL;
    }
    return GLM52_OK;
}

void model_release_gradients(struct model *m)
{
    if (!m->gradient_holders || --m->gradient_holders) return;
    m->stream->ops->release(m->stream, m->gradients, m->gradient_bytes, MEMORY_GRADIENTS);
    m->gradients = NULL;
    for (uint32_t i = 0; i < m->parameters.count; i++) m->parameters.at[i].gradient = NULL;
}

static void initialize(struct model *m, struct parameter *p, float *values, void *buffer)
{
    struct random_key key = random_key((uint64_t)m->config.train.seed, p->name);
    float range = (float)m->config.model.initializer_range;

    for (uint64_t first = 0; first < p->count; first += PIECE) {
        uint64_t count = p->count - first < PIECE ? p->count - first : PIECE;
#pragma omp parallel for num_threads(m->stream->threads) schedule(static)
        for (uint64_t i = 0; i < count; i++)
            values[i] = p->kind == KIND_NORM                                    ? 1
                        : p->kind == KIND_BIAS || p->kind == KIND_SELECTION_BIAS ? 0
                                                                                : range * random_normal(key, first + i);
        stream_write(m->stream, p->type, p->value + first * dtype_size(p->type), count, values, buffer);
    }
}

glm52_status model_initialize(struct model *m)
{
    size_t bytes = 2 * PIECE * sizeof(float);

    if (!strcmp(m->stream->ops->name, "meta")) return GLM52_OK; /* there is nothing to fill */
    float *values = host_alloc(m->host, bytes, MEMORY_HOST);
    if (!values) return GLM52_E_NOMEM;
    glm52_status status = GLM52_OK;
    for (uint32_t i = 0; i < m->parameters.count && !status; i++) {
        initialize(m, &m->parameters.at[i], values, values + PIECE);
        status = host_poll(m->host);
    }
    host_free(m->host, values, bytes, MEMORY_HOST);
    return status ? status : m->stream->ops->synchronize(m->stream);
}

void model_describe(const struct model *m, char *line, size_t bytes)
{
    double count = (double)m->parameters.elements;
    int sparse = 0, layers = m->parameters.layers;

    for (int i = 0; i < layers; i++) sparse += m->config.model.mlp_layer_types[i] == MLP_SPARSE;
    snprintf(line, bytes, "%d layers (%d dense + %d MoE%s), %.1f%c parameters, stage %s", layers, layers - sparse, sparse,
             m->config.model.num_nextn_predict_layers ? " + 1 MTP" : "", count < 1e9 ? count / 1e6 : count / 1e9,
             count < 1e9 ? 'M' : 'B', config_stage_name(&m->config));
}
