/* Fuzz target: bytes that begin with { are an index over two sound shards, all others are a safetensors file. Whatever
 * they are, opening them refuses with an error or gives tensors that can be read, and returns all memory. */
#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/random.h"
#include "checkpoint/safetensors.h"
#include "fuzz.h"

#define EXPECT(condition)                                                          \
    do {                                                                           \
        if (!(condition)) {                                                        \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
            abort();                                                               \
        }                                                                          \
    } while (0)

/* ---- files in memory --------------------------------------------------------------------------------- */

static const char shard1[] =
    "\x42\0\0\0\0\0\0\0{\"a.weight\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,16]}}    "
    "0123456789abcdef";
static const char shard2[] =
    "\x82\0\0\0\0\0\0\0{\"b.weight\":{\"dtype\":\"BF16\",\"shape\":[3],\"data_offsets\":[0,6]},"
    "\"model.norm.weight\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[6,8]}}01234567";

static struct memory_file {
    const char *name;
    const void *bytes;
    size_t size;
} memory_file[] = {
    {"d/input", NULL, 0},
    {"d/model-00001-of-00002.safetensors", shard1, sizeof shard1 - 1},
    {"d/model-00002-of-00002.safetensors", shard2, sizeof shard2 - 1},
};

static int open_files;

static int64_t memory_open(void *user, const char *path, int32_t for_writing, void **file)
{
    (void)user;
    if (for_writing) return -EROFS;
    for (size_t i = 0; i < sizeof memory_file / sizeof *memory_file; i++)
        if (!strcmp(memory_file[i].name, path)) {
            *file = &memory_file[i];
            open_files++;
            return 0;
        }
    return -ENOENT;
}

static int64_t memory_size(void *user, void *file)
{
    (void)user;
    return (int64_t)((struct memory_file *)file)->size;
}

static int64_t memory_read(void *user, void *file, void *buffer, size_t bytes, uint64_t offset)
{
    const struct memory_file *f = file;

    (void)user;
    if (offset >= f->size) return 0;
    if (bytes > f->size - offset) bytes = (size_t)(f->size - offset);
    memcpy(buffer, (const char *)f->bytes + offset, bytes);
    return (int64_t)bytes;
}

static int64_t memory_close(void *user, void *file)
{
    (void)user;
    (void)file;
    open_files--;
    return 0;
}

static int64_t no_write(void *user, void *file, const void *buffer, size_t bytes, uint64_t offset)
{
    (void)user, (void)file, (void)buffer, (void)bytes, (void)offset;
    return -EROFS;
}

static int64_t no_sync(void *user, void *file)
{
    (void)user, (void)file;
    return -EROFS;
}

static int64_t no_rename(void *user, const char *from, const char *to)
{
    (void)user, (void)from, (void)to;
    return -EROFS;
}

static int64_t no_change(void *user, const char *path)
{
    (void)user, (void)path;
    return -EROFS;
}

/* ---- the target -------------------------------------------------------------------------------------- */

static void check_tensor(const struct safetensors *s, const struct safetensor *t)
{
    uint64_t elements = safetensors_elements(t), product = 1;

    EXPECT(t->file >= 0 && t->file < s->files);
    EXPECT(t->offset <= s->file[t->file].size && t->bytes <= s->file[t->file].size - t->offset);
    for (int i = 0; i < t->dimensions; i++) product *= (uint64_t)t->shape[i];
    EXPECT(product == elements && elements * (uint64_t)t->element_bytes == t->bytes);
    EXPECT(safetensors_find(s, t->name) == t);

    void *raw = malloc(t->bytes ? t->bytes : 1);
    float *values = malloc(elements ? elements * sizeof *values : 1);
    EXPECT(raw && values);
    EXPECT(!safetensors_read(s, t, 0, elements, raw));
    int is_float = t->dtype == GLM52_DTYPE_F32 || t->dtype == GLM52_DTYPE_BF16 || t->dtype == GLM52_DTYPE_F16 ||
                   t->dtype == GLM52_DTYPE_F64;
    EXPECT(safetensors_read_f32(s, t, 0, elements, values) == (is_float ? GLM52_OK : GLM52_E_UNSUPPORTED));
    free(raw);
    free(values);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    static const glm52_files files = {sizeof files, 0, NULL, memory_open, memory_size,
                                      memory_read, no_write, no_sync, memory_close, no_rename,
                                      no_change, no_change, no_change};
    glm52_context_options options = {.struct_size = sizeof options, .files = &files};
    int is_index = size && bytes[0] == '{';
    struct host host;
    struct safetensors s;

    memory_file[0].name = is_index ? "d/model.safetensors.index.json" : "d/model.safetensors";
    memory_file[0].bytes = bytes;
    memory_file[0].size = size;
    EXPECT(!host_open(&host, &options));
    glm52_status status = safetensors_open(&host, memory_file[0].name, &s);
    if (status) {
        EXPECT(status == GLM52_E_CORRUPT || status == GLM52_E_IO);
        EXPECT(*glm52_error_message(glm52_error_last()) && glm52_error_detail(glm52_error_last(), "path"));
    } else {
        for (size_t i = 0; i < s.tensors; i++) check_tensor(&s, &s.tensor[i]);
        safetensors_close(&s);
    }
    EXPECT(host.total == 0 && open_files == 0);
    return 0;
}

/* ---- mutations that know the structure --------------------------------------------------------------- */

static struct random_key dice;
static uint64_t thrown;

static uint64_t below(uint64_t n)
{
    return random_below(dice, thrown++, n);
}

static json_int_t odd_number(void)
{
    static const json_int_t odd[] = {0, 1, -1, 2, 3, 4, 7, 8, 24, 48, 96, 176, 255, 65536, 2147483647, 4294967296,
                                     4611686018427387904, 9223372036854775807};

    return odd[below(sizeof odd / sizeof *odd)];
}

static json_t *odd_value(void)
{
    static const char *const text[] = {"F32", "BF16", "F16", "F64", "U8", "I64", "F8_E4M3", "BOOL", "F33", "", "../x",
                                       "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"};

    switch (below(6)) {
    case 0:
        return json_integer(odd_number());
    case 1:
        return json_real(0.5);
    case 2:
        return json_pack("[I,I]", odd_number(), odd_number());
    case 3:
        return json_pack("{s:s,s:[I],s:[I,I]}", "dtype", "U8", "shape", odd_number(), "data_offsets", odd_number(),
                         odd_number());
    case 4:
        return json_null();
    default:
        return json_string(text[below(sizeof text / sizeof *text)]);
    }
}

/* Replaces, removes or adds something somewhere in the tree. */
static void mutate_tree(json_t *node)
{
    static const char *const name[] = {"a.weight", "b.weight", "dtype", "shape", "data_offsets", "__metadata__",
                                       "weight_map", "total_size", "a/b", "\x01"};
    size_t size = json_is_object(node) ? json_object_size(node) : json_array_size(node), pick = size ? below(size) : 0;

    if (json_is_object(node)) {
        void *at = json_object_iter(node);
        while (at && pick--) at = json_object_iter_next(node, at);
        json_t *child = at ? json_object_iter_value(at) : NULL;
        if (child && json_is_object(child) + json_is_array(child) && below(4))
            mutate_tree(child);
        else if (at && below(3))
            json_object_iter_set_new(node, at, odd_value());
        else if (at && below(2))
            json_object_del(node, json_object_iter_key(at));
        else if (child && below(2))
            json_object_set(node, name[below(sizeof name / sizeof *name)], child);
        else
            json_object_set_new(node, name[below(sizeof name / sizeof *name)], odd_value());
    } else if (size && below(3)) {
        json_array_set_new(node, pick, json_integer(odd_number()));
    } else if (size && below(2)) {
        json_array_remove(node, pick);
    } else {
        json_array_append_new(node, odd_value());
    }
}

static size_t mutate_bytes(uint8_t *bytes, size_t size, size_t limit)
{
    size_t at = size ? below(size < 400 ? size : 400) : 0;

    switch (below(4)) {
    case 0: /* cut */
        return at;
    case 1: /* longer */
        if (size + 8 > limit) return size;
        memset(bytes + size, (int)below(256), 8);
        return size + 1 + below(8);
    case 2: /* without a byte */
        if (!size) return 0;
        memmove(bytes + at, bytes + at + 1, size - at - 1);
        return size - 1;
    default:
        if (size) bytes[at] = (uint8_t)(below(2) ? below(256) : bytes[at] ^ 1u << below(8));
        return size;
    }
}

static uint64_t header_length(const uint8_t *bytes)
{
    uint64_t length = 0;

    for (int i = 0; i < 8; i++) length |= (uint64_t)bytes[i] << 8 * i;
    return length;
}

size_t LLVMFuzzerCustomMutator(uint8_t *bytes, size_t size, size_t limit, unsigned seed)
{
    int is_index = size && bytes[0] == '{';
    size_t start = is_index ? 0 : 8, length;

    dice = random_key(seed, "fuzz safetensors");
    thrown = 0;
    if (size < 8 || !below(4)) return mutate_bytes(bytes, size, limit);
    length = is_index ? size : header_length(bytes) <= size - 8 ? (size_t)header_length(bytes) : 0;
    json_t *tree = json_loadb((char *)bytes + start, length, 0, NULL);
    if (!tree || !json_is_object(tree)) {
        json_decref(tree);
        return mutate_bytes(bytes, size, limit);
    }
    mutate_tree(tree);
    char *text = json_dumps(tree, JSON_COMPACT);
    size_t fresh = text ? strlen(text) : 0, rest = size - start - length;
    if (text && start + fresh + rest <= limit) {
        memmove(bytes + start + fresh, bytes + start + length, rest);
        memcpy(bytes + start, text, fresh);
        for (size_t i = 0; i < start; i++) bytes[i] = (uint8_t)((uint64_t)fresh >> 8 * i);
        size = start + fresh + rest;
    }
    free(text);
    json_decref(tree);
    return size;
}
