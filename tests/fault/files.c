/* Every file operation fails once, in several ways: the call says IO and names the path, and what was on the disk
 * before is still there, or the new state is, whole. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "small/small.h"
#include "unit/faults.h"
#include "unit/scratch.h"
#include "unit/tap.h"

static const struct document text = {40, 5};

static const struct fault {
    enum fault_kind kind;
    int error;
} faults[] = {{FAULT_ERROR, ENOSPC}, {FAULT_SHORT, EIO}, {FAULT_NOTHING, EIO}};

enum { FAULTS = sizeof faults / sizeof *faults };

/* Few tensors, for a sweep's time grows with the square of their number. */
static void fault_open(struct small *s, struct faults *f, const struct fault *fault, const char *settings)
{
    static const char few[] = "model.num_hidden_layers=2 model.indexer_types=full,shared model.n_routed_experts=2";
    glm52_context_options options;
    char all[512];

    faults_options(f, &options);
    f->closes = 1;
    f->kind = fault->kind;
    f->error = fault->error;
    snprintf(all, sizeof all, "%s %s", few, settings);
    small_open(s, &options, all);
}

/* What every refusal says. */
static void check_failure(glm52_status status, const char *directory, const struct fault *fault, int64_t call)
{
    const glm52_error *e = glm52_error_last();
    const char *path = glm52_error_detail(e, "path"), *number = glm52_error_detail(e, "errno");

    ck_assert_msg(status == GLM52_E_IO || (fault->kind != FAULT_ERROR && status == GLM52_E_CORRUPT), "call %d: %s: %s",
                  (int)call, glm52_status_name(status), glm52_error_message(e));
    int named = path && (strstr(path, directory) || !strncmp(path, directory, strlen(path))); /* or a parent of it */
    ck_assert_msg(named && strstr(glm52_error_message(e), path), "call %d: %s", (int)call, glm52_error_message(e));
    if (fault->kind == FAULT_ERROR)
        ck_assert_msg(number && atoi(number) == fault->error, "call %d: %s", (int)call, glm52_error_message(e));
}

static void check_hint(const struct fault *fault)
{
    if (fault->error == ENOSPC) ck_assert_ptr_nonnull(strstr(glm52_error_hint(glm52_error_last()), "space"));
}

/* ---- models ------------------------------------------------------------------------------------------ */

static const char whole[] = "", shards[] = "shard_bytes=30000", thin[] = "model.hidden_size=26 train.seed=9",
                  thin_shards[] = "model.hidden_size=26 train.seed=9 shard_bytes=20000";

/* A model, and the state it would leave, told by its loss. */
struct saver {
    struct small s;
    struct faults f;
    double loss;
};

static void saver_open(struct saver *saver, const struct fault *fault, const char *settings)
{
    fault_open(&saver->s, &saver->f, fault, settings);
    glm52_batch *batch = small_batch(&saver->s, 1, &text);
    saver->loss = small_loss(&saver->s, batch);
    glm52_batch_unref(&batch);
}

/* Loss of what the directory holds, which must load. */
static double loaded(const char *directory)
{
    struct small s = {0};

    OK(glm52_context_create(NULL, &s.context));
    OK(glm52_model_load(s.context, NULL, directory, &s.model));
    OK(glm52_step_create(s.model, NULL, NULL, &s.step));
    glm52_batch *batch = small_batch(&s, 1, &text);
    double loss = small_loss(&s, batch);
    glm52_batch_unref(&batch);
    glm52_step_unref(&s.step);
    glm52_model_unref(&s.model);
    glm52_context_unref(&s.context);
    return loss;
}

/* Calls with operation k failing; 1 if there were so many. */
static int with_fault(struct saver *saver, int64_t k, glm52_status (*call)(struct small *, const char *),
                      const char *directory, glm52_status *status)
{
    struct faults *f = &saver->f;
    int64_t held = f->held;

    f->calls = 0;
    f->fail_call = k;
    *status = call(&saver->s, directory);
    int reached = f->calls > k;
    f->fail_call = -1;
    ck_assert(!*status || f->held == held);
    ck_assert_int_eq(f->open_files, 0);
    return reached;
}

static glm52_status save_model(struct small *s, const char *directory)
{
    return glm52_model_save(s->model, directory, 0);
}

/* Saves `to` over `from` with each call failing in turn. */
static void sweep_fault(const char *from, const char *to, const struct fault *fault)
{
    const char *directory = scratch_make();
    struct saver old, new;
    glm52_status status;
    int reached = 1;

    saver_open(&old, &faults[0], from);
    saver_open(&new, fault, to);
    OK(save_model(&old.s, directory));
    ck_assert((scratch_files(directory, "-of-") > 1) == (strstr(from, "shard_bytes") != NULL));
    for (int64_t k = 0; reached; k++) {
        reached = with_fault(&new, k, save_model, directory, &status);
        if (status) {
            check_failure(status, directory, fault, k);
            check_hint(fault);
        }
        ck_assert_int_eq(scratch_files(directory, ".tmp"), 0);
        ck_assert_int_eq(scratch_files(directory, ".old"), 0);
        double now = loaded(directory);
        ck_assert_msg(now == old.loss || now == new.loss, "call %d: neither the old state nor the new one", (int)k);
        if (now == old.loss) continue;
        OK(save_model(&old.s, directory));
        ck_assert(loaded(directory) == old.loss);
    }
    ck_assert_int_eq(status, GLM52_OK);
    small_close(&old.s);
    small_close(&new.s);
    scratch_remove();
}

static void sweep_over(const char *from, const char *to)
{
    for (int i = 0; i < FAULTS; i++) sweep_fault(from, to, &faults[i]);
}

START_TEST(saving_over_a_model)
{
    sweep_over(whole, thin);
    sweep_over(thin, whole);
}
END_TEST

START_TEST(saving_shards_over_a_model)
{
    sweep_over(whole, thin_shards);
}
END_TEST

START_TEST(saving_a_model_over_shards)
{
    sweep_over(shards, thin);
    sweep_over(shards, whole);
}
END_TEST

START_TEST(saving_shards_over_shards)
{
    sweep_over(shards, thin_shards);
}
END_TEST

static glm52_model *loaded_model;

static glm52_status load_model(struct small *s, const char *directory)
{
    return glm52_model_load(s->context, NULL, directory, &loaded_model);
}

START_TEST(loading)
{
    static const char *const settings[] = {whole, shards};

    for (int which = 0; which < 2 * FAULTS; which++) {
        const struct fault *fault = &faults[which / 2];
        const char *directory = scratch_make();
        glm52_status status = GLM52_E_IO;
        struct saver saver;
        saver_open(&saver, fault, settings[which % 2]);
        OK(save_model(&saver.s, directory));
        for (int64_t k = 0; status; k++) {
            with_fault(&saver, k, load_model, directory, &status);
            if (status) check_failure(status, directory, fault, k);
            ck_assert((loaded_model == NULL) == (status != GLM52_OK));
            glm52_model_unref(&loaded_model);
        }
        ck_assert(loaded(directory) == saver.loss);
        small_close(&saver.s);
        scratch_remove();
    }
}
END_TEST

/* ---- training states --------------------------------------------------------------------------------- */

/* A state is told by the two updates that follow it: model, moments and counters all take part. */
static double fingerprint(struct small *s)
{
    double sum = 0;

    for (unsigned i = 0; i < 2; i++) {
        glm52_batch *batch = small_text(s, 30, 50 + i);
        sum = 3 * sum + small_train(s, &batch, 1);
        glm52_batch_unref(&batch);
    }
    return sum;
}

static void train(struct small *s, int updates)
{
    for (int i = 0; i < updates; i++) {
        glm52_batch *batch = small_text(s, 30 + i, (unsigned)i);
        small_train(s, &batch, 1);
        glm52_batch_unref(&batch);
    }
}

static glm52_status save_state(struct small *s, const char *directory)
{
    return glm52_step_save(s->step, directory);
}

static double resumed(struct small *reader, const char *directory)
{
    OK(glm52_step_resume(reader->step, directory, NULL));
    return fingerprint(reader);
}

/* A run of another seed saves its state over that of three updates, with each call failing in turn. */
static void sweep_states(int updates, const struct fault *fault)
{
    const char *directory = scratch_make();
    struct saver old, new, reader;
    glm52_status status;
    int reached = 1;

    saver_open(&old, &faults[0], "");
    saver_open(&new, fault, "train.seed=8");
    saver_open(&reader, &faults[0], "train.seed=1000");
    train(&old.s, 3);
    train(&new.s, updates);
    OK(save_state(&new.s, directory));
    double after = resumed(&reader.s, directory);
    OK(save_state(&old.s, directory));
    double before = resumed(&reader.s, directory);
    ck_assert(before != after);
    for (int64_t k = 0; reached; k++) {
        reached = with_fault(&new, k, save_state, directory, &status);
        if (status) {
            check_failure(status, directory, fault, k);
            check_hint(fault);
        }
        double now = resumed(&reader.s, directory);
        ck_assert_msg(now == before || now == after, "call %d: neither the old state nor the new one", (int)k);
        ck_assert(status || now == after);
        ck_assert_int_eq(scratch_files(directory, ".tmp"), 0);
        if (now == after) OK(save_state(&old.s, directory));
    }
    ck_assert_int_eq(status, GLM52_OK);
    small_close(&old.s);
    small_close(&new.s);
    small_close(&reader.s);
    scratch_remove();
}

START_TEST(saving_a_state)
{
    for (int i = 0; i < FAULTS; i++) sweep_states(4, &faults[i]);
}
END_TEST

START_TEST(saving_a_state_of_the_same_step)
{
    for (int i = 0; i < FAULTS; i++) sweep_states(3, &faults[i]);
}
END_TEST

static glm52_status resume(struct small *s, const char *directory)
{
    return glm52_step_resume(s->step, directory, NULL);
}

START_TEST(resuming)
{
    for (int i = 0; i < FAULTS; i++) {
        const char *directory = scratch_make();
        glm52_status status = GLM52_E_IO;
        struct saver old, new;
        saver_open(&old, &faults[0], "");
        saver_open(&new, &faults[i], "train.seed=8");
        train(&old.s, 3);
        OK(save_state(&old.s, directory));
        glm52_batch *batch = small_batch(&new.s, 1, &text);
        for (int64_t k = 0; status; k++) {
            double before = small_loss(&new.s, batch);
            with_fault(&new, k, resume, directory, &status);
            if (!status) break;
            check_failure(status, directory, &faults[i], k);
            if (!glm52_error_detail(glm52_error_last(), "state")) ck_assert(small_loss(&new.s, batch) == before);
            train(&new.s, 1); /* not dead in any case */
        }
        ck_assert(fingerprint(&new.s) == fingerprint(&old.s));
        glm52_batch_unref(&batch);
        small_close(&old.s);
        small_close(&new.s);
        scratch_remove();
    }
}
END_TEST

/* ---- the rest ---------------------------------------------------------------------------------------- */

/* The update is done when its line of metrics cannot be written: the error says so. */
START_TEST(writing_metrics)
{
    for (int64_t k = 0, reached = 1; reached; k++) {
        const char *directory = scratch_make();
        char settings[128];
        struct faults f;
        struct small s;
        double step;

        snprintf(settings, sizeof settings, "out=%s", directory);
        fault_open(&s, &f, &faults[0], settings);
        glm52_batch *batch = small_batch(&s, 1, &text);
        f.calls = 0;
        f.fail_call = k;
        glm52_status status = glm52_step_run(s.step, &batch, 1);
        reached = f.calls > k;
        f.fail_call = -1;
        OK(glm52_step_metric(s.step, "step", &step));
        ck_assert(step == 1);
        if (status) {
            check_failure(status, directory, &faults[0], k);
            ck_assert_str_eq(glm52_error_detail(glm52_error_last(), "state"), "updated");
        }
        train(&s, 1);
        OK(glm52_step_metric(s.step, "step", &step));
        ck_assert(step == 2);
        glm52_batch_unref(&batch);
        small_close(&s);
        ck_assert_int_eq(f.held, 0);
        ck_assert_int_eq(f.open_files, 0);
        scratch_remove();
    }
}
END_TEST

START_TEST(reading_text_and_configs)
{
    const char *directory = scratch_make();
    char path[96], settings[160], hub[96];
    struct faults f;
    struct small s;

    fault_open(&s, &f, &faults[0], whole);
    OK(save_model(&s, directory));
    small_close(&s);
    snprintf(hub, sizeof hub, "%s/config.json", directory);
    snprintf(path, sizeof path, "%s/text", directory);
    scratch_write(path, settings, sizeof settings);
    for (int i = 0; i < FAULTS; i++) {
        fault_open(&s, &f, &faults[i], "model.vocab_size=256");
        snprintf(settings, sizeof settings, "data.text=%s data.held_out=0", path);
        small_set(s.config, settings);
        glm52_dataset *dataset = NULL;
        for (int64_t k = 0;; k++) {
            int64_t held = f.held;
            f.calls = 0;
            f.fail_call = k;
            glm52_status status = glm52_dataset_open(s.context, s.config, &dataset);
            if (!status) break;
            check_failure(status, directory, &faults[i], k);
            ck_assert_int_eq(f.held, held);
        }
        glm52_dataset_unref(&dataset);
        for (int64_t k = 0;; k++) {
            f.calls = 0;
            f.fail_call = k;
            glm52_status status = glm52_config_load_hub(s.config, hub);
            if (!status) break;
            check_failure(status, directory, &faults[i], k);
        }
        small_close(&s);
        ck_assert_int_eq(f.held, 0);
        ck_assert_int_eq(f.open_files, 0);
    }
    scratch_remove();
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("fault");
    TCase *cases = tcase_create("files");

    tcase_set_timeout(cases, 240);
    tcase_add_test(cases, saving_over_a_model);
    tcase_add_test(cases, saving_shards_over_a_model);
    tcase_add_test(cases, saving_a_model_over_shards);
    tcase_add_test(cases, saving_shards_over_shards);
    tcase_add_test(cases, loading);
    tcase_add_test(cases, saving_a_state);
    tcase_add_test(cases, saving_a_state_of_the_same_step);
    tcase_add_test(cases, resuming);
    tcase_add_test(cases, writing_metrics);
    tcase_add_test(cases, reading_text_and_configs);
    suite_add_tcase(suite, cases);
    return run_tap(suite);
}
