/* Checked builds: a released handle stays where it was for a while, marked, so that a later use of the pointer can be
 * told from a use of another handle. The memory is the C library's, for it may outlive the host's allocator. */
#include "api/object.h"

#if GLM52_CHECKED
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { TOMBSTONES = 4096 };
static const size_t most_bytes = (size_t)64 << 20;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    struct object *tombstone[TOMBSTONES]; /* a ring; the oldest is at first */
    size_t first, count, bytes;
} quarantine;

void *object_memory(struct host *host, size_t bytes)
{
    void *memory = calloc(1, bytes);

    if (memory)
        host_account(host, MEMORY_HOST, (int64_t)bytes);
    else
        fail_nomem(bytes, "a handle");
    return memory;
}

static struct object *forget_oldest(void)
{
    struct object *oldest = quarantine.tombstone[quarantine.first];

    quarantine.first = (quarantine.first + 1) % TOMBSTONES;
    quarantine.count--;
    quarantine.bytes -= oldest->bytes;
    return oldest;
}

void object_bury(struct host *host, struct object *object)
{
    size_t bytes = object->bytes;

    host_account(host, MEMORY_HOST, -(int64_t)bytes); /* the context's own host is about to be poisoned */
    memset(object + 1, 0xDD, bytes - sizeof *object);
    object->magic = TOMBSTONE;
    object->context = NULL;
    pthread_mutex_lock(&lock);
    while (quarantine.count && (quarantine.count == TOMBSTONES || quarantine.bytes + bytes > most_bytes))
        free(forget_oldest());
    quarantine.tombstone[(quarantine.first + quarantine.count++) % TOMBSTONES] = object;
    quarantine.bytes += bytes;
    pthread_mutex_unlock(&lock);
}

#else

void *object_memory(struct host *host, size_t bytes)
{
    return host_calloc(host, bytes, MEMORY_HOST);
}

void object_bury(struct host *host, struct object *object)
{
    glm52_allocator allocator = host->allocator; /* the context's lives inside what it is about to free */

    object->magic = 0;
    host_account(host, MEMORY_HOST, -(int64_t)object->bytes);
    allocator.release(allocator.user, object, object->bytes);
}

#endif
