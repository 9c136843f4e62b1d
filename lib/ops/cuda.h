/* The way to the CUDA back end, libglm52-cuda.so: what it exports, and what it calls back. It is opened at run time, so
 * that the library itself needs neither CUDA nor a driver. Both sides are built together: no layout here is stable. */
#ifndef GLM52_OPS_CUDA_H
#define GLM52_OPS_CUDA_H

#include "ops/ops.h"

/* Of the library, for its back end: the last error and the accounting live here. Texts are complete. */
struct cuda_services {
    glm52_status (*fail)(glm52_status status, const char *message);
    glm52_status (*fail_hint)(const char *hint);
    void (*account)(struct host *host, enum memory_class of, int64_t bytes);
};

struct cuda_backend {
    const char *version;  /* of the project, must be the library's own */
    size_t table_bytes;   /* sizeof(struct ops), likewise */
    int (*device_count)(void);
    void (*describe)(int index, char *text, size_t bytes); /* "cuda:0, NVIDIA H200, ..." */
    glm52_status (*open)(struct stream *s, struct host *host, int index);
    /* A stream without a GPU, of which only the table's X_bytes() may be asked; what an opened one takes for itself. */
    void (*plan)(struct stream *s, size_t *workspace);
};

/* The one symbol that libglm52-cuda.so exports. The services must live as long as the back end does. */
#define CUDA_BACKEND_SYMBOL "glm52_cuda_backend"
typedef const struct cuda_backend *cuda_backend_function(const struct cuda_services *services);

#endif
