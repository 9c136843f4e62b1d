/* Lifetimes of handles: every order of destruction, leaks over many lives, and, in a checked build, uses of released
 * pointers. Also run under AddressSanitizer (tests/sanitize.sh). */
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "small/small.h"
#include "unit/tap.h"

#ifdef __SANITIZE_ADDRESS__ /* many times slower */
enum { STEPS = 1000 };
#else
enum { STEPS = 10000 };
#endif
enum { HANDLES = 6, ORDERS = 720 };

struct life {
    glm52_context *context;
    glm52_config *config;
    glm52_model *model;
    glm52_optimizer *optimizer;
    glm52_step *step;
    glm52_batch *batch;
};

static struct {
    size_t held, calls;
} counted;

static void *count_allocate(void *user, size_t bytes, size_t alignment)
{
    void *memory = aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);

    (void)user;
    counted.held += memory ? bytes : 0;
    counted.calls++;
    return memory;
}

static void count_release(void *user, void *memory, size_t bytes)
{
    (void)user;
    counted.held -= bytes;
    free(memory);
}

static const glm52_allocator counting = {.struct_size = sizeof counting, .allocate = count_allocate,
                                         .release = count_release};
static const glm52_context_options counting_options = {.struct_size = sizeof counting_options, .allocator = &counting};

static void live(struct life *l)
{
    struct small s;

    small_open(&s, &counting_options, "");
    *l = (struct life){s.context, s.config, s.model, s.optimizer, s.step, small_text(&s, 7, 1)};
}

/* Whoever still holds a step and a batch can train, whatever else was dropped. */
static void use(struct life *l)
{
    const char *line;
    double loss;

    if (l->step && l->batch) OK(glm52_step_evaluate(l->step, &l->batch, 1, &loss));
    if (l->model) OK(glm52_model_describe(l->model, &line));
    if (l->optimizer) OK(glm52_optimizer_resync(l->optimizer));
    if (l->config) OK(glm52_config_get(l->config, "optim.lr", &line));
}

static void drop(struct life *l, int which)
{
    switch (which) {
    case 0: glm52_context_unref(&l->context); break;
    case 1: glm52_config_unref(&l->config); break;
    case 2: glm52_model_unref(&l->model); break;
    case 3: glm52_optimizer_unref(&l->optimizer); break;
    case 4: glm52_step_unref(&l->step); break;
    default: glm52_batch_unref(&l->batch);
    }
}

START_TEST(every_order_of_destruction)
{
    for (int order = 0; order < ORDERS; order++) {
        struct life l;
        int left[HANDLES] = {0, 1, 2, 3, 4, 5}, number = order;

        live(&l);
        for (int n = HANDLES; n; n--) {
            int pick = number % n;
            number /= n;
            drop(&l, left[pick]);
            left[pick] = left[n - 1];
            use(&l);
        }
        ck_assert_uint_eq(counted.held, 0);
    }
}
END_TEST

/* Neither through the allocator nor behind its back: the C library's heap is as large after the last lives as after the
 * first ones, up to what caches round. */
static void lives(int count, void (*one)(void))
{
    size_t early = 0;

    for (int i = 0; i < count; i++) {
        one();
        ck_assert_uint_eq(counted.held, 0);
        if (i == count / 10) early = mallinfo2().uordblks;
    }
    ck_assert_uint_le(mallinfo2().uordblks, early + 4096);
}

static void life_of_light_handles(void)
{
    glm52_context *context;
    glm52_config *config;
    glm52_batch *batch;
    const char *text;

    OK(glm52_context_create(&counting_options, &context));
    OK(glm52_config_create(context, &config));
    OK(glm52_batch_create(context, &batch));
    OK(glm52_batch_set(batch, "tokens", GLM52_DTYPE_I32, (int32_t[]){1, 2, 3}, 3));
    OK(glm52_config_set(config, "model.preset", "tiny"));
    OK(glm52_config_dump(config, 0, &text));
    REFUSED(glm52_config_set(config, "no.such", "1"), GLM52_E_INVALID);
    glm52_error *error = glm52_error_take();
    glm52_error_unref(&error);
    glm52_context_unref(&context);
    glm52_batch_unref(&batch);
    glm52_config_unref(&config);
}

static void life_of_a_model(void)
{
    struct life l;

    live(&l);
    OK(glm52_step_gradients(l.step, &l.batch, 1));
    for (int i = 0; i < HANDLES; i++) drop(&l, i);
}

/* A step takes all it needs when it is made, and keeps nothing of a run. */
START_TEST(ten_thousand_steps)
{
    struct life l;

    live(&l);
    size_t held = 0, heap = 0;
    for (int i = 0; i < STEPS; i++) {
        OK(glm52_step_run(l.step, &l.batch, 1));
        if (i != STEPS / 10) continue;
        held = counted.held;
        heap = mallinfo2().uordblks;
    }
    ck_assert_uint_eq(counted.held, held);
    ck_assert_uint_le(mallinfo2().uordblks, heap + 4096);
    for (int i = 0; i < HANDLES; i++) drop(&l, i);
    ck_assert_uint_eq(counted.held, 0);
}
END_TEST

START_TEST(ten_thousand_lives)
{
    lives(10000, life_of_light_handles);
}
END_TEST

START_TEST(many_lives_of_a_model)
{
    lives(300, life_of_a_model);
}
END_TEST

/* A copy of the pointer is used after the handle's end, which is undefined without tombstones. */
START_TEST(released_pointers)
{
    const char *text;
    char address[32];
    struct life l;

    live(&l);
    glm52_config *config = l.config, *again = l.config;
    glm52_model *model = l.model;
    snprintf(address, sizeof address, "%p", (void *)config);
    for (int i = 0; i < HANDLES; i++) drop(&l, i);
    ck_assert_uint_eq(counted.held, 0);

    REFUSED(glm52_config_get(config, "optim.lr", &text), GLM52_E_HANDLE);
    ck_assert_ptr_nonnull(strstr(glm52_error_message(glm52_error_last()), "a released glm52_config"));
    ck_assert_ptr_nonnull(strstr(glm52_error_message(glm52_error_last()), address));
    REFUSED(glm52_model_describe(model, &text), GLM52_E_HANDLE);
    ck_assert_ptr_null(glm52_model_ref(model));
    glm52_config_unref(&again); /* one too many */
    for (int i = 0; i < 300; i++) { /* the address is not given to another one meanwhile */
        live(&l);
        ck_assert_ptr_ne(l.config, config);
        ck_assert_ptr_ne(l.model, model);
        for (int k = 0; k < HANDLES; k++) drop(&l, k);
        REFUSED(glm52_config_get(config, "optim.lr", &text), GLM52_E_HANDLE);
    }
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("lifetimes");
    TCase *cases = tcase_create("references");

    tcase_set_timeout(cases, 400);
    tcase_add_test(cases, every_order_of_destruction);
    if (glm52_feature("checked")) {
        tcase_add_test(cases, released_pointers);
    } else { /* tombstones are held on purpose */
        tcase_add_test(cases, ten_thousand_steps);
        tcase_add_test(cases, ten_thousand_lives);
        tcase_add_test(cases, many_lives_of_a_model);
    }
    suite_add_tcase(suite, cases);
    return run_tap(suite);
}
