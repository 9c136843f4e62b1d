/* A host whose memory and files fail on demand, on top of the system's. Tells what is still held. */
#ifndef GLM52_TESTS_FAULTS_H
#define GLM52_TESTS_FAULTS_H

#include "base/host.h"

enum fault_kind {
    FAULT_ERROR,  /* the call returns -error */
    FAULT_SHORT,  /* a read or write does half of what was asked; other calls return -error */
    FAULT_NOTHING /* a read or write does nothing and returns 0; other calls return -error */
};

struct faults {
    struct host host;
    int64_t calls, fail_call;             /* file calls so far (remove not counted); which one fails, -1: none */
    int closes;                           /* 1: close counts too, and may report a late error; set before use */
    enum fault_kind kind;
    int error;
    int64_t allocations, fail_allocation; /* the same for memory */
    int64_t held;                         /* bytes that were taken and not given back */
    int64_t open_files;
    int warnings;                         /* logged so far */
    char warning[512];                    /* the last one */
    glm52_allocator allocator;
    glm52_files files;
};

void faults_open(struct faults *f);
/* The same for a context; *options stays valid while f does. f->host is not used then. */
void faults_options(struct faults *f, glm52_context_options *options);

#endif
