/* The host's memory, files and log, and what the library tells about itself. */
#include "host.h"

#include <stdio.h>
#include <string.h>

#include "unit/scratch.h"
#include "unit/tap.h"

START_TEST(memory_is_the_hosts)
{
    struct host h;
    struct small s;
    uint64_t now, peak;

    host_prepare(&h);
    small_open(&s, &h.options, "");
    glm52_batch *batch = small_text(&s, 9, 1);
    OK(glm52_context_memory(s.context, &now, &peak));
    ck_assert_uint_ge(peak, now);
    if (!glm52_feature("checked")) ck_assert_uint_le(h.held - now, 8); /* an empty piece is one byte for the host */
    /* A training step takes what it needs when it is created: a run allocates no more than its list of batches. */
    OK(glm52_step_run(s.step, &batch, 1));
    size_t before = h.allocations, held = h.held;
    OK(glm52_step_run(s.step, &batch, 1));
    ck_assert_uint_le(h.allocations, before + 1);
    ck_assert_uint_eq(h.held, held);
    glm52_batch_unref(&batch);
    small_close(&s);
    ck_assert_uint_eq(h.held, 0);
}
END_TEST

START_TEST(files_are_the_hosts)
{
    struct host h;
    struct small s;
    glm52_model *loaded;
    const char *directory = scratch_make();

    host_prepare(&h);
    small_open(&s, &h.options, "");
    OK(glm52_model_save(s.model, directory, 0));
    ck_assert_int_gt(h.written, 7000 * 4); /* the parameters at least */
    ck_assert_int_eq(h.open_files, 0);
    h.read = 0;
    OK(glm52_model_load(s.context, NULL, directory, &loaded));
    ck_assert_int_gt(h.read, 7000 * 4);
    glm52_model_unref(&loaded);
    REFUSED(glm52_model_load(s.context, NULL, "no/such/directory", &loaded), GLM52_E_IO);
    ck_assert_int_eq(h.open_files, 0);
    small_close(&s);
    ck_assert_uint_eq(h.held, 0);
    scratch_remove();
}
END_TEST

START_TEST(log_is_the_hosts)
{
    struct host h;
    struct small s;
    char path[256];

    host_prepare(&h);
    small_configure(&s, &h.options, "");
    snprintf(path, sizeof path, "%s/config.json", scratch_make());
    const char *json;
    OK(glm52_config_dump(s.config, 1, &json));
    char text[8192];
    ck_assert_int_lt(snprintf(text, sizeof text, "{\"key_of_the_future\": 1, %s", strchr(json, '{') + 1),
                     (int)sizeof text);
    scratch_write(path, text, strlen(text));
    OK(glm52_config_load_hub(s.config, path));
    ck_assert_int_eq(h.messages, 1);
    ck_assert_msg(strstr(h.message, "key_of_the_future") != NULL, "%s", h.message);
    small_close(&s);
    scratch_remove();
}
END_TEST

START_TEST(an_error_outlives_its_context)
{
    glm52_context_options options = {.struct_size = sizeof options, .device = "abacus"};
    glm52_context *context;
    struct small s;

    small_configure(&s, NULL, "");
    REFUSED(glm52_config_set(s.config, "optim.lrr", "1"), GLM52_E_INVALID);
    glm52_error *mine = glm52_error_take();
    small_close(&s);
    REFUSED(glm52_context_create(&options, &context), GLM52_E_INVALID);
    ck_assert_ptr_nonnull(strstr(glm52_error_hint(glm52_error_last()), "cpu"));
    ck_assert_str_eq(glm52_error_detail(mine, "key"), "optim.lrr");
    glm52_error_unref(&mine);
}
END_TEST

START_TEST(discovery)
{
    ck_assert_int_eq(glm52_abi_version(), 0);
    ck_assert_ptr_nonnull(strstr(glm52_build_info(), glm52_version()));
    ck_assert_int_eq(glm52_feature("time travel"), 0);
    ck_assert_int_ge(glm52_context_device_count("cpu"), 1);
    ck_assert_int_eq(glm52_context_device_count("abacus"), 0);
    ck_assert_str_eq(glm52_status_name(GLM52_E_INTERNAL), "GLM52_E_INTERNAL");
    ck_assert_str_eq(glm52_status_name(-17), "unknown");
    ck_assert_str_eq(glm52_status_name(1), "unknown");
    ck_assert_ptr_eq(glm52_get_proc("glm52_step_run"), (void *)(uintptr_t)glm52_step_run);
    ck_assert_ptr_null(glm52_get_proc("glm52_no_such_function"));
    ck_assert_ptr_null(glm52_get_proc("malloc"));
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("hooks");
    TCase *cases = tcase_create("host");

    tcase_add_test(cases, memory_is_the_hosts);
    tcase_add_test(cases, files_are_the_hosts);
    tcase_add_test(cases, log_is_the_hosts);
    tcase_add_test(cases, an_error_outlives_its_context);
    tcase_add_test(cases, discovery);
    suite_add_tcase(suite, cases);
    return run_tap(suite);
}
