/* Declares the parameters of a config: names and shapes of docs/reference/model.md 3.1. The walk runs twice, first to
 * count, then to fill, so that pointers into the table are final when the parts get theirs. */
#include "model/params.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/dtype.h"

enum { ALIGNMENT = 64 };

struct declarer {
    struct parameters *table; /* at = NULL: counting */
    const struct model_config *config;
    glm52_dtype type;
    int layer;
    enum parameter_part part;
    uint32_t count;
    uint64_t name_bytes, value_bytes, elements;
};

static uint64_t round_up(uint64_t n, uint64_t unit)
{
    return (n + unit - 1) / unit * unit;
}

/* Places the next parameter. `follows` puts it right behind the previous one, without a gap. columns = 0: a vector. */
static struct parameter *declare(struct declarer *d, enum parameter_kind kind, int follows, int64_t rows,
                                 int64_t columns, const char *format, ...)
{
    char name[128];
    int prefix = d->layer < 0 ? 0 : snprintf(name, sizeof name, "model.layers.%d.", d->layer);
    va_list args;

    va_start(args, format);
    size_t length = (size_t)prefix + (size_t)vsnprintf(name + prefix, sizeof name - (size_t)prefix, format, args) + 1;
    va_end(args);
    glm52_dtype type = kind == KIND_SELECTION_BIAS ? GLM52_DTYPE_F32 : d->type;
    uint64_t count = (uint64_t)rows * (uint64_t)(columns ? columns : 1);
    if (!follows) d->value_bytes = round_up(d->value_bytes, ALIGNMENT);
    struct parameter *p = NULL;
    if (d->table->at) {
        char *stored = d->table->names + d->name_bytes;
        memcpy(stored, name, length);
        p = &d->table->at[d->count];
        *p = (struct parameter){.name = stored, .kind = kind, .part = d->part, .layer = d->layer,
                                .dimensions = columns ? 2 : 1, .shape = {rows, columns ? columns : 1}, .count = count,
                                .type = type, .offset = d->value_bytes, .follows = follows};
    }
    d->count++;
    d->name_bytes += length;
    d->value_bytes += count * dtype_size(type);
    d->elements += count;
    return p;
}

static void declare_mla(struct declarer *d, struct mla_weights *w)
{
    const struct model_config *c = d->config;
    int64_t heads = c->num_attention_heads, qk = c->qk_nope_head_dim + c->qk_rope_head_dim;

    w->q_a = declare(d, KIND_MATRIX, 0, c->q_lora_rank, c->hidden_size, "self_attn.q_a_proj.weight");
    w->q_a_norm = declare(d, KIND_NORM, 0, c->q_lora_rank, 0, "self_attn.q_a_layernorm.weight");
    w->q_b = declare(d, KIND_MATRIX, 0, heads * qk, c->q_lora_rank, "self_attn.q_b_proj.weight");
    w->kv_a = declare(d, KIND_MATRIX, 0, c->kv_lora_rank + c->qk_rope_head_dim, c->hidden_size,
                      "self_attn.kv_a_proj_with_mqa.weight");
    w->kv_a_norm = declare(d, KIND_NORM, 0, c->kv_lora_rank, 0, "self_attn.kv_a_layernorm.weight");
    w->kv_b = declare(d, KIND_MATRIX, 0, heads * (c->qk_nope_head_dim + c->v_head_dim), c->kv_lora_rank,
                      "self_attn.kv_b_proj.weight");
    if (w->kv_b) {
        w->q_b->blocks = (struct parameter_blocks){heads, c->qk_nope_head_dim};
        w->kv_b->blocks = (struct parameter_blocks){heads, c->qk_nope_head_dim};
    }
    w->o = declare(d, KIND_MATRIX, 0, c->hidden_size, heads * c->v_head_dim, "self_attn.o_proj.weight");
}

static void declare_indexer(struct declarer *d, struct indexer_weights *w)
{
    const struct model_config *c = d->config;
    enum parameter_part part = d->part;

    d->part = part == PART_TRUNK ? PART_INDEXER : PART_MTP_INDEXER;
    w->wq_b = declare(d, KIND_MATRIX, 0, c->index_n_heads * c->index_head_dim, c->q_lora_rank,
                      "self_attn.indexer.wq_b.weight");
    w->wk = declare(d, KIND_MATRIX, 0, c->index_head_dim, c->hidden_size, "self_attn.indexer.wk.weight");
    w->k_norm = declare(d, KIND_NORM, 0, c->index_head_dim, 0, "self_attn.indexer.k_norm.weight");
    w->k_norm_bias = declare(d, KIND_BIAS, 0, c->index_head_dim, 0, "self_attn.indexer.k_norm.bias");
    w->weights = declare(d, KIND_MATRIX, 0, c->index_n_heads, c->hidden_size, "self_attn.indexer.weights_proj.weight");
    d->part = part;
}

static void declare_mlp(struct declarer *d, struct mlp_weights *w, int follows, int64_t width, const char *prefix)
{
    int64_t hidden = d->config->hidden_size;

    w->gate = declare(d, KIND_MATRIX, follows, width, hidden, "mlp.%sgate_proj.weight", prefix);
    w->up = declare(d, KIND_MATRIX, 1, width, hidden, "mlp.%sup_proj.weight", prefix);
    w->down = declare(d, KIND_MATRIX, 1, hidden, width, "mlp.%sdown_proj.weight", prefix);
}

static void declare_moe(struct declarer *d, struct moe_weights *w)
{
    const struct model_config *c = d->config;

    w->router = declare(d, KIND_MATRIX, 0, c->n_routed_experts, c->hidden_size, "mlp.gate.weight");
    w->bias = declare(d, KIND_SELECTION_BIAS, 0, c->n_routed_experts, 0, "mlp.gate.e_score_correction_bias");
    for (int64_t e = 0; e < c->n_routed_experts; e++) {
        struct mlp_weights expert;
        char prefix[40];
        snprintf(prefix, sizeof prefix, "experts.%d.", (int)e);
        declare_mlp(d, &expert, e > 0, c->moe_intermediate_size, prefix);
        if (!e) w->expert0 = expert;
    }
    declare_mlp(d, &w->shared, 0, c->moe_intermediate_size * c->n_shared_experts, "shared_experts.");
}

static void declare_layer(struct declarer *d, struct layer_weights *w, int full, int sparse)
{
    int64_t hidden = d->config->hidden_size;

    w->input_norm = declare(d, KIND_NORM, 0, hidden, 0, "input_layernorm.weight");
    declare_mla(d, &w->mla);
    if (full) declare_indexer(d, &w->indexer);
    w->post_norm = declare(d, KIND_NORM, 0, hidden, 0, "post_attention_layernorm.weight");
    if (sparse)
        declare_moe(d, &w->moe);
    else
        declare_mlp(d, &w->mlp, 0, d->config->intermediate_size, "");
}

static void declare_mtp(struct declarer *d, struct mtp_weights *w)
{
    int64_t hidden = d->config->hidden_size;

    d->layer = (int)d->config->num_hidden_layers;
    d->part = PART_MTP;
    w->enorm = declare(d, KIND_NORM, 0, hidden, 0, "enorm.weight");
    w->hnorm = declare(d, KIND_NORM, 0, hidden, 0, "hnorm.weight");
    w->eh_proj = declare(d, KIND_MATRIX, 0, hidden, 2 * hidden, "eh_proj.weight");
    declare_layer(d, &w->layer, 1, 1);
    w->norm = declare(d, KIND_NORM, 0, hidden, 0, "shared_head.norm.weight");
}

static void declare_all(struct declarer *d)
{
    struct parameters *t = d->table;
    const struct model_config *c = d->config;

    d->layer = -1;
    d->part = PART_TRUNK;
    t->embedding = declare(d, KIND_EMBEDDING, 0, c->vocab_size, c->hidden_size, "model.embed_tokens.weight");
    for (d->layer = 0; d->layer < c->num_hidden_layers; d->layer++)
        declare_layer(d, &t->layer[d->layer], c->indexer_types[d->layer] == INDEXER_FULL,
                      c->mlp_layer_types[d->layer] == MLP_SPARSE);
    if (c->num_nextn_predict_layers) declare_mtp(d, &t->mtp);
    d->layer = -1;
    d->part = PART_TRUNK;
    t->final_norm = declare(d, KIND_NORM, 0, c->hidden_size, 0, "model.norm.weight");
    t->head = declare(d, KIND_HEAD, 0, c->vocab_size, c->hidden_size, "lm_head.weight");
}

static int compare_names(const void *a, const void *b, void *table)
{
    const struct parameters *t = table;

    return strcmp(t->at[*(const uint32_t *)a].name, t->at[*(const uint32_t *)b].name);
}

glm52_status parameters_declare(struct host *host, const struct model_config *c, glm52_dtype type,
                                struct parameters *out)
{
    struct parameters t = {.host = host, .layers = (int)c->num_hidden_layers};
    struct declarer counting = {.table = &t, .config = c, .type = type}, filling = counting;
    size_t layer_bytes = (size_t)t.layers * sizeof *t.layer;

    t.layer = host_calloc(host, layer_bytes, MEMORY_HOST);
    if (!t.layer) return GLM52_E_NOMEM;
    declare_all(&counting);
    t.count = counting.count;
    t.name_bytes = counting.name_bytes;
    t.names = host_alloc(host, t.name_bytes, MEMORY_HOST);
    t.by_name = host_alloc(host, t.count * sizeof *t.by_name, MEMORY_HOST);
    t.at = host_alloc(host, t.count * sizeof *t.at, MEMORY_HOST);
    if (!t.names || !t.by_name || !t.at) {
        parameters_free(&t);
        return GLM52_E_NOMEM;
    }
    declare_all(&filling);
    t.elements = filling.elements;
    t.value_bytes = filling.value_bytes;
    for (uint32_t i = 0; i < t.count; i++) t.by_name[i] = i;
    qsort_r(t.by_name, t.count, sizeof *t.by_name, compare_names, &t);
    *out = t;
    return GLM52_OK;
}

void parameters_free(struct parameters *p)
{
    if (!p->host) return;
    host_free(p->host, p->at, p->count * sizeof *p->at, MEMORY_HOST);
    host_free(p->host, p->by_name, p->count * sizeof *p->by_name, MEMORY_HOST);
    host_free(p->host, p->names, p->name_bytes, MEMORY_HOST);
    host_free(p->host, p->layer, (size_t)p->layers * sizeof *p->layer, MEMORY_HOST);
    memset(p, 0, sizeof *p);
}

struct parameter *parameters_find(const struct parameters *p, const char *name)
{
    uint32_t low = 0, high = p->count;

    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        int order = strcmp(name, p->at[p->by_name[middle]].name);
        if (!order) return &p->at[p->by_name[middle]];
        if (order < 0)
            high = middle;
        else
            low = middle + 1;
    }
    return NULL;
}

static int stage_trains(const struct config *c, const struct parameter *p)
{
    int indexer = p->part == PART_INDEXER || p->part == PART_MTP_INDEXER;
    int mtp = p->part == PART_MTP || p->part == PART_MTP_INDEXER;

    if (p->kind == KIND_SELECTION_BIAS || (mtp && !c->mtp.depths)) return 0;
    if (indexer) return c->indexer_loss.kind != INDEXER_LOSS_NONE;
    return c->train.train_only == TRAIN_ALL;
}

void parameters_select(struct parameters *p, const struct config *c)
{
    uint64_t bytes = 0;

    for (uint32_t i = 0; i < p->count; i++) {
        struct parameter *q = &p->at[i];
        q->trained = stage_trains(c, q);
        q->gradient_type = c->precision.gradients == PRECISION_BF16 && q->dimensions == 2 ? GLM52_DTYPE_BF16
                                                                                          : GLM52_DTYPE_F32;
        if (!q->follows) bytes = round_up(bytes, ALIGNMENT);
        q->gradient_offset = bytes;
        if (q->trained) bytes += q->count * dtype_size(q->gradient_type);
    }
    p->gradient_bytes = bytes;
}

int parameter_decays(const struct parameter *p)
{
    return p->dimensions == 2;
}
