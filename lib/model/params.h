/* The parameter table: each parameter of the model declared once. Loading, saving, initialisation, gradients and
 * optimizer groups all read it. */
#ifndef GLM52_MODEL_PARAMS_H
#define GLM52_MODEL_PARAMS_H

#include "config/config.h"

/* What a parameter is, which decides its optimizer policy, decay and initialisation. */
enum parameter_kind {
    KIND_EMBEDDING,
    KIND_HEAD,
    KIND_MATRIX,
    KIND_NORM,          /* gains, start at 1 */
    KIND_BIAS,          /* start at 0 */
    KIND_SELECTION_BIAS /* e_score_correction_bias: fp32, moved by the balance rule, never by a gradient */
};

/* Which part it belongs to, for freezing and stages. */
enum parameter_part { PART_TRUNK, PART_INDEXER, PART_MTP, PART_MTP_INDEXER, PARTS };

/* How its rows fall into blocks, for optimizers that treat blocks on their own: per head the first `split` rows and the
 * rest. heads = 0: one block. */
struct parameter_blocks {
    int64_t heads, split;
};

struct parameter {
    const char *name;
    enum parameter_kind kind;
    enum parameter_part part;
    int layer;                    /* -1 outside layers */
    int dimensions;
    int64_t shape[2];
    uint64_t count;
    glm52_dtype type;
    int follows;                  /* lies right behind the one before, without a gap */
    uint64_t offset;              /* bytes into the values */
    glm52_dtype gradient_type;    /* fp32, or bf16 for matrices under precision.gradients = bf16 */
    uint64_t gradient_offset;     /* bytes into the gradients */
    struct parameter_blocks blocks;
    int trained;                  /* has a gradient and optimizer state */
    unsigned char *value;         /* device memory; NULL until the model has some */
    void *gradient;               /* device memory; NULL until a step has some */
};

struct mla_weights {
    struct parameter *q_a, *q_a_norm, *q_b, *kv_a, *kv_a_norm, *kv_b, *o;
};

struct indexer_weights { /* all NULL in a layer that shares another's selection */
    struct parameter *wq_b, *wk, *k_norm, *k_norm_bias, *weights;
};

struct mlp_weights { /* up follows gate in memory: one GEMM serves both */
    struct parameter *gate, *up, *down;
};

struct moe_weights {
    struct parameter *router, *bias;
    struct mlp_weights expert0, shared; /* experts follow one another in memory, gate, up, down each */
};

struct layer_weights {
    struct parameter *input_norm, *post_norm;
    struct mla_weights mla;
    struct indexer_weights indexer;
    struct mlp_weights mlp; /* dense layers */
    struct moe_weights moe; /* sparse layers */
};

struct mtp_weights {
    struct parameter *enorm, *hnorm, *eh_proj, *norm;
    struct layer_weights layer;
};

struct parameters {
    struct host *host;
    struct parameter *at;
    uint32_t count;
    uint64_t elements;            /* of all parameters */
    uint64_t value_bytes, gradient_bytes;
    char *names;
    uint64_t name_bytes;
    uint32_t *by_name;            /* indices in order of name */
    struct parameter *embedding, *final_norm, *head;
    struct layer_weights *layer;  /* num_hidden_layers */
    struct mtp_weights mtp;       /* all NULL without MTP */
    int layers;
};

/* Needs a validated config. `type` is the dtype of everything but the selection biases. */
glm52_status parameters_declare(struct host *host, const struct model_config *c, glm52_dtype type,
                                struct parameters *out);
void parameters_free(struct parameters *p);
struct parameter *parameters_find(const struct parameters *p, const char *name); /* NULL if absent */

/* Which parameters the config's stage trains, and where their gradients lie. */
void parameters_select(struct parameters *p, const struct config *c);

/* Decay applies to matrices, embedding and head, never to one-dimensional parameters. */
int parameter_decays(const struct parameter *p);

#endif
