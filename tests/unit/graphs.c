/* The bank of recorded launches, over a device that writes down what it is asked to do. */
#include <stdio.h>
#include <string.h>

#include "tap.h"
#include "train/graphs.h"

static char said[512];
static int recording, failing;
static const char *names[64]; /* of graphs: what was recorded into each */
static int graphs_made, graphs_alive;

static void say(const char *verb, const char *what)
{
    size_t n = strlen(said);

    snprintf(said + n, sizeof said - n, "%s%s ", verb, what);
}

static glm52_status record(struct stream *s)
{
    (void)s;
    ck_assert(!recording);
    recording = 1;
    return failing == 1 ? (recording = 0, fail(GLM52_E_DEVICE, "cannot begin")) : GLM52_OK;
}

static glm52_status recorded(struct stream *s, void **graph)
{
    (void)s;
    ck_assert(recording);
    recording = 0;
    if (failing == 2) return fail(GLM52_E_NOMEM, "no memory for a graph");
    *graph = &names[graphs_made++];
    graphs_alive++;
    return GLM52_OK;
}

static void replay(struct stream *s, void *graph)
{
    (void)s;
    say("replay:", *(const char **)graph);
}

static void forget(struct stream *s, void *graph)
{
    (void)s;
    say("forget:", *(const char **)graph);
    graphs_alive--;
}

static void work(void *name)
{
    if (recording)
        names[graphs_made] = name;
    else
        say("run:", name);
}

static struct ops table = {.name = "paper", .record = record, .recorded = recorded, .replay = replay, .forget = forget};
static struct host host;
static struct stream stream;
static struct config config;
static struct graphs graphs;

static void open_bank(const char *mode, const char *shapes)
{
    memset(&graphs, 0, sizeof graphs);
    said[0] = 0;
    failing = graphs_made = graphs_alive = 0;
    ck_assert(!host_open(&host, NULL));
    ck_assert(!config_init(&config, &host));
    ck_assert(!config_set(&config, "train.cuda_graph", mode));
    ck_assert(!config_set(&config, "train.graph_shapes", shapes));
    stream = (struct stream){.ops = &table, .host = &host};
}

static glm52_status run(const char *name)
{
    struct graph_shape shape = {.rows = name[0], .sequences = name[1] ? name[1] : 0, .packs = name[1] ? name[2] : 0,
                                .first = strlen(name) > 3};

    return graphs_run(&graphs, &shape, work, (void *)(uintptr_t)name);
}

static void close_bank(void)
{
    graphs_close(&graphs);
    ck_assert_int_eq(graphs_alive, 0);
    ck_assert_ptr_null(graphs.entry);
    config_free(&config);
    ck_assert(host.total == 0);
}

START_TEST(the_second_time_is_recorded)
{
    open_bank("auto", "8");
    ck_assert(!graphs_open(&stream, &config, &graphs));
    for (int i = 0; i < 3; i++) ck_assert(!run("a") && !run("b11"));
    ck_assert(!run("b21") && !run("b12") && !run("b11f")); /* every field of a shape tells it apart */
    ck_assert_str_eq(said, "run:a run:b11 replay:a replay:b11 replay:a replay:b11 run:b21 run:b12 run:b11f ");
    ck_assert(graphs.captures == 2 && graphs.replays == 4);
    close_bank();
}
END_TEST

START_TEST(the_bank_is_bounded)
{
    open_bank("auto", "1"); /* one shape, and the update */
    ck_assert(!graphs_open(&stream, &config, &graphs));
    for (int i = 0; i < 2; i++) ck_assert(!run("a") && !run("b"));
    ck_assert(!run("a"));
    said[0] = 0;
    ck_assert(!run("c")); /* the one used longest ago goes */
    ck_assert(!run("d")); /* one that came once goes before one that was recorded */
    ck_assert(!run("a") && !run("d") && !run("b"));
    ck_assert_str_eq(said, "forget:b run:c run:d replay:a replay:d forget:a run:b ");
    close_bank();
    open_bank("auto", "1"); /* one shape that begins steps and goes on with them, and the update */
    ck_assert(!config_set(&config, "train.microbatches", "2"));
    ck_assert(!graphs_open(&stream, &config, &graphs));
    for (int i = 0; i < 2; i++) ck_assert(!run("a11f") && !run("a11") && !run("b"));
    ck_assert_str_eq(said, "run:a11f run:a11 run:b replay:a11f replay:a11 replay:b ");
    close_bank();
}
END_TEST

START_TEST(nothing_is_recorded_that_should_not_be)
{
    struct tally tally = {.rows = 0};

    open_bank("off", "8");
    ck_assert(!graphs_open(&stream, &config, &graphs));
    for (int i = 0; i < 3; i++) ck_assert(!run("a"));
    close_bank();
    ck_assert_str_eq(said, "run:a run:a run:a ");
    open_bank("auto", "8");
    ck_assert(!graphs_open(&stream, &config, &graphs));
    stream.tally = &tally; /* who counts wants to see every operation */
    for (int i = 0; i < 3; i++) ck_assert(!run("a"));
    stream.tally = NULL;
    ck_assert_str_eq(said, "run:a run:a run:a ");
    close_bank();
    open_bank("auto", "8");
    table.record = NULL;
    ck_assert(!graphs_open(&stream, &config, &graphs));
    for (int i = 0; i < 3; i++) ck_assert(!run("a"));
    ck_assert_str_eq(said, "run:a run:a run:a ");
    close_bank();
    open_bank("on", "8");
    ck_assert_int_eq(graphs_open(&stream, &config, &graphs), GLM52_E_UNSUPPORTED);
    ck_assert_str_eq(glm52_error_message(glm52_error_last()),
                     "train.cuda_graph = on, but device paper records no launches");
    table.record = record;
    close_bank();
}
END_TEST

START_TEST(a_failure_runs_the_work_or_is_told)
{
    for (int which = 1; which <= 2; which++) {
        open_bank("auto", "8");
        ck_assert(!graphs_open(&stream, &config, &graphs));
        ck_assert(!run("a") && !run("a") && !run("b"));
        failing = which;
        ck_assert(!run("b") && !run("a"));
        ck_assert_str_eq(said, "run:a replay:a run:b forget:a run:b run:a ");
        close_bank();
        open_bank("on", "8");
        ck_assert(!graphs_open(&stream, &config, &graphs));
        ck_assert(!run("a"));
        failing = which;
        ck_assert_int_eq(run("a"), which == 1 ? GLM52_E_DEVICE : GLM52_E_NOMEM);
        ck_assert(*glm52_error_hint(glm52_error_last()));
        failing = 0;
        ck_assert(!run("a"));
        ck_assert_str_eq(said, "run:a replay:a ");
        close_bank();
    }
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("graphs");
    TCase *cases = tcase_create("bank");

    tcase_add_test(cases, the_second_time_is_recorded);
    tcase_add_test(cases, the_bank_is_bounded);
    tcase_add_test(cases, nothing_is_recorded_that_should_not_be);
    tcase_add_test(cases, a_failure_runs_the_work_or_is_told);
    suite_add_tcase(suite, cases);
    return run_tap(suite);
}
