/* Lightning indexer: scores, and the selection that follows from them. */
#include <stdlib.h>

#include "case.h"

struct problem {
    struct indexer shape;
    struct array *q, *key, *weight, *start, *end;
};

/* Documents of the given lengths, ended by 0; causal within each. Every `empty`-th row sees nothing (0: none). */
static struct problem problem(glm52_dtype type, int32_t heads, int32_t width, int32_t k, const int *lengths, int empty)
{
    struct problem p = {.shape = {.heads = heads, .width = width, .k = k, .type = type}};
    int64_t t = 0;

    for (int d = 0; lengths[d]; d++)
        p.shape.rows += lengths[d];
    p.shape.keys = p.shape.rows;
    p.q = array_normal(type, p.shape.rows * heads * width, 1);
    p.key = array_normal(type, p.shape.keys * width, 1);
    p.weight = array_normal(GLM52_DTYPE_F32, p.shape.rows * heads, 1);
    p.start = array_zero(GLM52_DTYPE_I32, p.shape.rows);
    p.end = array_zero(GLM52_DTYPE_I32, p.shape.rows);
    for (int d = 0; lengths[d]; d++)
        for (int64_t first = t; t < first + lengths[d]; t++) {
            p.start->value[t] = (double)first;
            p.end->value[t] = (double)(empty && t % empty == empty - 1 ? first : t + 1);
            p.shape.pairs += p.end->value[t] - p.start->value[t];
        }
    array_push(p.start);
    array_push(p.end);
    return p;
}

static double *plain_scores(const struct problem *p)
{
    int64_t keys = p->shape.keys, heads = p->shape.heads, width = p->shape.width;
    double *scores = doubles(p->shape.rows * keys);

    for (int64_t t = 0; t < p->shape.rows; t++)
        for (int64_t u = 0; u < keys; u++) {
            double *score = &scores[t * keys + u];

            if (u < (int64_t)p->start->value[t] || u >= (int64_t)p->end->value[t]) {
                *score = -INFINITY;
                continue;
            }
            for (int64_t h = 0; h < heads; h++) {
                double dot = 0;

                for (int64_t c = 0; c < width; c++)
                    dot += p->q->value[(t * heads + h) * width + c] * p->key->value[u * width + c];
                *score += p->weight->value[t * heads + h] * (dot < 0 ? 0 : dot);
            }
        }
    return scores;
}

/* Fails unless the row is a right selection for scores known to within `slack`: ascending visible keys, as many as can
 * be, none left out that beats one taken by more than that. */
static void check_row(const struct problem *p, int64_t t, const double *score, const double *selected, double slack)
{
    int64_t start = (int64_t)p->start->value[t], end = (int64_t)p->end->value[t], n = 0, j = 0;
    int64_t want = end - start < p->shape.k ? end - start : p->shape.k;
    double lowest = INFINITY, best_left = -INFINITY;

    for (; n < p->shape.k && selected[n] >= 0; n++) {
        ck_assert_msg(selected[n] >= (double)start && selected[n] < (double)end, "row %d: key %g", (int)t, selected[n]);
        ck_assert_msg(n == 0 || selected[n] > selected[n - 1], "row %d is not ascending", (int)t);
        lowest = fmin(lowest, score[(int64_t)selected[n]]);
    }
    ck_assert_msg(n == want, "row %d has %d keys, not %d", (int)t, (int)n, (int)want);
    for (int64_t i = n; i < p->shape.k; i++)
        ck_assert_msg(selected[i] == -1, "row %d is not padded with -1", (int)t);
    for (int64_t u = start; u < end; u++)
        if (j < n && selected[j] == (double)u)
            j++;
        else
            best_left = fmax(best_left, score[u]);
    ck_assert_msg(best_left <= lowest + slack, "row %d leaves out %.9g but takes %.9g", (int)t, best_left, lowest);
}

/* What is selected is to the bit what the rule makes of index_scores. */
static void check_rule(const struct problem *p, struct array *selected, const struct array *scores)
{
    struct array *again = array_output(GLM52_DTYPE_I32, p->shape.rows * p->shape.k);
    struct array *length = array_output(GLM52_DTYPE_I32, p->shape.rows);

    ops->select_topk(device, p->shape.rows, p->shape.keys, p->shape.k, scores->at, p->start->at, p->end->at, again->at,
                     length->at);
    array_fetch(again);
    check_exact(selected, again->value);
}

static void check(const struct problem *p)
{
    struct array *selected = array_output(GLM52_DTYPE_I32, p->shape.rows * p->shape.k);
    struct array *scores = array_output(GLM52_DTYPE_F32, p->shape.rows * p->shape.keys);
    double *want = plain_scores(p), largest = 0;
    double limit = tolerance(GLM52_DTYPE_F32, p->shape.width + p->shape.heads);

    for (int64_t i = 0; i < p->shape.rows * p->shape.keys; i++)
        largest = isfinite(want[i]) ? fmax(largest, fabs(want[i])) : largest;
    for (int threads = 1; threads <= 3; threads++) {
        device_threads(threads);
        ops->index_select(device, &p->shape, p->q->at, p->key->at, p->weight->at, p->start->at, p->end->at,
                          selected->at, array_workspace(ops->index_select_bytes(device, &p->shape))->at);
        check_same(selected);
        ops->index_scores(device, &p->shape, p->q->at, p->key->at, p->weight->at, p->start->at, p->end->at, scores->at);
        check_same(scores);
    }
    check_close(scores, want, limit);
    check_rule(p, selected, scores);
    for (int64_t t = 0; t < p->shape.rows; t++)
        check_row(p, t, want + t * p->shape.keys, selected->value + t * p->shape.k, 2 * limit * largest);
}

CASE(index_select, "several documents, rows that see nothing, odd dimensions")
{
    struct problem p = problem(GLM52_DTYPE_F32, 3, 13, 7, (const int[]){1, 31, 2, 71, 5, 0}, 11);

    check(&p);
}

CASE(index_select, "bf16, more heads than a block, width of a few vectors")
{
    struct problem p = problem(GLM52_DTYPE_BF16, 6, 24, 5, (const int[]){53, 17, 0}, 0);

    check(&p);
}

CASE(index_select, "one document longer than every tile")
{
    struct problem p = problem(GLM52_DTYPE_F32, 8, 16, 33, (const int[]){1201, 0}, 0);

    check(&p);
}

CASE(index_select, "32 bf16 heads of 128: documents that end within tiles, rows that see nothing")
{
    struct problem p = problem(GLM52_DTYPE_BF16, 32, 128, 23, (const int[]){1, 31, 150, 2, 71, 5, 0}, 11);

    check(&p);
}

CASE(index_select, "32 bf16 heads of 128: one document longer than every tile")
{
    struct problem p = problem(GLM52_DTYPE_BF16, 32, 128, 65, (const int[]){407, 0}, 0);

    check(&p);
}

CASE(index_select, "k larger than the keys selects all of them")
{
    struct problem p = problem(GLM52_DTYPE_F32, 5, 11, 97, (const int[]){19, 7, 0}, 6);
    struct problem bf16 = problem(GLM52_DTYPE_BF16, 32, 128, 97, (const int[]){19, 7, 0}, 6);

    check(&p);
    check(&bf16);
}

CASE(index_select, "no rows")
{
    struct problem p = problem(GLM52_DTYPE_F32, 5, 11, 3, (const int[]){0}, 0);
    struct problem bf16 = problem(GLM52_DTYPE_BF16, 32, 128, 3, (const int[]){0}, 0);

    check(&p);
    check(&bf16);
}

/* Fills an array with whole numbers of magnitude up to `most`. */
static void draw_whole(struct array *a, int64_t most)
{
    for (int64_t i = 0; i < a->count; i++)
        a->value[i] = (double)draw_between(-most, most);
    array_push(a);
}

/* For scores that are exact in fp32: the best k of each row one after the other, by plain search. */
static void check_ties(const struct problem *p)
{
    struct array *selected = array_output(GLM52_DTYPE_I32, p->shape.rows * p->shape.k);
    double *scores = plain_scores(p), *want = doubles(p->shape.rows * p->shape.k), *taken = doubles(p->shape.keys);

    for (int64_t t = 0; t < p->shape.rows; t++) {
        int64_t start = (int64_t)p->start->value[t], end = (int64_t)p->end->value[t];
        int32_t n = 0;

        for (int64_t u = start; u < end; u++)
            taken[u] = 0;
        for (int32_t j = 0; j < p->shape.k && j < end - start; j++) {
            int64_t best = -1;

            for (int64_t u = start; u < end; u++)
                if (taken[u] == 0 && (best < 0 || scores[t * p->shape.keys + u] > scores[t * p->shape.keys + best]))
                    best = u;
            taken[best] = 1;
        }
        for (int64_t u = start; u < end; u++)
            if (taken[u] != 0)
                want[t * p->shape.k + n++] = (double)u;
        for (; n < p->shape.k; n++)
            want[t * p->shape.k + n] = -1;
    }
    ops->index_select(device, &p->shape, p->q->at, p->key->at, p->weight->at, p->start->at, p->end->at, selected->at,
                      array_workspace(ops->index_select_bytes(device, &p->shape))->at);
    check_exact(selected, want);
}

/* Scores that are exact in fp32 tie exactly: the lower key wins. relu makes many of them 0. */
CASE(index_select, "exact ties go to the lower key")
{
    struct problem p = problem(GLM52_DTYPE_F32, 3, 5, 6, (const int[]){67, 0}, 0);
    struct problem bf16 = problem(GLM52_DTYPE_BF16, 32, 128, 37, (const int[]){70, 233, 0}, 0);

    for (int most = 2; most >= 0; most--) { /* 0: all scores are equal */
        draw_whole(p.q, 1);
        draw_whole(p.key, 1);
        draw_whole(p.weight, most);
        check_ties(&p);
        draw_whole(bf16.q, 1);
        draw_whole(bf16.key, 1);
        draw_whole(bf16.weight, most);
        for (int64_t i = 0; i < bf16.weight->count; i++) /* few heads, so that scores meet */
            bf16.weight->value[i] *= i % 32 == 5;
        array_push(bf16.weight);
        check_ties(&bf16);
    }
}

static void check_nan(struct problem p)
{
    int32_t k = p.shape.k;
    struct array *selected = array_output(GLM52_DTYPE_I32, p.shape.rows * k);

    for (int64_t u = 0; u < 40; u += 3)
        p.key->value[u * p.shape.width + 5] = NAN;
    array_push(p.key);
    ops->index_select(device, &p.shape, p.q->at, p.key->at, p.weight->at, p.start->at, p.end->at, selected->at,
                      array_workspace(ops->index_select_bytes(device, &p.shape))->at);
    array_fetch(selected);
    for (int64_t t = 20; t < 50; t++) /* these rows see at least 6 others */
        for (int64_t j = 0; j < k; j++) {
            int64_t u = (int64_t)selected->value[t * k + j];

            ck_assert_msg(u >= 0 && (u >= 40 || u % 3), "row %d selects key %d", (int)t, (int)u);
        }
}

CASE(index_select, "keys whose score is NaN are not selected")
{
    check_nan(problem(GLM52_DTYPE_F32, 4, 8, 6, (const int[]){50, 0}, 0));
    check_nan(problem(GLM52_DTYPE_BF16, 32, 128, 6, (const int[]){50, 0}, 0));
}

static void bench(glm52_dtype type, int32_t heads, int32_t width, int32_t k, int rows)
{
    struct problem p = problem(type, heads, width, k, (const int[]){rows, 0}, 0);
    struct array *selected = array_output(GLM52_DTYPE_I32, p.shape.rows * k);
    struct array *workspace = array_workspace(ops->index_select_bytes(device, &p.shape));

    BENCH_LOOP
        ops->index_select(device, &p.shape, p.q->at, p.key->at, p.weight->at, p.start->at, p.end->at, selected->at,
                          workspace->at);
    bench_rate(2 * p.shape.pairs * heads * width, 0);
}

BENCH(index_select, "256 of 4096 causal, 8 heads of 64")
{
    bench(GLM52_DTYPE_F32, 8, 64, 256, 4096);
}

BENCH(index_select, "256 of 4096 causal, 8 heads of 64, bf16")
{
    bench(GLM52_DTYPE_BF16, 8, 64, 256, 4096);
}

BENCH(index_select, "64 of 2048 causal, 4 heads of 32")
{
    bench(GLM52_DTYPE_F32, 4, 32, 64, 2048);
}

BENCH(index_select, "2048 of 8192 causal, 32 heads of 128, bf16")
{
    bench(GLM52_DTYPE_BF16, 32, 128, 2048, 8192);
}

/* As many rows as keys, causal, at the sizes of GLM-5.2. */
static void bench_full(int64_t rows)
{
    struct indexer i = {.rows = rows, .keys = rows, .heads = 32, .width = 128, .k = 2048, .type = GLM52_DTYPE_BF16,
                        .pairs = (double)rows * (double)(rows + 1) / 2};
    struct array *q = array_random(i.type, rows * 32 * 128), *key = array_random(i.type, rows * 128);
    struct array *weight = array_random(GLM52_DTYPE_F32, rows * 32), *start = array_zero(GLM52_DTYPE_I32, rows);
    struct array *end = array_zero(GLM52_DTYPE_I32, rows), *selected = array_output(GLM52_DTYPE_I32, rows * i.k);
    struct array *workspace = array_workspace(ops->index_select_bytes(device, &i));

    for (int64_t t = 0; t < rows; t++) end->value[t] = (double)(t + 1);
    array_push(end);
    BENCH_LOOP
        ops->index_select(device, &i, q->at, key->at, weight->at, start->at, end->at, selected->at, workspace->at);
    bench_counted();
}

BENCH_FULL(index_select, "8192 causal, 2048 each, 32 x 128", "")
{
    bench_full(8192);
}
