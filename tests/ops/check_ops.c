/* Tests and benches the operations table on every device that can be opened:
 *     check_ops [--test | --bench] [--op NAME] [--case TEXT] [--device NAME] [--seed N] [--threads N] [--idle]
 *               [--sustained]
 * --op takes the beginning of a name, --case any part of what a case or bench says of itself. Benches are small on the
 * cpu and of full width elsewhere; --idle times the latter also after 25 ms without work (those of 3 ms or more),
 * --sustained also back to back. Tests are reported as TAP on standard output. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lab.h"

static struct case_entry *cases, **cases_end = &cases;
static struct device_entry *devices;

void case_register(struct case_entry *entry)
{
    *cases_end = entry;
    cases_end = &entry->next;
}

void device_register(struct device_entry *entry)
{
    entry->next = devices;
    devices = entry;
}

DEVICE("cpu", stream_open_cpu)

static glm52_status open_cuda(struct stream *s, struct host *memory, int threads)
{
    (void)threads;
    return stream_open_cuda(s, memory, 0);
}

DEVICE("cuda", open_cuda)

static struct {
    int bench, threads;
    const char *op, *text, *device;
    uint64_t seed;
} options = {.op = "", .text = "", .device = "", .seed = 1};

static struct host host;

/* One case on one device; Check hands its number to run_case. */
struct run {
    const struct case_entry *entry;
    struct stream *stream;
    TTest test;
    char name[160];
};
static struct run *runs;
static int run_count;

static void run_case(int i)
{
    struct run *r = &runs[i];
    int threads = r->stream->threads;

    lab_enter(r->entry, r->stream, options.seed);
    r->entry->body();
    r->stream->threads = threads;
}

static int wanted(const struct case_entry *entry, const struct stream *stream)
{
    int kind = !options.bench ? IS_CASE : strcmp(stream->ops->name, "cpu") == 0 ? IS_BENCH : IS_BENCH_FULL;

    return entry->kind == kind && strncmp(entry->op, options.op, strlen(options.op)) == 0 &&
           strstr(entry->text, options.text);
}

static void add_runs(const char *name, struct stream *stream)
{
    for (const struct case_entry *e = cases; e; e = e->next) {
        struct run *r;

        if (!wanted(e, stream))
            continue;
        runs = realloc(runs, (size_t)(run_count + 1) * sizeof *runs);
        if (!runs)
            exit(2);
        r = &runs[run_count++];
        memset(r, 0, sizeof *r);
        r->entry = e;
        r->stream = stream;
        snprintf(r->name, sizeof r->name, "%s %s: %s", name, e->op, e->text);
    }
}

static int test(void)
{
    Suite *suite = suite_create("ops");
    SRunner *runner = srunner_create(suite);
    TCase *all = tcase_create("ops");

    for (int i = 0; i < run_count; i++) {
        struct run *r = &runs[i];

        r->test = (TTest){r->name, run_case, r->entry->file, r->entry->line};
        tcase_add_loop_test(all, &r->test, i, i + 1);
    }
    tcase_set_timeout(all, 0);
    tcase_add_checked_fixture(all, NULL, lab_leave);
    suite_add_tcase(suite, all);
    srunner_set_fork_status(runner, CK_NOFORK); /* a device's driver does not survive a fork */
    srunner_set_tap(runner, "-");
    srunner_run_all(runner, CK_SILENT);
    srunner_free(runner);
    return 0; /* TAP carries the verdicts */
}

static int bench(void)
{
    for (int i = 0; i < run_count; i++) {
        run_case(i);
        lab_leave();
        if (i + 1 == run_count || runs[i + 1].stream != runs[i].stream) bench_end();
    }
    return 0;
}

static int usage(void)
{
    fputs("usage: check_ops [--test | --bench] [--op NAME] [--case TEXT] [--device NAME] [--seed N] [--threads N] "
          "[--idle] [--sustained]\n",
          stderr);
    return 2;
}

static int parse(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;

        if (strcmp(argv[i], "--test") == 0) {
            options.bench = 0;
            continue;
        }
        if (strcmp(argv[i], "--bench") == 0) {
            options.bench = 1;
            continue;
        }
        if (strcmp(argv[i], "--sustained") == 0) {
            bench_sustained();
            continue;
        }
        if (strcmp(argv[i], "--idle") == 0) {
            bench_idle();
            continue;
        }
        if (!value)
            return 0;
        if (strcmp(argv[i], "--op") == 0)
            options.op = value;
        else if (strcmp(argv[i], "--case") == 0)
            options.text = value;
        else if (strcmp(argv[i], "--device") == 0)
            options.device = value;
        else if (strcmp(argv[i], "--seed") == 0)
            options.seed = strtoull(value, NULL, 10);
        else if (strcmp(argv[i], "--threads") == 0)
            options.threads = atoi(value);
        else
            return 0;
        i++;
    }
    return 1;
}

int main(int argc, char **argv)
{
    static struct stream streams[8];
    int opened = 0, result;

    if (!parse(argc, argv))
        return usage();
    if (host_open(&host, NULL) != GLM52_OK)
        return 2;
    for (struct device_entry *d = devices; d && opened < 8; d = d->next) {
        if (*options.device && strcmp(options.device, d->name) != 0)
            continue;
        if (d->open(&streams[opened], &host, options.threads) != GLM52_OK) {
            fprintf(stderr, "%s: %s\n", d->name, glm52_error_message(glm52_error_last()));
            if (*options.device) return 2;
            continue; /* nobody asked for this one */
        }
        add_runs(d->name, &streams[opened++]);
    }
    result = options.bench ? bench() : test();
    while (opened > 0)
        stream_close(&streams[--opened]);
    free(runs);
    return result;
}
