/* Gradients of whole models against finite differences of the loss, for every parameter of several architectures.
 *
 * The loss is a double sum of fp32 losses of rows: its noise is about 1e-7. Along a direction of length h the central
 * difference errs by noise / h and by h^2 / 6 of the third derivative; where the loss changes by 1e-3, both stay below
 * one percent of the gradient. Selected keys and chosen experts are steps in the loss: a difference across one says
 * nothing, so h shrinks until none is crossed. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "small/small.h"
#include "unit/tap.h"

enum { LAYERS = 4, CHOICES = 65536 };

/* Every discrete choice of a pass. */
static size_t choices(struct small *s, glm52_batch *batch, int32_t *out)
{
    size_t count = 0;
    char name[32];

    static const char *const kind[] = {"topk", "router_idx", "mtp_topk", "mtp_router_idx"};

    OK(glm52_model_forward(s->model, batch, "topk.* router_idx.* mtp_topk.* mtp_router_idx.*"));
    for (int layer = 0; layer < LAYERS; layer++)
        for (int i = 0; i < 4; i++) {
            glm52_view view = {.struct_size = sizeof view};
            snprintf(name, sizeof name, "%s.%d", kind[i], layer);
            if (glm52_batch_get(batch, name, &view)) continue; /* a dense layer has no router */
            ck_assert_uint_lt(count + view.bytes / sizeof *out, CHOICES);
            memcpy(out + count, view.data, view.bytes);
            count += view.bytes / sizeof *out;
        }
    return count;
}

struct line {
    struct small *s;
    glm52_batch *batch;
    float *value;
    const double *direction;
    uint64_t count;
    float *base;
    int32_t *chosen;  /* at the base */
    size_t choices;
    int objective;    /* of all losses, not of the trunk's cross-entropy alone */
};

static void move(const struct line *l, double step)
{
    for (uint64_t i = 0; i < l->count; i++) l->value[i] = (float)((double)l->base[i] + step * l->direction[i]);
}

/* Loss at base + step * direction; 0 if a choice differs from the base's. */
static int loss_at(const struct line *l, double step, double *loss)
{
    static int32_t now[CHOICES];

    move(l, step);
    if (choices(l->s, l->batch, now) != l->choices || memcmp(now, l->chosen, l->choices * sizeof *now)) return 0;
    *loss = l->objective ? small_gradients(l->s, &l->batch, 1) : small_loss(l->s, l->batch);
    return 1;
}

/* The slope along the direction, 0 on failure to find a stretch without steps. */
static int slope(const struct line *l, double expected, double *out)
{
    double h = fmin(2e-3 / (fabs(expected) + 1e-3), 0.05), up, down;

    for (int i = 0; i < 5; i++, h /= 2) {
        if (!loss_at(l, h, &up) || !loss_at(l, -h, &down)) continue;
        *out = (up - down) / (2 * h);
        return 1;
    }
    return 0;
}

static double norm(const float *x, uint64_t count)
{
    double sum = 0;

    for (uint64_t i = 0; i < count; i++) sum += (double)x[i] * (double)x[i];
    return sqrt(sum);
}

/* Two directions of unit length: the gradient's own, which shows a wrong factor, and random signs, which show what is
 * missing. 1 if both could be measured. */
static int check_parameter(struct line *l, const char *name, const float *gradient, double whole)
{
    double *direction = malloc(l->count * sizeof *direction), length = norm(gradient, l->count);
    int measured = 1;

    l->direction = direction;
    for (int which = 0; which < 2; which++) {
        double expected = 0, found;
        if (which == 0 && length == 0) continue; /* an expert that no row chose: random signs tell */
        for (uint64_t i = 0; i < l->count; i++) {
            int sign = small_token(99, (int)i) % 2 ? 1 : -1;
            direction[i] = which ? sign / sqrt((double)l->count) : (double)gradient[i] / length;
            expected += direction[i] * (double)gradient[i];
        }
        if (slope(l, expected, &found))
            ck_assert_msg(fabs(found - expected) <= 0.02 * fabs(expected) + 2e-4 * whole,
                          "%s, direction %d: %.6g, not %.6g", name, which, found, expected);
        else
            measured = 0;
        move(l, 0);
    }
    free(direction);
    return measured;
}

/* `only`: parameters whose names contain it, NULL for all. */
static void check_objective(const char *settings, int documents, const struct document *document, const int32_t *labels,
                            const char *only, int objective)
{
    static int32_t chosen[CHOICES];
    struct small s;
    int checked = 0, measured = 0;

    small_open(&s, NULL, settings);
    glm52_batch *batch = small_batch(&s, documents, document);
    if (labels) OK(glm52_batch_set(batch, "labels", GLM52_DTYPE_I32, labels, (uint64_t)documents));
    small_gradients(&s, &batch, 1);
    struct snapshot gradient = small_snapshot(&s, GRADIENTS), values = small_snapshot(&s, VALUES);
    struct line line = {.objective = objective, .s = &s, .batch = batch, .chosen = chosen,
                        .choices = choices(&s, batch, chosen)};
    double whole = norm(gradient.at, gradient.offset[gradient.parameters]);
    for (uint32_t i = 0; i < gradient.parameters; i++) {
        glm52_parameter_info p = {.struct_size = sizeof p};
        OK(glm52_model_parameter(s.model, i, &p));
        if (!p.gradient.data || (only && !strstr(p.name, only))) continue;
        line.value = p.value.data;
        line.count = p.value.bytes / sizeof(float);
        line.base = values.at + values.offset[i];
        measured += check_parameter(&line, p.name, gradient.at + gradient.offset[i], whole);
        checked++;
    }
    ck_assert_int_ge(checked, only ? 3 : 20);
    ck_assert_msg(measured * 10 >= checked * 9, "only %d of %d parameters could be measured", measured, checked);
    snapshot_free(&gradient);
    snapshot_free(&values);
    glm52_batch_unref(&batch);
    small_close(&s);
}

static void check_model(const char *settings, int documents, const struct document *document, const int32_t *labels)
{
    check_objective(settings, documents, document, labels, NULL, 0);
}

static const struct document documents[] = {{9, 11}, {6, 12}, {1, 13}};

START_TEST(dense_and_moe_layers)
{
    check_model("", 3, documents, NULL);
}
END_TEST

START_TEST(every_key_selected)
{
    check_model("model.index_topk=16", 3, documents, NULL);
}
END_TEST

START_TEST(dense_layers_alone)
{
    check_model("model.first_k_dense_replace=4", 3, documents, NULL);
}
END_TEST

START_TEST(moe_layers_alone_with_two_shared_experts)
{
    check_model("model.first_k_dense_replace=0 model.n_shared_experts=2", 3, documents, NULL);
}
END_TEST

START_TEST(weights_that_do_not_sum_to_the_scale)
{
    check_model("model.norm_topk_prob=false model.routed_scaling_factor=1.7 model.num_experts_per_tok=3", 3, documents,
                NULL);
}
END_TEST

START_TEST(epsilons_that_matter)
{
    check_model("model.rms_norm_eps=0.3 model.latent_norm_eps=0.7", 3, documents, NULL);
}
END_TEST

START_TEST(layers_computed_anew)
{
    check_model("train.recompute=light", 3, documents, NULL);
    check_model("train.recompute=layers", 3, documents, NULL);
}
END_TEST

START_TEST(documents_of_one_token)
{
    static const int32_t labels[] = {5, -100, 36, 0};

    check_model("", 4, (struct document[]){{1, 1}, {1, 2}, {1, 3}, {1, 4}}, labels);
}
END_TEST

static const struct document longer[] = {{9, 11}, {7, 12}, {2, 13}};

#define MTP "model.num_nextn_predict_layers=1 mtp.depths=3 mtp.factor=0.7 "

START_TEST(mtp_cross_entropy)
{
    check_objective(MTP "mtp.share=none", 3, longer, NULL, NULL, 1);
}
END_TEST

START_TEST(mtp_with_shared_keys)
{
    check_objective(MTP "mtp.share=index_kv mtp.query_offset=depth", 3, longer, NULL, NULL, 1);
}
END_TEST

START_TEST(mtp_with_a_shared_index)
{
    check_objective(MTP "mtp.share=index train.recompute=layers", 3, longer, NULL, NULL, 1);
}
END_TEST

START_TEST(mtp_total_variation)
{
    check_objective(MTP "mtp.loss=tv mtp.detach_heads=true", 3, longer, NULL, "model.layers.4.", 1);
}
END_TEST

/* The loss teaches the indexer alone: differences in other parameters would see the teacher move. */
START_TEST(indexer_loss_over_selected_keys)
{
    check_objective("indexer_loss.kind=sparse indexer_loss.coeff=100", 3, longer, NULL, "indexer.", 1);
}
END_TEST

START_TEST(indexer_loss_over_all_keys)
{
    check_objective("indexer_loss.kind=dense indexer_loss.coeff=100", 3, longer, NULL, "indexer.", 1);
}
END_TEST

START_TEST(indexer_warm_up)
{
    check_objective("indexer_loss.kind=dense indexer_loss.coeff=100 train.attention=dense train.train_only=indexer", 3,
                    longer, NULL, "indexer.", 1);
}
END_TEST

START_TEST(dense_attention)
{
    check_objective("train.attention=dense", 3, longer, NULL, NULL, 1);
}
END_TEST

START_TEST(dense_attention_with_mtp)
{
    check_objective(MTP "train.attention=dense train.recompute=layers", 3, longer, NULL, NULL, 1);
}
END_TEST

START_TEST(router_losses)
{
    check_objective("moe.auxiliary_loss=document moe.auxiliary_coeff=0.5 moe.z_coeff=0.1", 3, longer, NULL, "mlp.gate.",
                    1);
}
END_TEST

START_TEST(forced_balance)
{
    check_objective("moe.force_balance=true", 3, longer, NULL, NULL, 1);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("model");
    TCase *cases = tcase_create("differences");

    tcase_set_timeout(cases, 120);
    tcase_add_test(cases, mtp_cross_entropy);
    tcase_add_test(cases, mtp_with_shared_keys);
    tcase_add_test(cases, mtp_with_a_shared_index);
    tcase_add_test(cases, mtp_total_variation);
    tcase_add_test(cases, indexer_loss_over_selected_keys);
    tcase_add_test(cases, indexer_loss_over_all_keys);
    tcase_add_test(cases, indexer_warm_up);
    tcase_add_test(cases, dense_attention);
    tcase_add_test(cases, dense_attention_with_mtp);
    tcase_add_test(cases, router_losses);
    tcase_add_test(cases, forced_balance);
    tcase_add_test(cases, dense_and_moe_layers);
    tcase_add_test(cases, every_key_selected);
    tcase_add_test(cases, dense_layers_alone);
    tcase_add_test(cases, moe_layers_alone_with_two_shared_experts);
    tcase_add_test(cases, weights_that_do_not_sum_to_the_scale);
    tcase_add_test(cases, epsilons_that_matter);
    tcase_add_test(cases, layers_computed_anew);
    tcase_add_test(cases, documents_of_one_token);
    suite_add_tcase(suite, cases);
    return run_tap(suite);
}
