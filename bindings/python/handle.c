/* Handles of the library in capsules, and errors. */
#include "handle.h"

#include <stdlib.h>
#include <string.h>

PyObject *text_of(const char *text)
{
    return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
}

const char *const class_name[] = {"glm52.context", "glm52.config", "glm52.model", "glm52.batch", "glm52.dataset",
                                         "glm52.optimizer", "glm52.step"};

#define UNREF(name)                  \
    {                                \
        glm52_##name *own = handle;  \
        glm52_##name##_unref(&own);  \
        return;                      \
    }

static void unref(void *handle, enum held_class class)
{
    switch (class) {
    case HELD_CONTEXT: UNREF(context)
    case HELD_CONFIG: UNREF(config)
    case HELD_MODEL: UNREF(model)
    case HELD_BATCH: UNREF(batch)
    case HELD_DATASET: UNREF(dataset)
    case HELD_OPTIMIZER: UNREF(optimizer)
    case HELD_STEP: UNREF(step)
    }
}

/* The turn is kept: others may look at it through this capsule. */
static void let_go(struct held *held)
{
    void *handle = held->handle;

    held->handle = NULL;
    if (held->keeps_gradients) held->turn->kept_gradients--;
    held->keeps_gradients = 0;
    if (handle) unref(handle, held->class);
}

static void capsule_dies(PyObject *capsule)
{
    struct held *held = PyCapsule_GetPointer(capsule, PyCapsule_GetName(capsule));

    let_go(held);
    turn_drop(held->turn);
    free(held);
}

PyObject *held_new(void *handle, enum held_class class, struct turn *turn)
{
    struct held *held = calloc(1, sizeof *held);
    PyObject *capsule = held ? PyCapsule_New(held, class_name[class], capsule_dies) : PyErr_NoMemory();

    if (!capsule) {
        free(held);
        unref(handle, class);
        return NULL;
    }
    *held = (struct held){.handle = handle, .class = class, .turn = turn};
    turn->references++;
    return capsule;
}

struct held *held_of(PyObject *object, const char *wanted)
{
    const char *name = PyCapsule_CheckExact(object) ? PyCapsule_GetName(object) : NULL;

    for (size_t i = 0; name && i < sizeof class_name / sizeof *class_name; i++)
        if (name == class_name[i] && (!wanted || wanted == name)) return PyCapsule_GetPointer(object, name);
    PyErr_Format(PyExc_TypeError, "%s given where a %s is needed", name ? name : Py_TYPE(object)->tp_name,
                 wanted ? wanted : "glm52 handle");
    return NULL;
}

void raise_error(const char *maker, const char *text)
{
    PyObject *errors = PyImport_ImportModule("glm52._errors");
    PyObject *error = errors ? PyObject_CallMethod(errors, maker, "s", text) : NULL;

    if (error) PyErr_SetObject((PyObject *)Py_TYPE(error), error);
    Py_XDECREF(error);
    Py_XDECREF(errors);
}

int held_in(PyObject *object, enum held_class class, struct held **held, void *handle)
{
    struct held *found;

    memset(handle, 0, sizeof(void *));
    if (object == Py_None) return 1;
    if (!(found = held_of(object, class_name[class]))) return 0;
    if (found->closed) {
        raise_error("closed", class_name[class]);
        return 0;
    }
    found->users++;
    *held = found;
    memcpy(handle, &found->handle, sizeof(void *));
    return 1;
}

void held_done(struct held *held)
{
    if (held && !--held->users && held->closed) let_go(held);
}

int held_list_in(PyObject *object, enum held_class class, struct held_list *list)
{
    PyObject *sequence = PySequence_Fast(object, "a sequence of handles is needed");

    if (!sequence) return 0;
    Py_ssize_t count = PySequence_Fast_GET_SIZE(sequence);
    list->handles = PyMem_Calloc((size_t)count + 1, sizeof *list->handles);
    list->held = PyMem_Calloc((size_t)count + 1, sizeof *list->held);
    int good = list->handles && list->held;
    if (!good) PyErr_NoMemory();
    for (; good && list->count < count; list->count += good)
        good = held_in(PySequence_Fast_GET_ITEM(sequence, list->count), class, &list->held[list->count],
                       &list->handles[list->count]);
    Py_DECREF(sequence);
    return good;
}

void held_list_done(struct held_list *list)
{
    for (Py_ssize_t i = 0; i < list->count; i++) held_done(list->held[i]);
    PyMem_Free(list->handles);
    PyMem_Free(list->held);
}

PyObject *held_close(PyObject *object)
{
    struct held *held = held_of(object, NULL);

    if (!held) return NULL;
    held->closed = 1;
    if (!held->users) let_go(held);
    Py_RETURN_NONE;
}

PyObject *held_is_closed(PyObject *object)
{
    struct held *held = held_of(object, NULL);

    return held ? PyBool_FromLong(held->closed) : NULL;
}

PyObject *held_keep(PyObject *object)
{
    struct held *held = held_of(object, NULL), *kept;

    if (!held) return NULL;
    if (held->closed) {
        raise_error("closed", class_name[held->class]);
        return NULL;
    }
    if (held->class != HELD_STEP) return held_new(glm52_model_ref(held->handle), HELD_MODEL, held->turn);
    PyObject *capsule = held_new(glm52_step_ref(held->handle), HELD_STEP, held->turn);
    if (capsule) {
        kept = PyCapsule_GetPointer(capsule, class_name[HELD_STEP]);
        kept->keeps_gradients = 1;
        kept->turn->kept_gradients++;
    }
    return capsule;
}

PyObject *turn_kept_gradients(PyObject *object)
{
    struct held *held = held_of(object, NULL);

    return held ? PyLong_FromLong(held->turn->kept_gradients) : NULL;
}

/* ---- errors ------------------------------------------------------------------------------------------ */

static PyObject *details_of(const glm52_error *error)
{
    /* the header cannot list them */
    static const char *const keys[] = {"key", "path", "errno", "tensor", "byte", "position", "layer", "state", "line",
                                       "column", "rank", "device"};
    PyObject *details = PyDict_New();

    for (size_t i = 0; details && i < sizeof keys / sizeof *keys; i++) {
        const char *value = glm52_error_detail(error, keys[i]);
        PyObject *text = value ? text_of(value) : NULL;
        if (value && (!text || PyDict_SetItemString(details, keys[i], text))) Py_CLEAR(details);
        Py_XDECREF(text);
    }
    return details;
}

void raise_last(void)
{
    const glm52_error *last = glm52_error_last();
    PyObject *errors = PyImport_ImportModule("glm52._errors"), *error = NULL;

    if (errors)
        error = PyObject_CallMethod(errors, "make", "iNNN", glm52_error_status(last),
                                    text_of(glm52_error_message(last)), text_of(glm52_error_hint(last)),
                                    details_of(last));
    if (error) PyErr_SetObject((PyObject *)Py_TYPE(error), error);
    Py_XDECREF(error);
    Py_XDECREF(errors);
}
