/* The dense products of GLM-5.2 at its full width: forward, to the rows, and to the weights in either type. */
#include "case.h"

static const glm52_dtype F32 = GLM52_DTYPE_F32, BF16 = GLM52_DTYPE_BF16;

/* Elements from the first to the last of `lines` x `length`, once for each head. */
static int64_t extent(int64_t lines, int64_t length, int64_t ld, int64_t batch, int64_t stride)
{
    return (batch - 1) * stride + (lines - 1) * ld + length;
}

static void bench_full(struct gemm g)
{
    int64_t a_lines = g.transpose_a ? g.k : g.m, b_lines = g.transpose_b ? g.n : g.k;
    struct array *a = array_random(g.a_type, extent(a_lines, g.m * g.k / a_lines, g.lda, g.batch, g.stride_a));
    struct array *b = array_random(g.b_type, extent(b_lines, g.n * g.k / b_lines, g.ldb, g.batch, g.stride_b));
    struct array *c = array_random(g.c_type, extent(g.m, g.n, g.ldc, g.batch, g.stride_c));

    BENCH_LOOP
        ops->gemm(device, &g, a->at, b->at, c->at);
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
