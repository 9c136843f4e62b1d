/* A model as a hub directory: config.json and safetensors under the hub's names, one tensor per expert and
 * projection. */
#ifndef GLM52_CHECKPOINT_HUB_H
#define GLM52_CHECKPOINT_HUB_H

#include "checkpoint/safetensors.h"
#include "model/model.h"

/* config: options outside the model section are taken from it; NULL means defaults. */
glm52_status hub_load(struct stream *stream, const struct config *config, const char *directory, struct model *out);
/* Values alone, into a model of the same shapes: opening checks that every tensor is there and fits, so that reading
 * fails for want of memory or on a broken disk only. */
glm52_status hub_open_values(struct model *m, const char *directory, struct safetensors *file);
glm52_status hub_read_values(struct model *m, const struct safetensors *file);
/* dtype 0: as held. shard_bytes 0: one file. */
glm52_status hub_save(struct model *m, const char *directory, glm52_dtype dtype, uint64_t shard_bytes);

#endif
