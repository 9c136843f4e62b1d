#include "scratch.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char scratch[64];

const char *scratch_make(void)
{
    strcpy(scratch, "/tmp/glm52-test-XXXXXX");
    if (!mkdtemp(scratch)) abort();
    return scratch;
}

static void empty(const char *directory, int depth)
{
    DIR *d = opendir(directory);
    struct dirent *entry;
    char path[512];

    while (d && (entry = readdir(d))) {
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
        if ((size_t)snprintf(path, sizeof path, "%s/%s", directory, entry->d_name) >= sizeof path) abort();
        if (unlink(path) && depth) empty(path, depth - 1);
    }
    if (d) closedir(d);
    rmdir(directory);
}

void scratch_remove(void)
{
    empty(scratch, 2);
}

void scratch_write(const char *path, const void *bytes, size_t count)
{
    FILE *f = fopen(path, "wb");

    if (!f || (count && fwrite(bytes, 1, count, f) != count) || fclose(f)) abort();
}

int scratch_files(const char *directory, const char *part)
{
    DIR *d = opendir(directory);
    struct dirent *entry;
    int count = 0;

    while (d && (entry = readdir(d)))
        if (entry->d_name[0] != '.' && strstr(entry->d_name, part)) count++;
    if (d) closedir(d);
    return count;
}
