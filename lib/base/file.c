/* The operating system's files as a file table, and whole files through any table. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/host.h"
#include "base/system_files.h"

/* A descriptor travels as a pointer, plus one so that descriptor 0 is not NULL. */
static int descriptor(void *file)
{
    return (int)((intptr_t)file - 1);
}

static int64_t system_open(void *user, const char *path, int32_t for_writing, void **file)
{
    int fd = open(path, for_writing ? O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC : O_RDONLY | O_CLOEXEC, 0666);

    (void)user;
    if (fd < 0) return -errno;
    *file = (void *)((intptr_t)fd + 1);
    return 0;
}

static int64_t system_size(void *user, void *file)
{
    struct stat status;

    (void)user;
    if (fstat(descriptor(file), &status)) return -errno;
    return S_ISDIR(status.st_mode) ? -EISDIR : (int64_t)status.st_size;
}

static int64_t system_read(void *user, void *file, void *buffer, size_t bytes, uint64_t offset)
{
    size_t done = 0;

    (void)user;
    while (done < bytes) {
        ssize_t n = pread(descriptor(file), (char *)buffer + done, bytes - done, (off_t)(offset + done));
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return -errno;
        if (!n) break;
        done += (size_t)n;
    }
    return (int64_t)done;
}

static int64_t system_write(void *user, void *file, const void *buffer, size_t bytes, uint64_t offset)
{
    size_t done = 0;

    (void)user;
    while (done < bytes) {
        ssize_t n = pwrite(descriptor(file), (const char *)buffer + done, bytes - done, (off_t)(offset + done));
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return -errno;
        done += (size_t)n;
    }
    return (int64_t)done;
}

static int64_t system_sync(void *user, void *file)
{
    (void)user;
    return fsync(descriptor(file)) ? -errno : 0;
}

static int64_t system_close(void *user, void *file)
{
    (void)user;
    return close(descriptor(file)) ? -errno : 0;
}

static int64_t system_rename(void *user, const char *from, const char *to)
{
    (void)user;
    return rename(from, to) ? -errno : 0;
}

static int64_t system_remove(void *user, const char *path)
{
    (void)user;
    return remove(path) ? -errno : 0;
}

static int64_t system_make_directory(void *user, const char *path)
{
    struct stat status;

    (void)user;
    if (!mkdir(path, 0777)) return 0;
    if (errno == EEXIST && !stat(path, &status) && S_ISDIR(status.st_mode)) return 0;
    return -errno;
}

static int64_t system_sync_directory(void *user, const char *path)
{
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int error = fd < 0 || fsync(fd) ? errno : 0;

    (void)user;
    if (fd >= 0) close(fd);
    return error == EINVAL ? 0 : -error; /* some file systems cannot sync a directory */
}

const glm52_files system_files = {sizeof(glm52_files), 0, NULL, system_open, system_size, system_read, system_write,
                                  system_sync, system_close, system_rename, system_remove, system_make_directory,
                                  system_sync_directory};

glm52_status file_fail(int64_t error, const char *verb, const char *path)
{
    int code = (int)-error;

    fail(code == ENOMEM ? GLM52_E_NOMEM : GLM52_E_IO, "cannot %s %s: %s", verb, path, strerror(code));
    fail_detail("path", "%s", path);
    fail_detail("errno", "%d", code);
    if (code == ENOSPC) return fail_hint("free some space, or write elsewhere");
    return code == ENOMEM ? GLM52_E_NOMEM : GLM52_E_IO;
}

glm52_status file_read_all(struct host *host, const char *path, uint64_t limit, char **text, size_t *bytes)
{
    const glm52_files *files = &host->files;
    void *file;
    int64_t error = files->open(files->user, path, 0, &file);

    if (error < 0) return file_fail(error, "open", path);
    int64_t size = files->size(files->user, file), read = 0;
    glm52_status status = GLM52_OK;
    char *buffer = NULL;
    if (size < 0) {
        status = file_fail(size, "read", path);
    } else if ((uint64_t)size > limit) {
        fail(GLM52_E_INVALID, "%s is %lld bytes long, more than the %llu allowed", path, (long long)size,
             (unsigned long long)limit);
        status = fail_detail("path", "%s", path);
    } else if (!(buffer = host_alloc(host, (size_t)size + 1, MEMORY_HOST))) {
        status = GLM52_E_NOMEM;
    } else if ((read = files->read(files->user, file, buffer, (size_t)size, 0)) != size) {
        status = read < 0
                     ? file_fail(read, "read", path)
                     : fail(GLM52_E_IO, "%s ended after %lld of %lld bytes", path, (long long)read, (long long)size);
        fail_detail("path", "%s", path);
        host_free(host, buffer, (size_t)size + 1, MEMORY_HOST);
    }
    files->close(files->user, file);
    if (status) return status;
    buffer[size] = 0;
    *text = buffer;
    *bytes = (size_t)size;
    return GLM52_OK;
}

static glm52_status write_and_rename(struct host *host, const char *temporary, const char *path, const void *data,
                                     size_t bytes)
{
    const glm52_files *files = &host->files;
    void *file;
    int64_t error = files->open(files->user, temporary, 1, &file);

    if (error < 0) return file_fail(error, "create", temporary);
    int64_t written = files->write(files->user, file, data, bytes, 0);
    if (written >= 0 && (size_t)written < bytes) written = -ENOSPC;
    if (written >= 0) written = files->sync(files->user, file);
    error = files->close(files->user, file);
    if (written < 0 || error < 0) return file_fail(written < 0 ? written : error, "write", temporary);
    error = files->rename(files->user, temporary, path);
    return error < 0 ? file_fail(error, "rename to", path) : GLM52_OK;
}

glm52_status file_write_all(struct host *host, const char *path, const void *data, size_t bytes)
{
    char temporary[4096];

    if ((size_t)snprintf(temporary, sizeof temporary, "%s.tmp", path) >= sizeof temporary)
        return fail(GLM52_E_INVALID, "path of %zu characters is too long", strlen(path));
    glm52_status status = write_and_rename(host, temporary, path, data, bytes);
    if (status) host->files.remove(host->files.user, temporary);
    return status;
}

glm52_status file_make_directories(struct host *host, const char *path)
{
    char part[4096];
    size_t length = strlen(path);

    if (!length || length >= sizeof part) return fail(GLM52_E_INVALID, "\"%.64s\" is no usable directory name", path);
    for (size_t i = 1; i <= length; i++) {
        if (path[i] && path[i] != '/') continue;
        memcpy(part, path, i);
        part[i] = 0;
        int64_t error = host->files.make_directory(host->files.user, part);
        if (error < 0) return file_fail(error, "make directory", part);
    }
    return GLM52_OK;
}
