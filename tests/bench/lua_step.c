/* What driving a training step from Lua costs: steps of preset tiny, driven in turn by C and by Lua in one process,
 * each on a model of its own with the same weights and data. Compares medians, of the steps and of the pairs'
 * differences, by the clock and in processor time, which other programs disturb less; then the cost of a getter.
 * Fails if the losses differ, if the clock and the processor time both miss the target, or if the getter does.
 *   bench-lua-step SCRIPT TEXT [PAIRS [TOKENS]]   TOKENS of a step: fewer make it shorter, and Lua's share larger */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <lauxlib.h>
#include <lua.h>
#include <lualib.h>

#include "glm52.h"

int luaopen_glm52(lua_State *L);

static const double target = 1.01, getter_target = 2e-6;

enum { CLOCK, PROCESSOR, TIMES };

static double now(int which)
{
    struct timespec t;

    clock_gettime(which == CLOCK ? CLOCK_MONOTONIC : CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void ok(glm52_status status)
{
    if (!status) return;
    fprintf(stderr, "%s\n", glm52_error_message(glm52_error_last()));
    exit(1);
}

/* ---- the loop in C ---- */

struct run {
    glm52_context *context;
    glm52_config *config;
    glm52_dataset *dataset;
    glm52_model *model;
    glm52_optimizer *optimizer;
    glm52_step *step;
    glm52_batch *batch;
};

static void open_run(struct run *r, const char *text, const char *tokens)
{
    const char *const settings[][2] = {{"model.preset", "tiny"}, {"data.text", text}, {"data.pack_tokens", tokens},
                                       {"data.document_tokens", "256"}, {"train.microbatch_tokens", tokens}};

    ok(glm52_context_create(NULL, &r->context));
    ok(glm52_config_create(r->context, &r->config));
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++)
        ok(glm52_config_set(r->config, settings[i][0], settings[i][1]));
    ok(glm52_dataset_open(r->context, r->config, &r->dataset));
    ok(glm52_model_create(r->context, r->config, &r->model));
    ok(glm52_optimizer_create(r->model, NULL, &r->optimizer));
    ok(glm52_step_create(r->model, r->optimizer, r->config, &r->step));
    ok(glm52_batch_create(r->context, &r->batch));
}

static double step_in_c(struct run *r)
{
    double step, loss, rate, memory;

    ok(glm52_dataset_next(r->dataset, r->batch));
    ok(glm52_step_run(r->step, &r->batch, 1));
    ok(glm52_step_metric(r->step, "step", &step));
    ok(glm52_step_metric(r->step, "loss", &loss));
    ok(glm52_step_metric(r->step, "tokens_per_second", &rate));
    ok(glm52_step_metric(r->step, "peak_memory", &memory));
    return loss;
}

static void close_run(struct run *r)
{
    glm52_batch_unref(&r->batch);
    glm52_step_unref(&r->step);
    glm52_optimizer_unref(&r->optimizer);
    glm52_model_unref(&r->model);
    glm52_dataset_unref(&r->dataset);
    glm52_config_unref(&r->config);
    glm52_context_unref(&r->context);
}

/* ---- the loop in Lua ---- */

static void stop_on(lua_State *L, int status)
{
    if (!status) return;
    fprintf(stderr, "%s\n", luaL_tolstring(L, -1, NULL));
    exit(1);
}

static void open_lua(lua_State *L, const char *script, const char *text, const char *tokens)
{
    luaL_openlibs(L);
    luaL_requiref(L, "glm52", luaopen_glm52, 0);
    lua_pop(L, 1);
    stop_on(L, luaL_loadfile(L, script));
    lua_pushstring(L, text);
    lua_pushstring(L, tokens);
    stop_on(L, lua_pcall(L, 2, 1, 0));
}

static double step_in_lua(lua_State *L)
{
    lua_pushvalue(L, 1);
    stop_on(L, lua_pcall(L, 0, 1, 0));
    double loss = lua_tonumber(L, -1);
    lua_pop(L, 1);
    return loss;
}

/* Seconds of context:memory(), loop and all; the best of some. */
static double getter_in_lua(lua_State *L)
{
    static const char chunk[] = "local context = require('glm52').context { threads = 1 }\n"
                                "return function(n) for _ = 1, n do local now = context:memory() end end";
    enum { CALLS = 100000 };
    double best = INFINITY;

    stop_on(L, luaL_loadstring(L, chunk) || lua_pcall(L, 0, 1, 0));
    for (int i = 0; i < 10; i++) {
        lua_pushvalue(L, -1);
        lua_pushinteger(L, CALLS);
        double begin = now(CLOCK);
        stop_on(L, lua_pcall(L, 1, 0, 0));
        best = fmin(best, (now(CLOCK) - begin) / CALLS);
    }
    return best;
}

/* ---- comparing ---- */

static int larger(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static double median(const double *values, int count)
{
    double *sorted = malloc((size_t)count * sizeof *sorted);

    if (!sorted) exit(1);
    memcpy(sorted, values, (size_t)count * sizeof *sorted);
    qsort(sorted, (size_t)count, sizeof *sorted, larger);
    double middle = count % 2 ? sorted[count / 2] : (sorted[count / 2 - 1] + sorted[count / 2]) / 2;
    free(sorted);
    return middle;
}

/* Prints one line of the comparison and gives the ratio of the medians. */
static double compare(const char *name, const double *c, const double *lua, int pairs)
{
    double *difference = malloc((size_t)pairs * sizeof *difference);

    if (!difference) exit(1);
    for (int i = 0; i < pairs; i++) difference[i] = lua[i] - c[i];
    double step_c = median(c, pairs), step_lua = median(lua, pairs), paired = 1 + median(difference, pairs) / step_c;
    free(difference);
    printf("%-9s  by C %.3f ms, by Lua %.3f ms: ratio %.4f, of the pairs' differences %.4f\n", name, 1e3 * step_c,
           1e3 * step_lua, step_lua / step_c, paired);
    return step_lua / step_c;
}

int main(int argc, char **argv)
{
    int pairs = argc > 3 ? atoi(argv[3]) : 60, same = 1;
    const char *tokens = argc > 4 ? argv[4] : "2048";
    struct run run = {0};

    if (argc < 3 || pairs < 1) {
        fprintf(stderr, "usage: %s SCRIPT TEXT [PAIRS [TOKENS]]\n", argv[0]);
        return 2;
    }
    double *times[2][TIMES]; /* by C, by Lua */
    for (int i = 0; i < 2 * TIMES; i++)
        if (!(times[i / TIMES][i % TIMES] = calloc((size_t)pairs, sizeof(double)))) return 1;
    lua_State *L = luaL_newstate();
    if (!L) return 1;
    open_run(&run, argv[2], tokens);
    open_lua(L, argv[1], argv[2], tokens);
    for (int i = -2; i < pairs; i++) { /* two to warm up */
        double loss[2];
        for (int k = 0; k < 2; k++) { /* who is first takes turns */
            int in_lua = (k ^ i) & 1;
            double clock = now(CLOCK), processor = now(PROCESSOR);
            loss[in_lua] = in_lua ? step_in_lua(L) : step_in_c(&run);
            if (i < 0) continue;
            times[in_lua][CLOCK][i] = now(CLOCK) - clock;
            times[in_lua][PROCESSOR][i] = now(PROCESSOR) - processor;
        }
        same &= loss[0] == loss[1];
    }
    printf("preset tiny, %s tokens in documents of 256, %d pairs of steps, losses %s\n", tokens, pairs,
           same ? "alike" : "DIFFER");
    double clock = compare("clock", times[0][CLOCK], times[1][CLOCK], pairs);
    double processor = compare("processor", times[0][PROCESSOR], times[1][PROCESSOR], pairs);
    double getter = getter_in_lua(L);
    printf("a step driven by Lua, target %.2f: %s by the clock, %s in processor time\n", target,
           clock <= target ? "met" : "MISSED", processor <= target ? "met" : "MISSED");
    printf("getter %.3f us, target %.0f us: %s\n", 1e6 * getter, 1e6 * getter_target,
           getter < getter_target ? "met" : "MISSED");
    close_run(&run);
    lua_close(L);
    for (int i = 0; i < 2 * TIMES; i++) free(times[i / TIMES][i % TIMES]);
    return !same || (clock > target && processor > target) || getter >= getter_target;
}
