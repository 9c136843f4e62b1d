/* Block formats: codes, scales and what they decode to byte for byte, by the operations quantise and dequantise;
 * products of decoded operands within 1e-5 of the product of their magnitudes. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "case.h"
#include "ops/ops.h"

/* How tensors of a case are named after what made them. */
static const struct rule {
    const char *name, *scales;
    int format, e5m2;
} rules[] = {
    {"te_fp32", "scale_inv", FP8_BLOCK, 0}, {"te_pow2", "scale_inv", FP8_BLOCK_POWER, 0},
    {"te", "scale_inv", FP8_BLOCK, 0},      {"ckpt", "scale_inv", FP8_BLOCK_RELEASE, 0},
    {"e4m3_te", "scales", MXFP8, 0},        {"e4m3_ocp", "scales", MXFP8_OCP, 0},
    {"e5m2_te", "scales", MXFP8, 1},        {"e5m2_ocp", "scales", MXFP8_OCP, 1},
};
enum { RULES = sizeof rules / sizeof *rules };

static const double product_tolerance = 1e-5;

/* A matrix in a format, on the host; what was not asked for is NULL. */
struct matrix {
    struct quantised shape;
    unsigned char *codes, *codes_t;
    void *scales, *scales_t;
    float *decoded, *decoded_t; /* [rows,width], [width,rows] */
};

static int64_t blocks(int64_t rows, int64_t width, const struct quantised *q)
{
    return ((rows + q->block_rows - 1) / q->block_rows) * ((width + q->block_columns - 1) / q->block_columns);
}

static size_t scale_size(const struct quantised *q)
{
    return q->format >= MXFP8 ? 1 : sizeof(float);
}

static float *decode(struct stream *s, const struct quantised *q, const void *codes, const void *scales)
{
    struct mirror m = {.s = s};
    const size_t count = (size_t)(q->rows * q->width);
    struct quantised wide = *q;
    float *y = must_allocate(count, sizeof *y);

    wide.type = GLM52_DTYPE_F32;
    s->ops->dequantise(s, &wide, NULL, on_device(&m, codes, count),
                       on_device(&m, scales, (size_t)blocks(q->rows, q->width, q) * scale_size(q)),
                       on_device(&m, y, count * sizeof *y));
    back_from_device(&m);
    return y;
}

/* Quantises and decodes x of the shape's type, and x^T if wanted. */
static struct matrix matrix_make(struct stream *s, struct quantised q, const void *x, int transposed_too)
{
    const size_t count = (size_t)(q.rows * q.width), scales = (size_t)blocks(q.rows, q.width, &q) * scale_size(&q);
    const size_t scales_t = (size_t)blocks(q.width, q.rows, &q) * scale_size(&q);
    struct matrix a = {.shape = q, .codes = must_allocate(count, 1), .scales = must_allocate(scales, 1)};
    struct mirror m = {.s = s};

    if (transposed_too) {
        a.codes_t = must_allocate(count, 1);
        a.scales_t = must_allocate(scales_t, 1);
    }
    s->ops->quantise(s, &q, NULL, on_device(&m, x, count * dtype_size(q.type)), on_device(&m, a.codes, count),
                     on_device(&m, a.scales, scales), transposed_too ? on_device(&m, a.codes_t, count) : NULL,
                     transposed_too ? on_device(&m, a.scales_t, scales_t) : NULL);
    back_from_device(&m);
    a.decoded = decode(s, &q, a.codes, a.scales);
    if (transposed_too) {
        struct quantised t = q;

        t.rows = q.width;
        t.width = q.rows;
        a.decoded_t = decode(s, &t, a.codes_t, a.scales_t);
    }
    return a;
}

static void matrix_free(struct matrix *a)
{
    free(a->codes);
    free(a->codes_t);
    free(a->scales);
    free(a->scales_t);
    free(a->decoded);
    free(a->decoded_t);
}

/* The tensor of that name quantised as it is stored, bf16 or fp32; 1, or 0 with the failure reported. */
static int matrix_of(struct golden_case *c, struct stream *s, const char *name, struct quantised q, int transposed_too,
                     struct matrix *out)
{
    const struct safetensor *t = safetensors_find(&c->file, name);
    struct array x;

    if (!case_array(c, name, &x)) return 0;
    float *wide = array_floats(&x);
    uint16_t *half = must_allocate((size_t)x.count, sizeof *half);

    for (int64_t i = 0; i < x.count; i++) half[i] = f32_to_bf16(wide[i]);
    q.type = t->dtype == GLM52_DTYPE_BF16 ? GLM52_DTYPE_BF16 : GLM52_DTYPE_F32;
    q.rows = x.shape[0];
    q.width = x.dimensions > 1 ? x.shape[1] : 1;
    *out = matrix_make(s, q, q.type == GLM52_DTYPE_BF16 ? (void *)half : (void *)wide, transposed_too);
    free(wide);
    free(half);
    array_free(&x);
    return 1;
}

/* ---- comparing, to the byte ---- */

static void compare_bytes(struct golden_case *c, const char *name, const unsigned char *got, int64_t count)
{
    int64_t *wide = must_allocate((size_t)count, sizeof *wide);

    for (int64_t i = 0; i < count; i++) wide[i] = got[i];
    compare_integers(c, name, name, wide, count);
    free(wide);
}

static void compare_exact(struct golden_case *c, const char *name, const float *got, int64_t count)
{
    double *wide = must_allocate((size_t)count, sizeof *wide);

    for (int64_t i = 0; i < count; i++) wide[i] = (double)got[i];
    compare_within(c, name, wide, count, 0);
    free(wide);
}

static void compare_scales(struct golden_case *c, const char *name, const struct matrix *a)
{
    const int64_t count = blocks(a->shape.rows, a->shape.width, &a->shape);

    if (a->shape.format >= MXFP8)
        compare_bytes(c, name, a->scales, count);
    else
        compare_exact(c, name, a->scales, count);
}

/* {name}.x by every rule that the case has codes of. */
static void check_case(struct golden_case *c, struct stream *s, const char *name, int64_t block_rows,
                       int64_t block_columns)
{
    for (int i = 0; i < RULES; i++) {
        const struct rule *r = &rules[i];
        char x[300], tensor[300];
        struct matrix a;

        snprintf(x, sizeof x, "%s.x", name);
        snprintf(tensor, sizeof tensor, "%s.%s_codes", name, r->name);
        if (!case_has(c, tensor)) continue;
        if (!matrix_of(c, s, x, (struct quantised){.block_rows = block_rows, .block_columns = block_columns,
                       .format = r->format, .e5m2 = r->e5m2}, 0, &a))
            return;
        compare_bytes(c, tensor, a.codes, a.shape.rows * a.shape.width);
        snprintf(tensor, sizeof tensor, "%s.%s_%s", name, r->name, r->scales);
        compare_scales(c, tensor, &a);
        snprintf(tensor, sizeof tensor, "%s.%s_decoded", name, r->name);
        if (case_has(c, tensor)) compare_exact(c, tensor, a.decoded, a.shape.rows * a.shape.width);
        matrix_free(&a);
    }
}

/* ---- products ---- */

/* a [m,k], b [n,k]: a b^T by the operation gemm, and by magnitudes. */
static void multiply(struct stream *s, const float *a, const float *b, int64_t m, int64_t n, int64_t k, double *y,
                     double *bound)
{
    struct gemm g = {.m = m, .n = n, .k = k, .lda = k, .ldb = k, .ldc = n, .batch = 1, .transpose_b = 1,
                     .a_type = GLM52_DTYPE_F32, .b_type = GLM52_DTYPE_F32, .c_type = GLM52_DTYPE_F32};
    float *out = must_allocate((size_t)(m * n), sizeof *out);
    struct mirror on = {.s = s};

    s->ops->gemm(s, &g, on_device(&on, a, (size_t)(m * k) * sizeof *a), on_device(&on, b, (size_t)(n * k) * sizeof *b),
                 on_device(&on, out, (size_t)(m * n) * sizeof *out));
    back_from_device(&on);
    for (int64_t i = 0; i < m * n; i++) {
        const float *row = a + i / n * k, *column = b + i % n * k;

        y[i] = (double)out[i];
        bound[i] = 0;
        for (int64_t l = 0; l < k; l++) bound[i] += product_tolerance * fabs((double)row[l] * (double)column[l]);
    }
    free(out);
}

static float *transpose(const float *x, int64_t rows, int64_t width)
{
    float *y = must_allocate((size_t)(rows * width), sizeof *y);

    for (int64_t i = 0; i < rows * width; i++) y[i % width * rows + i / width] = x[i];
    return y;
}

/* Compares a b^T, or the rows of it that the sidecar lists. */
static void check_product(struct golden_case *c, struct stream *s, const char *name, const float *a, const float *b,
                          int64_t m, int64_t n, int64_t k)
{
    const json_t *rows = json_object_get(json_object_get(json_object_get(c->sidecar, "cases"), "gemm"), "rows");
    double *y = must_allocate((size_t)(m * n), sizeof *y), *bound = must_allocate((size_t)(m * n), sizeof *bound);
    int64_t kept = rows ? (int64_t)json_array_size(rows) : m;

    multiply(s, a, b, m, n, k, y, bound);
    for (int64_t i = 0; rows && i < kept; i++) {
        int64_t row = json_integer_value(json_array_get(rows, (size_t)i));

        if (row < i || row >= m) {
            case_fail(c, "gemm.rows must be ascending and below %lld", (long long)m);
            kept = 0;
            break;
        }
        for (int64_t j = 0; j < n; j++) {
            y[i * n + j] = y[row * n + j];
            bound[i * n + j] = bound[row * n + j];
        }
    }
    compare_bounded(c, name, y, bound, kept * n);
    free(y);
    free(bound);
}

/* y = x w^T, dx = dy w, dw = dy^T x; x and dy in `row` blocks and transposed, w in `weight` blocks. */
static void check_block_products(struct golden_case *c, struct stream *s, const char *suffix, int format)
{
    const struct quantised row = {.block_rows = 1, .block_columns = 128, .format = format};
    const struct quantised tile = {.block_rows = 128, .block_columns = 128, .format = format};
    struct matrix x = {0}, w = {0}, dy = {0};
    char name[64];

    if (matrix_of(c, s, "gemm.x", row, 1, &x) & matrix_of(c, s, "gemm.w", tile, 1, &w) &
        matrix_of(c, s, "gemm.dy", row, 1, &dy)) {
        const int64_t m = x.shape.rows, k = x.shape.width, n = w.shape.rows;

        snprintf(name, sizeof name, "gemm.y_%s_rows", suffix);
        check_product(c, s, name, x.decoded, w.decoded, m, n, k);
        snprintf(name, sizeof name, "gemm.dx_%s_rows", suffix);
        check_product(c, s, name, dy.decoded, w.decoded_t, m, k, n);
        snprintf(name, sizeof name, "gemm.dw_%s_rows", suffix);
        check_product(c, s, name, dy.decoded_t, x.decoded_t, n, k, m);
    }
    matrix_free(&x);
    matrix_free(&w);
    matrix_free(&dy);
}

/* Scales of single magnitudes: the case has 1 / scale. */
static void check_scales(struct golden_case *c, struct stream *s, const char *name, int format, int e5m2)
{
    struct array wanted;
    struct matrix a;

    if (!matrix_of(c, s, "scale.amax",
                   (struct quantised){.block_rows = 1, .block_columns = 128, .format = format, .e5m2 = e5m2}, 0, &a))
        return;
    if (case_array(c, name, &wanted)) {
        double *off = must_allocate((size_t)wanted.count, sizeof *off);

        for (int64_t i = 0; i < wanted.count && i < a.shape.rows; i++)
            off[i] = (double)((float *)a.scales)[i] - (double)(1.0f / (float)wanted.value[i]);
        compare_zero(c, name, off, wanted.count);
        free(off);
        array_free(&wanted);
    }
    matrix_free(&a);
}

void run_fp8_block(struct golden_case *c)
{
    struct stream s;

    if (!case_stream(c, &s)) return;
    check_case(c, &s, "w", 128, 128);
    check_case(c, &s, "act", 1, 128);
    check_case(c, &s, "order_sensitive", 1, 128);
    check_scales(c, &s, "scale.te_fp32", FP8_BLOCK, 0);
    check_scales(c, &s, "scale.te_pow2", FP8_BLOCK_POWER, 0);
    check_scales(c, &s, "scale.te_fp32_e5m2", FP8_BLOCK, 1);
    check_block_products(c, &s, "fp32", FP8_BLOCK);
    check_block_products(c, &s, "pow2", FP8_BLOCK_POWER);
    stream_close(&s);
    case_check_used(c, 1);
}

/* Copies of one tensor in blocks along rows and along columns. */
static int mx_copies(struct golden_case *c, struct stream *s, const char *name, struct matrix *row,
                     struct matrix *column)
{
    static const char *const parts[] = {"row", "col"};
    struct matrix *copy[] = {row, column};
    char tensor[64];

    for (int i = 0; i < 2; i++) {
        snprintf(tensor, sizeof tensor, "gemm.%s", name);
        if (!matrix_of(c, s, tensor,
                       (struct quantised){.block_rows = i ? 32 : 1, .block_columns = i ? 1 : 32, .format = MXFP8}, 0,
                       copy[i]))
            return 0;
        snprintf(tensor, sizeof tensor, "gemm.%s_%s_codes", name, parts[i]);
        compare_bytes(c, tensor, copy[i]->codes, copy[i]->shape.rows * copy[i]->shape.width);
        snprintf(tensor, sizeof tensor, "gemm.%s_%s_scales", name, parts[i]);
        compare_scales(c, tensor, copy[i]);
    }
    return 1;
}

static void check_mx_products(struct golden_case *c, struct stream *s)
{
    const struct quantised wide = {.block_rows = 1, .block_columns = 32, .format = MXFP8, .e5m2 = 1};
    struct matrix a[7] = {{.codes = NULL}};
    struct matrix *x = a, *x_col = a + 1, *w = a + 2, *w_col = a + 3, *dy = a + 4, *dy_col = a + 5;

    if (mx_copies(c, s, "x", x, x_col) & mx_copies(c, s, "w", w, w_col) & mx_copies(c, s, "dy", dy, dy_col) &
        matrix_of(c, s, "gemm.dy", wide, 0, a + 6)) {
        const int64_t m = x->shape.rows, k = x->shape.width, n = w->shape.rows;
        float *w_t = transpose(w_col->decoded, n, k), *x_t = transpose(x_col->decoded, m, k);
        float *dy_t = transpose(dy_col->decoded, m, n);

        check_product(c, s, "gemm.y", x->decoded, w->decoded, m, n, k);
        check_product(c, s, "gemm.dx", dy->decoded, w_t, m, k, n);
        check_product(c, s, "gemm.dw", dy_t, x_t, n, k, m);
        check_product(c, s, "gemm.dx_dy_e5m2", a[6].decoded, w_t, m, k, n);
        free(w_t);
        free(x_t);
        free(dy_t);
    }
    for (int i = 0; i < 7; i++) matrix_free(&a[i]);
}

/* Scales of single magnitudes, by the tensors {name}.amax and {name}.{rule}. */
static void check_mx_scales(struct golden_case *c, struct stream *s, const char *name)
{
    for (int i = 0; i < RULES; i++) {
        char amax[64], tensor[64];
        struct matrix a;

        snprintf(amax, sizeof amax, "%s.amax", name);
        snprintf(tensor, sizeof tensor, "%s.%s", name, rules[i].name);
        if (!case_has(c, tensor) || !matrix_of(c, s, amax, (struct quantised){.block_rows = 1, .block_columns = 32,
                                               .format = rules[i].format, .e5m2 = rules[i].e5m2}, 0, &a))
            continue;
        compare_scales(c, tensor, &a);
        matrix_free(&a);
    }
}

void run_mxfp8(struct golden_case *c)
{
    const char *name;
    struct stream s;
    json_t *unused;

    if (!case_stream(c, &s)) return;
    check_mx_scales(c, &s, "scale");
    check_mx_scales(c, &s, "scale_special");
    json_object_foreach(json_object_get(c->sidecar, "cases"), name, unused) {
        const int down = !strcmp(name, "colwise");

        check_case(c, &s, name, down ? 32 : 1, down ? 1 : 32);
    }
    check_mx_products(c, &s);
    stream_close(&s);
    case_check_used(c, 1);
}
