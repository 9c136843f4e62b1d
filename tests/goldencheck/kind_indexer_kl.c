/* indexer_kl: KL rows, means, loss and gradients of each variant. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "training.h"

static glm52_status configure_kl(struct training *t, const void *with)
{
    const json_t *variant = with;

    TRY(glm52_config_set(t->config, "train.ce_coeff", "0"));
    TRY(set_word(t, "train.attention", json_object_get(variant, "attention")));
    TRY(set_word(t, "indexer_loss.kind", json_object_get(variant, "kl")));
    return set_number(t, "indexer_loss.coeff", training_option(t->c, "coefficient"));
}

static glm52_status mask_rows(struct training *t, const json_t *variant)
{
    const char *name = json_string_value(json_object_get(variant, "rows"));
    struct array mask = {0};

    if (!name || !strcmp(name, "all")) return GLM52_OK;
    if (!case_array(t->c, name, &mask)) return fail(GLM52_E_INVALID, "there is no row mask %s", name);
    float *values = array_floats(&mask);
    glm52_status status = glm52_batch_set(t->batch, "row_mask", GLM52_DTYPE_F32, values, (uint64_t)mask.count);
    free(values);
    array_free(&mask);
    return status;
}

static void compare_variant(struct training *t, const char *variant)
{
    const struct model_config *m = &t->model->model.config.model;
    char tensor[300], metric[64];

    for (int layer = 0; layer < (int)m->num_hidden_layers; layer++) {
        if (m->indexer_types[layer] != INDEXER_FULL) continue;
        snprintf(tensor, sizeof tensor, "%s.kl_rows.%d", variant, layer);
        compare_kept(t, tensor, "kl_rows.%d", layer, NULL, 0);
        snprintf(tensor, sizeof tensor, "%s.kl.%d", variant, layer);
        snprintf(metric, sizeof metric, "indexer_loss.%d", layer);
        compare_metric(t, tensor, metric, 1);
    }
    snprintf(tensor, sizeof tensor, "%s.loss", variant);
    compare_metric(t, tensor, "loss", 1);
    snprintf(tensor, sizeof tensor, "%s.grad.", variant);
    compare_parameters(t, tensor, 1, 1);
}

void run_indexer_kl(struct golden_case *c)
{
    json_t *variants = json_object_get(c->sidecar, "variants"), *variant;
    struct array tokens = {0}, bounds = {0};
    const char *name;

    if (load_pack(c, &tokens, &bounds))
        case_fail_last(c, "pack");
    else
        json_object_foreach(variants, name, variant)
        {
            struct training t = {.c = c};
            glm52_status status = open_training(&t, configure_kl, variant, tokens.count);
            if (!status) status = training_feed(&t, tokens.integer, tokens.count, bounds.integer, bounds.count);
            if (!status) status = mask_rows(&t, variant);
            if (!status) status = glm52_step_gradients(t.step, &t.batch, 1);
            if (status)
                case_fail_last(c, name);
            else
                compare_variant(&t, name);
            close_training(&t);
        }
    array_free(&tokens);
    array_free(&bounds);
}
