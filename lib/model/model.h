/* One model: its config, its parameter table and the values of the parameters in device memory. */
#ifndef GLM52_MODEL_MODEL_H
#define GLM52_MODEL_MODEL_H

#include "model/params.h"
#include "ops/ops.h"

struct model {
    struct host *host;
    struct stream *stream;
    struct config config;         /* validated */
    glm52_dtype type;             /* of parameters and activations */
    struct parameters parameters;
    unsigned char *values;        /* parameters.value_bytes of device memory */
    unsigned char *gradients;     /* while somebody holds them */
    size_t gradient_bytes;        /* of those: the parameters trained now may be others than those trained next */
    int gradient_holders;
    const struct guide *guide;    /* NULL: its passes decide for themselves */
    int steps;                    /* open now; a stage begins only where there is one */
    int stage;                    /* how many began: optimizers serve the one they were made in */
};

/* Copies the config, declares the parameters, takes memory for the values; their contents are undefined. */
glm52_status model_open(struct stream *stream, const struct config *config, struct model *m);
void model_close(struct model *m);
/* Matrices, embedding and head normal with model.initializer_range, gains 1, biases 0: each value a pure function of
 * train.seed, parameter name and element index. */
glm52_status model_initialize(struct model *m);
/* Device memory for the gradients of all trained parameters, zeroed; shared by all holders, gone with the last. */
glm52_status model_hold_gradients(struct model *m);
void model_release_gradients(struct model *m);
/* "6 layers (1 dense + 5 MoE), 2.2M parameters, stage sparse" */
void model_describe(const struct model *m, char *line, size_t bytes);

#endif
