/* gpu_model [--device NAME] [--only PREFIX]: whole training steps on a GPU. What is recorded and replayed
 * leaves the bits that running leaves, while documents, lengths and routing change from step to step; so
 * does computing layers anew, and running again. Steps, evaluations and saves take no memory; what the
 * step took is what the plan says. In TAP. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "api/object.h"

static const char *device_name = "cuda";
static int tests, failures;

static void check(int good, const char *arrangement, const char *what)
{
    tests++;
    failures += !good;
    printf("%sok %d - %s: %s\n", good ? "" : "not ", tests, arrangement, what);
    fflush(stdout);
}

static void ok(glm52_status status)
{
    if (!status) return;
    printf("Bail out! %s (%s)\n", glm52_error_message(glm52_error_last()), glm52_error_hint(glm52_error_last()));
    exit(1);
}

/* ---- models ------------------------------------------------------------------------------------------ */

/* Odd widths, so that no fast path serves. */
#define SMALL                                                                                                          \
    "model.vocab_size=61 model.hidden_size=36 model.num_hidden_layers=4 model.first_k_dense_replace=1 "                \
    "model.intermediate_size=28 model.moe_intermediate_size=12 model.n_routed_experts=5 model.num_experts_per_tok=2 " \
    "model.num_attention_heads=3 model.q_lora_rank=14 model.kv_lora_rank=10 model.qk_nope_head_dim=6 "                 \
    "model.qk_rope_head_dim=4 model.v_head_dim=7 model.index_n_heads=2 model.index_head_dim=8 model.index_topk=9 "    \
    "model.indexer_types=full,full,shared,full model.rope_theta=100 model.initializer_range=0.3 "                      \
    "model.max_position_embeddings=4096 model.num_nextn_predict_layers=1 optim.lr=1e-2 optim.schedule=constant "
/* Widths of GLM-5.2 where kernels ask for them, everything else small. */
#define MIDDLE                                                                                                         \
    "model.vocab_size=2048 model.hidden_size=512 model.num_hidden_layers=4 model.first_k_dense_replace=1 "             \
    "model.intermediate_size=1024 model.moe_intermediate_size=256 model.n_routed_experts=8 "                           \
    "model.num_experts_per_tok=2 "                                                                                     \
    "model.num_attention_heads=8 model.q_lora_rank=256 model.kv_lora_rank=512 model.qk_nope_head_dim=192 "             \
    "model.qk_rope_head_dim=64 model.v_head_dim=256 model.index_n_heads=32 model.index_head_dim=128 "                  \
    "model.index_topk=512 model.indexer_types=full,full,full,shared model.rope_theta=1000000 "                         \
    "model.max_position_embeddings=65536 model.num_nextn_predict_layers=1 optim.lr=1e-3 optim.schedule=constant "      \
    "precision.params=bf16 "

static const struct arrangement {
    const char *name, *settings;
    int rows;                    /* most of a microbatch */
    int microbatches;
} arrangements[] = {
    {"small sparse",
     SMALL "optim.policy=glm5 indexer_loss.kind=sparse mtp.depths=2 moe.auxiliary_loss=document moe.z_coeff=1e-3 "
           "moe.bias_update_rate=1e-3 moe.capacity_factor=1.25 train.spike=3 ",
     96, 2},
    {"small dense",
     SMALL "train.attention=dense indexer_loss.kind=dense moe.auxiliary_loss=global mtp.depths=1 "
           "mtp.loss=tv mtp.detach_heads=true ",
     96, 1},
    {"small warm-up", SMALL "train.attention=dense indexer_loss.kind=dense train.train_only=indexer ", 96, 3},
    {"middle sparse",
     MIDDLE "optim.policy=glm5 indexer_loss.kind=sparse mtp.depths=1 mtp.loss=tv mtp.detach_heads=true "
            "moe.bias_update_rate=1e-3 ",
     4096, 2},
    {"middle dense", MIDDLE "train.attention=dense indexer_loss.kind=dense moe.auxiliary_loss=row ", 2048, 1},
    {"middle bf16", MIDDLE "precision.gradients=bf16 precision.moments=bf16 precision.masters=false ", 2048, 1},
};

struct run {
    glm52_context *context;
    glm52_model *model;
    glm52_optimizer *optimizer;
    glm52_step *step;
    const struct arrangement *what;
    uint64_t free_before, free_after; /* of the device, around model, optimizer and step */
};

static void set_all(glm52_config *config, const char *settings)
{
    char copy[4096], *rest = copy;

    snprintf(copy, sizeof copy, "%s", settings);
    for (char *one; (one = strtok_r(rest, " ", &rest));) {
        char *equals = strchr(one, '=');
        *equals = 0;
        ok(glm52_config_set(config, one, equals + 1));
    }
}

static uint64_t free_bytes(const struct run *r)
{
    struct stream *s = &r->context->stream;
    uint64_t free = 0, all = 0;

    if (s->ops->memory) s->ops->memory(s, &free, &all);
    return free;
}

/* Free memory of a process that had models before is less by what the driver has kept of theirs (20 MiB after those
 * here, on an H200), until an allocation fails: then it gives that up. */
static uint64_t all_free_bytes(const struct run *r)
{
    struct stream *s = &r->context->stream;
    void *none;

    if (s->ops->memory) s->ops->allocate(s, (size_t)1 << 50, MEMORY_WORKSPACE, &none);
    return free_bytes(r);
}

static void open_run(struct run *r, const struct arrangement *what, const char *more)
{
    glm52_context_options options = {.struct_size = sizeof options, .device = device_name};
    glm52_config *config;
    char sizes[256];

    *r = (struct run){.what = what};
    snprintf(sizes, sizeof sizes,
             "data.pack_tokens=%d train.microbatch_tokens=%d train.microbatches=%d train.not_finite=skip ", what->rows,
             what->rows, what->microbatches);
    ok(glm52_context_create(&options, &r->context));
    ok(glm52_config_create(r->context, &config));
    set_all(config, what->settings);
    set_all(config, sizes);
    set_all(config, more);
    r->free_before = all_free_bytes(r);
    ok(glm52_model_create(r->context, config, &r->model));
    ok(glm52_optimizer_create(r->model, NULL, &r->optimizer));
    ok(glm52_step_create(r->model, r->optimizer, NULL, &r->step));
    r->free_after = free_bytes(r);
    glm52_config_unref(&config);
}

static void close_run(struct run *r)
{
    glm52_step_unref(&r->step);
    glm52_optimizer_unref(&r->optimizer);
    glm52_model_unref(&r->model);
    glm52_context_unref(&r->context);
}

/* ---- data -------------------------------------------------------------------------------------------- */

static uint64_t mix(uint64_t x)
{
    x = (x ^ x >> 31) * UINT64_C(0x9E3779B97F4A7C15);
    x = (x ^ x >> 29) * UINT64_C(0xBF58476D1CE4E5B9);
    return x ^ x >> 32;
}

/* The microbatch's number decides tokens, documents and lengths; every third one is shorter than the others. */
static glm52_batch *batch_of(struct run *r, int number)
{
    int rows = number % 3 == 2 ? r->what->rows * 3 / 4 : r->what->rows, documents = 0;
    int32_t *tokens = malloc((size_t)rows * sizeof *tokens), *cu = malloc((size_t)(rows + 1) * sizeof *cu);
    int32_t vocabulary = (int32_t)r->model->model.config.model.vocab_size;
    glm52_batch *batch = NULL;

    for (int i = 0; i < rows; i++)
        tokens[i] = (int32_t)(mix((uint64_t)number << 32 | (unsigned)i) % (uint64_t)vocabulary);
    cu[0] = 0;
    for (int at = 0; at < rows; cu[++documents] = at) {
        int length = 2 + (int)(mix((uint64_t)(number * 97 + documents)) % (uint64_t)(rows / (1 + number % 4)));
        at = at + length + 2 > rows ? rows : at + length;
    }
    ok(glm52_batch_create(r->context, &batch));
    ok(glm52_batch_set(batch, "tokens", GLM52_DTYPE_I32, tokens, (uint64_t)rows));
    ok(glm52_batch_set(batch, "cu_seqlens", GLM52_DTYPE_I32, cu, (uint64_t)documents + 1));
    free(tokens);
    free(cu);
    return batch;
}

/* ---- what a run leaves ------------------------------------------------------------------------------- */

enum { STEPS = 9, POISONED = 5, EQUAL_STEPS = 6 };

struct trace {
    double loss[STEPS], norm[STEPS];
    uint64_t values, state; /* hashes of the parameters, and of moments and masters */
    double skipped, captures, replays;
    double seconds, replays_of_last; /* of the equal steps behind them: time of the fastest; replays in the last one */
};

static uint64_t hash_device(struct stream *s, const void *at, size_t bytes, uint64_t h)
{
    enum { PIECE = 1 << 24 };
    static uint64_t piece[PIECE / 8];

    for (size_t done = 0; done < bytes; done += PIECE) {
        size_t count = bytes - done < PIECE ? bytes - done : PIECE;
        memset(piece, 0, (count + 7) / 8 * 8);
        s->ops->download(s, piece, (const char *)at + done, count);
        for (size_t i = 0; i < (count + 7) / 8; i++) h = (h ^ piece[i]) * UINT64_C(0x100000001B3) + (h >> 47);
    }
    return h;
}

static double metric(struct run *r, const char *name)
{
    double value = 0;

    return glm52_step_metric(r->step, name, &value) ? 0 : value;
}

static uint64_t hash_values(glm52_context *context, const glm52_model *m)
{
    const struct parameters *all = &m->model.parameters;
    uint64_t h = 1;

    for (uint32_t i = 0; i < all->count; i++)
        h = hash_device(&context->stream, all->at[i].value, all->at[i].count * dtype_size(all->at[i].type), h);
    return h;
}

static void hash_run(struct run *r, struct trace *t)
{
    struct stream *s = &r->context->stream;
    const struct optimizer *o = &r->optimizer->optimizer;

    t->values = hash_values(r->context, r->model);
    t->state = hash_device(s, o->m, o->state_elements * dtype_size(o->moment_type), 2);
    t->state = hash_device(s, o->v, o->second_elements * dtype_size(o->moment_type), t->state);
    if (o->master) t->state = hash_device(s, o->master, o->state_elements * sizeof *o->master, t->state);
}

/* Overwrites a value that every row meets. */
static void put(struct run *r, const void *bits, void *before)
{
    struct stream *s = &r->context->stream;
    uint32_t index;

    ok(glm52_model_parameter_find(r->model, "model.layers.0.input_layernorm.weight", &index));
    const struct parameter *gain = &r->model->model.parameters.at[index];
    s->ops->download(s, before, gain->value, dtype_size(gain->type));
    s->ops->upload(s, gain->value, bits, dtype_size(gain->type));
}

static void train(struct run *r, struct trace *t)
{
    static const unsigned char nan_bits[8] = {255, 255, 255, 255, 255, 255, 255, 255};
    unsigned char good[8], bad[8];

    memset(t, 0, sizeof *t);
    for (int n = 0; n < STEPS; n++) {
        glm52_batch *batches[8];
        for (int i = 0; i < r->what->microbatches; i++) batches[i] = batch_of(r, n * r->what->microbatches + i);
        if (n == POISONED) put(r, nan_bits, good);
        ok(glm52_step_run(r->step, batches, (uint32_t)r->what->microbatches));
        if (n == POISONED) put(r, good, bad);
        t->loss[n] = metric(r, "loss");
        t->norm[n] = metric(r, "grad_norm");
        for (int i = 0; i < r->what->microbatches; i++) glm52_batch_unref(&batches[i]);
    }
    hash_run(r, t);
    t->skipped = metric(r, "skipped");
    t->captures = metric(r, "graph_captures");
    t->replays = metric(r, "graph_replays");
}

/* A shape runs once and is recorded the second time: only the steps after these are what a long run consists of. */
static void time_equal_steps(struct run *r, struct trace *t)
{
    glm52_batch *batches[8];
    double before = 0;

    batches[0] = batch_of(r, 0);
    for (int i = 1; i < r->what->microbatches; i++) batches[i] = batches[0];
    for (int n = 0; n < EQUAL_STEPS; n++) {
        before = metric(r, "graph_replays");
        ok(glm52_step_run(r->step, batches, (uint32_t)r->what->microbatches));
        if (!n || metric(r, "seconds") < t->seconds) t->seconds = metric(r, "seconds");
    }
    t->replays_of_last = metric(r, "graph_replays") - before;
    glm52_batch_unref(&batches[0]);
}

static int same_trace(const struct trace *a, const struct trace *b)
{
    int same = a->values == b->values && a->state == b->state && a->skipped == b->skipped;

    for (int n = 0; n < STEPS; n++)
        same &= !memcmp(&a->loss[n], &b->loss[n], 8) && !memcmp(&a->norm[n], &b->norm[n], 8);
    if (!same)
        for (int n = 0; n < STEPS; n++)
            printf("# step %d: loss %.17g and %.17g, norm %.17g and %.17g\n", n + 1, a->loss[n], b->loss[n], a->norm[n],
                   b->norm[n]);
    return same;
}

static void train_once(const struct arrangement *what, const char *more, struct trace *t)
{
    struct run r;

    open_run(&r, what, more);
    train(&r, t);
    time_equal_steps(&r, t);
    close_run(&r);
}

/* ---- memory ------------------------------------------------------------------------------------------ */

static void check_allocations(struct run *r)
{
    uint64_t before = r->context->stream.allocations;
    char directory[] = "/tmp/gpu-model-XXXXXX", command[64];
    glm52_batch *batch = batch_of(r, 1);
    struct trace t;
    double loss;

    ok(mkdtemp(directory) ? GLM52_OK : GLM52_E_IO);
    train(r, &t);
    ok(glm52_step_evaluate(r->step, &batch, 1, &loss));
    ok(glm52_step_save(r->step, directory));
    ok(glm52_step_resume(r->step, directory, NULL));
    check(before == r->context->stream.allocations, r->what->name,
          "steps, evaluation, save and resume allocate nothing");
    glm52_batch_unref(&batch);
    snprintf(command, sizeof command, "rm -rf %s", directory);
    if (system(command)) printf("# %s stays\n", directory);
}

static void check_plan(struct run *r)
{
    glm52_plan_row row = {.struct_size = sizeof row};
    struct stream device;
    size_t own = 0; /* what the context took when it was opened */
    double planned = 0, taken = (double)(r->free_before - r->free_after),
           after = (double)(r->free_before - free_bytes(r));
    char text[160];

    for (uint32_t i = 0; !glm52_step_plan(r->step, i, &row); i++)
        if (!strcmp(row.section, "memory") && strcmp(row.name, "host") && strcmp(row.name, "peak"))
            planned += row.amount;
    if (!strcmp(r->context->stream.ops->name, "cuda") && !stream_plan_cuda(&device, &own)) planned -= (double)own;
    snprintf(text, sizeof text, "planned %.1f MiB, taken %.1f MiB, %.1f MiB with code and graphs after %d steps",
             planned / 1048576, taken / 1048576, after / 1048576, STEPS);
    printf("# %s: %s\n", r->what->name, text);
    if (r->context->stream.ops->memory)
        check(fabs(planned - taken) <= 0.01 * taken, r->what->name, "the plan is within 1 % of what the device gave");
}

/* As many tokens as the device has room for, and no more. */
static void check_refusal(const struct arrangement *what)
{
    struct run r;
    glm52_config *config;
    char size[64];
    long fits = 0;

    open_run(&r, what, "");
    ok(glm52_config_create(r.context, &config));
    set_all(config, what->settings);
    set_all(config, "train.microbatch_tokens=16000000");
    glm52_step_unref(&r.step);
    int refused = glm52_step_create(r.model, r.optimizer, config, &r.step) == GLM52_E_NOMEM;
    printf("# %s: %s; %s\n", what->name, glm52_error_message(glm52_error_last()), glm52_error_hint(glm52_error_last()));
    refused &= sscanf(glm52_error_hint(glm52_error_last()), "train.microbatch_tokens = %ld fits", &fits) == 1;
    check(refused && fits > what->rows, what->name, "too little memory is refused with what would fit");
    snprintf(size, sizeof size, "train.microbatch_tokens=%ld", fits);
    set_all(config, size);
    check(refused && !glm52_step_create(r.model, r.optimizer, config, &r.step), what->name, "and that does fit");
    r.free_after = free_bytes(&r);
    if (r.step) check_plan(&r);
    glm52_config_unref(&config);
    close_run(&r);
}

/* A model's first values, which threads of the host make and send. */
static uint64_t hash_new(const struct arrangement *what, const char *device)
{
    glm52_context_options options = {.struct_size = sizeof options, .device = device};
    glm52_context *context;
    glm52_config *config;
    glm52_model *model;

    ok(glm52_context_create(&options, &context));
    ok(glm52_config_create(context, &config));
    set_all(config, what->settings);
    ok(glm52_model_create(context, config, &model));
    uint64_t h = hash_values(context, model);
    glm52_model_unref(&model);
    glm52_config_unref(&config);
    glm52_context_unref(&context);
    return h;
}

/* Times every operation of a run, and shows where most of it goes. */
static void check_profile(const struct arrangement *what, const struct trace *eager)
{
    char directory[] = "/tmp/gpu-model-XXXXXX", text[256], line[512];
    struct trace timed;
    double whole = 0, operations = 0;

    ok(mkdtemp(directory) ? GLM52_OK : GLM52_E_IO);
    snprintf(text, sizeof text, "report.profile=true out=%s", directory);
    train_once(what, text, &timed);
    check(same_trace(eager, &timed), what->name, "so does a run that is timed");
    snprintf(text, sizeof text, "%s/profile.jsonl", directory);
    FILE *file = fopen(text, "r");
    for (int i = 0; file && i < 9 && fgets(line, sizeof line, file); i++) {
        if (!i) sscanf(line, "{\"steps\":%*d,\"ms\":%lf,\"timed_ms\":%lf", &whole, &operations);
        printf("# %s", line);
    }
    if (file) fclose(file);
    /* On a GPU the last one is timed until the host has been told, which the step's own time does not include. */
    check(operations > 0.3 * whole && operations < 1.1 * whole, what->name, "its operations take most of the time");
    snprintf(text, sizeof text, "rm -rf %s", directory);
    if (system(text)) printf("# %s stays\n", directory);
}

static void check_arrangement(const struct arrangement *what)
{
    struct trace eager, graph, again, anew;
    struct run r;

    check(hash_new(what, "cpu") == hash_new(what, device_name), what->name, "begins with the values it has on the cpu");
    train_once(what, "train.cuda_graph=off", &eager);
    check(isfinite(eager.loss[STEPS - 1]) && eager.loss[STEPS - 1] != eager.loss[0], what->name, "trains");
    check(eager.skipped == 1, what->name, "a loss that is not finite is skipped");
    train_once(what, strcmp(device_name, "cpu") ? "train.cuda_graph=on" : "", &graph);
    printf("# %s: %g recorded, %g replayed; of equal steps the fastest %.3f ms run, %.3f ms replayed\n", what->name,
           graph.captures, graph.replays, 1e3 * eager.seconds, 1e3 * graph.seconds);
    check(same_trace(&eager, &graph) && (graph.replays > STEPS || !strcmp(device_name, "cpu")), what->name,
          "replays leave the same bits");
    check(graph.replays_of_last == what->microbatches + 1 || !strcmp(device_name, "cpu"), what->name,
          "a step of shapes that came before is replayed whole");
    train_once(what, "train.graph_shapes=1", &again);
    printf("# %s: %g recorded, %g replayed with room for one shape\n", what->name, again.captures, again.replays);
    check(same_trace(&eager, &again), what->name, "so does a second run, whose graphs come and go");
    train_once(what, "train.recompute=layers", &anew);
    check(same_trace(&eager, &anew), what->name, "so do layers computed anew");
    train_once(what, "train.recompute=light", &anew);
    check(same_trace(&eager, &anew), what->name, "so do activations computed anew");
    check_profile(what, &eager);
    open_run(&r, what, "");
    check_allocations(&r);
    check_plan(&r);
    close_run(&r);
}

int main(int argc, char **argv)
{
    const char *only = "";

    for (int i = 1; i + 1 < argc; i += 2) *(strcmp(argv[i], "--only") ? &device_name : &only) = argv[i + 1];
    for (size_t i = 0; i < sizeof arrangements / sizeof *arrangements; i++)
        if (!strncmp(arrangements[i].name, only, strlen(only))) check_arrangement(&arrangements[i]);
    if (strcmp(device_name, "cpu") && !*only) check_refusal(&arrangements[3]);
    printf("1..%d\n", tests);
    return failures != 0;
}
