/* What any thread may do while another one trains: references, cancel, memory, functions without a handle. Also run
 * under ThreadSanitizer (tests/sanitize.sh). */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "small/small.h"
#include "unit/tap.h"

enum { THREADS = 4, ROUNDS = 2000 };

static struct small small;
static _Atomic int training;

static void *count_references(void *unused)
{
    (void)unused;
    for (int i = 0; i < ROUNDS; i++) {
        glm52_context *context = glm52_context_ref(small.context);
        glm52_model *model = glm52_model_ref(small.model);
        glm52_step *step = glm52_step_ref(small.step);
        uint64_t now = 0;
        if (glm52_context_memory(context, &now, NULL) || !now) return (void *)"memory";
        glm52_step_unref(&step);
        glm52_context_unref(&context);
        glm52_model_unref(&model);
    }
    return NULL;
}

/* Errors are each thread's own. */
static void *fail_alone(void *number)
{
    for (int i = 0; i < ROUNDS; i++) {
        glm52_option_info info = {.struct_size = sizeof info};
        if (glm52_error_last() && i == 0) return (void *)"another thread's error";
        if (glm52_config_describe(100000 + (uint32_t)(uintptr_t)number, &info) != GLM52_E_INVALID)
            return (void *)"status";
        glm52_error *error = glm52_error_take();
        if (glm52_error_status(error) != GLM52_E_INVALID || glm52_error_last()) return (void *)"error";
        glm52_error_unref(&error);
    }
    return NULL;
}

static void *drop_batch(void *batch)
{
    glm52_batch *last = batch;

    glm52_batch_unref(&last);
    return NULL;
}

static void train(int steps)
{
    glm52_batch *batch = small_text(&small, 9, 1);

    atomic_store(&training, 1);
    for (int i = 0; i < steps; i++) OK(glm52_step_run(small.step, &batch, 1));
    atomic_store(&training, 0);
    glm52_batch_unref(&batch);
}

START_TEST(others_while_one_trains)
{
    pthread_t thread[THREADS + 1];
    void *complaint;

    small_open(&small, NULL, "");
    glm52_batch *batch = small_text(&small, 9, 2);
    for (uintptr_t i = 0; i < THREADS; i++)
        ck_assert_int_eq(pthread_create(&thread[i], NULL, i % 2 ? count_references : fail_alone, (void *)i), 0);
    ck_assert_int_eq(pthread_create(&thread[THREADS], NULL, drop_batch, batch), 0); /* the last reference, elsewhere */
    train(20);
    for (int i = 0; i <= THREADS; i++) {
        pthread_join(thread[i], &complaint);
        ck_assert_msg(!complaint, "thread %d: %s", i, complaint ? (char *)complaint : "");
    }
    small_close(&small);
}
END_TEST

/* The owner drops its references first; some other thread ends the objects. */
static void *end_all(void *unused)
{
    glm52_context *context = small.context;
    glm52_model *model = small.model;
    glm52_optimizer *optimizer = small.optimizer;
    glm52_step *step = small.step;

    (void)unused;
    glm52_model_unref(&model);
    glm52_context_unref(&context);
    glm52_step_unref(&step);
    glm52_optimizer_unref(&optimizer);
    return NULL;
}

START_TEST(ended_elsewhere)
{
    for (int i = 0; i < 20; i++) {
        pthread_t thread;
        small_open(&small, NULL, "");
        train(1);
        glm52_config_unref(&small.config);
        ck_assert_int_eq(pthread_create(&thread, NULL, end_all, NULL), 0);
        pthread_join(thread, NULL);
    }
}
END_TEST

/* Two threads with a context each share nothing. */
static void *train_alone(void *unused)
{
    struct small own;
    double *loss = malloc(sizeof *loss);

    (void)unused;
    small_open(&own, NULL, "");
    glm52_batch *batch = small_text(&own, 9, 1);
    for (int i = 0; i < 10; i++) OK(glm52_step_run(own.step, &batch, 1));
    OK(glm52_step_metric(own.step, "loss", loss));
    glm52_batch_unref(&batch);
    small_close(&own);
    return loss;
}

START_TEST(contexts_are_independent)
{
    pthread_t thread[2];
    void *loss[2];

    for (int i = 0; i < 2; i++) ck_assert_int_eq(pthread_create(&thread[i], NULL, train_alone, NULL), 0);
    for (int i = 0; i < 2; i++) pthread_join(thread[i], &loss[i]);
    ck_assert(*(double *)loss[0] == *(double *)loss[1]);
    free(loss[0]);
    free(loss[1]);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("threads");
    TCase *cases = tcase_create("any thread");

    tcase_set_timeout(cases, 120);
    tcase_add_test(cases, others_while_one_trains);
    tcase_add_test(cases, ended_elsewhere);
    tcase_add_test(cases, contexts_are_independent);
    suite_add_tcase(suite, cases);
    return run_tap(suite);
}
