/* What must not change when the same documents are trained on in another arrangement: loss and every gradient. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "small/small.h"
#include "unit/tap.h"

static const struct document a = {7, 1}, b = {1, 2}, c = {23, 3};

/* Rounding: fp32 sums over at most a hundred rows in another order. */
static const double rounding = 2e-5;

START_TEST(a_pack_equals_its_documents_as_microbatches)
{
    struct small s;

    small_open(&s, NULL, "train.microbatches=3");
    glm52_batch *whole = small_batch(&s, 3, (struct document[]){a, b, c});
    glm52_batch *parts[] = {small_batch(&s, 1, &a), small_batch(&s, 1, &b), small_batch(&s, 1, &c)};
    double loss = small_gradients(&s, &whole, 1);
    struct snapshot one = small_snapshot(&s, GRADIENTS);
    ck_assert_double_eq_tol(small_gradients(&s, parts, 3), loss, 1e-6 * loss);
    struct snapshot three = small_snapshot(&s, GRADIENTS);
    check_close(&s, &one, &three, rounding);
    snapshot_free(&one);
    snapshot_free(&three);
    for (int i = 0; i < 3; i++) glm52_batch_unref(&parts[i]);
    glm52_batch_unref(&whole);
    small_close(&s);
}
END_TEST

START_TEST(the_order_of_documents_in_a_pack_does_not_matter)
{
    struct small s;

    small_open(&s, NULL, "");
    glm52_batch *abc = small_batch(&s, 3, (struct document[]){a, b, c});
    glm52_batch *cab = small_batch(&s, 3, (struct document[]){c, a, b});
    double loss = small_gradients(&s, &abc, 1);
    struct snapshot one = small_snapshot(&s, GRADIENTS);
    ck_assert_double_eq_tol(small_gradients(&s, &cab, 1), loss, 1e-6 * loss);
    struct snapshot other = small_snapshot(&s, GRADIENTS);
    check_close(&s, &one, &other, rounding);
    snapshot_free(&one);
    snapshot_free(&other);
    glm52_batch_unref(&abc);
    glm52_batch_unref(&cab);
    small_close(&s);
}
END_TEST

/* Trains on packs of several lengths; the losses' sum and the final values tell any difference. */
static double train(struct small *s, int length, int updates)
{
    double sum = 0;

    for (int i = 0; i < updates; i++) {
        struct document d[] = {{length - 9 * i, 10u + (unsigned)i}, {3 + i, 20}, {1, 30}, {length / 3, 40}};
        glm52_batch *batch = small_batch(s, 4, d);
        sum += small_train(s, &batch, 1);
        glm52_batch_unref(&batch);
    }
    return sum;
}

START_TEST(recomputing_changes_no_bit)
{
    static const char *const how[] = {"train.microbatch_tokens=128 train.recompute=light",
                                      "train.microbatch_tokens=128 train.recompute=layers"};
    struct small kept, replayed;

    small_open(&kept, NULL, "train.microbatch_tokens=128");
    small_open(&replayed, NULL, how[_i]);
    ck_assert(train(&kept, 60, 3) == train(&replayed, 60, 3));
    struct snapshot gradients[] = {small_snapshot(&kept, GRADIENTS), small_snapshot(&replayed, GRADIENTS)};
    struct snapshot values[] = {small_snapshot(&kept, VALUES), small_snapshot(&replayed, VALUES)};
    check_same(&kept, &gradients[0], &gradients[1]);
    check_same(&kept, &values[0], &values[1]);
    for (int i = 0; i < 2; i++) snapshot_free(&gradients[i]), snapshot_free(&values[i]);
    small_close(&kept);
    small_close(&replayed);
}
END_TEST

START_TEST(threads_change_no_bit)
{
    static const char large[] = "train.microbatch_tokens=512 model.hidden_size=72 model.intermediate_size=136 "
                                "model.moe_intermediate_size=40 model.index_topk=33";
    struct snapshot first = {0};
    double loss = 0;

    for (int threads = 1; threads <= 3; threads++) {
        struct small s;
        small_threads(&s, threads, large);
        double sum = train(&s, 300, 3);
        struct snapshot values = small_snapshot(&s, VALUES);
        if (threads == 1) {
            loss = sum;
            first = values;
        } else {
            ck_assert(sum == loss);
            check_same(&s, &first, &values);
            snapshot_free(&values);
        }
        small_close(&s);
    }
    snapshot_free(&first);
}
END_TEST

START_TEST(memory_left_by_a_longer_pack_does_not_matter)
{
    struct small s;

    small_open(&s, NULL, "");
    glm52_batch *small = small_batch(&s, 2, (struct document[]){a, b}), *large = small_text(&s, 64, 9);
    double loss = small_gradients(&s, &small, 1);
    struct snapshot before = small_snapshot(&s, GRADIENTS);
    small_gradients(&s, &large, 1);
    ck_assert(small_gradients(&s, &small, 1) == loss);
    struct snapshot after = small_snapshot(&s, GRADIENTS);
    check_same(&s, &before, &after);
    snapshot_free(&before);
    snapshot_free(&after);
    glm52_batch_unref(&small);
    glm52_batch_unref(&large);
    small_close(&s);
}
END_TEST

/* Rows of an output of two batches: integers alike, floats within rounding, since the rows that are multiplied together
 * with others change the order of sums, but not by more. */
static void check_rows(glm52_batch *x, glm52_batch *y, const char *name, int64_t from, int64_t rows)
{
    glm52_view one = small_output(x, name), other = small_output(y, name);
    int64_t columns = one.dimensions < 2 ? 1 : one.shape[1], first = from * columns, end = (from + rows) * columns;
    double most = 0;

    for (int64_t i = first; i < end && one.dtype == GLM52_DTYPE_I32; i++)
        ck_assert_int_eq(((int32_t *)one.data)[i], ((int32_t *)other.data)[i]);
    if (one.dtype == GLM52_DTYPE_I32) return;
    for (int64_t i = first; i < end; i++) most = fmax(most, fabs((double)((float *)one.data)[i]));
    for (int64_t i = first; i < end; i++)
        ck_assert_msg(fabs((double)((float *)one.data)[i] - (double)((float *)other.data)[i]) <= 2e-5 * most,
                      "%s, row %lld: %g and %g", name, (long long)(i / columns), (double)((float *)one.data)[i],
                      (double)((float *)other.data)[i]);
}

static int differs(glm52_batch *x, glm52_batch *y, const char *name, int64_t row)
{
    glm52_view one = small_output(x, name), other = small_output(y, name);
    int64_t columns = one.shape[1];
    double most = 0;

    for (int64_t i = row * columns; i < (row + 1) * columns; i++)
        most = fmax(most, fabs((double)((float *)one.data)[i] - (double)((float *)other.data)[i]));
    return most > 1e-3;
}

static void forward(struct small *s, glm52_batch *batch)
{
    OK(glm52_model_forward(s->model, batch, "*"));
}

START_TEST(documents_do_not_see_each_other)
{
    struct small s;

    small_open(&s, NULL, "");
    glm52_batch *one = small_batch(&s, 3, (struct document[]){a, c, {9, 5}});
    glm52_batch *other = small_batch(&s, 3, (struct document[]){a, {23, 77}, {9, 5}});
    forward(&s, one);
    forward(&s, other);
    for (int i = 0; i < 2; i++) {
        int64_t from = i ? 30 : 0, rows = i ? 9 : 7;
        check_rows(one, other, "ce_rows", from, rows);
        check_rows(one, other, "final_hidden", from, rows);
        check_rows(one, other, "topk.0", from, rows);
        check_rows(one, other, "topk.3", from, rows);
        check_rows(one, other, "router_w.2", from, rows);
        check_rows(one, other, "logits", from, rows);
    }
    ck_assert(differs(one, other, "logits", 8));
    glm52_batch_unref(&one);
    glm52_batch_unref(&other);
    small_close(&s);
}
END_TEST

/* Not even what is not a number crosses over. */
START_TEST(a_broken_document_breaks_itself_alone)
{
    struct small s;
    float *row = NULL;

    small_open(&s, NULL, "model.vocab_size=40");
    row = (float *)small_parameter(&s, "model.embed_tokens.weight").value.data + (size_t)38 * 20;
    glm52_batch *one = small_batch(&s, 3, (struct document[]){a, c, {9, 5}}),
                *other = small_batch(&s, 3, (struct document[]){a, c, {9, 5}});
    int32_t tokens[39];
    memcpy(tokens, small_output(one, "tokens").data, sizeof tokens);
    static const int32_t cu[] = {0, 7, 30, 39};
    tokens[7] = 38;
    OK(glm52_batch_set(other, "tokens", GLM52_DTYPE_I32, tokens, 39));
    OK(glm52_batch_set(other, "cu_seqlens", GLM52_DTYPE_I32, cu, 4));
    row[0] = NAN;
    forward(&s, one);
    forward(&s, other);
    check_rows(one, other, "logits", 0, 7);
    check_rows(one, other, "logits", 30, 9);
    check_rows(one, other, "topk.3", 30, 9);
    ck_assert(isnan(((float *)small_output(other, "logits").data)[7 * 40]));
    glm52_batch_unref(&one);
    glm52_batch_unref(&other);
    small_close(&s);
}
END_TEST

START_TEST(the_gradient_of_one_document_ignores_another)
{
    struct small s;
    float mask[39] = {0};

    for (int i = 0; i < 7; i++) mask[i] = 1;
    small_open(&s, NULL, "");
    glm52_batch *one = small_batch(&s, 3, (struct document[]){a, c, {9, 5}});
    glm52_batch *other = small_batch(&s, 3, (struct document[]){a, {23, 77}, {9, 6}}), *alone = small_batch(&s, 1, &a);
    OK(glm52_batch_set(one, "loss_mask", GLM52_DTYPE_F32, mask, 39));
    OK(glm52_batch_set(other, "loss_mask", GLM52_DTYPE_F32, mask, 39));
    double loss = small_gradients(&s, &alone, 1);
    struct snapshot expected = small_snapshot(&s, GRADIENTS);
    glm52_batch *masked[] = {one, other};
    for (int i = 0; i < 2; i++) {
        ck_assert_double_eq_tol(small_gradients(&s, &masked[i], 1), loss, 1e-6 * loss);
        struct snapshot found = small_snapshot(&s, GRADIENTS);
        check_close(&s, &expected, &found, rounding);
        snapshot_free(&found);
        glm52_batch_unref(&masked[i]);
    }
    glm52_batch_unref(&alone);
    snapshot_free(&expected);
    small_close(&s);
}
END_TEST

START_TEST(a_token_changes_nothing_before_it)
{
    enum { LENGTH = 31, AT = 17 };
    int32_t tokens[LENGTH];
    struct small s;

    small_open(&s, NULL, "");
    glm52_batch *one = small_text(&s, LENGTH, 4), *other = small_text(&s, LENGTH, 4);
    memcpy(tokens, small_output(one, "tokens").data, sizeof tokens);
    tokens[AT] = (tokens[AT] + 1) % 37;
    OK(glm52_batch_set(other, "tokens", GLM52_DTYPE_I32, tokens, LENGTH));
    forward(&s, one);
    forward(&s, other);
    check_rows(one, other, "logits", 0, AT);
    check_rows(one, other, "hidden.3", 0, AT);
    check_rows(one, other, "topk.3", 0, AT);
    ck_assert(differs(one, other, "final_hidden", AT));
    ck_assert(differs(one, other, "final_hidden", LENGTH - 1));
    glm52_batch_unref(&one);
    glm52_batch_unref(&other);
    small_close(&s);
}
END_TEST

/* Values of the parameter, which live in host memory on the cpu. */
static float *values_of(struct small *s, const char *name)
{
    return small_parameter(s, name).value.data;
}

static void swap_floats(float *x, float *y, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        float keep = x[i];
        x[i] = y[i];
        y[i] = keep;
    }
}

START_TEST(the_order_of_experts_and_heads_does_not_matter)
{
    static const char *const parts[] = {"gate", "up", "down"};
    enum { HIDDEN = 20, WIDTH = 12, QK = 10, Q_RANK = 14, KV_RANK = 10, UP = 13, V = 7, HEADS = 3 };
    struct small s;
    char x[96], y[96];

    small_open(&s, NULL, "");
    glm52_batch *batch = small_batch(&s, 2, (struct document[]){a, c});
    float *bias = values_of(&s, "model.layers.2.mlp.gate.e_score_correction_bias");
    for (int i = 0; i < 5; i++) bias[i] = 0.01f * (float)(i * i);
    double loss = small_loss(&s, batch);

    for (int i = 0; i < 3; i++) {
        snprintf(x, sizeof x, "model.layers.2.mlp.experts.1.%s_proj.weight", parts[i]);
        snprintf(y, sizeof y, "model.layers.2.mlp.experts.4.%s_proj.weight", parts[i]);
        swap_floats(values_of(&s, x), values_of(&s, y), HIDDEN * WIDTH);
    }
    ck_assert(fabs(small_loss(&s, batch) - loss) > 1e-4); /* they are not alike */
    float *router = values_of(&s, "model.layers.2.mlp.gate.weight");
    swap_floats(router + HIDDEN, router + (size_t)4 * HIDDEN, HIDDEN);
    swap_floats(bias + 1, bias + 4, 1);
    ck_assert_double_eq_tol(small_loss(&s, batch), loss, 1e-6 * loss);

    float *q = values_of(&s, "model.layers.1.self_attn.q_b_proj.weight");
    float *kv = values_of(&s, "model.layers.1.self_attn.kv_b_proj.weight");
    float *o = values_of(&s, "model.layers.1.self_attn.o_proj.weight");
    swap_floats(q, q + (size_t)2 * QK * Q_RANK, QK * Q_RANK);
    swap_floats(kv, kv + (size_t)2 * UP * KV_RANK, UP * KV_RANK);
    ck_assert(fabs(small_loss(&s, batch) - loss) > 1e-4);
    for (int i = 0; i < HIDDEN; i++) swap_floats(o + i * HEADS * V, o + i * HEADS * V + 2 * V, V);
    ck_assert_double_eq_tol(small_loss(&s, batch), loss, 1e-6 * loss);
    glm52_batch_unref(&batch);
    small_close(&s);
}
END_TEST

/* The MTP layer follows the four others. */
static int is_of_trunk(const char *name)
{
    return strncmp(name, "model.layers.4.", 15) != 0;
}

START_TEST(detached_mtp_heads_leave_the_trunk_alone)
{
    struct small s, mtp;
    uint32_t parameters;
    int compared = 0;

    small_open(&s, NULL, "model.num_nextn_predict_layers=1");
    small_open(&mtp, NULL, "model.num_nextn_predict_layers=1 mtp.depths=2 mtp.detach_heads=true");
    glm52_batch *batch = small_batch(&s, 2, (struct document[]){a, c});
    glm52_batch *same = small_batch(&mtp, 2, (struct document[]){a, c});
    double loss = small_gradients(&s, &batch, 1);
    ck_assert_double_gt(small_gradients(&mtp, &same, 1), loss);
    OK(glm52_model_parameter_count(s.model, &parameters, NULL));
    for (uint32_t i = 0; i < parameters; i++) {
        glm52_parameter_info p = {.struct_size = sizeof p};
        OK(glm52_model_parameter(s.model, i, &p));
        if (!p.gradient.data || !is_of_trunk(p.name)) continue;
        ck_assert_msg(!memcmp(p.gradient.data, small_parameter(&mtp, p.name).gradient.data, p.gradient.bytes), "%s",
                      p.name);
        compared++;
    }
    ck_assert_int_gt(compared, 20);
    glm52_batch_unref(&batch);
    glm52_batch_unref(&same);
    small_close(&s);
    small_close(&mtp);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("model");
    TCase *cases = tcase_create("metamorphic");

    tcase_set_timeout(cases, 60);
    tcase_add_test(cases, a_pack_equals_its_documents_as_microbatches);
    tcase_add_test(cases, the_order_of_documents_in_a_pack_does_not_matter);
    tcase_add_loop_test(cases, recomputing_changes_no_bit, 0, 2);
    tcase_add_test(cases, threads_change_no_bit);
    tcase_add_test(cases, memory_left_by_a_longer_pack_does_not_matter);
    tcase_add_test(cases, documents_do_not_see_each_other);
    tcase_add_test(cases, a_broken_document_breaks_itself_alone);
    tcase_add_test(cases, the_gradient_of_one_document_ignores_another);
    tcase_add_test(cases, a_token_changes_nothing_before_it);
    tcase_add_test(cases, the_order_of_experts_and_heads_does_not_matter);
    tcase_add_test(cases, detached_mtp_heads_leave_the_trunk_alone);
    suite_add_tcase(suite, cases);
    return run_tap(suite);
}
