/* Labels, masks, and which parameters the loss reaches. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "small/small.h"
#include "unit/tap.h"

enum { ROWS = 12 };

static const struct document pair[] = {{7, 1}, {5, 2}};

/* Weighted mean of the rows' losses, added up here. */
static double mean_of_rows(glm52_batch *batch)
{
    const float *row = small_output(batch, "ce_rows").data, *mask = small_output(batch, "loss_mask").data;
    const int32_t *label = small_output(batch, "labels").data;
    double sum = 0, weight = 0;

    for (int i = 0; i < ROWS; i++) {
        if (label[i] < 0) continue;
        sum += (double)mask[i] * (double)row[i];
        weight += (double)mask[i];
    }
    return sum / weight;
}

/* -log softmax(logits)[label] in double. */
static double cross_entropy(const float *logits, int32_t label)
{
    double top = (double)logits[0], sum = 0;

    for (int v = 1; v < 37; v++) top = fmax(top, (double)logits[v]);
    for (int v = 0; v < 37; v++) sum += exp((double)logits[v] - top);
    return log(sum) + top - (double)logits[label];
}

START_TEST(the_loss_is_the_masked_mean_of_cross_entropies)
{
    static const float mask[ROWS] = {1, 0.5f, 0, 2, 1, 1, 7, 0, 0.25f, 1, 3, 1};
    struct small s;

    small_open(&s, NULL, "");
    glm52_batch *batch = small_batch(&s, 2, pair);
    OK(glm52_batch_set(batch, "loss_mask", GLM52_DTYPE_F32, mask, ROWS));
    OK(glm52_model_forward(s.model, batch, "ce_rows logits loss"));
    const float *row = small_output(batch, "ce_rows").data, *logits = small_output(batch, "logits").data;
    const int32_t *label = small_output(batch, "labels").data, *token = small_output(batch, "tokens").data;
    for (int i = 0; i < ROWS; i++) {
        int last = i == 6 || i == 11;
        ck_assert_int_eq(label[i], last ? -100 : token[i + 1]);
        double expected = last ? 0 : cross_entropy(logits + (size_t)i * 37, label[i]);
        ck_assert_double_eq_tol((double)row[i], expected, 2e-5);
    }
    double loss;
    memcpy(&loss, small_output(batch, "loss").data, sizeof loss);
    double expected = mean_of_rows(batch);
    ck_assert_double_eq_tol(loss, expected, 1e-6);
    ck_assert_double_eq_tol(small_loss(&s, batch), expected, 1e-6);
    ck_assert_double_eq_tol(small_gradients(&s, &batch, 1), expected, 1e-6);
    glm52_batch_unref(&batch);
    small_close(&s);
}
END_TEST

/* Loss and gradients of two batches agree bit for bit, or within rounding. */
static void check_alike(struct small *s, glm52_batch *x, glm52_batch *y, double tolerance)
{
    double loss = small_gradients(s, &x, 1);
    struct snapshot one = small_snapshot(s, GRADIENTS);

    ck_assert(fabs(small_gradients(s, &y, 1) - loss) <= tolerance * loss);
    struct snapshot other = small_snapshot(s, GRADIENTS);
    if (tolerance > 0)
        check_close(s, &one, &other, tolerance);
    else
        check_same(s, &one, &other);
    snapshot_free(&one);
    snapshot_free(&other);
}

START_TEST(what_says_the_same_trains_the_same)
{
    struct small s;
    int64_t label[ROWS];
    uint8_t mask[ROWS];
    float scaled[ROWS];

    small_open(&s, NULL, "");
    glm52_batch *plain = small_batch(&s, 2, pair), *labelled = small_batch(&s, 2, pair),
                *masked = small_batch(&s, 2, pair);
    for (int i = 0; i < ROWS; i++) {
        label[i] = ((const int32_t *)small_output(plain, "labels").data)[i];
        scaled[i] = 8;
    }
    OK(glm52_batch_set(labelled, "labels", GLM52_DTYPE_I64, label, ROWS)); /* the default, given */
    check_alike(&s, plain, labelled, 0);
    OK(glm52_batch_set(labelled, "loss_mask", GLM52_DTYPE_F32, scaled, ROWS)); /* a mean does not see a factor */
    check_alike(&s, plain, labelled, 2e-5);

    for (int i = 0; i < ROWS; i++) mask[i] = i % 3 != 1, scaled[i] = 1;
    for (int i = 0; i < ROWS; i++) label[i] = mask[i] ? label[i] : -100;
    OK(glm52_batch_set(masked, "loss_mask", GLM52_DTYPE_U8, mask, ROWS)); /* mask 0 and label -100 */
    OK(glm52_batch_set(labelled, "loss_mask", GLM52_DTYPE_F32, scaled, ROWS));
    OK(glm52_batch_set(labelled, "labels", GLM52_DTYPE_I64, label, ROWS));
    check_alike(&s, masked, labelled, 0);
    glm52_batch_unref(&plain);
    glm52_batch_unref(&labelled);
    glm52_batch_unref(&masked);
    small_close(&s);
}
END_TEST

START_TEST(a_mask_weighs_rows)
{
    static const float both[ROWS] = {3, 3, 3, 3, 3, 3, 3, 1, 1, 1, 1, 1};
    struct small s;
    double loss[2];

    small_open(&s, NULL, "");
    glm52_batch *batch = small_batch(&s, 2, pair);
    for (int i = 0; i < 2; i++) {
        glm52_batch *one = small_batch(&s, 1, &pair[i]);
        loss[i] = small_loss(&s, one);
        glm52_batch_unref(&one);
    }
    OK(glm52_batch_set(batch, "loss_mask", GLM52_DTYPE_F32, both, ROWS));
    double expected = (3 * 6 * loss[0] + 4 * loss[1]) / (3 * 6 + 4); /* a document of n tokens has n - 1 labels */
    ck_assert_double_eq_tol(small_loss(&s, batch), expected, 1e-6);
    glm52_batch_unref(&batch);
    small_close(&s);
}
END_TEST

START_TEST(documents_of_one_token)
{
    static const int32_t label[] = {5, -100, 36};
    struct small s;

    small_open(&s, NULL, "");
    glm52_batch *ones = small_batch(&s, 3, (struct document[]){{1, 1}, {1, 2}, {1, 3}}), *lone = small_text(&s, 1, 1);
    REFUSED(glm52_step_run(s.step, &ones, 1), GLM52_E_INVALID); /* no label anywhere */
    ck_assert_ptr_nonnull(strstr(glm52_error_message(glm52_error_last()), "label"));
    OK(glm52_model_forward(s.model, ones, "logits"));
    OK(glm52_model_forward(s.model, lone, "logits"));
    ck_assert(!memcmp(small_output(ones, "logits").data, small_output(lone, "logits").data, 37 * sizeof(float)));

    OK(glm52_batch_set(ones, "labels", GLM52_DTYPE_I32, label, 3));
    OK(glm52_model_forward(s.model, ones, "ce_rows logits"));
    const float *row = small_output(ones, "ce_rows").data, *logits = small_output(ones, "logits").data;
    double expected = (cross_entropy(logits, 5) + cross_entropy(logits + (size_t)2 * 37, 36)) / 2;
    ck_assert(row[1] == 0);
    ck_assert_double_eq_tol(small_loss(&s, ones), expected, 1e-5);
    double before = small_train(&s, &ones, 1);
    ck_assert(small_loss(&s, ones) < before);
    glm52_batch_unref(&ones);
    glm52_batch_unref(&lone);
    small_close(&s);
}
END_TEST

static int ends_with(const char *text, const char *end)
{
    size_t length = strlen(text), tail = strlen(end);

    return length >= tail && !strcmp(text + length - tail, end);
}

/* Parameters that the loss cannot reach have no gradient and stay as they are; all others move. */
START_TEST(training_moves_what_it_should)
{
    struct small s;
    uint32_t count;
    int left = 0;

    small_open(&s, NULL, "model.num_nextn_predict_layers=1 optim.weight_decay=0");
    OK(glm52_model_parameter_count(s.model, &count, NULL));
    glm52_batch *batch = small_batch(&s, 2, (struct document[]){{40, 1}, {23, 2}});
    struct snapshot before = small_snapshot(&s, VALUES);
    for (int i = 0; i < 3; i++) small_train(&s, &batch, 1);
    struct snapshot after = small_snapshot(&s, VALUES);
    for (uint32_t i = 0; i < count; i++) {
        glm52_parameter_info p = {.struct_size = sizeof p};
        OK(glm52_model_parameter(s.model, i, &p));
        int mtp = !strncmp(p.name, "model.layers.4.", 15);
        int alone = mtp || strstr(p.name, ".indexer.") || ends_with(p.name, "e_score_correction_bias");
        size_t bytes = (before.offset[i + 1] - before.offset[i]) * sizeof(float);
        int moved = memcmp(before.at + before.offset[i], after.at + before.offset[i], bytes) != 0;
        ck_assert_msg(moved == !alone, "%s %s", p.name, moved ? "moved" : "stayed");
        ck_assert_str_eq(p.policy, alone ? "none" : "adamw");
        ck_assert((p.gradient.data == NULL) == alone);
        left += mtp;
    }
    ck_assert_int_gt(left, 20);
    snapshot_free(&before);
    snapshot_free(&after);
    glm52_batch_unref(&batch);
    small_close(&s);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("model");
    TCase *cases = tcase_create("labels");

    tcase_set_timeout(cases, 60);
    tcase_add_test(cases, the_loss_is_the_masked_mean_of_cross_entropies);
    tcase_add_test(cases, what_says_the_same_trains_the_same);
    tcase_add_test(cases, a_mask_weighs_rows);
    tcase_add_test(cases, documents_of_one_token);
    tcase_add_test(cases, training_moves_what_it_should);
    suite_add_tcase(suite, cases);
    return run_tap(suite);
}
