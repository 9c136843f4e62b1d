#include <math.h>

#include "api/object.h"

glm52_status glm52_optimizer_create(glm52_model *model, glm52_config *config, glm52_optimizer **out)
{
    CHECK(model, CLASS_MODEL);
    if (config) CHECK(config, CLASS_CONFIG);
    if (config) CHECK_SAME(model, config);
    CHECK_POINTER(out);
    if (config) TRY(config_validate_training(&config->config));
    glm52_optimizer *o = object_create(model->object.context, CLASS_OPTIMIZER, sizeof *o);
    if (!o) return GLM52_E_NOMEM;
    glm52_status status = optimizer_open(&model->model, config ? &config->config : &model->model.config, &o->optimizer);
    if (status) {
        object_destroy(&o->object);
        return status;
    }
    o->model = glm52_model_ref(model);
    *out = o;
    return GLM52_OK;
}

glm52_optimizer *glm52_optimizer_ref(glm52_optimizer *self)
{
    return object_ref(self, CLASS_OPTIMIZER);
}

void glm52_optimizer_unref(glm52_optimizer **self)
{
    glm52_optimizer *o;

    if (!object_unref(self, CLASS_OPTIMIZER, &o)) return;
    optimizer_close(&o->optimizer);
    glm52_model_unref(&o->model);
    object_destroy(&o->object);
}

glm52_status glm52_optimizer_set_lr(glm52_optimizer *self, double lr)
{
    CHECK(self, CLASS_OPTIMIZER);
    if (!isfinite(lr)) return fail(GLM52_E_INVALID, "learning rate %g is not finite", lr);
    self->optimizer.lr_override = lr;
    return GLM52_OK;
}

glm52_status glm52_optimizer_resync(glm52_optimizer *self)
{
    CHECK(self, CLASS_OPTIMIZER);
    optimizer_resync(&self->optimizer);
    return self->model->model.stream->ops->synchronize(self->model->model.stream);
}
