#include "rl/generate.h"

#include <math.h>
#include <string.h>

#include "base/random.h"
#include "model/network.h"

/* The logits of the last row, from the tap on the final hidden state. */
struct decoder {
    struct model *m;
    struct network network;
    struct pack pack;
    float *device_logits, *logits;
};

static int wants(void *user, const char *name, int layer)
{
    (void)user, (void)layer;
    return !strcmp(name, "final_hidden");
}

static void take_last_row(void *user, const char *name, int layer, glm52_dtype type, int64_t rows, int64_t columns,
                          const void *values)
{
    struct decoder *d = user;
    const struct parameter *w = d->m->parameters.head;
    struct gemm g = {.m = 1, .n = w->shape[0], .k = columns, .lda = columns, .ldb = columns, .ldc = w->shape[0],
                     .batch = 1, .transpose_b = 1, .a_type = type, .b_type = w->type, .c_type = GLM52_DTYPE_F32};

    (void)name, (void)layer;
    d->m->stream->ops->gemm(d->m->stream, &g, (const char *)values + (size_t)((rows - 1) * columns) * dtype_size(type),
                            w->value, d->device_logits);
}

static void decoder_close(struct decoder *d)
{
    struct stream *s = d->m->stream;
    size_t bytes = (size_t)d->m->config.model.vocab_size * sizeof(float);

    if (d->device_logits) s->ops->release(s, d->device_logits, bytes, MEMORY_WORKSPACE);
    if (d->logits) host_free(s->host, d->logits, bytes, MEMORY_HOST);
    pack_free(&d->pack);
    network_close(&d->network);
}

static glm52_status decoder_open(struct decoder *d, struct model *m, int64_t rows)
{
    struct stream *s = m->stream;
    size_t bytes = (size_t)m->config.model.vocab_size * sizeof(float);
    void *logits = NULL;

    memset(d, 0, sizeof *d);
    d->m = m;
    pack_init(&d->pack, m->host);
    glm52_status status = network_open(m, rows, KEEP_NOTHING, &d->network);
    if (!status) status = pack_reserve(&d->pack, rows, 1);
    if (!status) status = s->ops->allocate(s, bytes, MEMORY_WORKSPACE, &logits);
    d->device_logits = logits;
    if (!status && !(d->logits = host_alloc(m->host, bytes, MEMORY_HOST))) status = GLM52_E_NOMEM;
    if (status) decoder_close(d);
    return status;
}

/* -1: a logit is not finite. */
static int32_t pick(const float *logits, int64_t vocabulary, const struct sampling *how, uint64_t number)
{
    int64_t best = 0;
    double sum = 0;

    for (int64_t v = 0; v < vocabulary; v++) {
        if (!isfinite(logits[v])) return -1;
        if (logits[v] > logits[best]) best = v;
    }
    if (how->temperature <= 0) return (int32_t)best;
    double scale = 1 / how->temperature, top = (double)logits[best];
    for (int64_t v = 0; v < vocabulary; v++) sum += exp(((double)logits[v] - top) * scale);
    double left = random_uniform(random_key(how->seed, "generate"), number) * sum;
    for (int64_t v = 0; v < vocabulary; v++) {
        left -= exp(((double)logits[v] - top) * scale);
        if (left < 0) return (int32_t)v;
    }
    return (int32_t)best;
}

static glm52_status next_token(struct decoder *d, const struct sampling *how, uint64_t number, int32_t *token)
{
    struct stream *s = d->m->stream;
    const struct tap tap = {.user = d, .wants = wants, .take = take_last_row};
    int64_t vocabulary = d->m->config.model.vocab_size;

    TRY(host_poll(d->m->host));
    pack_default_labels(&d->pack);
    network_run(&d->network, &d->pack, &(struct input_scale){0}, 0, &tap);
    TRY(s->ops->synchronize(s));
    s->ops->download(s, d->logits, d->device_logits, (size_t)vocabulary * sizeof(float));
    *token = pick(d->logits, vocabulary, how, number);
    if (*token >= 0) return GLM52_OK;
    fail(GLM52_E_NUMERIC, "the logits of token %llu are not finite", (unsigned long long)number);
    return fail_hint("the model's parameters hold values that are not finite or too large");
}

static int ends(const struct model *m, int32_t token)
{
    for (int i = 0; i < m->config.model.eos_count; i++)
        if (m->config.model.eos_token_id[i] == token) return 1;
    return 0;
}

glm52_status generate(struct model *m, const int32_t *prompt, uint64_t count, uint64_t limit,
                      const struct sampling *how, int32_t *tokens, uint64_t *produced)
{
    uint64_t longest = (uint64_t)m->config.model.max_position_embeddings;
    struct decoder d;

    if (!count) return fail(GLM52_E_INVALID, "the prompt is empty");
    if (count > longest || limit > longest - count) {
        fail(GLM52_E_INVALID, "%llu + %llu tokens are more than model.max_position_embeddings = %llu",
             (unsigned long long)count, (unsigned long long)limit, (unsigned long long)longest);
        return fail_hint("ask for fewer tokens");
    }
    if (!(how->temperature >= 0) || isinf(how->temperature))
        return fail(GLM52_E_INVALID, "temperature %g is not a finite number >= 0", how->temperature);
    TRY(decoder_open(&d, m, (int64_t)(count + limit)));
    memcpy(d.pack.token, prompt, count * sizeof *prompt);
    for (uint64_t t = 0; t < count + limit; t++) d.pack.mask[t] = 1;
    d.pack.documents = 1;
    d.pack.rows = (int64_t)count;
    d.pack.cu_seqlens[0] = 0;
    d.pack.cu_seqlens[1] = (int32_t)count;
    pack_default_labels(&d.pack);
    glm52_status status = pack_validate(&d.pack, m->config.model.vocab_size, (int64_t)longest);
    uint64_t n = 0;
    for (int32_t token; n < limit && !status; n++) {
        status = next_token(&d, how, n, &token);
        if (status || ends(m, token)) break;
        tokens[n] = d.pack.token[d.pack.rows++] = token;
        d.pack.cu_seqlens[1] = (int32_t)d.pack.rows;
    }
    decoder_close(&d);
    if (!status) *produced = n;
    return status;
}
