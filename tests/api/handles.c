/* Handles and structs as the header promises them, through the shared library alone: NULL and wrong classes,
 * struct_size, references, the order of destruction, errors, cancellation. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "small/small.h"
#include "unit/scratch.h"
#include "unit/tap.h"

/* One of each class, and a handle of none. */
static struct small s;
static glm52_batch *batch;
static glm52_dataset *dataset;
static const char *directory;

static void start(void)
{
    char settings[160], text[2000];

    directory = scratch_make();
    memset(text, 'a', sizeof text);
    snprintf(settings, sizeof settings, "%s/text", directory);
    scratch_write(settings, text, sizeof text);
    snprintf(settings, sizeof settings, "model.vocab_size=256 data.held_out=0 data.text=%s/text", directory);
    small_open(&s, NULL, settings);
    batch = small_text(&s, 20, 1);
    OK(glm52_dataset_open(s.context, s.config, &dataset));
}

static void finish(void)
{
    glm52_batch_unref(&batch);
    glm52_dataset_unref(&dataset);
    small_close(&s);
    scratch_remove();
}

/* ---- every function with a handle, given one that does not fit --------------------------------------- */

static void *made;              /* stands for whatever comes out */
static const char *text;
static uint64_t number;
static uint32_t index_;
static double real;
static int32_t tokens[8];

/* Each function with `h` in the place of its handle, and every other argument in order. */
#define EACH_CONTEXT(X)                                                                                             \
    X(glm52_context_describe_device(h, &text))                                                                      \
    X(glm52_context_memory(h, &number, &number))                                                                    \
    X(glm52_config_create(h, (glm52_config **)(void *)&made))                                                       \
    X(glm52_model_create(h, s.config, (glm52_model **)(void *)&made))                                               \
    X(glm52_model_load(h, s.config, directory, (glm52_model **)(void *)&made))                                      \
    X(glm52_batch_create(h, (glm52_batch **)(void *)&made))                                                         \
    X(glm52_dataset_open(h, s.config, (glm52_dataset **)(void *)&made))
#define EACH_CONFIG(X)                                                                                              \
    X(glm52_config_load_hub(h, "x"))                                                                                \
    X(glm52_config_load_json(h, "{}"))                                                                              \
    X(glm52_config_set(h, "optim.lr", "1"))                                                                         \
    X(glm52_config_get(h, "optim.lr", &text))                                                                       \
    X(glm52_config_validate(h))                                                                                     \
    X(glm52_config_dump(h, 0, &text))                                                                               \
    X(glm52_model_create(s.context, h, (glm52_model **)(void *)&made))                                              \
    X(glm52_dataset_open(s.context, h, (glm52_dataset **)(void *)&made))                                            \
    X(glm52_step_set_stage(s.step, h))
#define EACH_OPTIONAL_CONFIG(X)                                                                                     \
    X(glm52_model_load(s.context, h, directory, (glm52_model **)(void *)&made))                                     \
    X(glm52_optimizer_create(s.model, h, (glm52_optimizer **)(void *)&made))                                        \
    X(glm52_step_create(s.model, s.optimizer, h, (glm52_step **)(void *)&made))
#define EACH_MODEL(X)                                                                                               \
    X(glm52_model_save(h, directory, 0))                                                                            \
    X(glm52_model_describe(h, &text))                                                                               \
    X(glm52_model_parameter_count(h, &index_, &number))                                                             \
    X(glm52_model_parameter(h, 0, &(glm52_parameter_info){.struct_size = sizeof(glm52_parameter_info)}))            \
    X(glm52_model_parameter_find(h, "lm_head.weight", &index_))                                                     \
    X(glm52_model_forward(h, batch, "loss"))                                                                        \
    X(glm52_model_generate(h, tokens, 1, 1, 0, 0, tokens, &number))                                                 \
    X(glm52_optimizer_create(h, NULL, (glm52_optimizer **)(void *)&made))                                           \
    X(glm52_step_create(h, NULL, NULL, (glm52_step **)(void *)&made))
#define EACH_BATCH(X)                                                                                               \
    X(glm52_batch_set(h, "tokens", GLM52_DTYPE_I32, tokens, 8))                                                     \
    X(glm52_batch_tokens(h, &number, &number))                                                                      \
    X(glm52_batch_get(h, "tokens", &(glm52_view){.struct_size = sizeof(glm52_view)}))                               \
    X(glm52_dataset_next(dataset, h))                                                                               \
    X(glm52_dataset_held_out(dataset, 0, h))                                                                        \
    X(glm52_model_forward(s.model, h, "loss"))                                                                      \
    X(glm52_step_run(s.step, &(glm52_batch *){h}, 1))                                                               \
    X(glm52_step_gradients(s.step, &(glm52_batch *){h}, 1))                                                         \
    X(glm52_step_evaluate(s.step, &(glm52_batch *){h}, 1, &real))
#define EACH_DATASET(X)                                                                                             \
    X(glm52_dataset_next(h, batch))                                                                                 \
    X(glm52_dataset_seek(h, 0))                                                                                     \
    X(glm52_dataset_held_out(h, 0, batch))                                                                          \
    X(glm52_dataset_held_out_packs(h, &number))                                                                     \
    X(glm52_dataset_describe(h, &text))
#define EACH_OPTIMIZER(X)                                                                                           \
    X(glm52_optimizer_set_lr(h, 1))                                                                                 \
    X(glm52_optimizer_resync(h))
#define EACH_STEP(X)                                                                                                \
    X(glm52_step_run(h, &batch, 1))                                                                                 \
    X(glm52_step_gradients(h, &batch, 1))                                                                           \
    X(glm52_step_evaluate(h, &batch, 1, &real))                                                                     \
    X(glm52_step_metric(h, "loss", &real))                                                                          \
    X(glm52_step_plan(h, 0, &(glm52_plan_row){.struct_size = sizeof(glm52_plan_row)}))                              \
    X(glm52_step_set_stage(h, s.config))                                                                            \
    X(glm52_step_save(h, directory))                                                                                \
    X(glm52_step_resume(h, directory, &number))

#define REFUSE(call)                                                                                    \
    do {                                                                                                \
        glm52_status status_ = (call);                                                                  \
        ck_assert_msg(status_ == GLM52_E_HANDLE, "%s gives %s", #call, glm52_status_name(status_));     \
        ck_assert_msg(strstr(glm52_error_message(glm52_error_last()), "glm52_") != NULL, "%s: %s", #call, \
                      glm52_error_message(glm52_error_last()));                                         \
        ck_assert_ptr_null(made);                                                                       \
    } while (0);

static void *foreign(void)
{
    static uint64_t zeros[64];

    return zeros;
}

/* All classes' handles but number `own`, and one that the library never made. */
static void *other_handle(int which)
{
    void *const all[] = {s.context, s.config, s.model, batch, dataset, s.optimizer, s.step, foreign()};

    return all[which];
}

enum { HANDLES = 8 };

START_TEST(a_wrong_handle_is_refused)
{
    start();
    for (int i = 0; i < HANDLES; i++) {
        void *h = other_handle(i);
        if (i != 0) { EACH_CONTEXT(REFUSE) }
        if (i != 1) { EACH_CONFIG(REFUSE) EACH_OPTIONAL_CONFIG(REFUSE) }
        if (i != 2) { EACH_MODEL(REFUSE) }
        if (i != 3) { EACH_BATCH(REFUSE) }
        if (i != 4) { EACH_DATASET(REFUSE) }
        if (i != 5) { EACH_OPTIMIZER(REFUSE) REFUSE(glm52_step_create(s.model, h, NULL, (glm52_step **)(void *)&made)) }
        if (i != 6) { EACH_STEP(REFUSE) ck_assert_ptr_null(glm52_step_metric_name(h, 0)); }
    }
    finish();
}
END_TEST

START_TEST(null_is_refused)
{
    void *h = NULL;

    start();
    EACH_CONTEXT(REFUSE)
    EACH_CONFIG(REFUSE)
    EACH_MODEL(REFUSE)
    EACH_BATCH(REFUSE)
    EACH_DATASET(REFUSE)
    EACH_OPTIMIZER(REFUSE)
    EACH_STEP(REFUSE)
    ck_assert_ptr_null(glm52_step_metric_name(NULL, 0));
    ck_assert_ptr_null(glm52_model_ref(NULL));
    glm52_context_cancel(NULL);
    glm52_context_unref(NULL);
    glm52_model *none = NULL;
    glm52_model_unref(&none);
    glm52_error *no_error = NULL;
    glm52_error_unref(&no_error);
    glm52_error_unref(NULL);
    finish();
}
END_TEST

#define NAMES(call, name)                                                                                    \
    do {                                                                                                     \
        REFUSED(call, GLM52_E_INVALID);                                                                      \
        ck_assert_msg(strstr(glm52_error_message(glm52_error_last()), name) != NULL, "%s: %s", #call,        \
                      glm52_error_message(glm52_error_last()));                                              \
    } while (0)

START_TEST(a_null_argument_is_named)
{
    start();
    NAMES(glm52_context_create(NULL, NULL), "out");
    NAMES(glm52_context_describe_device(s.context, NULL), "out");
    NAMES(glm52_config_create(s.context, NULL), "out");
    NAMES(glm52_config_load_hub(s.config, NULL), "path");
    NAMES(glm52_config_load_json(s.config, NULL), "json");
    NAMES(glm52_config_set(s.config, NULL, "1"), "key");
    NAMES(glm52_config_set(s.config, "optim.lr", NULL), "value");
    NAMES(glm52_config_get(s.config, "optim.lr", NULL), "out");
    NAMES(glm52_config_describe(0, NULL), "out");
    NAMES(glm52_config_dump(s.config, 0, NULL), "out");
    NAMES(glm52_model_create(s.context, s.config, NULL), "out");
    NAMES(glm52_model_load(s.context, NULL, NULL, &s.model), "directory");
    NAMES(glm52_model_save(s.model, NULL, 0), "directory");
    NAMES(glm52_model_describe(s.model, NULL), "out");
    NAMES(glm52_model_parameter(s.model, 0, NULL), "out");
    NAMES(glm52_model_parameter_find(s.model, NULL, &index_), "name");
    NAMES(glm52_model_forward(s.model, batch, NULL), "outputs");
    NAMES(glm52_model_generate(s.model, NULL, 1, 1, 0, 0, tokens, &number), "prompt");
    NAMES(glm52_model_generate(s.model, tokens, 1, 1, 0, 0, NULL, &number), "tokens");
    NAMES(glm52_model_generate(s.model, tokens, 1, 1, 0, 0, tokens, NULL), "produced");
    NAMES(glm52_batch_create(s.context, NULL), "out");
    NAMES(glm52_batch_set(batch, NULL, GLM52_DTYPE_I32, tokens, 8), "field");
    NAMES(glm52_batch_set(batch, "tokens", GLM52_DTYPE_I32, NULL, 8), "values");
    NAMES(glm52_batch_get(batch, NULL, &(glm52_view){.struct_size = sizeof(glm52_view)}), "name");
    NAMES(glm52_batch_get(batch, "tokens", NULL), "out");
    NAMES(glm52_dataset_open(s.context, s.config, NULL), "out");
    NAMES(glm52_dataset_held_out_packs(dataset, NULL), "packs");
    NAMES(glm52_optimizer_create(s.model, NULL, NULL), "out");
    NAMES(glm52_step_create(s.model, NULL, NULL, NULL), "out");
    NAMES(glm52_step_run(s.step, NULL, 1), "batches");
    NAMES(glm52_step_metric(s.step, NULL, &real), "name");
    NAMES(glm52_step_metric(s.step, "loss", NULL), "out");
    NAMES(glm52_step_plan(s.step, 0, NULL), "out");
    NAMES(glm52_step_save(s.step, NULL), "directory");
    NAMES(glm52_step_resume(s.step, NULL, &number), "directory");
    OK(glm52_context_memory(s.context, NULL, NULL));
    OK(glm52_model_parameter_count(s.model, NULL, NULL));
    OK(glm52_batch_tokens(batch, NULL, NULL));
    OK(glm52_step_evaluate(s.step, &batch, 1, NULL));
    finish();
}
END_TEST

/* ---- structs ----------------------------------------------------------------------------------------- */

START_TEST(struct_sizes)
{
    struct {
        glm52_view known;
        char later[16];
    } large;

    start();
    REFUSED(glm52_config_describe(0, &(glm52_option_info){.struct_size = 4}), GLM52_E_VERSION);
    REFUSED(glm52_model_parameter(s.model, 0, &(glm52_parameter_info){.struct_size = 0}), GLM52_E_VERSION);
    REFUSED(glm52_step_plan(s.step, 0, &(glm52_plan_row){.struct_size = 8}), GLM52_E_VERSION);
    glm52_view small = {.struct_size = sizeof small - 1};
    REFUSED(glm52_batch_get(batch, "tokens", &small), GLM52_E_VERSION);
    ck_assert_ptr_null(small.data); /* a failure leaves it alone */
    memset(&large, 0x5a, sizeof large);
    large.known.struct_size = sizeof large;
    OK(glm52_batch_get(batch, "tokens", &large.known)); /* of a newer header: what this library knows is written */
    ck_assert_uint_eq(large.known.struct_size, sizeof large.known);
    for (size_t i = 0; i < sizeof large.later; i++) ck_assert_int_eq(large.later[i], 0x5a);
    glm52_option_info info = {.struct_size = sizeof info};
    OK(glm52_config_describe(0, &info));
    ck_assert_uint_eq(info.struct_size, sizeof info);
    uint32_t options = 0;
    while (!glm52_config_describe(options, &info)) options++;
    ck_assert_uint_gt(options, 50);
    ck_assert_int_eq(glm52_error_status(glm52_error_last()), GLM52_E_INVALID);
    finish();
}
END_TEST

static void *give(void *user, size_t bytes, size_t alignment)
{
    ++*(int *)user;
    return aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}

static void take(void *user, void *memory, size_t bytes)
{
    (void)bytes;
    --*(int *)user;
    free(memory);
}

START_TEST(options_of_a_context)
{
    struct {
        glm52_context_options known;
        uint64_t later;
    } newer = {{.struct_size = sizeof newer}, 0};
    struct {
        glm52_allocator known;
        uint64_t later;
    } allocator = {{.struct_size = sizeof allocator, .allocate = give, .release = take}, 0};
    glm52_context_options o = {.struct_size = sizeof o};
    glm52_context *context = NULL;
    int blocks = 0;

    OK(glm52_context_create(&newer.known, &context));
    glm52_context_unref(&context);
    newer.later = 1;
    REFUSED(glm52_context_create(&newer.known, &context), GLM52_E_VERSION);
    REFUSED(glm52_context_create(&(glm52_context_options){.struct_size = 3}, &context), GLM52_E_VERSION);
    REFUSED(glm52_context_create(&(glm52_context_options){.struct_size = sizeof o, .flags = 1}, &context),
            GLM52_E_INVALID);
    REFUSED(glm52_context_create(&(glm52_context_options){.struct_size = sizeof o, .threads = -1}, &context),
            GLM52_E_INVALID);
    REFUSED(glm52_context_create(&(glm52_context_options){.struct_size = sizeof o, .device = "gpu"}, &context),
            GLM52_E_INVALID);
    ck_assert_ptr_nonnull(strstr(glm52_error_message(glm52_error_last()), "gpu"));
    if (!glm52_feature("cuda")) {
        o.device = "cuda:1";
        REFUSED(glm52_context_create(&o, &context), GLM52_E_UNSUPPORTED);
        o.device = NULL;
    }
    allocator.known.user = &blocks;
    o.allocator = &allocator.known;
    OK(glm52_context_create(&o, &context));
    ck_assert_int_gt(blocks, 0);
    glm52_context_unref(&context);
    ck_assert_int_eq(blocks, 0);
    allocator.later = 1;
    REFUSED(glm52_context_create(&o, &context), GLM52_E_VERSION);
    allocator.later = 0;
    allocator.known.release = NULL;
    REFUSED(glm52_context_create(&o, &context), GLM52_E_INVALID);
    ck_assert_ptr_null(context);
}
END_TEST

/* ---- references -------------------------------------------------------------------------------------- */

/* Drops handle number i. */
static void drop(int i)
{
    switch (i) {
    case 0: glm52_context_unref(&s.context); break;
    case 1: glm52_config_unref(&s.config); break;
    case 2: glm52_model_unref(&s.model); break;
    case 3: glm52_optimizer_unref(&s.optimizer); break;
    case 4: glm52_step_unref(&s.step); break;
    case 5: glm52_batch_unref(&batch); break;
    default: glm52_dataset_unref(&dataset); break;
    }
}

enum { DROPS = 7 };

/* Many of the 5040 orders, each handle first and last among them; what is left at each moment still works. */
START_TEST(handles_die_in_any_order)
{
    for (unsigned seed = 0; seed < 40; seed++) {
        int order[DROPS], blocks = 0;
        glm52_allocator allocator = {sizeof allocator, 0, &blocks, give, take};
        glm52_context_options options = {.struct_size = sizeof options, .allocator = &allocator};
        for (int i = 0; i < DROPS; i++) order[i] = (i + (int)seed) % DROPS;
        for (int i = DROPS - 1; i > 0 && seed >= DROPS; i--) {
            int j = small_token(seed, i) % (i + 1), keep = order[i];
            order[i] = order[j];
            order[j] = keep;
        }
        start(); /* its directory holds the text */
        char settings[128];
        snprintf(settings, sizeof settings, "model.vocab_size=256 data.held_out=0 data.text=%s/text", directory);
        glm52_batch_unref(&batch);
        glm52_dataset_unref(&dataset);
        small_close(&s);
        small_open(&s, &options, settings);
        batch = small_text(&s, 20, 1);
        OK(glm52_dataset_open(s.context, s.config, &dataset));
        for (int i = 0; i < DROPS; i++) {
            drop(order[i]);
            if (s.step && batch) small_loss(&s, batch);
            if (dataset && batch) OK(glm52_dataset_next(dataset, batch));
            if (s.model) OK(glm52_model_describe(s.model, &text));
        }
        ck_assert_int_eq(blocks, 0);
        scratch_remove();
    }
}
END_TEST

START_TEST(references_count)
{
    start();
    glm52_model *again = glm52_model_ref(s.model);
    ck_assert_ptr_eq(again, s.model);
    glm52_model_unref(&s.model);
    ck_assert_ptr_null(s.model);
    OK(glm52_model_describe(again, &text));
    s.model = again;
    ck_assert_ptr_null(glm52_model_ref((glm52_model *)(void *)s.config));
    ck_assert_int_eq(glm52_error_status(glm52_error_last()), GLM52_E_HANDLE);
    glm52_model *wrong = (glm52_model *)(void *)s.config;
    glm52_model_unref(&wrong); /* not of its class: left alone */
    OK(glm52_config_validate(s.config));
    finish();
}
END_TEST

/* ---- errors ------------------------------------------------------------------------------------------ */

static void *other_thread(void *unused)
{
    (void)unused;
    ck_assert_ptr_null(glm52_error_last());
    glm52_config_validate(NULL);
    ck_assert_int_eq(glm52_error_status(glm52_error_last()), GLM52_E_HANDLE);
    return NULL;
}

START_TEST(errors)
{
    pthread_t thread;

    start();
    REFUSED(glm52_config_set(s.config, "optim.lr", "fast"), GLM52_E_INVALID);
    ck_assert_str_eq(glm52_error_detail(glm52_error_last(), "key"), "optim.lr");
    ck_assert_ptr_null(glm52_error_detail(glm52_error_last(), "nothing"));
    OK(glm52_config_validate(s.config)); /* a success does not clear it */
    ck_assert(!pthread_create(&thread, NULL, other_thread, NULL) && !pthread_join(thread, NULL));
    glm52_error *mine = glm52_error_take();
    ck_assert_ptr_null(glm52_error_last());
    ck_assert_ptr_null(glm52_error_take());
    glm52_config_validate(NULL);
    ck_assert_int_eq(glm52_error_status(mine), GLM52_E_INVALID);
    ck_assert_ptr_nonnull(strstr(glm52_error_message(mine), "fast"));
    glm52_error_unref(&mine);
    ck_assert_ptr_null(mine);
    ck_assert_int_eq(glm52_error_status(NULL), GLM52_OK);
    ck_assert_str_eq(glm52_error_message(NULL), "");
    ck_assert_str_eq(glm52_error_hint(NULL), "");
    ck_assert_str_eq(glm52_status_name(GLM52_E_NUMERIC), "GLM52_E_NUMERIC");
    ck_assert_str_eq(glm52_status_name(-1000), "unknown");
    ck_assert_str_eq(glm52_status_name(3), "unknown");
    finish();
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("api");
    TCase *cases = tcase_create("handles");

    tcase_set_timeout(cases, 60);
    tcase_add_test(cases, a_wrong_handle_is_refused);
    tcase_add_test(cases, null_is_refused);
    tcase_add_test(cases, a_null_argument_is_named);
    tcase_add_test(cases, struct_sizes);
    tcase_add_test(cases, options_of_a_context);
    tcase_add_test(cases, handles_die_in_any_order);
    tcase_add_test(cases, references_count);
    tcase_add_test(cases, errors);
    suite_add_tcase(suite, cases);
    return run_tap(suite);
}
