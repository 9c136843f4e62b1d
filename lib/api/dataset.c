#include "api/object.h"

glm52_status glm52_dataset_open(glm52_context *context, glm52_config *config, glm52_dataset **out)
{
    CHECK(context, CLASS_CONTEXT);
    CHECK(config, CLASS_CONFIG);
    CHECK_SAME(context, config);
    CHECK_POINTER(out);
    TRY(config_validate(&config->config));
    glm52_dataset *d = object_create(context, CLASS_DATASET, sizeof *d);
    if (!d) return GLM52_E_NOMEM;
    glm52_status status = dataset_open(&context->host, &config->config, &d->dataset);
    if (status)
        object_destroy(&d->object);
    else
        *out = d;
    return status;
}

glm52_dataset *glm52_dataset_ref(glm52_dataset *self)
{
    return object_ref(self, CLASS_DATASET);
}

void glm52_dataset_unref(glm52_dataset **self)
{
    glm52_dataset *d;

    if (!object_unref(self, CLASS_DATASET, &d)) return;
    dataset_close(&d->dataset);
    object_destroy(&d->object);
}

/* The batch has a new pack. */
static void filled(glm52_batch *batch)
{
    batch_clear_outputs(batch);
    batch->has_labels = 1;
}

glm52_status glm52_dataset_next(glm52_dataset *self, glm52_batch *batch)
{
    CHECK(self, CLASS_DATASET);
    CHECK(batch, CLASS_BATCH);
    TRY(dataset_train_pack(self->dataset, self->next, &batch->pack));
    filled(batch);
    self->next++;
    return GLM52_OK;
}

glm52_status glm52_dataset_seek(glm52_dataset *self, uint64_t pack)
{
    CHECK(self, CLASS_DATASET);
    self->next = pack;
    return GLM52_OK;
}

glm52_status glm52_dataset_held_out(glm52_dataset *self, uint64_t index, glm52_batch *batch)
{
    CHECK(self, CLASS_DATASET);
    CHECK(batch, CLASS_BATCH);
    TRY(dataset_held_out_pack(self->dataset, index, &batch->pack));
    filled(batch);
    return GLM52_OK;
}

glm52_status glm52_dataset_held_out_packs(glm52_dataset *self, uint64_t *packs)
{
    CHECK(self, CLASS_DATASET);
    CHECK_POINTER(packs);
    *packs = dataset_held_out_packs(self->dataset);
    return GLM52_OK;
}

glm52_status glm52_dataset_describe(glm52_dataset *self, const char **out)
{
    CHECK(self, CLASS_DATASET);
    CHECK_POINTER(out);
    dataset_describe(self->dataset, self->line, sizeof self->line);
    *out = self->line;
    return GLM52_OK;
}
