/* What a caller can get wrong with batches and runs, and what he reads then; cancellation; numbers that are not
 * finite. */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "small/small.h"
#include "unit/scratch.h"
#include "unit/tap.h"

/* The message, or the hint, holds every one of the words (separated by |). */
static void check_says(const char *call, const char *words)
{
    char copy[256], *rest = copy;
    const char *message = glm52_error_message(glm52_error_last()), *hint = glm52_error_hint(glm52_error_last());

    snprintf(copy, sizeof copy, "%s", words);
    for (char *word; (word = strtok_r(rest, "|", &rest));)
        ck_assert_msg(strstr(message, word) || strstr(hint, word), "%s: \"%s\" (\"%s\") does not say \"%s\"", call,
                      message, hint, word);
}

#define SAYS(call, status, words)      \
    do {                               \
        REFUSED(call, status);         \
        check_says(#call, words);      \
    } while (0)

/* ---- batches ----------------------------------------------------------------------------------------- */

START_TEST(fields)
{
    static const int32_t ids[5] = {1, 2, 3, 4, 5}, cu[5] = {0, 2, 5, 5, 5}, falling[3] = {0, 4, 3}, late[2] = {1, 5},
                         equal[4] = {0, 2, 2, 5}, beyond[2] = {0, 6};
    static const float mask[5] = {1, 1, 1, 1, 1};
    struct small s;
    glm52_batch *b = NULL;
    uint64_t tokens = 7, documents = 7;

    small_configure(&s, NULL, "");
    OK(glm52_batch_create(s.context, &b));
    OK(glm52_batch_tokens(b, &tokens, &documents));
    ck_assert(tokens == 0 && documents == 0);
    SAYS(glm52_batch_set(b, "labels", GLM52_DTYPE_I32, ids, 5), GLM52_E_INVALID, "labels|5|0 tokens|set tokens first");
    SAYS(glm52_batch_set(b, "cu_seqlens", GLM52_DTYPE_I32, cu, 2), GLM52_E_STATE, "tokens|cu_seqlens");
    SAYS(glm52_batch_set(b, "tokens", GLM52_DTYPE_I32, ids, 0), GLM52_E_INVALID, "tokens|0 values|1 ..");
    SAYS(glm52_batch_set(b, "tokens", GLM52_DTYPE_F32, mask, 5), GLM52_E_INVALID, "tokens|F32|I32 or I64");
    SAYS(glm52_batch_set(b, "token", GLM52_DTYPE_I32, ids, 5), GLM52_E_INVALID, "token|cu_seqlens, labels");
    OK(glm52_batch_set(b, "tokens", GLM52_DTYPE_I32, ids, 5));
    SAYS(glm52_batch_set(b, "labels", GLM52_DTYPE_I32, ids, 4), GLM52_E_INVALID, "labels|4|5");
    SAYS(glm52_batch_set(b, "loss_mask", GLM52_DTYPE_I32, ids, 5), GLM52_E_INVALID, "loss_mask|I32|F32 or U8");
    SAYS(glm52_batch_set(b, "loss_mask", GLM52_DTYPE_F32, mask, 6), GLM52_E_INVALID, "loss_mask|6|5");
    SAYS(glm52_batch_set(b, "labels", 99, ids, 5), GLM52_E_INVALID, "labels|I32 or I64");
    SAYS(glm52_batch_set(b, "cu_seqlens", GLM52_DTYPE_I32, cu, 1), GLM52_E_INVALID, "cu_seqlens|1 values|2 ..");
    SAYS(glm52_batch_set(b, "cu_seqlens", GLM52_DTYPE_I32, cu, 7), GLM52_E_INVALID, "cu_seqlens|7 values|6");
    SAYS(glm52_batch_set(b, "cu_seqlens", GLM52_DTYPE_I32, cu, 5), GLM52_E_INVALID, "cu_seqlens[3] = 5|rise|5");
    SAYS(glm52_batch_set(b, "cu_seqlens", GLM52_DTYPE_I32, falling, 3), GLM52_E_INVALID, "cu_seqlens[2] = 3|rise");
    SAYS(glm52_batch_set(b, "cu_seqlens", GLM52_DTYPE_I32, late, 2), GLM52_E_INVALID, "cu_seqlens[0] = 1|from 0");
    SAYS(glm52_batch_set(b, "cu_seqlens", GLM52_DTYPE_I32, equal, 4), GLM52_E_INVALID, "cu_seqlens[2] = 2");
    SAYS(glm52_batch_set(b, "cu_seqlens", GLM52_DTYPE_I32, beyond, 2), GLM52_E_INVALID, "cu_seqlens[1] = 6|5");
    SAYS(glm52_batch_get(b, "logits", &(glm52_view){.struct_size = sizeof(glm52_view)}), GLM52_E_INVALID,
         "logits|forward");
    OK(glm52_batch_tokens(b, &tokens, &documents)); /* nothing of this changed it */
    ck_assert(tokens == 5 && documents == 1);
    ck_assert(!memcmp(small_output(b, "tokens").data, ids, sizeof ids));
    glm52_batch_unref(&b);
    small_close(&s);
}
END_TEST

START_TEST(a_refused_field_keeps_the_outputs)
{
    static const int32_t bad[] = {0, 3, 2};
    struct small s;

    small_open(&s, NULL, "");
    glm52_batch *b = small_text(&s, 9, 1);
    OK(glm52_model_forward(s.model, b, "ce_rows"));
    REFUSED(glm52_batch_set(b, "cu_seqlens", GLM52_DTYPE_I32, bad, 3), GLM52_E_INVALID);
    ck_assert_int_eq(small_output(b, "ce_rows").shape[0], 9);
    OK(glm52_batch_set(b, "cu_seqlens", GLM52_DTYPE_I32, (int32_t[]){0, 9}, 2));
    REFUSED(glm52_batch_get(b, "ce_rows", &(glm52_view){.struct_size = sizeof(glm52_view)}), GLM52_E_INVALID);
    glm52_batch_unref(&b);
    small_close(&s);
}
END_TEST

/* Every user of a batch checks it against the model, and names microbatch, position and value. */
START_TEST(ids_outside_the_vocabulary)
{
    struct small s;
    int64_t ids[6] = {0, 1, 36, 3, 4, 5}, labels[6] = {0, 1, 2, 36, -100, 5};
    static const int64_t wrong[] = {37, -1, -100, INT64_C(1) << 32, -(INT64_C(1) << 40)};

    small_open(&s, NULL, "train.microbatches=2");
    glm52_batch *good = small_text(&s, 10, 1), *b = small_text(&s, 6, 2), *two[] = {good, b};
    OK(glm52_batch_set(b, "tokens", GLM52_DTYPE_I64, ids, 6));
    OK(glm52_batch_set(b, "labels", GLM52_DTYPE_I64, labels, 6));
    OK(glm52_step_gradients(s.step, two, 2));
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        ids[3] = wrong[i];
        OK(glm52_batch_set(b, "tokens", GLM52_DTYPE_I64, ids, 6));
        SAYS(glm52_step_run(s.step, two, 2), GLM52_E_INVALID, "microbatch 1|token at position 3|37");
        ck_assert_str_eq(glm52_error_detail(glm52_error_last(), "position"), "3");
        SAYS(glm52_step_gradients(s.step, two, 2), GLM52_E_INVALID, "position 3");
        SAYS(glm52_step_evaluate(s.step, &b, 1, NULL), GLM52_E_INVALID, "position 3");
        SAYS(glm52_model_forward(s.model, b, "loss"), GLM52_E_INVALID, "position 3");
        ids[3] = 3;
        OK(glm52_batch_set(b, "tokens", GLM52_DTYPE_I64, ids, 6));
        if (wrong[i] == -100) continue; /* a label of its own */
        labels[2] = wrong[i];
        OK(glm52_batch_set(b, "labels", GLM52_DTYPE_I64, labels, 6));
        SAYS(glm52_step_run(s.step, two, 2), GLM52_E_INVALID, "microbatch 1|label at position 2|-100");
        labels[2] = 2;
    }
    double step;
    OK(glm52_step_metric(s.step, "step", &step));
    ck_assert(step == 0);
    glm52_batch_unref(&good);
    glm52_batch_unref(&b);
    small_close(&s);
}
END_TEST

START_TEST(batches_that_cannot_run)
{
    static const float bad[] = {1, NAN, 1, 1}, negative[] = {1, 1, -0.5f, 1}, none[] = {0, 0, 0, 0};
    struct small s;
    glm52_batch *empty = NULL;

    small_open(&s, NULL, "train.microbatches=2");
    OK(glm52_batch_create(s.context, &empty));
    glm52_batch *b = small_text(&s, 4, 2), *large = small_text(&s, 65, 1), *three[] = {b, b, b};
    SAYS(glm52_step_run(s.step, &empty, 1), GLM52_E_INVALID, "empty");
    SAYS(glm52_model_forward(s.model, empty, "loss"), GLM52_E_INVALID, "empty");
    SAYS(glm52_step_run(s.step, three, 0), GLM52_E_INVALID, "batch");
    SAYS(glm52_step_evaluate(s.step, three, 0, NULL), GLM52_E_INVALID, "batch");
    SAYS(glm52_step_run(s.step, three, 3), GLM52_E_INVALID, "3|train.microbatches = 2");
    SAYS(glm52_step_run(s.step, &large, 1), GLM52_E_INVALID, "65 tokens|train.microbatch_tokens = 64|raise");
    OK(glm52_batch_set(b, "loss_mask", GLM52_DTYPE_F32, bad, 4));
    SAYS(glm52_step_run(s.step, &b, 1), GLM52_E_INVALID, "loss_mask|position 1|nan");
    OK(glm52_batch_set(b, "loss_mask", GLM52_DTYPE_F32, negative, 4));
    SAYS(glm52_step_run(s.step, &b, 1), GLM52_E_INVALID, "loss_mask|position 2|-0.5");
    OK(glm52_batch_set(b, "loss_mask", GLM52_DTYPE_U8, "\1\1\1\1", 4));
    OK(glm52_batch_set(b, "row_mask", GLM52_DTYPE_F32, bad, 4));
    SAYS(glm52_step_run(s.step, &b, 1), GLM52_E_INVALID, "row_mask|position 1|nan");
    OK(glm52_batch_set(b, "row_mask", GLM52_DTYPE_U8, "\1\1\1\1", 4));
    OK(glm52_batch_set(b, "loss_mask", GLM52_DTYPE_F32, none, 4));
    SAYS(glm52_step_run(s.step, &b, 1), GLM52_E_INVALID, "loss_mask");
    SAYS(glm52_model_forward(s.model, b, "logit"), GLM52_E_INVALID, "logit|logits");
    SAYS(glm52_step_metric(s.step, "los", &(double){0}), GLM52_E_INVALID, "los|glm52_step_metric_name");
    SAYS(glm52_optimizer_set_lr(s.optimizer, INFINITY), GLM52_E_INVALID, "inf");
    glm52_batch_unref(&empty);
    glm52_batch_unref(&b);
    glm52_batch_unref(&large);
    small_close(&s);
}
END_TEST

START_TEST(a_document_beyond_the_last_position)
{
    struct small s;

    small_open(&s, NULL, "model.max_position_embeddings=16");
    glm52_batch *b = small_batch(&s, 2, (struct document[]){{16, 1}, {16, 2}}), *longer = small_text(&s, 17, 1);
    small_train(&s, &b, 1);
    SAYS(glm52_step_run(s.step, &longer, 1), GLM52_E_INVALID, "17|model.max_position_embeddings = 16");
    SAYS(glm52_model_forward(s.model, longer, "loss"), GLM52_E_INVALID, "17|model.max_position_embeddings = 16");
    int32_t prompt[9] = {0}, tokens[9];
    uint64_t produced;
    SAYS(glm52_model_generate(s.model, prompt, 9, 8, 0, 0, tokens, &produced), GLM52_E_INVALID,
         "max_position_embeddings = 16");
    OK(glm52_model_generate(s.model, prompt, 9, 7, 0, 0, tokens, &produced));
    SAYS(glm52_model_generate(s.model, prompt, 0, 7, 0, 0, tokens, &produced), GLM52_E_INVALID, "prompt");
    SAYS(glm52_model_generate(s.model, prompt, 1, 7, NAN, 0, tokens, &produced), GLM52_E_INVALID, "temperature");
    prompt[1] = 37;
    SAYS(glm52_model_generate(s.model, prompt, 2, 7, 0, 0, tokens, &produced), GLM52_E_INVALID, "position 1|37");
    glm52_batch_unref(&b);
    glm52_batch_unref(&longer);
    small_close(&s);
}
END_TEST

/* ---- who belongs to whom ----------------------------------------------------------------------------- */

START_TEST(parts_of_different_models)
{
    struct small s, other;
    glm52_step *step = NULL;

    small_open(&s, NULL, "");
    small_open(&other, NULL, "");
    SAYS(glm52_step_create(s.model, other.optimizer, NULL, &step), GLM52_E_INVALID, "optimizer|another");
    OK(glm52_step_create(s.model, NULL, NULL, &step)); /* evaluation only */
    glm52_batch *b = small_text(&s, 9, 1);
    OK(glm52_step_evaluate(step, &b, 1, NULL));
    SAYS(glm52_step_run(step, &b, 1), GLM52_E_STATE, "without an optimizer");
    SAYS(glm52_step_gradients(step, &b, 1), GLM52_E_STATE, "without an optimizer");
    SAYS(glm52_step_save(step, "x"), GLM52_E_STATE, "without an optimizer");
    SAYS(glm52_step_resume(step, "x", NULL), GLM52_E_STATE, "without an optimizer");
    glm52_step_unref(&step);
    glm52_batch_unref(&b);
    small_close(&s);
    small_close(&other);
}
END_TEST

/* A config of training options alone, as the header says, makes optimizer and step of a model. */
START_TEST(a_config_without_a_model)
{
    struct small s;
    glm52_config *config = NULL;
    glm52_plan_row row = {.struct_size = sizeof row};

    small_open(&s, NULL, "");
    glm52_step_unref(&s.step);
    glm52_optimizer_unref(&s.optimizer);
    OK(glm52_config_create(s.context, &config));
    small_set(
        config,
        "train.microbatches=2 train.microbatch_tokens=80 data.pack_tokens=80 optim.lr=0.5 optim.schedule=constant");
    OK(glm52_optimizer_create(s.model, config, &s.optimizer));
    OK(glm52_step_create(s.model, s.optimizer, config, &s.step));
    glm52_batch *b = small_text(&s, 80, 1), *two[] = {b, b};
    small_train(&s, two, 2);
    double lr;
    OK(glm52_step_metric(s.step, "lr", &lr));
    ck_assert(lr == 0.5);
    OK(glm52_step_plan(s.step, 0, &row));
    ck_assert_str_eq(row.section, "memory");
    ck_assert(row.amount > 0);
    glm52_config_unref(&config);
    glm52_batch_unref(&b);
    small_close(&s);
}
END_TEST

/* ---- not finite -------------------------------------------------------------------------------------- */

START_TEST(a_value_that_is_not_finite)
{
    static const char *const where[] = {"lm_head.weight", "model.layers.2.self_attn.kv_b_proj.weight",
                                        "model.embed_tokens.weight", "model.norm.weight"};
    static const float bad[] = {NAN, INFINITY};

    for (int i = 0; i < 8; i++) {
        struct small s, twin;
        small_open(&s, NULL, "");
        small_open(&twin, NULL, "");
        glm52_batch *b = small_text(&s, 60, 1);
        small_train(&s, &b, 1);
        small_train(&twin, &b, 1);
        struct snapshot before = small_snapshot(&s, VALUES);
        float *value = (float *)small_parameter(&s, where[i / 2]).value.data + 3 * (i / 2 < 3), good = *value;
        *value = bad[i % 2];
        SAYS(glm52_step_run(s.step, &b, 1), GLM52_E_NUMERIC, "not finite|nothing was updated");
        *value = good; /* the repair */
        struct snapshot after = small_snapshot(&s, VALUES);
        check_same(&s, &before, &after);
        ck_assert(small_train(&s, &b, 1) == small_train(&twin, &b, 1)); /* moments and counters were left alone too */
        struct snapshot found = small_snapshot(&s, VALUES), expected = small_snapshot(&twin, VALUES);
        check_same(&s, &expected, &found);
        double step;
        OK(glm52_step_metric(s.step, "step", &step));
        ck_assert(step == 2);
        snapshot_free(&before);
        snapshot_free(&after);
        snapshot_free(&found);
        snapshot_free(&expected);
        glm52_batch_unref(&b);
        small_close(&s);
        small_close(&twin);
    }
}
END_TEST

/* ---- cancelling -------------------------------------------------------------------------------------- */

START_TEST(cancelled_before)
{
    const char *directory = scratch_make();
    struct small s;
    glm52_model *model = NULL;
    int32_t tokens[4] = {0};
    uint64_t produced;

    small_open(&s, NULL, "");
    glm52_batch *b = small_text(&s, 30, 1);
    OK(glm52_model_save(s.model, directory, 0));
    OK(glm52_step_save(s.step, directory));
    struct snapshot before = small_snapshot(&s, VALUES);
#define CANCELLED(call)                        \
    glm52_context_cancel(s.context);           \
    REFUSED(call, GLM52_E_CANCELLED);          \
    OK(call) /* the request is spent */
    CANCELLED(glm52_step_evaluate(s.step, &b, 1, NULL));
    CANCELLED(glm52_step_gradients(s.step, &b, 1));
    CANCELLED(glm52_model_save(s.model, directory, 0));
    CANCELLED(glm52_step_save(s.step, directory));
    CANCELLED(glm52_step_resume(s.step, directory, NULL));
    CANCELLED(glm52_model_generate(s.model, tokens, 1, 3, 0, 0, tokens, &produced));
    struct snapshot after = small_snapshot(&s, VALUES);
    check_same(&s, &before, &after);
    CANCELLED(glm52_model_load(s.context, NULL, directory, &model));
    glm52_model_unref(&model);
    CANCELLED(glm52_model_create(s.context, s.config, &model));
    glm52_model_unref(&model);
    CANCELLED(glm52_step_run(s.step, &b, 1));
    double step;
    OK(glm52_step_metric(s.step, "step", &step));
    ck_assert(step == 1);
    ck_assert_int_eq(scratch_files(directory, ".tmp"), 0);
    snapshot_free(&before);
    snapshot_free(&after);
    glm52_batch_unref(&b);
    small_close(&s);
    scratch_remove();
}
END_TEST

static void *cancel_soon(void *context)
{
    usleep(3000);
    glm52_context_cancel(context);
    return NULL;
}

/* A run of 64 microbatches takes some tenths of a second: the request finds it at work. */
START_TEST(cancelled_at_work)
{
    enum { MANY = 64 };
    struct small s;
    glm52_batch *b[MANY];
    pthread_t thread;

    small_open(&s, NULL, "train.microbatches=64 train.microbatch_tokens=512 data.pack_tokens=512");
    for (int i = 0; i < MANY; i++) b[i] = small_text(&s, 512, (unsigned)i);
    struct snapshot before = small_snapshot(&s, VALUES);
    ck_assert(!pthread_create(&thread, NULL, cancel_soon, s.context));
    REFUSED(glm52_step_run(s.step, b, MANY), GLM52_E_CANCELLED);
    ck_assert(!pthread_join(thread, NULL));
    struct snapshot after = small_snapshot(&s, VALUES);
    check_same(&s, &before, &after);
    small_train(&s, b, 2);
    snapshot_free(&before);
    snapshot_free(&after);
    for (int i = 0; i < MANY; i++) glm52_batch_unref(&b[i]);
    small_close(&s);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("api");
    TCase *cases = tcase_create("refusals");

    tcase_set_timeout(cases, 60);
    tcase_add_test(cases, fields);
    tcase_add_test(cases, a_refused_field_keeps_the_outputs);
    tcase_add_test(cases, ids_outside_the_vocabulary);
    tcase_add_test(cases, batches_that_cannot_run);
    tcase_add_test(cases, a_document_beyond_the_last_position);
    tcase_add_test(cases, parts_of_different_models);
    tcase_add_test(cases, a_config_without_a_model);
    tcase_add_test(cases, a_value_that_is_not_finite);
    tcase_add_test(cases, cancelled_before);
    tcase_add_test(cases, cancelled_at_work);
    suite_add_tcase(suite, cases);
    return run_tap(suite);
}
