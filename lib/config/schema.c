/* The schema: every option of the library, once. A key is the path of its field in struct config. */
#include "config/schema.h"

#include <stdio.h>
#include <string.h>

#define FIELD(field) #field
#define AT(field) offsetof(struct config, field)
#define INTEGER(field, least, most, initial, flags, summary) \
    {FIELD(field), summary, OPTION_INTEGER, flags, AT(field), 0, least, most, 0, 0, #least " .. " #most, initial}
#define NUMBER(field, low, high, initial, summary) \
    {FIELD(field), summary, OPTION_NUMBER, 0, AT(field), 0, 0, 0, low, high, #low " .. " #high, initial}
#define NUMBER_ABOVE(field, low, high, initial, flags, summary)                                  \
    {FIELD(field), summary, OPTION_NUMBER, OPTION_ABOVE | (flags), AT(field), 0, 0, 0, low, high, \
     "above " #low " .. " #high, initial}
#define NUMBER_BELOW(field, low, high, initial, summary)                                \
    {FIELD(field), summary, OPTION_NUMBER, OPTION_BELOW, AT(field), 0, 0, 0, low, high, \
     #low " .. below " #high, initial}
#define BOOLEAN(field, initial, summary) \
    {FIELD(field), summary, OPTION_BOOLEAN, 0, AT(field), 0, 0, 0, 0, 0, "", initial}
#define STRING(field, words, initial, flags, summary) \
    {FIELD(field), summary, OPTION_STRING, flags, AT(field), 0, 0, 0, 0, 0, words, initial}
#define CHOICE(field, words, initial, summary) \
    {FIELD(field), summary, OPTION_CHOICE, 0, AT(field), 0, 0, 0, 0, 0, words, initial}
#define INTEGERS(field, count, least, most, summary) \
    {FIELD(field), summary, OPTION_INTEGERS, 0, AT(field), AT(count), least, most, 0, 0, #least " .. " #most, ""}
#define LAYERS(field, count, words, summary) \
    {FIELD(field), summary, OPTION_LAYERS, 0, AT(field), AT(count), 0, 0, 0, 0, words, ""}
/* A size every model has and no default can guess. The limits keep every product of sizes within 63 bits. */
#define SIZE(field, most, summary) INTEGER(field, 1, most, "", OPTION_REQUIRED, summary)

const struct option options[] = {
    STRING(device, "", "cpu", 0, "where to compute: cpu, meta (counts only), cuda, cuda:1, auto"),
    STRING(out, "", "", 0, "directory for metrics, checkpoints and the trained model; empty: write nothing"),
    INTEGER(shard_bytes, 1, 1000000000000, "5000000000", 0, "largest safetensors file; a bigger model is sharded"),

    STRING(model.preset, "tiny|bench|glm52", "", OPTION_NOT_HUB, "a known shape to start from"),
    STRING(model.hub, "", "", OPTION_NOT_HUB, "hub directory (config.json, safetensors) to start from"),
    SIZE(model.vocab_size, 4194304, "token ids"),
    SIZE(model.hidden_size, 131072, "width of the residual stream"),
    SIZE(model.num_hidden_layers, 512, "decoder layers, without the MTP layer"),
    SIZE(model.intermediate_size, 1048576, "width of a dense feed-forward"),
    SIZE(model.moe_intermediate_size, 262144, "width of one expert"),
    SIZE(model.n_routed_experts, 4096, "routed experts of a MoE layer"),
    SIZE(model.num_experts_per_tok, 4096, "routed experts per token"),
    INTEGER(model.n_shared_experts, 1, 64, "1", 0, "experts that every token passes"),
    INTEGER(model.first_k_dense_replace, 0, 512, "3", 0, "leading layers with a dense feed-forward"),
    LAYERS(model.mlp_layer_types, model.mlp_layer_count, "dense|sparse",
           "feed-forward of each layer; empty: by first_k_dense_replace"),
    SIZE(model.num_attention_heads, 1024, "attention heads"),
    SIZE(model.q_lora_rank, 65536, "query latent"),
    SIZE(model.kv_lora_rank, 65536, "key-value latent"),
    SIZE(model.qk_nope_head_dim, 4096, "query-key width of a head without position"),
    SIZE(model.qk_rope_head_dim, 4096, "query-key width of a head with rotary position; even"),
    SIZE(model.v_head_dim, 4096, "value width of a head"),
    SIZE(model.index_n_heads, 1024, "heads of an indexer"),
    SIZE(model.index_head_dim, 4096, "width of an indexer head, the rotary part included"),
    SIZE(model.index_topk, 1048576, "keys an indexer selects per query"),
    INTEGER(model.index_topk_freq, 1, 512, "1", 0, "layers that share one indexer"),
    INTEGER(model.index_skip_topk_offset, 0, 512, "2", 0,
            "layer i has an indexer if max(i - offset + 1, 0) mod freq = 0"),
    LAYERS(model.indexer_types, model.indexer_count, "full|shared",
           "indexer of each layer; empty: by index_topk_freq and index_skip_topk_offset"),
    BOOLEAN(model.index_share_for_mtp_iteration, "false", "MTP depths after the first reuse its selection"),
    INTEGER(model.num_nextn_predict_layers, 0, 1, "0", 0, "MTP layers"),
    INTEGER(model.max_position_embeddings, 1, 16777216, "1048576", 0, "longest document in tokens"),
    NUMBER_ABOVE(model.rms_norm_eps, 0, 1, "1e-5", 0, "epsilon of the block, final and MTP norms"),
    NUMBER_ABOVE(model.latent_norm_eps, 0, 1, "1e-6", 0, "epsilon of the norms of the query and key-value latents"),
    NUMBER_ABOVE(model.index_k_norm_eps, 0, 1, "1e-6", 0, "epsilon of the indexer's key LayerNorm"),
    NUMBER_ABOVE(model.rope_theta, 0, 1e15, "", OPTION_REQUIRED, "base of the rotary frequencies"),
    BOOLEAN(model.norm_topk_prob, "true", "the weights of a token's experts sum to routed_scaling_factor"),
    NUMBER_ABOVE(model.routed_scaling_factor, 0, 1000, "2.5", 0, "factor on the weights of the routed experts"),
    NUMBER(model.initializer_range, 0, 10, "0.02", "deviation of random initial weights"),
    INTEGERS(model.eos_token_id, model.eos_count, 0, 4194303, "tokens that end a text"),
    INTEGER(model.pad_token_id, -1, 4194303, "-1", 0, "token for padding; -1: none"),

    STRING(data.text, "", "", 0, "path of a text file"),
    STRING(data.tokenizer, "bytes", "bytes", 0, "how text becomes tokens"),
    INTEGER(data.pack_tokens, 1, 16777216, "2048", 0, "tokens of a packed row"),
    INTEGER(data.document_tokens, 0, 16777216, "0", 0, "longest document cut from the text; 0: as long as a pack"),
    NUMBER_BELOW(data.held_out, 0, 1, "0.02", "share of documents kept for evaluation"),

    CHOICE(optim.policy, "adamw|glm5", "adamw", "glm5: Muon per head for matrices, AdamW for the rest"),
    STRING(optim.rules, "", "", 0, "pattern=adamw|muon|none over the policy, separated by commas; * and ? match"),
    NUMBER(optim.lr, 0, 100, "2e-4", "learning rate after warm-up"),
    NUMBER(optim.min_lr, 0, 100, "0", "learning rate after the decay"),
    NUMBER_BELOW(optim.beta1, 0, 1, "0.9", "decay of the first moment"),
    NUMBER_BELOW(optim.beta2, 0, 1, "0.95", "decay of the second moment"),
    NUMBER_ABOVE(optim.epsilon, 0, 1, "1e-8", 0, "added to the root of the second moment"),
    NUMBER(optim.weight_decay, 0, 100, "0.1", "decoupled, times the learning rate; matrices only"),
    INTEGER(optim.warmup, 0, 1000000000, "0", 0, "steps of linear warm-up"),
    CHOICE(optim.schedule, "constant|cosine|linear|wsd", "cosine", "learning rate after warm-up"),
    INTEGER(optim.decay_steps, 0, 1000000000, "0", 0, "step at which min_lr is reached; 0: train.steps"),
    INTEGER(optim.wsd_decay_steps, 0, 1000000000, "0", 0, "steps of decay at the end of schedule wsd"),
    CHOICE(optim.wsd_style, "linear|cosine|exponential|minus_sqrt", "linear", "form of the decay of schedule wsd"),

    NUMBER_BELOW(optim.muon_momentum, 0, 1, "0.95", "momentum of Muon"),
    CHOICE(optim.muon_convention, "ema|classic", "ema", "M = b M + (1 - b) G, or M = b M + G"),
    BOOLEAN(optim.muon_nesterov, "false", "Nesterov momentum"),
    CHOICE(optim.muon_coefficients, "quintic|simple|polar_express", "quintic", "Newton-Schulz polynomials"),
    INTEGER(optim.muon_steps, 1, 16, "5", 0, "Newton-Schulz iterations"),
    NUMBER(optim.muon_scale, 0, 100, "0.2", "times sqrt(max(rows, columns)) of each orthogonalised block"),
    CHOICE(optim.muon_scale_rule, "spectral|unit_rms_norm|shape", "spectral",
           "factor beside muon_scale: sqrt(max(rows, columns)), sqrt(rows / columns), sqrt(max(1, rows / columns))"),
    CHOICE(optim.muon_gate_up, "separate|joint", "separate",
           "gate and up of an expert or feed-forward: two blocks or one"),
    CHOICE(optim.muon_kv_a, "joint|separate", "joint", "latent and rotary rows of kv_a_proj: one block or two"),
    CHOICE(optim.muon_split, "per_head|none", "per_head", "blocks of q_b_proj and kv_b_proj"),
    CHOICE(optim.muon_rope, "per_head|joint|adamw", "per_head", "rotary rows of q_b_proj, when it is split"),

    INTEGER(train.steps, 0, 1000000000, "100", 0, "optimizer updates; 0: only evaluate"),
    INTEGER(train.microbatches, 1, 65536, "1", 0, "packed rows per update"),
    INTEGER(train.microbatch_tokens, 1, 16777216, "2048", 0, "most tokens of a packed row; memory grows with it"),
    INTEGER(train.eval_every, 0, 1000000000, "0", 0, "steps between evaluations; 0: at the end only"),
    INTEGER(train.save_every, 0, 1000000000, "0", 0, "steps between checkpoints; 0: at the end only"),
    INTEGER(train.seed, 0, 9223372036854775807, "1", 0, "seed of initial weights and of the order of documents"),
    CHOICE(train.recompute, "none|light|layers", "none",
           "what backward computes anew instead of keeping: norms and absorbed heads, or whole layers"),
    NUMBER(train.clip, 0, 1e30, "1", "largest global gradient norm; 0: no clipping"),
    NUMBER(train.ce_coeff, 0, 1e30, "1", "weight of the trunk's cross-entropy"),
    CHOICE(train.attention, "sparse|dense", "sparse", "which keys the main attention sees: selected or all"),
    CHOICE(train.train_only, "all|indexer", "all", "indexer: everything else is frozen"),
    BOOLEAN(train.rl_safe, "false", "refuse whatever moves selections or routing: for reinforcement learning"),
    STRING(train.stage, "", "", 0, "name of the stage; a run that goes on under another name begins a new schedule"),
    CHOICE(train.not_finite, "stop|skip", "stop", "what a loss or gradient that is not finite does"),
    NUMBER(train.spike, 0, 1e30, "0", "a loss above this many times its running mean is skipped; 0: off"),
    BOOLEAN(train.deterministic, "true",
            "the same bits in every run; false permits faster operations that add in any order"),
    CHOICE(train.cuda_graph, "auto|off|on", "auto",
           "record a step's launches and replay them; auto: where the device can, on: refused where it cannot"),
    INTEGER(train.graph_shapes, 1, 65536, "8", 0,
            "recorded shapes of microbatches; beyond them the one used longest ago goes"),

    CHOICE(precision.params, "f32|bf16", "f32", "parameters and activations"),
    CHOICE(precision.gradients, "f32|bf16", "f32", "gradients of matrices; bf16 needs bf16 parameters"),
    CHOICE(precision.moments, "f32|bf16", "f32", "moments of AdamW and Muon"),
    BOOLEAN(precision.masters, "true", "fp32 masters of bf16 parameters; without them updates are rounded"),

    CHOICE(indexer_loss.kind, "none|sparse|dense", "none",
           "keys over which the indexer learns the attention; none: frozen"),
    NUMBER(indexer_loss.coeff, 0, 1e30, "1e-3", "weight of the indexer loss of each layer"),
    CHOICE(indexer_loss.mean, "rows|tokens", "rows", "per row, or per token with a label"),

    INTEGER(mtp.depths, 0, 16, "0", 0, "how often the MTP layer runs; 0: it is left alone"),
    CHOICE(mtp.loss, "ce|tv", "ce", "cross-entropy, or end-to-end total variation against the trunk"),
    NUMBER(mtp.factor, 0, 1e30, "0.1", "weight of the MTP loss"),
    BOOLEAN(mtp.detach_heads, "false", "MTP gradients stop before trunk, embedding and head"),
    CHOICE(mtp.share, "none|index|index_kv", "index_kv", "what depths after the first take from it"),
    CHOICE(mtp.query_offset, "none|depth", "none",
           "rotary position of queries at depth d, with shared keys: t or t + d"),

    NUMBER(moe.bias_update_rate, 0, 100, "0", "step of the expert bias towards balance; 0: off"),
    CHOICE(moe.auxiliary_loss, "none|row|document|global", "none",
           "over what the balance loss counts: a packed row, each document, the step so far"),
    NUMBER(moe.auxiliary_coeff, 0, 1e30, "1e-4", "weight of the balance loss"),
    NUMBER(moe.z_coeff, 0, 1e30, "0", "weight of the router z-loss; 0: off"),
    NUMBER(moe.capacity_factor, 0, 1000, "0", "an expert takes at most factor * tokens * k / experts; 0: no limit"),
    CHOICE(moe.capacity_policy, "position|weight", "position", "which assignments beyond the capacity are dropped"),
    BOOLEAN(moe.force_balance, "false", "experts in turn whatever the router says; for benchmarks alone"),

    BOOLEAN(report.profile, "false", "time every operation, and write out/profile.jsonl; steps are slower"),
    NUMBER(report.peak_tflops, 0, 1e12, "0",
           "peak TFLOP/s of all devices of the run, for utilisation (mfu_*); 0: unknown"),
};

const int option_count = sizeof options / sizeof *options;

const struct option *option_find(const char *key)
{
    for (int i = 0; i < option_count; i++)
        if (!strcmp(options[i].key, key)) return &options[i];
    return NULL;
}

int option_in_section(const struct option *o, const char *section)
{
    size_t length = strlen(section);

    return !strncmp(o->key, section, length) && o->key[length] == '.';
}

int option_is_section(const char *name)
{
    for (int i = 0; i < option_count; i++)
        if (option_in_section(&options[i], name)) return 1;
    return 0;
}

static const char *last_part(const char *key)
{
    const char *dot = strrchr(key, '.');

    return dot ? dot + 1 : key;
}

static const char *nearest_by(const char *key, const char *(*part)(const char *), unsigned most)
{
    const char *nearest = NULL;

    for (int i = 0; i < option_count; i++) {
        unsigned distance = text_distance(part(key), part(options[i].key));
        if (distance > most) continue;
        nearest = options[i].key;
        if (distance == 0) break;
        most = distance - 1;
    }
    return nearest;
}

static const char *whole(const char *key)
{
    return key;
}

const char *option_nearest(const char *key)
{
    enum { LONGEST = 64 };
    size_t length = strnlen(key, LONGEST), last = strnlen(last_part(key), LONGEST);
    const char *nearest = nearest_by(key, whole, (unsigned)length / 4);

    /* Perhaps the right name in no section, or in the wrong one. */
    return nearest ? nearest : nearest_by(key, last_part, (unsigned)last / 4);
}

glm52_status option_unknown(const char *key)
{
    const char *nearest = option_nearest(key);

    if (nearest) {
        fail(GLM52_E_INVALID, "%s: no such option; did you mean %s?", key, nearest);
    } else {
        fail(GLM52_E_INVALID, "%s: no such option", key);
        fail_hint("`glm52 config` lists all options");
    }
    return fail_detail("key", "%s", key);
}

int word_at(const char *words, int index, char *word, size_t bytes)
{
    for (; index > 0; index--) {
        words = strchr(words, '|');
        if (!words) return 0;
        words++;
    }
    snprintf(word, bytes, "%.*s", (int)strcspn(words, "|"), words);
    return 1;
}

int word_index(const char *words, const char *word)
{
    char one[64];

    for (int i = 0; word_at(words, i, one, sizeof one); i++)
        if (!strcmp(one, word)) return i;
    return -1;
}

static const char *const type_name[] = {
    [OPTION_INTEGER] = "integer", [OPTION_NUMBER] = "number", [OPTION_BOOLEAN] = "boolean",
    [OPTION_STRING] = "string",   [OPTION_CHOICE] = "choice", [OPTION_INTEGERS] = "list",
    [OPTION_LAYERS] = "list",
};

glm52_status config_describe(uint32_t index, glm52_option_info *out)
{
    if (index >= (uint32_t)option_count)
        return fail(GLM52_E_INVALID, "there are %d options; number %u is past the end", option_count, index);
    const struct option *o = &options[index];
    out->key = o->key;
    out->type = o->type == OPTION_STRING && *o->range ? "choice" : type_name[o->type];
    out->range = o->range;
    out->default_value = o->initial;
    out->summary = o->summary;
    return GLM52_OK;
}
