/* Which keys a row attends to: top-k against the length of documents, and layers that share a selection. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "small/small.h"
#include "unit/tap.h"

static const struct document longest = {19, 3}, shorter = {11, 4};

static double gradients_with(const char *settings, struct small *s, struct snapshot *out)
{
    small_open(s, NULL, settings);
    glm52_batch *batch = small_batch(s, 2, (struct document[]){longest, shorter});
    double loss = small_gradients(s, &batch, 1);
    *out = small_snapshot(s, GRADIENTS);
    glm52_batch_unref(&batch);
    return loss;
}

START_TEST(a_top_k_beyond_the_longest_document_is_all_of_it)
{
    struct small s[3];
    struct snapshot g[3];
    double exact = gradients_with("model.index_topk=19", &s[0], &g[0]);

    ck_assert_double_eq_tol(gradients_with("model.index_topk=20", &s[1], &g[1]), exact, 1e-6 * exact);
    check_close(&s[0], &g[0], &g[1], 2e-5);
    ck_assert_double_eq_tol(gradients_with("model.index_topk=301", &s[2], &g[2]), exact, 1e-6 * exact);
    check_close(&s[0], &g[0], &g[2], 2e-5);
    for (int i = 0; i < 3; i++) snapshot_free(&g[i]), small_close(&s[i]);

    ck_assert(fabs(gradients_with("model.index_topk=4", &s[0], &g[0]) - exact) > 1e-4); /* a short one is not */
    snapshot_free(&g[0]);
    small_close(&s[0]);
}
END_TEST

/* Every row: ascending keys inside its document up to itself, as many as there are or fit, then -1. The keys are those
 * of the highest scores, lower position first where scores are equal. */
static void check_rows(glm52_batch *batch, int layer, int k)
{
    char name[32];

    snprintf(name, sizeof name, "topk.%d", layer);
    const int32_t *key = small_output(batch, name).data;
    snprintf(name, sizeof name, "index_scores.%d", layer);
    const float *score = small_output(batch, name).data;
    int64_t rows = small_output(batch, "tokens").shape[0];
    for (int row = 0; row < rows; row++, key += k, score += rows) {
        int start = row < longest.length ? 0 : longest.length, visible = row - start + 1;
        int count = visible < k ? visible : k;
        for (int i = 0; i < k; i++) {
            ck_assert_int_eq(key[i] < 0, i >= count);
            if (i >= count) continue;
            ck_assert_int_ge(key[i], i ? key[i - 1] + 1 : start);
            ck_assert_int_le(key[i], row);
        }
        for (int other = start, next = 0; other <= row; other++) {
            if (next < count && key[next] == other) {
                next++;
                continue;
            }
            for (int i = 0; i < count; i++)
                ck_assert(score[key[i]] > score[other] || (score[key[i]] == score[other] && key[i] < other));
        }
    }
}

START_TEST(selections_hold_the_best_visible_keys)
{
    for (int k = 1; k <= 13; k += 4) {
        struct small s;
        char settings[64];

        snprintf(settings, sizeof settings, "model.index_topk=%d", k);
        small_open(&s, NULL, settings);
        glm52_batch *batch = small_batch(&s, 2, (struct document[]){longest, shorter});
        OK(glm52_model_forward(s.model, batch, "topk.* index_scores.*"));
        check_rows(batch, 0, k);
        check_rows(batch, 1, k);
        check_rows(batch, 3, k);
        glm52_batch_unref(&batch);
        small_close(&s);
    }
}
END_TEST

static int same_selection(glm52_batch *batch, int x, int y)
{
    char one[32], other[32];

    snprintf(one, sizeof one, "topk.%d", x);
    snprintf(other, sizeof other, "topk.%d", y);
    glm52_view a = small_output(batch, one), b = small_output(batch, other);
    return !memcmp(a.data, b.data, a.bytes);
}

START_TEST(a_shared_layer_takes_the_nearest_earlier_selection)
{
    static const struct {
        const char *settings;
        int source[6];
    } patterns[] = {
        {"model.indexer_types=full,shared,shared,full,full,shared", {0, 0, 0, 3, 4, 4}},
        {"model.indexer_types=full,full,shared,full,shared,shared", {0, 1, 1, 3, 3, 3}},
        {"model.indexer_types=full,shared,shared,shared,shared,shared", {0, 0, 0, 0, 0, 0}},
        {"model.indexer_types= model.index_topk_freq=3 model.index_skip_topk_offset=2", {0, 1, 1, 1, 4, 4}},
        {"model.indexer_types= model.index_topk_freq=4 model.index_skip_topk_offset=3", {0, 1, 2, 2, 2, 2}},
        {"model.indexer_types= model.index_topk_freq=1 model.index_skip_topk_offset=1", {0, 1, 2, 3, 4, 5}},
    };

    for (size_t i = 0; i < sizeof patterns / sizeof *patterns; i++) {
        struct small s;
        char settings[256];

        snprintf(settings, sizeof settings, "model.num_hidden_layers=6 %s", patterns[i].settings);
        small_open(&s, NULL, settings);
        glm52_batch *batch = small_text(&s, 40, 6);
        OK(glm52_model_forward(s.model, batch, "topk.*"));
        for (int layer = 0; layer < 6; layer++)
            for (int other = 0; other < 6; other++)
                ck_assert_msg(same_selection(batch, layer, other) ==
                                  (patterns[i].source[layer] == patterns[i].source[other]),
                              "pattern %d: layers %d and %d", (int)i, layer, other);
        for (int layer = 0; layer < 6; layer++) {
            char name[64];
            uint32_t index;
            snprintf(name, sizeof name, "model.layers.%d.self_attn.indexer.wk.weight", layer);
            glm52_status status = glm52_model_parameter_find(s.model, name, &index);
            ck_assert_int_eq(status, patterns[i].source[layer] == layer ? GLM52_OK : GLM52_E_INVALID);
        }
        small_train(&s, &batch, 1);
        glm52_batch_unref(&batch);
        small_close(&s);
    }
}
END_TEST

/* The selection is all that an indexer does: with the same keys selected, its parameters do not matter. */
START_TEST(indexers_act_through_the_selection_alone)
{
    struct small s;

    small_open(&s, NULL, "model.index_topk=64");
    glm52_batch *batch = small_batch(&s, 2, (struct document[]){longest, shorter});
    double loss = small_gradients(&s, &batch, 1);
    struct snapshot before = small_snapshot(&s, GRADIENTS);
    glm52_view wk = small_parameter(&s, "model.layers.1.self_attn.indexer.wk.weight").value;
    for (uint64_t i = 0; i < wk.bytes / sizeof(float); i++) ((float *)wk.data)[i] *= -3;
    ck_assert(small_gradients(&s, &batch, 1) == loss);
    struct snapshot after = small_snapshot(&s, GRADIENTS);
    check_same(&s, &before, &after);
    snapshot_free(&before);
    snapshot_free(&after);
    glm52_batch_unref(&batch);
    small_close(&s);
}
END_TEST

START_TEST(the_selection_bias_moves_choices_and_no_weight)
{
    struct small s;

    small_open(&s, NULL, "");
    glm52_batch *batch = small_text(&s, 20, 8);
    float *bias = small_parameter(&s, "model.layers.1.mlp.gate.e_score_correction_bias").value.data;
    bias[3] = 10; /* more than any sigmoid */
    OK(glm52_model_forward(s.model, batch, "router_logits.1 router_idx.1 router_w.1"));
    const float *logits = small_output(batch, "router_logits.1").data, *weight = small_output(batch, "router_w.1").data;
    const int32_t *chosen = small_output(batch, "router_idx.1").data;
    for (int row = 0; row < 20; row++, logits += 5, weight += 2, chosen += 2) {
        double sigmoid[2];
        int other = 0;
        for (int e = 1; e < 5; e++)
            if (e != 3 && logits[e] > logits[other]) other = e;
        int first = other < 3 ? other : 3, second = other < 3 ? 3 : other;
        ck_assert_int_eq(chosen[0], first);
        ck_assert_int_eq(chosen[1], second);
        for (int i = 0; i < 2; i++) sigmoid[i] = 1 / (1 + exp(-(double)logits[chosen[i]]));
        for (int i = 0; i < 2; i++) {
            double expected = 2.5 * sigmoid[i] / (sigmoid[0] + sigmoid[1]);
            ck_assert_double_eq_tol((double)weight[i], expected, 1e-5);
        }
    }
    glm52_batch_unref(&batch);
    small_close(&s);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("model");
    TCase *cases = tcase_create("selection");

    tcase_set_timeout(cases, 60);
    tcase_add_test(cases, a_top_k_beyond_the_longest_document_is_all_of_it);
    tcase_add_test(cases, selections_hold_the_best_visible_keys);
    tcase_add_test(cases, a_shared_layer_takes_the_nearest_earlier_selection);
    tcase_add_test(cases, indexers_act_through_the_selection_alone);
    tcase_add_test(cases, the_selection_bias_moves_choices_and_no_weight);
    suite_add_tcase(suite, cases);
    return run_tap(suite);
}
