/* model.safetensors.index.json: which file has which tensor. The index is held against what the files really have. */
#include <jansson.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/text.h"
#include "checkpoint/safetensors_parts.h"

struct index {
    struct safetensors *s;
    const char *path;
    json_t *root, *map; /* map: tensor -> file name */
    json_t *numbers;    /* file name -> number of the file */
};

static glm52_status bad_index(const struct index *x, const char *tensor, const char *format, ...) PRINTF(3, 4);

static glm52_status bad_index(const struct index *x, const char *tensor, const char *format, ...)
{
    char what[512];
    va_list args;

    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    fail(GLM52_E_CORRUPT, "%s: %s", x->path, what);
    fail_detail("path", "%s", x->path);
    if (tensor) fail_detail("tensor", "%s", tensor);
    return fail_hint("the index does not fit its files: download index and files again, from the same revision");
}

static glm52_status parse_index(struct index *x)
{
    json_error_t error;
    char *text;
    size_t bytes;

    TRY(file_read_all(x->s->host, x->path, SAFETENSORS_INDEX_LIMIT, &text, &bytes));
    x->root = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &error);
    host_free(x->s->host, text, bytes + 1, MEMORY_HOST);
    if (!x->root && json_error_code(&error) == json_error_out_of_memory)
        return fail_nomem(bytes, "a safetensors index");
    if (!x->root) {
        bad_index(x, NULL, "not valid JSON: %s (line %d, byte %d)", error.text, error.line, error.position);
        return fail_detail("byte", "%d", error.position);
    }
    x->map = json_object_get(x->root, "weight_map");
    if (!json_is_object(x->map)) return bad_index(x, NULL, "no object weight_map");
    return GLM52_OK;
}

/* Numbers the files in the order of their first mention; a name must be a plain file name beside the index. */
static glm52_status number_files(struct index *x)
{
    const char *tensor;
    json_t *file;

    x->numbers = json_object();
    if (!x->numbers) return fail_nomem(0, "a safetensors index");
    json_object_foreach(x->map, tensor, file) {
        const char *name = json_string_value(file);
        if (!safetensors_valid_name(tensor))
            return bad_index(x, NULL, "a tensor name is empty, or has a control character, a slash or ..");
        if (!name) return bad_index(x, tensor, "the file of %s is not a string", tensor);
        if (!safetensors_valid_name(name))
            return bad_index(x, tensor,
                             "the file of %s is refused: a shard must be a plain file name beside the index, without a "
                             "path separator",
                             tensor);
        if (!json_object_get(x->numbers, name) &&
            json_object_set_new(x->numbers, name, json_integer((json_int_t)json_object_size(x->numbers))))
            return fail_nomem(0, "a safetensors index");
    }
    return GLM52_OK;
}

static glm52_status name_files(struct index *x)
{
    struct safetensors *s = x->s;
    const char *slash = strrchr(x->path, '/'), *name;
    size_t files = json_object_size(x->numbers);
    json_t *number;

    s->file = host_calloc(s->host, files * sizeof *s->file, MEMORY_HOST);
    if (!s->file) return GLM52_E_NOMEM;
    s->files = (int)files;
    json_object_foreach(x->numbers, name, number) {
        struct text path;
        text_init(&path, s->host);
        text_add(&path, "%.*s%s", slash ? (int)(slash - x->path + 1) : 0, x->path, name);
        glm52_status status = text_status(&path);
        char *copy = status ? NULL : host_strdup(s->host, path.at);
        text_free(&path);
        if (!copy) return GLM52_E_NOMEM;
        s->file[json_integer_value(number)].path = copy;
    }
    return GLM52_OK;
}

static const char *file_name(const struct safetensors_file *file)
{
    const char *slash = strrchr(file->path, '/');

    return slash ? slash + 1 : file->path;
}

/* Moves the tensors of one file that the index assigns to it over to the result. */
static void take_tensors(struct index *x, struct safetensors_header *h, int number)
{
    struct safetensors *s = x->s;
    const char *name = file_name(&s->file[number]);

    for (size_t i = 0; i < h->tensors; i++) {
        struct safetensor *t = &h->tensor[i];
        const char *assigned = json_string_value(json_object_get(x->map, t->name));
        if (assigned && !strcmp(assigned, name)) {
            s->tensor[s->tensors++] = *t;
            t->name = NULL;
        } else if (assigned) {
            host_log(s->host, GLM52_LOG_WARNING, "%s: %s is also in %s; the copy in %s counts", x->path, t->name, name,
                     assigned);
        } else {
            host_log(s->host, GLM52_LOG_WARNING, "%s: %s is in %s but not in the index, and is left out", x->path,
                     t->name, name);
        }
    }
}

static glm52_status read_files(struct index *x)
{
    struct safetensors *s = x->s;

    /* A file has a name once, so no more tensors are taken than the index lists. */
    s->capacity = json_object_size(x->map);
    s->tensor = host_alloc(s->host, s->capacity * sizeof *s->tensor, MEMORY_HOST);
    if (!s->tensor) return GLM52_E_NOMEM;
    for (int i = 0; i < s->files; i++) {
        struct safetensors_header header;
        TRY(host_poll(s->host));
        glm52_status status = safetensors_header_read(s->host, &s->file[i], i, &header);
        if (status && status != GLM52_E_NOMEM && !s->file[i].open) {
            fail_prefix("shard %s named by the index is missing or cannot be opened", file_name(&s->file[i]));
            fail_hint("put the file beside %s", x->path);
        }
        if (status) return status;
        take_tensors(x, &header, i);
        safetensors_header_free(s->host, &header);
    }
    return GLM52_OK;
}

static glm52_status check_complete(struct index *x)
{
    struct safetensors *s = x->s;
    const json_t *total = json_object_get(json_object_get(x->root, "metadata"), "total_size");
    const char *tensor;
    uint64_t bytes = 0;
    json_t *file;

    qsort(s->tensor, s->tensors, sizeof *s->tensor, safetensors_by_name);
    json_object_foreach(x->map, tensor, file)
        if (!safetensors_find(s, tensor))
            return bad_index(x, tensor, "the index says %s is in %s, the file does not contain it", tensor,
                             json_string_value(file));
    for (size_t i = 0; i < s->tensors; i++) bytes += s->tensor[i].bytes;
    if (json_is_number(total) && json_number_value(total) != (double)bytes)
        host_log(s->host, GLM52_LOG_WARNING, "%s: total_size is %.0f, the tensors have %llu bytes", x->path,
                 json_number_value(total), (unsigned long long)bytes);
    return GLM52_OK;
}

glm52_status safetensors_index_read(struct safetensors *s, const char *path)
{
    struct index x = {.s = s, .path = path};
    glm52_status status = parse_index(&x);

    if (!status) status = number_files(&x);
    if (!status) status = name_files(&x);
    if (!status) status = read_files(&x);
    if (!status) status = check_complete(&x);
    json_decref(x.numbers);
    json_decref(x.root);
    return status;
}
