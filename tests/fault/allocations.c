/* Every allocation fails once: the call says NOMEM, holds nothing more than before, and works when it is tried
 * again. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "small/small.h"
#include "unit/faults.h"
#include "unit/scratch.h"
#include "unit/tap.h"

struct world {
    struct small s;
    struct faults f;
    glm52_context_options options;
    glm52_batch *batch;
    glm52_dataset *dataset;
    const char *directory;
};

/* Calls until no allocation is left to fail. A failure must leave memory as it was, but for what a first call may
 * keep. */
static int64_t sweep(struct world *w, const char *what, glm52_status (*call)(struct world *))
{
    struct faults *f = &w->f;

    for (int64_t k = 0; k < 5000; k++) {
        int64_t held = f->held;
        f->allocations = 0;
        f->fail_allocation = k;
        glm52_status status = call(w);
        int reached = f->allocations > k;
        f->fail_allocation = -1;
        ck_assert_int_eq(f->open_files, 0);
        if (!reached) {
            ck_assert_msg(status == GLM52_OK, "%s: %s", what, glm52_error_message(glm52_error_last()));
            return k;
        }
        if (status == GLM52_OK) continue; /* it could do without */
        ck_assert_msg(status == GLM52_E_NOMEM, "%s, allocation %d: %s", what, (int)k, glm52_status_name(status));
        ck_assert_ptr_nonnull(strstr(glm52_error_message(glm52_error_last()), "memory"));
        ck_assert_msg(f->held == held, "%s, allocation %d: %lld bytes are kept", what, (int)k,
                      (long long)(f->held - held));
    }
    ck_abort_msg("%s never succeeds", what);
}

static void start(struct world *w)
{
    memset(w, 0, sizeof *w);
    w->directory = scratch_make();
    faults_options(&w->f, &w->options);
}

static void start_model(struct world *w, const char *settings)
{
    start(w);
    small_open(&w->s, &w->options, settings);
    w->batch = small_batch(&w->s, 2, (struct document[]){{20, 1}, {9, 2}});
}

static void finish(struct world *w)
{
    glm52_batch_unref(&w->batch);
    glm52_dataset_unref(&w->dataset);
    if (w->s.context) small_close(&w->s);
    ck_assert_int_eq(w->f.held, 0);
    ck_assert_int_eq(w->f.open_files, 0);
    scratch_remove();
}

/* ---- the calls --------------------------------------------------------------------------------------- */

static glm52_status create_context(struct world *w)
{
    return glm52_context_create(&w->options, &w->s.context);
}

static glm52_status create_config(struct world *w)
{
    return glm52_config_create(w->s.context, &w->s.config);
}

static glm52_status set_option(struct world *w)
{
    return glm52_config_set(w->s.config, "data.text", "somewhere/else/than/before");
}

static glm52_status load_json(struct world *w)
{
    return glm52_config_load_json(w->s.config,
                                  "{\"out\": \"x\", \"model\": {\"preset\": \"tiny\"}, \"data.tokenizer\": \"bytes\"}");
}

static glm52_status load_hub(struct world *w)
{
    char path[128];

    snprintf(path, sizeof path, "%s/config.json", w->directory);
    return glm52_config_load_hub(w->s.config, path);
}

static glm52_status dump(struct world *w)
{
    const char *text;

    return glm52_config_dump(w->s.config, 1, &text);
}

static glm52_status create_model(struct world *w)
{
    return glm52_model_create(w->s.context, w->s.config, &w->s.model);
}

static glm52_status create_optimizer(struct world *w)
{
    return glm52_optimizer_create(w->s.model, NULL, &w->s.optimizer);
}

static glm52_status create_step(struct world *w)
{
    return glm52_step_create(w->s.model, w->s.optimizer, NULL, &w->s.step);
}

static glm52_status create_batch(struct world *w)
{
    return glm52_batch_create(w->s.context, &w->batch);
}

static glm52_status run(struct world *w)
{
    return glm52_step_run(w->s.step, &w->batch, 1);
}

static glm52_status evaluate(struct world *w)
{
    double loss;

    return glm52_step_evaluate(w->s.step, &w->batch, 1, &loss);
}

static glm52_status gradients(struct world *w)
{
    return glm52_step_gradients(w->s.step, &w->batch, 1);
}

static glm52_status plan(struct world *w)
{
    glm52_plan_row row = {.struct_size = sizeof row};

    return glm52_step_plan(w->s.step, 0, &row);
}

static glm52_status forward(struct world *w)
{
    return glm52_model_forward(w->s.model, w->batch, "*");
}

static glm52_status generate(struct world *w)
{
    static const int32_t prompt[] = {1, 2, 3};
    int32_t tokens[4];
    uint64_t produced;

    return glm52_model_generate(w->s.model, prompt, 3, 4, 0.7, 1, tokens, &produced);
}

static glm52_status save(struct world *w)
{
    return glm52_model_save(w->s.model, w->directory, GLM52_DTYPE_BF16);
}

static glm52_status save_step(struct world *w)
{
    return glm52_step_save(w->s.step, w->directory);
}

static glm52_status load(struct world *w)
{
    return glm52_model_load(w->s.context, w->s.config, w->directory, &w->s.model);
}

static glm52_status open_dataset(struct world *w)
{
    return glm52_dataset_open(w->s.context, w->s.config, &w->dataset);
}

static glm52_status next_pack(struct world *w)
{
    return glm52_dataset_next(w->dataset, w->batch);
}

static int32_t two_thousand[2000];

static glm52_status set_tokens(struct world *w)
{
    return glm52_batch_set(w->batch, "tokens", GLM52_DTYPE_I32, two_thousand, 2000);
}

static glm52_status set_documents(struct world *w)
{
    static const int32_t cu[] = {0, 3, 7, 2000};

    return glm52_batch_set(w->batch, "cu_seqlens", GLM52_DTYPE_I32, cu, 4);
}

/* ---- the sweeps -------------------------------------------------------------------------------------- */

START_TEST(creating)
{
    struct world w;

    start(&w);
    ck_assert_int_eq(sweep(&w, "context", create_context), 1);
    ck_assert_int_gt(sweep(&w, "config", create_config), 1);
    small_close(&w.s);
    small_configure(&w.s, &w.options, "model.num_nextn_predict_layers=1");
    ck_assert_int_gt(sweep(&w, "model", create_model), 5);
    ck_assert_int_gt(sweep(&w, "optimizer", create_optimizer), 3);
    ck_assert_int_gt(sweep(&w, "step", create_step), 8);
    ck_assert_int_gt(sweep(&w, "batch", create_batch), 0);
    finish(&w);
}
END_TEST

START_TEST(configuring)
{
    struct world w;

    start_model(&w, "");
    OK(glm52_model_save(w.s.model, w.directory, 0));
    sweep(&w, "set", set_option);
    sweep(&w, "load_json", load_json);
    sweep(&w, "dump", dump);
    glm52_config_unref(&w.s.config);
    OK(create_config(&w));
    sweep(&w, "load_hub", load_hub);
    finish(&w);
}
END_TEST

/* A failed set leaves the option as it was. */
START_TEST(a_config_stays_as_it_was)
{
    struct world w;
    const char *text;

    start(&w);
    small_configure(&w.s, &w.options, "data.text=before");
    for (int64_t k = 0;; k++) {
        w.f.allocations = 0;
        w.f.fail_allocation = k;
        glm52_status status = load_json(&w);
        w.f.fail_allocation = -1;
        if (!status) break;
        OK(glm52_config_get(w.s.config, "out", &text));
        ck_assert_str_eq(text, "");
        OK(glm52_config_get(w.s.config, "model.hidden_size", &text));
        ck_assert_str_eq(text, "20");
        OK(glm52_config_get(w.s.config, "data.text", &text));
        ck_assert_str_eq(text, "before");
    }
    finish(&w);
}
END_TEST

START_TEST(filling_batches)
{
    struct world w;
    char path[96], settings[160], text[5000];
    uint64_t tokens, documents;

    start(&w);
    for (int i = 0; i < 5000; i++) text[i] = i % 40 == 39 ? '\n' : 'a';
    snprintf(path, sizeof path, "%s/text", w.directory);
    scratch_write(path, text, sizeof text);
    snprintf(settings, sizeof settings, "data.text=%s model.vocab_size=256", path);
    small_configure(&w.s, &w.options, settings);
    sweep(&w, "dataset", open_dataset);
    OK(create_batch(&w));
    sweep(&w, "dataset_next", next_pack);
    sweep(&w, "tokens", set_tokens);
    sweep(&w, "cu_seqlens", set_documents);
    OK(glm52_batch_tokens(w.batch, &tokens, &documents));
    ck_assert_uint_eq(tokens, 2000);
    ck_assert_uint_eq(documents, 3);
    finish(&w);
}
END_TEST

START_TEST(a_batch_stays_as_it_was)
{
    struct world w;
    uint64_t tokens, documents;

    start_model(&w, "");
    double loss = small_loss(&w.s, w.batch);
    for (int64_t k = 0;; k++) {
        w.f.allocations = 0;
        w.f.fail_allocation = k;
        glm52_status status = set_tokens(&w);
        w.f.fail_allocation = -1;
        OK(glm52_batch_tokens(w.batch, &tokens, &documents));
        ck_assert_uint_eq(tokens, status ? 29 : 2000);
        if (!status) break;
        ck_assert_uint_eq(documents, 2);
        ck_assert(small_loss(&w.s, w.batch) == loss);
    }
    finish(&w);
}
END_TEST

START_TEST(running)
{
    struct world w;

    start_model(&w, "");
    double before = small_loss(&w.s, w.batch);
    sweep(&w, "evaluate", evaluate);
    sweep(&w, "gradients", gradients);
    ck_assert(small_loss(&w.s, w.batch) == before);
    sweep(&w, "run", run); /* the failures updated nothing: one update in all */
    double step, after = small_loss(&w.s, w.batch);
    OK(glm52_step_metric(w.s.step, "step", &step));
    ck_assert(step == 1 && after < before);
    sweep(&w, "plan", plan);
    sweep(&w, "forward", forward);
    sweep(&w, "generate", generate);
    ck_assert(small_loss(&w.s, w.batch) == after);
    finish(&w);
}
END_TEST

START_TEST(saving_and_loading)
{
    for (int shards = 0; shards < 2; shards++) {
        struct world w;
        start_model(&w, shards ? "shard_bytes=9000" : "");
        ck_assert_int_gt(sweep(&w, "save", save), 3);
        ck_assert_int_eq(scratch_files(w.directory, ".tmp"), 0);
        glm52_step_unref(&w.s.step);
        glm52_optimizer_unref(&w.s.optimizer);
        glm52_model_unref(&w.s.model);
        ck_assert_int_gt(sweep(&w, "load", load), 8);
        OK(create_step(&w));
        ck_assert(small_loss(&w.s, w.batch) > 0);
        finish(&w);
    }
}
END_TEST

/* Resuming may fail when reading has begun: then it says so, and the next try makes everything good. */
START_TEST(states)
{
    struct world w;

    start_model(&w, "");
    OK(run(&w));
    ck_assert_int_gt(sweep(&w, "step_save", save_step), 5);
    ck_assert_int_eq(scratch_files(w.directory, "step-"), 1);
    double expected = small_loss(&w.s, w.batch);
    for (int64_t k = 0;; k++) {
        OK(run(&w));
        double moved = small_loss(&w.s, w.batch);
        int64_t held = w.f.held;
        w.f.allocations = 0;
        w.f.fail_allocation = k;
        glm52_status status = glm52_step_resume(w.s.step, w.directory, NULL);
        w.f.fail_allocation = -1;
        ck_assert_int_eq(w.f.held, held);
        if (!status) break;
        ck_assert_int_eq(status, GLM52_E_NOMEM);
        if (!glm52_error_detail(glm52_error_last(), "state")) ck_assert(small_loss(&w.s, w.batch) == moved);
        OK(glm52_step_resume(w.s.step, w.directory, NULL));
        ck_assert(small_loss(&w.s, w.batch) == expected);
    }
    ck_assert(small_loss(&w.s, w.batch) == expected);
    finish(&w);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("fault");
    TCase *cases = tcase_create("allocations");

    tcase_set_timeout(cases, 120);
    tcase_add_test(cases, creating);
    tcase_add_test(cases, configuring);
    tcase_add_test(cases, a_config_stays_as_it_was);
    tcase_add_test(cases, filling_batches);
    tcase_add_test(cases, a_batch_stays_as_it_was);
    tcase_add_test(cases, running);
    tcase_add_test(cases, saving_and_loading);
    tcase_add_test(cases, states);
    suite_add_tcase(suite, cases);
    return run_tap(suite);
}
