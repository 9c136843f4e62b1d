/* report.profile: where a step's time goes, told without changing what the step does. */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "small/small.h"
#include "unit/scratch.h"
#include "unit/tap.h"

enum { STEPS = 4 };

static const struct document documents[] = {{31, 1}, {20, 2}, {9, 3}};

static double train(const char *settings, struct snapshot *values)
{
    struct small s;
    double loss = 0;

    small_open(&s, NULL, settings);
    glm52_batch *batches[2] = {small_batch(&s, 3, documents), small_text(&s, 50, 7)};
    for (int i = 0; i < STEPS; i++) loss = small_train(&s, batches, 2);
    *values = small_snapshot(&s, VALUES);
    for (int i = 0; i < 2; i++) glm52_batch_unref(&batches[i]);
    small_close(&s);
    return loss;
}

static double number(const json_t *row, const char *key)
{
    const json_t *value = json_object_get(row, key);

    ck_assert_msg(json_is_number(value), "no number %s", key);
    return json_number_value(value);
}

START_TEST(a_profiled_step_is_the_same_step)
{
    const char *directory = scratch_make();
    char settings[256], path[128], line[1024];
    struct snapshot plain, profiled;
    double sum = 0, before = 1e30;
    int rows = 0, adamw = 0, gemm = 0;

    snprintf(settings, sizeof settings, "train.microbatches=2 report.profile=true out=%s", directory);
    ck_assert(train("train.microbatches=2", &plain) == train(settings, &profiled));
    ck_assert(!memcmp(plain.at, profiled.at, plain.offset[plain.parameters] * sizeof(float)));
    snprintf(path, sizeof path, "%s/profile.jsonl", directory);
    FILE *file = fopen(path, "r");
    ck_assert_ptr_nonnull(file);
    ck_assert_ptr_nonnull(fgets(line, sizeof line, file));
    json_t *whole = json_loads(line, 0, NULL);
    ck_assert(number(whole, "steps") == STEPS - 1); /* the first is not counted */
    for (; fgets(line, sizeof line, file); rows++) {
        json_t *row = json_loads(line, 0, NULL);
        const char *operation = json_string_value(json_object_get(row, "operation"));
        ck_assert(number(row, "ms") <= before);
        before = number(row, "ms");
        sum += before;
        adamw += !strcmp(operation, "adamw");
        gemm += !strcmp(operation, "gemm");
        if (!strcmp(operation, "guard")) ck_assert(number(row, "calls") == 1); /* means of a step */
        if (!strcmp(operation, "head_loss")) ck_assert(number(row, "calls") == 2);
        json_decref(row);
    }
    ck_assert(rows > 20 && adamw == 1 && gemm > 5);
    ck_assert_msg(sum <= number(whole, "ms") && sum > 0.2 * number(whole, "ms"), "operations take %g ms of %g", sum,
                  number(whole, "ms"));
    ck_assert(sum > 0.99 * number(whole, "timed_ms") && sum < 1.01 * number(whole, "timed_ms"));
    json_decref(whole);
    fclose(file);
    snapshot_free(&plain);
    snapshot_free(&profiled);
    scratch_remove();
}
END_TEST

static int lines;

static void count_lines(void *user, glm52_log_level level, const char *text)
{
    (void)user, (void)level;
    lines += strstr(text, " ms ") != NULL;
}

START_TEST(without_a_directory_the_log_is_told)
{
    struct small s;
    glm52_context_options options = {.struct_size = sizeof options, .log = count_lines};

    small_open(&s, &options, "report.profile=true");
    glm52_batch *batch = small_text(&s, 40, 1);
    for (int i = 0; i < 2; i++) small_train(&s, &batch, 1);
    ck_assert_int_eq(lines, 0);
    glm52_step_unref(&s.step);
    ck_assert_int_eq(lines, 20);
    glm52_batch_unref(&batch);
    small_close(&s);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("profile");
    TCase *cases = tcase_create("steps");

    tcase_add_test(cases, a_profiled_step_is_the_same_step);
    tcase_add_test(cases, without_a_directory_the_log_is_told);
    suite_add_tcase(suite, cases);
    return run_tap(suite);
}
