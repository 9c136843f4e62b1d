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
    int64_t calls, fail_call;             /* file calls so far (close and remove not counted); which one fails, -1: none */
    enum fault_kind kind;
    int error;
    int64_t allocations, fail_allocation; /* the same for memory */
    int64_t open_files;
    int warnings;                         /* logged so far */
    char warning[512];                    /* the last one */
};

void faults_open(struct faults *f);

#endif
