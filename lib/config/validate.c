/* Everything about a config that can be decided without allocating, and the layer lists that follow from it. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "config/schema.h"

static glm52_status wrong(const char *key, int64_t value, const char *format, ...) PRINTF(3, 4);

/* "model.index_topk = 0 ..." */
static glm52_status wrong(const char *key, int64_t value, const char *format, ...)
{
    char what[512];
    va_list args;

    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    fail(GLM52_E_INVALID, "%s = %lld %s", key, (long long)value, what);
    return fail_detail("key", "%s", key);
}

static glm52_status check_section(const struct config *c, const char *section)
{
    for (int i = 0; i < option_count; i++)
        if (option_in_section(&options[i], section)) TRY(option_check(c, &options[i]));
    return GLM52_OK;
}

static int chosen(const struct config *c, const void *field)
{
    size_t offset = (size_t)((const char *)field - (const char *)c);

    for (int i = 0; i < option_count; i++)
        if (options[i].offset == offset) return c->chosen[i] != FROM_DEFAULT;
    return 0;
}

/* ---- layers ------------------------------------------------------------------------------------------ */

static glm52_status wrong_length(const char *key, int count, int64_t layers)
{
    fail(GLM52_E_INVALID, "%s has %d entries, but model.num_hidden_layers = %lld", key, count, (long long)layers);
    fail_hint("give one entry per layer, or none: an empty list follows the formula");
    return fail_detail("key", "%s", key);
}

/* The explicit list speaks for itself; a first_k_dense_replace given beside it must say the same. */
static glm52_status fill_mlp_layers(struct config *c)
{
    struct model_config *m = &c->model;
    int given = chosen(c, &m->first_k_dense_replace), i = 0;

    if (m->mlp_layer_count) {
        if (m->mlp_layer_count != m->num_hidden_layers)
            return wrong_length("model.mlp_layer_types", m->mlp_layer_count, m->num_hidden_layers);
        while (i < m->mlp_layer_count && m->mlp_layer_types[i] == MLP_DENSE) i++;
        if (!given) m->first_k_dense_replace = i;
        for (i = 0; i < m->mlp_layer_count; i++) {
            int type = i < m->first_k_dense_replace ? MLP_DENSE : MLP_SPARSE;
            if (!given || m->mlp_layer_types[i] == type) continue;
            wrong("model.first_k_dense_replace", m->first_k_dense_replace,
                  "contradicts model.mlp_layer_types[%d] = %s", i, type == MLP_DENSE ? "sparse" : "dense");
            return fail_hint("drop one of the two, or make them agree");
        }
        return GLM52_OK;
    }
    if (!given) {
        TRY(option_reset(c, option_find("model.first_k_dense_replace")));
        if (m->first_k_dense_replace > m->num_hidden_layers) m->first_k_dense_replace = m->num_hidden_layers;
    }
    if (m->first_k_dense_replace > m->num_hidden_layers)
        return wrong("model.first_k_dense_replace", m->first_k_dense_replace,
                     "is more than model.num_hidden_layers = %lld; nearest: %lld", (long long)m->num_hidden_layers,
                     (long long)m->num_hidden_layers);
    for (i = 0; i < m->num_hidden_layers; i++)
        m->mlp_layer_types[i] = i < m->first_k_dense_replace ? MLP_DENSE : MLP_SPARSE;
    return GLM52_OK;
}

/* IndexShare (model.md 1.1): layer i is full iff max(i - offset + 1, 0) mod freq = 0. The explicit list wins. */
static glm52_status fill_indexers(struct config *c)
{
    struct model_config *m = &c->model;

    if (m->indexer_count && m->indexer_count != m->num_hidden_layers)
        return wrong_length("model.indexer_types", m->indexer_count, m->num_hidden_layers);
    for (int i = 0; i < m->num_hidden_layers && !m->indexer_count; i++) {
        int64_t since = i - m->index_skip_topk_offset + 1;
        m->indexer_types[i] = since <= 0 || since % m->index_topk_freq == 0 ? INDEXER_FULL : INDEXER_SHARED;
    }
    if (m->indexer_types[0] == INDEXER_FULL) return GLM52_OK;
    if (m->indexer_count) {
        fail(GLM52_E_INVALID, "model.indexer_types[0] = shared, but no earlier layer has a selection to share");
        fail_hint("the first layer must be full");
        return fail_detail("key", "model.indexer_types");
    }
    return wrong("model.index_skip_topk_offset", m->index_skip_topk_offset,
                 "leaves the first layer without an indexer; nearest: 1");
}

/* ---- sections ---------------------------------------------------------------------------------------- */

static glm52_status check_ids(const struct model_config *m)
{
    for (int i = 0; i < m->eos_count; i++)
        if (m->eos_token_id[i] < 0 || m->eos_token_id[i] >= m->vocab_size)
            return wrong("model.eos_token_id", m->eos_token_id[i], "is outside the vocabulary, 0 .. %lld",
                         (long long)m->vocab_size - 1);
    if (m->pad_token_id >= m->vocab_size)
        return wrong("model.pad_token_id", m->pad_token_id, "is outside the vocabulary; nearest: %lld",
                     (long long)m->vocab_size - 1);
    return GLM52_OK;
}

glm52_status config_validate_model(struct config *c)
{
    struct model_config *m = &c->model;

    TRY(check_section(c, "model"));
    TRY(fill_mlp_layers(c));
    TRY(fill_indexers(c));
    if (m->num_experts_per_tok > m->n_routed_experts)
        return wrong("model.num_experts_per_tok", m->num_experts_per_tok,
                     "is more than model.n_routed_experts = %lld; nearest: %lld", (long long)m->n_routed_experts,
                     (long long)m->n_routed_experts);
    if (m->qk_rope_head_dim % 2)
        return wrong("model.qk_rope_head_dim", m->qk_rope_head_dim,
                     "is odd, but rotation pairs its elements; nearest: %lld", (long long)m->qk_rope_head_dim + 1);
    if (m->index_head_dim < m->qk_rope_head_dim)
        return wrong("model.index_head_dim", m->index_head_dim,
                     "has no room for the rotary part, model.qk_rope_head_dim = %lld; nearest: %lld",
                     (long long)m->qk_rope_head_dim, (long long)m->qk_rope_head_dim);
    return check_ids(m);
}

static glm52_status check_schedule(const struct config *c)
{
    const struct optim_config *o = &c->optim;
    const char *end_key = o->decay_steps ? "optim.decay_steps" : "train.steps";
    long long end = o->decay_steps ? o->decay_steps : c->train.steps;

    if (o->min_lr > o->lr) {
        fail(GLM52_E_INVALID, "optim.min_lr = %g is more than optim.lr = %g", o->min_lr, o->lr);
        return fail_detail("key", "optim.min_lr");
    }
    if (o->schedule == SCHEDULE_CONSTANT || !end) return GLM52_OK;
    if (o->warmup > end)
        return wrong("optim.warmup", o->warmup, "is longer than %s = %lld; nearest: %lld", end_key, end, end);
    if (o->schedule == SCHEDULE_WSD && (o->wsd_decay_steps < 1 || o->wsd_decay_steps > end))
        return wrong("optim.wsd_decay_steps", o->wsd_decay_steps,
                     "must be 1 .. %s = %lld with optim.schedule = wsd; nearest: %lld", end_key, end,
                     o->wsd_decay_steps < 1 ? 1 : end);
    return GLM52_OK;
}

glm52_status config_validate_training(const struct config *c)
{
    TRY(check_section(c, "data"));
    TRY(check_section(c, "optim"));
    TRY(check_section(c, "train"));
    TRY(check_section(c, "indexer_loss"));
    TRY(check_section(c, "mtp"));
    TRY(check_section(c, "moe"));
    TRY(check_section(c, "report"));
    TRY(option_check(c, option_find("shard_bytes")));
    TRY(check_schedule(c));
    if (c->data.pack_tokens > c->train.microbatch_tokens)
        return wrong("data.pack_tokens", c->data.pack_tokens,
                     "is more than train.microbatch_tokens = %lld; nearest: %lld",
                     (long long)c->train.microbatch_tokens, (long long)c->train.microbatch_tokens);
    if (c->data.document_tokens > c->data.pack_tokens)
        return wrong("data.document_tokens", c->data.document_tokens,
                     "is more than data.pack_tokens = %lld; nearest: %lld", (long long)c->data.pack_tokens,
                     (long long)c->data.pack_tokens);
    return GLM52_OK;
}

static glm52_status clash(const char *key, const char *message, const char *hint)
{
    fail(GLM52_E_INVALID, "%s", message);
    fail_hint("%s", hint);
    return fail_detail("key", "%s", key);
}

const char *config_stage_name(const struct config *c)
{
    if (c->train.rl_safe) return "rl";
    if (c->train.train_only == TRAIN_INDEXER) return "warmup";
    return c->train.attention == ATTENTION_DENSE ? "dense" : "sparse";
}

/* What the stage asks of the model, and of itself. */
static glm52_status check_stage(const struct config *c)
{
    int kl = c->indexer_loss.kind != INDEXER_LOSS_NONE;
    size_t name = strlen(c->train.stage);

    if (name > CONFIG_STAGE_NAME) {
        fail(GLM52_E_INVALID, "train.stage has %zu bytes; at most %d make a name", name, CONFIG_STAGE_NAME);
        return fail_detail("key", "train.stage");
    }
    if (c->train.train_only == TRAIN_INDEXER && !kl)
        return clash("train.train_only", "train.train_only = indexer with indexer_loss.kind = none trains nothing",
                     "set indexer_loss.kind to dense or sparse");
    if (c->train.attention == ATTENTION_DENSE && c->indexer_loss.kind == INDEXER_LOSS_SPARSE)
        return clash("indexer_loss.kind",
                     "indexer_loss.kind = sparse needs the selected keys of train.attention = sparse",
                     "set indexer_loss.kind = dense, or train.attention = sparse");
    if (c->train.rl_safe && (kl || c->train.attention == ATTENTION_DENSE))
        return clash("train.rl_safe", "train.rl_safe = true needs a frozen indexer and sparse attention",
                     "set indexer_loss.kind = none and train.attention = sparse");
    if (c->train.rl_safe && (c->moe.force_balance || c->moe.bias_update_rate > 0 || c->moe.capacity_factor > 0))
        return clash("train.rl_safe",
                     "train.rl_safe = true refuses moe.force_balance, bias_update_rate and capacity_factor",
                     "set moe.force_balance = false and the other two to 0");
    if (c->mtp.depths && !c->model.num_nextn_predict_layers)
        return clash("mtp.depths", "mtp.depths is above 0, but the model has no MTP layer",
                     "set model.num_nextn_predict_layers = 1, or mtp.depths = 0");
    if (c->mtp.depths && c->mtp.loss == MTP_LOSS_TV && !c->mtp.detach_heads)
        return clash("mtp.detach_heads", "mtp.loss = tv needs mtp.detach_heads = true: its target is not to be moved",
                     "set mtp.detach_heads = true");
    return GLM52_OK;
}

/* What is kept of a parameter beside its value. */
static glm52_status check_precision(const struct config *c)
{
    const struct precision_config *p = &c->precision;

    if (p->gradients == PRECISION_BF16 && p->params != PRECISION_BF16)
        return clash("precision.gradients",
                     "precision.gradients = bf16 with precision.params = f32 loses what the parameters hold",
                     "set precision.params = bf16 as well, or precision.gradients = f32");
    if (!p->masters && p->params != PRECISION_BF16)
        return clash("precision.masters",
                     "precision.masters = false with precision.params = f32: the parameters are the masters",
                     "leave precision.masters out");
    return GLM52_OK;
}

/* What data, step and model must agree on. */
static glm52_status check_fit(const struct config *c)
{
    const struct model_config *m = &c->model;
    const struct data_config *d = &c->data;
    int64_t longest = d->document_tokens ? d->document_tokens : d->pack_tokens;
    enum { BYTES = 256 };

    if (c->train.microbatch_tokens > INT32_MAX / m->num_experts_per_tok)
        return wrong("train.microbatch_tokens", c->train.microbatch_tokens,
                     "times model.num_experts_per_tok = %lld is more than 2147483647 assignments; nearest: %lld",
                     (long long)m->num_experts_per_tok, (long long)(INT32_MAX / m->num_experts_per_tok));
    if (!*d->text) return GLM52_OK;
    if (longest > m->max_position_embeddings)
        return wrong(d->document_tokens ? "data.document_tokens" : "data.pack_tokens", longest,
                     "lets documents grow longer than model.max_position_embeddings = %lld; nearest: %lld",
                     (long long)m->max_position_embeddings, (long long)m->max_position_embeddings);
    if (m->vocab_size < BYTES)
        return wrong("model.vocab_size", m->vocab_size, "is too small for data.tokenizer = bytes; nearest: %d",
                     BYTES);
    return GLM52_OK;
}

glm52_status config_validate(struct config *c)
{
    const struct model_config *m = &c->model;

    if (*m->hub && *m->preset) {
        fail(GLM52_E_INVALID, "model.hub = %s and model.preset = %s both give the model's shape", m->hub, m->preset);
        fail_hint("keep one of them");
        return fail_detail("key", "model.preset");
    }
    TRY(config_validate_training(c));
    if (*m->hub && !m->num_hidden_layers) return GLM52_OK; /* config_load_hub() will check the shape */
    TRY(config_validate_model(c));
    TRY(check_stage(c));
    TRY(check_precision(c));
    return check_fit(c);
}
