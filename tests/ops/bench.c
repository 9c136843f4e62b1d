/* The clocks behind BENCH and BENCH_FULL, and what their rates are compared with in the same run. */
#include "case.h"

#include <cblas.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "lab.h"

static double now(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- BENCH ---- */

/* The best of some rounds; other work on the machine only ever makes a round slower. The reference runs now and then
 * between the rounds, so that both have met the same machine. */
static const double BENCH_SECONDS = 0.5, BETWEEN_REFERENCES = 0.1;
enum { BENCH_ROUNDS = 5, REFERENCE_SIZE = 2048 };

static struct {
    double best, spent, unreferenced, began; /* seconds */
    int rounds;                              /* -1 before the first, which only warms up */
    struct array *a, *b, *c;                 /* of the reference's matrix product; a copy takes a to c */
    double gemm, copy;                       /* seconds at best */
} clock_;

static struct array *reference_matrix(void)
{
    struct array *a = array_zero(GLM52_DTYPE_F32, REFERENCE_SIZE * REFERENCE_SIZE);

    for (int64_t i = 0; i < a->count; i++) a->value[i] = (double)(i % 17 - 8) / 8;
    array_push(a);
    return a;
}

static void reference_gemm(void)
{
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, REFERENCE_SIZE, REFERENCE_SIZE, REFERENCE_SIZE, 1,
                clock_.a->at, REFERENCE_SIZE, clock_.b->at, REFERENCE_SIZE, 0, clock_.c->at, REFERENCE_SIZE);
}

static void reference_copy(void)
{
    ops->copy(device, clock_.c->at, clock_.a->at, array_bytes(clock_.a));
}

static double seconds_of(void (*work)(void))
{
    double began = now();

    work();
    device_wait();
    return now() - began;
}

static void reference_round(void)
{
    clock_.gemm = fmin(clock_.gemm, seconds_of(reference_gemm));
    clock_.copy = fmin(clock_.copy, seconds_of(reference_copy));
    clock_.unreferenced = 0;
}

static void best_begin(void)
{
    clock_.a = reference_matrix();
    clock_.b = reference_matrix();
    clock_.c = reference_matrix();
    clock_.best = clock_.gemm = clock_.copy = INFINITY;
    clock_.spent = 0;
    clock_.rounds = -1;
    omp_set_num_threads(device->threads); /* the reference is BLAS with threads of its own */
    reference_round();
}

static int best_again(void)
{
    if (clock_.rounds >= 0) {
        double t;

        device_wait();
        t = now() - clock_.began;
        if (clock_.rounds > 0) clock_.best = fmin(clock_.best, t);
        clock_.spent += t;
        clock_.unreferenced += t;
        if (clock_.unreferenced > BETWEEN_REFERENCES) reference_round();
    }
    if (++clock_.rounds > BENCH_ROUNDS && clock_.spent > BENCH_SECONDS) return 0;
    clock_.began = now();
    return 1;
}

static void best_rate(double flops, double bytes)
{
    const struct case_entry *entry = lab_entry();
    double rate = (flops > 0 ? flops : bytes) / clock_.best, n = REFERENCE_SIZE;
    double reference = flops > 0 ? 2 * n * n * n / clock_.gemm : 2 * (double)array_bytes(clock_.a) / clock_.copy;

    printf("%-5s %-28s %-44s %9.3f ms %8.1f %s  %3.0f%% of %s\n", ops->name, entry->op, entry->text, 1e3 * clock_.best,
           1e-9 * rate, flops > 0 ? "GFLOP/s" : "GB/s   ", 100 * rate / reference, flops > 0 ? "gemm" : "copy");
    fflush(stdout);
}

/* ---- BENCH_FULL ---- */

enum { WARM_ROUNDS = 3, FULL_ROUNDS = 15, IDLE_ROUNDS = 9, FULL_SIZE = 8192 };
static const size_t FLUSH_BYTES = (size_t)512 << 20, COPY_BYTES = (size_t)2 << 30;
static const double SUSTAINED_SECONDS = 0.8, SHORT = 2e-4; /* what is shorter, the host cannot launch back to back */
static const double IDLE_SECONDS = 0.025, AWAKE = 3e-3;    /* what is shorter would count the wake-up above all */
static const double COOL_SECONDS = 0.3; /* sustained work leaves an H200 at a low clock for about 0.1 s */

static int sustained, idle;

static struct full {
    void *flush, *copied[2];            /* a copy takes the first of the two to the second */
    int64_t round;                      /* those after others' data, those after idle time, those back to back */
    int64_t idle, back_to_back;         /* how many */
    double began;
    double device[FULL_ROUNDS], host[FULL_ROUNDS], rested[IDLE_ROUNDS]; /* seconds */
    double spaced, launch, awoken, lasting; /* medians; awoken: after idle time; lasting: sustained; 0 if not timed */
    struct tally tally;
    double copy, gemm, gemm_awoken, gemm_lasting; /* the references, per second */
} full;

void bench_sustained(void)
{
    sustained = 1;
}

void bench_idle(void)
{
    idle = 1;
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static double median(double *x, size_t n)
{
    qsort(x, n, sizeof *x, by_value);
    return x[n / 2];
}

static void full_begin(void)
{
    full.round = -WARM_ROUNDS - 1;
    full.idle = full.back_to_back = 0;
    full.awoken = full.lasting = 0;
    full.tally.rows = 0;
}

/* After the spaced rounds: how many of each kind follow. The references are timed in every way. */
static void spaced_over(void)
{
    full.spaced = median(full.device, FULL_ROUNDS);
    full.launch = median(full.host, FULL_ROUNDS);
    if (idle && (full.spaced >= AWAKE || full.gemm == 0)) full.idle = IDLE_ROUNDS;
    if (sustained && full.spaced > SHORT) full.back_to_back = 2 + (int64_t)(SUSTAINED_SECONDS / full.spaced);
}

/* The second half of the rounds that fill SUSTAINED_SECONDS. */
static int lasting_again(void)
{
    int64_t done = full.round - FULL_ROUNDS - full.idle;

    if (full.idle && done == 0) full.awoken = median(full.rested, IDLE_ROUNDS);
    if (full.back_to_back && done == full.back_to_back / 2) ops->mark(device, 0);
    if (done < full.back_to_back) return 1;
    if (!full.back_to_back) return 0;
    ops->mark(device, 1);
    device_wait();
    full.lasting = ops->elapsed(device, 0, 1) / (double)(full.back_to_back - full.back_to_back / 2);
    return 0;
}

static void rest(double seconds)
{
    nanosleep(&(struct timespec){.tv_nsec = (long)(1e9 * seconds)}, NULL);
}

/* Before a round that is timed by itself: caches full of other data. */
static void spaced_begin(void)
{
    if (full.round == -WARM_ROUNDS && sustained) rest(COOL_SECONDS);
    if (full.round >= FULL_ROUNDS) rest(IDLE_SECONDS);
    ops->zero(device, full.flush, FLUSH_BYTES);
    if (full.round == -WARM_ROUNDS) full.tally.rows = 0;
    ops->mark(device, 0);
    full.began = now();
}

static void spaced_end(int64_t r)
{
    double stopped = now();

    ops->mark(device, 1);
    device_wait();
    device->tally = NULL;
    if (r < 0) return;
    if (r >= FULL_ROUNDS) {
        full.rested[r - FULL_ROUNDS] = ops->elapsed(device, 0, 1);
        return;
    }
    full.device[r] = ops->elapsed(device, 0, 1);
    full.host[r] = stopped - full.began;
}

static int full_again(void)
{
    int64_t r = full.round++;

    if (r >= -WARM_ROUNDS && r < FULL_ROUNDS + full.idle) spaced_end(r);
    if (full.round == FULL_ROUNDS) spaced_over();
    if (full.round >= FULL_ROUNDS + full.idle) return lasting_again();
    if (full.round == -WARM_ROUNDS) device->tally = &full.tally;
    spaced_begin();
    return 1;
}

/* Seconds of a copy that reads and writes so many bytes in all. */
static double copy_seconds(double bytes)
{
    const struct full kept = full;
    const int kept_sustained = sustained, kept_idle = idle;
    double seconds;

    sustained = idle = 0;
    for (full_begin(); full_again();) ops->copy(device, full.copied[1], full.copied[0], (size_t)bytes / 2);
    seconds = full.spaced;
    full = kept;
    sustained = kept_sustained;
    idle = kept_idle;
    return seconds;
}

static void demand_memory(size_t bytes, void **out)
{
    if (ops->allocate(device, bytes, MEMORY_WORKSPACE, out) != GLM52_OK)
        ck_abort_msg("%s", glm52_error_message(glm52_error_last()));
}

static void full_references(void)
{
    const int64_t n = FULL_SIZE;
    const double flops = 2.0 * FULL_SIZE * FULL_SIZE * FULL_SIZE;
    struct gemm g = {.m = n, .n = n, .k = n, .lda = n, .ldb = n, .ldc = n, .batch = 1, .transpose_b = 1,
                     .a_type = GLM52_DTYPE_BF16, .b_type = GLM52_DTYPE_BF16, .c_type = GLM52_DTYPE_BF16};
    struct array *a, *b;

    demand_memory(FLUSH_BYTES, &full.flush);
    for (int i = 0; i < 2; i++) demand_memory(COPY_BYTES, &full.copied[i]);
    a = array_random(GLM52_DTYPE_BF16, (int64_t)COPY_BYTES / 2);
    b = array_random(GLM52_DTYPE_BF16, (int64_t)COPY_BYTES / 2);
    ops->copy(device, full.copied[0], a->at, COPY_BYTES);
    full.gemm = 0;
    full.copy = 2 * (double)COPY_BYTES / copy_seconds(2 * (double)COPY_BYTES);
    for (full_begin(); full_again();) ops->gemm(device, &g, a->at, (uint16_t *)a->at + n * n, b->at);
    full.gemm = flops / full.spaced;
    full.gemm_awoken = idle ? flops / full.awoken : 0;
    full.gemm_lasting = sustained ? flops / full.lasting : 0;
    printf("%s: each call after 512 MiB of other data, median of %d; copy %.3f TB/s, gemm bf16 8192^3 %.0f TFLOP/s",
           ops->name, FULL_ROUNDS, 1e-12 * full.copy, 1e-12 * full.gemm);
    if (idle) printf(" (after 25 ms idle %.0f)", 1e-12 * full.gemm_awoken);
    if (sustained) printf(" (sustained %.0f)", 1e-12 * full.gemm_lasting);
    printf("\n%-29s %-41s %9s %8s %13s %12s %8s%s%s  %s\n", "operation", "shape", "ms", "MB", "rate", "of ceiling",
           "host us", idle ? "    idle ms   rate share" : "", sustained ? "  sustained   rate share" : "", "peer");
}

void bench_end(void)
{
    if (!full.flush) return;
    ops->release(device, full.flush, FLUSH_BYTES, MEMORY_WORKSPACE);
    for (int i = 0; i < 2; i++) ops->release(device, full.copied[i], COPY_BYTES, MEMORY_WORKSPACE);
    full.flush = NULL;
}

/* Of one of the other two ways to time; blank if it was not. */
static void further_rate(double seconds, double work, int in_flops, double ceiling)
{
    if (seconds > 0)
        printf(" %10.4f %6.*f %4.0f%%", 1e3 * seconds, in_flops ? 1 : 3, 1e-12 * work / seconds,
               100 * work / seconds / ceiling);
    else
        printf(" %10s %6s %5s", "-", "-", "-");
}

static void full_rate(double flops, double bytes)
{
    const struct case_entry *entry = lab_entry();
    const int in_flops = flops > 0;
    const double work = in_flops ? flops : bytes, ceiling = in_flops ? full.gemm : full.copy;

    printf("%-29s %-41s %9.4f %8.1f %6.*f %s %4.0f%% of %s %8.1f", entry->op, entry->text, 1e3 * full.spaced,
           1e-6 * bytes, in_flops ? 1 : 3, 1e-12 * work / full.spaced, in_flops ? "TFLOP/s" : "TB/s   ",
           100 * work / full.spaced / ceiling, in_flops ? "gemm" : "copy", 1e6 * full.launch);
    if (idle) further_rate(full.awoken, work, in_flops, in_flops ? full.gemm_awoken : full.copy);
    if (sustained) further_rate(full.lasting, work, in_flops, in_flops ? full.gemm_lasting : full.copy);
    if (!in_flops && bytes >= 2 && bytes <= 2 * (double)COPY_BYTES) {
        const double copy = copy_seconds(bytes);

        printf("  a copy of as much: %.4f ms, %.3f TB/s, %.2f of it", 1e3 * copy, 1e-12 * bytes / copy,
               copy / full.spaced);
    }
    printf("  %s\n", entry->peer);
    fflush(stdout);
}

/* ---- either ---- */

static int is_full(void)
{
    return lab_entry()->kind == IS_BENCH_FULL;
}

void bench_begin(void)
{
    if (is_full() && !full.flush) full_references();
    (is_full() ? full_begin : best_begin)();
}

int bench_again(void)
{
    return (is_full() ? full_again : best_again)();
}

void bench_rate(double flops, double bytes)
{
    (is_full() ? full_rate : best_rate)(flops, bytes);
}

void bench_counted(void)
{
    double bytes = 0;

    for (int i = 0; i < full.tally.rows; i++) bytes += full.tally.row[i].bytes;
    bench_rate(tally_flops(&full.tally), bytes);
}
