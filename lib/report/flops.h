/* How many FLOPs a training step is worth, by three conventions (docs/accounting.md): closed formulas of the config and
 * of the lengths of the documents. What a device really did is the tally's matter (ops/tally.h). A multiply-add is two;
 * forward and backward; recomputation and the optimizer count nothing. */
#ifndef GLM52_REPORT_FLOPS_H
#define GLM52_REPORT_FLOPS_H

#include "config/config.h"

/* What is run over which documents. */
struct flop_work {
    const struct config *config; /* validated */
    uint64_t tokens, squares;    /* sums over documents of L and L^2 */
    uint64_t pairs;              /* visible (query, key) pairs */
    uint64_t selected_pairs;     /* of at most model.index_topk keys per query */
};

void flop_work_add(struct flop_work *w, uint64_t length); /* one more document */

/* ---- exact: what the equations need, term by term ---- */

/* How often parts run in one pass over a document. */
struct flop_executions {
    uint64_t layers, dense, moe; /* decoder layers and MTP depths; of these, with each feed-forward */
    uint64_t indexers, kv_down;  /* that run an indexer, that project keys */
};

struct flop_executions flop_executions(const struct config *c);

enum flop_item {
    FLOP_MLP_DENSE, FLOP_MOE_ROUTED, FLOP_MOE_SHARED, FLOP_ROUTER,
    FLOP_MLA_Q_DOWN, FLOP_MLA_Q_UP, FLOP_MLA_KV_DOWN, FLOP_MLA_KV_UP, FLOP_MLA_O, FLOP_ATTN_CORE,
    FLOP_MTP_EH_PROJ, FLOP_LOGITS, FLOP_TV_TARGET_LOGITS,
    FLOP_INDEXER_PROJ, FLOP_INDEXER_SCORE, FLOP_INDEXER_HEAD_SUM, FLOP_INDEXER_TEACHER_QK,
    FLOP_ITEMS
};

extern const char *const flop_item_name[FLOP_ITEMS];

/* Exact below 2^64, which no step reaches that a machine can run; UINT64_MAX from there on. */
struct flop_count {
    uint64_t forward, backward;
};

/* Every stage: attention over selected or all keys, everything trained or the indexer alone. */
void flops_exact(const struct flop_work *w, struct flop_count item[FLOP_ITEMS]);
double flops_exact_total(const struct flop_work *w);

/* ---- published: totals from tokens and squares alone ---- */

/* They describe training of everything with sparse attention; NAN in other stages. Documents count by their mean
 * length squares / tokens. indexers, unless NULL: how many layers they charge with an indexer. */
double flops_megatron_6753(const struct flop_work *w, int64_t *indexers);
double flops_bridge(const struct flop_work *w, int64_t *indexers);

#endif
