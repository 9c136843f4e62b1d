/* Steps of preset tiny driven by C, one for each line that comes in; prints what each took by the clock and in
 * processor time, and its loss. For benches that drive the same steps from another language in turn.
 *
 *   bench-c-step TEXT */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include <glm52.h>

static double now(clockid_t which)
{
    struct timespec t;

    clock_gettime(which, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void ok(glm52_status status)
{
    if (!status) return;
    fprintf(stderr, "%s\n", glm52_error_message(glm52_error_last()));
    exit(1);
}

int main(int argc, char **argv)
{
    glm52_context *context;
    glm52_config *config;
    glm52_dataset *dataset;
    glm52_model *model;
    glm52_optimizer *optimizer;
    glm52_step *step;
    glm52_batch *batch;

    if (argc != 2) return 2;
    ok(glm52_context_create(NULL, &context));
    ok(glm52_config_create(context, &config));
    ok(glm52_config_load_json(config, "{\"model.preset\": \"tiny\", \"data.pack_tokens\": 2048,"
                                      " \"data.document_tokens\": 256, \"train.microbatch_tokens\": 2048}"));
    ok(glm52_config_set(config, "data.text", argv[1]));
    ok(glm52_dataset_open(context, config, &dataset));
    ok(glm52_model_create(context, config, &model));
    ok(glm52_optimizer_create(model, NULL, &optimizer));
    ok(glm52_step_create(model, optimizer, NULL, &step));
    ok(glm52_batch_create(context, &batch));
    while (getchar() == '\n') {
        double clock = now(CLOCK_MONOTONIC), processor = now(CLOCK_PROCESS_CPUTIME_ID), loss;
        ok(glm52_dataset_next(dataset, batch));
        ok(glm52_step_run(step, &batch, 1));
        ok(glm52_step_metric(step, "loss", &loss));
        printf("%.9f %.9f %.17g\n", now(CLOCK_MONOTONIC) - clock, now(CLOCK_PROCESS_CPUTIME_ID) - processor, loss);
        fflush(stdout);
    }
    glm52_batch_unref(&batch);
    glm52_step_unref(&step);
    glm52_optimizer_unref(&optimizer);
    glm52_model_unref(&model);
    glm52_dataset_unref(&dataset);
    glm52_config_unref(&config);
    glm52_context_unref(&context);
    return 0;
}
