/* What every handle begins with, and the classes behind the opaque types. */
#ifndef GLM52_API_OBJECT_H
#define GLM52_API_OBJECT_H

#include "base/struct.h"
#include "data/dataset.h"
#include "train/dry_run.h"
#include "train/step.h"

enum { MAGIC = 0x474C4D35, TOMBSTONE = 0x474C4D00 }; /* first word of a handle, and of a released one */

enum class {
    CLASS_CONTEXT = 1, CLASS_CONFIG, CLASS_MODEL, CLASS_BATCH, CLASS_DATASET, CLASS_OPTIMIZER, CLASS_STEP, CLASSES
};

struct object {
    uint32_t magic;
    enum class class;
    _Atomic uint32_t references;
    size_t bytes;            /* of the whole handle */
    glm52_context *context;  /* kept alive; NULL for the context itself */
};

struct glm52_context {
    struct object object;
    struct host host;
    struct stream stream;
    char device[128];
};

struct glm52_config {
    struct object object;
    struct config config;
    char *text;              /* lent by get and dump */
};

struct glm52_model {
    struct object object;
    struct model model;
    char line[128];
};

struct output {
    struct output *next;
    char name[48];
    glm52_view view;
};

struct glm52_batch {
    struct object object;
    struct pack pack;
    int has_labels;          /* set by the caller, not derived */
    struct output *outputs;  /* of the last forward */
};

struct glm52_dataset {
    struct object object;
    struct dataset *dataset;
    uint64_t next;
    char line[256];
};

struct glm52_optimizer {
    struct object object;
    glm52_model *model;
    struct optimizer optimizer;
};

struct glm52_step {
    struct object object;
    glm52_model *model;
    glm52_optimizer *optimizer;
    struct step step;
    struct config config;
    struct dry_run *plan;    /* NULL before somebody asks */
    char label[96];          /* lent by plan */
    char metric[64];         /* lent by metric_name */
};

/* Memory of a handle, zeroed, and its end; NULL and a last error without memory. */
void *object_memory(struct host *host, size_t bytes);
void object_bury(struct host *host, struct object *object);

/* A zeroed handle with one reference that keeps the context alive; NULL and a last error without memory. */
void *object_create(glm52_context *context, enum class class, size_t bytes);
/* Takes the memory back and drops the context. For the unref functions, and for create functions that fail. */
void object_destroy(struct object *object);
glm52_status object_check(const void *handle, enum class class);
int object_is(const void *handle, enum class class); /* the same without a message, for signal handlers */
/* Adds a reference; NULL stays NULL. */
void *object_ref(void *handle, enum class class);
/* Drops a reference and nulls the pointer; 1 if that was the last one, then *out is the handle. */
int object_unref(void *pointer_to_handle, enum class class, void *out);

#define CHECK(handle, class_name) TRY(object_check(handle, class_name))
/* Handles that meet in a call must share their context: each lives in its context's memory. */
glm52_status object_same_context(const void *one, const void *other);
#define CHECK_SAME(one, other) TRY(object_same_context(one, other))
glm52_status check_pointer(const void *pointer, const char *name);
#define CHECK_POINTER(pointer) TRY(check_pointer(pointer, #pointer))
/* The member struct_size of an output struct; `last` is the last member of the first release. */
#define CHECK_STRUCT(out, type, last)                            \
    do {                                                         \
        CHECK_POINTER(out);                                      \
        TRY(struct_check(out, SIZE_UP_TO(type, last), #type));   \
    } while (0)

/* Packs of batches, labels filled in. */
glm52_status batch_packs(glm52_batch *const *batches, uint32_t count, const struct pack ***out, struct host *host);
void batch_clear_outputs(glm52_batch *batch);

#endif
