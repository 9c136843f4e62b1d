/* The rotary table and the rotation of interleaved pairs. */
#include "case.h"

static const glm52_dtype F32 = GLM52_DTYPE_F32, BF16 = GLM52_DTYPE_BF16;

CASE(rope_table, "cosines and sines of fp32 angles up to a million positions")
{
    static const double positions[] = {0, 1, 2, 77, 4095, 1048575, 131071};
    enum { ROWS = 7, HALF = 13 };
    struct array *position = array_from(GLM52_DTYPE_I32, ROWS, positions), *frequency = array_zero(F32, HALF);
    struct array *table = array_output(F32, ROWS * HALF * 2);
    double *want = doubles(ROWS * HALF * 2);

    for (int j = 0; j < HALF; j++) frequency->value[j] = pow(8e6, -(double)j / HALF);
    array_push(frequency);
    for (int i = 0; i < ROWS * HALF; i++) {
        float angle = (float)positions[i / HALF] * (float)frequency->value[i % HALF];

        want[2 * i] = cos((double)angle);
        want[2 * i + 1] = sin((double)angle);
    }
    ops->rope_table(device, ROWS, HALF, position->at, frequency->at, table->at);
    check_close(table, want, ldexp(1, -22)); /* two units in the last place of 1 */
}

struct rope_case {
    struct rope shape;
    struct array *table, *x;
};

/* Heads lie x_head apart, and the pairs are the first columns of what lies between. */
static struct rope_case rope_case(int64_t rows, int32_t heads, int32_t half, int64_t gap, glm52_dtype type)
{
    struct rope_case c = {.shape = {.rows = rows, .heads = heads, .half = half, .type = type}};

    c.shape.x_head = 2 * half + gap;
    c.shape.x_row = heads * c.shape.x_head + 2 * gap;
    c.shape.y_head = 2 * half + 3 * gap;
    c.shape.y_row = heads * c.shape.y_head + gap;
    c.table = array_rotations(rows * half);
    c.x = array_normal(type, rows * c.shape.x_row, 1);
    return c;
}

static void oracle(const struct rope_case *c, double *y)
{
    const struct rope *r = &c->shape;
    double sign = r->inverse ? -1 : 1;

    for (int64_t row = 0; row < r->rows; row++)
        for (int64_t head = 0; head < r->heads; head++)
            for (int64_t j = 0; j < r->half; j++) {
                const double *x = c->x->value + row * r->x_row + head * r->x_head + 2 * j;
                double *to = y + row * r->y_row + head * r->y_head + 2 * j;
                double cosine = c->table->value[(row * r->half + j) * 2];
                double sine = sign * c->table->value[(row * r->half + j) * 2 + 1];

                to[0] = (r->add ? to[0] : 0) + x[0] * cosine - x[1] * sine;
                to[1] = (r->add ? to[1] : 0) + x[1] * cosine + x[0] * sine;
            }
}

static void check_rope(int64_t rows, int32_t heads, int32_t half, int64_t gap, glm52_dtype type)
{
    for (int bits = 0; bits < 4; bits++) {
        struct rope_case c = rope_case(rows, heads, half, gap, type);
        int64_t count = rows * c.shape.y_row;
        struct array *y;
        double *want = doubles(count);

        c.shape.inverse = bits & 1;
        c.shape.add = bits >> 1;
        y = c.shape.add ? array_normal(type, count, 1) : array_output(type, count);
        for (int64_t i = 0; i < count; i++) want[i] = c.shape.add ? y->value[i] : (double)NAN;
        oracle(&c, want);
        ops->rope(device, &c.shape, c.table->at, c.x->at, y->at);
        check_close(y, want, tolerance(type, 3));
    }
}

CASE(rope, "forward, inverse, added to, with gaps")
{
    check_rope(17, 3, 5, 0, F32);
    check_rope(19, 5, 7, 3, F32);
    check_rope(1, 1, 1, 1, F32);
    check_rope(0, 3, 5, 0, F32);
    check_rope(2, 3, 600, 1, F32);
}

CASE(rope, "bf16, in pieces of 16 bytes and not")
{
    check_rope(17, 3, 5, 2, BF16);
    check_rope(19, 5, 4, 8, BF16);
    check_rope(9, 64, 32, 0, BF16);
    check_rope(67, 1, 32, 16, BF16);
    check_rope(5, 3, 12, 24, BF16);
    check_rope(5, 3, 12, 4, BF16);
    check_rope(3, 2, 200, 8, BF16);
    check_rope(3, 70, 32, 8, BF16);
    check_rope(700, 33, 32, 8, BF16); /* more rows than a kernel asks for ahead */
}

/* Heads one after the other at a column of wider rows; a sum in fp32. */
static void check_heads(int64_t rows, int32_t heads, int64_t width, int64_t gap, glm52_dtype type)
{
    struct spread r = {.rows = rows, .heads = heads, .width = width, .x_row = width + gap,
                       .y_row = heads * (width + gap) + gap, .y_head = width + gap, .type = type};
    struct array *x = array_normal(type, rows * r.x_row, 1), *y = array_output(type, rows * r.y_row);
    struct array *from = array_normal(type, rows * r.y_row, 1), *sum = array_output(F32, rows * r.x_row);
    double *want = doubles(y->count), *want_sum = doubles(sum->count);

    for (int64_t i = 0; i < y->count; i++) want[i] = (double)NAN;
    for (int64_t i = 0; i < sum->count; i++) want_sum[i] = i % r.x_row < width ? 0 : (double)NAN;
    for (int64_t t = 0; t < rows; t++)
        for (int64_t h = 0; h < heads; h++)
            for (int64_t j = 0; j < width; j++) {
                int64_t at = t * r.y_row + h * r.y_head + j;

                want[at] = x->value[t * r.x_row + j];
                want_sum[t * r.x_row + j] += from->value[at];
            }
    ops->spread_heads(device, &r, x->at, y->at);
    check_exact(y, want);
    for (int threads = 1; threads <= 3; threads++) {
        device_threads(threads);
        ops->sum_heads(device, &r, from->at, sum->at);
        check_same(sum);
    }
    check_close(sum, want_sum, tolerance(F32, heads));
}

CASE(spread_heads, "and back as a sum; odd shapes, pieces of 16 bytes, gaps, no rows")
{
    check_heads(17, 3, 5, 0, F32);
    check_heads(7, 5, 9, 3, BF16);
    check_heads(11, 64, 64, 192, BF16);
    check_heads(19, 7, 16, 8, BF16);
    check_heads(3, 2, 400, 8, BF16);
    check_heads(5, 1, 8, 0, BF16);
    check_heads(601, 65, 64, 8, BF16);
    check_heads(0, 3, 8, 0, BF16);
}

CASE(rope, "in place, and back again")
{
    struct rope_case c = rope_case(23, 3, 7, 0, F32);
    double *original = doubles(c.x->count), *want = doubles(c.x->count);

    memcpy(original, c.x->value, (size_t)c.x->count * sizeof(double));
    oracle(&c, want);
    ops->rope(device, &c.shape, c.table->at, c.x->at, c.x->at);
    check_close(c.x, want, tolerance(F32, 3));
    c.shape.inverse = 1;
    ops->rope(device, &c.shape, c.table->at, c.x->at, c.x->at);
    check_close(c.x, original, tolerance(F32, 6));
}

CASE(rope, "in place, bf16 in pieces of 16 bytes")
{
    struct rope_case c = rope_case(333, 40, 32, 64, BF16);
    double *want = doubles(c.x->count);

    c.shape.y_row = c.shape.x_row;
    c.shape.y_head = c.shape.x_head;
    memcpy(want, c.x->value, (size_t)c.x->count * sizeof(double));
    oracle(&c, want);
    ops->rope(device, &c.shape, c.table->at, c.x->at, c.x->at);
    check_close(c.x, want, tolerance(BF16, 3));
}

CASE(rope, "the inverse is the backward")
{
    struct rope_case c = rope_case(5, 2, 3, 0, F32);
    struct array *dy = array_normal(F32, c.x->count, 1), *dx = array_output(F32, c.x->count);
    double *y = doubles(c.x->count), *want = doubles(c.x->count);

    /* Linear in x, so the difference quotient is exact: dx[i] = sum of dy * y(unit vector i). */
    for (int64_t i = 0; i < c.x->count; i++) {
        memset(c.x->value, 0, (size_t)c.x->count * sizeof(double));
        memset(y, 0, (size_t)c.x->count * sizeof(double));
        c.x->value[i] = 1;
        oracle(&c, y);
        for (int64_t j = 0; j < c.x->count; j++) want[i] += dy->value[j] * y[j];
    }
    c.shape.inverse = 1;
    ops->rope(device, &c.shape, c.table->at, dy->at, dx->at);
    check_close(dx, want, tolerance(F32, 3));
}

BENCH(rope, "4096 x 8 heads x 16")
{
    struct rope_case c = rope_case(4096, 8, 8, 48, strcmp(ops->name, "cpu") == 0 ? F32 : BF16);

    c.shape.y_row = c.shape.x_row;
    c.shape.y_head = c.shape.x_head;
    BENCH_LOOP
        ops->rope(device, &c.shape, c.table->at, c.x->at, c.x->at);
    bench_rate(0, 2.0 * 4096 * 8 * 16 * (double)dtype_size(c.shape.type));
}

/* Rows of `heads` heads, rotary columns last of `from` columns in x and of `to` in y. */
static void bench_full(int64_t rows, int32_t heads, int64_t from, int64_t to)
{
    struct rope r = {.rows = rows, .heads = heads, .half = 32, .x_row = heads * from, .x_head = from,
                     .y_row = heads * to, .y_head = to, .type = BF16};
    struct array *table = array_random(F32, rows * 64), *x = array_random(BF16, rows * r.x_row);
    struct array *y = from == to ? x : array_random(BF16, rows * r.y_row);

    BENCH_LOOP
        ops->rope(device, &r, table->at, (uint16_t *)x->at + from - 64, (uint16_t *)y->at + to - 64);
    bench_counted();
}

BENCH_FULL(rope, "8192 x 64 x 64, 256 to 576 columns", "")
{
    bench_full(8192, 64, 256, 576);
}

BENCH_FULL(rope, "16384 x 64 x 64, 576 to 256 columns", "")
{
    bench_full(16384, 64, 576, 256);
}

BENCH_FULL(rope, "16384 x 64 x 64, 256 to 576 columns", "")
{
    bench_full(16384, 64, 256, 576);
}

BENCH_FULL(rope, "65536 x 64 x 64, 576 to 256 columns", "")
{
    bench_full(65536, 64, 576, 256);
}

BENCH_FULL(rope, "65536 x 64 x 64, 256 to 576 columns", "")
{
    bench_full(65536, 64, 256, 576);
}

BENCH_FULL(rope, "16384 x 32 x 64 of 128, in place", "")
{
    bench_full(16384, 32, 128, 128);
}

BENCH_FULL(rope, "8192 x 64 x 64 of 256, in place", "")
{
    bench_full(8192, 64, 256, 256);
}

BENCH_FULL(rope, "8192 x 32 x 64 of 128, in place", "")
{
    bench_full(8192, 32, 128, 128);
}

BENCH_FULL(rope, "8192 x 1 x 64 of 576", "")
{
    bench_full(8192, 1, 576, 576);
}

BENCH_FULL(rope_table, "8192 x 32", "")
{
    struct array *position = array_zero(GLM52_DTYPE_I32, 8192), *frequency = array_random(F32, 32);
    struct array *table = array_output(F32, 8192 * 64);

    for (int64_t i = 0; i < 8192; i++) position->value[i] = (double)i;
    array_push(position);
    BENCH_LOOP
        ops->rope_table(device, 8192, 32, position->at, frequency->at, table->at);
    bench_counted();
}

static void bench_heads(int64_t rows, int sum)
{
    enum { HEADS = 64 };
    struct spread r = {.rows = rows, .heads = HEADS, .width = 64, .x_row = 576, .y_row = HEADS * 256, .y_head = 256,
                       .type = BF16};
    struct array *y = array_random(BF16, rows * HEADS * 256), *x = array_random(sum ? F32 : BF16, rows * 576);

    BENCH_LOOP {
        if (sum)
            ops->sum_heads(device, &r, (uint16_t *)y->at + 192, (float *)x->at + 512);
        else
            ops->spread_heads(device, &r, (uint16_t *)x->at + 512, (uint16_t *)y->at + 192);
    }
    bench_counted();
}

BENCH_FULL(spread_heads, "8192 x 64 heads, 64 of 256", "")
{
    bench_heads(8192, 0);
}

BENCH_FULL(spread_heads, "16384 x 64 heads, 64 of 256", "")
{
    bench_heads(16384, 0);
}

BENCH_FULL(sum_heads, "8192 x 64 heads, 64 of 256", "")
{
    bench_heads(8192, 1);
}

BENCH_FULL(sum_heads, "16384 x 64 heads, 64 of 256", "")
{
    bench_heads(16384, 1);
}
