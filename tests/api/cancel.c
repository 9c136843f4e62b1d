/* Cancelling from a signal handler and from hooks, and how soon the call returns: at most one
 * microbatch, tensor or token later (include/glm52.h). */
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>

#include "unit/scratch.h"
#include "unit/tap.h"
#include "host.h"

enum { MICROBATCHES = 40, TOKENS = 250 };

static struct small small;
static glm52_batch *batches[MICROBATCHES];

static void set_up(void)
{
    char settings[128];

    snprintf(settings, sizeof settings, "train.microbatches=%d train.microbatch_tokens=256 data.pack_tokens=256",
             MICROBATCHES);
    small_open(&small, NULL, settings);
    for (int i = 0; i < MICROBATCHES; i++) batches[i] = small_text(&small, TOKENS, (unsigned)i);
}

static void tear_down(void)
{
    for (int i = 0; i < MICROBATCHES; i++) glm52_batch_unref(&batches[i]);
    small_close(&small);
}

/* Processor time of the process: what others do on the machine does not count. */
static double processor_seconds(void)
{
    struct timespec t;

    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static glm52_context *cancelled;
static volatile double cancelled_at;

static void cancel_now(int number)
{
    (void)number;
    cancelled_at = processor_seconds(); /* clock_gettime() may be called here */
    glm52_context_cancel(cancelled);
}

/* A signal after so many seconds of processor time cancels the context. */
static void cancel_after(glm52_context *context, double seconds)
{
    struct sigaction action = {.sa_handler = cancel_now};
    struct timeval value = {.tv_sec = (time_t)seconds, .tv_usec = (suseconds_t)(1e6 * fmod(seconds, 1))};
    struct itimerval timer = {.it_value = value};

    cancelled = context;
    sigemptyset(&action.sa_mask);
    sigaction(SIGPROF, &action, NULL);
    setitimer(ITIMER_PROF, &timer, NULL); /* counts processor time as well */
}

START_TEST(from_a_signal_handler)
{
    struct snapshot values = small_snapshot(&small, VALUES);

    OK(glm52_step_gradients(small.step, batches, MICROBATCHES)); /* warm */
    double begin = processor_seconds();
    OK(glm52_step_gradients(small.step, batches, MICROBATCHES));
    double run = processor_seconds() - begin, microbatch = run / MICROBATCHES;
    cancel_after(small.context, run / 4);
    glm52_status status = glm52_step_run(small.step, batches, MICROBATCHES);
    double latency = processor_seconds() - cancelled_at;
    ck_assert_msg(status == GLM52_E_CANCELLED, "%s; run of %g s", glm52_status_name(status), run);
    /* One microbatch, and half of one for the noise of the clocks. */
    ck_assert_msg(latency <= 1.5 * microbatch + 2e-3, "returned after %g s, a microbatch takes %g s", latency,
                  microbatch);

    struct snapshot after = small_snapshot(&small, VALUES);
    check_same(&small, &values, &after); /* nothing was updated */
    snapshot_free(&values);
    snapshot_free(&after);
    OK(glm52_step_run(small.step, batches, MICROBATCHES)); /* and the step goes on */
}
END_TEST

START_TEST(in_a_generation)
{
    enum { LIMIT = 300 };
    int32_t prompt[] = {1, 2, 3}, tokens[LIMIT];
    uint64_t produced = 0;
    struct small s;

    small_open(&s, NULL, "train.microbatch_tokens=512 data.pack_tokens=512");
    OK(glm52_model_generate(s.model, prompt, 3, LIMIT, 0, 0, tokens, &produced)); /* warm */
    double begin = processor_seconds();
    OK(glm52_model_generate(s.model, prompt, 3, LIMIT, 0, 0, tokens, &produced));
    double run = processor_seconds() - begin;
    ck_assert_uint_eq(produced, LIMIT);
    cancel_after(s.context, run / 2);
    REFUSED(glm52_model_generate(s.model, prompt, 3, LIMIT, 0, 0, tokens, &produced), GLM52_E_CANCELLED);
    double latency = processor_seconds() - cancelled_at;
    double token = 2 * run / LIMIT; /* the last take twice the mean at most */
    ck_assert_msg(latency <= 1.5 * token + 2e-3, "returned after %g s, a token takes up to %g s", latency, token);
    small_close(&s);
}
END_TEST

START_TEST(taken_back)
{
    ck_assert_int_eq(glm52_context_withdraw_cancel(small.context), 0);
    glm52_context_cancel(small.context);
    ck_assert_int_eq(glm52_context_withdraw_cancel(small.context), 1);
    ck_assert_int_eq(glm52_context_withdraw_cancel(small.context), 0);
    OK(glm52_step_run(small.step, batches, 1));
    ck_assert_int_eq(glm52_context_withdraw_cancel(NULL), 0);
}
END_TEST

/* ---- files ---- */

struct watch {
    glm52_context *context;
    int64_t left, after; /* bytes until the request; bytes moved since */
};

static void cancel_when_moved(struct host *h, size_t bytes)
{
    struct watch *watch = h->user;

    if (watch->left <= 0) watch->after += (int64_t)bytes;
    watch->left -= (int64_t)bytes;
    if (watch->left <= 0 && watch->left + (int64_t)bytes > 0) glm52_context_cancel(watch->context);
}

static int64_t largest_tensor(struct small *s)
{
    uint32_t tensors;
    int64_t largest = 0;

    OK(glm52_model_parameter_count(s->model, &tensors, NULL));
    for (uint32_t i = 0; i < tensors; i++) {
        glm52_parameter_info info = {.struct_size = sizeof info};
        OK(glm52_model_parameter(s->model, i, &info));
        if ((int64_t)info.value.bytes > largest) largest = (int64_t)info.value.bytes;
    }
    return largest;
}

START_TEST(in_a_load_or_save)
{
    struct host h;
    struct small s;
    struct watch watch;
    glm52_model *loaded = NULL;
    const char *directory = scratch_make();

    host_prepare(&h);
    small_open(&s, &h.options, "");
    OK(glm52_model_save(s.model, directory, 0));
    int64_t whole = h.written, tensor = largest_tensor(&s);
    h.moved = cancel_when_moved;
    h.user = &watch;

    watch = (struct watch){s.context, whole / 2, 0};
    REFUSED(glm52_model_save(s.model, directory, 0), GLM52_E_CANCELLED);
    ck_assert_int_le(watch.after, tensor);
    watch = (struct watch){s.context, whole / 2, 0};
    REFUSED(glm52_model_load(s.context, NULL, directory, &loaded), GLM52_E_CANCELLED);
    ck_assert_int_le(watch.after, tensor);
    ck_assert_ptr_null(loaded);

    h.moved = NULL;
    OK(glm52_model_load(s.context, NULL, directory, &loaded)); /* the earlier save is whole */
    glm52_model_unref(&loaded);

    h.written = 0;
    OK(glm52_step_save(s.step, directory));
    whole = h.written;
    h.moved = cancel_when_moved;
    watch = (struct watch){s.context, whole / 2, 0};
    REFUSED(glm52_step_save(s.step, directory), GLM52_E_CANCELLED);
    ck_assert_int_le(watch.after, tensor);
    watch = (struct watch){s.context, whole / 2, 0};
    REFUSED(glm52_step_resume(s.step, directory, NULL), GLM52_E_CANCELLED);
    ck_assert_int_le(watch.after, tensor);
    h.moved = NULL;
    OK(glm52_step_resume(s.step, directory, NULL));
    ck_assert_int_eq(h.open_files, 0);
    small_close(&s);
    scratch_remove();
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("cancel");
    TCase *cases = tcase_create("steps"), *files = tcase_create("files");

    tcase_add_checked_fixture(cases, set_up, tear_down);
    tcase_set_timeout(cases, 60);
    tcase_add_test(cases, from_a_signal_handler);
    tcase_add_test(cases, in_a_generation);
    tcase_add_test(cases, taken_back);
    suite_add_tcase(suite, cases);
    tcase_add_test(files, in_a_load_or_save);
    suite_add_tcase(suite, files);
    return run_tap(suite);
}
