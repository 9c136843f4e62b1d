/* Where the time of a step goes, per part of the model and operation: report.profile. */
#ifndef GLM52_TRAIN_PROFILE_H
#define GLM52_TRAIN_PROFILE_H

#include "config/config.h"
#include "ops/ops.h"

struct profile {
    struct stream *stream;
    struct tally *tally;   /* NULL: nobody asked */
    char *path;            /* out/profile.jsonl; NULL without `out` */
    uint64_t steps;        /* in the tally */
    double seconds;        /* that they took on the host's clock */
    int warm;              /* the first step sets things up, and is not one of them */
};

glm52_status profile_open(struct stream *s, const struct config *config, struct profile *p);
void profile_close(struct profile *p);
/* Around a step; the second writes the file anew. */
glm52_status profile_begin(struct profile *p);
glm52_status profile_end(struct profile *p, double seconds);

#endif
