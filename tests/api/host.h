/* A host with its own memory, files and log, through the public tables alone; it counts what it is asked for. */
#ifndef GLM52_TESTS_HOST_H
#define GLM52_TESTS_HOST_H

#include "small/small.h"

struct host {
    glm52_context_options options; /* for glm52_context_create() */
    glm52_allocator allocator;
    glm52_files files;
    size_t held, allocations;
    int64_t open_files, opened, read, written; /* the last two in bytes */
    void (*moved)(struct host *h, size_t bytes); /* called at each read and write; may be NULL */
    void *user;
    int messages;
    char message[1024]; /* the last one */
};

void host_prepare(struct host *h);

#endif
