/* Stages: what each trains, and that going on in place and leaving and coming back are one and the same. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/dtype.h"
#include "small/small.h"
#include "unit/scratch.h"
#include "unit/tap.h"

#define COMMON                                                                                                 \
    "model.num_nextn_predict_layers=1 data.pack_tokens=64 train.microbatch_tokens=64 optim.policy=glm5 optim.lr=1e-2 " \
    "optim.warmup=2 train.steps=6 moe.bias_update_rate=0.01 "
#define DENSE COMMON "train.stage=one train.attention=dense mtp.depths=2 "
#define WARMUP \
    COMMON "train.stage=two train.attention=dense train.train_only=indexer indexer_loss.kind=dense mtp.depths=2 "
#define SPARSE COMMON "train.stage=three train.attention=sparse indexer_loss.kind=sparse mtp.depths=2 "
#define NARROW "precision.params=bf16 precision.gradients=bf16 precision.moments=bf16 precision.masters=false "
#define RL COMMON "moe.bias_update_rate=0 train.stage=four train.rl_safe=true "

static const char *const stage[] = {DENSE, WARMUP, SPARSE, RL};
enum { STAGES = 4, STEPS = 3 };

static const struct document documents[] = {{21, 1}, {16, 2}, {1, 3}};

static void train(struct small *s, double loss[STEPS])
{
    glm52_batch *batch = small_batch(s, 3, documents);

    for (int i = 0; i < STEPS; i++) loss[i] = small_train(s, &batch, 1);
    glm52_batch_unref(&batch);
}

static void next_stage(struct small *s, const char *settings)
{
    glm52_config *config = NULL;

    OK(glm52_config_create(s->context, &config));
    small_shape(config);
    small_set(config, settings);
    OK(glm52_step_set_stage(s->step, config));
    glm52_config_unref(&config);
}

static void check_boundary(int from, const char *more)
{
    char before[1024], after[1024];
    const char *directory = scratch_make();
    double stayed[STEPS], left[STEPS];
    struct small s, again;

    snprintf(before, sizeof before, "%s %s", stage[from], more);
    snprintf(after, sizeof after, "%s %s", stage[from + 1], more);
    small_open(&s, NULL, before);
    train(&s, stayed);
    OK(glm52_step_save(s.step, directory));
    next_stage(&s, after);
    train(&s, stayed);
    struct snapshot here = small_snapshot(&s, VALUES);

    small_open(&again, NULL, after);
    OK(glm52_step_resume(again.step, directory, NULL));
    train(&again, left);
    struct snapshot there = small_snapshot(&again, VALUES);
    for (int i = 0; i < STEPS; i++)
        ck_assert_msg(stayed[i] == left[i], "loss %d: %.17g, not %.17g", i, left[i], stayed[i]);
    check_same(&s, &here, &there);
    double step[2];
    OK(glm52_step_metric(s.step, "step", &step[0]));
    OK(glm52_step_metric(again.step, "step", &step[1]));
    ck_assert(step[0] == 2 * STEPS && step[1] == 2 * STEPS);
    snapshot_free(&here);
    snapshot_free(&there);
    small_close(&again);
    small_close(&s);
    scratch_remove();
}

START_TEST(from_dense_to_warmup)
{
    check_boundary(0, "");
}
END_TEST

START_TEST(from_warmup_to_sparse)
{
    check_boundary(1, "");
}
END_TEST

START_TEST(from_sparse_to_rl)
{
    check_boundary(2, "");
    check_boundary(1, "precision.params=bf16");
    check_boundary(1, NARROW);
}
END_TEST

START_TEST(in_a_warmup_only_indexers_move)
{
    struct small s;
    double loss[STEPS];

    small_open(&s, NULL, WARMUP);
    struct snapshot before = small_snapshot(&s, VALUES);
    train(&s, loss);
    struct snapshot after = small_snapshot(&s, VALUES);
    int moved = 0;
    for (uint32_t i = 0; i < before.parameters; i++) {
        glm52_parameter_info p = {.struct_size = sizeof p};
        OK(glm52_model_parameter(s.model, i, &p));
        int same = !memcmp(before.at + before.offset[i], after.at + after.offset[i],
                           (before.offset[i + 1] - before.offset[i]) * sizeof(float));
        int indexer = strstr(p.name, ".indexer.") != NULL;
        ck_assert_msg(indexer || same, "%s moved", p.name);
        ck_assert_msg(indexer == (p.gradient.data != NULL), "%s %s a gradient", p.name, indexer ? "lacks" : "has");
        ck_assert_str_eq(p.policy, !indexer ? "none" : p.value.dimensions == 2 ? "muon" : "adamw");
        moved += !same;
    }
    ck_assert_int_ge(moved, 15);
    ck_assert(loss[STEPS - 1] < loss[0]);
    snapshot_free(&before);
    snapshot_free(&after);
    small_close(&s);
}
END_TEST

START_TEST(an_rl_step_leaves_indexers_alone)
{
    struct small s;
    double loss[STEPS];

    small_open(&s, NULL, RL);
    struct snapshot before = small_snapshot(&s, VALUES);
    train(&s, loss);
    struct snapshot after = small_snapshot(&s, VALUES);
    for (uint32_t i = 0; i < before.parameters; i++) {
        glm52_parameter_info p = {.struct_size = sizeof p};
        OK(glm52_model_parameter(s.model, i, &p));
        if (!strstr(p.name, ".indexer.") && !strstr(p.name, "e_score_correction_bias")) continue;
        ck_assert_msg(!memcmp(before.at + before.offset[i], after.at + after.offset[i],
                              (before.offset[i + 1] - before.offset[i]) * sizeof(float)), "%s moved", p.name);
    }
    snapshot_free(&before);
    snapshot_free(&after);
    small_close(&s);
}
END_TEST

static void refused(const char *settings, const char *key)
{
    struct small s;

    small_configure(&s, NULL, settings);
    REFUSED(glm52_config_validate(s.config), GLM52_E_INVALID);
    const char *named = glm52_error_detail(glm52_error_last(), "key");
    ck_assert_msg(named && !strcmp(named, key), "%s is blamed, not %s", named ? named : "nothing", key);
    ck_assert_str_ne(glm52_error_hint(glm52_error_last()), "");
    small_close(&s);
}

START_TEST(contradictions_are_refused)
{
    refused("train.train_only=indexer", "train.train_only");
    refused("train.attention=dense indexer_loss.kind=sparse", "indexer_loss.kind");
    refused("mtp.depths=2", "mtp.depths");
    refused("model.num_nextn_predict_layers=1 mtp.depths=2 mtp.loss=tv", "mtp.detach_heads");
    refused("train.rl_safe=true indexer_loss.kind=sparse", "train.rl_safe");
    refused("train.rl_safe=true moe.force_balance=true", "train.rl_safe");
    refused("precision.gradients=bf16", "precision.gradients");
    refused("precision.masters=false", "precision.masters");
}
END_TEST

START_TEST(the_stage_before_goes_on_after_a_refused_one)
{
    struct small s;
    glm52_config *config = NULL;
    double loss[STEPS];

    small_open(&s, NULL, DENSE);
    OK(glm52_config_create(s.context, &config));
    small_shape(config);
    small_set(config, "optim.rules=*.nowhere=muon " SPARSE);
    REFUSED(glm52_step_set_stage(s.step, config), GLM52_E_INVALID);
    train(&s, loss);
    ck_assert(isfinite(loss[STEPS - 1]) && loss[STEPS - 1] < loss[0]);
    glm52_config_unref(&config);
    small_close(&s);
}
END_TEST

/* Bit for bit, with everything on. */
START_TEST(what_is_made_again_changes_no_bit_of_training)
{
    static const char *const how[] = {"light", "layers"};
    static const char *const settings[] = {SPARSE, DENSE "indexer_loss.kind=dense ", WARMUP,
                                           SPARSE "precision.params=bf16 ", SPARSE NARROW, SPARSE "mtp.share=none ",
                                           SPARSE "mtp.loss=tv mtp.detach_heads=true "};

    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++) {
        struct small kept, anew;
        double a[STEPS], b[STEPS];
        char again[1024];
        snprintf(again, sizeof again, "%s train.recompute=%s", settings[i], how[_i]);
        small_open(&kept, NULL, settings[i]);
        small_open(&anew, NULL, again);
        train(&kept, a);
        train(&anew, b);
        struct snapshot x = small_snapshot(&kept, VALUES), y = small_snapshot(&anew, VALUES);
        check_same(&kept, &x, &y);
        for (int n = 0; n < STEPS; n++) ck_assert(a[n] == b[n]);
        snapshot_free(&x);
        snapshot_free(&y);
        small_close(&anew);
        small_close(&kept);
    }
}
END_TEST

/* The mean over all rows of all microbatches, for every loss but those that are means over microbatches. */
START_TEST(microbatches_split_the_losses_of_a_row)
{
    static const struct document one[] = {{21, 1}}, two[] = {{16, 2}}, three[] = {{9, 3}};
    static const struct document all[] = {{21, 1}, {16, 2}, {9, 3}};
    static const char *const settings[] = {"train.microbatches=3 " SPARSE,
                                           "train.microbatches=3 mtp.share=none " SPARSE,
                                           "train.microbatches=3 " SPARSE "mtp.loss=tv mtp.detach_heads=true ",
                                           "train.microbatches=3 " SPARSE "indexer_loss.mean=tokens "};

    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++) {
        struct small s;
        small_open(&s, NULL, settings[i]);
        glm52_batch *row = small_batch(&s, 3, all);
        glm52_batch *split[] = {small_batch(&s, 1, one), small_batch(&s, 1, two), small_batch(&s, 1, three)};
        double whole = small_gradients(&s, &row, 1);
        struct snapshot a = small_snapshot(&s, GRADIENTS);
        double parts = small_gradients(&s, split, 3);
        struct snapshot b = small_snapshot(&s, GRADIENTS);
        ck_assert_msg(fabs(whole - parts) < 1e-6 * fabs(whole), "%.9g, not %.9g", parts, whole);
        check_close(&s, &a, &b, 2e-5);
        snapshot_free(&a);
        snapshot_free(&b);
        for (int n = 0; n < 3; n++) glm52_batch_unref(&split[n]);
        glm52_batch_unref(&row);
        small_close(&s);
    }
}
END_TEST

START_TEST(a_step_that_is_not_finite_is_skipped_or_stops)
{
    for (int skips = 0; skips < 2; skips++) {
        struct small s;
        double value;
        small_open(&s, NULL, skips ? "train.not_finite=skip" : "");
        glm52_batch *batch = small_batch(&s, 3, documents);
        float *w = small_parameter(&s, "model.layers.2.self_attn.o_proj.weight").value.data, good = w[3];
        w[3] = NAN;
        struct snapshot before = small_snapshot(&s, VALUES);
        if (skips) {
            OK(glm52_step_run(s.step, &batch, 1));
            OK(glm52_step_metric(s.step, "skipped", &value));
            ck_assert(value == 1);
        } else {
            REFUSED(glm52_step_run(s.step, &batch, 1), GLM52_E_NUMERIC);
            ck_assert_msg(strstr(glm52_error_message(glm52_error_last()), "first in layer 2;"), "%s",
                          glm52_error_message(glm52_error_last()));
        }
        struct snapshot after = small_snapshot(&s, VALUES);
        ck_assert(!memcmp(before.at, after.at, before.offset[before.parameters] * sizeof(float)));
        w[3] = good;
        ck_assert(isfinite(small_train(&s, &batch, 1)));
        snapshot_free(&before);
        snapshot_free(&after);
        glm52_batch_unref(&batch);
        small_close(&s);
    }
}
END_TEST

START_TEST(a_spike_is_skipped)
{
    struct small s;
    double value;

    small_open(&s, NULL, "train.spike=2 optim.lr=1e-3");
    glm52_batch *batch = small_batch(&s, 3, documents);
    small_train(&s, &batch, 1);
    float *head = small_parameter(&s, "lm_head.weight").value.data;
    float good = head[0];
    for (int i = 0; i < 40; i++) head[i] *= -400; /* the loss jumps */
    struct snapshot before = small_snapshot(&s, VALUES);
    OK(glm52_step_run(s.step, &batch, 1));
    OK(glm52_step_metric(s.step, "skipped", &value));
    ck_assert(value == 1);
    struct snapshot after = small_snapshot(&s, VALUES);
    ck_assert(!memcmp(before.at, after.at, before.offset[before.parameters] * sizeof(float)));
    ck_assert(head[0] != good);
    snapshot_free(&before);
    snapshot_free(&after);
    glm52_batch_unref(&batch);
    small_close(&s);
}
END_TEST

START_TEST(capacity_drops_and_says_so)
{
    struct small s;
    double dropped, forced;

    small_open(&s, NULL, "moe.capacity_factor=0.5");
    glm52_batch *batch = small_batch(&s, 3, documents);
    small_train(&s, &batch, 1);
    OK(glm52_step_metric(s.step, "dropped", &dropped));
    ck_assert(dropped >= 0.45 && dropped < 1);
    glm52_batch_unref(&batch);
    small_close(&s);
    small_open(&s, NULL, "moe.force_balance=true");
    batch = small_batch(&s, 3, documents);
    small_train(&s, &batch, 1);
    OK(glm52_step_metric(s.step, "dropped", &dropped));
    OK(glm52_step_metric(s.step, "forced_balance", &forced));
    ck_assert(dropped == 0 && forced == 1);
    glm52_batch_unref(&batch);
    small_close(&s);
}
END_TEST

static double square_of(const glm52_view *view, uint64_t at)
{
    double value = view->dtype == GLM52_DTYPE_BF16 ? (double)bf16_to_f32(((const uint16_t *)view->data)[at])
                                                   : (double)((const float *)view->data)[at];

    return value * value;
}

static void check_views(const char *settings, glm52_dtype of_matrices)
{
    struct small s;
    glm52_batch *batch;
    uint32_t parameters;
    double squares = 0, norm;

    small_open(&s, NULL, settings);
    batch = small_batch(&s, 3, documents);
    small_gradients(&s, &batch, 1);
    OK(glm52_model_parameter_count(s.model, &parameters, NULL));
    for (uint32_t i = 0; i < parameters; i++) {
        glm52_parameter_info p = {.struct_size = sizeof p};
        OK(glm52_model_parameter(s.model, i, &p));
        if (!p.gradient.data) continue;
        uint64_t width = dtype_size(p.gradient.dtype);
        ck_assert_msg(p.gradient.dtype == (p.value.dimensions == 2 ? of_matrices : GLM52_DTYPE_F32), "%s", p.name);
        for (uint64_t j = 0; j < p.gradient.bytes / width; j++) squares += square_of(&p.gradient, j);
    }
    OK(glm52_step_metric(s.step, "grad_norm", &norm));
    ck_assert_double_eq_tol(sqrt(squares), norm, 1e-5 * norm);
    glm52_batch_unref(&batch);
    small_close(&s);
}

START_TEST(gradients_show_the_type_they_are_kept_in)
{
    check_views(SPARSE, GLM52_DTYPE_F32);
    check_views(SPARSE "precision.params=bf16", GLM52_DTYPE_F32);
    check_views(SPARSE NARROW, GLM52_DTYPE_BF16);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("model");
    TCase *cases = tcase_create("stages");

    tcase_set_timeout(cases, 120);
    tcase_add_test(cases, from_dense_to_warmup);
    tcase_add_test(cases, from_warmup_to_sparse);
    tcase_add_test(cases, from_sparse_to_rl);
    tcase_add_test(cases, in_a_warmup_only_indexers_move);
    tcase_add_test(cases, an_rl_step_leaves_indexers_alone);
    tcase_add_test(cases, contradictions_are_refused);
    tcase_add_test(cases, the_stage_before_goes_on_after_a_refused_one);
    tcase_add_loop_test(cases, what_is_made_again_changes_no_bit_of_training, 0, 2);
    tcase_add_test(cases, microbatches_split_the_losses_of_a_row);
    tcase_add_test(cases, a_step_that_is_not_finite_is_skipped_or_stops);
    tcase_add_test(cases, a_spike_is_skipped);
    tcase_add_test(cases, capacity_drops_and_says_so);
    tcase_add_test(cases, gradients_show_the_type_they_are_kept_in);
    suite_add_tcase(suite, cases);
    return run_tap(suite);
}
