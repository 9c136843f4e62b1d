/* FLOP counts by the three conventions: the exact items and executions as integers, totals of the published formulas to
 * a relative tolerance, each where the case has it. A shape is a list of model options. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "case.h"
#include "report/flops.h"

/* The formulas are sums of a few dozen products in double. */
static const double published_tolerance = 1e-12;

static void check_integer(struct golden_case *c, const char *where, const char *name, const json_t *expected,
                          uint64_t got)
{
    c->compared++;
    if (!json_is_integer(expected))
        case_fail(c, "%s %s: no integer in the sidecar", where, name);
    else if ((uint64_t)json_integer_value(expected) != got)
        case_fail(c, "%s %s: %llu, expected %lld", where, name, (unsigned long long)got,
                  (long long)json_integer_value(expected));
}

static void check_number(struct golden_case *c, const char *where, const char *name, const json_t *expected, double got)
{
    double value = json_number_value(expected);

    c->compared++;
    if (!json_is_number(expected))
        case_fail(c, "%s %s: no number in the sidecar", where, name);
    else if (!(fabs(got - value) <= published_tolerance * fabs(value)))
        case_fail(c, "%s %s: %.17g, expected %.17g", where, name, got, value);
}

/* ---- the case as a config ---- */

static glm52_status set_shape(struct config *config, const json_t *shape)
{
    const char *name;
    json_t *value;
    char key[128], text[32];

    TRY(config_set(config, "model.rope_theta", "10000")); /* required, and no matter here */
    TRY(config_set(config, "model.num_nextn_predict_layers", "1"));
    json_object_foreach((json_t *)shape, name, value) {
        snprintf(key, sizeof key, "model.%s", name);
        snprintf(text, sizeof text, "%lld", (long long)json_integer_value(value));
        TRY(config_set(config, key, text));
    }
    return GLM52_OK;
}

static glm52_status set_options(struct config *config, const json_t *entry)
{
    const json_t *kl = json_object_get(entry, "kl");
    char depths[32];

    snprintf(depths, sizeof depths, "%lld", (long long)json_integer_value(json_object_get(entry, "mtp_depths")));
    TRY(config_set(config, "mtp.depths", depths));
    TRY(config_set(config, "mtp.share", json_is_true(json_object_get(entry, "mtp_share")) ? "index_kv" : "none"));
    if (json_is_true(json_object_get(entry, "indexer_loss")))
        TRY(config_set(config, "indexer_loss.kind", json_is_string(kl) ? json_string_value(kl) : "sparse"));
    if (json_is_true(json_object_get(entry, "e2e_tv"))) {
        TRY(config_set(config, "mtp.loss", "tv"));
        TRY(config_set(config, "mtp.detach_heads", "true"));
    }
    return config_validate(config);
}

/* ---- comparing ---- */

static void check_items(struct golden_case *c, const char *where, const json_t *items, const struct flop_count *got)
{
    char name[64];

    if (json_object_size(items) != FLOP_ITEMS)
        case_fail(c, "%s: %zu items, the library has %d", where, json_object_size(items), FLOP_ITEMS);
    for (int i = 0; i < FLOP_ITEMS; i++) {
        const json_t *item = json_object_get(items, flop_item_name[i]);
        snprintf(name, sizeof name, "%s.fwd", flop_item_name[i]);
        check_integer(c, where, name, json_object_get(item, "fwd"), got[i].forward);
        snprintf(name, sizeof name, "%s.bwd", flop_item_name[i]);
        check_integer(c, where, name, json_object_get(item, "bwd"), got[i].backward);
    }
}

static void check_exact(struct golden_case *c, const char *where, const json_t *exact, const struct flop_work *w)
{
    struct flop_executions n = flop_executions(w->config);
    struct flop_count item[FLOP_ITEMS];
    uint64_t total = 0, small = 0;

    flops_exact(w, item);
    for (int i = 0; i < FLOP_ITEMS; i++) total += item[i].forward + item[i].backward;
    small = item[FLOP_ROUTER].forward + item[FLOP_ROUTER].backward + item[FLOP_INDEXER_HEAD_SUM].forward +
            item[FLOP_INDEXER_HEAD_SUM].backward;
    check_items(c, where, json_object_get(exact, "items"), item);
    check_integer(c, where, "tokens", json_object_get(exact, "tokens"), w->tokens);
    check_integer(c, where, "pairs_dense", json_object_get(exact, "pairs_dense"), w->pairs);
    check_integer(c, where, "pairs_topk", json_object_get(exact, "pairs_topk"), w->selected_pairs);
    check_integer(c, where, "layers_executed", json_object_get(exact, "layers_executed"), n.layers);
    check_integer(c, where, "moe_executed", json_object_get(exact, "moe_executed"), n.moe);
    check_integer(c, where, "indexer_executions", json_object_get(exact, "indexer_executions"), n.indexers);
    check_integer(c, where, "kv_down_executions", json_object_get(exact, "kv_down_executions"), n.kv_down);
    check_integer(c, where, "total", json_object_get(exact, "total"), total);
    check_integer(c, where, "total_without_router_and_head_sum",
                  json_object_get(exact, "total_without_router_and_head_sum"), total - small);
    check_number(c, where, "total as a double", json_object_get(exact, "total"), flops_exact_total(w));
}

/* A convention that does not know the case's options has no entry. */
static void check_published(struct golden_case *c, const char *where, const json_t *expected, const struct flop_work *w,
                            double (*formula)(const struct flop_work *, int64_t *))
{
    int64_t indexers;
    double total = formula(w, &indexers);

    if (!expected) return;
    check_number(c, where, "total", json_object_get(expected, "total"), total);
    check_number(c, where, "per_token_gflop", json_object_get(expected, "per_token_gflop"),
                 total / (double)w->tokens / 1e9);
    check_integer(c, where, "indexer_layers", json_object_get(expected, "indexer_layers"), (uint64_t)indexers);
}

static void check_entry(struct golden_case *c, size_t index, const json_t *entry, struct config *config)
{
    struct flop_work w = {.config = config};
    const json_t *lengths = json_object_get(entry, "lengths");
    char where[64];

    for (size_t i = 0; i < json_array_size(lengths); i++)
        flop_work_add(&w, (uint64_t)json_integer_value(json_array_get(lengths, i)));
    snprintf(where, sizeof where, "case %zu exact", index);
    check_exact(c, where, json_object_get(entry, "exact"), &w);
    snprintf(where, sizeof where, "case %zu megatron_6753", index);
    check_published(c, where, json_object_get(entry, "megatron_6753"), &w, flops_megatron_6753);
    snprintf(where, sizeof where, "case %zu bridge", index);
    check_published(c, where, json_object_get(entry, "bridge"), &w, flops_bridge);
}

void run_flops(struct golden_case *c)
{
    const json_t *entries = json_object_get(c->sidecar, "cases"), *shapes = json_object_get(c->sidecar, "shapes"),
                 *entry;
    size_t index;

    json_array_foreach((json_t *)entries, index, entry) {
        const char *name = json_string_value(json_object_get(entry, "shape"));
        const json_t *shape = name ? json_object_get(shapes, name) : NULL;
        struct config config;
        if (!shape) {
            case_fail(c, "case %zu: its shape is not among the shapes", index);
            continue;
        }
        glm52_status status = config_init(&config, &c->host);
        if (!status) status = set_shape(&config, shape);
        if (!status) status = set_options(&config, entry);
        if (status)
            case_fail_last(c, name);
        else
            check_entry(c, index, entry, &config);
        config_free(&config);
    }
    printf("  %zu cases, %d numbers compared, %d off\n", json_array_size(entries), c->compared, c->failures);
}
