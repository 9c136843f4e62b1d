/* FLOPs by convention; training.md 7, docs/accounting.md. */
#include "report/flops.h"

#include <math.h>

const char *const flop_item_name[FLOP_ITEMS] = {
    [FLOP_MLP_DENSE] = "mlp_dense",
    [FLOP_MOE_ROUTED] = "moe_routed",
    [FLOP_MOE_SHARED] = "moe_shared",
    [FLOP_ROUTER] = "router",
    [FLOP_MLA_Q_DOWN] = "mla_q_down",
    [FLOP_MLA_Q_UP] = "mla_q_up",
    [FLOP_MLA_KV_DOWN] = "mla_kv_down",
    [FLOP_MLA_KV_UP] = "mla_kv_up",
    [FLOP_MLA_O] = "mla_o",
    [FLOP_ATTN_CORE] = "attn_core",
    [FLOP_MTP_EH_PROJ] = "mtp_eh_proj",
    [FLOP_LOGITS] = "logits",
    [FLOP_TV_TARGET_LOGITS] = "tv_target_logits",
    [FLOP_INDEXER_PROJ] = "indexer_proj",
    [FLOP_INDEXER_SCORE] = "indexer_score",
    [FLOP_INDEXER_HEAD_SUM] = "indexer_head_sum",
    [FLOP_INDEXER_TEACHER_QK] = "indexer_teacher_qk",
};

/* Causal pairs of a document. */
static uint64_t triangle(uint64_t length)
{
    return length * (length + 1) / 2;
}

void flop_work_add(struct flop_work *w, uint64_t length)
{
    uint64_t k = (uint64_t)w->config->model.index_topk, dense = length < k ? length : k;

    w->tokens += length;
    w->squares += length * length;
    w->pairs += triangle(length);
    w->selected_pairs += triangle(dense) + (length - dense) * k;
}

static int tv_target(const struct config *c)
{
    return c->mtp.depths && c->mtp.loss == MTP_LOSS_TV;
}

static int learns(const struct config *c)
{
    return c->indexer_loss.kind != INDEXER_LOSS_NONE;
}

static int64_t dense_layers(const struct model_config *m)
{
    int64_t dense = 0;

    for (int64_t i = 0; i < m->num_hidden_layers; i++) dense += m->mlp_layer_types[i] == MLP_DENSE;
    return dense;
}

/* Has layer i an indexer? Layers beyond the model's go on by the formula that its own follow (model.md 1.1). */
static int has_indexer(const struct model_config *m, int64_t i)
{
    int64_t since = i - m->index_skip_topk_offset + 1;

    if (i < m->num_hidden_layers) return m->indexer_types[i] == INDEXER_FULL;
    return since <= 0 || since % m->index_topk_freq == 0;
}

static int64_t indexers_between(const struct model_config *m, int64_t first, int64_t end)
{
    int64_t count = 0;

    for (int64_t i = first; i < end; i++) count += has_indexer(m, i);
    return count;
}

/* ---- exact ---- */

struct flop_executions flop_executions(const struct config *c)
{
    const struct model_config *m = &c->model;
    int64_t layers = m->num_hidden_layers, depths = c->mtp.depths, dense = dense_layers(m), one = depths > 0;
    int64_t indexers = indexers_between(m, 0, layers) + (c->mtp.share == MTP_SHARE_NONE ? depths : one);
    int nobody_asks = c->train.attention == ATTENTION_DENSE && !learns(c);

    return (struct flop_executions){
        .layers = (uint64_t)(layers + depths),
        .dense = (uint64_t)dense,
        .moe = (uint64_t)(layers - dense + depths),
        .indexers = nobody_asks ? 0 : (uint64_t)indexers,
        .kv_down = (uint64_t)(layers + (c->mtp.share == MTP_SHARE_INDEX_KV ? one : depths)),
    };
}

static uint64_t times(uint64_t a, uint64_t b)
{
    return a && b > UINT64_MAX / a ? UINT64_MAX : a * b;
}

/* `macs` multiply-adds forward at each of `units`, and `gradients` times as many backward. */
static struct flop_count count(uint64_t macs, uint64_t units, uint64_t gradients)
{
    uint64_t forward = times(times(2, macs), units);

    return (struct flop_count){forward, times(gradients, forward)};
}

/* The same with a backward over other units. */
static struct flop_count count_both(uint64_t macs, uint64_t units, uint64_t backward_units, uint64_t gradients)
{
    return (struct flop_count){count(macs, units, 0).forward, count(macs, backward_units, gradients).backward};
}

/* One row through the decoder layers, the MTP depths and the heads. `trained`: of rows and of weights, or none. */
static void count_rows(const struct flop_work *w, const struct flop_executions *n, uint64_t trained,
                       struct flop_count item[FLOP_ITEMS])
{
    const struct config *c = w->config;
    const struct model_config *m = &c->model;
    uint64_t hidden = (uint64_t)m->hidden_size, heads = (uint64_t)m->num_attention_heads,
             depths = (uint64_t)c->mtp.depths;
    uint64_t nope = (uint64_t)m->qk_nope_head_dim, rope = (uint64_t)m->qk_rope_head_dim, v = (uint64_t)m->v_head_dim;
    uint64_t q_rank = (uint64_t)m->q_lora_rank, kv_rank = (uint64_t)m->kv_lora_rank;
    uint64_t expert = 3 * hidden * (uint64_t)m->moe_intermediate_size, vocabulary = (uint64_t)m->vocab_size;

    item[FLOP_MLP_DENSE] = count(n->dense * 3 * hidden * (uint64_t)m->intermediate_size, w->tokens, trained);
    item[FLOP_MOE_ROUTED] = count(n->moe * expert * (uint64_t)m->num_experts_per_tok, w->tokens, trained);
    item[FLOP_MOE_SHARED] = count(n->moe * expert * (uint64_t)m->n_shared_experts, w->tokens, trained);
    item[FLOP_ROUTER] = count(n->moe * hidden * (uint64_t)m->n_routed_experts, w->tokens, trained);
    item[FLOP_MLA_Q_DOWN] = count(n->layers * hidden * q_rank, w->tokens, trained);
    item[FLOP_MLA_Q_UP] = count(n->layers * q_rank * heads * (nope + rope), w->tokens, trained);
    item[FLOP_MLA_KV_DOWN] = count(n->kv_down * hidden * (kv_rank + rope), w->tokens, trained);
    item[FLOP_MLA_KV_UP] = count(n->layers * kv_rank * heads * (nope + v), w->tokens, trained);
    item[FLOP_MLA_O] = count(n->layers * heads * v * hidden, w->tokens, trained);
    item[FLOP_MTP_EH_PROJ] = count(depths * 2 * hidden * hidden, w->tokens, trained);
    item[FLOP_LOGITS] = count((1 + depths) * hidden * vocabulary, w->tokens, trained);
    item[FLOP_TV_TARGET_LOGITS] = count(tv_target(c) ? hidden * vocabulary : 0, w->tokens, 0);
}

/* The attention, absorbed over selected keys or in full over all, and what the indexer does to find and learn it. */
static void count_pairs(const struct flop_work *w, const struct flop_executions *n, uint64_t trained,
                        struct flop_count item[FLOP_ITEMS])
{
    const struct config *c = w->config;
    const struct model_config *m = &c->model;
    uint64_t hidden = (uint64_t)m->hidden_size, heads = (uint64_t)m->num_attention_heads;
    uint64_t rope = (uint64_t)m->qk_rope_head_dim, kv_rank = (uint64_t)m->kv_lora_rank;
    uint64_t index_heads = (uint64_t)m->index_n_heads, width = (uint64_t)m->index_head_dim;
    int dense = c->train.attention == ATTENTION_DENSE;
    uint64_t key = dense ? (uint64_t)m->qk_nope_head_dim + rope : kv_rank + rope;
    uint64_t value = dense ? (uint64_t)m->v_head_dim : kv_rank;
    uint64_t support = c->indexer_loss.kind == INDEXER_LOSS_SPARSE ? w->selected_pairs : w->pairs;
    uint64_t loss = learns(c) ? 1 : 0;
    uint64_t projections = (uint64_t)m->q_lora_rank * index_heads * width + hidden * width + hidden * index_heads;

    item[FLOP_ATTN_CORE] = count(n->layers * heads * (key + value), dense ? w->pairs : w->selected_pairs, trained);
    item[FLOP_INDEXER_PROJ] = count(n->indexers * projections, w->tokens, loss); /* its inputs are detached */
    item[FLOP_INDEXER_SCORE] = count_both(n->indexers * index_heads * width, w->pairs, support, 2 * loss);
    item[FLOP_INDEXER_HEAD_SUM] = count_both(n->indexers * index_heads, w->pairs, support, 2 * loss);
    item[FLOP_INDEXER_TEACHER_QK] = count(loss * n->indexers * heads * key, support, 0);
}

void flops_exact(const struct flop_work *w, struct flop_count item[FLOP_ITEMS])
{
    struct flop_executions n = flop_executions(w->config);
    uint64_t trained = w->config->train.train_only == TRAIN_ALL ? 2 : 0;

    count_rows(w, &n, trained, item);
    count_pairs(w, &n, trained, item);
}

double flops_exact_total(const struct flop_work *w)
{
    struct flop_count item[FLOP_ITEMS];
    double total = 0;

    flops_exact(w, item);
    for (int i = 0; i < FLOP_ITEMS; i++) total += (double)item[i].forward + (double)item[i].backward;
    return total;
}

/* ---- published ---- */

static int is_described(const struct config *c)
{
    return c->train.attention == ATTENTION_SPARSE && c->train.train_only == TRAIN_ALL;
}

/* Per token, what both conventions agree on: feed-forward, projections (with their norms), MTP, heads. The feed-forward
 * of MTP depths is that of the last layer. */
static double published_rows(const struct config *c)
{
    const struct model_config *m = &c->model;
    double depths = (double)c->mtp.depths, layers = (double)m->num_hidden_layers + depths, h = (double)m->hidden_size;
    double last_dense = m->mlp_layer_types[m->num_hidden_layers - 1] == MLP_DENSE ? depths : 0;
    double dense = (double)dense_layers(m) + last_dense, moe = layers - dense;
    double experts = (double)(m->num_experts_per_tok + m->n_shared_experts) * (double)m->moe_intermediate_size;
    double heads = (double)m->num_attention_heads, q_rank = (double)m->q_lora_rank, kv_rank = (double)m->kv_lora_rank;
    double nope = (double)m->qk_nope_head_dim, rope = (double)m->qk_rope_head_dim, v = (double)m->v_head_dim;
    double feed_forward = 3 * h * ((double)m->intermediate_size * dense + experts * moe);
    double projections = layers * (q_rank * (h + heads * (nope + rope) + 1) + kv_rank * (h + heads * (nope + v) + 1) +
                                   h * rope + heads * v * h);
    double mtp = depths * (3 * h + 2 * h * h), vocabulary = (double)m->vocab_size;

    return 6 * (feed_forward + projections + mtp + h * vocabulary * (1 + depths)) +
           (tv_target(c) ? 2 * h * vocabulary : 0);
}

/* Multiply-adds per token of an indexer's projections. */
static double indexer_projections(const struct model_config *m)
{
    double heads = (double)m->index_n_heads, width = (double)m->index_head_dim, h = (double)m->hidden_size;

    return (double)m->q_lora_rank * heads * width + h * width + h * heads;
}

/* Multiply-adds per pair of the attention of all layers. */
static double attention_core(const struct config *c)
{
    const struct model_config *m = &c->model;

    return (double)(m->num_hidden_layers + c->mtp.depths) * (double)m->num_attention_heads *
           (double)(2 * m->kv_lora_rank + m->qk_rope_head_dim);
}

double flops_megatron_6753(const struct flop_work *w, int64_t *indexers)
{
    const struct config *c = w->config;
    const struct model_config *m = &c->model;
    /* Depths as layers N + 1 .. N + D. */
    int64_t charged = indexers_between(m, 0, m->num_hidden_layers + c->mtp.depths);
    double tokens = (double)w->tokens, squares = (double)w->squares, length = squares / tokens;
    double keys = fmin((double)m->index_topk, floor(length));
    double core_scale = keys * (1 - keys / (2 * length)) / (length / 2);
    double score = (double)m->index_n_heads * (double)m->index_head_dim;

    if (indexers) *indexers = charged;
    if (!is_described(c)) return NAN;
    return tokens * (published_rows(c) + (double)charged * (learns(c) ? 2 : 1) * 2 * indexer_projections(m)) +
           squares * (6 * attention_core(c) / 2 * core_scale + (double)charged * (learns(c) ? 3 : 1) * 2 * score / 2);
}

double flops_bridge(const struct flop_work *w, int64_t *indexers)
{
    const struct config *c = w->config;
    const struct model_config *m = &c->model;
    /* depths are numbered from 1 again */
    int64_t charged = indexers_between(m, 0, m->num_hidden_layers) + indexers_between(m, 0, c->mtp.depths);
    double tokens = (double)w->tokens, length = (double)w->squares / tokens, k = (double)m->index_topk,
           n = (double)charged;
    double pairs = (length + 1) / 2, selected = length <= k ? pairs : k - k * (k - 1) / (2 * length);
    double support = c->indexer_loss.kind == INDEXER_LOSS_DENSE ? pairs : selected;
    double score = (double)m->index_n_heads * (double)(m->index_head_dim + 1);
    double teacher = (double)m->num_attention_heads * (double)(m->kv_lora_rank + m->qk_rope_head_dim);
    double forward = published_rows(c) + 6 * attention_core(c) * selected +
                     2 * n * (indexer_projections(m) + pairs * score);
    double loss = 2 * n * (indexer_projections(m) + support * (2 * score + teacher));

    if (indexers) *indexers = charged;
    if (!is_described(c)) return NAN;
    return tokens * (forward + (learns(c) ? loss : 0));
}
