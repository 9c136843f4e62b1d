/* The exact FLOP convention against a dry run of the step, term by term: what a device is asked to do is what the
 * formula says, but for the differences that docs/accounting.md lists and this file computes. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "api/object.h"
#include "report/flops.h"
#include "small/small.h"
#include "train/dry_run.h"
#include "unit/scratch.h"
#include "unit/tap.h"

#define CHECKED(call) ck_assert_msg(!(call), "%s", glm52_error_message(glm52_error_last()))

/* Sums of products below 2^53 are exact; those of the full model round a few dozen times. */
static const double rounding = 1e-13;

/* No two dimensions alike; layers dense, MoE, MoE, dense, MoE; indexers full, shared, full, shared, full. */
static const char odd[] =
    "model.vocab_size=37 model.hidden_size=20 model.num_hidden_layers=5 model.intermediate_size=28 "
    "model.moe_intermediate_size=12 model.n_routed_experts=6 model.num_experts_per_tok=2 model.n_shared_experts=3 "
    "model.num_attention_heads=3 model.q_lora_rank=14 model.kv_lora_rank=10 model.qk_nope_head_dim=6 "
    "model.qk_rope_head_dim=4 model.v_head_dim=7 model.index_n_heads=2 model.index_head_dim=8 model.index_topk=5 "
    "model.mlp_layer_types=dense,sparse,sparse,dense,sparse model.indexer_types=full,shared,full,shared,full "
    "model.rope_theta=100 model.num_nextn_predict_layers=1 data.pack_tokens=64 train.microbatch_tokens=64";
static const int32_t odd_documents[] = {7, 1, 23, 2, 11, 0};

static const char full[] = "model.preset=glm52 data.pack_tokens=8192 train.microbatch_tokens=8192";
static const int32_t full_documents[] = {5000, 300, 2048, 3, 0};

/* ---- a step that is counted ---- */

static struct host host;
static struct config config;
static struct flop_work work;
static struct tally forward, whole; /* a forward pass; a training step without its update */

static void set_all(const char *settings)
{
    char copy[2048], *rest = copy;

    snprintf(copy, sizeof copy, "%s", settings);
    for (char *one; (one = strtok_r(rest, " ", &rest));) {
        char *equals = strchr(one, '=');
        *equals = 0;
        CHECKED(config_set(&config, one, equals + 1));
    }
}

static void fill(struct pack *p, const int32_t *lengths)
{
    int32_t rows = 0, documents = 0;

    CHECKED(pack_reserve(p, config.train.microbatch_tokens, 16));
    for (p->cu_seqlens[0] = 0; lengths[documents]; p->cu_seqlens[++documents] = rows) {
        rows += lengths[documents];
        flop_work_add(&work, (uint64_t)lengths[documents]);
    }
    p->rows = rows;
    p->documents = documents;
    for (int32_t t = 0; t < rows; t++) p->token[t] = 0, p->mask[t] = 1;
    pack_default_labels(p);
}

static void count_step(const int32_t *lengths)
{
    struct stream s;
    struct model model;
    struct optimizer optimizer;
    struct step step;
    struct pack pack;
    double loss;

    CHECKED(stream_open_meta(&s, &host));
    CHECKED(config_validate(&config));
    work = (struct flop_work){.config = &config};
    pack_init(&pack, &host);
    fill(&pack, lengths);
    CHECKED(model_open(&s, &config, &model));
    CHECKED(optimizer_open(&model, &config, &optimizer));
    CHECKED(step_open(&model, &optimizer, &config, &step));
    memset(&forward, 0, sizeof forward);
    memset(&whole, 0, sizeof whole);
    s.tally = &forward;
    CHECKED(step_evaluate(&step, (const struct pack *const[]){&pack}, 1, &loss));
    s.tally = &whole;
    CHECKED(step_gradients(&step, (const struct pack *const[]){&pack}, 1));
    step_close(&step);
    optimizer_close(&optimizer);
    model_close(&model);
    pack_free(&pack);
    stream_close(&s);
}

/* ---- from rows of the tally to items ---- */

static const struct {
    const char *label;
    enum flop_item item;
} labels[] = {
    {"mlp", FLOP_MLP_DENSE},
    {"moe.experts", FLOP_MOE_ROUTED},
    {"moe.shared", FLOP_MOE_SHARED},
    {"moe.router", FLOP_ROUTER},
    {"mla.q_a", FLOP_MLA_Q_DOWN},
    {"mla.q_b", FLOP_MLA_Q_UP},
    {"mla.kv_a", FLOP_MLA_KV_DOWN},
    {"mla.absorb", FLOP_MLA_KV_UP},   /* on queries, sparse attention */
    {"mla.unabsorb", FLOP_MLA_KV_UP}, /* on outputs */
    {"mla.kv_b", FLOP_MLA_KV_UP},     /* on keys and values, dense attention */
    {"mla.o", FLOP_MLA_O},
    {"mla.attention", FLOP_ATTN_CORE},
    {"input", FLOP_MTP_EH_PROJ},
    {"head", FLOP_LOGITS},
    {"indexer.project", FLOP_INDEXER_PROJ},
    {"indexer.select", FLOP_INDEXER_SCORE},
    {"indexer.loss", FLOP_INDEXER_SCORE},
    {"indexer.target", FLOP_INDEXER_TEACHER_QK},
};

/* Every row that has FLOPs belongs to an item, those of MTP depths to the same ones. */
static void collect(const struct tally *tally, double item[FLOP_ITEMS])
{
    size_t at;

    memset(item, 0, FLOP_ITEMS * sizeof *item);
    for (int i = 0; i < tally->rows; i++) {
        const struct tally_row *row = &tally->row[i];
        if (row->flops == 0) continue;
        const char *label = strncmp(row->label, "mtp.", 4) ? row->label : row->label + 4;
        for (at = 0; at < sizeof labels / sizeof *labels && strcmp(labels[at].label, label); at++) continue;
        ck_assert_msg(at < sizeof labels / sizeof *labels, "%s %s belongs to no item", row->label, row->operation);
        item[labels[at].item] += row->flops;
    }
}

/* ---- what the convention and the execution count differently ---- */

static double visible(uint64_t length, int selected)
{
    double l = (double)length, k = selected ? fmin(l, (double)config.model.index_topk) : l;

    return k * (k + 1) / 2 + (l - k) * k;
}

/* (query, key) pairs that depth d does not visit: its last d + 1 rows of each document have no input token. */
static double unvisited(const int32_t *lengths, int d, int selected)
{
    double pairs = 0;

    for (; *lengths; lengths++) {
        int32_t left = *lengths > d + 1 ? *lengths - d - 1 : 0;
        pairs += visible((uint64_t)*lengths, selected) - visible((uint64_t)left, selected);
    }
    return pairs;
}

/* Pairs over all executions, as they are visited: of the attention, of what the indexers score, of their loss. */
struct visits {
    double attention, scored, support;
};

static struct visits count_visits(const int32_t *lengths, const struct flop_executions *n)
{
    int dense = config.train.attention == ATTENTION_DENSE, own = config.mtp.share == MTP_SHARE_NONE;
    int sparse_loss = config.indexer_loss.kind == INDEXER_LOSS_SPARSE;
    double pairs = (double)work.pairs, selected = (double)work.selected_pairs;
    struct visits v = {(double)n->layers * (dense ? pairs : selected), (double)n->indexers * pairs,
                       (double)n->indexers * (sparse_loss ? selected : pairs)};

    for (int d = 0; d < config.mtp.depths; d++) {
        v.attention -= unvisited(lengths, d, !dense);
        if ((d && !own) || !n->indexers) continue;
        v.scored -= unvisited(lengths, d, 0);
        v.support -= unvisited(lengths, d, sparse_loss);
    }
    return v;
}

/* Sets what the dry run is expected to count: forward[], and forward with backward in total[]. */
static void expect(const int32_t *lengths, double fwd[FLOP_ITEMS], double total[FLOP_ITEMS])
{
    const struct model_config *m = &config.model;
    struct flop_count exact[FLOP_ITEMS];
    struct flop_executions n = flop_executions(&config);
    struct visits v = count_visits(lengths, &n);
    int dense = config.train.attention == ATTENTION_DENSE, all = config.train.train_only == TRAIN_ALL;
    int kind = config.indexer_loss.kind;
    double heads = (double)m->num_attention_heads, rank = (double)m->kv_lora_rank, rope = (double)m->qk_rope_head_dim;
    double key = dense ? (double)m->qk_nope_head_dim + rope : rank + rope, value = dense ? (double)m->v_head_dim : rank;
    double score = (double)(m->index_n_heads * m->index_head_dim), depths = (double)config.mtp.depths;
    double head = 2 * (double)m->hidden_size * (double)m->vocab_size * (double)work.tokens;

    flops_exact(&work, exact);
    for (int i = 0; i < FLOP_ITEMS; i++) {
        fwd[i] = (double)exact[i].forward;
        total[i] = fwd[i] + (double)exact[i].backward;
    }
    /* Rows of MTP depths without an input token see nothing; backward makes the attention's scores anew. */
    fwd[FLOP_ATTN_CORE] = 2 * heads * (key + value) * v.attention;
    total[FLOP_ATTN_CORE] = fwd[FLOP_ATTN_CORE] + (all ? 2 * heads * (3 * key + 2 * value) * v.attention : 0);
    /* Selection scores all pairs; the loss scores those of its support, anew if a selection did before, and has two
     * gradients; over all keys it also makes the teacher's logits. Sums over heads are no matrix work. */
    fwd[FLOP_INDEXER_SCORE] = dense ? 0 : 2 * score * v.scored;
    total[FLOP_INDEXER_SCORE] = fwd[FLOP_INDEXER_SCORE] + (kind != INDEXER_LOSS_NONE ? 3 * 2 * score * v.support : 0);
    if (kind == INDEXER_LOSS_DENSE) total[FLOP_INDEXER_SCORE] += 2 * heads * key * v.support;
    fwd[FLOP_INDEXER_HEAD_SUM] = total[FLOP_INDEXER_HEAD_SUM] = 0;
    /* Over selected keys the attention's backward leaves the teacher behind; with a frozen trunk its logits are
     * made. */
    fwd[FLOP_INDEXER_TEACHER_QK] = 0;
    total[FLOP_INDEXER_TEACHER_QK] = kind == INDEXER_LOSS_SPARSE && !all ? 2 * heads * key * v.support : 0;
    /* TV: the target's logits are those of the trunk's own loss. Detached heads have no gradient of their weights. */
    total[FLOP_LOGITS] -= all && config.mtp.detach_heads ? depths * head : 0;
    fwd[FLOP_TV_TARGET_LOGITS] = total[FLOP_TV_TARGET_LOGITS] = 0;
    /* Sparse attention absorbs and unabsorbs once more. */
    if (config.train.recompute == RECOMPUTE_LIGHT && !dense) total[FLOP_MLA_KV_UP] += fwd[FLOP_MLA_KV_UP];
    if (config.train.recompute != RECOMPUTE_LAYERS) return;
    /* The layers' forward runs again, but for the selection, and for the projections that only it needs. */
    for (int i = 0; i < FLOP_ITEMS; i++)
        if (i != FLOP_LOGITS && i != FLOP_MTP_EH_PROJ && i != FLOP_INDEXER_SCORE &&
            (i != FLOP_INDEXER_PROJ || kind != INDEXER_LOSS_NONE))
            total[i] += fwd[i];
}

static void compare(const char *name, double got, double expected)
{
    ck_assert_msg(
        fabs(got - expected) <= rounding * expected,
        "%s: %.17g, expected %.17g (depths %d, share %d, mtp loss %d, detached %d, kl %d, attention %d, only %d, "
        "recompute %d)",
        name, got, expected, (int)config.mtp.depths, config.mtp.share, config.mtp.loss, config.mtp.detach_heads,
        config.indexer_loss.kind, config.train.attention, config.train.train_only, config.train.recompute);
}

static void check_step(const int32_t *lengths)
{
    double got[FLOP_ITEMS], expected_forward[FLOP_ITEMS], expected[FLOP_ITEMS];

    count_step(lengths);
    expect(lengths, expected_forward, expected);
    collect(&forward, got);
    for (int i = 0; i < FLOP_ITEMS; i++) compare(flop_item_name[i], got[i], expected_forward[i]);
    collect(&whole, got);
    for (int i = 0; i < FLOP_ITEMS; i++) compare(flop_item_name[i], got[i], expected[i]);
}

static void begin(const char *shape)
{
    ck_assert(!host_open(&host, NULL));
    CHECKED(config_init(&config, &host));
    set_all(shape);
}

static void end(void)
{
    config_free(&config);
    ck_assert_uint_eq(host.total, 0);
}

/* ---- cases ---- */

/* MTP depths, what they share and how they learn, with what the config says otherwise. */
static void check_depths(const int32_t *lengths)
{
    static const int depths[] = {0, 1, 3, 7};
    static const struct {
        int loss, detach;
    } losses[] = {{MTP_LOSS_CE, 0}, {MTP_LOSS_CE, 1}, {MTP_LOSS_TV, 1}};

    for (size_t d = 0; d < sizeof depths / sizeof *depths; d++)
        for (int share = MTP_SHARE_NONE; share <= MTP_SHARE_INDEX_KV; share++)
            for (size_t l = 0; l < sizeof losses / sizeof *losses; l++) {
                if (!depths[d] && (share || l)) continue;
                config.mtp.depths = depths[d];
                config.mtp.share = share;
                config.mtp.loss = losses[l].loss;
                config.mtp.detach_heads = losses[l].detach;
                check_step(lengths);
            }
}

START_TEST(sparse_training_of_an_odd_shape)
{
    begin(odd);
    for (int kl = INDEXER_LOSS_NONE; kl <= INDEXER_LOSS_DENSE; kl++)
        for (int recompute = RECOMPUTE_NONE; recompute <= RECOMPUTE_LAYERS; recompute++) {
            config.indexer_loss.kind = kl;
            config.train.recompute = recompute;
            check_depths(odd_documents);
        }
    end();
}
END_TEST

START_TEST(dense_training_of_an_odd_shape)
{
    begin(odd);
    set_all("train.attention=dense");
    check_depths(odd_documents);
    set_all("indexer_loss.kind=dense");
    check_depths(odd_documents);
    set_all("train.recompute=layers");
    check_depths(odd_documents);
    end();
}
END_TEST

START_TEST(the_indexer_alone)
{
    begin(odd);
    set_all("train.train_only=indexer indexer_loss.kind=dense train.attention=dense");
    check_depths(odd_documents);
    set_all("train.attention=sparse");
    check_depths(odd_documents);
    set_all("indexer_loss.kind=sparse");
    check_depths(odd_documents);
    end();
}
END_TEST

/* ---- which operations a teacher takes ---- */

static uint64_t calls(const char *operation)
{
    uint64_t sum = 0;

    for (int i = 0; i < whole.rows; i++)
        if (!strcmp(whole.row[i].operation, operation)) sum += whole.row[i].calls;
    return sum;
}

static double bytes(const struct tally *tally, const char *operation)
{
    double sum = 0;

    for (int i = 0; i < tally->rows; i++)
        if (!strcmp(tally->row[i].operation, operation)) sum += tally->row[i].bytes;
    return sum;
}

/* What the dense loss of one layer moves; less without an lse. */
static double dense_loss_bytes(int dense, int with_lse)
{
    const struct model_config *m = &config.model;
    int64_t rope = m->qk_rope_head_dim, heads = m->num_attention_heads;
    struct indexer indexer = {.rows = (int64_t)work.tokens, .keys = (int64_t)work.tokens,
                              .heads = (int32_t)m->index_n_heads, .width = (int32_t)m->index_head_dim,
                              .type = GLM52_DTYPE_F32};
    struct teacher teacher = {(int32_t)heads, (int32_t)(dense ? heads : 1),
                              (int32_t)(dense ? m->qk_nope_head_dim + rope : m->kv_lora_rank + rope), 1};
    static struct tally one;
    struct stream s;
    float lse = 0;

    CHECKED(stream_open_meta(&s, &host));
    memset(&one, 0, sizeof one);
    s.tally = &one;
    s.label = "one";
    s.ops->index_kl_dense(&s, &indexer, &teacher, NULL, NULL, NULL, NULL, NULL, with_lse ? &lse : NULL, NULL, NULL,
                          NULL, NULL, NULL, NULL, NULL, NULL);
    stream_close(&s);
    return bytes(&one, "index_kl_dense");
}

/* The table of docs/accounting.md, row by row. */
START_TEST(a_teacher_takes_what_the_attention_left)
{
    static const struct {
        const char *settings;
        int dense, dense_loss, alone;
    } stages[] = {
        {"train.attention=sparse indexer_loss.kind=sparse train.train_only=all", 0, 0, 0},
        {"train.attention=sparse indexer_loss.kind=sparse train.train_only=indexer", 0, 0, 1},
        {"train.attention=sparse indexer_loss.kind=dense train.train_only=all", 0, 1, 0},
        {"train.attention=sparse indexer_loss.kind=dense train.train_only=indexer", 0, 1, 1},
        {"train.attention=dense indexer_loss.kind=dense train.train_only=all", 1, 1, 0},
        {"train.attention=dense indexer_loss.kind=dense train.train_only=indexer", 1, 1, 1},
    };

    begin(odd);
    for (size_t i = 0; i < sizeof stages / sizeof *stages; i++) {
        int dense = stages[i].dense, dense_loss = stages[i].dense_loss, alone = stages[i].alone;

        set_all(stages[i].settings);
        count_step(odd_documents);
        struct flop_executions n = flop_executions(&config);
        uint64_t layers = (uint64_t)n.layers, indexers = (uint64_t)n.indexers;
        ck_assert_uint_eq(calls("sparse_mla_forward"), dense ? 0 : layers);
        ck_assert_uint_eq(calls("sparse_mla_backward"), dense || alone ? 0 : layers);
        ck_assert_uint_eq(calls("sparse_mla_target"), !dense_loss && alone ? indexers : 0);
        ck_assert_uint_eq(calls("dense_attention_forward"), dense ? layers : 0);
        ck_assert_uint_eq(calls("dense_attention_backward"), dense && !alone ? layers : 0);
        ck_assert_uint_eq(calls("index_kl_selected"), dense_loss ? 0 : indexers);
        ck_assert_uint_eq(calls("index_kl_dense"), dense_loss ? indexers : 0);
        if (dense_loss) /* dense attention has left the lse of all keys */
            ck_assert_double_eq(bytes(&whole, "index_kl_dense"), (double)indexers * dense_loss_bytes(dense, dense));
        ck_assert_double_gt(dense_loss_bytes(dense, 1), dense_loss_bytes(dense, 0));
    }
    end();
}
END_TEST

START_TEST(the_released_model)
{
    begin(full);
    check_depths(full_documents);
    set_all("indexer_loss.kind=sparse");
    check_depths(full_documents);
    end();
}
END_TEST

/* Where nothing is by design another number, the dry run is the convention. */
START_TEST(a_dry_run_of_the_released_model)
{
    static struct dry_run plan;
    static const int32_t document[] = {4096, 0};
    struct stream like;
    double key = 512 + 64, expected;

    begin("model.preset=glm52 data.pack_tokens=4096 train.microbatch_tokens=4096 indexer_loss.kind=sparse");
    count_step(document);
    CHECKED(stream_open_meta(&like, &host));
    CHECKED(dry_run(&like, &config, &plan));
    stream_close(&like);
    ck_assert_double_eq(tally_flops(&plan.tally), tally_flops(&whole)); /* AdamW has no matrix work */
    expected = flops_exact_total(&work);
    expected += 2 * 64 * key * 78 * (double)work.selected_pairs;       /* backward makes scores anew */
    expected -= 2 * 64 * key * 21 * (double)work.selected_pairs;       /* ... which are the teacher's */
    expected += 2 * 32 * 128.0 * 21 * (double)work.selected_pairs;     /* the loss scores its support anew */
    expected -= 2 * 32 * 21.0 * (double)work.pairs + 4 * 32 * 21.0 * (double)work.selected_pairs; /* sums over heads */
    compare("all", tally_flops(&plan.tally), expected);
    end();
}
END_TEST

/* ---- metrics of a step ---- */

static double metric(struct small *s, const char *name)
{
    double value;

    OK(glm52_step_metric(s->step, name, &value));
    return value;
}

/* One update over two packs, and what the conventions say about their documents. */
static void train(struct small *s)
{
    static const struct document documents[] = {{7, 1}, {23, 2}, {2, 3}};
    glm52_batch *packs[] = {small_batch(s, 2, documents), small_batch(s, 1, documents + 2)};

    small_train(s, packs, 2);
    work = (struct flop_work){.config = &s->model->model.config};
    for (int i = 0; i < 3; i++) flop_work_add(&work, (uint64_t)documents[i].length);
    for (int i = 0; i < 2; i++) glm52_batch_unref(&packs[i]);
}

static void check_rate(struct small *s, const char *name, double flops)
{
    double counted = metric(s, name) * 1e12 * metric(s, "seconds");

    ck_assert_msg(fabs(counted - flops) <= 1e-12 * flops, "%s: %.17g, expected %.17g", name, counted, flops);
}

START_TEST(rates_are_of_the_documents_trained_on)
{
    struct small s;

    small_open(&s, NULL, "train.microbatches=2 report.peak_tflops=0.25 indexer_loss.kind=sparse "
                         "model.num_nextn_predict_layers=1 mtp.depths=2");
    train(&s);
    check_rate(&s, "tflops_exact", flops_exact_total(&work));
    check_rate(&s, "tflops_megatron_6753", flops_megatron_6753(&work, NULL));
    ck_assert_double_eq(metric(&s, "mfu_exact"), metric(&s, "tflops_exact") / 0.25);
    ck_assert_double_eq(metric(&s, "mfu_megatron_6753"), metric(&s, "tflops_megatron_6753") / 0.25);
    metric(&s, "grad_norm.embedding"); /* which follows them */
    small_close(&s);
}
END_TEST

START_TEST(without_a_peak_there_is_no_utilisation)
{
    struct small s;
    double value;

    small_open(&s, NULL, "train.microbatches=2");
    train(&s);
    ck_assert_double_gt(metric(&s, "tflops_exact"), 0);
    REFUSED(glm52_step_metric(s.step, "mfu_exact", &value), GLM52_E_INVALID);
    for (uint32_t i = 0; glm52_step_metric_name(s.step, i); i++)
        ck_assert_int_ne(strncmp(glm52_step_metric_name(s.step, i), "mfu", 3), 0);
    metric(&s, "grad_norm.embedding");
    small_close(&s);
}
END_TEST

START_TEST(a_formula_that_does_not_know_the_stage_says_nothing)
{
    char settings[256], path[256], *text;
    struct small s;
    size_t bytes;

    snprintf(settings, sizeof settings, "train.microbatches=2 train.attention=dense report.peak_tflops=1 out=%s",
             scratch_make());
    small_open(&s, NULL, settings);
    train(&s);
    check_rate(&s, "tflops_exact", flops_exact_total(&work));
    ck_assert(isnan(metric(&s, "tflops_megatron_6753")) && isnan(metric(&s, "mfu_megatron_6753")));
    snprintf(path, sizeof path, "%s/metrics.jsonl", strstr(settings, "out=") + 4);
    CHECKED(file_read_all(&s.context->host, path, 1 << 20, &text, &bytes));
    ck_assert_ptr_nonnull(strstr(text, "\"tflops_megatron_6753\":null"));
    ck_assert_ptr_nonnull(strstr(text, "\"mfu_megatron_6753\":null"));
    ck_assert(strstr(text, "\"mfu_exact\":") && !strstr(text, "\"mfu_exact\":null"));
    host_free(&s.context->host, text, bytes + 1, MEMORY_HOST);
    small_close(&s);
    scratch_remove();
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("model");
    TCase *terms = tcase_create("flops"), *metrics = tcase_create("metrics");

    tcase_set_timeout(terms, 120);
    tcase_add_test(terms, sparse_training_of_an_odd_shape);
    tcase_add_test(terms, dense_training_of_an_odd_shape);
    tcase_add_test(terms, the_indexer_alone);
    tcase_add_test(terms, a_teacher_takes_what_the_attention_left);
    tcase_add_test(terms, the_released_model);
    tcase_add_test(terms, a_dry_run_of_the_released_model);
    tcase_add_test(metrics, rates_are_of_the_documents_trained_on);
    tcase_add_test(metrics, without_a_peak_there_is_no_utilisation);
    tcase_add_test(metrics, a_formula_that_does_not_know_the_stage_says_nothing);
    suite_add_tcase(suite, terms);
    suite_add_tcase(suite, metrics);
    return run_tap(suite);
}
