/* The embedding and its gradient. */
#include "case.h"

static const glm52_dtype F32 = GLM52_DTYPE_F32, BF16 = GLM52_DTYPE_BF16;

struct embed_case {
    struct embed shape;
    struct array *token, *table, *dy;
};

/* Few tokens, so that many rows meet in one; every fifth row has none. */
static struct embed_case embed_case(int64_t rows, int64_t width, int64_t vocabulary, glm52_dtype type)
{
    struct embed_case c = {.shape = {rows, width, vocabulary, type, F32}};

    c.token = array_zero(GLM52_DTYPE_I32, rows);
    for (int64_t i = 0; i < rows; i++) c.token->value[i] = i % 5 == 4 ? -1 : (double)draw_below(vocabulary);
    array_push(c.token);
    c.table = array_normal(type, vocabulary * width, 1);
    c.dy = array_normal(type, rows * width, 1);
    return c;
}

static void check_embed(int64_t rows, int64_t width, int64_t vocabulary, glm52_dtype type, glm52_dtype gradient)
{
    struct embed_case c = embed_case(rows, width, vocabulary, type);
    struct array *y = array_output(type, rows * width), *dtable = array_normal(gradient, vocabulary * width, 1);
    double *want = doubles(rows * width), *slope = doubles(vocabulary * width);

    c.shape.gradient = gradient;
    memcpy(slope, dtable->value, (size_t)dtable->count * sizeof(double));
    for (int64_t i = 0; i < rows * width; i++) {
        int64_t from = (int64_t)c.token->value[i / width] * width + i % width;

        if (from < 0) continue;
        want[i] = c.table->value[from];
        slope[from] += c.dy->value[i];
    }
    ops->embed_forward(device, &c.shape, c.token->at, c.table->at, y->at);
    check_exact(y, want);
    ops->embed_backward(device, &c.shape, c.token->at, c.dy->at, dtable->at);
    check_close(dtable, slope, tolerance(gradient, rows));
}

CASE(embed, "odd shapes, repeated and absent tokens, one row, none")
{
    check_embed(53, 29, 11, F32, F32);
    check_embed(67, 201, 11, F32, F32);
    check_embed(1, 7, 11, F32, F32);
    check_embed(0, 7, 11, F32, F32);
}

CASE(embed, "bf16, and gradients in bf16")
{
    check_embed(53, 129, 11, BF16, F32);
    check_embed(67, 24, 7, BF16, BF16);
    check_embed(41, 2056, 5, BF16, F32);
}

CASE(embed, "one token in most rows, a vocabulary of many digits, one of exactly so many")
{
    check_embed(301, 40, 2, BF16, BF16);
    check_embed(6001, 8, 1, BF16, F32);
    check_embed(77, 8, 1, BF16, F32);
    check_embed(97, 16, 512, BF16, F32);
    check_embed(1201, 8, 5003, BF16, BF16);
    check_embed(211, 3, 70001, F32, BF16);
    check_embed(9001, 8, 154880, BF16, BF16);
    check_embed(21003, 8, 1, BF16, F32); /* more rows of a token than one block of the cuda device holds on chip */
}

CASE(embed, "the same bits for any number of threads")
{
    struct embed_case c = embed_case(2003, 193, 17, F32);
    struct array *dtable = array_zero(F32, 17 * 193);

    for (int threads = 1; threads <= 3; threads++) {
        device_threads(threads);
        memset(dtable->value, 0, (size_t)dtable->count * sizeof(double));
        array_push(dtable);
        ops->embed_backward(device, &c.shape, c.token->at, c.dy->at, dtable->at);
        check_same(dtable);
    }
}

BENCH(embed, "backward, 4096 x 512 of 8192")
{
    struct embed_case c = embed_case(4096, 512, 8192, strcmp(ops->name, "cpu") == 0 ? F32 : BF16);
    struct array *dtable = array_zero(F32, 8192 * 512);

    BENCH_LOOP
        ops->embed_backward(device, &c.shape, c.token->at, c.dy->at, dtable->at);
    bench_rate(0, 4096.0 * 512 * (double)(dtype_size(c.shape.type) + 8));
}

/* Tokens drawn as text has them: the n-th most frequent one with weight 1 / n. */
static void bench_full(int with_backward, int64_t rows, glm52_dtype gradient)
{
    enum { WIDTH = 6144, VOCABULARY = 154880 };
    struct embed e = {rows, WIDTH, VOCABULARY, BF16, gradient};
    struct array *token = array_zero(GLM52_DTYPE_I32, rows), *y = array_random(BF16, rows * WIDTH);
    struct array *table = array_random(with_backward ? gradient : BF16, (int64_t)VOCABULARY * WIDTH);
    double *seen = doubles(VOCABULARY), different = 0;

    for (int64_t i = 0; i < rows; i++) {
        int64_t rank = (int64_t)pow((double)VOCABULARY, draw_uniform()), at = rank * 65537 % VOCABULARY;

        token->value[i] = (double)at;
        different += seen[at] == 0;
        seen[at] = 1;
    }
    array_push(token);
    BENCH_LOOP {
        if (with_backward)
            ops->embed_backward(device, &e, token->at, y->at, table->at);
        else
            ops->embed_forward(device, &e, token->at, table->at, y->at);
    }
    bench_rate(0, WIDTH * (2.0 * (double)rows + different * (with_backward ? 2 * (double)dtype_size(gradient) : 2)));
}

BENCH_FULL(embed_forward, "8192 x 6144 of 154880", "")
{
    bench_full(0, 8192, F32);
}

BENCH_FULL(embed_forward, "16384 x 6144 of 154880", "")
{
    bench_full(0, 16384, F32);
}

BENCH_FULL(embed_backward, "8192 x 6144 of 154880, fp32", "")
{
    bench_full(1, 8192, F32);
}

BENCH_FULL(embed_backward, "16384 x 6144 of 154880, fp32", "")
{
    bench_full(1, 16384, F32);
}

BENCH_FULL(embed_backward, "8192 x 6144 of 154880, bf16", "")
{
    bench_full(1, 8192, BF16);
}

BENCH_FULL(embed_backward, "16384 x 6144 of 154880, bf16", "")
{
    bench_full(1, 16384, BF16);
}

BENCH_FULL(embed_backward, "32768 x 6144 of 154880, bf16", "")
{
    bench_full(1, 32768, BF16);
}

BENCH_FULL(embed_backward, "65536 x 6144 of 154880, bf16", "")
{
    bench_full(1, 65536, BF16);
}
