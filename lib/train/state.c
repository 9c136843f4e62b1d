/* A resumable state on disk:
 *     DIRECTORY/latest                    name of the newest complete state
 *     DIRECTORY/step-000123/              config.json, model.safetensors, optimizer.safetensors, state.json
 * A state is written under its own name, then `latest` is replaced, then the one before is removed: whatever fails or
 * is killed, `latest` names a complete state. Everything is stored under parameter names in fp32, in table order. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "base/text.h"
#include "checkpoint/hub.h"
#include "checkpoint/safetensors.h"
#include "train/step.h"

enum { PIECE = 1 << 16, PATH = 4096, FORMAT = 1 };

static glm52_status join(char path[PATH], const char *directory, const char *name)
{
    if (snprintf(path, PATH, "%s/%s", directory, name) < PATH) return GLM52_OK;
    return fail(GLM52_E_INVALID, "path of %zu characters is too long", strlen(directory) + strlen(name));
}

/* The arrays of the optimizer, by the prefix of their tensor names. */
static const char *const array_name[] = {"m", "v", "master"};

static float *state_array(const struct optimizer *o, int which)
{
    return which == 0 ? o->m : which == 1 ? o->v : o->master;
}

/* Calls `visit` for every (array, parameter) in a fixed order. */
static glm52_status each_tensor(struct optimizer *o,
                                glm52_status (*visit)(struct optimizer *, const struct parameter *, const char *, float *,
                                                      void *),
                                void *user)
{
    char name[160];

    for (int which = 0; which < 3; which++) {
        if (!state_array(o, which)) continue;
        for (uint32_t i = 0; i < o->spans; i++) {
            const struct parameter *p = o->span[i].first;
            float *at = state_array(o, which) + o->span[i].state;
            for (uint32_t j = 0; j < o->span[i].parameters; at += p->count, p++, j++) {
                snprintf(name, sizeof name, "%s.%s", array_name[which], p->name);
                TRY(visit(o, p, name, at, user));
            }
        }
    }
    return GLM52_OK;
}

static glm52_status declare_tensor(struct optimizer *o, const struct parameter *p, const char *name, float *values,
                                   void *user)
{
    (void)o, (void)values;
    return safetensors_writer_declare(user, name, GLM52_DTYPE_F32, p->dimensions, p->shape);
}

struct mover {
    struct safetensors_writer *writer;
    struct safetensors *file;
    float *buffer;
};

static glm52_status write_tensor(struct optimizer *o, const struct parameter *p, const char *name, float *values, void *user)
{
    const struct mover *mover = user;
    struct stream *s = o->model->stream;

    (void)name;
    TRY(host_poll(o->model->host));
    for (uint64_t first = 0; first < p->count; first += PIECE) {
        uint64_t count = p->count - first < PIECE ? p->count - first : PIECE;
        s->ops->download(s, mover->buffer, values + first, count * sizeof(float));
        TRY(safetensors_writer_write(mover->writer, mover->buffer, count * sizeof(float)));
    }
    return GLM52_OK;
}

static glm52_status check_tensor(struct optimizer *o, const struct parameter *p, const char *name, float *values, void *user)
{
    const struct mover *mover = user;
    const struct safetensor *t = safetensors_find(mover->file, name);

    (void)o, (void)values;
    if (t && t->dtype == GLM52_DTYPE_F32 && t->dimensions == p->dimensions && t->shape[0] == p->shape[0] &&
        (t->dimensions < 2 || t->shape[1] == p->shape[1]))
        return GLM52_OK;
    fail(GLM52_E_CORRUPT, "optimizer state %s is %s", name, t ? "of another shape or dtype" : "missing");
    return fail_detail("tensor", "%s", name);
}

static glm52_status read_tensor(struct optimizer *o, const struct parameter *p, const char *name, float *values, void *user)
{
    const struct mover *mover = user;
    const struct safetensor *t = safetensors_find(mover->file, name);
    struct stream *s = o->model->stream;

    for (uint64_t first = 0; first < p->count; first += PIECE) {
        uint64_t count = p->count - first < PIECE ? p->count - first : PIECE;
        TRY(safetensors_read_f32(mover->file, t, first, count, mover->buffer));
        s->ops->upload(s, values + first, mover->buffer, count * sizeof(float));
    }
    return GLM52_OK;
}

static glm52_status save_optimizer(struct optimizer *o, const char *directory)
{
    struct mover mover = {0};
    size_t bytes = PIECE * sizeof(float);
    struct host *host = o->model->host;

    TRY(safetensors_writer_create(host, directory, "optimizer", 0, &mover.writer));
    glm52_status status = each_tensor(o, declare_tensor, mover.writer);
    if (!status && !(mover.buffer = host_alloc(host, bytes, MEMORY_HOST))) status = GLM52_E_NOMEM;
    if (!status) status = each_tensor(o, write_tensor, &mover);
    if (mover.buffer) host_free(host, mover.buffer, bytes, MEMORY_HOST);
    if (status)
        safetensors_writer_abort(&mover.writer);
    else
        status = safetensors_writer_finish(&mover.writer);
    return status;
}

static glm52_status count_tensor(struct optimizer *o, const struct parameter *p, const char *name, float *values, void *user)
{
    (void)o, (void)p, (void)name, (void)values;
    ++*(size_t *)user;
    return GLM52_OK;
}

/* Opens and checks the optimizer's file without touching its state. */
static glm52_status open_optimizer(struct optimizer *o, const char *directory, struct mover *mover, struct safetensors *file)
{
    char path[PATH];

    TRY(join(path, directory, "optimizer.safetensors"));
    TRY(safetensors_open(o->model->host, path, file));
    mover->file = file;
    glm52_status status = each_tensor(o, check_tensor, mover);
    size_t tensors = 0;
    each_tensor(o, count_tensor, &tensors);
    if (!status && tensors != file->tensors) {
        fail(GLM52_E_CORRUPT, "%s holds the state of another model: %zu tensors, this one has %zu", path, file->tensors,
             tensors);
        status = fail_detail("path", "%s", path);
    }
    if (!status && !(mover->buffer = host_alloc(o->model->host, PIECE * sizeof(float), MEMORY_HOST)))
        status = GLM52_E_NOMEM;
    if (status) safetensors_close(file);
    return status;
}

static glm52_status save_counters(struct step *s, const char *directory)
{
    char path[PATH], text[256];
    int length = snprintf(text, sizeof text, "{\"format\": %d, \"step\": %lld, \"packs\": %llu, \"seed\": %lld}\n", FORMAT,
                          (long long)s->optimizer->step, (unsigned long long)s->packs,
                          (long long)s->model->config.train.seed);

    TRY(join(path, directory, "state.json"));
    return file_write_all(s->model->host, path, text, (size_t)length);
}

static void remove_state(struct host *host, const char *directory)
{
    static const char *const files[] = {"config.json", "model.safetensors", "optimizer.safetensors", "state.json"};
    char path[PATH];

    for (size_t i = 0; i < sizeof files / sizeof *files; i++)
        if (!join(path, directory, files[i])) host->files.remove(host->files.user, path);
    host->files.remove(host->files.user, directory);
}

/* Name of the newest complete state, "" if there is none. */
static glm52_status read_latest(struct host *host, const char *directory, char name[64])
{
    char path[PATH], *text;
    size_t bytes;

    TRY(join(path, directory, "latest"));
    TRY(file_read_all(host, path, 63, &text, &bytes));
    snprintf(name, 64, "%s", text);
    name[strcspn(name, "\n")] = 0;
    host_free(host, text, bytes + 1, MEMORY_HOST);
    if (text_starts_with(name, "step-") && strspn(name + 5, "0123456789") == strlen(name + 5)) return GLM52_OK;
    fail(GLM52_E_CORRUPT, "%s names no state: \"%s\"", path, name);
    return fail_detail("path", "%s", path);
}

glm52_status step_save(struct step *s, const char *directory)
{
    struct host *host = s->model->host;
    char name[64], before[64] = "", state[PATH], path[PATH];

    if (!s->optimizer) return fail(GLM52_E_STATE, "this step was created without an optimizer: there is no state to save");
    snprintf(name, sizeof name, "step-%06lld", (long long)s->optimizer->step);
    TRY(join(state, directory, name));
    TRY(join(path, directory, "latest"));
    if (read_latest(host, directory, before)) before[0] = 0; /* none, or a damaged one: nothing to remove */
    TRY(file_make_directories(host, state));
    glm52_status status = hub_save(s->model, state, 0, 0);
    if (!status) status = save_optimizer(s->optimizer, state);
    if (!status) status = save_counters(s, state);
    if (!status) status = file_write_all(host, path, name, strlen(name));
    if (status) {
        if (strcmp(before, name)) remove_state(host, state);
        return status;
    }
    if (before[0] && strcmp(before, name) && !join(state, directory, before)) remove_state(host, state);
    return GLM52_OK;
}

static glm52_status read_counters(struct host *host, const char *directory, int64_t *step, uint64_t *packs)
{
    char path[PATH], *text;
    size_t bytes;
    json_int_t format = 0, step_read = -1, packs_read = -1;

    TRY(join(path, directory, "state.json"));
    TRY(file_read_all(host, path, 4096, &text, &bytes));
    json_t *json = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, NULL);
    int bad = json_unpack(json, "{s:I, s:I, s:I}", "format", &format, "step", &step_read, "packs", &packs_read);
    json_decref(json);
    host_free(host, text, bytes + 1, MEMORY_HOST);
    if (!bad && format > FORMAT) {
        fail(GLM52_E_VERSION, "%s has format %lld, this library reads up to %d", path, (long long)format, FORMAT);
        return fail_hint("use a newer library");
    }
    if (bad || step_read < 0 || packs_read < 0) {
        fail(GLM52_E_CORRUPT, "%s does not hold the counters format, step and packs", path);
        return fail_detail("path", "%s", path);
    }
    *step = step_read;
    *packs = (uint64_t)packs_read;
    return GLM52_OK;
}

glm52_status step_resume(struct step *s, const char *directory)
{
    struct host *host = s->model->host;
    struct mover mover = {0};
    struct safetensors file, values;
    char name[64], state[PATH];
    int64_t step = 0;
    uint64_t packs = 0;

    if (!s->optimizer) return fail(GLM52_E_STATE, "this step was created without an optimizer: it cannot go on training");
    TRY(read_latest(host, directory, name));
    TRY(join(state, directory, name));
    TRY(read_counters(host, state, &step, &packs));
    TRY(open_optimizer(s->optimizer, state, &mover, &file));
    glm52_status status = hub_open_values(s->model, state, &values);
    if (!status) {
        status = hub_read_values(s->model, &values);
        safetensors_close(&values);
        if (!status) status = each_tensor(s->optimizer, read_tensor, &mover);
        if (!status) status = s->model->stream->ops->synchronize(s->model->stream);
        if (status) fail_detail("state", "lost"); /* reading had begun */
    }
    host_free(host, mover.buffer, PIECE * sizeof(float), MEMORY_HOST);
    safetensors_close(&file);
    if (status) return status;
    s->optimizer->step = step;
    s->metric[METRIC_STEP] = (double)step;
    s->packs = packs;
    return GLM52_OK;
}
