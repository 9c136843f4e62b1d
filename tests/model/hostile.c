/* Callers who do what nobody should: several steps of one model, a stage without memory, fewer microbatches than
 * planned, parameters that are not numbers. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "small/small.h"
#include "unit/tap.h"

#define SETTINGS "model.num_nextn_predict_layers=1 optim.policy=glm5 mtp.depths=2 "
#define DENSE SETTINGS "train.stage=one train.attention=dense "
#define WARMUP SETTINGS "train.stage=two train.attention=dense train.train_only=indexer indexer_loss.kind=dense "
#define SPARSE SETTINGS "train.stage=three indexer_loss.kind=sparse mtp.loss=tv mtp.detach_heads=true "
#define RL SETTINGS "train.stage=four train.rl_safe=true "

static const char *const stage[] = {DENSE, WARMUP, SPARSE, RL};
enum { STAGES = 4 };

static const struct document documents[] = {{21, 1}, {16, 2}, {1, 3}};

static glm52_config *configured(struct small *s, const char *settings)
{
    glm52_config *config = NULL;

    OK(glm52_config_create(s->context, &config));
    small_shape(config);
    small_set(config, settings);
    return config;
}

static glm52_status set_stage(struct small *s, const char *settings)
{
    glm52_config *config = configured(s, settings);
    glm52_status status = glm52_step_set_stage(s->step, config);

    glm52_config_unref(&config);
    return status;
}

static double metric(struct small *s, const char *name)
{
    double value;

    OK(glm52_step_metric(s->step, name, &value));
    return value;
}

/* ---- stages ------------------------------------------------------------------------------------------ */

START_TEST(any_stage_follows_any_other)
{
    struct small s;

    small_open(&s, NULL, DENSE);
    glm52_batch *batch = small_batch(&s, 3, documents);
    for (int from = 0; from < STAGES; from++)
        for (int to = 0; to < STAGES; to++) {
            OK(set_stage(&s, stage[from]));
            small_train(&s, &batch, 1);
            OK(set_stage(&s, stage[to]));
            ck_assert(isfinite(small_train(&s, &batch, 1)));
            ck_assert(isfinite(small_loss(&s, batch)));
        }
    ck_assert(metric(&s, "step") == 2 * STAGES * STAGES);
    glm52_batch_unref(&batch);
    small_close(&s);
}
END_TEST

START_TEST(a_stage_ends_only_with_one_step_open)
{
    struct small s;
    glm52_step *reader = NULL, *second = NULL;
    glm52_optimizer *earlier = NULL;

    small_open(&s, NULL, DENSE);
    glm52_batch *batch = small_batch(&s, 3, documents);
    OK(glm52_optimizer_create(s.model, NULL, &earlier));
    OK(glm52_step_create(s.model, NULL, NULL, &reader)); /* reads what the new stage would lay out anew */
    REFUSED(set_stage(&s, SPARSE), GLM52_E_STATE);
    small_train(&s, &batch, 1);
    glm52_step_unref(&reader);
    OK(glm52_step_create(s.model, s.optimizer, NULL, &second)); /* holds the gradients of the old stage */
    REFUSED(set_stage(&s, WARMUP), GLM52_E_STATE);
    glm52_step_unref(&second);
    OK(set_stage(&s, WARMUP));
    REFUSED(glm52_step_create(s.model, earlier, NULL, &second), GLM52_E_STATE); /* moves what is now frozen */
    OK(glm52_step_create(s.model, s.optimizer, NULL, &second));
    small_train(&s, &batch, 1);
    OK(glm52_step_run(second, &batch, 1));
    glm52_step_unref(&second);
    glm52_optimizer_unref(&earlier);
    glm52_batch_unref(&batch);
    small_close(&s);
}
END_TEST

struct meter {
    int calls, refuse_from, refusals; /* calls so far; which of them, and how many after it, find no memory */
};

static void *meter_allocate(void *user, size_t bytes, size_t alignment)
{
    struct meter *m = user;
    int number = m->calls++;

    if (m->refuse_from >= 0 && number >= m->refuse_from && number < m->refuse_from + m->refusals) return NULL;
    return aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}

static void meter_release(void *user, void *memory, size_t bytes)
{
    (void)user, (void)bytes;
    free(memory);
}

/* Everything a caller may try on a step that a failed stage left without memory. */
static void check_lost(struct small *s, glm52_batch *batch)
{
    double value;

    REFUSED(glm52_step_run(s->step, &batch, 1), GLM52_E_STATE);
    REFUSED(glm52_step_gradients(s->step, &batch, 1), GLM52_E_STATE);
    REFUSED(glm52_step_evaluate(s->step, &batch, 1, &value), GLM52_E_STATE);
    REFUSED(glm52_step_metric(s->step, "loss", &value), GLM52_E_STATE);
    REFUSED(glm52_step_save(s->step, "."), GLM52_E_STATE);
    REFUSED(glm52_step_resume(s->step, ".", NULL), GLM52_E_STATE);
    ck_assert_ptr_null(glm52_step_metric_name(s->step, 0));
}

START_TEST(a_stage_without_memory_is_refused_or_can_be_set_again)
{
    struct meter meter = {0, -1, 1};
    const glm52_allocator allocator = {sizeof allocator, 0, &meter, meter_allocate, meter_release};
    const glm52_context_options options = {.struct_size = sizeof options, .threads = 1, .allocator = &allocator};
    struct small undisturbed, s;
    int lost = 0, kept = 0;

    small_open(&undisturbed, NULL, DENSE);
    glm52_batch *batch = small_batch(&undisturbed, 3, documents);
    small_train(&undisturbed, &batch, 1);
    OK(set_stage(&undisturbed, SPARSE));
    double expected = small_train(&undisturbed, &batch, 1);
    glm52_batch_unref(&batch);
    for (int first = 0, done = 0; !done; first++) {
        small_open(&s, &options, DENSE);
        batch = small_batch(&s, 3, documents);
        small_train(&s, &batch, 1);
        glm52_config *next = configured(&s, SPARSE);
        meter.refuse_from = meter.calls + first;
        glm52_status status = glm52_step_set_stage(s.step, next);
        const char *state = status ? glm52_error_detail(glm52_error_last(), "state") : NULL;
        int is_lost = state && !strcmp(state, "lost");
        done = meter.calls <= meter.refuse_from;
        meter.refuse_from = -1;
        if (status) ck_assert_int_eq(status, GLM52_E_NOMEM);
        lost += is_lost;
        kept += status && !is_lost;
        if (is_lost)
            check_lost(&s, batch);
        else if (status)
            ck_assert(isfinite(small_loss(&s, batch)));
        if (status) OK(glm52_step_set_stage(s.step, next));
        ck_assert(small_train(&s, &batch, 1) == expected);
        ck_assert(metric(&s, "step") == 2);
        glm52_config_unref(&next);
        glm52_batch_unref(&batch);
        small_close(&s);
    }
    ck_assert(lost > 0 && kept > 0);
    small_close(&undisturbed);
}
END_TEST

/* ---- options that only the model can answer ---------------------------------------------------------- */

START_TEST(options_that_a_step_cannot_change_are_refused)
{
    struct small s;
    glm52_step *step = NULL;

    small_open(&s, NULL, SPARSE);
    glm52_config *other = configured(&s, SPARSE "precision.params=bf16");
    REFUSED(glm52_step_create(s.model, s.optimizer, other, &step), GLM52_E_INVALID);
    REFUSED(glm52_step_set_stage(s.step, other), GLM52_E_INVALID);
    glm52_config_unref(&other);
    other = configured(&s, SPARSE "train.ce_coeff=0.5");
    REFUSED(glm52_step_create(s.model, s.optimizer, other, &step), GLM52_E_STATE);
    glm52_config_unref(&other);
    small_close(&s);

    small_open(&s, NULL, SPARSE "precision.params=bf16");
    OK(set_stage(&s, RL)); /* says nothing of precision */
    REFUSED(set_stage(&s, SPARSE "precision.params=f32"), GLM52_E_INVALID);
    REFUSED(set_stage(&s, SPARSE "precision.gradients=bf16"), GLM52_E_INVALID);
    small_close(&s);
}
END_TEST

/* ---- what a metric counts ---------------------------------------------------------------------------- */

START_TEST(dropped_is_a_share_of_all_assignments)
{
    static const char *const how[] = {"", "train.recompute=light", "train.recompute=layers"};
    const uint8_t counts[38] = {1}; /* the other rows count nowhere, but take their places */
    double dropped[3];

    for (int i = 0; i < 3; i++) {
        char settings[512];
        struct small s;
        snprintf(settings, sizeof settings, SETTINGS "moe.capacity_factor=0.001 %s", how[i]);
        small_open(&s, NULL, settings);
        glm52_batch *batch = small_batch(&s, 3, documents);
        OK(glm52_batch_set(batch, "row_mask", GLM52_DTYPE_U8, counts, 38));
        small_train(&s, &batch, 1);
        dropped[i] = metric(&s, "dropped");
        small_loss(&s, batch);
        ck_assert(metric(&s, "dropped") <= 1);
        glm52_batch_unref(&batch);
        small_close(&s);
    }
    /* Each expert keeps one assignment of 38 x 2 in each of 3 MoE layers and 2 MTP depths, or is asked for none. */
    ck_assert(dropped[0] < 1 && dropped[0] >= 1 - 5.0 / 76);
    ck_assert(dropped[0] == dropped[1] && dropped[0] == dropped[2]);
}
END_TEST

START_TEST(auxiliary_losses_are_means_over_the_microbatches_given)
{
    double loss[3];

    for (int planned = 1; planned <= 2; planned++) {
        struct small s;
        small_open(&s, NULL, planned == 1 ? SETTINGS "moe.auxiliary_loss=row moe.auxiliary_coeff=1 moe.z_coeff=0.1"
                                          : SETTINGS "moe.auxiliary_loss=row moe.auxiliary_coeff=1 moe.z_coeff=0.1 "
                                                     "train.microbatches=2");
        glm52_batch *batch = small_batch(&s, 3, documents), *twice[] = {batch, batch};
        small_gradients(&s, &batch, 1);
        loss[planned - 1] = metric(&s, "auxiliary_loss");
        if (planned == 2) small_gradients(&s, twice, 2);
        loss[planned] = metric(&s, "auxiliary_loss");
        glm52_batch_unref(&batch);
        small_close(&s);
        if (planned == 2) ck_assert(fabs(loss[1] - loss[2]) < 1e-6 * loss[1]);
        if (planned == 2) ck_assert(loss[0] == loss[1]);
    }
}
END_TEST

/* ---- generating ------------------------------------------------------------------------------------- */

START_TEST(a_model_that_is_not_finite_generates_nothing)
{
    struct small s;
    int32_t prompt[] = {1, 2, 3}, tokens[4] = {-1, -1, -1, -1};
    uint64_t produced = 77;

    small_open(&s, NULL, "");
    ((float *)small_parameter(&s, "model.norm.weight").value.data)[3] = NAN;
    for (int i = 0; i < 2; i++)
        REFUSED(glm52_model_generate(s.model, prompt, 3, 4, (double)i, 1, tokens, &produced), GLM52_E_NUMERIC);
    ck_assert(produced == 77);
    small_close(&s);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("hostile");
    TCase *cases = tcase_create("callers");

    tcase_set_timeout(cases, 200);
    tcase_add_test(cases, any_stage_follows_any_other);
    tcase_add_test(cases, a_stage_ends_only_with_one_step_open);
    tcase_add_test(cases, a_stage_without_memory_is_refused_or_can_be_set_again);
    tcase_add_test(cases, options_that_a_step_cannot_change_are_refused);
    tcase_add_test(cases, dropped_is_a_share_of_all_assignments);
    tcase_add_test(cases, auxiliary_losses_are_means_over_the_microbatches_given);
    tcase_add_test(cases, a_model_that_is_not_finite_generates_nothing);
    suite_add_tcase(suite, cases);
    return run_tap(suite);
}
