/* _glm52: the public header for Python, nearly as it is. Handles are capsules, statuses exceptions, outputs results;
 * the package glm52 makes classes of it. Functions that compute release the GIL. Which arguments are handles and
 * outputs, who computes and who may be called at any time is said by glm52_gen.i, which abi/gen.lua writes; here is
 * how. */
%module(package="glm52", threads="1") _glm52

%{
#include "handle.h"
%}

%include <stdint.i>
%include <typemaps.i>

%rename("%(strip:[glm52_])s", %$isfunction) "";
%rename("%(strip:[GLM52_])s", %$isenumitem) "";

/* ---- arguments --------------------------------------------------------------------------------------- */

%typemap(in) const char * {
    Py_ssize_t bytes;
    $1 = $input == Py_None ? NULL : (char *)(uintptr_t)PyUnicode_AsUTF8AndSize($input, &bytes);
    if (!$1 && $input != Py_None) SWIG_fail;
    if ($1 && strlen($1) != (size_t)bytes) {
        PyErr_SetString(PyExc_ValueError, "a text for glm52 cannot hold a NUL character");
        SWIG_fail;
    }
}
%typemap(freearg) const char * ""

%define HANDLE(name, CLASS)
%typemap(in) glm52_##name * (struct held *held = NULL) {
    if (!held_in($input, CLASS, &held, &$1)) SWIG_fail;
}
%typemap(freearg) glm52_##name * "held_done(held$argnum);"
%typemap(in, numinputs=0) glm52_##name **out (glm52_##name *made = NULL) "$1 = &made;"
%typemap(argout) glm52_##name **out {
    Py_DECREF($result);
    $result = held_new(made$argnum, CLASS, held1->turn);
    if (!$result) SWIG_fail;
}
%enddef

/* A sequence of batches. */
%typemap(in) (glm52_batch *const *batches, uint32_t count) (struct held_list list = {0}) {
    if (!held_list_in($input, HELD_BATCH, &list)) SWIG_fail;
    $1 = (glm52_batch *const *)list.handles;
    $2 = (uint32_t)list.count;
}
%typemap(freearg) (glm52_batch *const *batches, uint32_t count) "held_list_done(&list$argnum);"

/* A contiguous buffer; the caller says what its elements are, and that must agree with their size. */
%typemap(in) (glm52_dtype dtype, const void *values, uint64_t count) (Py_buffer view, int open = 0) {
    static const unsigned char bytes[] = {0, 4, 2, 8, 4, 8, 1, 1, 2};
    PyObject *array = NULL;
    int dtype = 0;
    if (!PyArg_ParseTuple($input, "iO", &dtype, &array)) SWIG_fail;
    if (PyObject_GetBuffer(array, &view, PyBUF_C_CONTIGUOUS)) SWIG_fail;
    open = 1;
    if (dtype < 1 || dtype >= (int)sizeof bytes || view.itemsize != bytes[dtype]) {
        PyErr_Format(PyExc_TypeError, "elements of %zd bytes cannot be of dtype %d", view.itemsize, dtype);
        SWIG_fail;
    }
    $1 = dtype;
    $2 = view.buf;
    $3 = (uint64_t)(view.len / view.itemsize);
}
%typemap(freearg) (glm52_dtype dtype, const void *values, uint64_t count)
    "if (open$argnum) PyBuffer_Release(&view$argnum);"

/* ---- results ----------------------------------------------------------------------------------------- */

%typemap(out) glm52_status {
    if ($1) {
        raise_last();
        SWIG_fail;
    }
    $result = SWIG_Py_Void();
}
%typemap(in, numinputs=0) const char **out (const char *text = NULL) "$1 = &text;"
%typemap(argout) const char **out {
    Py_DECREF($result);
    $result = PyUnicode_DecodeUTF8(text$argnum, (Py_ssize_t)strlen(text$argnum), "replace");
    if (!$result) SWIG_fail;
}
%typemap(out) PyObject * "$result = $1; if (!$result) SWIG_fail;"

/* ---- who waits, who lets others run ------------------------------------------------------------------ */

/* The first argument is a handle: its context serves one thread at a time. */
%exception {
    if (!turn_take(held1)) SWIG_fail;
    $action
    turn_give(held1);
}

%define ANYTIME(name)
%exception name "$action";
%nothread name;
%enddef
%include "glm52_gen.i"
ANYTIME(context_new)
ANYTIME(options)
ANYTIME(held_close)
ANYTIME(held_is_closed)
ANYTIME(held_keep)
ANYTIME(turn_kept_gradients)
ANYTIME(turn_messages)
ANYTIME(turn_abandon)
ANYTIME(dlpack_new)

/* These are over in a moment; releasing the GIL would cost more. */
%nothread model_parameter;
%nothread batch_values;

/* These make Python objects, and release the GIL on their own where it takes long. */
%nothread model_assign;
%nothread model_generate;
%nothread step_plan;

/* ---- the header, less what glm52_gen.i leaves to the functions below ---------------------------------- */

%include <glm52.h>

%{
/* A context whose log waits for messages(). */
static PyObject *context_new(const char *device, int threads)
{
    struct turn *turn = turn_create();
    glm52_context_options options = {.struct_size = sizeof options, .device = device, .threads = threads,
                                     .log = turn_log, .log_user = turn};
    glm52_context *context = NULL;
    PyObject *capsule = NULL;

    if (!turn) return NULL;
    if (glm52_context_create(&options, &context))
        raise_last();
    else
        capsule = held_new(context, HELD_CONTEXT, turn);
    turn_drop(turn);
    return capsule;
}

/* List of (key, type, range, default, summary). */
static PyObject *options(void)
{
    PyObject *list = PyList_New(0);
    glm52_option_info o = {.struct_size = sizeof o};

    for (uint32_t i = 0; list && !glm52_config_describe(i, &o); i++) {
        PyObject *row = Py_BuildValue("(sssss)", o.key, o.type, o.range, o.default_value, o.summary);
        if (!row || PyList_Append(list, row)) Py_CLEAR(list);
        Py_XDECREF(row);
    }
    return list;
}

static PyObject *view_tuple(const glm52_view *v)
{
    PyObject *shape = PyTuple_New(v->dimensions);

    for (int i = 0; shape && i < v->dimensions; i++) PyTuple_SET_ITEM(shape, i, PyLong_FromLongLong(v->shape[i]));
    return Py_BuildValue("(KiiN)", (unsigned long long)(uintptr_t)v->data, v->dtype, v->on_device, shape);
}

/* (name, policy, value, gradient), the last two (address, dtype, on_device, shape). */
static PyObject *model_parameter(glm52_model *model, uint32_t index)
{
    glm52_parameter_info info = {.struct_size = sizeof info};

    if (!glm52_model_parameter(model, index, &info))
        return Py_BuildValue("(ssNN)", info.name, info.policy, view_tuple(&info.value), view_tuple(&info.gradient));
    raise_last();
    return NULL;
}

/* Copies `values` over the parameter: they must be its bytes. */
static PyObject *model_assign(glm52_model *model, uint32_t index, Py_buffer *values)
{
    glm52_parameter_info info = {.struct_size = sizeof info};

    if (glm52_model_parameter(model, index, &info)) {
        raise_last();
        return NULL;
    }
    if ((uint64_t)values->len != info.value.bytes || info.value.on_device) {
        PyErr_Format(PyExc_ValueError, "%zd bytes for %s, which has %llu%s", values->len, info.name,
                     (unsigned long long)info.value.bytes, info.value.on_device ? " on a device" : "");
        return NULL;
    }
    memcpy(info.value.data, values->buf, (size_t)values->len);
    Py_RETURN_NONE;
}

/* (view, bytes): a copy, for the next call that uses the batch replaces what it holds. */
static PyObject *batch_values(glm52_batch *batch, const char *name)
{
    glm52_view view = {.struct_size = sizeof view};

    if (!glm52_batch_get(batch, name, &view))
        return Py_BuildValue("(NN)", view_tuple(&view),
                             PyByteArray_FromStringAndSize(view.data, (Py_ssize_t)view.bytes));
    raise_last();
    return NULL;
}

/* List of (section, name, amount, bytes, calls). */
static PyObject *plan_rows(glm52_step *step, glm52_plan_row *first, glm52_status status)
{
    PyObject *list = status ? NULL : PyList_New(0);

    if (status) raise_last();
    for (uint32_t i = 1; list && !status; i++) {
        PyObject *row = Py_BuildValue("(ssddK)", first->section, first->name, first->amount, first->bytes,
                                      (unsigned long long)first->calls);
        if (!row || PyList_Append(list, row)) Py_CLEAR(list);
        Py_XDECREF(row);
        first->struct_size = sizeof *first;
        status = glm52_step_plan(step, i, first);
    }
    return list;
}

static PyObject *step_plan(glm52_step *step)
{
    glm52_plan_row row = {.struct_size = sizeof row};
    glm52_status status;

    Py_BEGIN_ALLOW_THREADS
    status = glm52_step_plan(step, 0, &row); /* the dry run */
    Py_END_ALLOW_THREADS
    return plan_rows(step, &row, status);
}

/* New tokens as a bytearray of int32. */
static PyObject *model_generate(glm52_model *model, Py_buffer *prompt, uint64_t limit, double temperature,
                                uint64_t seed)
{
    PyObject *tokens = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)(limit * sizeof(int32_t)));
    uint64_t produced = 0;
    glm52_status status;

    if (!tokens) return NULL;
    int32_t *out = (int32_t *)(void *)PyByteArray_AS_STRING(tokens);
    Py_BEGIN_ALLOW_THREADS
    status = glm52_model_generate(model, prompt->buf, (uint64_t)prompt->len / sizeof(int32_t), limit, temperature, seed,
                                  out, &produced);
    Py_END_ALLOW_THREADS
    if (!status && !PyByteArray_Resize(tokens, (Py_ssize_t)(produced * sizeof(int32_t)))) return tokens;
    if (status) raise_last();
    Py_DECREF(tokens);
    return NULL;
}
%}

%typemap(in) Py_buffer * (Py_buffer view, int open = 0) {
    if (PyObject_GetBuffer($input, &view, PyBUF_C_CONTIGUOUS)) SWIG_fail;
    open = 1;
    $1 = &view;
}
%typemap(freearg) Py_buffer * "if (open$argnum) PyBuffer_Release(&view$argnum);"

PyObject *context_new(const char *device, int threads);
PyObject *options(void);
PyObject *model_parameter(glm52_model *model, uint32_t index);
PyObject *model_assign(glm52_model *model, uint32_t index, Py_buffer *values);
PyObject *model_generate(glm52_model *model, Py_buffer *prompt, uint64_t limit, double temperature, uint64_t seed);
PyObject *batch_values(glm52_batch *batch, const char *name);
PyObject *step_plan(glm52_step *step);

%rename(close) held_close;
%rename(is_closed) held_is_closed;
%rename(keep) held_keep;
%rename(kept_gradients) turn_kept_gradients;
%rename(messages) turn_messages;
%rename(abandon) turn_abandon;
%rename(dlpack) dlpack_new;
PyObject *held_close(PyObject *object);
PyObject *held_is_closed(PyObject *object);
PyObject *held_keep(PyObject *object);
PyObject *turn_kept_gradients(PyObject *object);
PyObject *turn_messages(PyObject *object);
PyObject *turn_abandon(PyObject *context, PyObject *job);
PyObject *dlpack_new(PyObject *keeper, unsigned long long address, int dtype, int on_device, PyObject *shape,
                     int versioned, int read_only);
