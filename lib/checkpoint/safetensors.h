/* The safetensors container: a validated directory of named tensors in one file, read by offset through the file
 * table (no mmap), and its writer. craft.md 8.3-D lists what is refused; every refusal names tensor and byte. */
#ifndef GLM52_CHECKPOINT_SAFETENSORS_H
#define GLM52_CHECKPOINT_SAFETENSORS_H

#include "base/dtype.h"
#include "base/host.h"

enum { SAFETENSORS_DIMENSIONS = 8 };

struct safetensor {
    char *name;
    const char *type;           /* as the file says: "BF16", "BOOL", ... */
    glm52_dtype dtype;          /* 0: a type that the container knows and the library has no use for */
    int element_bytes, dimensions;
    int64_t shape[SAFETENSORS_DIMENSIONS];
    uint64_t offset, bytes;     /* in the file */
    int file;                   /* shard number */
};

/* One .safetensors file, or an index (.json) with the files it names, or a directory with model.safetensors or else
 * model.safetensors.index.json. What an index may get wrong without harm (a tensor it does not list, a second copy in
 * another file, total_size) is logged, and the index decides. */
struct safetensors {
    struct host *host;
    struct safetensor *tensor;  /* sorted by name */
    size_t tensors, capacity;
    struct safetensors_file { char *path; void *handle; int open; uint64_t size; } *file;
    int files;
};

glm52_status safetensors_open(struct host *host, const char *path, struct safetensors *out);
void safetensors_close(struct safetensors *s);
uint64_t safetensors_elements(const struct safetensor *t);
const struct safetensor *safetensors_find(const struct safetensors *s, const char *name); /* NULL if absent */
/* Reads `count` elements from element `first` into host memory, as stored. */
glm52_status safetensors_read(const struct safetensors *s, const struct safetensor *t, uint64_t first, uint64_t count,
                              void *out);
/* The same, converted to fp32 (from F32, BF16, F16, F64). */
glm52_status safetensors_read_f32(const struct safetensors *s, const struct safetensor *t, uint64_t first,
                                  uint64_t count, float *out);

/* Writing: declare every tensor, then give the bytes in the declared order, in pieces of any size. Files above
 * shard_bytes are split (model-00001-of-0000N.safetensors and an index). Written beside the final names and renamed at
 * the end; on failure or abort the temporary files are removed and older files stay. */
struct safetensors_writer;
glm52_status safetensors_writer_create(struct host *host, const char *directory, const char *stem /* "model" */,
                                       uint64_t shard_bytes, struct safetensors_writer **out);
glm52_status safetensors_writer_declare(struct safetensors_writer *w, const char *name, glm52_dtype dtype,
                                        int dimensions, const int64_t *shape);
glm52_status safetensors_writer_metadata(struct safetensors_writer *w, const char *key, const char *value);
/* A text file of the same directory that describes the tensors: it takes its place with them or not at all. */
glm52_status safetensors_writer_companion(struct safetensors_writer *w, const char *name, const char *contents);
glm52_status safetensors_writer_write(struct safetensors_writer *w, const void *data, size_t bytes);
glm52_status safetensors_writer_finish(struct safetensors_writer **w); /* frees in every case */
void safetensors_writer_abort(struct safetensors_writer **w);

#endif
