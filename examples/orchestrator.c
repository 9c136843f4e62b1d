/* glm52 inside another program: two models trained in turn, with the program's own memory, log and idea of time.
 *
 *     cc orchestrator.c $(pkg-config --cflags --libs glm52) -o orchestrator
 *     ./orchestrator TEXT OUT [steps]
 *
 * A teacher-sized and a student-sized model read the same text. Every few steps the one that improves
 * less per second gives its turn to the other. Ctrl-C saves both and leaves; the next start goes on
 * where they were. Needs nothing but glm52.h. */
#include <glm52.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MODELS = 2, TURN = 5 };

/* ---- the program's memory: counted, and bounded ---- */

struct memory {
    size_t used, most, limit;
};

static void *allocate(void *user, size_t bytes, size_t alignment)
{
    struct memory *memory = user;
    void *at = NULL;

    if (memory->used + bytes > memory->limit || posix_memalign(&at, alignment, bytes)) return NULL;
    memory->used += bytes;
    if (memory->used > memory->most) memory->most = memory->used;
    return at;
}

static void release(void *user, void *at, size_t bytes)
{
    ((struct memory *)user)->used -= bytes;
    free(at);
}

/* ---- the program's log ---- */

static void write_log(void *user, glm52_log_level level, const char *message)
{
    fprintf(user, "  [%s] %s\n", level <= GLM52_LOG_WARNING ? "warning" : "note", message);
}

/* ---- errors ---- */

static void explain(const char *what)
{
    const glm52_error *error = glm52_error_last();

    fprintf(stderr, "%s: %s: %s\n", what, glm52_status_name(glm52_error_status(error)), glm52_error_message(error));
    if (*glm52_error_hint(error)) fprintf(stderr, "  %s\n", glm52_error_hint(error));
}

#define TRY(call)                                        \
    do {                                                 \
        glm52_status status_ = (call);                   \
        if (status_) return status_;                     \
    } while (0)

/* ---- one model in training ---- */

struct trainee {
    const char *name, *settings;
    char directory[1024];
    glm52_config *config;
    glm52_model *model;
    glm52_optimizer *optimizer;
    glm52_step *step;
    glm52_dataset *data;
    glm52_batch *batch;
    double loss, gain; /* of the last turn; gain: nats per second */
    int steps;
};

static glm52_status configure(struct trainee *t, const char *settings)
{
    char key[128], value[256];
    int used;

    for (; sscanf(settings, " %127[^= ]=%255s%n", key, value, &used) == 2; settings += used)
        TRY(glm52_config_set(t->config, key, value));
    return GLM52_OK;
}

static glm52_status open_trainee(struct trainee *t, glm52_context *context, const char *text, const char *out)
{
    uint64_t packs = 0;

    snprintf(t->directory, sizeof t->directory, "%s/%s", out, t->name);
    TRY(glm52_config_create(context, &t->config));
    TRY(configure(t, "model.preset=tiny data.document_tokens=256 data.pack_tokens=512 train.microbatch_tokens=512 "
                     "train.steps=1000 optim.warmup=10 optim.lr=3e-3"));
    TRY(configure(t, t->settings));
    TRY(glm52_config_set(t->config, "data.text", text));
    TRY(glm52_model_create(context, t->config, &t->model));
    TRY(glm52_optimizer_create(t->model, NULL, &t->optimizer));
    TRY(glm52_step_create(t->model, t->optimizer, NULL, &t->step));
    TRY(glm52_dataset_open(context, t->config, &t->data));
    TRY(glm52_batch_create(context, &t->batch));
    if (!glm52_step_resume(t->step, t->directory, &packs)) {
        double step;
        TRY(glm52_step_metric(t->step, "step", &step));
        t->steps = (int)step;
        printf("%s goes on at step %d\n", t->name, t->steps);
    }
    return glm52_dataset_seek(t->data, packs);
}

static void close_trainee(struct trainee *t)
{
    glm52_config_unref(&t->config); /* any order is right */
    glm52_model_unref(&t->model);
    glm52_dataset_unref(&t->data);
    glm52_optimizer_unref(&t->optimizer);
    glm52_batch_unref(&t->batch);
    glm52_step_unref(&t->step);
}

static glm52_status take_turn(struct trainee *t)
{
    double before = t->loss, seconds = 0, value;

    for (int i = 0; i < TURN; i++) {
        TRY(glm52_dataset_next(t->data, t->batch));
        TRY(glm52_step_run(t->step, &t->batch, 1));
        TRY(glm52_step_metric(t->step, "seconds", &value));
        seconds += value;
        t->steps++;
    }
    TRY(glm52_step_metric(t->step, "loss", &t->loss));
    t->gain = before > 0 ? (before - t->loss) / seconds : 1e9;
    return glm52_step_metric(t->step, "loss", &t->loss);
}

static glm52_status save(struct trainee *trainee)
{
    for (int i = 0; i < MODELS; i++) TRY(glm52_step_save(trainee[i].step, trainee[i].directory));
    return GLM52_OK;
}

/* ---- the program ---- */

static glm52_context *running;

static void interrupt(int signal_number)
{
    (void)signal_number;
    glm52_context_cancel(running); /* allowed here: it stores one number */
}

static glm52_status train(struct trainee *trainee, int steps)
{
    while (trainee[0].steps + trainee[1].steps < steps) {
        struct trainee *t = &trainee[trainee[1].gain > trainee[0].gain];
        TRY(take_turn(t));
        printf("%-8s step %4d  loss %.4f  gain %.4f nats/s\n", t->name, t->steps, t->loss,
               t->gain < 1e8 ? t->gain : 0.0);
        trainee[t == trainee].gain *= 1.05; /* nobody waits for ever */
    }
    return GLM52_OK;
}

int main(int argc, char **argv)
{
    struct memory memory = {.limit = (size_t)1 << 30};
    glm52_allocator allocator = {.struct_size = sizeof allocator, .user = &memory, .allocate = allocate,
                                 .release = release};
    glm52_context_options options = {.struct_size = sizeof options, .device = "cpu", .allocator = &allocator,
                                     .log = write_log, .log_user = stdout};
    struct trainee trainee[MODELS] = {{.name = "larger", .settings = "train.seed=1", .gain = 1e9},
                                      {.name = "smaller", .settings = "train.seed=2 model.num_hidden_layers=3",
                                       .gain = 1e9}};
    glm52_context *context = NULL;
    glm52_status status;

    if (argc < 3) {
        fprintf(stderr, "usage: %s TEXT OUT [steps]\n", argv[0]);
        return 2;
    }
    setvbuf(stdout, NULL, _IOLBF, 0); /* a line at a time, also into a file */
    if (glm52_context_create(&options, &context)) {
        explain("context");
        return 1;
    }
    status = open_trainee(&trainee[0], context, argv[1], argv[2]);
    if (!status) status = open_trainee(&trainee[1], context, argv[1], argv[2]);
    running = context;
    signal(SIGINT, interrupt);
    if (!status) status = train(trainee, argc > 3 ? atoi(argv[3]) : 200);
    signal(SIGINT, SIG_DFL);
    if (status && status != GLM52_E_CANCELLED) explain("training");
    glm52_context_withdraw_cancel(context); /* a late Ctrl-C shall not end the saving */
    if (!status || status == GLM52_E_CANCELLED) {
        printf("%s; saving\n", status ? "interrupted" : "done");
        status = save(trainee);
        if (status) explain("saving");
    }
    for (int i = 0; i < MODELS; i++) close_trainee(&trainee[i]);
    glm52_context_unref(&context);
    printf("memory: %.1f MB at most, %zu bytes left\n", (double)memory.most / 1e6, memory.used);
    return status || memory.used ? 1 : 0;
}
