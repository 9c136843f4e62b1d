/* What a plan says of sharing: MTP depths after the first run neither key projection nor indexer, and the end-to-end
 * loss needs no vocabulary-wide memory of its own. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "small/small.h"
#include "unit/tap.h"

enum { ROWS = 256 };

struct rows {
    glm52_plan_row row[ROWS];
    char name[ROWS][96];
    int count;
};

static void plan(const char *settings, struct rows *r)
{
    glm52_context_options options = {.struct_size = sizeof options, .device = "meta", .threads = 1};
    struct small s;

    small_open(&s, &options, settings);
    for (r->count = 0; r->count < ROWS; r->count++) {
        glm52_plan_row *row = &r->row[r->count];
        row->struct_size = sizeof *row;
        if (glm52_step_plan(s.step, (uint32_t)r->count, row)) break;
        snprintf(r->name[r->count], sizeof r->name[0], "%s", row->name); /* lent until the next call */
    }
    ck_assert_int_lt(r->count, ROWS);
    small_close(&s);
}

static const glm52_plan_row *find(const struct rows *r, const char *name)
{
    for (int i = 0; i < r->count; i++)
        if (!strcmp(r->name[i], name)) return &r->row[i];
    return NULL;
}

#define MTP "model.num_nextn_predict_layers=1 indexer_loss.kind=sparse "

static void check_calls(const char *one, const char *seven, const char *name, int same)
{
    struct rows a, b;

    plan(one, &a);
    plan(seven, &b);
    const glm52_plan_row *x = find(&a, name), *y = find(&b, name);
    ck_assert_msg(x && y, "the plan has no row %s", name);
    ck_assert_msg(same == (x->calls == y->calls), "%s: %llu calls with 1 depth, %llu with 7", name,
                  (unsigned long long)x->calls, (unsigned long long)y->calls);
}

START_TEST(later_depths_run_no_keys_indexer_or_its_loss)
{
    static const char *const spared[] = {"mtp.mla.kv_a gemm", "mtp.mla.kv_a latent_forward",
                                         "mtp.mla.kv_a latent_backward", "mtp.indexer.project gemm",
                                         "mtp.indexer.select index_select", "mtp.indexer.loss index_kl_selected"};

    for (size_t i = 0; i < sizeof spared / sizeof *spared; i++) {
        check_calls(MTP "mtp.depths=1", MTP "mtp.depths=7 mtp.share=index_kv", spared[i], 1);
        check_calls(MTP "mtp.depths=1", MTP "mtp.depths=7 mtp.share=none", spared[i], 0);
    }
    check_calls(MTP "mtp.depths=1", MTP "mtp.depths=7 mtp.share=index", "mtp.indexer.select index_select", 1);
    check_calls(MTP "mtp.depths=1", MTP "mtp.depths=7 mtp.share=index", "mtp.mla.kv_a gemm", 0);
    check_calls(MTP "mtp.depths=1", MTP "mtp.depths=7 mtp.share=index_kv", "mtp.mla.attention sparse_mla_forward", 0);
}
END_TEST

/* Preset bench, with one MTP layer. */
static double peak_of_bench(const char *settings)
{
    glm52_context_options options = {.struct_size = sizeof options, .device = "meta", .threads = 2};
    glm52_plan_row row = {.struct_size = sizeof row};
    struct small s = {0};
    double peak = 0;

    OK(glm52_context_create(&options, &s.context));
    OK(glm52_config_create(s.context, &s.config));
    small_set(s.config,
              "model.preset=bench model.num_nextn_predict_layers=1 train.microbatch_tokens=4096 data.pack_tokens=4096 "
              "mtp.detach_heads=true");
    small_set(s.config, settings);
    OK(glm52_model_create(s.context, s.config, &s.model));
    OK(glm52_optimizer_create(s.model, NULL, &s.optimizer));
    OK(glm52_step_create(s.model, s.optimizer, NULL, &s.step));
    for (uint32_t i = 0; !glm52_step_plan(s.step, i, &row); i++)
        if (!strcmp(row.name, "peak")) peak = row.amount;
    small_close(&s);
    return peak;
}

START_TEST(total_variation_needs_no_more_memory_than_cross_entropy)
{
    static const char *const depths[] = {"mtp.depths=1", "mtp.depths=3", "mtp.depths=7"};

    for (size_t i = 0; i < sizeof depths / sizeof *depths; i++) {
        char tv[64];
        snprintf(tv, sizeof tv, "%s mtp.loss=tv", depths[i]);
        double a = peak_of_bench(depths[i]), b = peak_of_bench(tv);
        ck_assert_msg(a > 1e8 && fabs(b - a) <= 0.02 * a, "%s: %.0f bytes, %.0f by cross-entropy", depths[i], b, a);
    }
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("model");
    TCase *cases = tcase_create("sharing");

    tcase_set_timeout(cases, 120);
    tcase_add_test(cases, later_depths_run_no_keys_indexer_or_its_loss);
    tcase_add_test(cases, total_variation_needs_no_more_memory_than_cross_entropy);
    suite_add_tcase(suite, cases);
    return run_tap(suite);
}
