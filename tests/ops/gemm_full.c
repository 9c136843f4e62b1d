/* The dense products of GLM-5.2 at its full width: forward, to the rows, and to the weights in
 * either type. Arrays exist on the device alone. */
#include <stdlib.h>
#include <string.h>

#include "case.h"

static const glm52_dtype F32 = GLM52_DTYPE_F32, BF16 = GLM52_DTYPE_BF16;

/* Elements from the first to the last of `lines` x `length`, once for each head. */
static int64_t extent(int64_t lines, int64_t length, int64_t ld, int64_t batch, int64_t stride)
{
    return (batch - 1) * stride + (lines - 1) * ld + length;
}

struct operands {
    struct array *a, *b, *c;
};

static struct operands operands_of(const struct gemm *g)
{
    int64_t a_lines = g->transpose_a ? g->k : g->m, b_lines = g->transpose_b ? g->n : g->k;
    int64_t a_length = g->m * g->k / a_lines, b_length = g->n * g->k / b_lines;

    return (struct operands){array_random(g->a_type, extent(a_lines, a_length, g->lda, g->batch, g->stride_a)),
                             array_random(g->b_type, extent(b_lines, b_length, g->ldb, g->batch, g->stride_b)),
                             array_random(g->c_type, extent(g->m, g->n, g->ldc, g->batch, g->stride_c))};
}

static void bench_full(struct gemm g)
{
    struct operands o = operands_of(&g);

    BENCH_LOOP
        ops->gemm(device, &g, o.a->at, o.b->at, o.c->at);
    bench_counted();
}

static struct gemm linear(int64_t rows, int64_t n, int64_t k)
{
    return (struct gemm){.m = rows, .n = n, .k = k, .lda = k, .ldb = k, .ldc = n, .batch = 1, .transpose_b = 1,
                         .a_type = BF16, .b_type = BF16, .c_type = BF16};
}

static struct gemm to_rows(struct gemm g)
{
    struct gemm back = g;

    back.n = back.ldb = back.ldc = g.k;
    back.k = back.lda = g.n;
    back.transpose_b = 0;
    return back;
}

static struct gemm to_weight(struct gemm g, glm52_dtype type)
{
    struct gemm back = g;

    back.m = back.lda = g.n;
    back.n = back.ldb = back.ldc = g.k;
    back.k = g.m;
    back.transpose_a = back.add = 1;
    back.transpose_b = 0;
    back.c_type = type;
    return back;
}

/* Per head: x [rows,64,x_width] times one half of the 448 x 512 weights of each of 64 heads. */
static struct gemm per_head(int64_t rows, int64_t n, int64_t k, int64_t x_width, int64_t y_width, int transpose)
{
    struct gemm g = linear(rows, n, k);

    g.batch = 64;
    g.lda = 64 * x_width, g.stride_a = x_width;
    g.ldb = 512, g.stride_b = 448 * 512;
    g.ldc = 64 * y_width, g.stride_c = y_width;
    g.transpose_b = transpose;
    return g;
}

/* The gradient of that half. */
static struct gemm head_weight(int64_t rows, int64_t n, int64_t x_width, int64_t y_width, glm52_dtype type)
{
    struct gemm g = per_head(rows, 512, rows, x_width, y_width, 0);

    g.m = n;
    g.ldb = 64 * y_width, g.stride_b = y_width;
    g.ldc = 512, g.stride_c = 448 * 512;
    g.transpose_a = g.add = 1;
    g.c_type = type;
    return g;
}

/* ---- large enough for the tiles that large products get, a few rows looked at ---- */

enum { LOOKED_AT = 7 };

static double number(const struct array *like, const void *elements, int64_t i)
{
    uint32_t bits;
    float x;

    if (like->type == F32) return (double)((const float *)elements)[i];
    bits = (uint32_t)((const uint16_t *)elements)[i] << 16;
    memcpy(&x, &bits, sizeof x);
    return (double)x;
}

static void *all_of(const struct array *a)
{
    size_t bytes = (size_t)a->count * dtype_size(a->type);
    void *copy = malloc(bytes);

    ck_assert_ptr_nonnull(copy);
    ops->download(device, copy, a->at, bytes);
    return copy;
}

/* want: what the row holds, if g.add; then that and the product. */
static void plain_row(const struct gemm *g, const struct array *a, const void *a_all, const struct array *b,
                      const void *b_all, int64_t batch, int64_t row, double *want)
{
    for (int64_t j = 0; j < g->n; j++) {
        double sum = g->add ? want[j] : 0;

        for (int64_t k = 0; k < g->k; k++) {
            int64_t left = batch * g->stride_a + (g->transpose_a ? k * g->lda + row : row * g->lda + k);
            int64_t right = batch * g->stride_b + (g->transpose_b ? j * g->ldb + k : k * g->ldb + j);

            sum += number(a, a_all, left) * number(b, b_all, right);
        }
        want[j] = sum;
    }
}

static void read_row(const struct gemm *g, const struct array *c, int64_t batch, int64_t row, double *values)
{
    size_t size = dtype_size(c->type);
    char *from = (char *)c->at + (size_t)(batch * g->stride_c + row * g->ldc) * size;
    void *copy = malloc((size_t)g->n * size);

    ck_assert_ptr_nonnull(copy);
    ops->download(device, copy, from, (size_t)g->n * size);
    for (int64_t j = 0; j < g->n; j++) values[j] = number(c, copy, j);
    free(copy);
}

static void check_large(struct gemm g)
{
    struct operands o = operands_of(&g);
    double *want = doubles(LOOKED_AT * g.n), *got = doubles(g.n), largest = 0;
    int64_t row[LOOKED_AT], batch[LOOKED_AT];
    void *a = all_of(o.a), *b = all_of(o.b);

    for (int i = 0; i < LOOKED_AT; i++) {
        row[i] = i == 0 ? g.m - 1 : draw_below(g.m);
        batch[i] = i == 0 ? g.batch - 1 : draw_below(g.batch);
        read_row(&g, o.c, batch[i], row[i], want + i * g.n);
        plain_row(&g, o.a, a, o.b, b, batch[i], row[i], want + i * g.n);
        for (int64_t j = 0; j < g.n; j++) largest = fmax(largest, fabs(want[i * g.n + j]));
    }
    ops->gemm(device, &g, o.a->at, o.b->at, o.c->at);
    device_wait();
    for (int i = 0; i < LOOKED_AT; i++) {
        read_row(&g, o.c, batch[i], row[i], got);
        for (int64_t j = 0; j < g.n; j++)
            ck_assert_msg(fabs(got[j] - want[i * g.n + j]) <= tolerance(g.c_type, g.k) * largest,
                          "row %d of %d, column %d: %.9g, not %.9g", (int)row[i], (int)g.m, (int)j, got[j],
                          want[i * g.n + j]);
    }
    free(a);
    free(b);
}

CASE(gemm, "bf16, large: forward, to rows, to weights, per head")
{
    check_large(linear(8200, 6152, 72));
    check_large(to_rows(linear(8200, 72, 6152)));
    check_large(to_weight(linear(72, 8200, 6152), F32));
    check_large(to_weight(linear(72, 8200, 6152), BF16));
    if (strcmp(ops->name, "cpu") != 0) check_large(to_weight(linear(2056, 8200, 6152), F32)); /* deep: slow there */
    check_large(per_head(2056, 256, 72, 80, 256, 1));
    check_large(per_head(2056, 512, 40, 48, 520, 0));
}

/* ---- benches ---- */

BENCH_FULL(gemm, "o: 8192 x 6144 x 16384", "")
{
    bench_full(linear(8192, 6144, 16384));
}

BENCH_FULL(gemm, "o, to rows", "")
{
    bench_full(to_rows(linear(8192, 6144, 16384)));
}

BENCH_FULL(gemm, "o, to weight, fp32", "")
{
    bench_full(to_weight(linear(8192, 6144, 16384), F32));
}

BENCH_FULL(gemm, "o, to weight, bf16", "")
{
    bench_full(to_weight(linear(8192, 6144, 16384), BF16));
}

BENCH_FULL(gemm, "mlp gate, up: 8192 x 24576 x 6144", "")
{
    bench_full(linear(8192, 24576, 6144));
}

BENCH_FULL(gemm, "mlp gate, up, to rows", "")
{
    bench_full(to_rows(linear(8192, 24576, 6144)));
}

BENCH_FULL(gemm, "mlp gate, up, to weight, fp32", "")
{
    bench_full(to_weight(linear(8192, 24576, 6144), F32));
}

BENCH_FULL(gemm, "mlp gate, up, to weight, bf16", "")
{
    bench_full(to_weight(linear(8192, 24576, 6144), BF16));
}

BENCH_FULL(gemm, "mlp down: 8192 x 6144 x 12288", "")
{
    bench_full(linear(8192, 6144, 12288));
}

BENCH_FULL(gemm, "mlp down, to rows", "")
{
    bench_full(to_rows(linear(8192, 6144, 12288)));
}

BENCH_FULL(gemm, "mlp down, to weight, fp32", "")
{
    bench_full(to_weight(linear(8192, 6144, 12288), F32));
}

BENCH_FULL(gemm, "mlp down, to weight, bf16", "")
{
    bench_full(to_weight(linear(8192, 6144, 12288), BF16));
}

BENCH_FULL(gemm, "q_b: 8192 x 16384 x 2048", "")
{
    bench_full(linear(8192, 16384, 2048));
}

BENCH_FULL(gemm, "q_b, to rows", "")
{
    bench_full(to_rows(linear(8192, 16384, 2048)));
}

BENCH_FULL(gemm, "q_b, to weight, fp32", "")
{
    bench_full(to_weight(linear(8192, 16384, 2048), F32));
}

BENCH_FULL(gemm, "q_b, to weight, bf16", "")
{
    bench_full(to_weight(linear(8192, 16384, 2048), BF16));
}

BENCH_FULL(gemm, "q_a: 8192 x 2048 x 6144", "")
{
    bench_full(linear(8192, 2048, 6144));
}

BENCH_FULL(gemm, "q_a, to rows", "")
{
    bench_full(to_rows(linear(8192, 2048, 6144)));
}

BENCH_FULL(gemm, "q_a, to weight, fp32", "")
{
    bench_full(to_weight(linear(8192, 2048, 6144), F32));
}

BENCH_FULL(gemm, "q_a, to weight, bf16", "")
{
    bench_full(to_weight(linear(8192, 2048, 6144), BF16));
}

BENCH_FULL(gemm, "kv_a: 8192 x 576 x 6144", "")
{
    bench_full(linear(8192, 576, 6144));
}

BENCH_FULL(gemm, "kv_a, to fp32", "")
{
    struct gemm g = linear(8192, 576, 6144);

    g.c_type = F32;
    bench_full(g);
}

BENCH_FULL(gemm, "kv_a, to rows", "")
{
    bench_full(to_rows(linear(8192, 576, 6144)));
}

BENCH_FULL(gemm, "kv_a, to weight, fp32", "")
{
    bench_full(to_weight(linear(8192, 576, 6144), F32));
}

BENCH_FULL(gemm, "kv_a, to weight, bf16", "")
{
    bench_full(to_weight(linear(8192, 576, 6144), BF16));
}

BENCH_FULL(gemm, "shared gate, up: 8192 x 4096 x 6144", "")
{
    bench_full(linear(8192, 4096, 6144));
}

BENCH_FULL(gemm, "shared gate, up, to rows", "")
{
    bench_full(to_rows(linear(8192, 4096, 6144)));
}

BENCH_FULL(gemm, "shared gate, up, to weight, fp32", "")
{
    bench_full(to_weight(linear(8192, 4096, 6144), F32));
}

BENCH_FULL(gemm, "shared gate, up, to weight, bf16", "")
{
    bench_full(to_weight(linear(8192, 4096, 6144), BF16));
}

BENCH_FULL(gemm, "shared down: 8192 x 6144 x 2048", "")
{
    bench_full(linear(8192, 6144, 2048));
}

BENCH_FULL(gemm, "shared down, to rows", "")
{
    bench_full(to_rows(linear(8192, 6144, 2048)));
}

BENCH_FULL(gemm, "shared down, to weight, fp32", "")
{
    bench_full(to_weight(linear(8192, 6144, 2048), F32));
}

BENCH_FULL(gemm, "shared down, to weight, bf16", "")
{
    bench_full(to_weight(linear(8192, 6144, 2048), BF16));
}

/* The router: logits and their gradient are fp32. */
static struct gemm router(int to_rows_, int to_weight_)
{
    struct gemm g = linear(8192, 256, 6144);

    if (to_rows_) g = to_rows(g), g.add = 1;
    if (to_weight_) g = to_weight(g, F32);
    if (to_rows_ || to_weight_)
        g.a_type = F32;
    else
        g.c_type = F32;
    return g;
}

BENCH_FULL(gemm, "router: 8192 x 256 x 6144, to fp32", "")
{
    bench_full(router(0, 0));
}

BENCH_FULL(gemm, "router, fp32 to rows", "")
{
    bench_full(router(1, 0));
}

BENCH_FULL(gemm, "router, fp32 to weight", "")
{
    bench_full(router(0, 1));
}

BENCH_FULL(gemm, "absorb: 64 x 8192 x 512 x 192", "")
{
    bench_full(per_head(8192, 512, 192, 256, 576, 0));
}

BENCH_FULL(gemm, "absorb, to rows", "")
{
    bench_full(per_head(8192, 192, 512, 576, 256, 1));
}

BENCH_FULL(gemm, "absorb, to weight, fp32", "")
{
    bench_full(head_weight(8192, 192, 256, 576, F32));
}

BENCH_FULL(gemm, "unabsorb: 64 x 8192 x 256 x 512", "")
{
    bench_full(per_head(8192, 256, 512, 512, 256, 1));
}

BENCH_FULL(gemm, "unabsorb, to rows", "")
{
    bench_full(per_head(8192, 512, 256, 256, 512, 0));
}

BENCH_FULL(gemm, "unabsorb, to weight, fp32", "")
{
    bench_full(head_weight(8192, 256, 256, 512, F32));
}
