/* The base room: errors, memory accounting, files, text, random numbers. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/dtype.h"
#include "base/host.h"
#include "base/random.h"
#include "base/text.h"
#include "tap.h"

START_TEST(errors_carry_message_hint_and_details)
{
    ck_assert_int_eq(fail(GLM52_E_INVALID, "x = %d", 3), GLM52_E_INVALID);
    fail_hint("try %d", 4);
    fail_detail("key", "x");
    fail_detail("key", "y");
    fail_prefix("recipe:%d", 7);
    const glm52_error *e = glm52_error_last();
    ck_assert_str_eq(glm52_error_message(e), "recipe:7: x = 3");
    ck_assert_str_eq(glm52_error_hint(e), "try 4");
    ck_assert_str_eq(glm52_error_detail(e, "key"), "y");
    ck_assert_ptr_null(glm52_error_detail(e, "tensor"));
    glm52_error *taken = glm52_error_take();
    ck_assert_ptr_null(glm52_error_last());
    ck_assert_int_eq(glm52_error_status(taken), GLM52_E_INVALID);
    glm52_error_unref(&taken);
    ck_assert_ptr_null(taken);
}
END_TEST

START_TEST(an_error_longer_than_its_room_is_cut)
{
    char longest[5000];

    memset(longest, 'a', sizeof longest);
    longest[sizeof longest - 1] = 0;
    fail(GLM52_E_IO, "%s", longest);
    fail_prefix("%s", longest);
    for (int i = 0; i < 20; i++) {
        char key[8];
        snprintf(key, sizeof key, "k%d", i);
        fail_detail(key, "%s", longest);
    }
    ck_assert(strlen(glm52_error_message(glm52_error_last())) < sizeof longest);
}
END_TEST

START_TEST(memory_is_accounted_per_class)
{
    struct host host;

    ck_assert(!host_open(&host, NULL));
    char *a = host_calloc(&host, 1000, MEMORY_PARAMETERS);
    ck_assert_uint_eq((uintptr_t)a % 64, 0);
    for (int i = 0; i < 1000; i++) ck_assert_int_eq(a[i], 0);
    a[999] = 7;
    a = host_realloc(&host, a, 1000, 5000, MEMORY_PARAMETERS);
    ck_assert_int_eq(a[999], 7);
    ck_assert_uint_eq(host.used[MEMORY_PARAMETERS], 5000);
    ck_assert_uint_eq(host.peak, 6000);
    host_free(&host, a, 5000, MEMORY_PARAMETERS);
    ck_assert_uint_eq(host.total, 0);
    ck_assert_ptr_null(host_alloc(&host, SIZE_MAX, MEMORY_HOST));
    ck_assert_int_eq(glm52_error_status(glm52_error_last()), GLM52_E_NOMEM);
}
END_TEST

START_TEST(whole_files_are_replaced_or_left_alone)
{
    struct host host;
    char directory[] = "/tmp/glm52-base-XXXXXX", path[64];
    char *text;
    size_t bytes;

    ck_assert(!host_open(&host, NULL));
    ck_assert_ptr_nonnull(mkdtemp(directory));
    snprintf(path, sizeof path, "%s/a/b", directory);
    ck_assert(!file_make_directories(&host, path));
    snprintf(path, sizeof path, "%s/a/b/file", directory);
    ck_assert(!file_write_all(&host, path, "hello", 5));
    ck_assert(!file_read_all(&host, path, 100, &text, &bytes));
    ck_assert_str_eq(text, "hello");
    host_free(&host, text, bytes + 1, MEMORY_HOST);
    ck_assert_int_eq(file_read_all(&host, path, 4, &text, &bytes), GLM52_E_INVALID);
    ck_assert_int_eq(file_read_all(&host, "/nowhere/x", 4, &text, &bytes), GLM52_E_IO);
    ck_assert_str_eq(glm52_error_detail(glm52_error_last(), "path"), "/nowhere/x");
    ck_assert_int_eq(file_read_all(&host, directory, 4, &text, &bytes), GLM52_E_IO);
    ck_assert_uint_eq(host.total, 0);
}
END_TEST

START_TEST(text_grows_and_measures)
{
    struct host host;
    struct text text;

    ck_assert(!host_open(&host, NULL));
    text_init(&text, &host);
    for (int i = 0; i < 1000; i++) text_add(&text, "%d,", i);
    ck_assert_uint_eq(text.length, 3890);
    ck_assert(text_ends_with(text.at, "999,") && text_starts_with(text.at, "0,1,"));
    text_free(&text);
    ck_assert_uint_eq(host.total, 0);
    ck_assert_uint_eq(text_distance("shedule", "schedule"), 1);
    ck_assert_uint_eq(text_distance("sceduhle", "schedule"), 2);
    ck_assert_uint_eq(text_distance("ab", "ba"), 1);
    ck_assert_uint_eq(text_distance("", "abc"), 3);
}
END_TEST

START_TEST(random_numbers_are_a_pure_function_with_the_right_moments)
{
    struct random_key a = random_key(1, "w"), b = random_key(1, "v");
    double sum = 0, squares = 0, cubes = 0, uniform = 0;
    enum { N = 200000 };

    ck_assert_uint_eq(random_u64(a, 5), random_u64(random_key(1, "w"), 5));
    ck_assert_uint_ne(random_u64(a, 5), random_u64(b, 5));
    ck_assert_uint_ne(random_u64(a, 5), random_u64(random_key(2, "w"), 5));
    for (uint64_t i = 0; i < N; i++) {
        double z = (double)random_normal(a, i);
        sum += z;
        squares += z * z;
        cubes += z * z * z;
        uniform += random_uniform(b, i);
        ck_assert_uint_lt(random_below(b, i, 7), 7);
    }
    ck_assert_double_lt(fabs(sum / N), 0.01);
    ck_assert_double_lt(fabs(squares / N - 1), 0.015);
    ck_assert_double_lt(fabs(cubes / N), 0.04);
    ck_assert_double_lt(fabs(uniform / N - 0.5), 0.003);
}
END_TEST

/* The first six of a key, and as many as a row of vectors does not fill: alone and among others. */
START_TEST(normal_numbers_keep_their_bits)
{
    static const float first[] = {-0x1.48bb32p-1f, 0x1.7f42d8p-3f,  0x1.3a1cbap-3f,
                                  -0x1.6cbd7ap+0f, -0x1.bcd8e8p+0f, 0x1.2bab1ap-2f};
    struct random_key key = random_key(7, "w");
    enum { COUNT = 1001, MOST = 5 };
    float many[COUNT];

    for (uint64_t i = 0; i < sizeof first / sizeof *first; i++) ck_assert(random_normal(key, i) == first[i]);
    for (uint64_t from = 0; from < MOST; from++) {
        memset(many, 0, sizeof many);
        random_normals(key, from, COUNT - from, many);
        for (uint64_t i = 0; i < COUNT - from; i++) ck_assert(many[i] == random_normal(key, from + i));
        for (uint64_t i = COUNT - from; i < COUNT; i++) ck_assert(many[i] == 0);
    }
}
END_TEST

/* Box-Muller by the C library's functions, whose last bit of a double may differ. */
START_TEST(normal_numbers_are_those_of_box_and_muller)
{
    struct random_key key = random_key(3, "normal");

    for (uint64_t pair = 0; pair < 100000; pair++) {
        double u = ((double)(random_u64(key, pair) >> 11) + 1) * 0x1p-53, length = sqrt(-2 * log(u));
        double x = (double)random_normal(key, 2 * pair), y = (double)random_normal(key, 2 * pair + 1);
        ck_assert_double_le(fabs(hypot(x, y) - length), 1e-7 * length);
    }
}
END_TEST

START_TEST(bfloat16_rounds_to_nearest_even)
{
    ck_assert_uint_eq(f32_to_bf16(1.0f), 0x3f80);
    ck_assert_uint_eq(f32_to_bf16(1.00390625f), 0x3f80); /* a tie, to even */
    ck_assert_uint_eq(f32_to_bf16(1.01171875f), 0x3f82);
    ck_assert_uint_eq(f32_to_bf16(INFINITY), 0x7f80);
    ck_assert(isnan(bf16_to_f32(f32_to_bf16(NAN))));
    for (uint32_t i = 0; i < 0x7f80; i++) ck_assert_uint_eq(f32_to_bf16(bf16_to_f32((uint16_t)i)), i);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("base");
    TCase *tests = tcase_create("base");

    tcase_add_test(tests, errors_carry_message_hint_and_details);
    tcase_add_test(tests, an_error_longer_than_its_room_is_cut);
    tcase_add_test(tests, memory_is_accounted_per_class);
    tcase_add_test(tests, whole_files_are_replaced_or_left_alone);
    tcase_add_test(tests, text_grows_and_measures);
    tcase_add_test(tests, random_numbers_are_a_pure_function_with_the_right_moments);
    tcase_add_test(tests, normal_numbers_keep_their_bits);
    tcase_add_test(tests, normal_numbers_are_those_of_box_and_muller);
    tcase_add_test(tests, bfloat16_rounds_to_nearest_even);
    suite_add_tcase(suite, tests);
    return run_tap(suite);
}
