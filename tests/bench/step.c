/* How fast one whole training step is: forward, backward and AdamW of the preset `bench` on one
 * document of 4096 tokens, against OpenBLAS's own sgemm of 2048^3 on the same threads, met between the
 * steps; then tokens per second of `tiny`.
 *
 *   bench-step [--threads N] [--steps N] [--recompute]
 *
 * FLOPs are those that the meta device counts for this very step. Best times of both count: what a loaded machine takes
 * away from one round it may leave to the next. */
#include <cblas.h>
#include <math.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "api/object.h"

enum { SIZE = 2048, TOKENS = 4096, TINY_TOKENS = 2048, TINY_DOCUMENT = 256 };

static const double target = 0.5;

static void ok(glm52_status status)
{
    if (!status) return;
    fprintf(stderr, "%s\n", glm52_error_message(glm52_error_last()));
    exit(1);
}

static double now(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- a chain up to the step -------------------------------------------------------------------------- */

struct run {
    glm52_context *context;
    glm52_model *model;
    glm52_optimizer *optimizer;
    glm52_step *step;
    glm52_batch *batch;
    int64_t tokens;
    double created; /* seconds that the model's first values took */
};

static void set_number(glm52_config *config, const char *key, int64_t value)
{
    char text[32];

    snprintf(text, sizeof text, "%lld", (long long)value);
    ok(glm52_config_set(config, key, text));
}

static void open_run(struct run *r, const char *preset, int threads, int64_t tokens, int64_t document, int recompute)
{
    glm52_config *config;
    int32_t *ids = malloc((size_t)tokens * sizeof *ids), *cu = malloc((size_t)(tokens / document + 1) * sizeof *cu);
    uint64_t seed = 1;

    ok(glm52_context_create(&(glm52_context_options){.struct_size = sizeof(glm52_context_options), .threads = threads},
                            &r->context));
    ok(glm52_config_create(r->context, &config));
    ok(glm52_config_set(config, "model.preset", preset));
    ok(glm52_config_set(config, "train.recompute", recompute ? "layers" : "none"));
    set_number(config, "train.microbatch_tokens", tokens);
    set_number(config, "data.pack_tokens", tokens);
    double begin = now();
    ok(glm52_model_create(r->context, config, &r->model));
    r->created = now() - begin;
    ok(glm52_optimizer_create(r->model, NULL, &r->optimizer));
    ok(glm52_step_create(r->model, r->optimizer, NULL, &r->step));
    ok(glm52_batch_create(r->context, &r->batch));
    for (int64_t i = 0; i < tokens; i++) {
        seed = seed * UINT64_C(6364136223846793005) + 1442695040888963407;
        ids[i] = (int32_t)(seed >> 33) % 256;
    }
    for (int64_t i = 0; i <= tokens / document; i++) cu[i] = (int32_t)(i * document);
    ok(glm52_batch_set(r->batch, "tokens", GLM52_DTYPE_I32, ids, (uint64_t)tokens));
    ok(glm52_batch_set(r->batch, "cu_seqlens", GLM52_DTYPE_I32, cu, (uint64_t)(tokens / document + 1)));
    r->tokens = tokens;
    glm52_config_unref(&config);
    free(ids);
    free(cu);
}

static void close_run(struct run *r)
{
    glm52_batch_unref(&r->batch);
    glm52_step_unref(&r->step);
    glm52_optimizer_unref(&r->optimizer);
    glm52_model_unref(&r->model);
    glm52_context_unref(&r->context);
}

static double one_step(struct run *r)
{
    double begin = now();

    ok(glm52_step_run(r->step, &r->batch, 1));
    return now() - begin;
}

static double planned_flops(struct run *r)
{
    glm52_plan_row row = {.struct_size = sizeof row};
    double flops = 0;

    for (uint32_t i = 0; !glm52_step_plan(r->step, i, &row); i++)
        if (!strcmp(row.section, "flops")) flops += row.amount;
    return flops;
}

/* ---- the reference ----------------------------------------------------------------------------------- */

static float *matrix(void)
{
    float *m = aligned_alloc(64, (size_t)SIZE * SIZE * sizeof *m);

    for (size_t i = 0; i < (size_t)SIZE * SIZE; i++) m[i] = (float)(i % 7) - 3;
    return m;
}

static double one_sgemm(int threads)
{
    static float *a, *b, *c;

    if (!a) {
        a = matrix();
        b = matrix();
        c = matrix();
    }
    openblas_set_num_threads(threads);
    double begin = now();
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, SIZE, SIZE, SIZE, 1, a, SIZE, b, SIZE, 0, c, SIZE);
    return now() - begin;
}

/* ---- where the time goes ----------------------------------------------------------------------------- */

static int slower(const void *a, const void *b)
{
    double x = ((const struct tally_row *)a)->seconds, y = ((const struct tally_row *)b)->seconds;

    return (x < y) - (x > y);
}

static void print_operations(struct run *r, double sgemm)
{
    static struct tally tally;
    double all = 0, share = 0;

    memset(&tally, 0, sizeof tally);
    r->context->stream.tally = &tally;
    double seconds = one_step(r);
    r->context->stream.tally = NULL;
    qsort(tally.row, (size_t)tally.rows, sizeof *tally.row, slower);
    printf("%-18s %-30s %6s %9s %6s %9s %6s\n", "part", "operation", "calls", "ms", "share", "GFLOP/s", "sgemm");
    for (int i = 0; i < tally.rows; i++) {
        const struct tally_row *row = &tally.row[i];
        all += row->seconds;
        if (row->seconds < 0.002 * seconds) continue;
        double rate = row->flops / row->seconds;
        printf("%-18s %-30s %6llu %9.2f %5.1f%%", row->label, row->operation, (unsigned long long)row->calls,
               1e3 * row->seconds, 100 * row->seconds / seconds);
        if (row->flops > 0) printf(" %9.1f %5.0f%%", 1e-9 * rate, 100 * rate / sgemm);
        printf("\n");
        share += row->seconds;
    }
    printf("other operations %.1f%%, between operations %.1f%%\n", 100 * (all - share) / seconds,
           100 * (1 - all / seconds));
}

static void bench_step(int threads, int steps, int recompute)
{
    struct run r;
    double step = INFINITY, reference = INFINITY;
    uint64_t values;

    open_run(&r, "bench", threads, TOKENS, TOKENS, recompute);
    ok(glm52_model_parameter_count(r.model, NULL, &values));
    double flops = planned_flops(&r);
    one_sgemm(threads);
    for (int i = 0; i < steps; i++) {
        reference = fmin(reference, one_sgemm(threads));
        step = fmin(step, one_step(&r));
        reference = fmin(reference, one_sgemm(threads));
    }
    double sgemm = 2.0 * SIZE * SIZE * SIZE / reference, rate = flops / step, ratio = rate / sgemm;
    printf("preset bench, one document of %d tokens, %d threads, recompute %s, best of %d steps\n", TOKENS, threads,
           recompute ? "layers" : "none", steps);
    printf("a new model: %.1f M values in %.3f s, %.2f ns each\n", 1e-6 * (double)values, r.created,
           1e9 * r.created / (double)values);
    printf("sgemm %d^3: %.1f GFLOP/s\n", SIZE, 1e-9 * sgemm);
    printf("step: %.1f GFLOP in %.3f s, %.1f GFLOP/s, %.0f tokens/s\n", 1e-9 * flops, step, 1e-9 * rate, TOKENS / step);
    printf("ratio: %.3f of sgemm, target %.2f: %s\n\n", ratio, target, ratio >= target ? "met" : "MISSED");
    print_operations(&r, sgemm);
    close_run(&r);
}

static void bench_tiny(int threads, int steps)
{
    struct run r;
    double step = INFINITY;

    open_run(&r, "tiny", threads, TINY_TOKENS, TINY_DOCUMENT, 0);
    for (int i = 0; i < 3 * steps; i++) step = fmin(step, one_step(&r));
    printf("\npreset tiny, %d tokens in documents of %d, %d threads: %.0f tokens/s\n", TINY_TOKENS, TINY_DOCUMENT,
           threads, TINY_TOKENS / step);
    close_run(&r);
}

int main(int argc, char **argv)
{
    int threads = omp_get_max_threads(), steps = 3, recompute = 0;

    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--threads") && i + 1 < argc) {
            threads = atoi(argv[++i]);
        } else if (!strcmp(argv[i], "--steps") && i + 1 < argc) {
            steps = atoi(argv[++i]);
        } else if (!strcmp(argv[i], "--recompute")) {
            recompute = 1;
        } else {
            fprintf(stderr, "usage: %s [--threads N] [--steps N] [--recompute]\n", argv[0]);
            return 2;
        }
    }
    if (threads < 1 || steps < 1) return 2;
    bench_step(threads, steps, recompute);
    bench_tiny(threads, steps);
    return 0;
}
