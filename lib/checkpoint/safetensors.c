/* Opens a safetensors file, or the files of a directory or an index, finds tensors by name and reads them. */
#include "checkpoint/safetensors.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/text.h"
#include "checkpoint/safetensors_parts.h"

glm52_status safetensors_read_bytes(struct host *host, const struct safetensors_file *file, void *out, size_t bytes,
                                    uint64_t offset)
{
    char *to = out;
    size_t done = 0;

    while (done < bytes) {
        int64_t got = host->files.read(host->files.user, file->handle, to + done, bytes - done, offset + done);
        if (got < 0) {
            file_fail(got, "read", file->path);
            return fail_detail("byte", "%llu", (unsigned long long)(offset + done));
        }
        if (got == 0) {
            fail(GLM52_E_CORRUPT, "%s: the file ends at byte %llu, %zu bytes short", file->path,
                 (unsigned long long)(offset + done), bytes - done);
            fail_detail("path", "%s", file->path);
            fail_detail("byte", "%llu", (unsigned long long)(offset + done));
            return fail_hint("the file became shorter after it was opened: write it anew");
        }
        if ((uint64_t)got > bytes - done)
            return fail(GLM52_E_CALLBACK, "%s: the host's read function returned %lld for %zu bytes", file->path,
                        (long long)got, bytes - done);
        done += (size_t)got;
    }
    return GLM52_OK;
}

static glm52_status open_single(struct safetensors *s, const char *path)
{
    struct safetensors_header header;

    s->file = host_calloc(s->host, sizeof *s->file, MEMORY_HOST);
    if (!s->file) return GLM52_E_NOMEM;
    s->files = 1;
    if (!(s->file->path = host_strdup(s->host, path))) return GLM52_E_NOMEM;
    TRY(safetensors_header_read(s->host, s->file, 0, &header));
    s->tensor = header.tensor;
    s->tensors = header.tensors;
    s->capacity = header.capacity;
    return GLM52_OK;
}

/* *error: 0 if the file can be opened, or a negative errno. Other failures than absence are failures of the caller:
 * falling back to another file would load something else than what stands there. */
static glm52_status probe(struct host *host, const char *path, int64_t *error)
{
    void *handle;

    *error = host->files.open(host->files.user, path, 0, &handle);
    if (*error >= 0) {
        host->files.close(host->files.user, handle);
        *error = 0;
    }
    return *error && *error != -ENOENT && *error != -ENOTDIR ? file_fail(*error, "open", path) : GLM52_OK;
}

static glm52_status open_found(struct safetensors *s, const char *path, const char *single, const char *index)
{
    int64_t no_single, no_index;

    TRY(probe(s->host, single, &no_single));
    TRY(probe(s->host, index, &no_index));
    if (!no_single && !no_index)
        host_log(s->host, GLM52_LOG_WARNING,
                 "%s has model.safetensors and model.safetensors.index.json: using the former", path);
    if (!no_single) return open_single(s, single);
    if (!no_index) return safetensors_index_read(s, index);
    if (no_single == -ENOTDIR) return open_single(s, path); /* a file of an unusual name */
    fail(GLM52_E_IO, "%s: no model.safetensors and no model.safetensors.index.json there", path);
    fail_detail("path", "%s", path);
    return fail_hint("give the directory of a checkpoint, a .safetensors file, or an index file");
}

/* As other readers do it: model.safetensors wins over the index. */
static glm52_status open_directory(struct safetensors *s, const char *path)
{
    struct text single, index;
    glm52_status status;

    text_init(&single, s->host);
    text_init(&index, s->host);
    text_add(&single, "%s/model.safetensors", path);
    text_add(&index, "%s/model.safetensors.index.json", path);
    status = text_status(&single);
    if (!status) status = text_status(&index);
    if (!status) status = open_found(s, path, single.at, index.at);
    text_free(&single);
    text_free(&index);
    return status;
}

glm52_status safetensors_open(struct host *host, const char *path, struct safetensors *out)
{
    struct safetensors s = {.host = host};
    glm52_status status;

    if (text_ends_with(path, ".safetensors"))
        status = open_single(&s, path);
    else if (text_ends_with(path, ".json"))
        status = safetensors_index_read(&s, path);
    else
        status = open_directory(&s, path);
    if (status) {
        safetensors_close(&s);
        return status;
    }
    qsort(s.tensor, s.tensors, sizeof *s.tensor, safetensors_by_name);
    *out = s;
    return GLM52_OK;
}

void safetensors_close(struct safetensors *s)
{
    struct host *host = s->host;

    for (size_t i = 0; i < s->tensors; i++) host_strfree(host, s->tensor[i].name);
    host_free(host, s->tensor, s->capacity * sizeof *s->tensor, MEMORY_HOST);
    for (int i = 0; i < s->files; i++) {
        if (s->file[i].open) host->files.close(host->files.user, s->file[i].handle);
        host_strfree(host, s->file[i].path);
    }
    host_free(host, s->file, (size_t)s->files * sizeof *s->file, MEMORY_HOST);
    memset(s, 0, sizeof *s);
}

uint64_t safetensors_elements(const struct safetensor *t)
{
    return t->bytes / (uint64_t)t->element_bytes;
}

const struct safetensor *safetensors_find(const struct safetensors *s, const char *name)
{
    size_t low = 0, high = s->tensors;

    while (low < high) {
        size_t middle = low + (high - low) / 2;
        int order = strcmp(name, s->tensor[middle].name);
        if (!order) return &s->tensor[middle];
        if (order < 0)
            high = middle;
        else
            low = middle + 1;
    }
    return NULL;
}

static glm52_status check_range(const struct safetensor *t, uint64_t first, uint64_t count)
{
    uint64_t elements = safetensors_elements(t);

    if (first <= elements && count <= elements - first) return GLM52_OK;
    return fail(GLM52_E_INVALID, "tensor %s has %llu elements, asked for %llu from %llu on", t->name,
                (unsigned long long)elements, (unsigned long long)count, (unsigned long long)first);
}

glm52_status safetensors_read(const struct safetensors *s, const struct safetensor *t, uint64_t first, uint64_t count,
                              void *out)
{
    uint64_t size = (uint64_t)t->element_bytes;
    glm52_status status;

    TRY(check_range(t, first, count));
    status = safetensors_read_bytes(s->host, &s->file[t->file], out, count * size, t->offset + first * size);
    if (!status) return GLM52_OK;
    fail_prefix("tensor %s", t->name);
    return fail_detail("tensor", "%s", t->name);
}

static float f16_to_f32(uint16_t bits)
{
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, exponent = bits >> 10 & 31, fraction = bits & 0x3ff, wide;
    float value;

    if (exponent == 0) { /* zero and subnormals: fraction * 2^-24 */
        value = (float)fraction * 0x1p-24f;
        return sign ? -value : value;
    }
    wide = sign | (exponent == 31 ? 255u : exponent + 112) << 23 | fraction << 13;
    memcpy(&value, &wide, sizeof value);
    return value;
}

/* The 16-bit values are read into the upper half of `out` and widened from the front: value i is written to bytes
 * 4i .. 4i + 3, which end before the unread values at 2 count + 2(i + 1). */
static glm52_status read_half(const struct safetensors *s, const struct safetensor *t, uint64_t first, uint64_t count,
                              float *out)
{
    const unsigned char *from = (unsigned char *)out + 2 * count;

    TRY(safetensors_read(s, t, first, count, (unsigned char *)out + 2 * count));
    for (uint64_t i = 0; i < count; i++) {
        uint16_t bits = (uint16_t)(from[2 * i] | from[2 * i + 1] << 8);
        out[i] = t->dtype == GLM52_DTYPE_BF16 ? bf16_to_f32(bits) : f16_to_f32(bits);
    }
    return GLM52_OK;
}

static glm52_status read_double(const struct safetensors *s, const struct safetensor *t, uint64_t first, uint64_t count,
                                float *out)
{
    enum { PIECE = 1024 };
    double piece[PIECE];

    while (count) {
        uint64_t n = count < PIECE ? count : PIECE;
        TRY(safetensors_read(s, t, first, n, piece));
        for (uint64_t i = 0; i < n; i++) out[i] = (float)piece[i];
        first += n;
        count -= n;
        out += n;
    }
    return GLM52_OK;
}

glm52_status safetensors_read_f32(const struct safetensors *s, const struct safetensor *t, uint64_t first,
                                  uint64_t count, float *out)
{
    TRY(check_range(t, first, count));
    switch (t->dtype) {
    case GLM52_DTYPE_F32:
        return safetensors_read(s, t, first, count, out);
    case GLM52_DTYPE_BF16:
    case GLM52_DTYPE_F16:
        return read_half(s, t, first, count, out);
    case GLM52_DTYPE_F64:
        return read_double(s, t, first, count, out);
    default:
        fail(GLM52_E_UNSUPPORTED, "%s: tensor %s is %s, expected F32, BF16, F16 or F64", s->file[t->file].path, t->name,
             t->type);
        fail_detail("path", "%s", s->file[t->file].path);
        fail_detail("byte", "%llu", (unsigned long long)t->offset);
        return fail_detail("tensor", "%s", t->name);
    }
}
