#include <stdio.h>
#include <string.h>

#include "api/object.h"

/* The caller's options around the model's own shape, or the model's options. */
static glm52_status step_config(glm52_model *model, glm52_config *config, struct config *out)
{
    const struct config *own = &model->model.config;

    TRY(config_copy(out, config ? &config->config : own));
    glm52_status status = config_take_model(out, own);
    if (!status) status = config_validate(out);
    const char *key = status ? NULL : config_stage_difference(out, own);
    if (key) {
        fail(GLM52_E_STATE, "%s differs from what the model was made with", key);
        fail_hint("create the step with the model's options, then call glm52_step_set_stage()");
        status = fail_detail("key", "%s", key);
    }
    if (status) config_free(out);
    return status;
}

glm52_status glm52_step_create(glm52_model *model, glm52_optimizer *optimizer, glm52_config *config, glm52_step **out)
{
    CHECK(model, CLASS_MODEL);
    if (optimizer) CHECK(optimizer, CLASS_OPTIMIZER);
    if (config) CHECK(config, CLASS_CONFIG);
    if (config) CHECK_SAME(model, config);
    CHECK_POINTER(out);
    if (optimizer && optimizer->model != model)
        return fail(GLM52_E_INVALID, "the optimizer belongs to another model");
    glm52_step *s = object_create(model->object.context, CLASS_STEP, sizeof *s);
    if (!s) return GLM52_E_NOMEM;
    glm52_status status = step_config(model, config, &s->config);
    if (status) {
        object_destroy(&s->object);
        return status;
    }
    status = step_open(&model->model, optimizer ? &optimizer->optimizer : NULL, &s->config, &s->step);
    if (status) {
        config_free(&s->config);
        object_destroy(&s->object);
        return status;
    }
    s->model = glm52_model_ref(model);
    s->optimizer = optimizer ? glm52_optimizer_ref(optimizer) : NULL;
    *out = s;
    return GLM52_OK;
}

glm52_step *glm52_step_ref(glm52_step *self)
{
    return object_ref(self, CLASS_STEP);
}

static void drop_plan(glm52_step *s)
{
    if (s->plan) host_free(&s->object.context->host, s->plan, sizeof *s->plan, MEMORY_HOST);
    s->plan = NULL;
}

void glm52_step_unref(glm52_step **self)
{
    glm52_step *s;

    if (!object_unref(self, CLASS_STEP, &s)) return;
    drop_plan(s);
    step_close(&s->step);
    config_free(&s->config);
    if (s->optimizer) glm52_optimizer_unref(&s->optimizer);
    glm52_model_unref(&s->model);
    object_destroy(&s->object);
}

/* A step, and one that has its memory: a stage that could not begin leaves it without. */
static glm52_status check_step(const glm52_step *self)
{
    CHECK(self, CLASS_STEP);
    if (self->step.model) return GLM52_OK;
    fail(GLM52_E_STATE, "the step lost its memory when glm52_step_set_stage() failed");
    return fail_hint("make room and call glm52_step_set_stage() again, or drop the step");
}

static glm52_status with_packs(glm52_step *self, glm52_batch *const *batches, uint32_t count,
                               glm52_status (*run)(struct step *, const struct pack *const *, uint32_t))
{
    const struct pack **packs;

    TRY(check_step(self));
    TRY(batch_packs(batches, count, &packs, &self->object.context->host));
    glm52_status status = run(&self->step, packs, count);
    host_free(&self->object.context->host, packs, count * sizeof *packs, MEMORY_HOST);
    return status;
}

glm52_status glm52_step_run(glm52_step *self, glm52_batch *const *batches, uint32_t count)
{
    return with_packs(self, batches, count, step_run);
}

glm52_status glm52_step_gradients(glm52_step *self, glm52_batch *const *batches, uint32_t count)
{
    return with_packs(self, batches, count, step_gradients);
}

static glm52_status evaluate(struct step *s, const struct pack *const *packs, uint32_t count)
{
    double loss;

    return step_evaluate(s, packs, count, &loss);
}

glm52_status glm52_step_evaluate(glm52_step *self, glm52_batch *const *batches, uint32_t count, double *loss)
{
    TRY(with_packs(self, batches, count, evaluate));
    if (loss) *loss = self->step.metric[METRIC_HELD_OUT_LOSS];
    return GLM52_OK;
}

glm52_status glm52_step_metric(glm52_step *self, const char *name, double *out)
{
    TRY(check_step(self));
    CHECK_POINTER(name);
    CHECK_POINTER(out);
    return step_metric(&self->step, name, out);
}

const char *glm52_step_metric_name(glm52_step *self, uint32_t index)
{
    double value;

    return check_step(self) || !step_metric_at(&self->step, index, self->metric, &value) ? NULL : self->metric;
}

glm52_status glm52_step_set_stage(glm52_step *self, glm52_config *config)
{
    CHECK(self, CLASS_STEP);
    CHECK(config, CLASS_CONFIG);
    CHECK_SAME(self, config);
    struct config next;
    TRY(config_copy(&next, &config->config));
    glm52_status status = config_take_model(&next, &self->model->model.config);
    if (!status) status = config_validate(&next);
    struct optimizer *optimizer = self->optimizer ? &self->optimizer->optimizer : NULL;
    if (!status) status = step_set_stage(&self->step, &self->model->model, optimizer, &next);
    if (status) {
        config_free(&next);
        return status;
    }
    config_free(&self->config);
    self->config = next;
    drop_plan(self);
    return GLM52_OK;
}

static glm52_status make_plan(glm52_step *self)
{
    struct host *host = &self->object.context->host;

    if (self->plan) return GLM52_OK;
    struct dry_run *plan = host_calloc(host, sizeof *plan, MEMORY_HOST);
    if (!plan) return GLM52_E_NOMEM;
    glm52_status status = dry_run(self->model->model.stream, &self->config, plan);
    if (status)
        host_free(host, plan, sizeof *plan, MEMORY_HOST);
    else
        self->plan = plan;
    return status;
}

glm52_status glm52_step_plan(glm52_step *self, uint32_t index, glm52_plan_row *out)
{
    CHECK(self, CLASS_STEP);
    CHECK_STRUCT(out, glm52_plan_row, calls);
    TRY(make_plan(self));
    const struct dry_run *plan = self->plan;
    glm52_plan_row row = {.struct_size = sizeof row, .section = "memory"};
    if (index < MEMORY_CLASSES) {
        row.name = memory_class_name[index];
        row.amount = (double)plan->memory[index];
    } else if (index == MEMORY_CLASSES) {
        row.name = "peak";
        row.amount = (double)plan->peak;
    } else if (index - MEMORY_CLASSES - 1 < (uint32_t)plan->tally.rows) {
        const struct tally_row *t = &plan->tally.row[index - MEMORY_CLASSES - 1];
        snprintf(self->label, sizeof self->label, "%s %s", t->label, t->operation);
        row = (glm52_plan_row){.struct_size = sizeof row, .section = "flops", .name = self->label, .amount = t->flops,
                               .bytes = t->bytes, .calls = t->calls};
    } else {
        return fail(GLM52_E_INVALID, "the plan has %d rows, row %u does not exist",
                    MEMORY_CLASSES + 1 + plan->tally.rows, index);
    }
    struct_give(out, &row, sizeof row);
    return GLM52_OK;
}

glm52_status glm52_step_save(glm52_step *self, const char *directory)
{
    TRY(check_step(self));
    CHECK_POINTER(directory);
    return step_save(&self->step, directory);
}

glm52_status glm52_step_resume(glm52_step *self, const char *directory, uint64_t *packs)
{
    TRY(check_step(self));
    CHECK_POINTER(directory);
    TRY(step_resume(&self->step, directory));
    if (packs) *packs = self->step.packs;
    return GLM52_OK;
}
