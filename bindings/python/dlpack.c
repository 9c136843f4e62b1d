/* Tensors of the library as DLPack capsules (dmlc/dlpack, ABI 0 and 1): numpy up to 2.0 wants the old form, newer
 * consumers say with max_version that they know the versioned one, which alone can say "read-only". */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "handle.h"

enum { DL_CPU = 1, DL_CUDA = 2, DL_INT = 0, DL_UINT = 1, DL_FLOAT = 2, DL_BFLOAT = 4, DL_E4M3FN = 10 };
enum { DL_READ_ONLY = 1, DIMENSIONS = 4 };

struct dl_type {
    uint8_t code, bits;
    uint16_t lanes;
};

struct dl_tensor {
    void *data;
    int32_t device_type, device_id;
    int32_t dimensions;
    struct dl_type type;
    int64_t *shape, *strides;
    uint64_t byte_offset;
};

struct dl_managed {
    struct dl_tensor tensor;
    void *owner;
    void (*deleter)(struct dl_managed *self);
};

struct dl_versioned {
    uint32_t major, minor;
    void *owner;
    void (*deleter)(struct dl_versioned *self);
    uint64_t flags;
    struct dl_tensor tensor;
};

/* Both forms in one block, with what they point at. */
struct export {
    union {
        struct dl_managed managed;
        struct dl_versioned versioned;
    };
    int64_t shape[DIMENSIONS], strides[DIMENSIONS];
    PyObject *keeper;
};

static void release(struct export *export)
{
    if (Py_IsInitialized()) { /* else what it keeps is gone with the process */
        PyGILState_STATE state = PyGILState_Ensure();
        Py_DECREF(export->keeper);
        PyGILState_Release(state);
    }
    free(export);
}

static void managed_deleter(struct dl_managed *self)
{
    release(self->owner);
}

static void versioned_deleter(struct dl_versioned *self)
{
    release(self->owner);
}

/* A consumer renames the capsule it has taken; one that nobody took is ours to release. */
static void capsule_dies(PyObject *capsule)
{
    if (PyCapsule_IsValid(capsule, "dltensor")) {
        struct dl_managed *managed = PyCapsule_GetPointer(capsule, "dltensor");
        managed->deleter(managed);
    } else if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
        struct dl_versioned *versioned = PyCapsule_GetPointer(capsule, "dltensor_versioned");
        versioned->deleter(versioned);
    }
}

static int type_of(int dtype, struct dl_type *type)
{
    switch (dtype) {
    case GLM52_DTYPE_F32: *type = (struct dl_type){DL_FLOAT, 32, 1}; return 1;
    case GLM52_DTYPE_F64: *type = (struct dl_type){DL_FLOAT, 64, 1}; return 1;
    case GLM52_DTYPE_F16: *type = (struct dl_type){DL_FLOAT, 16, 1}; return 1;
    case GLM52_DTYPE_BF16: *type = (struct dl_type){DL_BFLOAT, 16, 1}; return 1;
    case GLM52_DTYPE_F8_E4M3: *type = (struct dl_type){DL_E4M3FN, 8, 1}; return 1;
    case GLM52_DTYPE_I32: *type = (struct dl_type){DL_INT, 32, 1}; return 1;
    case GLM52_DTYPE_I64: *type = (struct dl_type){DL_INT, 64, 1}; return 1;
    case GLM52_DTYPE_U8: *type = (struct dl_type){DL_UINT, 8, 1}; return 1;
    }
    PyErr_Format(PyExc_BufferError, "DLPack has no type for dtype %d", dtype);
    return 0;
}

static int fill_tensor(struct export *e, struct dl_tensor *t, unsigned long long address, int dtype, int on_device,
                       PyObject *shape)
{
    *t = (struct dl_tensor){.data = (void *)(uintptr_t)address, .device_type = on_device ? DL_CUDA : DL_CPU,
                            .dimensions = (int32_t)PyTuple_GET_SIZE(shape), .shape = e->shape, .strides = e->strides};
    int64_t stride = 1;
    for (int i = t->dimensions - 1; i >= 0; i--) {
        e->shape[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(shape, i));
        e->strides[i] = stride;
        stride *= e->shape[i];
    }
    return !PyErr_Occurred() && type_of(dtype, &t->type);
}

PyObject *dlpack_new(PyObject *keeper, unsigned long long address, int dtype, int on_device, PyObject *shape,
                     int versioned, int read_only)
{
    if (!PyTuple_Check(shape) || PyTuple_GET_SIZE(shape) > DIMENSIONS) {
        PyErr_SetString(PyExc_TypeError, "shape must be a tuple of at most 4 integers");
        return NULL;
    }
    struct export *e = calloc(1, sizeof *e);
    if (!e) return PyErr_NoMemory();
    if (!fill_tensor(e, versioned ? &e->versioned.tensor : &e->managed.tensor, address, dtype, on_device, shape)) {
        free(e);
        return NULL;
    }
    if (versioned) {
        e->versioned.major = 1;
        e->versioned.owner = e;
        e->versioned.deleter = versioned_deleter;
        e->versioned.flags = read_only ? DL_READ_ONLY : 0;
    } else {
        e->managed.owner = e;
        e->managed.deleter = managed_deleter;
    }
    Py_INCREF(keeper);
    e->keeper = keeper;
    PyObject *capsule = PyCapsule_New(e, versioned ? "dltensor_versioned" : "dltensor", capsule_dies);
    if (!capsule) release(e);
    return capsule;
}
