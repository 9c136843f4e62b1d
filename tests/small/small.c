#include "small.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char shape[] =
    "model.vocab_size=37 model.hidden_size=20 model.num_hidden_layers=4 model.first_k_dense_replace=1 "
    "model.intermediate_size=28 model.moe_intermediate_size=12 model.n_routed_experts=5 model.num_experts_per_tok=2 "
    "model.num_attention_heads=3 model.q_lora_rank=14 model.kv_lora_rank=10 model.qk_nope_head_dim=6 "
    "model.qk_rope_head_dim=4 model.v_head_dim=7 model.index_n_heads=2 model.index_head_dim=8 model.index_topk=5 "
    "model.indexer_types=full,full,shared,full model.rope_theta=100 model.initializer_range=0.3 "
    "model.max_position_embeddings=4096 data.pack_tokens=64 train.microbatch_tokens=64 optim.lr=1e-2 "
    "optim.schedule=constant train.seed=3";

void small_set(glm52_config *config, const char *settings)
{
    char copy[2048], *rest = copy;

    ck_assert_uint_lt((unsigned)snprintf(copy, sizeof copy, "%s", settings), sizeof copy);
    for (char *one; (one = strtok_r(rest, " ", &rest));) {
        char *equals = strchr(one, '=');
        ck_assert_ptr_nonnull(equals);
        *equals = 0;
        OK(glm52_config_set(config, one, equals + 1));
    }
}

void small_shape(glm52_config *config)
{
    small_set(config, shape);
}

void small_configure(struct small *s, const glm52_context_options *options, const char *settings)
{
    memset(s, 0, sizeof *s);
    OK(glm52_context_create(options, &s->context));
    OK(glm52_config_create(s->context, &s->config));
    small_shape(s->config);
    small_set(s->config, settings);
}

void small_open(struct small *s, const glm52_context_options *options, const char *settings)
{
    small_configure(s, options, settings);
    OK(glm52_model_create(s->context, s->config, &s->model));
    OK(glm52_optimizer_create(s->model, NULL, &s->optimizer));
    OK(glm52_step_create(s->model, s->optimizer, NULL, &s->step));
}

void small_threads(struct small *s, int threads, const char *settings)
{
    small_open(s, &(glm52_context_options){.struct_size = sizeof(glm52_context_options), .threads = threads}, settings);
}

void small_close(struct small *s)
{
    uint64_t now;

    glm52_step_unref(&s->step);
    glm52_optimizer_unref(&s->optimizer);
    glm52_model_unref(&s->model);
    OK(glm52_context_memory(s->context, &now, NULL));
    glm52_config_unref(&s->config);
    glm52_context_unref(&s->context);
    ck_assert_uint_lt(now, 16384); /* context and config */
}

int32_t small_token(unsigned seed, int place)
{
    uint64_t x = (uint64_t)seed << 32 | (unsigned)place;

    x = (x ^ x >> 31) * UINT64_C(0x9E3779B97F4A7C15);
    x = (x ^ x >> 29) * UINT64_C(0xBF58476D1CE4E5B9);
    return (int32_t)((x ^ x >> 32) % 37);
}

glm52_batch *small_batch(struct small *s, int documents, const struct document *document)
{
    glm52_batch *batch = NULL;
    int32_t tokens[4096], cu[256] = {0}, count = 0;

    for (int d = 0; d < documents; d++) {
        for (int i = 0; i < document[d].length; i++) tokens[count++] = small_token(document[d].seed, i);
        cu[d + 1] = count;
    }
    OK(glm52_batch_create(s->context, &batch));
    OK(glm52_batch_set(batch, "tokens", GLM52_DTYPE_I32, tokens, (uint64_t)count));
    OK(glm52_batch_set(batch, "cu_seqlens", GLM52_DTYPE_I32, cu, (uint64_t)documents + 1));
    return batch;
}

glm52_batch *small_text(struct small *s, int length, unsigned seed)
{
    return small_batch(s, 1, &(struct document){length, seed});
}

static glm52_parameter_info parameter_at(struct small *s, uint32_t index)
{
    glm52_parameter_info p = {.struct_size = sizeof p};

    OK(glm52_model_parameter(s->model, index, &p));
    return p;
}

glm52_parameter_info small_parameter(struct small *s, const char *name)
{
    uint32_t index;

    OK(glm52_model_parameter_find(s->model, name, &index));
    return parameter_at(s, index);
}

struct snapshot small_snapshot(struct small *s, enum small_what what)
{
    struct snapshot out;
    uint64_t total = 0;

    OK(glm52_model_parameter_count(s->model, &out.parameters, NULL));
    out.offset = calloc(out.parameters + 1, sizeof *out.offset);
    for (uint32_t i = 0; i < out.parameters; i++) {
        glm52_parameter_info p = parameter_at(s, i);
        const glm52_view *view = what == VALUES ? &p.value : &p.gradient;
        total += view->data ? (view->bytes + sizeof *out.at - 1) / sizeof *out.at : 0;
        out.offset[i + 1] = total;
    }
    out.at = calloc(total, sizeof *out.at);
    for (uint32_t i = 0; i < out.parameters; i++) {
        glm52_parameter_info p = parameter_at(s, i);
        const glm52_view *view = what == VALUES ? &p.value : &p.gradient;
        if (view->data) memcpy(out.at + out.offset[i], view->data, view->bytes);
    }
    return out;
}

void snapshot_free(struct snapshot *snapshot)
{
    free(snapshot->offset);
    free(snapshot->at);
}

void check_same(struct small *s, const struct snapshot *a, const struct snapshot *b)
{
    ck_assert_uint_eq(a->parameters, b->parameters);
    for (uint32_t i = 0; i < a->parameters; i++) {
        uint64_t count = a->offset[i + 1] - a->offset[i];
        ck_assert_uint_eq(a->offset[i + 1], b->offset[i + 1]);
        ck_assert_msg(!memcmp(a->at + a->offset[i], b->at + b->offset[i], count * sizeof *a->at), "%s differs",
                      parameter_at(s, i).name);
    }
}

static double largest(const float *values, uint64_t count)
{
    double most = 0;

    for (uint64_t i = 0; i < count; i++) most = fmax(most, fabs((double)values[i]));
    return most;
}

void check_close(struct small *s, const struct snapshot *a, const struct snapshot *b, double tolerance)
{
    double anywhere = largest(a->at, a->offset[a->parameters]);

    ck_assert(anywhere > 0);
    ck_assert_uint_eq(a->parameters, b->parameters);
    for (uint32_t i = 0; i < a->parameters; i++) {
        uint64_t first = a->offset[i], count = a->offset[i + 1] - first;
        double limit = tolerance * (largest(a->at + first, count) + 1e-3 * anywhere);
        for (uint64_t j = first; j < first + count; j++)
            ck_assert_msg(fabs((double)a->at[j] - (double)b->at[j]) <= limit, "%s[%llu]: %.9g and %.9g, allowed %.3g",
                          parameter_at(s, i).name, (unsigned long long)(j - first), (double)a->at[j], (double)b->at[j],
                          limit);
    }
}

double small_gradients(struct small *s, glm52_batch *const *batches, uint32_t count)
{
    double loss;

    OK(glm52_step_gradients(s->step, batches, count));
    OK(glm52_step_metric(s->step, "loss", &loss));
    return loss;
}

double small_loss(struct small *s, glm52_batch *batch)
{
    double loss;

    OK(glm52_step_evaluate(s->step, &batch, 1, &loss));
    return loss;
}

double small_train(struct small *s, glm52_batch *const *batches, uint32_t count)
{
    double loss;

    OK(glm52_step_run(s->step, batches, count));
    OK(glm52_step_metric(s->step, "loss", &loss));
    return loss;
}

glm52_view small_output(glm52_batch *batch, const char *name)
{
    glm52_view view = {.struct_size = sizeof view};

    OK(glm52_batch_get(batch, name, &view));
    return view;
}
