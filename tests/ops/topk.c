/* The selection rule alone. */
#include <stdlib.h>

#include "case.h"

static const double *sorted_scores;

static int by_score_then_key(const void *a, const void *b)
{
    double x = sorted_scores[*(const int32_t *)a], y = sorted_scores[*(const int32_t *)b];

    return x != y ? (x < y) - (x > y) : *(const int32_t *)a - *(const int32_t *)b;
}

static int by_key(const void *a, const void *b)
{
    return *(const int32_t *)a - *(const int32_t *)b;
}

/* Sorts the eligible keys of one row and takes the first k; returns how many. */
static int32_t plain_topk(const double *scores, int32_t start, int32_t end, int32_t k, double *selected)
{
    int32_t *key = malloc(((size_t)(end - start) + 1) * sizeof *key), n = 0;

    for (int32_t u = start; u < end; u++)
        if (!isnan(scores[u]) && scores[u] != -INFINITY)
            key[n++] = u;
    sorted_scores = scores;
    qsort(key, (size_t)n, sizeof *key, by_score_then_key);
    n = n < k ? n : k;
    qsort(key, (size_t)n, sizeof *key, by_key);
    for (int32_t j = 0; j < k; j++)
        selected[j] = j < n ? key[j] : -1;
    free(key);
    return n;
}

struct problem {
    int64_t rows, keys;
    int32_t k;
    struct array *scores, *start, *end;
};

/* Row t sees some window; every fifth row sees nothing, every seventh one key. */
static struct problem problem(int64_t rows, int64_t keys, int32_t k, double (*score)(void))
{
    struct problem p = {rows, keys, k, array_zero(GLM52_DTYPE_F32, rows * keys), array_zero(GLM52_DTYPE_I32, rows),
                        array_zero(GLM52_DTYPE_I32, rows)};

    for (int64_t i = 0; i < rows * keys; i++)
        p.scores->value[i] = score();
    for (int64_t t = 0; t < rows; t++) {
        int64_t start = draw_below(keys / 3 + 1);

        p.start->value[t] = (double)start;
        p.end->value[t] = (double)(t % 5 == 4 ? start : t % 7 == 6 ? start + 1 : draw_between(start, keys));
    }
    if (rows > 1) {
        p.start->value[1] = 0;
        p.end->value[1] = (double)keys;
    }
    array_push(p.scores);
    array_push(p.start);
    array_push(p.end);
    return p;
}

static void check(const struct problem *p)
{
    struct array *selected = array_output(GLM52_DTYPE_I32, p->rows * p->k);
    struct array *length = array_output(GLM52_DTYPE_I32, p->rows);
    double *want = doubles(p->rows * p->k), *want_length = doubles(p->rows);

    for (int64_t t = 0; t < p->rows; t++)
        want_length[t] = plain_topk(p->scores->value + t * p->keys, (int32_t)p->start->value[t],
                                    (int32_t)p->end->value[t], p->k, want + t * p->k);
    for (int threads = 1; threads <= 3; threads++) {
        device_threads(threads);
        ops->select_topk(device, p->rows, p->keys, p->k, p->scores->at, p->start->at, p->end->at, selected->at,
                         length->at);
        check_exact(selected, want);
        check_exact(length, want_length);
        array_poison(selected);
        array_poison(length);
    }
}

CASE(select_topk, "windows, empty rows, one key, k between 1 and more than the keys")
{
    const int32_t k[] = {1, 5, 16, 17, 40};

    for (int i = 0; i < 5; i++) {
        struct problem p = problem(41, 17, k[i], draw_normal);

        check(&p);
    }
}

CASE(select_topk, "rows long enough for every stage of the search")
{
    const int32_t k[] = {3, 256, 2048};

    for (int i = 0; i < 3; i++) {
        struct problem p = problem(7, 5003, k[i], draw_normal);

        check(&p);
    }
}

/* Few distinct values, zeros of both signs among them. */
static double tied(void)
{
    const double value[] = {0.0, -0.0, 1.5, -1.5, 0.0, 3.0};

    return value[draw_below(6)];
}

/* Nearly all the same in their leading bits, so that the search goes to the last one. */
static double close_together(void)
{
    return 1.0 + ldexp((double)draw_below(3000), -23);
}

static double all_equal(void)
{
    return -0.25;
}

static double not_finite(void)
{
    const double value[] = {NAN, -NAN, -INFINITY, INFINITY, 3.4028234e38, -3.4028234e38, 1e-45, -1e-45, 0, 1};

    return value[draw_below(10)];
}

CASE(select_topk, "exact ties, zeros of both signs, scores that differ in the last bit")
{
    double (*const score[])(void) = {tied, close_together, all_equal};

    for (int i = 0; i < 3; i++)
        for (int32_t k = 2; k < 1000; k *= 7) {
            struct problem small = problem(29, 23, k, score[i]), large = problem(5, 2999, k, score[i]);

            check(&small);
            check(&large);
        }
}

/* More elements alike than a search could list. */
CASE(select_topk, "long rows of exact ties; many rows of them")
{
    double (*const score[])(void) = {tied, close_together, all_equal};

    for (int i = 0; i < 3; i++) {
        struct problem few = problem(3, 20011, 2048, score[i]), many = problem(301, 1501, 97, score[i]);

        check(&few);
        check(&many);
    }
}

CASE(select_topk, "a row of more than a million")
{
    struct problem p = problem(2, 1053007, 2048, draw_normal);

    check(&p);
}

CASE(select_topk, "NaN of both signs and minus infinity are never selected")
{
    for (int32_t k = 1; k < 700; k *= 5) {
        struct problem small = problem(31, 19, k, not_finite), large = problem(5, 1999, k, not_finite);

        check(&small);
        check(&large);
    }
}

CASE(select_topk, "no rows")
{
    struct problem p = problem(0, 17, 5, draw_normal);

    check(&p);
}

static void bench(int64_t rows, int64_t keys, int32_t k)
{
    struct problem p = problem(rows, keys, k, draw_normal);
    struct array *selected = array_output(GLM52_DTYPE_I32, rows * k), *length = array_output(GLM52_DTYPE_I32, rows);

    for (int64_t t = 0; t < rows; t++) {
        p.start->value[t] = 0;
        p.end->value[t] = (double)keys;
    }
    array_push(p.start);
    array_push(p.end);
    BENCH_LOOP
        ops->select_topk(device, rows, keys, k, p.scores->at, p.start->at, p.end->at, selected->at, length->at);
    bench_rate(0, 4 * (double)(rows * keys));
}

BENCH(select_topk, "256 of 4096")
{
    bench(512, 4096, 256);
}

BENCH(select_topk, "2048 of 65536")
{
    bench(64, 65536, 2048);
}

BENCH_FULL(select_topk, "2048 of 32768, 4096 rows", "torch.topk 0.35 TB/s")
{
    enum { ROWS = 4096, KEYS = 32768, K = 2048 };
    struct array *scores = array_random(GLM52_DTYPE_F32, (int64_t)ROWS * KEYS),
                 *start = array_zero(GLM52_DTYPE_I32, ROWS);
    struct array *end = array_zero(GLM52_DTYPE_I32, ROWS), *length = array_output(GLM52_DTYPE_I32, ROWS);
    struct array *selected = array_output(GLM52_DTYPE_I32, ROWS * K);

    for (int64_t t = 0; t < ROWS; t++) end->value[t] = KEYS;
    array_push(end);
    BENCH_LOOP
        ops->select_topk(device, ROWS, KEYS, K, scores->at, start->at, end->at, selected->at, length->at);
    bench_counted();
}
