/* Puts new files in the place of old ones so that the directory always loads as the old state or the new one.
 *
 * A reader takes STEM.safetensors if there is one, else STEM.safetensors.index.json; these two are the doors.
 *   One file    is renamed over its door, which is atomic. An older index beside it is dead from then on, and removed.
 *               Its companion is put in place just before, and the older one brought back if that rename fails.
 *   Shards      may have the names of older shards, and no rename replaces many files at once. The older index is set
 *               aside first, so that after a crash a mixture of old and new shards fails to load instead of loading;
 *               older shards are set aside too, and brought back if a later rename fails. The new index comes last, and
 *               then an older single file leaves the first door.
 * Shards of an older index that the new state does not overwrite are removed when all is in place. */
#include <errno.h>
#include <jansson.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/text.h"
#include "checkpoint/safetensors_parts.h"

char *safetensors_path(struct host *host, const char *format, ...)
{
    char *path = NULL;
    va_list args;

    va_start(args, format);
    int length = vsnprintf(NULL, 0, format, args);
    va_end(args);
    if (length < 0 || !(path = host_alloc(host, (size_t)length + 1, MEMORY_HOST))) return NULL;
    va_start(args, format);
    vsnprintf(path, (size_t)length + 1, format, args);
    va_end(args);
    return path;
}

static glm52_status rename_fail(int64_t error, const char *from, const char *to)
{
    file_fail(error, "rename", from);
    return fail_prefix("%s is not in place", to);
}

/* Moves what stands at output->final out of the way; nothing there is fine. */
static glm52_status set_aside(struct host *host, struct safetensors_output *o)
{
    int64_t error = host->files.rename(host->files.user, o->final, o->aside);

    if (error == -ENOENT) return GLM52_OK;
    if (error < 0) return rename_fail(error, o->final, o->aside);
    o->kept = 1;
    return GLM52_OK;
}

static glm52_status place(struct host *host, struct safetensors_output *o)
{
    int64_t error = host->files.rename(host->files.user, o->temporary, o->final);

    if (error < 0) return rename_fail(error, o->temporary, o->final);
    o->placed = 1;
    return GLM52_OK;
}

static void put_back(struct host *host, struct safetensors_output *o)
{
    const glm52_files *files = &host->files;

    if (o->placed && files->rename(files->user, o->final, o->temporary) < 0)
        host_log(host, GLM52_LOG_ERROR, "cannot rename %s back to %s", o->final, o->temporary);
    else
        o->placed = 0;
    if (o->kept && files->rename(files->user, o->aside, o->final) < 0)
        host_log(host, GLM52_LOG_ERROR, "cannot bring %s back; it is at %s", o->final, o->aside);
    else
        o->kept = 0;
}

static void drop_aside(struct host *host, struct safetensors_output *o)
{
    if (o->kept && host->files.remove(host->files.user, o->aside) < 0)
        host_log(host, GLM52_LOG_WARNING, "cannot remove the older file %s", o->aside);
    o->kept = 0;
}

static glm52_status sync_directory(struct host *host, const char *directory)
{
    int64_t error = host->files.sync_directory(host->files.user, directory);

    return error < 0 ? file_fail(error, "sync", directory) : GLM52_OK;
}

/* single: the older file STEM.safetensors, which has no successor of that name. */
static glm52_status replace_shards(struct host *host, const char *directory, struct safetensors_output *output,
                                   int outputs, struct safetensors_output *single)
{
    struct safetensors_output *index = &output[outputs - 1];
    glm52_status status = set_aside(host, index);

    if (!status && index->kept) status = sync_directory(host, directory);
    for (int i = 0; i < outputs - 1 && !status; i++) {
        status = set_aside(host, &output[i]);
        if (!status) status = place(host, &output[i]);
    }
    if (!status) status = sync_directory(host, directory);
    if (!status) status = place(host, index);
    if (!status) status = set_aside(host, single);
    if (!status) status = sync_directory(host, directory);
    if (status) {
        put_back(host, single);
        for (int i = outputs - 1; i >= 0; i--) put_back(host, &output[i]);
        return status;
    }
    drop_aside(host, single);
    for (int i = 0; i < outputs; i++) drop_aside(host, &output[i]);
    return GLM52_OK;
}

/* Once the rename has happened the new state loads, whatever fails after it: that is the exception of the contract. */
static glm52_status replace_single(struct host *host, const char *directory, struct safetensors_output *output,
                                   int outputs, const char *index)
{
    glm52_status status = GLM52_OK;
    int64_t error;

    for (int i = 1; i < outputs && !status; i++) {
        status = set_aside(host, &output[i]);
        if (!status) status = place(host, &output[i]);
    }
    if (!status) status = place(host, output);
    if (status) {
        for (int i = outputs - 1; i > 0; i--) put_back(host, &output[i]);
        return status;
    }
    for (int i = 1; i < outputs; i++) drop_aside(host, &output[i]);
    TRY(sync_directory(host, directory));
    error = host->files.remove(host->files.user, index);
    if (error < 0 && error != -ENOENT) {
        file_fail(error, "remove", index);
        return fail_hint("%s is in place; remove the older index by hand, it no longer belongs to it", output->final);
    }
    return GLM52_OK;
}

/* The weight_map of the older index, NULL if there is none that can be read. */
static json_t *older_map(struct host *host, const char *index)
{
    json_t *root, *map;
    char *text;
    size_t bytes;

    if (file_read_all(host, index, SAFETENSORS_INDEX_LIMIT, &text, &bytes)) return NULL;
    root = json_loadb(text, bytes, 0, NULL);
    host_free(host, text, bytes + 1, MEMORY_HOST);
    map = json_incref(json_object_get(root, "weight_map"));
    json_decref(root);
    return map;
}

static int is_output(const char *path, const struct safetensors_output *output, int outputs)
{
    int i = 0;

    while (i < outputs && strcmp(output[i].final, path)) i++;
    return i < outputs;
}

/* Removes files STEM-*.safetensors that only the older index named. */
static void remove_older_shards(struct host *host, const char *directory, const char *stem, json_t *map,
                                const struct safetensors_output *output, int outputs)
{
    const char *tensor, *previous = "";
    json_t *file;

    json_object_foreach(map, tensor, file) {
        const char *name = json_string_value(file);
        char *path;
        if (!name || !strcmp(name, previous) || !safetensors_valid_name(name) || !text_starts_with(name, stem) ||
            name[strlen(stem)] != '-' || !text_ends_with(name, ".safetensors"))
            continue;
        previous = name;
        if (!(path = safetensors_path(host, "%s/%s", directory, name))) return;
        if (!is_output(path, output, outputs)) {
            int64_t error = host->files.remove(host->files.user, path);
            if (error < 0 && error != -ENOENT)
                host_log(host, GLM52_LOG_WARNING, "cannot remove the older file %s", path);
        }
        host_strfree(host, path);
    }
}

glm52_status safetensors_replace(struct host *host, const char *directory, const char *stem,
                                 struct safetensors_output *output, int shards, int outputs)
{
    struct safetensors_output single = {.final = safetensors_path(host, "%s/%s.safetensors", directory, stem)};
    char *index = safetensors_path(host, "%s/%s.safetensors.index.json", directory, stem);
    glm52_status status = GLM52_E_NOMEM;

    single.aside = safetensors_path(host, "%s/%s.safetensors.old", directory, stem);
    if (single.final && single.aside && index) {
        json_t *map = older_map(host, index);
        status = shards == 1 ? replace_single(host, directory, output, outputs, index)
                             : replace_shards(host, directory, output, outputs, &single);
        if (!status) remove_older_shards(host, directory, stem, map, output, outputs);
        json_decref(map);
    }
    host_strfree(host, single.final);
    host_strfree(host, single.aside);
    host_strfree(host, index);
    return status;
}
