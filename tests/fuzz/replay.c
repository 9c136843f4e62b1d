/* replay CORPUS_DIRECTORY MUTATIONS: runs a fuzz target on every file of its corpus, then on that many deterministic
 * mutations of them. The target stops the program where it finds something. */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"

enum { FILES = 256, LIMIT = 1 << 16 };

static struct input {
    uint8_t *bytes;
    size_t size;
} input[FILES];

static int visible(const struct dirent *entry)
{
    return entry->d_name[0] != '.';
}

static int load(const char *directory)
{
    struct dirent **entry;
    int count = scandir(directory, &entry, visible, alphasort), files = 0;

    for (int i = 0; i < count; i++) {
        char path[1024];
        snprintf(path, sizeof path, "%s/%s", directory, entry[i]->d_name);
        FILE *file = fopen(path, "rb");
        if (file && files < FILES) {
            input[files].bytes = malloc(LIMIT);
            input[files].size = input[files].bytes ? fread(input[files].bytes, 1, LIMIT, file) : 0;
            files++;
        }
        if (file) fclose(file);
        free(entry[i]);
    }
    if (count >= 0) free(entry);
    return files;
}

/* A copy of its own size, so that a read past the end is seen. */
static void run(const uint8_t *bytes, size_t size)
{
    uint8_t *copy = malloc(size ? size : 1);

    if (!copy) abort();
    memcpy(copy, bytes, size);
    LLVMFuzzerTestOneInput(copy, size);
    free(copy);
}

int main(int argc, char **argv)
{
    static uint8_t work[LIMIT];
    int files = argc == 3 ? load(argv[1]) : 0;
    long mutations = argc == 3 ? atol(argv[2]) : 0;

    if (!files) {
        fprintf(stderr, "usage: replay CORPUS_DIRECTORY MUTATIONS (the directory must have files)\n");
        return 2;
    }
    for (int i = 0; i < files; i++) run(input[i].bytes, input[i].size);
    for (long i = 0; i < mutations; i++) {
        const struct input *from = &input[i % files];
        size_t size = from->size;
        memcpy(work, from->bytes, size);
        /* One to four mutations on top of each other. */
        for (long j = 0; j <= i / files % 4; j++)
            size = LLVMFuzzerCustomMutator(work, size, LIMIT, (unsigned)(i * 4 + j));
        run(work, size);
    }
    printf("%d files and %ld mutations replayed\n", files, mutations);
    for (int i = 0; i < files; i++) free(input[i].bytes);
    return 0;
}
