/* mtp_base: the trunk alone, as ref_model. mtp_ce, mtp_tv: values per depth, the gradients of
 * the MTP term alone, the KL of its indexer. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "training.h"

/* The pack stands in the case's base. */
static glm52_status load_base(struct golden_case *c, struct array *tokens, struct array *bounds)
{
    const char *base = json_string_value(json_object_get(c->sidecar, "base"));
    char path[2100];
    struct golden_case other;

    if (!base) return load_pack(c, tokens, bounds);
    snprintf(path, sizeof path, "%s/%s.json", c->directory, base);
    json_t *sidecar = json_load_file(path, 0, NULL);
    if (!sidecar || !case_open(&other, path, sidecar)) return fail(GLM52_E_IO, "cannot open the base %s", path);
    glm52_status status = load_pack(&other, tokens, bounds);
    case_close(&other);
    return status;
}

static glm52_status configure_mtp(struct training *t, const void *with)
{
    const char *loss = with;

    TRY(glm52_config_set(t->config, "train.ce_coeff", "0"));
    TRY(set_mtp(t));
    if (!strcmp(loss, "kl")) {
        TRY(glm52_config_set(t->config, "mtp.factor", "0"));
        TRY(glm52_config_set(t->config, "indexer_loss.coeff", "0.5")); /* stands in the meaning of kl_loss */
        return glm52_config_set(t->config, "indexer_loss.kind", "sparse");
    }
    return glm52_config_set(t->config, "mtp.loss", loss);
}

static void compare_depths(struct training *t)
{
    char tensor[64], metric[64];

    for (int d = 0; d < t->step->step.network.mtp.depths; d++) {
        int *inside = rows_inside(&t->batch->pack, d);
        static const struct {
            const char *tensor, *tap;
            double absent;
        } value[] = {{"h.%d", "mtp_out.%d", 0},       {"logits.%d", "mtp_logits.%d", 0},
                     {"topk.%d", "mtp_topk.%d", -1},  {"router_idx.%d", "mtp_router_idx.%d", -1},
                     {"router_w.%d", "mtp_router_w.%d", 0}, {"ce_rows.%d", "mtp_ce_rows.%d", 0}};
        for (size_t i = 0; i < sizeof value / sizeof *value; i++) {
            snprintf(tensor, sizeof tensor, value[i].tensor, d);
            compare_kept(t, tensor, value[i].tap, d, inside, value[i].absent);
        }
        snprintf(tensor, sizeof tensor, "loss.%d", d);
        snprintf(metric, sizeof metric, "mtp.%d.loss", d);
        if (case_has(t->c, tensor)) compare_metric(t, tensor, metric, 1);
        free(inside);
    }
}

static void compare_mtp_kl(struct training *t)
{
    char tensor[64], metric[64];
    int layers = t->step->step.network.layers;

    for (int d = 0; d < t->step->step.network.mtp.depths; d++) {
        int *inside = rows_inside(&t->batch->pack, d);
        snprintf(tensor, sizeof tensor, "kl_rows.%d", d);
        compare_kept(t, tensor, "mtp_kl_rows.%d", d, inside, 0);
        snprintf(tensor, sizeof tensor, "kl.%d", d);
        snprintf(metric, sizeof metric, "indexer_loss.%d", layers + d);
        if (case_has(t->c, tensor)) compare_metric(t, tensor, metric, 1);
        free(inside);
    }
}

/* kl_loss and grad_kl are of the MTP layer's indexer alone; the trunk's learn beside it and are not compared. */
static void run_mtp_kl(struct golden_case *c, const struct array *tokens, const struct array *bounds)
{
    struct training t = {.c = c};
    double kl = 0, loss = 0;
    char metric[64];

    glm52_status status = open_training(&t, configure_mtp, "kl", tokens->count);
    if (!status) status = training_run_once(&t, tokens, bounds);
    if (status) {
        case_fail_last(c, "kl");
    } else {
        compare_mtp_kl(&t);
        for (int d = 0; d < t.step->step.network.mtp.depths; d++) {
            snprintf(metric, sizeof metric, "indexer_loss.%d", t.step->step.network.layers + d);
            if (!glm52_step_metric(t.step, metric, &kl)) loss += 0.5 * kl;
        }
        compare_value(&t, "kl_loss", loss);
        compare_parameters(&t, "grad_kl.", 1, 0);
    }
    close_training(&t);
}

static void run_mtp(struct golden_case *c, const char *loss)
{
    struct array tokens = {0}, bounds = {0};
    struct training t = {.c = c};

    glm52_status status = load_base(c, &tokens, &bounds);
    if (!status) status = open_training(&t, configure_mtp, loss, tokens.count);
    if (!status) status = training_run_once(&t, &tokens, &bounds);
    if (status) {
        case_fail_last(c, loss);
    } else {
        compare_depths(&t);
        compare_metric(&t, "loss", "loss", 1);
        compare_parameters(&t, "grad.", 1, 1);
        if (!strcmp(loss, "tv")) {
            compare_kept(&t, "L", "tv_rows", 0, NULL, 0);
            double *alpha = must_allocate((size_t)(t.step->step.network.mtp.depths * tokens.count), sizeof *alpha);
            for (int d = 0; d < t.step->step.network.mtp.depths; d++) {
                const struct kept *k = training_find(&t, "mtp_alpha.%d", d);
                if (k) memcpy(alpha + d * tokens.count, k->value, (size_t)tokens.count * sizeof *alpha);
            }
            compare_floats(c, "alpha", "alpha", alpha, t.step->step.network.mtp.depths * tokens.count);
            free(alpha);
        }
    }
    close_training(&t);
    if (!status && case_has(c, "kl_loss")) run_mtp_kl(c, &tokens, &bounds);
    array_free(&tokens);
    array_free(&bounds);
}

void run_mtp_ce(struct golden_case *c)
{
    run_mtp(c, "ce");
}

void run_mtp_tv(struct golden_case *c)
{
    run_mtp(c, "tv");
}

static glm52_status configure_base(struct training *t, const void *with)
{
    (void)t, (void)with;
    return GLM52_OK;
}

void run_mtp_base(struct golden_case *c)
{
    struct array tokens = {0}, bounds = {0};
    struct training t = {.c = c};
    char tensor[64];

    glm52_status status = load_pack(c, &tokens, &bounds);
    if (!status) status = open_training(&t, configure_base, NULL, tokens.count);
    if (!status) status = training_run_once(&t, &tokens, &bounds);
    if (status) {
        case_fail_last(c, "trunk");
    } else {
        compare_kept(&t, "h", "final_hidden", 0, NULL, 0);
        compare_kept(&t, "logits", "logits", 0, NULL, 0);
        compare_kept(&t, "ce_rows", "ce_rows", 0, NULL, 0);
        compare_metric(&t, "loss", "loss", 1);
        for (int layer = 0; layer < t.step->step.network.layers; layer++) {
            static const char *const names[] = {"topk.%d", "router_idx.%d", "router_w.%d"};
            for (int i = 0; i < 3; i++) {
                snprintf(tensor, sizeof tensor, names[i], layer);
                compare_kept(&t, tensor, names[i], layer, NULL, 0);
            }
        }
        compare_parameters(&t, "grad.", 1, 1);
    }
    close_training(&t);
    array_free(&tokens);
    array_free(&bounds);
}
