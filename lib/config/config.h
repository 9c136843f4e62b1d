/* All options of the library, each declared once in schema.c (key, type, range, default, one line of doc), and read
 * by every room as plain fields of struct config. */
#ifndef GLM52_CONFIG_CONFIG_H
#define GLM52_CONFIG_CONFIG_H

#include <jansson.h>

#include "base/host.h"
#include "base/text.h"

enum { CONFIG_MAX_LAYERS = 512, CONFIG_MAX_EOS = 16, CONFIG_STAGE_NAME = 63 };

enum mlp_type { MLP_DENSE, MLP_SPARSE };
enum indexer_type { INDEXER_FULL, INDEXER_SHARED };
enum lr_schedule { SCHEDULE_CONSTANT, SCHEDULE_COSINE, SCHEDULE_LINEAR, SCHEDULE_WSD };
enum attention { ATTENTION_SPARSE, ATTENTION_DENSE };
enum train_only { TRAIN_ALL, TRAIN_INDEXER };
enum indexer_loss { INDEXER_LOSS_NONE, INDEXER_LOSS_SPARSE, INDEXER_LOSS_DENSE };
enum loss_mean { MEAN_ROWS, MEAN_TOKENS };
enum mtp_loss { MTP_LOSS_CE, MTP_LOSS_TV };
enum mtp_share { MTP_SHARE_NONE, MTP_SHARE_INDEX, MTP_SHARE_INDEX_KV };
enum query_offset { QUERY_OFFSET_NONE, QUERY_OFFSET_DEPTH };
enum auxiliary_loss { AUXILIARY_NONE, AUXILIARY_ROW, AUXILIARY_DOCUMENT, AUXILIARY_GLOBAL };
enum capacity_policy { CAPACITY_BY_POSITION, CAPACITY_BY_WEIGHT };
enum muon_convention { MUON_EMA, MUON_CLASSIC };
enum muon_coefficients { MUON_QUINTIC, MUON_SIMPLE, MUON_POLAR_EXPRESS };
enum muon_rope { MUON_ROPE_PER_HEAD, MUON_ROPE_JOINT, MUON_ROPE_ADAMW };
enum muon_scale_rule { MUON_SCALE_SPECTRAL, MUON_SCALE_UNIT_RMS_NORM, MUON_SCALE_SHAPE };
enum muon_kv_a { MUON_KV_A_JOINT, MUON_KV_A_SEPARATE };
enum muon_together { MUON_SEPARATE, MUON_JOINT };
enum muon_split { MUON_SPLIT_PER_HEAD, MUON_SPLIT_NONE };
enum optimizer_policy { POLICY_ADAMW, POLICY_GLM5 };
enum not_finite { NOT_FINITE_STOP, NOT_FINITE_SKIP };
enum precision { PRECISION_F32, PRECISION_BF16 };
enum recompute { RECOMPUTE_NONE, RECOMPUTE_LIGHT, RECOMPUTE_LAYERS };
enum cuda_graph { CUDA_GRAPH_AUTO, CUDA_GRAPH_OFF, CUDA_GRAPH_ON };
enum wsd_style { WSD_LINEAR, WSD_COSINE, WSD_EXPONENTIAL, WSD_MINUS_SQRT };

/* Names are those of the hub's config.json. */
struct model_config {
    char *preset, *hub;  /* "" when not set */
    int64_t vocab_size, hidden_size, num_hidden_layers, intermediate_size, moe_intermediate_size;
    int64_t n_routed_experts, num_experts_per_tok, n_shared_experts, first_k_dense_replace;
    int64_t num_attention_heads, q_lora_rank, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim;
    int64_t index_n_heads, index_head_dim, index_topk, index_topk_freq, index_skip_topk_offset;
    int64_t num_nextn_predict_layers, max_position_embeddings;
    double rms_norm_eps, latent_norm_eps, index_k_norm_eps, rope_theta, routed_scaling_factor, initializer_range;
    int norm_topk_prob, index_share_for_mtp_iteration;
    /* One entry per decoder layer. Given explicitly when its count is not 0; config_validate() fills the others from
     * first_k_dense_replace, and from index_topk_freq and index_skip_topk_offset. */
    uint8_t mlp_layer_types[CONFIG_MAX_LAYERS], indexer_types[CONFIG_MAX_LAYERS];
    int mlp_layer_count, indexer_count;
    int64_t eos_token_id[CONFIG_MAX_EOS];
    int eos_count;
    int64_t pad_token_id; /* -1: none */
};

struct data_config {
    char *text;          /* path of a text file */
    char *tokenizer;     /* "bytes" */
    int64_t pack_tokens; /* T of a pack */
    int64_t document_tokens; /* longest document cut from the text; 0: as long as a pack */
    double held_out;     /* share of documents */
};

struct optim_config {
    int policy;          /* enum optimizer_policy */
    char *rules;         /* "pattern=rule,pattern=rule" over the policy */
    double muon_momentum, muon_scale;
    int muon_nesterov, muon_convention, muon_coefficients, muon_rope, muon_split;
    int muon_scale_rule, muon_gate_up, muon_kv_a;
    int64_t muon_steps;
    double lr, min_lr, beta1, beta2, epsilon, weight_decay;
    int64_t warmup, decay_steps, wsd_decay_steps; /* steps; decay_steps 0: train.steps */
    int schedule, wsd_style;
};

struct train_config {
    int64_t steps, microbatches, microbatch_tokens, eval_every, save_every, seed;
    int recompute;       /* enum recompute */
    int attention, train_only, not_finite, rl_safe;
    char *stage;         /* free name; a resumed or continued run whose name differs begins a new schedule */
    double clip;         /* 0: off */
    double ce_coeff;     /* weight of the trunk's cross-entropy in the loss */
    double spike;        /* loss above this many times its running mean counts as a spike; 0: off */
    int cuda_graph;      /* enum cuda_graph */
    int64_t graph_shapes;
    int deterministic;
};

struct precision_config {
    int params, gradients, moments; /* enum precision */
    int masters;
};

struct indexer_loss_config {
    int kind, mean;
    double coeff;
};

struct mtp_config {
    int64_t depths;      /* 0: the MTP layer is left alone */
    int loss, share, query_offset, detach_heads;
    double factor;
};

struct moe_config {
    double bias_update_rate, auxiliary_coeff, z_coeff;
    int auxiliary_loss, force_balance, capacity_policy;
    double capacity_factor; /* 0: no limit */
};

struct report_config {
    double peak_tflops;  /* of all devices of the run; 0: unknown */
    int profile;
};

struct config {
    struct host *host;
    char *device;
    char *out;           /* directory for metrics, checkpoints, the trained model; "": none */
    int64_t shard_bytes;
    struct model_config model;
    struct data_config data;
    struct optim_config optim;
    struct train_config train;
    struct precision_config precision;
    struct indexer_loss_config indexer_loss;
    struct mtp_config mtp;
    struct moe_config moe;
    struct report_config report;
    uint8_t *chosen;     /* per row of the schema: nobody, a base, or the user set it */
    json_t *hub_extra;   /* keys of a hub file outside the schema, kept for the dump; shared by copies; may be NULL */
};

/* The model section has at most one base, a preset or a hub file; the later one replaces the earlier. Options that
 * were set one by one win over the base, whichever came first. Every call below that fails leaves *c as it was. A
 * failure names the option in the detail "key". */
glm52_status config_init(struct config *c, struct host *host);     /* defaults: no model yet */
glm52_status config_copy(struct config *to, const struct config *from);
void config_free(struct config *c);
glm52_status config_set(struct config *c, const char *key, const char *value);
/* Value as text, a list separated by commas; *out is freed with host_strfree. */
glm52_status config_get(const struct config *c, const char *key, char **out);
/* {"optim": {"lr": 2e-4}} or {"optim.lr": 2e-4} */
glm52_status config_load_json(struct config *c, const char *json);
/* Reads a hub config.json as the base of the model section and validates that. A failure also has the detail
 * "path". */
glm52_status config_load_hub(struct config *c, const char *path);
/* The same from memory; `where` stands for the path. */
glm52_status config_load_hub_text(struct config *c, const char *text, size_t bytes, const char *where);
/* Also fills the layer lists. While model.hub names a directory that nobody has read yet, there is no model to
 * check. */
glm52_status config_validate(struct config *c);
/* The data, optim and train sections alone, for a config that brings no model. */
glm52_status config_validate_training(const struct config *c);
/* *out is freed with host_strfree. hub: config_dump_hub() with the dtype of the file it came from, or BF16. */
glm52_status config_dump(const struct config *c, int hub, char **out);
/* A hub config.json for weights of that dtype. */
glm52_status config_dump_hub(const struct config *c, glm52_dtype dtype, char **out);
glm52_status config_describe(uint32_t index, glm52_option_info *out);

/* Replaces what a model was made with: the model section and its precision, which `to` must not contradict. On failure
 * `to` is unchanged. */
glm52_status config_take_model(struct config *to, const struct config *from);
/* Key of the first option that decides what a stage trains and how, and differs; NULL if the two describe one stage. */
const char *config_stage_difference(const struct config *a, const struct config *b);

/* What the stage is: "dense", "warmup", "sparse" or "rl". */
const char *config_stage_name(const struct config *c);

/* Source of the selection of decoder layer `layer`: itself if full, else the nearest earlier full layer. */
int config_indexer_source(const struct model_config *m, int layer);

#endif
