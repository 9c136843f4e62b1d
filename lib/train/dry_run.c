#include "train/dry_run.h"

#include <string.h>

#include "data/dataset.h"
#include "train/step.h"

/* Documents of the configured length that fill a pack; their tokens do not matter. */
static glm52_status synthetic_pack(const struct config *c, struct pack *p)
{
    int64_t rows = c->train.microbatch_tokens, length = c->data.document_tokens;

    if (length <= 0 || length > rows) length = rows;
    if (length > c->model.max_position_embeddings) length = c->model.max_position_embeddings;
    TRY(pack_reserve(p, rows, (rows + length - 1) / length));
    p->rows = rows;
    memset(p->token, 0, (size_t)rows * sizeof *p->token);
    for (int64_t t = 0; t < rows; t++) p->mask[t] = 1;
    for (p->documents = 0; p->documents * length < rows; p->documents++)
        p->cu_seqlens[p->documents] = (int32_t)(p->documents * length);
    p->cu_seqlens[p->documents] = (int32_t)rows;
    pack_default_labels(p);
    return GLM52_OK;
}

static glm52_status run(struct stream *s, const struct config *c, const struct pack *pack, struct dry_run *out)
{
    struct model model = {0};
    struct optimizer optimizer = {0};
    struct step step = {0};
    const struct pack **packs;
    size_t bytes = (size_t)c->train.microbatches * sizeof *packs;

    glm52_status status = model_open(s, c, &model);
    if (!status) status = optimizer_open(&model, c, &optimizer);
    if (!status) status = step_open(&model, &optimizer, c, &step);
    packs = status ? NULL : host_alloc(s->host, bytes, MEMORY_HOST);
    if (!status && !packs) status = GLM52_E_NOMEM;
    if (!status) {
        for (int64_t i = 0; i < c->train.microbatches; i++) packs[i] = pack;
        memset(&out->tally, 0, sizeof out->tally);
        s->tally = &out->tally;
        status = step_run(&step, packs, (uint32_t)c->train.microbatches);
        for (int i = 0; i < MEMORY_CLASSES; i++) out->memory[i] = s->host->used[i];
    }
    if (packs) host_free(s->host, packs, bytes, MEMORY_HOST);
    step_close(&step);
    optimizer_close(&optimizer);
    model_close(&model);
    return status;
}

static glm52_status run_with_data(struct stream *s, struct config *c, struct dry_run *out)
{
    struct dataset *data = NULL;
    struct pack pack;

    host_strfree(c->host, c->out); /* a dry run leaves no files */
    if (!(c->out = host_strdup(c->host, ""))) return GLM52_E_NOMEM;
    c->train.cuda_graph = CUDA_GRAPH_OFF; /* and has nothing to record or to time */
    c->report.profile = 0;
    pack_init(&pack, s->host);
    glm52_status status = c->data.text[0] ? dataset_open(s->host, c, &data) : GLM52_OK;
    if (!status) status = synthetic_pack(c, &pack);
    if (!status) status = run(s, c, &pack, out);
    pack_free(&pack);
    dataset_close(&data);
    return status;
}

/* The workspaces are those of the device that the plan is for: a GPU's, if the run is on one or the config names
 * one. */
static void stand_for_device(const struct stream *like, const struct config *config, struct stream *s,
                             struct stream *device)
{
    int meta = !strcmp(like->ops->name, "meta");
    size_t workspace;

    if (strcmp(like->ops->name, "cuda") && !(meta && text_starts_with(config->device, "cuda"))) return;
    if (stream_plan_cuda(device, &workspace)) {
        host_log(like->host, GLM52_LOG_NOTICE, "the plan counts the workspaces of the cpu, not of %s: %s",
                 config->device, glm52_error_message(glm52_error_last()));
        return;
    }
    s->stands_for = device;
    host_account(s->host, MEMORY_WORKSPACE, (int64_t)workspace);
}

glm52_status dry_run(const struct stream *like, const struct config *config, struct dry_run *out)
{
    struct host host = {.allocator = like->host->allocator, .files = like->host->files};
    struct stream s, device;
    struct config c;

    TRY(stream_open_meta(&s, &host));
    s.threads = like->threads;
    stand_for_device(like, config, &s, &device);
    glm52_status status = config_copy(&c, config);
    if (!status) {
        c.host = like->host; /* its strings are the caller's, not the run's */
        status = config_validate(&c);
        if (!status) status = run_with_data(&s, &c, out);
        config_free(&c);
    }
    out->peak = host.peak;
    stream_close(&s);
    return status;
}
