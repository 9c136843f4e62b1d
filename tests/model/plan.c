/* The plan against what really happens: memory to the byte class, growth with the number of tokens, and its own
 * cost. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

#include "api/object.h"
#include "small/small.h"
#include "unit/scratch.h"
#include "unit/tap.h"

#if defined(__SANITIZE_ADDRESS__)
enum { SANITIZED = 1 };
#else
enum { SANITIZED = 0 };
#endif

/* A chain up to the step without the shape of small models. */
static void open_step(struct small *s, const char *device, const char *settings)
{
    memset(s, 0, sizeof *s);
    OK(glm52_context_create(&(glm52_context_options){.struct_size = sizeof(glm52_context_options), .device = device},
                            &s->context));
    OK(glm52_config_create(s->context, &s->config));
    small_set(s->config, settings);
    OK(glm52_model_create(s->context, s->config, &s->model));
    OK(glm52_optimizer_create(s->model, NULL, &s->optimizer));
    OK(glm52_step_create(s->model, s->optimizer, NULL, &s->step));
}

static double planned(struct small *s, const char *name)
{
    glm52_plan_row row = {.struct_size = sizeof row};

    for (uint32_t i = 0; !glm52_step_plan(s->step, i, &row); i++)
        if (!strcmp(row.section, "memory") && !strcmp(row.name, name)) return row.amount;
    ck_abort_msg("the plan has no row %s", name);
}

static const char tiny[] =
    "model.preset=tiny data.pack_tokens=1024 data.document_tokens=256 train.microbatch_tokens=1024 "
    "train.microbatches=2";

static void write_text(const char *path)
{
    enum { BYTES = 300000 };
    char *text = malloc(BYTES);

    for (int i = 0; i < BYTES; i++) text[i] = i % 61 == 60 ? '\n' : (char)('a' + small_token(5, i) % 26);
    scratch_write(path, text, BYTES);
    free(text);
}

/* The one percent, on the whole life of a run: data, model, optimizer, step, updates, evaluation. */
static void check_run(const char *more)
{
    const char *directory = scratch_make();
    char settings[512], path[64];
    struct small s, meta;
    glm52_dataset *dataset = NULL;
    glm52_batch *batch[2] = {NULL};
    uint64_t peak;

    snprintf(path, sizeof path, "%s/text", directory);
    write_text(path);
    snprintf(settings, sizeof settings, "%s data.text=%s %s", tiny, path, more);
    open_step(&s, "cpu", settings);
    OK(glm52_dataset_open(s.context, s.config, &dataset));
    for (int i = 0; i < 2; i++) OK(glm52_batch_create(s.context, &batch[i]));
    for (int n = 0; n < 2; n++) {
        for (int i = 0; i < 2; i++) OK(glm52_dataset_next(dataset, batch[i]));
        small_train(&s, batch, 2);
    }
    OK(glm52_dataset_held_out(dataset, 0, batch[0]));
    OK(glm52_step_evaluate(s.step, batch, 1, NULL));
    OK(glm52_context_memory(s.context, NULL, &peak));
    double plan = planned(&s, "peak");
    ck_assert_msg(fabs(plan - (double)peak) <= 0.01 * (double)peak, "plan %.0f, run %.0f", plan, (double)peak);
    for (int class = MEMORY_PARAMETERS; class < MEMORY_HOST; class++)
        ck_assert_msg(planned(&s, memory_class_name[class]) == (double)s.context->host.used[class], "%s",
                      memory_class_name[class]);

    open_step(&meta, "meta", settings);
    ck_assert(fabs(planned(&meta, "peak") - plan) <= 0.001 * plan); /* the same from a context that computes nothing */
    small_close(&meta);
    for (int i = 0; i < 2; i++) glm52_batch_unref(&batch[i]);
    glm52_dataset_unref(&dataset);
    small_close(&s);
    scratch_remove();
}

START_TEST(a_plan_is_what_a_run_takes)
{
    check_run("");
    check_run("train.recompute=light");
    check_run("train.recompute=layers");
}
END_TEST

/* Activations and workspace double with the tokens, within the 5%. */
static void check_growth(const double *bytes, int count)
{
    for (int i = 1; i < count; i++)
        ck_assert_msg(fabs(bytes[i] / bytes[i - 1] - 2) <= 0.1, "%.0f, then %.0f bytes", bytes[i - 1], bytes[i]);
}

static void check_growth_of_plans(const char *more)
{
    double bytes[3];
    char settings[256];

    for (int i = 0; i < 3; i++) {
        struct small s;
        int tokens = 4096 << i;
        snprintf(settings, sizeof settings, "model.preset=bench data.pack_tokens=%d train.microbatch_tokens=%d %s",
                 tokens, tokens, more);
        open_step(&s, "meta", settings);
        bytes[i] = planned(&s, "activations") + planned(&s, "workspace");
        small_close(&s);
    }
    check_growth(bytes, 3);
}

START_TEST(memory_grows_with_the_tokens)
{
    check_growth_of_plans("");
    check_growth_of_plans("train.recompute=light");
    check_growth_of_plans("train.recompute=layers");
}
END_TEST

START_TEST(memory_really_grows_with_the_tokens)
{
    double bytes[3];
    char settings[256];

    for (int i = 0; i < 3; i++) {
        struct small s;
        int tokens = 1024 << i;
        snprintf(settings, sizeof settings, "model.preset=tiny data.pack_tokens=%d train.microbatch_tokens=%d", tokens,
                 tokens);
        open_step(&s, "cpu", settings);
        bytes[i] = (double)(s.context->host.used[MEMORY_ACTIVATIONS] + s.context->host.used[MEMORY_WORKSPACE]);
        small_close(&s);
    }
    check_growth(bytes, 3);
}
END_TEST

/* Under 5 s and 500 MB for 744B parameters; much less of both, but the machine may be busy. */
START_TEST(the_full_model_is_planned_on_a_laptop)
{
    struct small s;
    struct timespec begin, end;
    struct rusage usage;
    uint64_t elements;

    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &begin);
    open_step(&s, "meta", "model.preset=glm52 model.num_nextn_predict_layers=0 data.pack_tokens=4096 "
                          "train.microbatch_tokens=4096");
    double parameters = planned(&s, "parameters"), activations = planned(&s, "activations");
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &end);
    getrusage(RUSAGE_SELF, &usage);
    OK(glm52_model_parameter_count(s.model, NULL, &elements));
    ck_assert(elements > UINT64_C(730000000000) && elements < UINT64_C(760000000000));
    ck_assert(parameters >= 4 * (double)elements && parameters < 4.01 * (double)elements); /* fp32 */
    ck_assert(activations > 1e10);
    double seconds = (double)(end.tv_sec - begin.tv_sec) + 1e-9 * (double)(end.tv_nsec - begin.tv_nsec);
    if (!SANITIZED) {
        ck_assert_msg(seconds < 5, "%.2f s", seconds);
        ck_assert_msg(usage.ru_maxrss < 500 * 1024, "%ld MB", usage.ru_maxrss / 1024);
    }
    printf("# 744B: %.2f s, %ld MB\n", seconds, usage.ru_maxrss / 1024);
    fflush(stdout);
    small_close(&s);
}
END_TEST

/* ---- too little memory ---- */

/* A cpu that has as much memory as a GPU, and says so. */
static struct ops limited;
static const struct ops *unlimited;
static uint64_t room;

static glm52_status limited_allocate(struct stream *s, size_t bytes, enum memory_class class, void **out)
{
    if (bytes > room) return fail(GLM52_E_NOMEM, "no %zu bytes", bytes);
    glm52_status status = unlimited->allocate(s, bytes, class, out);
    if (!status) room -= bytes;
    return status;
}

static void limited_release(struct stream *s, void *memory, size_t bytes, enum memory_class class)
{
    unlimited->release(s, memory, bytes, class);
    if (memory) room += bytes;
}

static void limited_memory(struct stream *s, uint64_t *free, uint64_t *all)
{
    (void)s;
    *free = room;
    *all = UINT64_C(1) << 40;
}

static glm52_status create_step(struct small *s, const char *settings)
{
    small_set(s->config, settings);
    return glm52_step_create(s->model, s->optimizer, s->config, &s->step);
}

START_TEST(too_little_memory_says_what_fits)
{
    struct small s;
    long fits = 0, recomputed = 0;
    char settings[128];

    open_step(&s, "cpu", "model.preset=tiny data.pack_tokens=64 train.microbatch_tokens=64");
    glm52_step_unref(&s.step);
    unlimited = s.context->stream.ops;
    limited = *unlimited;
    limited.allocate = limited_allocate;
    limited.release = limited_release;
    limited.memory = limited_memory;
    s.context->stream.ops = &limited;
    room = UINT64_C(1) << 30;

    REFUSED(create_step(&s, "train.microbatch_tokens=1000000"), GLM52_E_NOMEM);
    ck_assert_msg(strstr(glm52_error_message(glm52_error_last()), "1000000 tokens per microbatch") &&
                      strstr(glm52_error_message(glm52_error_last()), "1.00 of 1024.00 GiB"),
                  "%s", glm52_error_message(glm52_error_last()));
    ck_assert(room == UINT64_C(1) << 30); /* nothing is left behind */
    const char *hint = glm52_error_hint(glm52_error_last());
    ck_assert_msg(sscanf(hint, "train.microbatch_tokens = %ld fits, %ld with", &fits, &recomputed) == 2, "%s", hint);
    ck_assert(fits > 1000 && recomputed > fits + fits / 2);
    for (int i = 0; i < 2; i++) {
        const char *how = i ? "layers" : "none";
        snprintf(settings, sizeof settings, "train.recompute=%s train.microbatch_tokens=%ld", how,
                 i ? recomputed : fits);
        OK(create_step(&s, settings));
        glm52_step_unref(&s.step);
        snprintf(settings, sizeof settings, "train.microbatch_tokens=%ld", (i ? recomputed : fits) * 21 / 20);
        REFUSED(create_step(&s, settings), GLM52_E_NOMEM);
    }
    hint = glm52_error_hint(glm52_error_last());
    snprintf(settings, sizeof settings, "train.microbatch_tokens = %ld fits", recomputed);
    ck_assert_str_eq(hint, settings); /* there is nothing else to save */
    room = 1 << 20;
    REFUSED(create_step(&s, ""), GLM52_E_NOMEM);
    ck_assert(strstr(glm52_error_hint(glm52_error_last()), "not even one token"));
    room = UINT64_C(1) << 40;
    small_close(&s);
}
END_TEST

/* ---- the plan of another device ---- */

static int told;

static void tell(void *user, glm52_log_level level, const char *text)
{
    (void)user, (void)level;
    told += strstr(text, "the plan counts the workspaces of the cpu, not of cuda:3: ") != NULL;
}

/* With the back end a plan for a GPU has its workspaces, on any machine; without, it says whose they are. */
START_TEST(a_plan_for_a_gpu_needs_no_gpu)
{
    static const char settings[] = "model.preset=tiny data.pack_tokens=256 train.microbatch_tokens=256 device=cuda:3";
    glm52_context_options options = {.struct_size = sizeof options, .device = "meta", .log = tell};
    struct stream device;
    size_t workspace = 0;
    struct small meta, cpu;

    int there = !stream_plan_cuda(&device, &workspace);
    open_step(&cpu, "cpu", settings);
    memset(&meta, 0, sizeof meta);
    OK(glm52_context_create(&options, &meta.context));
    OK(glm52_config_create(meta.context, &meta.config));
    small_set(meta.config, settings);
    OK(glm52_model_create(meta.context, meta.config, &meta.model));
    OK(glm52_optimizer_create(meta.model, NULL, &meta.optimizer));
    OK(glm52_step_create(meta.model, meta.optimizer, NULL, &meta.step));
    double piece = there ? (double)device.ops->taken_bytes(&device, 1) : 0; /* in which a GPU gives memory */
    for (int class = MEMORY_PARAMETERS; class < MEMORY_ACTIVATIONS; class++) {
        double bytes = planned(&meta, memory_class_name[class]), asked = planned(&cpu, memory_class_name[class]);
        ck_assert(there ? bytes >= asked && bytes < asked + 3 * piece && fmod(bytes, piece) == 0 : bytes == asked);
    }
    if (there)
        ck_assert(workspace && planned(&meta, "workspace") > (double)workspace);
    else
        ck_assert(planned(&meta, "workspace") == planned(&cpu, "workspace"));
    ck_assert_int_eq(told, !there);
    small_close(&meta);
    small_close(&cpu);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("model");
    TCase *cases = tcase_create("plan");

    tcase_set_timeout(cases, 120);
    tcase_add_test(cases, a_plan_is_what_a_run_takes);
    tcase_add_test(cases, memory_grows_with_the_tokens);
    tcase_add_test(cases, memory_really_grows_with_the_tokens);
    tcase_add_test(cases, the_full_model_is_planned_on_a_laptop);
    tcase_add_test(cases, too_little_memory_says_what_fits);
    tcase_add_test(cases, a_plan_for_a_gpu_needs_no_gpu);
    suite_add_tcase(suite, cases);
    return run_tap(suite);
}
