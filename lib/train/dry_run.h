/* The plan: the very step, run on the meta device, with its own accounting. */
#ifndef GLM52_TRAIN_DRY_RUN_H
#define GLM52_TRAIN_DRY_RUN_H

#include "config/config.h"
#include "ops/ops.h"

struct dry_run {
    uint64_t memory[MEMORY_CLASSES]; /* bytes held during a step */
    uint64_t peak;                   /* bytes, everything included */
    struct tally tally;              /* of one step with full microbatches */
};

/* Opens dataset (if data.text is set), model, optimizer and step as a run would, and runs one step. `like`: allocator,
 * files and number of threads of the real run. */
glm52_status dry_run(const struct stream *like, const struct config *config, struct dry_run *out);

#endif
