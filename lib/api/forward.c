/* glm52_model_forward(): one pass without gradients, and the values that the caller named, copied to the batch. */
#include <stdio.h>
#include <string.h>

#include "api/object.h"

struct request {
    const char *outputs;
    glm52_batch *batch;
    struct stream *stream;
    glm52_status status; /* of the copies */
};

static const char *const known[] = {"logits", "loss", "ce_rows", "final_hidden", "hidden.", "topk.", "index_scores.",
                                    "router_logits.", "router_idx.", "router_w.", "mtp_logits.",
                                    "mtp_out.", "mtp_ce_rows.", "mtp_topk.", "mtp_hidden.", "mtp_index_scores.",
                                    "mtp_router_logits.", "mtp_router_idx.", "mtp_router_w.", "mtp_alpha.", "tv_rows"};

enum { KNOWN = sizeof known / sizeof *known };

/* "hidden.3" against one word of the request: "hidden.3", "hidden.*" or "*". */
static int matches(const char *word, size_t length, const char *name)
{
    if (length && word[length - 1] == '*') return !strncmp(word, name, length - 1);
    return strlen(name) == length && !strncmp(word, name, length);
}

static int asked(const char *outputs, const char *name)
{
    for (const char *at = outputs; *at;) {
        size_t length = strcspn(at, " ");
        if (length && matches(at, length, name)) return 1;
        at += length + (at[length] != 0);
    }
    return 0;
}

/* Every word must be able to match something. */
static glm52_status check_outputs(const char *outputs)
{
    for (const char *at = outputs; *at;) {
        size_t length = strcspn(at, " ");
        int found = !length;
        for (int i = 0; i < KNOWN && !found; i++) {
            size_t stem = strlen(known[i]);
            int per_layer = known[i][stem - 1] == '.';
            found = at[length - 1] == '*' ? !strncmp(at, known[i], length - 1 < stem ? length - 1 : stem)
                    : per_layer           ? length > stem && !strncmp(at, known[i], stem)
                                          : length == stem && !strncmp(at, known[i], stem);
        }
        if (!found) {
            fail(GLM52_E_INVALID, "there is no output %.*s", (int)length, at);
            return fail_hint("outputs are logits, loss, ce_rows, final_hidden and, with a layer number or *, hidden., "
                             "topk., index_scores., router_logits., router_idx., router_w.; per MTP depth mtp_logits., "
                             "mtp_out., mtp_ce_rows., mtp_topk., mtp_router_idx., mtp_router_w., mtp_alpha.");
        }
        at += length + (at[length] != 0);
    }
    return GLM52_OK;
}

static void name_of(char out[48], const char *name, int layer)
{
    if (layer < 0)
        snprintf(out, 48, "%s", name);
    else
        snprintf(out, 48, "%s.%d", name, layer);
}

static int wants(void *user, const char *name, int layer)
{
    struct request *r = user;
    char full[48];

    name_of(full, name, layer);
    return asked(r->outputs, full);
}

static struct output *add_output(struct request *r, const char *name, glm52_dtype type, int dimensions, int64_t rows,
                                 int64_t columns)
{
    struct host *host = r->stream->host;
    struct output *o = host_calloc(host, sizeof *o, MEMORY_HOST);
    uint64_t bytes = (uint64_t)rows * (uint64_t)columns * dtype_size(type);
    void *data = o ? host_alloc(host, bytes, MEMORY_HOST) : NULL;

    if (!data) {
        if (o) host_free(host, o, sizeof *o, MEMORY_HOST);
        r->status = GLM52_E_NOMEM;
        return NULL;
    }
    snprintf(o->name, sizeof o->name, "%s", name);
    o->view = (glm52_view){.struct_size = sizeof o->view, .data = data, .dtype = type, .dimensions = dimensions,
                           .shape = {rows, columns}, .bytes = bytes};
    o->next = r->batch->outputs;
    r->batch->outputs = o;
    return o;
}

static void take(void *user, const char *name, int layer, glm52_dtype type, int64_t rows, int64_t columns,
                 const void *values)
{
    struct request *r = user;
    char full[48];

    name_of(full, name, layer);
    struct output *o = add_output(r, full, type, columns == 1 ? 1 : 2, rows, columns);
    if (o) r->stream->ops->download(r->stream, o->view.data, values, o->view.bytes);
}

static int asks_for_wide(const char *outputs)
{
    static const char *const wide[] = {"index_scores", "mtp_index_scores", "mtp_logits"};

    if (asked(outputs, "logits")) return 1;
    for (int i = 0; i < 3 * CONFIG_MAX_LAYERS; i++) {
        char name[48];
        name_of(name, wide[i % 3], i / 3);
        if (asked(outputs, name)) return 1;
    }
    return 0;
}

static glm52_status run(struct request *r, struct model *m, struct network *network, float *scores)
{
    const struct pack *pack = &r->batch->pack;
    struct stream *s = m->stream;
    struct tap tap = {.user = r, .wants = wants, .take = take, .scores = scores};
    double weight = pack_loss_weight(pack), loss;
    struct input_scale scale = {.loss = weight > 0 ? 1 / weight : 0};

    s->ops->zero(s, network->sum, (size_t)network->sums.count * sizeof *network->sum);
    network_run(network, pack, &scale, 0, &tap);
    TRY(s->ops->synchronize(s));
    TRY(r->status);
    s->ops->download(s, &loss, network->sum + network->sums.ce, sizeof loss);
    if (asked(r->outputs, "loss")) {
        struct output *o = add_output(r, "loss", GLM52_DTYPE_F64, 0, 1, 1);
        if (!o) return GLM52_E_NOMEM;
        memcpy(o->view.data, &loss, sizeof loss);
    }
    return GLM52_OK;
}

glm52_status glm52_model_forward(glm52_model *self, glm52_batch *batch, const char *outputs)
{
    const struct pack **packs;
    struct network network;
    void *scores = NULL;

    CHECK(self, CLASS_MODEL);
    CHECK(batch, CLASS_BATCH);
    CHECK_POINTER(outputs);
    struct model *m = &self->model;
    struct stream *s = m->stream;
    struct request r = {.outputs = outputs, .batch = batch, .stream = s};
    const struct pack *pack = &batch->pack;

    TRY(check_outputs(outputs));
    TRY(batch_packs(&batch, 1, &packs, s->host));
    host_free(s->host, packs, sizeof *packs, MEMORY_HOST);
    TRY(pack_validate(pack, m->config.model.vocab_size, m->config.model.max_position_embeddings));
    batch_clear_outputs(batch);
    int64_t vocabulary = m->config.model.vocab_size, wide = pack->rows > vocabulary ? pack->rows : vocabulary;
    size_t bytes = asks_for_wide(outputs) ? (size_t)(pack->rows * wide) * sizeof(float) : 0;
    TRY(network_open(m, pack->rows, KEEP_NOTHING, &network));
    glm52_status status = bytes ? s->ops->allocate(s, bytes, MEMORY_WORKSPACE, &scores) : GLM52_OK;
    if (!status) status = run(&r, m, &network, scores);
    if (scores) s->ops->release(s, scores, bytes, MEMORY_WORKSPACE);
    network_close(&network);
    if (status) batch_clear_outputs(batch);
    return status;
}
