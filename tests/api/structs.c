/* struct_size, flags and reserved members of every struct; what longer inputs may hold is tested in handles.c. */
#include <stdlib.h>
#include <string.h>

#include "small/small.h"
#include "unit/tap.h"

static void *system_allocate(void *user, size_t bytes, size_t alignment)
{
    (void)user;
    return aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}

START_TEST(inputs)
{
    glm52_context_options options = {.struct_size = sizeof options - 1};
    glm52_allocator allocator = {.struct_size = sizeof allocator, .allocate = system_allocate};
    glm52_context *context = NULL;

    REFUSED(glm52_context_create(&options, &context), GLM52_E_VERSION);
    options = (glm52_context_options){.struct_size = sizeof options, .flags = 1};
    REFUSED(glm52_context_create(&options, &context), GLM52_E_INVALID);
    options = (glm52_context_options){.struct_size = sizeof options, .reserved0 = 1};
    REFUSED(glm52_context_create(&options, &context), GLM52_E_INVALID);
    options = (glm52_context_options){.struct_size = sizeof options, .allocator = &allocator};
    REFUSED(glm52_context_create(&options, &context), GLM52_E_INVALID); /* half a table */
    allocator.flags = 1;
    REFUSED(glm52_context_create(&options, &context), GLM52_E_INVALID);
    ck_assert_ptr_null(context);
}
END_TEST

/* Calls give(out) with a struct that is longer than the library's: it writes its own length and says so. */
#define CHECK_OUTPUT(type, call)                                                        \
    do {                                                                                \
        struct {                                                                        \
            type known;                                                                 \
            unsigned char unknown[16];                                                  \
        } newer;                                                                        \
        type *out = &newer.known;                                                       \
        memset(&newer, 0x5A, sizeof newer);                                             \
        out->struct_size = sizeof newer;                                                \
        OK(call);                                                                       \
        ck_assert_uint_eq(out->struct_size, sizeof(type));                              \
        ck_assert_uint_eq(out->flags, 0);                                               \
        for (size_t i = 0; i < sizeof newer.unknown; i++) ck_assert_uint_eq(newer.unknown[i], 0x5A); \
        out->struct_size = sizeof(type) - 1;                                            \
        REFUSED(call, GLM52_E_VERSION);                                                 \
        ck_assert_uint_eq(out->struct_size, sizeof(type) - 1);                          \
    } while (0)

START_TEST(outputs)
{
    struct small s;

    small_open(&s, NULL, "");
    glm52_batch *batch = small_text(&s, 5, 1);
    CHECK_OUTPUT(glm52_option_info, glm52_config_describe(0, out));
    CHECK_OUTPUT(glm52_parameter_info, glm52_model_parameter(s.model, 0, out));
    CHECK_OUTPUT(glm52_view, glm52_batch_get(batch, "tokens", out));
    CHECK_OUTPUT(glm52_plan_row, glm52_step_plan(s.step, 0, out));
    OK(glm52_model_forward(s.model, batch, "loss"));
    CHECK_OUTPUT(glm52_view, glm52_batch_get(batch, "loss", out));
    glm52_batch_unref(&batch);
    small_close(&s);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("structs");
    TCase *cases = tcase_create("struct_size");

    tcase_add_test(cases, inputs);
    tcase_add_test(cases, outputs);
    suite_add_tcase(suite, cases);
    return run_tap(suite);
}
