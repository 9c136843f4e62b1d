/* Elementwise sums, conversions and sums in fp64. */
#include "case.h"

static const glm52_dtype F32 = GLM52_DTYPE_F32, BF16 = GLM52_DTYPE_BF16;
static const int64_t COUNTS[] = {0, 1, 37, 1024, 70001};

CASE(add, "fp32 and bf16")
{
    for (int i = 0; i < 10; i++) {
        glm52_dtype type = i & 1 ? BF16 : F32;
        struct array *x = array_normal(type, COUNTS[i / 2], 1), *y = array_normal(type, x->count, 1);
        double *want = doubles(x->count);

        for (int64_t j = 0; j < x->count; j++) want[j] = x->value[j] + y->value[j];
        ops->add(device, x->count, type, x->at, y->at);
        check_close(y, want, tolerance(type, 1));
    }
}

CASE(convert, "between fp32 and bf16, to the nearest")
{
    for (int i = 0; i < 20; i++) {
        glm52_dtype from = i & 1 ? BF16 : F32, to = i >> 1 & 1 ? BF16 : F32;
        struct array *x = array_normal(from, COUNTS[i / 4], 1), *y = array_output(to, x->count);
        double *want = doubles(x->count);

        for (int64_t j = 0; j < x->count; j++)
            want[j] = to == F32 ? x->value[j] : (double)bf16_to_f32(f32_to_bf16((float)x->value[j]));
        ops->convert(device, x->count, from, x->at, to, y->at);
        check_exact(y, want);
    }
}

CASE(convert, "halves to even, overflow, infinities, NaN, subnormal numbers")
{
    static const double special[] = {1 + 0x1p-8, 1 + 0x3p-8, 0x1.ffp127, -0x1.fffffep127, INFINITY, -INFINITY, NAN,
                                     0x1p-133, 0x3p-135, -0.0};
    static const double rounded[] = {1,         1 + 0x1p-6, INFINITY, -INFINITY, INFINITY,
                                     -INFINITY, NAN,        0x1p-133, 0x1p-133,  0};
    struct array *x = array_from(F32, 10, special), *y = array_output(BF16, 10);

    ops->convert(device, 10, F32, x->at, BF16, y->at);
    check_exact(y, rounded);
}

CASE(sum, "with and without factors, added to what is there")
{
    for (int i = 0; i < 5; i++) {
        struct array *x = array_normal(F32, COUNTS[i], 1), *w = array_normal(F32, x->count, 1);
        struct array *plain = array_normal(GLM52_DTYPE_F64, 1, 1), *product = array_normal(GLM52_DTYPE_F64, 1, 1);
        struct array *workspace = array_workspace(ops->sum_bytes(device, x->count));
        double want_plain = plain->value[0], want_product = product->value[0];

        for (int64_t j = 0; j < x->count; j++) {
            want_plain += x->value[j];
            want_product += x->value[j] * w->value[j];
        }
        ops->sum(device, x->count, x->at, NULL, plain->at, workspace->at);
        ops->sum(device, x->count, x->at, w->at, product->at, workspace->at);
        array_fetch(workspace);
        check_close(plain, &want_plain, 1e-11);
        check_close(product, &want_product, 1e-11);
    }
}

static void check_squares(glm52_dtype type, int64_t count)
{
    struct array *x = array_normal(type, count, 1e-3), *out = array_zero(GLM52_DTYPE_F64, 1);
    struct array *workspace = array_workspace(ops->sum_bytes(device, count));
    double want = 2;

    for (int64_t j = 0; j < count; j++) want += x->value[j] * x->value[j];
    for (int threads = 1; threads <= 3; threads++) {
        device_threads(threads);
        out->value[0] = 2;
        array_push(out);
        ops->sum_squares(device, count, type, x->at, out->at, workspace->at);
        check_same(out);
    }
    array_fetch(workspace);
    check_close(out, &want, type == BF16 ? 0x1p-25 : 1e-12); /* pairs of narrow ones may be added in fp32 */
}

CASE(sum_squares, "added to what is there, the same bits for any number of threads")
{
    check_squares(F32, 300007);
    check_squares(BF16, 300007);
    check_squares(F32, 1 << 18);
    check_squares(BF16, 1 << 18);
    check_squares(BF16, 3);
    check_squares(BF16, 0);
}

BENCH(sum_squares, "16M")
{
    struct array *x = array_zero(F32, 1 << 24), *out = array_zero(GLM52_DTYPE_F64, 1);
    struct array *workspace = array_workspace(ops->sum_bytes(device, x->count));

    BENCH_LOOP
        ops->sum_squares(device, x->count, F32, x->at, out->at, workspace->at);
    bench_rate(0, 4.0 * (1 << 24));
}

BENCH_FULL(add, "16384 x 6144, bf16", "")
{
    struct array *x = array_random(BF16, 16384 * 6144), *y = array_random(BF16, 16384 * 6144);

    BENCH_LOOP
        ops->add(device, x->count, BF16, x->at, y->at);
    bench_counted();
}

BENCH_FULL(add, "8192 x 6144, fp32", "")
{
    struct array *x = array_random(F32, 8192 * 6144), *y = array_random(F32, 8192 * 6144);

    BENCH_LOOP
        ops->add(device, x->count, F32, x->at, y->at);
    bench_counted();
}

static void bench_convert(glm52_dtype from, glm52_dtype to, int64_t count)
{
    struct array *x = array_random(from, count), *y = array_random(to, count);

    BENCH_LOOP
        ops->convert(device, count, from, x->at, to, y->at);
    bench_counted();
}

BENCH_FULL(convert, "8192 x 6144, fp32 to bf16", "")
{
    bench_convert(F32, BF16, 8192 * 6144);
}

BENCH_FULL(convert, "8192 x 6144, bf16 to fp32", "")
{
    bench_convert(BF16, F32, 8192 * 6144);
}

BENCH_FULL(convert, "8192 x 576, fp32 to bf16", "")
{
    bench_convert(F32, BF16, 8192 * 576);
}

static void bench_copy(int64_t rows)
{
    struct array *x = array_random(BF16, rows * 6144), *y = array_random(BF16, rows * 6144);

    BENCH_LOOP
        ops->copy(device, y->at, x->at, 2 * (size_t)x->count);
    bench_counted();
}

static void bench_squares(glm52_dtype type, int64_t count)
{
    struct array *x = array_random(type, count), *out = array_zero(GLM52_DTYPE_F64, 1);
    struct array *workspace = array_workspace(ops->sum_bytes(device, count));

    BENCH_LOOP
        ops->sum_squares(device, count, type, x->at, out->at, workspace->at);
    bench_counted();
}

BENCH_FULL(sum_squares, "32 x 2048 x 6144, fp32", "")
{
    bench_squares(F32, 32 * 2048 * 6144);
}

BENCH_FULL(sum_squares, "32 x 2048 x 6144, bf16", "")
{
    bench_squares(BF16, 32 * 2048 * 6144);
}

BENCH_FULL(sum, "8192 x 6144 with factors", "")
{
    struct array *x = array_random(F32, 8192 * 6144), *w = array_random(F32, 8192 * 6144);
    struct array *out = array_zero(GLM52_DTYPE_F64, 1), *workspace = array_workspace(ops->sum_bytes(device, x->count));

    BENCH_LOOP
        ops->sum(device, x->count, x->at, w->at, out->at, workspace->at);
    bench_counted();
}

BENCH_FULL(zero, "32 x 2048 x 6144, fp32", "")
{
    struct array *x = array_random(F32, 32 * 2048 * 6144);

    BENCH_LOOP
        ops->zero(device, x->at, 4 * (size_t)x->count);
    bench_counted();
}

/* What a copy of that size reaches when it, too, begins with caches full of other data. */
BENCH_FULL(copy, "4096 x 6144, bf16", "")
{
    bench_copy(4096);
}

BENCH_FULL(copy, "8192 x 6144, bf16", "")
{
    bench_copy(8192);
}

BENCH_FULL(copy, "16384 x 6144, bf16", "")
{
    bench_copy(16384);
}

BENCH_FULL(multiply, "8192 x 6144", "")
{
    struct array *x = array_random(F32, 8192 * 6144), *y = array_random(F32, 8192 * 6144);

    BENCH_LOOP
        ops->multiply(device, x->count, x->at, y->at);
    bench_counted();
}

BENCH_FULL(clip, "one norm", "")
{
    struct array *squares = array_from(GLM52_DTYPE_F64, 1, (double[]){7}), *norm = array_output(F32, 1);
    struct array *coefficient = array_output(F32, 1);

    BENCH_LOOP
        ops->clip(device, squares->at, 1, norm->at, coefficient->at);
    bench_counted();
}
