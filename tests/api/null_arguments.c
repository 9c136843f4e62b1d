/* Every function with NULL and with a handle of another class for each of its pointers, as abi/gen.lua wrote them: a
 * status with a message that names the argument, outputs untouched, silence from functions without a status. */
#include "null_arguments.h"

#include <stdio.h>
#include <string.h>

#include "unit/scratch.h"
#include "unit/tap.h"

enum { PATTERN = 0x5A };

void refused(glm52_status status, glm52_status wanted, const char *named, const char *what)
{
    ck_assert_msg(status == wanted, "%s: %s, not %s", what, glm52_status_name(status), glm52_status_name(wanted));
    const char *message = glm52_error_message(glm52_error_last());
    ck_assert_msg(strstr(message, named) != NULL, "%s: the message does not name %s: %s", what, named, message);
    ck_assert_int_eq(glm52_error_status(glm52_error_last()), wanted);
}

void prepare(void *out, size_t bytes, int is_struct)
{
    uint32_t size = (uint32_t)bytes;

    memset(out, PATTERN, bytes);
    if (is_struct) memcpy(out, &size, sizeof size);
}

void untouched(const void *out, size_t bytes, int is_struct, const char *what)
{
    const unsigned char *byte = out;

    for (size_t i = is_struct ? sizeof(uint32_t) : 0; i < bytes; i++)
        ck_assert_msg(byte[i] == PATTERN, "%s: a failing call wrote byte %zu", what, i);
}

static struct small small;
static struct objects objects;

static void set_up(void)
{
    static const int32_t integers[] = {0, 1};
    char text[256], settings[512];

    snprintf(text, sizeof text, "%s/text", scratch_make());
    FILE *file = fopen(text, "w");
    ck_assert_ptr_nonnull(file);
    for (int i = 0; i < 400; i++) fputs("words and words ", file);
    fclose(file);
    snprintf(settings, sizeof settings, "model.vocab_size=300 data.text=%s", text);
    small_open(&small, NULL, settings);
    objects = (struct objects){.context = small.context, .config = small.config, .model = small.model,
                               .optimizer = small.optimizer, .step = small.step, .integers = integers,
                               .batch = small_text(&small, 5, 1)};
    OK(glm52_dataset_open(small.context, small.config, &objects.dataset));
    REFUSED(glm52_config_set(small.config, "no.such", "1"), GLM52_E_INVALID);
    objects.error = glm52_error_take();
}

/* All objects still work after the wrong calls. */
static void tear_down(void)
{
    double loss;

    OK(glm52_step_evaluate(objects.step, &objects.batch, 1, &loss));
    ck_assert_int_eq(glm52_error_status(objects.error), GLM52_E_INVALID);
    glm52_error_unref(&objects.error);
    glm52_dataset_unref(&objects.dataset);
    glm52_batch_unref(&objects.batch);
    small_close(&small);
    scratch_remove();
}

START_TEST(wrong)
{
    null_cases[_i].run(&objects);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("null arguments");
    TCase *cases = tcase_create("every function");

    tcase_add_unchecked_fixture(cases, set_up, tear_down);
    tcase_add_loop_test(cases, wrong, 0, null_case_count);
    suite_add_tcase(suite, cases);
    return run_tap(suite);
}
