#include "model/model.h"

#include <omp.h>
#include <stdio.h>
#include <string.h>

#include "base/dtype.h"
#include "base/random.h"

enum { PIECE = 1 << 16 }; /* elements that a thread makes and sends at a time */

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

/* Elements first .. first + count of the parameter, in its type. */
static void fill(const struct model *m, const struct parameter *p, struct random_key key, uint64_t first,
                 uint64_t count, void *to)
{
    enum { STRIP = 1024 };
    float values[STRIP], range = (float)m->config.model.initializer_range;
    int gain = p->kind == KIND_NORM, constant = gain || p->kind == KIND_BIAS || p->kind == KIND_SELECTION_BIAS;

    for (uint64_t done = 0; done < count; done += STRIP) {
        uint64_t strip = count - done < STRIP ? count - done : STRIP;
        if (!constant) random_normals(key, first + done, strip, values);
        for (uint64_t i = 0; i < strip; i++) values[i] = constant ? (float)gain : range * values[i];
        if (p->type == GLM52_DTYPE_BF16)
            for (uint64_t i = 0; i < strip; i++) ((uint16_t *)to)[done + i] = f32_to_bf16(values[i]);
        else
            memcpy((float *)to + done, values, strip * sizeof *values);
    }
}

static uint64_t pieces_of(const struct parameter *p)
{
    return (p->count + PIECE - 1) / PIECE;
}

/* One thread sends its piece while the others make theirs. The lock is this call's: a named critical
 * section is a symbol of the whole program. */
static void initialize(struct model *m, const struct parameter *p, unsigned char *buffers)
{
    struct random_key key = random_key((uint64_t)m->config.train.seed, p->name);
    size_t size = dtype_size(p->type);
    omp_lock_t upload;

    omp_init_lock(&upload);
#pragma omp parallel for num_threads(pieces_of(p) > 1 ? m->stream->threads : 1) schedule(dynamic, 1)
    for (uint64_t piece = 0; piece < pieces_of(p); piece++) {
        uint64_t first = piece * PIECE, count = p->count - first < PIECE ? p->count - first : PIECE;
        unsigned char *buffer = buffers + (size_t)omp_get_thread_num() * PIECE * sizeof(float);

        fill(m, p, key, first, count, buffer);
        omp_set_lock(&upload);
        m->stream->ops->upload(m->stream, p->value + first * size, buffer, count * size);
        omp_unset_lock(&upload);
    }
    omp_destroy_lock(&upload);
}

glm52_status model_initialize(struct model *m)
{
    size_t bytes = (size_t)m->stream->threads * PIECE * sizeof(float);

    if (!strcmp(m->stream->ops->name, "meta")) return GLM52_OK; /* there is nothing to fill */
    unsigned char *buffers = host_alloc(m->host, bytes, MEMORY_HOST);
    if (!buffers) return GLM52_E_NOMEM;
    glm52_status status = GLM52_OK;
    for (uint32_t i = 0; i < m->parameters.count && !status; i++) {
        initialize(m, &m->parameters.at[i], buffers);
        status = host_poll(m->host);
    }
    host_free(m->host, buffers, bytes, MEMORY_HOST);
    return status ? status : m->stream->ops->synchronize(m->stream);
}

void model_describe(const struct model *m, char *line, size_t bytes)
{
    double count = (double)m->parameters.elements;
    int sparse = 0, layers = m->parameters.layers;

    for (int i = 0; i < layers; i++) sparse += m->config.model.mlp_layer_types[i] == MLP_SPARSE;
    snprintf(line, bytes, "%d layers (%d dense + %d MoE%s), %.1f%c parameters, stage %s", layers, layers - sparse,
             sparse, m->config.model.num_nextn_predict_layers ? " + 1 MTP" : "",
             count < 1e9 ? count / 1e6 : count / 1e9, count < 1e9 ? 'M' : 'B', config_stage_name(&m->config));
}
