/* The header of one safetensors file: 8 bytes little-endian length, a JSON object, then the data. Every number in it is
 * hostile until it has been checked against the size of the file. */
#include <jansson.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "checkpoint/safetensors_parts.h"

static const struct element_type {
    const char *name;
    int bytes;
    glm52_dtype dtype;
} element_type[] = {
    {"F32", 4, GLM52_DTYPE_F32},       {"BF16", 2, GLM52_DTYPE_BF16}, {"F64", 8, GLM52_DTYPE_F64},
    {"I32", 4, GLM52_DTYPE_I32},       {"I64", 8, GLM52_DTYPE_I64},   {"U8", 1, GLM52_DTYPE_U8},
    {"F8_E4M3", 1, GLM52_DTYPE_F8_E4M3}, {"F16", 2, GLM52_DTYPE_F16}, {"BOOL", 1, 0},
    {"I8", 1, 0},                      {"I16", 2, 0},                 {"U16", 2, 0},
    {"U32", 4, 0},                     {"U64", 8, 0},                 {"F8_E5M2", 1, 0},
    {"F8_E8M0", 1, 0},                 {"C64", 8, 0},
};

/* One header while it is being read. */
struct reading {
    struct host *host;
    const char *path;
    char *text;
    uint64_t bytes;     /* of the header */
    uint64_t data;      /* where the data begins in the file */
    uint64_t data_size; /* up to the end of the file */
    size_t entry;       /* number of the entry being read */
    const char *name;   /* and its tensor, NULL if it is not to be shown */
};

static glm52_status corrupt_list(const struct reading *r, const char *tensor, uint64_t byte, const char *format,
                                 va_list args)
{
    char what[512];

    vsnprintf(what, sizeof what, format, args);
    if (tensor)
        fail(GLM52_E_CORRUPT, "%s: tensor %s: %s (byte %llu)", r->path, tensor, what, (unsigned long long)byte);
    else
        fail(GLM52_E_CORRUPT, "%s: %s (byte %llu)", r->path, what, (unsigned long long)byte);
    fail_detail("path", "%s", r->path);
    if (tensor) fail_detail("tensor", "%s", tensor);
    fail_detail("byte", "%llu", (unsigned long long)byte);
    return fail_hint("the file is damaged or incomplete: copy or download it again, or write it anew");
}

static glm52_status corrupt(const struct reading *r, const char *tensor, uint64_t byte, const char *format, ...)
    PRINTF(4, 5);
static glm52_status refuse(const struct reading *r, const char *format, ...) PRINTF(2, 3);

static glm52_status corrupt(const struct reading *r, const char *tensor, uint64_t byte, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    corrupt_list(r, tensor, byte, format, args);
    va_end(args);
    return GLM52_E_CORRUPT;
}

/* Finds key number `wanted` of the outer object, or the last one that begins before byte `end`. The text may be
 * malformed. Gives the byte of the key in the header, -1 if there is none. */
static int64_t find_key(const struct reading *r, size_t wanted, size_t end, size_t *length)
{
    int depth = 0, key_next = 0;
    size_t keys = 0;
    int64_t found = -1;

    for (size_t i = 0; i < r->bytes && i < end; i++) {
        size_t start = i + 1;
        switch (r->text[i]) {
        case '{':
        case '[':
            key_next = ++depth == 1;
            break;
        case '}':
        case ']':
            depth--;
            break;
        case ',':
            key_next = depth == 1;
            break;
        case '"':
            for (i = start; i < r->bytes && r->text[i] != '"'; i++)
                if (r->text[i] == '\\') i++;
            if (!key_next) break;
            key_next = 0;
            found = (int64_t)start;
            *length = (i < r->bytes ? i : r->bytes) - start;
            if (keys++ == wanted) return found;
        }
    }
    return found;
}

/* The current entry is bad: names its tensor and where it stands in the header. */
static glm52_status refuse(const struct reading *r, const char *format, ...)
{
    size_t length = 0;
    int64_t at = find_key(r, r->entry, r->bytes, &length);
    va_list args;

    va_start(args, format);
    corrupt_list(r, r->name, 8 + (uint64_t)(at < 0 ? 0 : at), format, args);
    va_end(args);
    return GLM52_E_CORRUPT;
}

/* Says what jansson found wrong, and in the entry of which tensor. */
static glm52_status bad_json(const struct reading *r, const json_error_t *e)
{
    const char *what = "is not valid JSON";
    size_t length = 0, position = e->position > 0 ? (size_t)e->position : 0;
    int64_t key = find_key(r, SIZE_MAX, position, &length);
    char name[256];

    switch (json_error_code(e)) {
    case json_error_out_of_memory:
        return fail_nomem(r->bytes, "the JSON header of a safetensors file");
    case json_error_invalid_utf8:
        what = "is not valid UTF-8";
        break;
    case json_error_stack_overflow:
        what = "is nested too deep";
        break;
    case json_error_premature_end_of_input:
        what = "is not valid JSON (cut short)";
        break;
    case json_error_end_of_input_expected:
        what = "has garbage after the JSON object";
        key = -1;
        break;
    case json_error_duplicate_key:
        what = "has a duplicate name";
        break;
    case json_error_numeric_overflow:
        what = "has a shape or an offset that overflows 64 bits";
        break;
    case json_error_null_byte_in_key:
        what = "has a NUL in a name";
        break;
    default:
        break;
    }
    /* The name as it stands in the text, escapes and all; messages are UTF-8, which it need not be. */
    snprintf(name, sizeof name, "%.*s", (int)(length < 200 ? length : 200), key < 0 ? "" : r->text + key);
    for (char *c = name; *c; c++)
        if ((unsigned char)*c >= 0x7f) *c = '?';
    int is_tensor = safetensors_valid_name(name) && strcmp(name, SAFETENSORS_METADATA);
    return corrupt(r, is_tensor ? name : NULL, 8 + position, "header %s: %s", what, e->text);
}

static glm52_status check_metadata(const struct reading *r, const json_t *metadata)
{
    const char *key;
    json_t *value;

    if (!json_is_object(metadata))
        return refuse(r, SAFETENSORS_METADATA " is not a JSON object");
    json_object_foreach((json_t *)metadata, key, value)
        if (!json_is_string(value))
            return refuse(r, SAFETENSORS_METADATA ": the value of %s is not a string", key);
    return GLM52_OK;
}

int safetensors_valid_name(const char *name)
{
    for (const char *c = name; *c; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7f || *c == '/' || *c == '\\') return 0;
    return name[0] && !strstr(name, "..");
}

static glm52_status read_type(const struct reading *r, const json_t *entry, struct safetensor *t)
{
    const json_t *type = json_object_get(entry, "dtype");

    if (!type) return refuse(r, "field dtype missing");
    if (!json_is_string(type)) return refuse(r, "dtype is not a string");
    for (size_t i = 0; i < sizeof element_type / sizeof *element_type; i++)
        if (!strcmp(element_type[i].name, json_string_value(type))) {
            t->type = element_type[i].name;
            t->dtype = element_type[i].dtype;
            t->element_bytes = element_type[i].bytes;
            return GLM52_OK;
        }
    refuse(r, "unknown dtype %.40s", json_string_value(type));
    return fail_hint(
        "known are F64 F32 F16 BF16 F8_E4M3 F8_E5M2 F8_E8M0 I64 I32 I16 I8 U64 U32 U16 U8 BOOL C64; a newer "
        "type needs a newer version of this library");
}

static glm52_status read_shape(const struct reading *r, const json_t *entry, struct safetensor *t,
                               uint64_t *needed)
{
    const json_t *shape = json_object_get(entry, "shape");

    if (!shape) return refuse(r, "field shape missing");
    if (!json_is_array(shape)) return refuse(r, "shape is not a list");
    if (json_array_size(shape) > SAFETENSORS_DIMENSIONS)
        return refuse(r, "%zu dimensions, at most %d are supported", json_array_size(shape),
                       SAFETENSORS_DIMENSIONS);
    t->dimensions = (int)json_array_size(shape);
    *needed = (uint64_t)t->element_bytes;
    for (int i = 0; i < t->dimensions; i++) {
        const json_t *size = json_array_get(shape, (size_t)i);
        if (!json_is_integer(size)) return refuse(r, "dimension %d is not an integer", i);
        t->shape[i] = json_integer_value(size);
        if (t->shape[i] < 0)
            return refuse(r, "negative dimension %lld", (long long)t->shape[i]);
        if (__builtin_mul_overflow(*needed, (uint64_t)t->shape[i], needed) || *needed > INT64_MAX)
            return refuse(r, "element count overflows 64 bits");
    }
    return GLM52_OK;
}

/* "[4,6]" for messages. */
static const char *shape_text(const struct safetensor *t, char *text, size_t bytes)
{
    size_t at = 0;

    text[0] = 0;
    for (int i = 0; i < t->dimensions && at < bytes; i++)
        at += (size_t)snprintf(text + at, bytes - at, i ? ",%lld" : "%lld", (long long)t->shape[i]);
    return text;
}

static glm52_status read_offsets(const struct reading *r, const json_t *entry, struct safetensor *t,
                                 uint64_t needed)
{
    const json_t *offsets = json_object_get(entry, "data_offsets");
    int64_t bound[2];
    char shape[200];

    if (!offsets) return refuse(r, "field data_offsets missing");
    if (!json_is_array(offsets) || json_array_size(offsets) != 2)
        return refuse(r, "data_offsets is not a list of two");
    for (size_t i = 0; i < 2; i++) {
        const json_t *offset = json_array_get(offsets, i);
        if (!json_is_integer(offset)) return refuse(r, "offset is not an integer");
        bound[i] = json_integer_value(offset);
        if (bound[i] < 0) return refuse(r, "negative offset %lld", (long long)bound[i]);
    }
    if (bound[1] < bound[0])
        return refuse(r, "end offset %lld before begin offset %lld", (long long)bound[1],
                       (long long)bound[0]);
    t->offset = r->data + (uint64_t)bound[0];
    t->bytes = (uint64_t)(bound[1] - bound[0]);
    if (t->bytes != needed)
        return refuse(r, "shape [%s] of %s needs %llu bytes but the offsets hold %llu",
                       shape_text(t, shape, sizeof shape), t->type, (unsigned long long)needed,
                       (unsigned long long)t->bytes);
    return GLM52_OK;
}

static glm52_status read_entry(struct reading *r, const char *name, const json_t *entry, struct safetensors_header *out)
{
    struct safetensor *t = &out->tensor[out->tensors];
    uint64_t needed = 0;

    memset(t, 0, sizeof *t);
    r->name = NULL;
    if (!safetensors_valid_name(name))
        return refuse(r, "the name of tensor %zu is empty, or has a control character, a slash or ..", r->entry);
    if (!(t->name = host_strdup(r->host, name))) return GLM52_E_NOMEM;
    out->tensors++;
    r->name = t->name;
    if (!json_is_object(entry)) return refuse(r, "the entry is not a JSON object");
    TRY(read_type(r, entry, t));
    TRY(read_shape(r, entry, t, &needed));
    return read_offsets(r, entry, t, needed);
}

static glm52_status read_entries(struct reading *r, const json_t *object, struct safetensors_header *out)
{
    const char *name;
    json_t *entry;

    out->capacity = json_object_size(object);
    out->tensor = host_alloc(r->host, out->capacity * sizeof *out->tensor, MEMORY_HOST);
    if (!out->tensor) return GLM52_E_NOMEM;
    json_object_foreach((json_t *)object, name, entry) {
        if (strcmp(name, SAFETENSORS_METADATA))
            TRY(read_entry(r, name, entry, out));
        else
            TRY(check_metadata(r, entry));
        r->entry++;
    }
    return GLM52_OK;
}

static int by_offset(const void *a, const void *b)
{
    const struct safetensor *x = a, *y = b;

    if (x->offset != y->offset) return x->offset < y->offset ? -1 : 1;
    return (x->bytes > y->bytes) - (x->bytes < y->bytes);
}

int safetensors_by_name(const void *a, const void *b)
{
    return strcmp(((const struct safetensor *)a)->name, ((const struct safetensor *)b)->name);
}

/* The tensors must cover the data exactly: inside the file, no overlap, no hole, nothing left over. */
static glm52_status check_layout(const struct reading *r, struct safetensors_header *h)
{
    uint64_t at = r->data, end = r->data + r->data_size, needed = end;
    const struct safetensor *beyond = NULL;

    qsort(h->tensor, h->tensors, sizeof *h->tensor, by_offset);
    for (size_t i = 0; i < h->tensors; i++) {
        const struct safetensor *t = &h->tensor[i];
        if (t->offset + t->bytes > end && !beyond) beyond = t;
        if (t->offset + t->bytes > needed) needed = t->offset + t->bytes;
    }
    if (beyond)
        return corrupt(
            r, beyond->name, beyond->offset,
            "the data ends beyond the end of the file, which has %llu bytes where the header describes %llu: "
            "%llu bytes are missing",
            (unsigned long long)end, (unsigned long long)needed, (unsigned long long)(needed - end));
    for (size_t i = 0; i < h->tensors; i++) {
        const struct safetensor *t = &h->tensor[i];
        if (t->offset < at)
            return corrupt(r, t->name, t->offset, "overlaps tensor %s", h->tensor[i - 1].name);
        if (t->offset > at)
            return corrupt(r, t->name, at, "%llu unused bytes before its data: offsets must be contiguous",
                           (unsigned long long)(t->offset - at));
        at += t->bytes;
    }
    if (at < end)
        return corrupt(r, NULL, at, "%llu bytes after the last tensor that no tensor owns",
                       (unsigned long long)(end - at));
    return GLM52_OK;
}

static glm52_status parse(struct reading *r, struct safetensors_header *out)
{
    json_error_t error;
    json_t *object;
    glm52_status status;

    if (r->text[0] != '{') return corrupt(r, NULL, 8, "the header is not a JSON object: it must begin with {");
    object = json_loadb(r->text, r->bytes, JSON_REJECT_DUPLICATES, &error);
    if (!object) return bad_json(r, &error);
    status = read_entries(r, object, out);
    json_decref(object);
    return status ? status : check_layout(r, out);
}

glm52_status safetensors_header_read(struct host *host, struct safetensors_file *file, int number,
                                     struct safetensors_header *out)
{
    struct reading r = {.host = host, .path = file->path};
    unsigned char length[8];
    int64_t size;
    glm52_status status;

    memset(out, 0, sizeof *out);
    size = host->files.open(host->files.user, file->path, 0, &file->handle);
    if (size < 0) return file_fail(size, "open", file->path);
    file->open = 1;
    size = host->files.size(host->files.user, file->handle);
    if (size < 0) return file_fail(size, "find the size of", file->path);
    file->size = (uint64_t)size;
    if (size < 8) return corrupt(&r, NULL, 0, "%lld bytes are shorter than the 8-byte header length", (long long)size);
    TRY(safetensors_read_bytes(host, file, length, 8, 0));
    for (int i = 0; i < 8; i++) r.bytes |= (uint64_t)length[i] << 8 * i;
    if (r.bytes > file->size - 8)
        return corrupt(&r, NULL, 0, "header length %llu exceeds the file size %lld", (unsigned long long)r.bytes,
                       (long long)size);
    if (r.bytes > SAFETENSORS_HEADER_LIMIT)
        return corrupt(&r, NULL, 0, "header length %llu exceeds the limit of %llu", (unsigned long long)r.bytes,
                       (unsigned long long)SAFETENSORS_HEADER_LIMIT);
    if (r.bytes == 0) return corrupt(&r, NULL, 0, "the empty header is not a JSON object");
    r.data = 8 + r.bytes;
    r.data_size = file->size - r.data;
    r.text = host_alloc(host, r.bytes, MEMORY_HOST);
    if (!r.text) return GLM52_E_NOMEM;
    status = safetensors_read_bytes(host, file, r.text, r.bytes, 8);
    if (!status) status = parse(&r, out);
    host_free(host, r.text, r.bytes, MEMORY_HOST);
    for (size_t i = 0; i < out->tensors; i++) out->tensor[i].file = number;
    if (status) safetensors_header_free(host, out);
    return status;
}

void safetensors_header_free(struct host *host, struct safetensors_header *h)
{
    for (size_t i = 0; i < h->tensors; i++) host_strfree(host, h->tensor[i].name);
    host_free(host, h->tensor, h->capacity * sizeof *h->tensor, MEMORY_HOST);
    memset(h, 0, sizeof *h);
}
