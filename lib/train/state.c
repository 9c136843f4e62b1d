/* A resumable state on disk:
 *     DIRECTORY/latest                    name of the newest complete state
 *     DIRECTORY/step-000123/              config.json, model.safetensors, optimizer.safetensors, state.json
 * A state is written under a name of its own (step-000123-2 where `latest` names step-000123), then `latest` is
 * replaced, then the one before is removed: whatever fails or is killed, `latest` names a complete state. Everything
 * is stored under parameter names in fp32, in table order. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "base/dtype.h"
#include "base/text.h"
#include "checkpoint/hub.h"
#include "checkpoint/safetensors.h"
#include "train/step.h"

enum { PIECE = 1 << 16, PATH = 4096, FORMAT = 1 };

#define SECOND "-2" /* ends the name of a state of the same step as the one it replaces */

static glm52_status join(char path[PATH], const char *directory, const char *name)
{
    if (snprintf(path, PATH, "%s/%s", directory, name) < PATH) return GLM52_OK;
    return fail(GLM52_E_INVALID, "path of %zu characters is too long", strlen(directory) + strlen(name));
}

/* The arrays of the optimizer, by the prefix of their tensor names. */
enum state_array { FIRST_MOMENT, SECOND_MOMENT, MASTER, STATE_ARRAYS };
static const char *const array_name[STATE_ARRAYS] = {"m", "v", "master"};

/* Elements in device memory; at = NULL: not there. */
struct held {
    unsigned char *at;
    glm52_dtype type;
};

static struct held state_of(const struct optimizer *o, const struct placed *p, enum state_array which)
{
    size_t size = dtype_size(o->moment_type);

    if (which == FIRST_MOMENT) return (struct held){o->m + p->state * size, o->moment_type};
    if (which == SECOND_MOMENT) return (struct held){p->has_second ? o->v + p->second * size : NULL, o->moment_type};
    return (struct held){o->master ? (unsigned char *)(o->master + p->state) : NULL, GLM52_DTYPE_F32};
}

/* Calls `visit` for every (array, parameter) in a fixed order. */
static glm52_status each_tensor(struct optimizer *o,
                                glm52_status (*visit)(struct optimizer *, const struct parameter *, const char *,
                                                      struct held, void *),
                                void *user)
{
    char name[160];

    for (enum state_array which = 0; which < STATE_ARRAYS; which++)
        for (uint32_t i = 0; i < o->count; i++) {
            struct held values = state_of(o, &o->placed[i], which);
            if (!values.at) continue;
            snprintf(name, sizeof name, "%s.%s", array_name[which], o->placed[i].parameter->name);
            TRY(visit(o, o->placed[i].parameter, name, values, user));
        }
    return GLM52_OK;
}

static glm52_status declare_tensor(struct optimizer *o, const struct parameter *p, const char *name, struct held values,
                                   void *user)
{
    (void)o, (void)values;
    return safetensors_writer_declare(user, name, GLM52_DTYPE_F32, p->dimensions, p->shape);
}

struct mover {
    struct safetensors_writer *writer;
    struct safetensors *file;
    float *buffer;            /* 2 PIECE elements */
    int other_stage;          /* the file is of another stage than the one that begins */
    int found[PARTS];         /* some state of the part was read */
};

static glm52_status write_tensor(struct optimizer *o, const struct parameter *p, const char *name, struct held values,
                                 void *user)
{
    const struct mover *mover = user;
    struct stream *s = o->model->stream;

    (void)name;
    TRY(host_poll(o->model->host));
    for (uint64_t first = 0; first < p->count; first += PIECE) {
        uint64_t count = p->count - first < PIECE ? p->count - first : PIECE;
        stream_read(s, values.type, values.at + first * dtype_size(values.type), count, mover->buffer,
                    mover->buffer + PIECE);
        TRY(safetensors_writer_write(mover->writer, mover->buffer, count * sizeof(float)));
    }
    return GLM52_OK;
}

/* Parameters whose state a stage begins anew may be missing from the file of another stage. */
static glm52_status check_tensor(struct optimizer *o, const struct parameter *p, const char *name, struct held values,
                                 void *user)
{
    const struct mover *mover = user;
    const struct safetensor *t = safetensors_find(mover->file, name);

    (void)o, (void)values;
    if (!t && mover->other_stage) return GLM52_OK;
    if (t && t->dtype == GLM52_DTYPE_F32 && t->dimensions == p->dimensions && t->shape[0] == p->shape[0] &&
        (t->dimensions < 2 || t->shape[1] == p->shape[1]))
        return GLM52_OK;
    fail(GLM52_E_CORRUPT, "optimizer state %s is %s", name, t ? "of another shape or dtype" : "missing");
    if (!t)
        fail_hint(
            "it was saved with other train.train_only, indexer_loss, mtp or optim options; give the new options a "
            "train.stage of their own to begin what is missing at zero");
    return fail_detail("tensor", "%s", name);
}

static glm52_status read_tensor(struct optimizer *o, const struct parameter *p, const char *name, struct held values,
                                void *user)
{
    struct mover *mover = user;
    const struct safetensor *t = safetensors_find(mover->file, name);
    struct stream *s = o->model->stream;

    TRY(host_poll(o->model->host));
    if (!t) { /* begins anew: moments at zero, the master as the parameter is */
        if (!text_starts_with(name, array_name[MASTER])) s->ops->zero(s, values.at, p->count * dtype_size(values.type));
        return GLM52_OK;
    }
    mover->found[p->part] = 1;

    for (uint64_t first = 0; first < p->count; first += PIECE) {
        uint64_t count = p->count - first < PIECE ? p->count - first : PIECE;
        TRY(safetensors_read_f32(mover->file, t, first, count, mover->buffer));
        stream_write(s, values.type, values.at + first * dtype_size(values.type), count, mover->buffer,
                     mover->buffer + PIECE);
    }
    return GLM52_OK;
}

static glm52_status save_optimizer(struct optimizer *o, const char *directory)
{
    struct mover mover = {0};
    size_t bytes = 2 * PIECE * sizeof(float);
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

static glm52_status count_tensor(struct optimizer *o, const struct parameter *p, const char *name, struct held values,
                                 void *user)
{
    (void)o, (void)p, (void)name, (void)values;
    ++*(size_t *)user;
    return GLM52_OK;
}

/* Opens and checks the optimizer's file without touching its state. */
static glm52_status open_optimizer(struct optimizer *o, const char *directory, struct mover *mover,
                                   struct safetensors *file)
{
    char path[PATH];

    TRY(join(path, directory, "optimizer.safetensors"));
    TRY(safetensors_open(o->model->host, path, file));
    mover->file = file;
    glm52_status status = each_tensor(o, check_tensor, mover);
    size_t tensors = 0;
    each_tensor(o, count_tensor, &tensors);
    if (!status && !mover->other_stage && tensors != file->tensors) {
        fail(GLM52_E_CORRUPT, "%s holds the state of another model: %zu tensors, this one has %zu", path, file->tensors,
             tensors);
        status = fail_detail("path", "%s", path);
    }
    if (!status && !(mover->buffer = host_alloc(o->model->host, 2 * PIECE * sizeof(float), MEMORY_HOST)))
        status = GLM52_E_NOMEM;
    if (status) safetensors_close(file);
    return status;
}

/* What a state says beside tensors. */
struct counters {
    int64_t step, schedule_begin, packs, updates[PARTS];
    double mean_loss, skipped;
    char stage[CONFIG_STAGE_NAME + 1];
};

static glm52_status save_counters(struct step *s, const char *directory)
{
    const struct optimizer *o = s->optimizer;
    char path[PATH], *text;

    TRY(join(path, directory, "state.json"));
    json_t *json = json_pack("{s:i, s:I, s:I, s:I, s:I, s:s, s:f, s:f, s:[I, I, I, I]}", "format", FORMAT, "step",
                             (json_int_t)o->step, "schedule_begin", (json_int_t)o->schedule_begin, "packs",
                             (json_int_t)s->packs, "seed", (json_int_t)s->model->config.train.seed, "stage",
                             s->model->config.train.stage, "mean_loss", s->mean_loss, "skipped",
                             s->metric[METRIC_SKIPPED], "updates", (json_int_t)o->updates[0], (json_int_t)o->updates[1],
                             (json_int_t)o->updates[2], (json_int_t)o->updates[3]);
    text = json ? json_dumps(json, JSON_INDENT(2) | JSON_REAL_PRECISION(17)) : NULL;
    json_decref(json);
    if (!text) return fail_nomem(4096, "state.json");
    glm52_status status = file_write_all(s->model->host, path, text, strlen(text));
    free(text); /* jansson's */
    return status;
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
    size_t digits = text_starts_with(name, "step-") ? strspn(name + 5, "0123456789") : 0;
    if (digits && (!name[5 + digits] || !strcmp(name + 5 + digits, SECOND))) return GLM52_OK;
    fail(GLM52_E_CORRUPT, "%s names no state: \"%s\"", path, name);
    return fail_detail("path", "%s", path);
}

static glm52_status sync_directory(struct host *host, const char *directory)
{
    int64_t error = host->files.sync_directory(host->files.user, directory);

    return error < 0 ? file_fail(error, "sync", directory) : GLM52_OK;
}

static glm52_status write_state(struct step *s, const char *state)
{
    TRY(file_make_directories(s->model->host, state));
    TRY(hub_save(s->model, state, 0, 0));
    TRY(save_optimizer(s->optimizer, state));
    TRY(save_counters(s, state));
    return sync_directory(s->model->host, state);
}

glm52_status step_save(struct step *s, const char *directory)
{
    struct host *host = s->model->host;
    char name[64], before[64] = "", state[PATH], path[PATH];

    if (!s->optimizer)
        return fail(GLM52_E_STATE, "this step was created without an optimizer: there is no state to save");
    if (read_latest(host, directory, before)) before[0] = 0; /* none, or a damaged one: nothing to remove */
    snprintf(name, sizeof name, "step-%06lld", (long long)s->optimizer->step);
    if (!strcmp(before, name)) snprintf(name, sizeof name, "step-%06lld" SECOND, (long long)s->optimizer->step);
    TRY(join(state, directory, name));
    TRY(join(path, directory, "latest"));
    glm52_status status = write_state(s, state);
    if (!status) status = file_write_all(host, path, name, strlen(name));
    if (status) {
        remove_state(host, state);
        return status;
    }
    TRY(sync_directory(host, directory)); /* both states are whole */
    if (before[0] && !join(state, directory, before)) remove_state(host, state);
    return GLM52_OK;
}

static glm52_status read_counters(struct host *host, const char *directory, struct counters *c)
{
    char path[PATH], *text;
    size_t bytes;
    json_int_t format = 0, step = -1, begin = -1, packs = -1, updates[PARTS] = {0};
    const char *stage = "";

    TRY(join(path, directory, "state.json"));
    TRY(file_read_all(host, path, 65536, &text, &bytes));
    json_t *json = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, NULL);
    int bad = json_unpack(json, "{s:I, s:I, s:I, s:I, s:s, s:F, s:F, s:[I, I, I, I]}", "format", &format, "step", &step,
                          "schedule_begin", &begin, "packs", &packs, "stage", &stage, "mean_loss", &c->mean_loss,
                          "skipped", &c->skipped, "updates", &updates[0], &updates[1], &updates[2], &updates[3]);
    snprintf(c->stage, sizeof c->stage, "%s", stage);
    json_decref(json);
    host_free(host, text, bytes + 1, MEMORY_HOST);
    if (format > FORMAT) {
        fail(GLM52_E_VERSION, "%s has format %lld, this library reads up to %d", path, (long long)format, FORMAT);
        return fail_hint("use a newer library");
    }
    for (int i = 0; i < PARTS; i++) bad |= updates[i] < 0 || updates[i] > step;
    if (bad || step < 0 || packs < 0 || begin < 0 || begin > step) {
        fail(GLM52_E_CORRUPT, "%s does not hold the counters of a state", path);
        return fail_detail("path", "%s", path);
    }
    c->step = step;
    c->schedule_begin = begin;
    c->packs = packs;
    for (int i = 0; i < PARTS; i++) c->updates[i] = updates[i];
    return GLM52_OK;
}

static void take_counters(struct step *s, const struct counters *c, const struct mover *mover)
{
    struct optimizer *o = s->optimizer;

    o->step = c->step;
    o->schedule_begin = mover->other_stage ? c->step : c->schedule_begin;
    for (int part = 0; part < PARTS; part++) o->updates[part] = mover->found[part] ? c->updates[part] : 0;
    s->packs = (uint64_t)c->packs;
    s->mean_loss = c->mean_loss;
    s->metric[METRIC_SKIPPED] = c->skipped;
    s->metric[METRIC_STEP] = (double)c->step;
}

glm52_status step_resume(struct step *s, const char *directory)
{
    struct host *host = s->model->host;
    struct mover mover = {0};
    struct safetensors file, values;
    struct counters counters;
    char name[64], state[PATH];

    if (!s->optimizer)
        return fail(GLM52_E_STATE, "this step was created without an optimizer: it cannot go on training");
    TRY(read_latest(host, directory, name));
    TRY(join(state, directory, name));
    TRY(read_counters(host, state, &counters));
    mover.other_stage = strcmp(counters.stage, s->model->config.train.stage) != 0;
    TRY(open_optimizer(s->optimizer, state, &mover, &file));
    glm52_status status = hub_open_values(s->model, state, &values);
    if (!status) {
        status = hub_read_values(s->model, &values);
        safetensors_close(&values);
        if (!status) {
            optimizer_resync(s->optimizer);
            status = each_tensor(s->optimizer, read_tensor, &mover);
        }
        if (!status) status = s->model->stream->ops->synchronize(s->model->stream);
        if (status) fail_detail("state", "lost"); /* reading had begun */
    }
    host_free(host, mover.buffer, 2 * PIECE * sizeof(float), MEMORY_HOST);
    safetensors_close(&file);
    if (!status) take_counters(s, &counters, &mover);
    return status;
}

/* ---- the next stage, without leaving ---- */

/* The same counters as saving, leaving and resuming under the new options gives. */
glm52_status step_set_stage(struct step *s, struct model *m, struct optimizer *o, const struct config *config)
{
    struct optimizer next;
    struct step kept = *s;
    struct config before = m->config;

    if (!o) return fail(GLM52_E_STATE, "this step was created without an optimizer: it has no stages");
    if (m->steps > (s->model != NULL)) {
        fail(GLM52_E_STATE, "another step of this model is open, and was planned for the stage that would end");
        return fail_hint("drop the model's other steps first");
    }
    glm52_status status = config_copy(&m->config, config);
    if (!status) {
        parameters_select(&m->parameters, &m->config);
        m->stage++;
        status = optimizer_open(m, &m->config, &next);
        if (status) config_free(&m->config), m->stage--;
    }
    if (status) {
        m->config = before;
        parameters_select(&m->parameters, &m->config);
        return status;
    }
    int other = strcmp(before.train.stage, m->config.train.stage) != 0;
    optimizer_adopt(&next, o);
    next.schedule_begin = other ? o->step : o->schedule_begin;
    next.lr_override = o->lr_override;
    optimizer_close(o);
    *o = next;
    config_free(&before);
    step_close(s);
    status = step_open(m, o, &m->config, s);
    s->packs = kept.packs;
    s->mean_loss = kept.mean_loss;
    s->metric[METRIC_SKIPPED] = kept.metric[METRIC_SKIPPED];
    s->metric[METRIC_STEP] = (double)o->step;
    if (status) fail_detail("state", "lost");
    return status;
}
