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
    array_fetch(selected);
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

CASE(index_select, "k larger than the keys selects all of them")
{
    struct problem p = problem(GLM52_DTYPE_F32, 5, 11, 97, (const int[]){19, 7, 0}, 6);

    check(&p);
}

CASE(index_select, "no rows")
{
    struct problem p = problem(GLM52_DTYPE_F32, 5, 11, 3, (const int[]){0}, 0);

    check(&p);
}

/* Scores that are exact in fp32 tie exactly: the lower key wins. relu makes most of them 0. */
CASE(index_select, "exact ties go to the lower key")
{
    struct problem p = problem(GLM52_DTYPE_F32, 3, 5, 6, (const int[]){67, 0}, 0);
    struct array *selected = array_output(GLM52_DTYPE_I32, p.shape.rows * p.shape.k);
    double *scores, *want = doubles(p.shape.rows * p.shape.k);

    for (int64_t i = 0; i < p.q->count; i++)
        p.q->value[i] = (double)draw_between(-1, 1);
    for (int64_t i = 0; i < p.key->count; i++)
        p.key->value[i] = (double)draw_between(-1, 1);
    for (int64_t i = 0; i < p.weight->count; i++)
        p.weight->value[i] = (double)draw_between(-2, 2);
    array_push(p.q);
    array_push(p.key);
    array_push(p.weight);
    scores = plain_scores(&p);
    for (int64_t t = 0; t < p.shape.rows; t++) {
        char taken[67] = {0};
        int32_t n = 0;

        for (int32_t j = 0; j < p.shape.k && j <= t; j++) {
            int64_t best = -1;

            for (int64_t u = 0; u <= t; u++)
                if (!taken[u] && (best < 0 || scores[t * p.shape.keys + u] > scores[t * p.shape.keys + best]))
                    best = u;
            taken[best] = 1;
        }
        for (int64_t u = 0; u < 67; u++)
            if (taken[u])
                want[t * p.shape.k + n++] = (double)u;
        for (; n < p.shape.k; n++)
            want[t * p.shape.k + n] = -1;
    }
    ops->index_select(device, &p.shape, p.q->at, p.key->at, p.weight->at, p.start->at, p.end->at, selected->at,
                      array_workspace(ops->index_select_bytes(device, &p.shape))->at);
    check_exact(selected, want);
}

CASE(index_select, "keys whose score is NaN are not selected")
{
    struct problem p = problem(GLM52_DTYPE_F32, 4, 8, 6, (const int[]){50, 0}, 0);
    struct array *selected = array_output(GLM52_DTYPE_I32, p.shape.rows * p.shape.k);

    for (int64_t u = 0; u < 40; u += 3)
        p.key->value[u * 8 + 5] = NAN;
    array_push(p.key);
    ops->index_select(device, &p.shape, p.q->at, p.key->at, p.weight->at, p.start->at, p.end->at, selected->at,
                      array_workspace(ops->index_select_bytes(device, &p.shape))->at);
    array_fetch(selected);
    for (int64_t t = 20; t < 50; t++) /* these rows see at least 6 others */
        for (int64_t j = 0; j < 6; j++) {
            int64_t u = (int64_t)selected->value[t * 6 + j];

            ck_assert_msg(u >= 0 && (u >= 40 || u % 3), "row %d selects key %d", (int)t, (int)u);
        }
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
