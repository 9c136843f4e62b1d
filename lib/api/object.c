#include "api/object.h"

#include <stdio.h>
#include <string.h>

static const char *const class_name[CLASSES] = {"",      "context", "config",    "model",
                                                "batch", "dataset", "optimizer", "step"};

void *object_create(glm52_context *context, enum class class, size_t bytes)
{
    struct object *object = object_memory(&context->host, bytes);

    if (!object) return NULL;
    object->magic = MAGIC;
    object->class = class;
    object->references = 1;
    object->bytes = bytes;
    object->context = glm52_context_ref(context);
    return object;
}

void object_destroy(struct object *object)
{
    glm52_context *context = object->context;

    object_bury(&context->host, object);
    glm52_context_unref(&context);
}

int object_is(const void *handle, enum class class)
{
    const struct object *object = handle;

    return object && object->magic == MAGIC && object->class == class;
}

glm52_status object_check(const void *handle, enum class class)
{
    const struct object *object = handle;

    if (object_is(handle, class)) return GLM52_OK;
    if (!object) return fail(GLM52_E_HANDLE, "NULL given where a glm52_%s is needed", class_name[class]);
    if (object->magic == MAGIC)
        return fail(GLM52_E_HANDLE, "a glm52_%s given where a glm52_%s is needed", class_name[object->class],
                    class_name[class]);
    if (object->magic == TOMBSTONE)
        return fail(GLM52_E_HANDLE, "a released glm52_%s (%p) given where a glm52_%s is needed",
                    class_name[object->class], handle, class_name[class]);
    return fail(GLM52_E_HANDLE, "%p, which is no handle, given where a glm52_%s is needed", handle, class_name[class]);
}

void *object_ref(void *handle, enum class class)
{
    struct object *object = handle;

    if (object_check(handle, class)) return NULL;
    atomic_fetch_add(&object->references, 1);
    return handle;
}

int object_unref(void *pointer_to_handle, enum class class, void *out)
{
    struct object *object = NULL;

    if (!pointer_to_handle) return 0;
    memcpy(&object, pointer_to_handle, sizeof object);
    if (!object || object_check(object, class)) return 0;
    memset(pointer_to_handle, 0, sizeof object);
    memcpy(out, &object, sizeof object);
    return atomic_fetch_sub(&object->references, 1) == 1;
}

static const glm52_context *context_of(const struct object *object)
{
    return object->class == CLASS_CONTEXT ? (const glm52_context *)(const void *)object : object->context;
}

glm52_status object_same_context(const void *one, const void *other)
{
    if (context_of(one) == context_of(other)) return GLM52_OK;
    fail(GLM52_E_INVALID, "the %s belongs to another context", class_name[((const struct object *)other)->class]);
    return fail_hint("make both with one context");
}

glm52_status check_pointer(const void *pointer, const char *name)
{
    return pointer ? GLM52_OK : fail(GLM52_E_INVALID, "argument %s is NULL", name);
}
