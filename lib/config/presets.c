/* Shapes to start from, each a list of model options. */
#include <stdio.h>
#include <string.h>

#include "config/schema.h"

/* A complete GLM-5.2 for bytes of text, 2.2M parameters: learns on two cores in minutes. */
static const char *const tiny[] = {
    "vocab_size=256", "hidden_size=128", "num_hidden_layers=6", "first_k_dense_replace=1", "intermediate_size=384",
    "moe_intermediate_size=88", "n_routed_experts=8", "num_experts_per_tok=2", "num_attention_heads=4",
    "q_lora_rank=96", "kv_lora_rank=64", "qk_nope_head_dim=32", "qk_rope_head_dim=16", "v_head_dim=32",
    "index_n_heads=4", "index_head_dim=32", "index_topk=128", "index_topk_freq=4", "index_skip_topk_offset=3",
    "max_position_embeddings=65536", "rope_theta=10000", "index_share_for_mtp_iteration=true", NULL,
};

/* Large enough for the speed of a step to mean something, small enough for two cores. */
static const char *const bench[] = {
    "vocab_size=8192", "hidden_size=512", "num_hidden_layers=8", "first_k_dense_replace=1", "intermediate_size=2048",
    "moe_intermediate_size=512", "n_routed_experts=16", "num_experts_per_tok=4", "num_attention_heads=8",
    "q_lora_rank=256", "kv_lora_rank=128", "qk_nope_head_dim=48", "qk_rope_head_dim=16", "v_head_dim=64",
    "index_n_heads=8", "index_head_dim=64", "index_topk=256", "index_topk_freq=4", "index_skip_topk_offset=3",
    "max_position_embeddings=65536", "rope_theta=10000", "index_share_for_mtp_iteration=true", NULL,
};

/* The released model, 744B parameters (reference model.md 1.1). */
static const char *const glm52[] = {
    "vocab_size=154880", "hidden_size=6144", "num_hidden_layers=78", "first_k_dense_replace=3",
    "intermediate_size=12288", "moe_intermediate_size=2048", "n_routed_experts=256", "num_experts_per_tok=8",
    "num_attention_heads=64", "q_lora_rank=2048", "kv_lora_rank=512", "qk_nope_head_dim=192", "qk_rope_head_dim=64",
    "v_head_dim=256", "index_n_heads=32", "index_head_dim=128", "index_topk=2048", "index_topk_freq=4",
    "index_skip_topk_offset=3", "num_nextn_predict_layers=1", "index_share_for_mtp_iteration=true",
    "max_position_embeddings=1048576", "rope_theta=8000000", "eos_token_id=154820,154827,154829",
    "pad_token_id=154820", NULL,
};

static const struct {
    const char *name;
    const char *const *settings;
} presets[] = {{"tiny", tiny}, {"bench", bench}, {"glm52", glm52}};

glm52_status preset_apply(struct config *c, const char *name)
{
    const char *const *settings = NULL;

    for (size_t i = 0; i < sizeof presets / sizeof *presets; i++)
        if (!strcmp(presets[i].name, name)) settings = presets[i].settings;
    for (; settings && *settings; settings++) {
        char key[64];
        const char *value = strchr(*settings, '=') + 1;
        snprintf(key, sizeof key, "model.%.*s", (int)(value - 1 - *settings), *settings);
        const struct option *o = option_find(key);
        if (!o) return fail(GLM52_E_INTERNAL, "preset %s: no option %s", name, key);
        if (c->chosen[o - options] == FROM_USER) continue;
        TRY(option_from_text(c, o, key, value));
        c->chosen[o - options] = FROM_BASE;
    }
    return GLM52_OK;
}
