/* Text -> documents -> packs. Pack number n of the training split is a pure function of (text, options, seed, n):
 * documents are shuffled anew each epoch by counter-based random numbers and laid one after another; pack n holds
 * tokens n * pack_tokens .. of that stream, cut into documents. */
#ifndef GLM52_DATA_DATASET_H
#define GLM52_DATA_DATASET_H

#include "config/config.h"
#include "data/pack.h"

struct dataset;

glm52_status dataset_open(struct host *host, const struct config *config, struct dataset **out);
void dataset_close(struct dataset **d);
glm52_status dataset_train_pack(struct dataset *d, uint64_t number, struct pack *out);
uint64_t dataset_held_out_packs(const struct dataset *d);
glm52_status dataset_held_out_pack(struct dataset *d, uint64_t number, struct pack *out);
void dataset_describe(const struct dataset *d, char *line, size_t bytes);

#endif
