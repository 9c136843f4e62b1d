#include "host.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static void *allocate(void *user, size_t bytes, size_t alignment)
{
    struct host *h = user;
    void *memory = aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);

    if (memory) h->held += bytes;
    h->allocations++;
    return memory;
}

static void release(void *user, void *memory, size_t bytes)
{
    struct host *h = user;

    h->held -= bytes;
    free(memory);
}

static int64_t open_file(void *user, const char *path, int32_t for_writing, void **file)
{
    struct host *h = user;
    int fd = open(path, for_writing ? O_RDWR | O_CREAT | O_TRUNC : O_RDONLY, 0666);

    if (fd < 0) return -errno;
    h->open_files++;
    h->opened++;
    *file = (void *)(intptr_t)(fd + 1);
    return 0;
}

static int descriptor(void *file)
{
    return (int)(intptr_t)file - 1;
}

static int64_t size_of(void *user, void *file)
{
    struct stat status;

    (void)user;
    return fstat(descriptor(file), &status) ? -errno : status.st_size;
}

static int64_t read_file(void *user, void *file, void *buffer, size_t bytes, uint64_t offset)
{
    struct host *h = user;
    ssize_t n = pread(descriptor(file), buffer, bytes, (off_t)offset);

    if (n < 0) return -errno;
    h->read += n;
    if (h->moved) h->moved(h, (size_t)n);
    return n;
}

static int64_t write_file(void *user, void *file, const void *buffer, size_t bytes, uint64_t offset)
{
    struct host *h = user;
    ssize_t n = pwrite(descriptor(file), buffer, bytes, (off_t)offset);

    if (n < 0) return -errno;
    h->written += n;
    if (h->moved) h->moved(h, (size_t)n);
    return n;
}

static int64_t sync_file(void *user, void *file)
{
    (void)user;
    return fsync(descriptor(file)) ? -errno : 0;
}

static int64_t close_file(void *user, void *file)
{
    ((struct host *)user)->open_files--;
    return close(descriptor(file)) ? -errno : 0;
}

static int64_t rename_file(void *user, const char *from, const char *to)
{
    (void)user;
    return rename(from, to) ? -errno : 0;
}

static int64_t remove_file(void *user, const char *path)
{
    (void)user;
    return remove(path) ? -errno : 0;
}

static int64_t make_directory(void *user, const char *path)
{
    (void)user;
    return mkdir(path, 0777) && errno != EEXIST ? -errno : 0;
}

static int64_t sync_directory(void *user, const char *path)
{
    (void)user;
    (void)path;
    return 0;
}

static void log_message(void *user, glm52_log_level level, const char *message)
{
    struct host *h = user;

    ck_assert_int_ge(level, GLM52_LOG_ERROR);
    ck_assert_int_le(level, GLM52_LOG_DEBUG);
    h->messages++;
    snprintf(h->message, sizeof h->message, "%s", message);
}

void host_prepare(struct host *h)
{
    *h = (struct host){
        .allocator = {.struct_size = sizeof h->allocator, .user = h, .allocate = allocate, .release = release},
        .files = {.struct_size = sizeof h->files, .user = h, .open = open_file, .size = size_of, .read = read_file,
                  .write = write_file, .sync = sync_file, .close = close_file, .rename = rename_file,
                  .remove = remove_file, .make_directory = make_directory, .sync_directory = sync_directory},
        .options = {.struct_size = sizeof h->options, .log = log_message, .log_user = h}};
    h->options.allocator = &h->allocator;
    h->options.files = &h->files;
}
