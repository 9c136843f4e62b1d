/* Block formats against plain loops in double, byte for byte: codes found in a table of the format's values. */
#include "case.h"

#include <float.h>
#include <string.h>

static const glm52_dtype F32 = GLM52_DTYPE_F32, BF16 = GLM52_DTYPE_BF16, CODE = GLM52_DTYPE_F8_E4M3;

/* ---- the formats, by their definitions ---- */

struct coding {
    int mantissa, bias, largest; /* largest: code of a finite number */
};
static const struct coding e4m3 = {3, 7, 0x7e}, e5m2 = {2, 15, 0x7b}, e2m1 = {1, 1, 7};

static struct coding coding_of(const struct quantised *q)
{
    return q->format >= NVFP4 ? e2m1 : q->e5m2 ? e5m2 : e4m3;
}

static double magnitude_of(struct coding c, int code)
{
    int exponent = code >> c.mantissa, fraction = code & ((1 << c.mantissa) - 1);

    if (exponent == 0) return ldexp(fraction, 1 - c.bias - c.mantissa);
    return ldexp(fraction + (1 << c.mantissa), exponent - c.bias - c.mantissa);
}

/* The code of the nearest magnitude, ties to the even code. */
static int nearest(struct coding c, double x)
{
    int low = 0, high = c.largest;

    if (fabs(x) >= magnitude_of(c, high)) return high;
    while (high - low > 1) {
        int middle = (low + high) / 2;

        *(magnitude_of(c, middle) <= fabs(x) ? &low : &high) = middle;
    }
    double up = magnitude_of(c, high) - fabs(x), down = fabs(x) - magnitude_of(c, low);
    return up < down || (up == down && high % 2 == 0) ? high : low;
}

static int code_for(struct coding c, double x)
{
    int sign = c.mantissa == 1 ? 8 : 0x80;

    if (isnan(x)) return c.mantissa == 1 ? 7 : 0x7f;
    return nearest(c, x) | (signbit(x) ? sign : 0);
}

static double value_of(struct coding c, int code)
{
    int sign = c.mantissa == 1 ? 8 : 0x80, magnitude = code & (sign - 1);
    double value = magnitude_of(c, magnitude);

    if (magnitude > c.largest) value = c.bias == 15 && magnitude == 0x7c ? INFINITY : NAN;
    return code & sign ? -value : value;
}

static double rounded(double x)
{
    return (double)(float)x;
}

/* What elements are multiplied by (or divided, then *divide = 1); *stored: the scale, or its code. */
static double scale_for(const struct quantised *q, double a, double global, double *stored, int *divide)
{
    double largest = q->e5m2 ? 57344 : 448, e, part;
    int exponent;

    *divide = q->format == FP8_BLOCK_RELEASE || q->format == NVFP4_MODELOPT;
    switch (q->format) {
    case FP8_BLOCK:
    case FP8_BLOCK_POWER:
        e = a == 0 || !isfinite(a) ? 1 : fmin(rounded(largest / a), FLT_MAX);
        if (q->format == FP8_BLOCK_POWER) {
            frexp(e, &exponent);
            e = ldexp(1, exponent - 1);
        }
        *stored = rounded(1 / e);
        return e;
    case FP8_BLOCK_RELEASE:
        e = rounded(a / largest);
        return *stored = e == 0 || !isfinite(e) ? 1 : e;
    case MXFP8:
    case MXFP8_OCP:
        if (isnan(a) || isinf(a)) {
            *stored = isnan(a) ? 255 : 254;
        } else {
            part = frexp(q->format == MXFP8 ? rounded(a * rounded(1 / largest)) : a, &exponent);
            if (q->format == MXFP8)
                exponent -= part == 0.5;
            else
                exponent -= 1 + (q->e5m2 ? 15 : 8);
            *stored = part == 0 ? 0 : fmax(0, exponent + 127);
        }
        return isnan(a) ? NAN : ldexp(1, 127 - (int)*stored);
    case NVFP4:
        e = global == 0 ? 1 : fmin(rounded(2688 / global), FLT_MAX);
        if (e == 0) e = 1;
        *stored = code_for(e4m3, rounded(a * rounded(e * rounded(1.0 / 6))));
        return fmin(rounded(1 / rounded(value_of(e4m3, (int)*stored) * rounded(1 / e))), FLT_MAX);
    default:
        e = rounded(a / rounded(6 * global));
        *stored = code_for(e4m3, fmax(e > 0 ? e : 1, ldexp(1, -9)));
        e = rounded(value_of(e4m3, (int)*stored) * global);
        return e > 0 && isfinite(e) ? e : 1;
    }
}

/* ---- plain loops ---- */

struct plain {
    int64_t blocks;
    double *codes, *scales; /* [rows,width], or of bytes; [blocks] */
};

static int64_t over(int64_t count, int64_t by)
{
    return (count + by - 1) / by;
}

/* Of x, or with transposed of x^T. */
static struct plain plain_quantise(const struct quantised *q, const double *x, double global, int transposed)
{
    const int64_t rows = transposed ? q->width : q->rows, width = transposed ? q->rows : q->width;
    const int64_t across = over(width, q->block_columns), down = over(rows, q->block_rows);
    const int packed = q->format >= NVFP4;
    struct plain p = {down * across, doubles(rows * width), doubles(down * across)};

    for (int64_t b = 0; b < p.blocks; b++) {
        int64_t top = b / across * q->block_rows, left = b % across * q->block_columns;
        int64_t bottom = top + q->block_rows < rows ? top + q->block_rows : rows;
        int64_t right = left + q->block_columns < width ? left + q->block_columns : width;
        double a = 0, by;
        int divide;

        for (int64_t i = top; i < bottom; i++)
            for (int64_t j = left; j < right; j++) {
                double element = fabs(transposed ? x[j * q->width + i] : x[i * width + j]);

                if (isnan(element) || element > a) a = element;
                if (isnan(a)) i = bottom - 1, j = right; /* and no other takes its place */
            }
        by = scale_for(q, a, global, &p.scales[b], &divide);
        for (int64_t i = top; i < bottom; i++)
            for (int64_t j = left; j < right; j++) {
                double element = transposed ? x[j * q->width + i] : x[i * width + j];
                int code = code_for(coding_of(q), rounded(divide ? element / by : element * by));

                if (q->format == NVFP4_MODELOPT && !(element < 0)) code &= 7;
                if (packed)
                    p.codes[(i * width + j) / 2] += code << (j % 2 ? 4 : 0);
                else
                    p.codes[i * width + j] = code;
            }
    }
    return p;
}

/* What comes back of the codes that plain_quantise makes of x. */
static void plain_dequantise(const struct quantised *q, const struct plain *p, double global, double *y)
{
    const int64_t across = over(q->width, q->block_columns);

    for (int64_t i = 0; i < q->rows * q->width; i++) {
        double stored = p->scales[i / q->width / q->block_rows * across + i % q->width / q->block_columns];
        double scale = stored;
        int code = (int)p->codes[q->format >= NVFP4 ? i / 2 : i];

        if (q->format >= NVFP4) code = i % 2 ? code >> 4 : code & 15;
        if (q->format == MXFP8 || q->format == MXFP8_OCP) scale = stored == 255 ? NAN : ldexp(1, (int)stored - 127);
        if (q->format == NVFP4) scale = rounded(rounded(value_of(e4m3, (int)stored) * global) * rounded(1 / 2688.0));
        if (q->format == NVFP4_MODELOPT) scale = rounded(value_of(e4m3, (int)stored) * global);
        y[i] = rounded(value_of(coding_of(q), code) * scale);
        if (q->type == BF16) y[i] = (double)bf16_to_f32(f32_to_bf16((float)y[i]));
    }
}

/* ---- one call ---- */

static struct array *scales_for(const struct quantised *q, int64_t blocks)
{
    return array_output(q->format >= MXFP8 ? CODE : F32, blocks);
}

static double global_of(const struct quantised *q, const struct array *x)
{
    double largest = 0;

    for (int64_t i = 0; i < x->count; i++) largest = fmax(largest, fabs(x->value[i]));
    return q->format == NVFP4_MODELOPT ? rounded(largest / 2688) : largest;
}

static void check_scaled(const struct quantised *q, struct array *x, double of_all, int transposed_too)
{
    const int64_t count = q->rows * q->width, bytes = q->format >= NVFP4 ? count / 2 : count;
    struct array *global = array_from(F32, 1, &of_all), *codes = array_output(CODE, bytes);
    struct array *y = array_output(q->type, count);
    struct plain p = plain_quantise(q, x->value, of_all, 0);
    struct array *scales = scales_for(q, p.blocks), *codes_t = NULL, *scales_t = NULL;
    double *want = doubles(count);
    struct plain t = {0};

    if (transposed_too) {
        t = plain_quantise(q, x->value, of_all, 1);
        codes_t = array_output(CODE, count);
        scales_t = scales_for(q, t.blocks);
    }
    ops->quantise(device, q, global->at, x->at, codes->at, scales->at, codes_t ? codes_t->at : NULL,
                  codes_t ? scales_t->at : NULL);
    check_exact(scales, p.scales);
    check_exact(codes, p.codes);
    if (codes_t) {
        check_exact(scales_t, t.scales);
        check_exact(codes_t, t.codes);
    }
    plain_dequantise(q, &p, of_all, want);
    ops->dequantise(device, q, global->at, codes->at, scales->at, y->at);
    check_exact(y, want);
}

static void check_array(const struct quantised *q, struct array *x, int transposed_too)
{
    check_scaled(q, x, global_of(q, x), transposed_too);
}

static void check_shape(struct quantised q, int transposed_too)
{
    static const glm52_dtype types[] = {GLM52_DTYPE_F32, GLM52_DTYPE_BF16};

    for (int i = 0; i < 2; i++) {
        q.type = types[i];
        check_array(&q, array_normal(q.type, q.rows * q.width, exp(3 * draw_normal())), transposed_too);
    }
}

/* ---- cases ---- */

static const int fp8[] = {FP8_BLOCK, FP8_BLOCK_POWER, FP8_BLOCK_RELEASE, MXFP8, MXFP8_OCP};
enum { FP8S = sizeof fp8 / sizeof *fp8 };

struct layout {
    int64_t rows, width, block_rows, block_columns;
    int transposed_too;
};

/* Every format of 8 bits, with either element. */
static void check_fp8(const struct layout *at, size_t count)
{
    for (size_t i = 0; i < count; i++)
        for (int f = 0; f < FP8S; f++)
            for (int e5m2_too = 0; e5m2_too < 2; e5m2_too++)
                check_shape((struct quantised){at[i].rows, at[i].width, at[i].block_rows, at[i].block_columns, fp8[f],
                                               e5m2_too, F32}, at[i].transposed_too);
}
#define CHECK_FP8(...)                                                                                                 \
    check_fp8((const struct layout[]){__VA_ARGS__}, sizeof(struct layout[]){__VA_ARGS__} / sizeof(struct layout))

CASE(quantise, "blocks of one row: whole, with an end, one row, none")
{
    CHECK_FP8({19, 384, 1, 128, 0}, {37, 300, 1, 128, 0}, {131, 200, 1, 128, 0}, {33, 96, 1, 32, 0},
              {7, 40, 1, 32, 0}, {1, 128, 1, 128, 0}, {0, 128, 1, 128, 1});
}

CASE(quantise, "tiles of 128 x 128, ends on both sides, rows of 16 bytes and others")
{
    CHECK_FP8({256, 128, 128, 128, 0}, {150, 136, 128, 128, 0}, {131, 77, 128, 128, 0}, {3, 8, 128, 128, 0});
}

CASE(quantise, "the transpose too: tiles, blocks of 128 and of 32, ends, odd shapes")
{
    CHECK_FP8({144, 264, 128, 128, 1}, {144, 264, 1, 128, 1}, {176, 104, 1, 32, 1}, {16, 8, 1, 32, 1},
              {256, 128, 1, 128, 1}, {43, 29, 1, 32, 1}, {37, 256, 1, 128, 1});
}

CASE(quantise, "blocks of one column, of any size, of the whole matrix")
{
    CHECK_FP8({70, 11, 32, 1, 0}, {17, 29, 3, 5, 1}, {41, 53, 41, 53, 1}, {3, 2500, 2, 1500, 0});
}

CASE(quantise, "NVFP4 by either order, whole blocks and an end")
{
    for (int format = NVFP4; format <= NVFP4_MODELOPT; format++) {
        check_shape((struct quantised){13, 64, 1, 16, format, 0, F32}, 0);
        check_shape((struct quantised){9, 42, 1, 16, format, 0, F32}, 0);
        check_shape((struct quantised){32, 48, 16, 16, format, 0, F32}, 0);
    }
}

/* Every bf16 number up to 448 behind one 448 that makes the scale 1. */
CASE(quantise, "every bf16 number")
{
    for (int f = 0; f < FP8S; f++)
        for (int e5m2_too = 0; e5m2_too < 2; e5m2_too++) {
            struct quantised q = {517, 128, 1, 128, fp8[f], e5m2_too, BF16};
            struct array *x = array_zero(BF16, q.rows * q.width);

            for (int64_t i = 0; i < 1 << 16; i++) {
                double value = (double)bf16_to_f32((uint16_t)i);

                x->value[i / 127 * 128 + i % 127 + 1] = fabs(value) <= 448 ? value : 0;
            }
            for (int64_t row = 0; row < q.rows; row++) x->value[row * q.width] = e5m2_too ? 57344 : 448;
            array_push(x);
            check_array(&q, x, 0);
        }
}

static void check_special(int64_t rows, int64_t width, int64_t block_rows, int64_t block_columns, int transposed_too)
{
    static const double special[] = {INFINITY,   -INFINITY, NAN,      0,   -0.0, 0x1p-149, -0x3p-149, 0x1p-127,
                                     0x1.8p-130, FLT_MAX,   -FLT_MAX, 449, 448,  0x1p-126, 1e-38,     65504};
    enum { SPECIALS = sizeof special / sizeof *special };

    for (int f = 0; f < FP8S; f++)
        for (int type = 0; type < 2; type++)
            for (int e5m2_too = 0; e5m2_too < 2; e5m2_too++) {
                struct quantised q = {rows, width, block_rows, block_columns, fp8[f], e5m2_too, type ? BF16 : F32};
                struct array *x = array_zero(q.type, rows * width);

                for (int64_t i = 0; i < x->count; i++) { /* one or two of them in most blocks */
                    int64_t draw = draw_below(block_rows * block_columns);
                    double scale = ldexp(1, (int)(i / width * 8 % 240) - 150);

                    x->value[i] = i / width % 5 == 0 ? 0 : scale * draw_normal();
                    if (draw == 0) x->value[i] = special[draw_below(SPECIALS)];
                }
                array_push(x);
                check_array(&q, x, transposed_too);
            }
}

CASE(quantise, "infinities, NaN, zeros, subnormal numbers, the largest ones, blocks of zeros")
{
    check_special(64, 256, 1, 128, 0);
    check_special(64, 256, 1, 128, 1);
    check_special(64, 96, 1, 32, 1);
    check_special(53, 37, 1, 32, 1);
    check_special(256, 264, 128, 128, 0);
}

CASE(quantise, "NVFP4: blocks of zeros, underflow, a matrix of zeros, negative zeros")
{
    for (int format = NVFP4; format <= NVFP4_MODELOPT; format++)
        for (int type = 0; type < 2; type++) {
            struct quantised q = {40, 64, 1, 16, format, 0, type ? BF16 : F32};
            struct array *x = array_zero(q.type, q.rows * q.width);

            check_array(&q, x, 0);
            for (int64_t i = 0; i < x->count; i++)
                x->value[i] = i / 16 % 4 == 3 ? i % 2 ? -0.0 : 0 : ldexp(draw_normal(), -(int)(i / 64 % 20));
            array_push(x);
            check_array(&q, x, 0);
            for (int64_t i = 0; i < x->count; i++) x->value[i] = ldexp(x->value[i], -132); /* 2688 / A beyond fp32 */
            array_push(x);
            check_array(&q, x, 0);
        }
}

/* By a scale of the matrix that was there before it: blocks saturate, or all of one is below the least scale. */
CASE(quantise, "NVFP4: NaN, infinities and numbers beyond the matrix's scale")
{
    static const double special[] = {INFINITY, -INFINITY, NAN, -0.0, 0x1p-133, FLT_MAX, -FLT_MAX, 7, -5, 0.25, 2.5};
    enum { SPECIALS = sizeof special / sizeof *special };

    for (int format = NVFP4; format <= NVFP4_MODELOPT; format++)
        for (int type = 0; type < 2; type++)
            for (int e = -140; e < 130; e += 9) { /* what divides or multiplies is subnormal at either end */
                struct quantised q = {37, 64, 1, 16, format, 0, type ? BF16 : F32};
                struct array *x = array_zero(q.type, q.rows * q.width);
                const double of_all = ldexp(rounded(fabs(draw_normal()) + 1), e);

                for (int64_t i = 0; i < x->count; i++) {
                    x->value[i] = ldexp(draw_normal(), (int)(i / 16 % 24) - 16 + (e > 100 ? 100 : e));
                    if (draw_below(24) == 0) x->value[i] = special[draw_below(SPECIALS)];
                }
                array_push(x);
                check_scaled(&q, x, rounded(of_all), 0);
            }
}

/* The row of posttraining.md 1.2. */
CASE(quantise, "NVFP4: the reference's row")
{
    static const double x_head[] = {0, .1, -.2, .3, .5, -.75, 1, -1.25, 1.5, -1.75, 2, 2.5, -3, 3.5, -5, 6};
    static const double codes[] = {0x00, 0x18, 0xa1, 0xa2, 0xc3, 0x44, 0x6d, 0x7e, 0,    0,    0,    0,
                                   0,    0,    0,    0,    0xff, 0xee, 0xcd, 0x9b, 0x10, 0x43, 0x65, 0x76};
    static const double te[] = {0x7e, 0, 0x4c}, modelopt[] = {0x7e, 0x38, 0x4c};
    struct array *x = array_zero(F32, 48), *got = array_output(CODE, 24), *scales = array_output(CODE, 3);
    struct array *global = array_from(F32, 2, (double[]){6, 6.0 / 2688});

    memcpy(x->value, x_head, sizeof x_head);
    for (int i = 0; i < 16; i++) x->value[32 + i] = (double)(0.01f * (float)(i - 8));
    array_push(x);
    for (int modelopt_too = 0; modelopt_too < 2; modelopt_too++) {
        struct quantised q = {1, 48, 1, 16, modelopt_too ? NVFP4_MODELOPT : NVFP4, 0, F32};

        ops->quantise(device, &q, (float *)global->at + modelopt_too, x->at, got->at, scales->at, NULL, NULL);
        check_exact(got, codes);
        check_exact(scales, modelopt_too ? modelopt : te);
    }
}

/* Every code under scales of every kind. */
CASE(dequantise, "every code, every scale that is a code, special scales")
{
    for (int format = FP8_BLOCK; format <= NVFP4_MODELOPT; format++)
        for (int which = 0; which < 4; which++) {
            static const double special[] = {1, 0, INFINITY, NAN, 0x1p-149, FLT_MAX, 0x1p-127, 0x1.2468acp-3};
            const int packed = format >= NVFP4, narrow = format >= MXFP8;
            const double of_all = 0.75;
            struct quantised q = {256, 512, 1, packed ? 16 : 128, format, which / 2, which % 2 ? BF16 : F32};
            struct array *codes = array_zero(CODE, q.rows * q.width / (packed ? 2 : 1));
            struct array *y = array_output(q.type, q.rows * q.width);
            struct plain p = {q.rows * q.width / q.block_columns, NULL, NULL};
            struct array *scales = array_zero(narrow ? CODE : F32, p.blocks), *global = array_from(F32, 1, &of_all);
            double *want = doubles(y->count);

            if (packed && q.e5m2) continue;
            for (int64_t i = 0; i < codes->count; i++) codes->value[i] = (double)(i % 256);
            for (int64_t i = 0; i < scales->count; i++)
                scales->value[i] = narrow ? (double)(i / 4 % 256) : special[i / 4 % 8];
            array_push(codes);
            array_push(scales);
            p.codes = codes->value;
            p.scales = scales->value;
            plain_dequantise(&q, &p, of_all, want);
            ops->dequantise(device, &q, global->at, codes->at, scales->at, y->at);
            check_exact(y, want);
        }
}

CASE(quantise, "the same bytes for any number of threads")
{
    struct quantised q = {300, 520, 1, 128, FP8_BLOCK, 0, BF16};
    struct array *x = array_normal(BF16, q.rows * q.width, 1), *codes = array_output(CODE, x->count);
    struct array *codes_t = array_output(CODE, x->count), *scales = array_output(F32, 300 * 5);
    struct array *scales_t = array_output(F32, 520 * 3), *y = array_output(BF16, x->count);

    for (int threads = 1; threads <= 3; threads++) {
        device_threads(threads);
        ops->quantise(device, &q, NULL, x->at, codes->at, scales->at, codes_t->at, scales_t->at);
        ops->dequantise(device, &q, NULL, codes->at, scales->at, y->at);
        check_same(codes);
        check_same(scales);
        check_same(codes_t);
        check_same(scales_t);
        check_same(y);
    }
}

/* ---- benches ---- */

static void bench(struct quantised q, int transposed_too, int back)
{
    const int full = strcmp(ops->name, "cpu") != 0;
    const int64_t count = q.rows * q.width;
    struct array *x = array_random(q.type, count), *codes = array_random(CODE, count);
    struct array *codes_t = array_random(CODE, transposed_too ? count : 1), *scales = array_random(F32, count / 16);
    struct array *scales_t = array_random(F32, count / 16), *global = array_from(F32, 1, (double[]){2});

    BENCH_LOOP {
        if (back)
            ops->dequantise(device, &q, global->at, codes->at, scales->at, x->at);
        else
            ops->quantise(device, &q, global->at, x->at, codes->at, scales->at, transposed_too ? codes_t->at : NULL,
                          scales_t->at);
    }
    if (full)
        bench_counted();
    else
        bench_rate(0, (double)count * ((double)dtype_size(q.type) + 1));
}

BENCH(quantise, "4096 x 2048, 1 x 128")
{
    bench((struct quantised){4096, 2048, 1, 128, FP8_BLOCK, 0, F32}, 0, 0);
}

BENCH(dequantise, "4096 x 2048, 1 x 128")
{
    bench((struct quantised){4096, 2048, 1, 128, FP8_BLOCK, 0, F32}, 0, 1);
}

#define BENCH_QUANTISED(operation, shape, transpose, back, ...)    \
    BENCH_FULL(operation, shape, "")                               \
    {                                                              \
        bench((struct quantised){__VA_ARGS__}, transpose, back);   \
    }

BENCH_QUANTISED(quantise, "16384 x 6144, 1 x 128", 0, 0, 16384, 6144, 1, 128, FP8_BLOCK, 0, BF16)
BENCH_QUANTISED(quantise, "8192 x 6144, 1 x 128", 0, 0, 8192, 6144, 1, 128, FP8_BLOCK, 0, BF16)
BENCH_QUANTISED(quantise, "8192 x 6144, 1 x 128, power of two", 0, 0, 8192, 6144, 1, 128, FP8_BLOCK_POWER, 0, BF16)
BENCH_QUANTISED(quantise, "8192 x 6144, 1 x 128, fp32", 0, 0, 8192, 6144, 1, 128, FP8_BLOCK, 0, F32)
BENCH_QUANTISED(quantise, "65536 x 576, 1 x 128", 0, 0, 65536, 576, 1, 128, FP8_BLOCK, 0, BF16)
BENCH_QUANTISED(quantise, "16384 x 6144, 1 x 128 and transpose", 1, 0, 16384, 6144, 1, 128, FP8_BLOCK, 0, BF16)
BENCH_QUANTISED(quantise, "8192 x 6144, 1 x 128 and transpose", 1, 0, 8192, 6144, 1, 128, FP8_BLOCK, 0, BF16)
BENCH_QUANTISED(quantise, "32 x 6144 x 2048, 128 x 128", 0, 0, 32 * 6144, 2048, 128, 128, FP8_BLOCK, 0, BF16)
BENCH_QUANTISED(quantise, "32 x 6144 x 2048, 128 x 128, release order",
                0, 0, 32 * 6144, 2048, 128, 128, FP8_BLOCK_RELEASE, 0, BF16)
BENCH_QUANTISED(quantise, "32 x 6144 x 2048, 128 x 128 and transpose",
                1, 0, 32 * 6144, 2048, 128, 128, FP8_BLOCK, 0, BF16)
BENCH_QUANTISED(quantise, "16384 x 6144, MXFP8", 0, 0, 16384, 6144, 1, 32, MXFP8, 0, BF16)
BENCH_QUANTISED(quantise, "8192 x 6144, MXFP8", 0, 0, 8192, 6144, 1, 32, MXFP8, 0, BF16)
BENCH_QUANTISED(quantise, "16384 x 6144, MXFP8 and transpose", 1, 0, 16384, 6144, 1, 32, MXFP8, 0, BF16)
BENCH_QUANTISED(quantise, "8192 x 6144, MXFP8 and transpose", 1, 0, 8192, 6144, 1, 32, MXFP8, 0, BF16)
BENCH_QUANTISED(quantise, "16384 x 6144, NVFP4", 0, 0, 16384, 6144, 1, 16, NVFP4, 0, BF16)
BENCH_QUANTISED(quantise, "8192 x 6144, NVFP4", 0, 0, 8192, 6144, 1, 16, NVFP4, 0, BF16)
BENCH_QUANTISED(quantise, "32 x 6144 x 2048, NVFP4 as ModelOpt", 0, 0, 32 * 6144, 2048, 1, 16, NVFP4_MODELOPT, 0, BF16)
BENCH_QUANTISED(dequantise, "16384 x 6144, 1 x 128", 0, 1, 16384, 6144, 1, 128, FP8_BLOCK, 0, BF16)
BENCH_QUANTISED(dequantise, "32 x 6144 x 2048, 128 x 128", 0, 1, 32 * 6144, 2048, 128, 128, FP8_BLOCK, 0, BF16)
BENCH_QUANTISED(dequantise, "16384 x 6144, MXFP8", 0, 1, 16384, 6144, 1, 32, MXFP8, 0, BF16)
BENCH_QUANTISED(dequantise, "32 x 6144 x 2048, NVFP4 as ModelOpt",
                0, 1, 32 * 6144, 2048, 1, 16, NVFP4_MODELOPT, 0, BF16)
