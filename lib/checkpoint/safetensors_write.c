/* Writes safetensors: one file, or shards and an index. The header of a shard is known before its data, so every
 * file is written once, from front to back. */
#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "base/text.h"
#include "checkpoint/safetensors_parts.h"

struct shard {
    size_t first, tensors; /* of the declared ones */
    uint64_t bytes;        /* of data */
};

struct safetensors_writer {
    struct host *host;
    char *directory, *stem;
    uint64_t shard_bytes;
    json_t *metadata;
    char *companion, *contents; /* name and text of the file that goes with the tensors; NULL: none */
    struct safetensor *tensor; /* offset: in the data of its shard */
    size_t tensors, capacity;
    struct shard *shard;
    struct safetensors_output *output; /* one per shard, then the companion, then the index of several shards */
    int shards, outputs;
    int planned;                /* declarations are closed */
    int current;                /* shard being written */
    void *handle;               /* its file */
    int open;
    uint64_t data, done;        /* where its data begins; bytes of data written */
    glm52_status failed;
};

glm52_status safetensors_writer_create(struct host *host, const char *directory, const char *stem, uint64_t shard_bytes,
                                       struct safetensors_writer **out)
{
    struct safetensors_writer *w = host_calloc(host, sizeof *w, MEMORY_HOST);

    if (!w) return GLM52_E_NOMEM;
    w->host = host;
    w->shard_bytes = shard_bytes ? shard_bytes : UINT64_MAX;
    w->metadata = json_pack("{s:s}", "format", "pt");
    w->directory = host_strdup(host, directory);
    w->stem = host_strdup(host, stem);
    if (!w->metadata) fail_nomem(0, "safetensors metadata");
    if (!w->metadata || !w->directory || !w->stem) {
        safetensors_writer_abort(&w);
        return GLM52_E_NOMEM;
    }
    *out = w;
    return GLM52_OK;
}

static glm52_status check_open(const struct safetensors_writer *w)
{
    return w->planned ? fail(GLM52_E_STATE, "safetensors: tensors and metadata must be declared before the first data")
                      : GLM52_OK;
}

glm52_status safetensors_writer_metadata(struct safetensors_writer *w, const char *key, const char *value)
{
    json_t *text = json_string(value);

    TRY(check_open(w));
    if (!text || json_object_set_new(w->metadata, key, text))
        return fail(GLM52_E_INVALID, "safetensors: metadata %s is not valid UTF-8", key);
    return GLM52_OK;
}

glm52_status safetensors_writer_companion(struct safetensors_writer *w, const char *name, const char *contents)
{
    TRY(check_open(w));
    w->companion = host_strdup(w->host, name);
    w->contents = host_strdup(w->host, contents);
    return w->companion && w->contents ? GLM52_OK : GLM52_E_NOMEM;
}

glm52_status safetensors_writer_declare(struct safetensors_writer *w, const char *name, glm52_dtype dtype,
                                        int dimensions, const int64_t *shape)
{
    struct safetensor t = {.type = dtype_name(dtype), .dtype = dtype, .element_bytes = (int)dtype_size(dtype),
                           .dimensions = dimensions};

    TRY(check_open(w));
    if (!safetensors_valid_name(name) || !strcmp(name, SAFETENSORS_METADATA))
        return fail(GLM52_E_INVALID, "safetensors: %s cannot be the name of a tensor", name);
    if (!t.element_bytes) return fail(GLM52_E_INVALID, "safetensors: tensor %s has the unknown dtype %d", name, dtype);
    if (dimensions < 0 || dimensions > SAFETENSORS_DIMENSIONS)
        return fail(GLM52_E_INVALID, "safetensors: tensor %s has %d dimensions, at most %d are supported", name,
                    dimensions, SAFETENSORS_DIMENSIONS);
    t.bytes = (uint64_t)t.element_bytes;
    for (int i = 0; i < dimensions; i++) {
        t.shape[i] = shape[i];
        if (shape[i] < 0 || __builtin_mul_overflow(t.bytes, (uint64_t)shape[i], &t.bytes) || t.bytes > INT64_MAX)
            return fail(GLM52_E_INVALID, "safetensors: tensor %s: dimension %d is %lld", name, i, (long long)shape[i]);
    }
    if (w->tensors == w->capacity) {
        size_t capacity = w->capacity ? 2 * w->capacity : 64;
        void *grown = host_realloc(w->host, w->tensor, w->capacity * sizeof t, capacity * sizeof t, MEMORY_HOST);
        if (!grown) return GLM52_E_NOMEM;
        w->tensor = grown;
        w->capacity = capacity;
    }
    if (!(t.name = host_strdup(w->host, name))) return GLM52_E_NOMEM;
    w->tensor[w->tensors++] = t;
    return GLM52_OK;
}

static int by_name(const void *a, const void *b)
{
    return safetensors_by_name(*(struct safetensor *const *)a, *(struct safetensor *const *)b);
}

static glm52_status check_unique(struct safetensors_writer *w)
{
    size_t bytes = w->tensors * sizeof(struct safetensor *);
    struct safetensor **sorted = host_alloc(w->host, bytes, MEMORY_HOST);
    glm52_status status = GLM52_OK;

    if (!sorted) return GLM52_E_NOMEM;
    for (size_t i = 0; i < w->tensors; i++) sorted[i] = &w->tensor[i];
    qsort(sorted, w->tensors, sizeof *sorted, by_name);
    for (size_t i = 1; i < w->tensors && !status; i++)
        if (!strcmp(sorted[i]->name, sorted[i - 1]->name))
            status = fail(GLM52_E_INVALID, "safetensors: tensor %s is declared twice", sorted[i]->name);
    host_free(w->host, sorted, bytes, MEMORY_HOST);
    return status;
}

/* Cuts the tensors into shards in their order; a tensor above the limit has a shard of its own. */
static void cut(struct safetensors_writer *w, struct shard *shard)
{
    struct shard now = {0};

    w->shards = 0;
    for (size_t i = 0; i < w->tensors; i++) {
        struct safetensor *t = &w->tensor[i];
        if (now.tensors && (t->bytes > w->shard_bytes || now.bytes > w->shard_bytes - t->bytes)) {
            if (shard) shard[w->shards] = now;
            w->shards++;
            now = (struct shard){.first = i};
        }
        t->offset = now.bytes;
        t->file = w->shards;
        now.bytes += t->bytes;
        now.tensors++;
    }
    if (shard) shard[w->shards] = now;
    w->shards++;
}

static glm52_status name_outputs(struct safetensors_writer *w)
{
    struct host *h = w->host;

    for (int i = 0; i < w->outputs; i++) {
        struct safetensors_output *o = &w->output[i];
        if (i == w->shards && w->companion)
            o->final = safetensors_path(h, "%s/%s", w->directory, w->companion);
        else if (w->shards == 1)
            o->final = safetensors_path(h, "%s/%s.safetensors", w->directory, w->stem);
        else if (i < w->shards)
            o->final = safetensors_path(h, "%s/%s-%05d-of-%05d.safetensors", w->directory, w->stem, i + 1, w->shards);
        else
            o->final = safetensors_path(h, "%s/%s.safetensors.index.json", w->directory, w->stem);
        if (!o->final) return GLM52_E_NOMEM;
        o->temporary = safetensors_path(h, "%s.tmp", o->final);
        o->aside = safetensors_path(h, "%s.old", o->final);
        if (!o->temporary || !o->aside) return GLM52_E_NOMEM;
    }
    return GLM52_OK;
}

static glm52_status plan(struct safetensors_writer *w)
{
    if (w->planned) return GLM52_OK;
    TRY(check_unique(w));
    cut(w, NULL);
    w->shard = host_calloc(w->host, (size_t)w->shards * sizeof *w->shard, MEMORY_HOST);
    if (!w->shard) return GLM52_E_NOMEM;
    cut(w, w->shard);
    w->output = host_calloc(w->host, (size_t)(w->shards + 2) * sizeof *w->output, MEMORY_HOST);
    if (!w->output) return GLM52_E_NOMEM;
    w->outputs = w->shards + (w->companion != NULL) + (w->shards > 1);
    w->planned = 1;
    TRY(name_outputs(w));
    return file_make_directories(w->host, w->directory);
}

static int add_to_text(const char *bytes, size_t count, void *text)
{
    text_add_bytes(text, bytes, count);
    return ((struct text *)text)->failed;
}

static glm52_status dump(const json_t *object, size_t flags, struct text *out)
{
    if (json_dump_callback(object, add_to_text, out, flags)) return fail_nomem(out->capacity, "a safetensors header");
    return text_status(out);
}

static glm52_status header_object(const struct safetensors_writer *w, const struct shard *shard, json_t **out)
{
    json_t *header = json_object();
    int failed = json_object_set(header, SAFETENSORS_METADATA, w->metadata);

    for (size_t i = shard->first; i < shard->first + shard->tensors && !failed; i++) {
        const struct safetensor *t = &w->tensor[i];
        json_t *shape = json_array(), *entry;
        for (int j = 0; j < t->dimensions && !failed; j++)
            failed = json_array_append_new(shape, json_integer(t->shape[j]));
        entry = json_pack("{s:s,s:o,s:[I,I]}", "dtype", t->type, "shape", shape, "data_offsets", (json_int_t)t->offset,
                          (json_int_t)(t->offset + t->bytes));
        failed |= json_object_set_new(header, t->name, entry);
    }
    if (failed) {
        json_decref(header);
        return fail(GLM52_E_INVALID, "safetensors: no memory for a header, or a name is not valid UTF-8");
    }
    *out = header;
    return GLM52_OK;
}

/* Length, JSON, spaces up to a multiple of 8, so that the data of the file is aligned. */
static glm52_status header_text(const struct safetensors_writer *w, const struct shard *shard, struct text *out)
{
    char length[8] = {0};
    json_t *header = NULL;

    TRY(header_object(w, shard, &header));
    text_add_bytes(out, length, 8);
    glm52_status status = dump(header, JSON_COMPACT, out);
    json_decref(header);
    if (status) return status;
    while (out->length % 8 && !out->failed) text_add_bytes(out, " ", 1);
    TRY(text_status(out));
    uint64_t bytes = out->length - 8;
    if (bytes > SAFETENSORS_HEADER_LIMIT)
        return fail(GLM52_E_INVALID, "safetensors: a header of %" PRIu64 " bytes is above the limit of %" PRIu64
                                     ": make shard_bytes smaller", bytes, SAFETENSORS_HEADER_LIMIT);
    for (int i = 0; i < 8; i++) out->at[i] = (char)(bytes >> 8 * i);
    return GLM52_OK;
}

static glm52_status open_output(struct safetensors_writer *w, struct safetensors_output *o)
{
    int64_t error = w->host->files.open(w->host->files.user, o->temporary, 1, &w->handle);

    if (error < 0) return file_fail(error, "create", o->temporary);
    o->made = w->open = 1;
    return GLM52_OK;
}

static glm52_status write_bytes(struct safetensors_writer *w, const struct safetensors_output *o, const void *bytes,
                                size_t count, uint64_t offset)
{
    const char *from = bytes;

    while (count) {
        int64_t n = w->host->files.write(w->host->files.user, w->handle, from, count, offset);
        if (n < 0) {
            file_fail(n, "write", o->temporary);
            return fail_detail("byte", "%" PRIu64, offset);
        }
        if (n == 0 || (uint64_t)n > count) {
            fail(GLM52_E_IO, "cannot write %s: %lld of %zu bytes were written at byte %" PRIu64, o->temporary,
                 (long long)n, count, offset);
            fail_detail("byte", "%" PRIu64, offset);
            return fail_detail("path", "%s", o->temporary);
        }
        from += n;
        count -= (size_t)n;
        offset += (uint64_t)n;
    }
    return GLM52_OK;
}

/* The file is complete. A sync that failed is not tried again: the kernel may have dropped the pages. */
static glm52_status close_output(struct safetensors_writer *w, const struct safetensors_output *o)
{
    const glm52_files *files = &w->host->files;
    int64_t sync = files->sync(files->user, w->handle), close = files->close(files->user, w->handle);

    w->open = 0;
    if (sync < 0) return file_fail(sync, "sync", o->temporary);
    return close < 0 ? file_fail(close, "close", o->temporary) : GLM52_OK;
}

static glm52_status open_shard(struct safetensors_writer *w)
{
    struct safetensors_output *o = &w->output[w->current];
    struct text header;
    glm52_status status;

    text_init(&header, w->host);
    status = header_text(w, &w->shard[w->current], &header);
    if (!status) status = open_output(w, o);
    if (!status) status = write_bytes(w, o, header.at, header.length, 0);
    w->data = header.length;
    w->done = 0;
    text_free(&header);
    return status;
}

/* Closes shards that are complete and opens the one that the next byte belongs to; none is left at the end. */
static glm52_status settle(struct safetensors_writer *w)
{
    TRY(plan(w));
    while (w->current < w->shards) {
        if (!w->open) TRY(open_shard(w));
        if (w->done < w->shard[w->current].bytes) break;
        TRY(close_output(w, &w->output[w->current]));
        w->current++;
    }
    return GLM52_OK;
}

/* The tensor that byte w->done of the current shard belongs to. */
static const struct safetensor *current_tensor(const struct safetensors_writer *w)
{
    const struct shard *s = &w->shard[w->current];
    size_t i = s->first;

    while (i + 1 < s->first + s->tensors && w->tensor[i].offset + w->tensor[i].bytes <= w->done) i++;
    return &w->tensor[i];
}

static glm52_status write_data(struct safetensors_writer *w, const void *data, size_t bytes)
{
    const char *from = data;

    while (bytes) {
        TRY(settle(w));
        if (w->current == w->shards)
            return fail(GLM52_E_INVALID, "safetensors: %zu bytes more than the declared tensors have", bytes);
        uint64_t room = w->shard[w->current].bytes - w->done;
        size_t n = bytes < room ? bytes : (size_t)room;
        if (write_bytes(w, &w->output[w->current], from, n, w->data + w->done)) {
            fail_prefix("tensor %s", current_tensor(w)->name);
            return fail_detail("tensor", "%s", current_tensor(w)->name);
        }
        w->done += n;
        from += n;
        bytes -= n;
    }
    return GLM52_OK;
}

static glm52_status check_alive(const struct safetensors_writer *w)
{
    return w->failed ? fail(w->failed, "safetensors: %s is not written, an earlier write failed", w->directory)
                     : GLM52_OK;
}

glm52_status safetensors_writer_write(struct safetensors_writer *w, const void *data, size_t bytes)
{
    TRY(check_alive(w));
    return w->failed = write_data(w, data, bytes);
}

static glm52_status write_whole(struct safetensors_writer *w, struct safetensors_output *o, const char *text,
                                size_t bytes)
{
    TRY(open_output(w, o));
    TRY(write_bytes(w, o, text, bytes, 0));
    return close_output(w, o);
}

static glm52_status write_index(struct safetensors_writer *w)
{
    json_t *map = json_object(), *index;
    uint64_t total = 0;
    int failed = 0;
    struct text text;
    glm52_status status;

    for (size_t i = 0; i < w->tensors; i++) {
        const struct safetensor *t = &w->tensor[i];
        total += t->bytes;
        failed |= json_object_set_new(map, t->name, json_string(strrchr(w->output[t->file].final, '/') + 1));
    }
    index = json_pack("{s:{s:I},s:o}", "metadata", "total_size", (json_int_t)total, "weight_map", map);
    if (!index || failed) {
        json_decref(index);
        return fail_nomem(0, "a safetensors index");
    }
    text_init(&text, w->host);
    status = dump(index, JSON_INDENT(2) | JSON_SORT_KEYS, &text);
    json_decref(index);
    if (!status) status = write_whole(w, &w->output[w->outputs - 1], text.at, text.length);
    text_free(&text);
    return status;
}

static glm52_status finish(struct safetensors_writer *w)
{
    TRY(check_alive(w));
    TRY(settle(w));
    if (w->current < w->shards) {
        const struct safetensor *t = current_tensor(w);
        fail(GLM52_E_STATE, "safetensors: tensor %s has %" PRIu64 " of its %" PRIu64 " bytes", t->name,
             w->done - t->offset, t->bytes);
        return fail_detail("tensor", "%s", t->name);
    }
    if (w->companion) TRY(write_whole(w, &w->output[w->shards], w->contents, strlen(w->contents)));
    if (w->shards > 1) TRY(write_index(w));
    return safetensors_replace(w->host, w->directory, w->stem, w->output, w->shards, w->outputs);
}

glm52_status safetensors_writer_finish(struct safetensors_writer **w)
{
    glm52_status status = finish(*w);

    safetensors_writer_abort(w);
    return status;
}

/* Also the end of a finished writer: a file that was placed is no longer temporary. */
void safetensors_writer_abort(struct safetensors_writer **writer)
{
    struct safetensors_writer *w = *writer;

    if (!w) return;
    struct host *h = w->host;
    if (w->open) h->files.close(h->files.user, w->handle);
    for (int i = 0; i < w->outputs; i++) {
        struct safetensors_output *o = &w->output[i];
        if (o->made && !o->placed) h->files.remove(h->files.user, o->temporary);
        host_strfree(h, o->temporary);
        host_strfree(h, o->final);
        host_strfree(h, o->aside);
    }
    if (w->output) host_free(h, w->output, (size_t)(w->shards + 2) * sizeof *w->output, MEMORY_HOST);
    if (w->shard) host_free(h, w->shard, (size_t)w->shards * sizeof *w->shard, MEMORY_HOST);
    for (size_t i = 0; i < w->tensors; i++) host_strfree(h, w->tensor[i].name);
    host_free(h, w->tensor, w->capacity * sizeof *w->tensor, MEMORY_HOST);
    json_decref(w->metadata);
    host_strfree(h, w->companion);
    host_strfree(h, w->contents);
    host_strfree(h, w->directory);
    host_strfree(h, w->stem);
    host_free(h, w, sizeof *w, MEMORY_HOST);
    *writer = NULL;
}
