/* Device strings, on machines with a GPU and without. */
#include <stdio.h>
#include <string.h>

#include "glm52.h"
#include "tap.h"

static glm52_status create(const char *device, glm52_context **context)
{
    glm52_context_options options = {.struct_size = sizeof options, .device = device};

    return glm52_context_create(&options, context);
}

START_TEST(unknown_devices_are_refused)
{
    static const char *const wrong[] = {"",        "gpu",   "cuda:", "cuda:x",    "cuda:1x",
                                        "cuda:-1", "cuda1", "cpu:0", "cuda:99999"};
    glm52_context *context = NULL;

    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        ck_assert_int_eq(create(wrong[i], &context), GLM52_E_INVALID);
        ck_assert(*glm52_error_hint(glm52_error_last()));
        ck_assert_ptr_null(context);
    }
}
END_TEST

START_TEST(auto_always_finds_a_device)
{
    glm52_context *context = NULL;
    const char *text = NULL;

    ck_assert_int_eq(create("auto", &context), GLM52_OK);
    ck_assert_int_eq(glm52_context_describe_device(context, &text), GLM52_OK);
    ck_assert_int_eq(strncmp(text, "cuda:0", 6) == 0, glm52_context_device_count("cuda") > 0);
    glm52_context_unref(&context);
}
END_TEST

START_TEST(a_gpu_is_there_or_its_absence_is_explained)
{
    int32_t count = glm52_context_device_count("cuda");
    glm52_context *context = NULL;
    char beyond[32];
    glm52_status status = create("cuda", &context);

    if (count > 0) {
        uint64_t bytes = 0;

        ck_assert_int_eq(status, GLM52_OK);
        ck_assert_int_eq(glm52_context_memory(context, &bytes, NULL), GLM52_OK);
        ck_assert(bytes > 0);
        glm52_context_unref(&context);
    } else {
        ck_assert(status == GLM52_E_UNSUPPORTED || status == GLM52_E_DEVICE);
        ck_assert(*glm52_error_message(glm52_error_last()) && *glm52_error_hint(glm52_error_last()));
    }
    snprintf(beyond, sizeof beyond, "cuda:%d", count);
    ck_assert_int_ne(create(beyond, &context), GLM52_OK);
    ck_assert_ptr_null(context);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("device");
    TCase *strings = tcase_create("strings");

    tcase_set_timeout(strings, 60); /* a driver takes its time to start */
    tcase_add_test(strings, unknown_devices_are_refused);
    tcase_add_test(strings, auto_always_finds_a_device);
    tcase_add_test(strings, a_gpu_is_there_or_its_absence_is_explained);
    suite_add_tcase(suite, strings);
    return run_tap(suite);
}
