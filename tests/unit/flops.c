/* FLOP conventions: published values of the released model, and what their golden tables do not reach: stages, layer
 * lists, sharing of the index alone, numbers beyond 64 bits. */
#include <math.h>
#include <string.h>

#include "report/flops.h"
#include "tap.h"

static struct host host;
static struct config config;
static struct flop_work work;

static void set(const char *key, const char *value)
{
    ck_assert_msg(!config_set(&config, key, value), "%s", glm52_error_message(glm52_error_last()));
}

static void run(uint64_t length)
{
    ck_assert_msg(!config_validate(&config), "%s", glm52_error_message(glm52_error_last()));
    work = (struct flop_work){.config = &config};
    flop_work_add(&work, length);
}

static void start(void)
{
    ck_assert(!host_open(&host, NULL));
    ck_assert(!config_init(&config, &host));
    set("model.preset", "glm52");
}

static void finish(void)
{
    config_free(&config);
    ck_assert_uint_eq(host.total, 0);
}

/* GFLOP per token, training.md 7. */
START_TEST(megatron_6753_as_published)
{
    static const struct {
        uint64_t length;
        double none, one, seven;
    } published[] = {{3968, 291.2, 301.1, 362.1}, {4096, 291.8, 301.7, 362.7}, {126976, 339.7, 351.3, 415.0},
                     {131072, 340.7, 352.4, 416.2}, {200000, 358.7, 371.2, 435.9}};

    set("indexer_loss.kind", "sparse");
    for (size_t i = 0; i < sizeof published / sizeof *published; i++) {
        double tokens = (double)published[i].length * 1e9;
        set("mtp.depths", "0");
        run(published[i].length);
        ck_assert_double_eq_tol(flops_megatron_6753(&work, NULL) / tokens, published[i].none, 0.05);
        set("mtp.depths", "1");
        run(published[i].length);
        ck_assert_double_eq_tol(flops_megatron_6753(&work, NULL) / tokens, published[i].one, 0.05);
        set("mtp.depths", "7");
        set("mtp.loss", "tv");
        set("mtp.detach_heads", "true");
        run(published[i].length);
        ck_assert_double_eq_tol(flops_megatron_6753(&work, NULL) / tokens, published[i].seven, 0.05);
        set("mtp.loss", "ce");
    }
}
END_TEST

START_TEST(bridge_as_published)
{
    set("mtp.depths", "1");
    run(4096);
    ck_assert_double_eq_tol(flops_bridge(&work, NULL) / 4096e9, 300.58, 0.0051);
    set("indexer_loss.kind", "sparse");
    run(2048);
    ck_assert_double_eq_tol(flops_bridge(&work, NULL) / 2048e9, 285.949, 0.0005);
    run(4096);
    ck_assert_double_eq_tol(flops_bridge(&work, NULL) / 4096e9, 304.042, 0.0005);
    run(131072);
    ck_assert_double_eq_tol(flops_bridge(&work, NULL) / 131072e9, 332.920, 0.0005);
}
END_TEST

/* MTP depths are numbered on, or from 1 again; they run one indexer where they share it. */
START_TEST(indexers_are_counted_three_ways)
{
    int64_t megatron, bridge;

    set("mtp.depths", "7");
    run(4096);
    flops_megatron_6753(&work, &megatron);
    flops_bridge(&work, &bridge);
    ck_assert_int_eq(megatron, 23);
    ck_assert_int_eq(bridge, 21 + 4);
    ck_assert_uint_eq(flop_executions(&config).indexers, 22);
    set("mtp.share", "none");
    run(4096);
    ck_assert_uint_eq(flop_executions(&config).indexers, 28);
    ck_assert_uint_eq(flop_executions(&config).kv_down, 85);
    set("mtp.share", "index");
    run(4096);
    ck_assert_uint_eq(flop_executions(&config).indexers, 22);
    ck_assert_uint_eq(flop_executions(&config).kv_down, 85);
}
END_TEST

START_TEST(layer_lists_count_as_given)
{
    set("model.num_hidden_layers", "4");
    set("model.first_k_dense_replace", "1");
    run(4096);
    double formula = flops_megatron_6753(&work, NULL);
    set("model.mlp_layer_types", "dense,sparse,sparse,sparse");
    set("model.indexer_types", "full,full,full,shared");
    run(4096);
    ck_assert_double_eq(flops_megatron_6753(&work, NULL), formula);
    set("model.indexer_types", "full,shared,shared,shared");
    run(4096);
    ck_assert_uint_eq(flop_executions(&config).indexers, 1);
    ck_assert_double_lt(flops_megatron_6753(&work, NULL), formula);
}
END_TEST

START_TEST(stages_have_exact_counts_alone)
{
    struct flop_count item[FLOP_ITEMS];
    uint64_t pairs = 4096 * UINT64_C(4097) / 2;

    set("train.attention", "dense");
    run(4096);
    ck_assert(isnan(flops_megatron_6753(&work, NULL)) && isnan(flops_bridge(&work, NULL)));
    flops_exact(&work, item);
    ck_assert_uint_eq(item[FLOP_ATTN_CORE].forward, 2 * 78 * 64 * (256 + 256) * pairs);
    ck_assert_uint_eq(item[FLOP_INDEXER_PROJ].forward + item[FLOP_INDEXER_SCORE].forward, 0); /* nobody selects */

    set("train.train_only", "indexer");
    set("indexer_loss.kind", "dense");
    run(4096);
    ck_assert(isnan(flops_megatron_6753(&work, NULL)) && isnan(flops_bridge(&work, NULL)));
    flops_exact(&work, item);
    for (int i = 0; i < FLOP_ITEMS; i++) {
        int learns = i == FLOP_INDEXER_PROJ || i == FLOP_INDEXER_SCORE || i == FLOP_INDEXER_HEAD_SUM;
        ck_assert_msg(learns == (item[i].backward > 0), "%s", flop_item_name[i]);
    }
    ck_assert_uint_eq(item[FLOP_INDEXER_SCORE].backward, 2 * 2 * 21 * 32 * 128 * pairs);
    ck_assert_uint_eq(item[FLOP_INDEXER_TEACHER_QK].forward, 2 * 21 * 64 * 256 * pairs);
}
END_TEST

START_TEST(beyond_64_bits_the_count_stands_still)
{
    struct flop_count item[FLOP_ITEMS];

    run(UINT64_C(1) << 24);
    for (int i = 0; i < 12; i++) flop_work_add(&work, UINT64_C(1) << 24);
    flops_exact(&work, item);
    ck_assert_uint_eq(item[FLOP_INDEXER_SCORE].forward, UINT64_MAX);
    ck_assert_uint_eq(item[FLOP_MLA_O].forward, 2 * 78 * 64 * 256 * UINT64_C(6144) * 13 << 24);
    ck_assert_double_gt(flops_exact_total(&work), 0x1p64);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("flops");
    TCase *cases = tcase_create("conventions");

    tcase_add_checked_fixture(cases, start, finish);
    tcase_add_test(cases, megatron_6753_as_published);
    tcase_add_test(cases, bridge_as_published);
    tcase_add_test(cases, indexers_are_counted_three_ways);
    tcase_add_test(cases, layer_lists_count_as_given);
    tcase_add_test(cases, stages_have_exact_counts_alone);
    tcase_add_test(cases, beyond_64_bits_the_count_stands_still);
    suite_add_tcase(suite, cases);
    return run_tap(suite);
}
