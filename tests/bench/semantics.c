/* Benchmarks of training semantics on preset bench with one MTP layer, as ratios within this run:
 *   muon      rate of the Muon update against OpenBLAS's sgemm 2048^3, target 0.70
 *   sharing   attention time of 7 MTP depths that share index and keys, against 7 that do not less the operations that
 *             sharing spares, target within 5%
 * Usage: semantics [tokens] */
#include <cblas.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "api/object.h"

enum { SIDE = 2048, ROUNDS = 3 };

static double now(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void stop_on(glm52_status status)
{
    if (!status) return;
    fprintf(stderr, "%s\n", glm52_error_message(glm52_error_last()));
    exit(1);
}

/* FLOP/s of OpenBLAS on its own threads; the best of some. */
static double sgemm_rate(void)
{
    static float *a, *b, *c;
    double best = 0;

    if (!a) {
        a = malloc(3 * sizeof(float) * SIDE * SIDE);
        if (!a) exit(1);
        b = a + SIDE * SIDE;
        c = b + SIDE * SIDE;
        for (int i = 0; i < 3 * SIDE * SIDE; i++) a[i] = (float)(i % 97) / 97;
    }
    for (int i = 0; i < ROUNDS; i++) {
        double begin = now();
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, SIDE, SIDE, SIDE, 1, a, SIDE, b, SIDE, 0, c, SIDE);
        double rate = 2.0 * SIDE * SIDE * SIDE / (now() - begin);
        if (rate > best) best = rate;
    }
    return best;
}

/* One step of preset bench under the settings, operation by operation; the faster of two. */
static void run_step(const char *const *settings, int64_t tokens, struct tally *tally)
{
    glm52_context *context;
    glm52_config *config;
    glm52_model *model;
    glm52_optimizer *optimizer;
    glm52_step *step;
    glm52_batch *batch;
    char rows[32];
    int32_t *token = malloc((size_t)tokens * sizeof *token);

    if (!token) exit(1);
    for (int64_t i = 0; i < tokens; i++) token[i] = (int32_t)((uint64_t)i * 2654435761u % 8192);
    snprintf(rows, sizeof rows, "%lld", (long long)tokens);
    stop_on(glm52_context_create(NULL, &context));
    stop_on(glm52_config_create(context, &config));
    stop_on(glm52_config_set(config, "model.preset", "bench"));
    stop_on(glm52_config_set(config, "model.num_nextn_predict_layers", "1"));
    stop_on(glm52_config_set(config, "train.microbatch_tokens", rows));
    stop_on(glm52_config_set(config, "data.pack_tokens", rows));
    for (; *settings; settings += 2) stop_on(glm52_config_set(config, settings[0], settings[1]));
    stop_on(glm52_model_create(context, config, &model));
    stop_on(glm52_optimizer_create(model, NULL, &optimizer));
    stop_on(glm52_step_create(model, optimizer, NULL, &step));
    stop_on(glm52_batch_create(context, &batch));
    stop_on(glm52_batch_set(batch, "tokens", GLM52_DTYPE_I32, token, (uint64_t)tokens));
    for (int i = 0; i < 2; i++) {
        static struct tally one;
        memset(&one, 0, sizeof one);
        context->stream.tally = &one;
        stop_on(glm52_step_run(step, &batch, 1));
        for (int r = 0; r < one.rows; r++)
            if (!i || one.row[r].seconds < tally->row[r].seconds) tally->row[r] = one.row[r];
        tally->rows = one.rows;
    }
    free(token);
    glm52_batch_unref(&batch);
    glm52_step_unref(&step);
    glm52_optimizer_unref(&optimizer);
    glm52_model_unref(&model);
    glm52_config_unref(&config);
    glm52_context_unref(&context);
}

/* Rows whose label and operation begin like that, those of MTP depths too. */
static struct tally_row sum_of(const struct tally *t, const char *label, const char *operation)
{
    struct tally_row sum = {0};

    for (int i = 0; i < t->rows; i++) {
        const char *of = strncmp(t->row[i].label, "mtp.", 4) ? t->row[i].label : t->row[i].label + 4;
        if (strncmp(of, label, strlen(label)) || strncmp(t->row[i].operation, operation, strlen(operation)))
            continue;
        sum.calls += t->row[i].calls;
        sum.flops += t->row[i].flops;
        sum.seconds += t->row[i].seconds;
    }
    return sum;
}

static void bench_muon(int64_t tokens)
{
    static struct tally tally;
    double before = sgemm_rate();
    run_step((const char *const[]){"optim.policy", "glm5", "mtp.depths", "1", "mtp.share", "index_kv", NULL}, tokens,
             &tally);
    double gemm = (before + sgemm_rate()) / 2;
    struct tally_row muon = sum_of(&tally, "optimizer.muon", ""), all = sum_of(&tally, "", "");

    printf("muon      %.1f GFLOP in %.2f s = %.1f GFLOP/s, %.2f of sgemm's %.1f (target 0.70); %.0f%% of the step\n",
           muon.flops / 1e9, muon.seconds, muon.flops / muon.seconds / 1e9, muon.flops / muon.seconds / gemm,
           gemm / 1e9, 100 * muon.seconds / all.seconds);
}

/* Everything between the normed hidden state and the output of the attention, and the indexer. */
static double attention_seconds(const struct tally *t)
{
    return sum_of(t, "mla.", "").seconds + sum_of(t, "indexer.", "").seconds;
}

static double spared_seconds(const struct tally *t)
{
    return sum_of(t, "mla.kv_a", "").seconds + sum_of(t, "indexer.", "").seconds;
}

static void bench_sharing(int64_t tokens)
{
    static struct tally none, shared, own;

    run_step((const char *const[]){"mtp.depths", "0", NULL}, tokens, &none);
    run_step((const char *const[]){"mtp.depths", "7", "mtp.share", "index_kv", NULL}, tokens, &shared);
    run_step((const char *const[]){"mtp.depths", "7", "mtp.share", "none", NULL}, tokens, &own);
    /* of the MTP depths alone: the trunk's share is that of the run without depths */
    double trunk = attention_seconds(&none), with = attention_seconds(&shared) - trunk,
           without = attention_seconds(&own) - trunk;
    double spared = spared_seconds(&own) - spared_seconds(&shared);

    printf("sharing   attention of 7 depths: %.3f s shared, %.3f s unshared of which sharing spares %.3f s: ratio %.3f "
           "(target 0.95 .. 1.05)\n", with, without, spared, with / (without - spared));
}

int main(int argc, char **argv)
{
    int64_t tokens = argc > 1 ? atoll(argv[1]) : 4096;

    printf("preset bench, one MTP layer, one document of %lld tokens\n", (long long)tokens);
    bench_muon(tokens);
    bench_sharing(tokens);
    return 0;
}
