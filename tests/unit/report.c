/* The report room: the metrics file. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "report/metrics_log.h"
#include "tap.h"

static char folder[] = "/tmp/glm52-report-XXXXXX";
static char path[64];
static struct host host;
static const char *const names[] = {"step", "loss", "lr"};

static void start(void)
{
    ck_assert(!host_open(&host, NULL));
}

static void finish(void)
{
    ck_assert_uint_eq(host.total, 0);
    remove(path);
}

static void check_contents(const char *expected)
{
    char *text;
    size_t bytes;

    ck_assert(!file_read_all(&host, path, 1 << 20, &text, &bytes));
    ck_assert_str_eq(text, expected);
    host_free(&host, text, bytes + 1, MEMORY_HOST);
}

static void write_steps(struct metrics_log *log, int from, int to)
{
    for (int step = from; step <= to; step++)
        ck_assert(!metrics_log_write(log, names, (double[]){step, step + 0.5}, 2));
}

START_TEST(one_object_a_line)
{
    struct metrics_log log;

    ck_assert(!metrics_log_open(&log, &host, path, 0));
    ck_assert(!metrics_log_write(&log, names, (double[]){1, 5.54517744447956, 1e-4}, 3));
    check_contents("{\"step\":1,\"loss\":5.54517744,\"lr\":0.0001}\n"); /* while it is open */
    ck_assert(!metrics_log_write(&log, names, (double[]){2, NAN, -INFINITY}, 3));
    ck_assert(!metrics_log_write(&log, names, (double[]){1e18, -0.25, 1e300}, 3));
    ck_assert(!metrics_log_close(&log));
    ck_assert(!metrics_log_close(&log));
    check_contents("{\"step\":1,\"loss\":5.54517744,\"lr\":0.0001}\n{\"step\":2,\"loss\":null,\"lr\":null}\n"
                   "{\"step\":1e18,\"loss\":-0.25,\"lr\":1e300}\n");
}
END_TEST

START_TEST(a_line_names_its_stage)
{
    struct metrics_log log;

    ck_assert(!metrics_log_open(&log, &host, path, 0));
    log.stage = "";
    write_steps(&log, 1, 1);
    log.stage = "joint \"\xc3\xa4\"";
    write_steps(&log, 2, 2);
    ck_assert(!metrics_log_close(&log));
    check_contents("{\"step\":1,\"loss\":1.5}\n{\"step\":2,\"stage\":\"joint \\\"\xc3\xa4\\\"\",\"loss\":2.5}\n");
}
END_TEST

START_TEST(resuming_drops_later_and_torn_lines)
{
    const char *first = "{\"step\":1,\"loss\":1.5}\n{\"note\":\"kept\"}\n"
                        "{\"step\":3,\"loss\":3.5}\n{\"step\":2,\"loss\":2.5}\n{\"st";
    struct metrics_log log;

    ck_assert(!file_write_all(&host, path, first, strlen(first)));
    ck_assert(!metrics_log_open(&log, &host, path, 2));
    write_steps(&log, 3, 4);
    ck_assert(!metrics_log_close(&log));
    check_contents("{\"step\":1,\"loss\":1.5}\n{\"note\":\"kept\"}\n{\"step\":2,\"loss\":2.5}\n"
                   "{\"step\":3,\"loss\":3.5}\n{\"step\":4,\"loss\":4.5}\n");
    ck_assert(!metrics_log_open(&log, &host, path, 0));
    ck_assert(!metrics_log_close(&log));
    check_contents("");
}
END_TEST

START_TEST(resuming_without_an_earlier_file_starts_one)
{
    struct metrics_log log;

    ck_assert(!metrics_log_open(&log, &host, path, 7));
    write_steps(&log, 8, 8);
    ck_assert(!metrics_log_close(&log));
    check_contents("{\"step\":8,\"loss\":8.5}\n");
}
END_TEST

START_TEST(its_folder_is_made_or_named)
{
    struct metrics_log log;
    char below[96], file[128];

    snprintf(below, sizeof below, "%s/a", folder);
    snprintf(file, sizeof file, "%s/b/metrics.jsonl", below);
    ck_assert(!metrics_log_open(&log, &host, file, 0));
    ck_assert(!metrics_log_close(&log));
    ck_assert(!remove(file));
    file[strlen(below) + 2] = 0;
    ck_assert(!rmdir(file) && !rmdir(below));

    ck_assert(!file_write_all(&host, path, "", 0));
    snprintf(file, sizeof file, "%s/metrics.jsonl", path);
    ck_assert_int_eq(metrics_log_open(&log, &host, file, 0), GLM52_E_IO);
    ck_assert_str_eq(glm52_error_detail(glm52_error_last(), "path"), path);
    ck_assert(!metrics_log_close(&log));
}
END_TEST

static int64_t full(void *user, void *file, const void *buffer, size_t bytes, uint64_t offset)
{
    (void)user, (void)file, (void)buffer, (void)bytes, (void)offset;
    return -ENOSPC;
}

START_TEST(a_full_disk_is_a_status_and_the_earlier_file_survives)
{
    struct metrics_log log;

    ck_assert(!metrics_log_open(&log, &host, path, 0));
    write_steps(&log, 1, 2);
    int64_t (*write)(void *, void *, const void *, size_t, uint64_t) = host.files.write;
    host.files.write = full;
    ck_assert_int_eq(metrics_log_write(&log, names, (double[]){3}, 1), GLM52_E_IO);
    ck_assert(!metrics_log_close(&log));
    ck_assert_int_eq(metrics_log_open(&log, &host, path, 2), GLM52_E_IO);
    host.files.write = write;
    check_contents("{\"step\":1,\"loss\":1.5}\n{\"step\":2,\"loss\":2.5}\n");
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("report");
    TCase *metrics = tcase_create("metrics");

    if (!mkdtemp(folder)) return 1;
    snprintf(path, sizeof path, "%s/metrics.jsonl", folder);
    tcase_add_checked_fixture(metrics, start, finish);
    tcase_add_test(metrics, one_object_a_line);
    tcase_add_test(metrics, a_line_names_its_stage);
    tcase_add_test(metrics, resuming_drops_later_and_torn_lines);
    tcase_add_test(metrics, resuming_without_an_earlier_file_starts_one);
    tcase_add_test(metrics, its_folder_is_made_or_named);
    tcase_add_test(metrics, a_full_disk_is_a_status_and_the_earlier_file_survives);
    suite_add_tcase(suite, metrics);

    int status = run_tap(suite);
    rmdir(folder);
    return status;
}
