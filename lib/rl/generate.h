/* Continues a prompt, one token at a time. Each token is a whole forward pass over the text so far: right for samples
 * and tests; a decoder with a cache comes with the rollout engine. */
#ifndef GLM52_RL_GENERATE_H
#define GLM52_RL_GENERATE_H

#include "model/model.h"

struct sampling {
    double temperature; /* 0: the most likely token */
    uint64_t seed;      /* token number n is a pure function of (seed, n, logits) */
};

/* Writes up to `limit` tokens and stops at an end-of-text token (eos_token_id), which is not written. */
glm52_status generate(struct model *m, const int32_t *prompt, uint64_t count, uint64_t limit,
                      const struct sampling *how, int32_t *tokens, uint64_t *produced);

#endif
