/* What is saved comes back: models in every dtype and layout of files, and training states, bit for bit. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "small/small.h"
#include "unit/scratch.h"
#include "unit/tap.h"

static const struct document pair[] = {{31, 1}, {17, 2}};

/* Opens what lies in the directory, with the settings that are no shape. */
static void load(struct small *s, const char *directory)
{
    memset(s, 0, sizeof *s);
    OK(glm52_context_create(NULL, &s->context));
    OK(glm52_config_create(s->context, &s->config));
    small_set(s->config, "data.pack_tokens=64 train.microbatch_tokens=64 train.seed=77");
    OK(glm52_model_load(s->context, s->config, directory, &s->model));
    OK(glm52_optimizer_create(s->model, NULL, &s->optimizer));
    OK(glm52_step_create(s->model, s->optimizer, NULL, &s->step));
}

static double loss_of(struct small *s)
{
    glm52_batch *batch = small_batch(s, 2, pair);
    double loss = small_loss(s, batch);

    glm52_batch_unref(&batch);
    return loss;
}

/* Saves, loads and compares all values and the loss. `rounded`: the values that must come back. */
static int round_trip(struct small *s, glm52_dtype dtype, const struct snapshot *expected, double loss)
{
    const char *directory = scratch_make();
    struct small again;

    OK(glm52_model_save(s->model, directory, dtype));
    int files = scratch_files(directory, ".safetensors");
    load(&again, directory);
    struct snapshot found = small_snapshot(&again, VALUES);
    check_same(&again, expected, &found);
    ck_assert(loss_of(&again) == loss);
    snapshot_free(&found);
    small_close(&again);
    scratch_remove();
    return files;
}

static void disturb(struct small *s)
{
    glm52_batch *batch = small_batch(s, 2, pair);

    for (int i = 0; i < 2; i++) small_train(s, &batch, 1);
    glm52_batch_unref(&batch);
    float *bias = small_parameter(s, "model.layers.1.mlp.gate.e_score_correction_bias").value.data;
    for (int i = 0; i < 5; i++) bias[i] = 0.1f * (float)i + 1e-6f;
}

START_TEST(a_saved_model_has_the_same_loss)
{
    struct small s;

    small_open(&s, NULL, "model.num_nextn_predict_layers=1");
    disturb(&s);
    struct snapshot values = small_snapshot(&s, VALUES);
    double loss = loss_of(&s);
    ck_assert_int_eq(round_trip(&s, 0, &values, loss), 1);
    ck_assert_int_eq(round_trip(&s, GLM52_DTYPE_F32, &values, loss), 1);
    snapshot_free(&values);
    small_close(&s);
}
END_TEST

START_TEST(a_model_in_shards)
{
    struct small s;

    small_open(&s, NULL, "shard_bytes=9000 model.num_nextn_predict_layers=1");
    disturb(&s);
    struct snapshot values = small_snapshot(&s, VALUES);
    ck_assert_int_gt(round_trip(&s, 0, &values, loss_of(&s)), 5);
    snapshot_free(&values);
    small_close(&s);
}
END_TEST

/* Nearest even, the rule of the format. */
static float to_bf16(float x)
{
    uint32_t bits;

    memcpy(&bits, &x, sizeof bits);
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
    memcpy(&x, &bits, sizeof bits);
    return x;
}

START_TEST(a_model_in_bf16)
{
    struct small s;

    for (int shards = 0; shards < 2; shards++) {
        small_open(&s, NULL, shards ? "shard_bytes=9000" : "");
        disturb(&s);
        const char *directory = scratch_make();
        OK(glm52_model_save(s.model, directory, GLM52_DTYPE_BF16)); /* the model itself stays as it is */
        scratch_remove();
        struct snapshot before = small_snapshot(&s, VALUES), rounded = small_snapshot(&s, VALUES);
        for (uint32_t i = 0; i < rounded.parameters; i++) {
            glm52_parameter_info p = {.struct_size = sizeof p};
            OK(glm52_model_parameter(s.model, i, &p));
            if (strstr(p.name, "e_score_correction_bias")) continue; /* fp32 in every file */
            for (uint64_t j = rounded.offset[i]; j < rounded.offset[i + 1]; j++) {
                rounded.at[j] = to_bf16(rounded.at[j]);
                ((float *)p.value.data)[j - rounded.offset[i]] = rounded.at[j];
            }
        }
        double loss = loss_of(&s);
        for (uint32_t i = 0; i < rounded.parameters; i++) {
            glm52_parameter_info p = {.struct_size = sizeof p};
            OK(glm52_model_parameter(s.model, i, &p));
            memcpy(p.value.data, before.at + before.offset[i], p.value.bytes);
        }
        ck_assert(loss_of(&s) != loss);
        ck_assert_int_ge(round_trip(&s, GLM52_DTYPE_BF16, &rounded, loss), shards ? 3 : 1);
        snapshot_free(&before);
        snapshot_free(&rounded);
        small_close(&s);
    }
}
END_TEST

/* Update number n, whose batch depends on n alone. */
static double update(struct small *s, int n)
{
    glm52_batch *batch[2];

    for (int i = 0; i < 2; i++)
        batch[i] = small_batch(s, 2, (struct document[]){{20 + n, 100u + (unsigned)(2 * n + i)}, {9, 7}});
    double loss = small_train(s, batch, 2);
    for (int i = 0; i < 2; i++) glm52_batch_unref(&batch[i]);
    return loss;
}

static const char schedule[] = "train.microbatches=2 optim.schedule=cosine optim.warmup=2 train.steps=9";

START_TEST(a_resumed_training_goes_on_bit_for_bit)
{
    enum { BEFORE = 3, AFTER = 3 };
    const char *directory = scratch_make();
    struct small s, fresh;
    double loss[AFTER];
    uint64_t packs = 0;

    small_open(&s, NULL, schedule);
    for (int i = 0; i < BEFORE; i++) update(&s, i);
    OK(glm52_step_save(s.step, directory));
    for (int i = 0; i < AFTER; i++) loss[i] = update(&s, BEFORE + i);
    struct snapshot expected = small_snapshot(&s, VALUES);

    char other_seed[256];
    snprintf(other_seed, sizeof other_seed, "%s train.seed=1234", schedule);
    small_threads(&fresh, 2, other_seed);
    update(&fresh, 6); /* not even pristine */
    OK(glm52_step_resume(fresh.step, directory, &packs));
    ck_assert_uint_eq(packs, 2 * BEFORE);
    for (int i = 0; i < AFTER; i++) ck_assert(update(&fresh, BEFORE + i) == loss[i]);
    struct snapshot found = small_snapshot(&fresh, VALUES);
    check_same(&fresh, &expected, &found);
    double step;
    OK(glm52_step_metric(fresh.step, "step", &step));
    ck_assert(step == BEFORE + AFTER);

    struct small hub; /* the state's folder is a hub directory too */
    char path[128];
    OK(glm52_step_resume(fresh.step, directory, NULL));
    snprintf(path, sizeof path, "%s/step-000003", directory);
    load(&hub, path);
    ck_assert(loss_of(&hub) == loss_of(&fresh));
    small_close(&hub);

    snapshot_free(&expected);
    snapshot_free(&found);
    small_close(&s);
    small_close(&fresh);
    scratch_remove();
}
END_TEST

START_TEST(the_newest_state_replaces_the_older)
{
    const char *directory = scratch_make();
    struct small s;
    uint64_t packs;

    small_open(&s, NULL, schedule);
    for (int i = 0; i < 3; i++) {
        update(&s, i);
        OK(glm52_step_save(s.step, directory));
        ck_assert_int_eq(scratch_files(directory, "step-"), 1);
    }
    OK(glm52_step_save(s.step, directory)); /* once more at the same step */
    struct snapshot expected = small_snapshot(&s, VALUES);
    update(&s, 3);
    OK(glm52_step_resume(s.step, directory, &packs));
    ck_assert_uint_eq(packs, 6);
    struct snapshot found = small_snapshot(&s, VALUES);
    check_same(&s, &expected, &found);
    snapshot_free(&expected);
    snapshot_free(&found);
    small_close(&s);
    scratch_remove();
}
END_TEST

START_TEST(a_state_of_another_model_is_refused)
{
    static const char *const others[] = {"model.hidden_size=22", "model.num_hidden_layers=3 model.indexer_types=",
                                         "model.n_routed_experts=6"};
    const char *directory = scratch_make();
    struct small s;

    small_open(&s, NULL, schedule);
    update(&s, 0);
    OK(glm52_step_save(s.step, directory));
    small_close(&s);
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        small_open(&s, NULL, others[i]);
        struct snapshot before = small_snapshot(&s, VALUES);
        glm52_status status = glm52_step_resume(s.step, directory, NULL);
        ck_assert_int_eq(status, GLM52_E_CORRUPT);
        const glm52_error *e = glm52_error_last();
        ck_assert(glm52_error_detail(e, "tensor") || glm52_error_detail(e, "path"));
        ck_assert_ptr_null(glm52_error_detail(e, "state")); /* nothing was read yet */
        struct snapshot after = small_snapshot(&s, VALUES);
        check_same(&s, &before, &after);
        snapshot_free(&before);
        snapshot_free(&after);
        small_close(&s);
    }
    scratch_remove();
}
END_TEST

START_TEST(initial_values_depend_on_seed_and_name_alone)
{
    struct small few, many, other;
    uint32_t count, index;
    int same = 0;

    small_open(&few, NULL, "model.num_hidden_layers=2 model.indexer_types=full,full");
    small_open(&many, NULL, "model.num_hidden_layers=6 model.indexer_types=full,full,full,shared,full,shared "
                            "model.num_nextn_predict_layers=1");
    small_open(&other, NULL, "train.seed=4");
    OK(glm52_model_parameter_count(few.model, &count, NULL));
    for (uint32_t i = 0; i < count; i++) {
        glm52_parameter_info p = {.struct_size = sizeof p};
        OK(glm52_model_parameter(few.model, i, &p));
        ck_assert_msg(!memcmp(p.value.data, small_parameter(&many, p.name).value.data, p.value.bytes), "%s", p.name);
        if (glm52_model_parameter_find(other.model, p.name, &index)) continue;
        int random = p.value.dimensions == 2;
        ck_assert_msg(random == (memcmp(p.value.data, small_parameter(&other, p.name).value.data, p.value.bytes) != 0),
                      "%s", p.name);
        same++;
    }
    ck_assert_int_gt(same, 20);
    small_close(&few);
    small_close(&many);
    small_close(&other);
}
END_TEST

START_TEST(initial_values_have_the_asked_deviation)
{
    struct small s;

    small_open(&s, NULL, "model.initializer_range=0.05");
    glm52_view w = small_parameter(&s, "model.layers.0.mlp.down_proj.weight").value;
    const float *x = w.data;
    uint64_t count = w.bytes / sizeof *x;
    double sum = 0, squares = 0;
    for (uint64_t i = 0; i < count; i++) sum += (double)x[i], squares += (double)x[i] * (double)x[i];
    double root = sqrt((double)count);
    ck_assert(fabs(sum / (double)count) < 4 * 0.05 / root);                    /* 4 deviations of the mean */
    ck_assert(fabs(sqrt(squares / (double)count) - 0.05) < 4 * 0.05 / root);
    const float *gain = small_parameter(&s, "model.norm.weight").value.data;
    for (int i = 0; i < 20; i++) ck_assert(gain[i] == 1);
    small_close(&s);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("model");
    TCase *cases = tcase_create("state");

    tcase_set_timeout(cases, 60);
    tcase_add_test(cases, a_saved_model_has_the_same_loss);
    tcase_add_test(cases, a_model_in_shards);
    tcase_add_test(cases, a_model_in_bf16);
    tcase_add_test(cases, a_resumed_training_goes_on_bit_for_bit);
    tcase_add_test(cases, the_newest_state_replaces_the_older);
    tcase_add_test(cases, a_state_of_another_model_is_refused);
    tcase_add_test(cases, initial_values_depend_on_seed_and_name_alone);
    tcase_add_test(cases, initial_values_have_the_asked_deviation);
    suite_add_tcase(suite, cases);
    return run_tap(suite);
}
