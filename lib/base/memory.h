/* What memory is for. */
#ifndef GLM52_BASE_MEMORY_H
#define GLM52_BASE_MEMORY_H

/* Classes of memory, as the plan reports them. */
enum memory_class {
    MEMORY_PARAMETERS,
    MEMORY_GRADIENTS,
    MEMORY_OPTIMIZER,
    MEMORY_ACTIVATIONS, /* saved from forward to backward */
    MEMORY_WORKSPACE,   /* dead once a part has run */
    MEMORY_COMM,
    MEMORY_HOST,        /* tables, data, text */
    MEMORY_CLASSES
};

extern const char *const memory_class_name[MEMORY_CLASSES];

#endif
