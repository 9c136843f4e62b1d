/* What the files of the safetensors reader and writer share. */
#ifndef GLM52_CHECKPOINT_SAFETENSORS_PARTS_H
#define GLM52_CHECKPOINT_SAFETENSORS_PARTS_H

#include "checkpoint/safetensors.h"

/* The limit of the reference implementation: a header beyond it is damage, not a model. */
#define SAFETENSORS_HEADER_LIMIT UINT64_C(100000000)
/* 60,000 tensors of the full model take 6 MB. */
#define SAFETENSORS_INDEX_LIMIT UINT64_C(256000000)
#define SAFETENSORS_METADATA "__metadata__"

/* The tensors of one file, in no particular order until sorted. */
struct safetensors_header {
    struct safetensor *tensor;
    size_t tensors, capacity;
};

/* Opens file->path and reads and checks its header; `number` becomes safetensor.file. On failure nothing is held but
 * the open file, which the caller closes. */
glm52_status safetensors_header_read(struct host *host, struct safetensors_file *file, int number,
                                     struct safetensors_header *out);
void safetensors_header_free(struct host *host, struct safetensors_header *h);
int safetensors_by_name(const void *a, const void *b);

/* Adds the tensors of all files that the index file names. */
glm52_status safetensors_index_read(struct safetensors *s, const char *path);

/* Bytes of the host's files, complete or an error that names the path and the byte. */
glm52_status safetensors_read_bytes(struct host *host, const struct safetensors_file *file, void *out, size_t bytes,
                                    uint64_t offset);

/* Printable, and no path: names end up in messages, logs and, with some tools, file names. */
int safetensors_valid_name(const char *name);

/* A file on its way: written under `temporary`, then renamed to `final`. */
struct safetensors_output {
    char *temporary, *final;
    char *aside;      /* where an older file of that name waits until the new ones are in place */
    int made;         /* the temporary file exists */
    int placed, kept; /* renamed to final; the older file is at `aside` */
};

/* Puts finished files in the place of what the directory has under this stem: shards, the companion, and
 * the index last if there are several shards.
 * On failure the directory loads as before (one exception, see there) and the files are under their temporary names. */
glm52_status safetensors_replace(struct host *host, const char *directory, const char *stem,
                                 struct safetensors_output *output, int shards, int outputs);

/* printf into a string that host_strfree() releases; NULL and a last error when there is no memory. */
char *safetensors_path(struct host *host, const char *format, ...) PRINTF(2, 3);

#endif
