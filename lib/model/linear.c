/* y = x W^T and RMSNorm as the parts use them. */
#include "model/pass.h"

static void product(const struct pass *f, const struct parameter *w, int64_t out, const void *x, const void *from,
                    void *y, glm52_dtype type)
{
    int64_t in = w->shape[1];
    struct gemm g = {.m = f->rows, .n = out, .k = in, .lda = in, .ldb = in, .ldc = out, .batch = 1, .transpose_b = 1,
                     .add = from != NULL, .a_type = w->type, .b_type = w->type, .c_type = type, .from = from};

    f->ops->gemm(f->stream, &g, x, w->value, y);
}

void linear_forward_wide(const struct pass *f, const struct parameter *w, int64_t out, const void *x, const void *from,
                         void *y)
{
    product(f, w, out, x, from, y, w->type);
}

void linear_forward_float(const struct pass *f, const struct parameter *w, const void *x, float *y)
{
    product(f, w, w->shape[0], x, NULL, y, GLM52_DTYPE_F32);
}

static void gradient_wide(const struct pass *f, const struct parameter *w, int64_t out, const void *x, const void *dy)
{
    int64_t in = w->shape[1];
    struct gemm g = {.m = out, .n = in, .k = f->rows, .lda = out, .ldb = in, .ldc = in, .batch = 1, .transpose_a = 1,
                     .a_type = w->type, .b_type = w->type, .c_type = w->gradient_type};

    if (!w->gradient) return;
    g.add = gradient_add(f, w, (int)(out / w->shape[0]));
    f->ops->gemm(f->stream, &g, dy, x, w->gradient);
}

static void rows_wide(const struct pass *f, const struct parameter *w, int64_t out, const void *dy, void *dx, int add)
{
    int64_t in = w->shape[1];
    struct gemm rows = {.m = f->rows, .n = in, .k = out, .lda = out, .ldb = in, .ldc = in, .batch = 1, .add = add,
                        .a_type = w->type, .b_type = w->type, .c_type = w->type};

    f->ops->gemm(f->stream, &rows, dy, w->value, dx);
}

void linear_backward_wide(const struct pass *f, const struct parameter *w, int64_t out, const void *x, const void *dy,
                          void *dx, int add)
{
    rows_wide(f, w, out, dy, dx, add);
    gradient_wide(f, w, out, x, dy);
}

void linear_backward_rows(const struct pass *f, const struct parameter *w, const void *dy, void *dx, int add)
{
    rows_wide(f, w, w->shape[0], dy, dx, add);
}

void linear_gradient(const struct pass *f, const struct parameter *w, const void *x, const void *dy)
{
    gradient_wide(f, w, w->shape[0], x, dy);
}

void linear_forward(const struct pass *f, const struct parameter *w, const void *x, const void *from, void *y)
{
    linear_forward_wide(f, w, w->shape[0], x, from, y);
}

void linear_backward(const struct pass *f, const struct parameter *w, const void *x, const void *dy, void *dx, int add)
{
    linear_backward_wide(f, w, w->shape[0], x, dy, dx, add);
}

static struct norm norm_shape(int64_t rows, const struct parameter *gain, double epsilon, int add)
{
    return (struct norm){.rows = rows, .width = gain->shape[0], .x_stride = gain->shape[0],
                         .y_stride = gain->shape[0], .epsilon = (float)epsilon, .add = add, .type = gain->type};
}

void norm_forward(const struct pass *f, const struct parameter *gain, double epsilon, const void *x,
                  void *y, float *rstd)
{
    struct norm n = norm_shape(f->rows, gain, epsilon, 0);

    f->ops->rmsnorm_forward(f->stream, &n, x, gain->value, y, rstd);
}

void norm_backward(const struct pass *f, const struct parameter *gain, double epsilon, const void *x,
                   const float *rstd, const void *dy, void *dx, int add, void *workspace)
{
    struct norm n = norm_shape(f->rows, gain, epsilon, add);

    f->ops->rmsnorm_backward(f->stream, &n, x, gain->value, rstd, dy, dx, gradient_sum(f, gain), workspace);
}

size_t norm_backward_bytes(struct stream *s, int64_t rows, int64_t width)
{
    struct norm n = {.rows = rows, .width = width, .x_stride = width, .y_stride = width, .type = GLM52_DTYPE_F32};

    return s->ops->norm_backward_bytes(s, &n);
}
