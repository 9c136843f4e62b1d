/* Sparse MLA attention, forward and backward. */
#include "case.h"

struct problem {
    struct sparse_mla shape;
    struct array *q, *kv, *selected, *dout;
};

static int64_t width(const struct problem *p)
{
    return p->shape.kv_rank + p->shape.rope;
}

/* `count` different keys out of `keys`, ascending, then -1. */
static void draw_keys(double *selected, int32_t k, int64_t count, int64_t keys)
{
    int64_t n = 0;

    for (int64_t u = 0; u < keys && n < count; u++)
        if (draw_below(keys - u) < count - n)
            selected[n++] = (double)u;
    for (; n < k; n++)
        selected[n] = -1;
}

/* Rows have no key, one, all that fit, or some. With all = 1 every row has as many as fit. */
static struct problem problem(struct sparse_mla shape, int all)
{
    struct problem p = {.shape = shape};
    int64_t most = shape.keys < shape.k ? shape.keys : shape.k;

    p.shape.scale = 0.35f;
    p.q = array_normal(shape.type, shape.rows * shape.heads * width(&p), 1);
    p.kv = array_normal(shape.type, shape.keys * width(&p), 1);
    p.dout = array_normal(shape.type, shape.rows * shape.heads * shape.kv_rank, 1);
    p.selected = array_zero(GLM52_DTYPE_I32, shape.rows * shape.k);
    for (int64_t t = 0; t < shape.rows; t++) {
        int64_t count = all || t % 4 == 0 ? most : t % 4 == 1 ? 0 : t % 4 == 2 ? 1 : draw_below(most + 1);

        draw_keys(p.selected->value + t * shape.k, shape.k, count, shape.keys);
        p.shape.pairs += (double)count;
    }
    array_push(p.selected);
    return p;
}

/* ---- the plain loop ---- */

/* Probabilities and output of one row and head; returns lse. */
static double plain_attend(const struct problem *p, int64_t t, int64_t h, double *probability, double *out)
{
    const struct sparse_mla *a = &p->shape;
    const double *q = p->q->value + (t * a->heads + h) * width(p), *selected = p->selected->value + t * a->k;
    double largest = -INFINITY, sum = 0;

    for (int64_t c = 0; c < a->kv_rank; c++)
        out[c] = 0;
    for (int64_t j = 0; j < a->k; j++) {
        const double *key = p->kv->value + (int64_t)selected[j] * width(p);

        probability[j] = selected[j] < 0 ? -INFINITY : 0;
        for (int64_t c = 0; selected[j] >= 0 && c < width(p); c++)
            probability[j] += (double)a->scale * q[c] * key[c];
        largest = fmax(largest, probability[j]);
    }
    if (largest == -INFINITY)
        return INFINITY;
    for (int64_t j = 0; j < a->k; j++)
        sum += probability[j] = exp(probability[j] - largest);
    for (int64_t j = 0; j < a->k; j++) {
        probability[j] /= sum;
        for (int64_t c = 0; selected[j] >= 0 && c < a->kv_rank; c++)
            out[c] += probability[j] * p->kv->value[(int64_t)selected[j] * width(p) + c];
    }
    return largest + log(sum);
}

struct wanted {
    double *out, *lse, *target;
};

static struct wanted plain_forward(const struct problem *p)
{
    const struct sparse_mla *a = &p->shape;
    struct wanted w = {doubles(a->rows * a->heads * a->kv_rank), doubles(a->rows * a->heads), doubles(a->rows * a->k)};
    double *probability = doubles(a->k);

    for (int64_t t = 0; t < a->rows; t++)
        for (int64_t h = 0; h < a->heads; h++) {
            int64_t i = t * a->heads + h;

            w.lse[i] = plain_attend(p, t, h, probability, w.out + i * a->kv_rank);
            for (int64_t j = 0; j < a->k && w.lse[i] != INFINITY; j++)
                w.target[t * a->k + j] += probability[j] / a->heads;
        }
    return w;
}

/* sum of out * dout, of which the gradients are taken. */
static double objective(void *argument)
{
    static double probability[64], out[64];
    const struct problem *p = argument;
    const struct sparse_mla *a = &p->shape;
    double sum = 0;

    for (int64_t t = 0; t < a->rows; t++)
        for (int64_t h = 0; h < a->heads; h++) {
            plain_attend(p, t, h, probability, out);
            for (int64_t c = 0; c < a->kv_rank; c++)
                sum += out[c] * p->dout->value[(t * a->heads + h) * a->kv_rank + c];
        }
    return sum;
}

/* ---- checks ---- */

struct results {
    struct array *out, *lse, *dq, *dkv, *target, *alone; /* alone: the target by the operation of its own */
};

static struct results outputs(const struct problem *p)
{
    const struct sparse_mla *a = &p->shape;

    return (struct results){array_output(a->type, a->rows * a->heads * a->kv_rank),
                            array_output(GLM52_DTYPE_F32, a->rows * a->heads),
                            array_output(a->type, a->rows * a->heads * width(p)),
                            array_output(GLM52_DTYPE_F32, a->keys * width(p)),
                            array_output(GLM52_DTYPE_F32, a->rows * a->k),
                            array_output(GLM52_DTYPE_F32, a->rows * a->k)};
}

static void forward(const struct problem *p, const struct results *r, void *workspace)
{
    ops->sparse_mla_forward(device, &p->shape, p->q->at, p->kv->at, p->selected->at, r->out->at, r->lse->at, workspace);
}

static void backward(const struct problem *p, const struct results *r, float *target, void *workspace)
{
    ops->sparse_mla_backward(device, &p->shape, p->q->at, p->kv->at, p->selected->at, r->out->at, r->lse->at,
                             p->dout->at, r->dq->at, r->dkv->at, target, workspace);
}

static void target(const struct problem *p, const struct results *r, void *workspace)
{
    ops->sparse_mla_target(device, &p->shape, p->q->at, p->kv->at, p->selected->at, r->lse->at, r->alone->at,
                           workspace);
}

/* Runs with 1, 2 and 3 threads, which must agree to the bit. */
static struct results run(const struct problem *p)
{
    struct results r = outputs(p);

    for (int threads = 1; threads <= 3; threads++) {
        struct array *forward_space, *backward_space, *target_space;

        device_threads(threads);
        forward_space = array_workspace(ops->sparse_mla_forward_bytes(device, &p->shape));
        backward_space = array_workspace(ops->sparse_mla_backward_bytes(device, &p->shape));
        target_space = array_workspace(ops->sparse_mla_target_bytes(device, &p->shape));
        forward(p, &r, forward_space->at);
        check_same(r.out);
        check_same(r.lse);
        backward(p, &r, threads == 2 ? NULL : r.target->at, backward_space->at);
        check_same(r.dq);
        check_same(r.dkv);
        check_same(r.target);
        target(p, &r, target_space->at);
        check_same(r.alone);
        array_fetch(forward_space);
        array_fetch(backward_space);
        array_fetch(target_space);
    }
    return r;
}

/* The gradient of a softmax is a difference of sums of about the largest terms; and the output it starts from was
 * rounded to the type. */
static double gradient_tolerance(const struct problem *p)
{
    return 4 * tolerance(p->shape.type, p->shape.k + width(p));
}

/* Either target; the one of its own also with an lse that is off, which it takes as it is. */
static void check_targets(const struct problem *p, const struct results *r, const double *want)
{
    double within = tolerance(GLM52_DTYPE_F32, p->shape.k + width(p)), *shifted = doubles(r->alone->count);

    check_close(r->target, want, within);
    check_close(r->alone, want, within);
    check_close(r->alone, r->target->value, within);
    array_fetch(r->lse);
    for (int64_t i = 0; i < r->lse->count; i++)
        r->lse->value[i] -= 0.5;
    array_push(r->lse);
    for (int64_t i = 0; i < r->alone->count; i++)
        shifted[i] = want[i] * exp(0.5);
    array_poison(r->alone);
    target(p, r, array_workspace(ops->sparse_mla_target_bytes(device, &p->shape))->at);
    check_close(r->alone, shifted, within);
}

static void check(struct problem p)
{
    struct results r = run(&p);
    struct wanted want = plain_forward(&p);
    double *dq = doubles(p.q->count), *dkv = doubles(p.kv->count);

    check_close(r.out, want.out, tolerance(p.shape.type, p.shape.k + width(&p)));
    check_close(r.lse, want.lse, tolerance(GLM52_DTYPE_F32, width(&p)));
    check_targets(&p, &r, want.target);
    differences(objective, &p, p.q->value, p.q->count, dq);
    differences(objective, &p, p.kv->value, p.kv->count, dkv);
    check_close(r.dq, dq, gradient_tolerance(&p));
    check_close(r.dkv, dkv, gradient_tolerance(&p));
}

CASE(sparse_mla, "rows with no key, one key and fewer than k, odd dimensions")
{
    check(problem((struct sparse_mla){.rows = 37, .keys = 29, .heads = 3, .kv_rank = 20, .rope = 6, .k = 9,
                                      .type = GLM52_DTYPE_F32}, 0));
}

CASE(sparse_mla, "whole vectors, more keys than one trip of the kernel")
{
    check(problem((struct sparse_mla){.rows = 9, .keys = 41, .heads = 8, .kv_rank = 24, .rope = 8, .k = 30,
                                      .type = GLM52_DTYPE_F32}, 0));
}

CASE(sparse_mla, "heads of two and of three vectors")
{
    check(problem((struct sparse_mla){.rows = 5, .keys = 17, .heads = 11, .kv_rank = 9, .rope = 2, .k = 13,
                                      .type = GLM52_DTYPE_F32}, 0));
    check(problem((struct sparse_mla){.rows = 5, .keys = 15, .heads = 19, .kv_rank = 7, .rope = 4, .k = 14,
                                      .type = GLM52_DTYPE_F32}, 0));
}

CASE(sparse_mla, "k larger than the keys")
{
    check(problem((struct sparse_mla){.rows = 7, .keys = 5, .heads = 2, .kv_rank = 49, .rope = 10, .k = 21,
                                      .type = GLM52_DTYPE_F32}, 0));
}

CASE(sparse_mla, "bf16")
{
    check(problem((struct sparse_mla){.rows = 13, .keys = 19, .heads = 5, .kv_rank = 16, .rope = 4, .k = 8,
                                      .type = GLM52_DTYPE_BF16}, 0));
}

CASE(sparse_mla, "no rows: dkv is zero all the same")
{
    check(problem((struct sparse_mla){.rows = 0, .keys = 7, .heads = 3, .kv_rank = 5, .rope = 2, .k = 4,
                                      .type = GLM52_DTYPE_F32}, 0));
}

/* Too large for finite differences: gradients are checked for their bits alone. The scale keeps probabilities apart. */
static void check_widths(int64_t rows, int64_t keys, int32_t heads, int32_t k)
{
    struct problem p = problem((struct sparse_mla){.rows = rows, .keys = keys, .heads = heads, .kv_rank = 512,
                                                   .rope = 64, .k = k, .type = GLM52_DTYPE_BF16},
                               0);
    struct results r;
    struct wanted want;

    p.shape.scale = 0.0625f;
    r = run(&p);
    want = plain_forward(&p);
    check_close(r.out, want.out, tolerance(p.shape.type, p.shape.k + width(&p)));
    check_close(r.lse, want.lse, tolerance(GLM52_DTYPE_F32, width(&p)));
    check_targets(&p, &r, want.target);
}

CASE(sparse_mla, "bf16, the widths of GLM-5.2")
{
    check_widths(13, 190, 64, 150);
}

CASE(sparse_mla, "bf16, the widths of GLM-5.2, few heads and more rows than multiprocessors")
{
    check_widths(301, 140, 3, 133);
}

/* More rows than a chunk and more keys than a tile: that the sum of the values' gradients is the sum of dout, since the
 * probabilities of a head sum to 1, and that thread counts agree. */
CASE(sparse_mla, "several chunks of rows and tiles of keys")
{
    struct problem p = problem((struct sparse_mla){.rows = 301, .keys = 331, .heads = 3, .kv_rank = 12, .rope = 0,
                                                   .k = 50, .type = GLM52_DTYPE_F32}, 1);
    double *zero = doubles(p.q->count), got[12] = {0}, want[12] = {0};
    struct results r;

    p.q = array_from(GLM52_DTYPE_F32, p.q->count, zero); /* so that the keys have no gradient as keys */
    r = run(&p);
    array_fetch(r.dkv);
    for (int64_t i = 0; i < p.dout->count; i++)
        want[i % 12] += p.dout->value[i];
    for (int64_t i = 0; i < r.dkv->count; i++)
        got[i % 12] += r.dkv->value[i];
    for (int c = 0; c < 12; c++)
        ck_assert_double_eq_tol(got[c], want[c], 1e-4);
}

/* Logits far beyond what exp could take without its maximum. */
CASE(sparse_mla, "logits of several hundreds")
{
    struct problem p = problem((struct sparse_mla){.rows = 6, .keys = 11, .heads = 3, .kv_rank = 13, .rope = 3, .k = 7,
                                                   .type = GLM52_DTYPE_F32}, 0);
    struct results r;
    struct wanted want;

    for (int64_t i = 0; i < p.q->count; i++)
        p.q->value[i] *= 200;
    array_push(p.q);
    r = run(&p);
    want = plain_forward(&p);
    check_close(r.out, want.out, 1e-3); /* a logit of 1000 is known to 2^-14 */
    check_close(r.lse, want.lse, tolerance(GLM52_DTYPE_F32, width(&p)));
}

/* ---- benches ---- */

static struct problem bench_problem(struct sparse_mla shape)
{
    struct problem p = problem(shape, 1);

    /* Causal: row t selects from keys 0 .. t. */
    p.shape.pairs = 0;
    for (int64_t t = 0; t < shape.rows; t++) {
        int64_t count = t + 1 < shape.k ? t + 1 : shape.k;

        draw_keys(p.selected->value + t * shape.k, shape.k, count, t + 1);
        p.shape.pairs += (double)count;
    }
    array_push(p.selected);
    return p;
}

static void bench_forward(struct sparse_mla shape)
{
    struct problem p = bench_problem(shape);
    struct results r = outputs(&p);
    struct array *workspace = array_workspace(ops->sparse_mla_forward_bytes(device, &shape));

    BENCH_LOOP
        forward(&p, &r, workspace->at);
    bench_rate(2 * p.shape.pairs * shape.heads * (2 * shape.kv_rank + shape.rope), 0);
}

static void bench_backward(struct sparse_mla shape)
{
    struct problem p = bench_problem(shape);
    struct results r = outputs(&p);
    struct array *workspace = array_workspace(ops->sparse_mla_backward_bytes(device, &shape));

    forward(&p, &r, array_workspace(ops->sparse_mla_forward_bytes(device, &shape))->at);
    BENCH_LOOP
        backward(&p, &r, NULL, workspace->at);
    bench_rate(2 * p.shape.pairs * shape.heads * (3 * (shape.kv_rank + shape.rope) + 2 * shape.kv_rank), 0);
}

static const struct sparse_mla preset = {.rows = 4096, .keys = 4096, .heads = 8, .kv_rank = 128, .rope = 16, .k = 256,
                                         .type = GLM52_DTYPE_F32};
static const struct sparse_mla tiny = {.rows = 2048, .keys = 2048, .heads = 4, .kv_rank = 64, .rope = 16, .k = 128,
                                       .type = GLM52_DTYPE_F32};
static const struct sparse_mla full = {.rows = 128, .keys = 4096, .heads = 64, .kv_rank = 512, .rope = 64, .k = 2048,
                                       .type = GLM52_DTYPE_BF16};

BENCH(sparse_mla_forward, "4096 x 8 heads, 144/128, top-k 256")
{
    bench_forward(preset);
}

BENCH(sparse_mla_backward, "4096 x 8 heads, 144/128, top-k 256")
{
    bench_backward(preset);
}

static void bench_target(struct sparse_mla shape)
{
    struct problem p = bench_problem(shape);
    struct results r = outputs(&p);
    struct array *workspace = array_workspace(ops->sparse_mla_target_bytes(device, &shape));

    forward(&p, &r, array_workspace(ops->sparse_mla_forward_bytes(device, &shape))->at);
    BENCH_LOOP
        target(&p, &r, workspace->at);
    bench_rate(2 * p.shape.pairs * shape.heads * (shape.kv_rank + shape.rope), 0);
}

BENCH(sparse_mla_target, "4096 x 8 heads, 144/128, top-k 256")
{
    bench_target(preset);
}

BENCH(sparse_mla_forward, "2048 x 4 heads, 80/64, top-k 128")
{
    bench_forward(tiny);
}

BENCH(sparse_mla_backward, "2048 x 4 heads, 80/64, top-k 128")
{
    bench_backward(tiny);
}

BENCH(sparse_mla_forward, "128 x 64 heads, 576/512, bf16, up to 128 keys")
{
    bench_forward(full);
}

BENCH(sparse_mla_backward, "128 x 64 heads, 576/512, bf16, up to 128 keys")
{
    bench_backward(full);
}

/* Rows of k different keys, ascending: one by chance of each k-th of the whole set; or, causal, of the keys up to the
 * row's own, all of them and then -1 where they are fewer than k. *pairs: how many keys in all. */
static struct array *spaced_keys(int64_t keys, int32_t k, int causal, double *pairs)
{
    enum { PATTERNS = 256 }; /* rows that differ, where each may see all keys */
    struct array *selected = array_zero(GLM52_DTYPE_I32, keys * k);

    *pairs = 0;
    for (int64_t row = 0; row < keys; row++) {
        double *to = selected->value + row * k;
        int64_t seen = causal ? row + 1 : keys, n = seen < k ? seen : k;

        *pairs += (double)n;
        if (!causal && row >= PATTERNS) {
            memcpy(to, to - (int64_t)PATTERNS * k, (size_t)k * sizeof *to);
            continue;
        }
        for (int64_t i = 0; i < k; i++) {
            int64_t first = i * seen / n;

            to[i] = i < n ? (double)(first + draw_below((i + 1) * seen / n - first)) : -1;
        }
    }
    array_push(selected);
    return selected;
}

/* what: 0 forward, 1 backward, 2 backward with the indexer's target, 3 the target alone. */
static void bench_full(int what, int64_t keys, int32_t fast, int causal)
{
    const glm52_dtype type = GLM52_DTYPE_BF16;
    const int gradients = what == 1 || what == 2;
    struct sparse_mla shape = {.rows = keys, .keys = keys, .heads = 64, .kv_rank = 512, .rope = 64, .k = 2048,
                               .scale = 0.0625f, .fast = fast, .type = type};
    struct array *selected = spaced_keys(keys, shape.k, causal, &shape.pairs);
    struct array *q = array_random(type, keys * 64 * 576), *dq = array_random(type, gradients ? keys * 64 * 576 : 0);
    struct array *kv = array_random(type, keys * 576), *dkv = array_random(GLM52_DTYPE_F32, keys * 576);
    struct array *out = array_random(type, keys * 64 * 512),
                 *dout = array_random(type, gradients ? keys * 64 * 512 : 0);
    struct array *lse = array_random(GLM52_DTYPE_F32, keys * 64);
    struct array *target = array_random(GLM52_DTYPE_F32, what >= 2 ? keys * shape.k : 0);
    size_t forward_bytes = ops->sparse_mla_forward_bytes(device, &shape);
    size_t backward_bytes = ops->sparse_mla_backward_bytes(device, &shape);
    size_t most = forward_bytes > backward_bytes ? forward_bytes : backward_bytes;
    size_t target_bytes = ops->sparse_mla_target_bytes(device, &shape);
    struct array *workspace = array_workspace(most > target_bytes ? most : target_bytes);

    ops->sparse_mla_forward(device, &shape, q->at, kv->at, selected->at, out->at, lse->at, workspace->at);
    BENCH_LOOP {
        if (what == 3)
            ops->sparse_mla_target(device, &shape, q->at, kv->at, selected->at, lse->at, target->at, workspace->at);
        else if (what)
            ops->sparse_mla_backward(device, &shape, q->at, kv->at, selected->at, out->at, lse->at, dout->at, dq->at,
                                     dkv->at, what == 2 ? target->at : NULL, workspace->at);
        else
            ops->sparse_mla_forward(device, &shape, q->at, kv->at, selected->at, out->at, lse->at, workspace->at);
    }
    bench_counted();
}

BENCH_FULL(sparse_mla_forward, "4096 rows and keys, top-k 2048", "FlashMLA 671, sustained 566")
{
    bench_full(0, 4096, 0, 0);
}

BENCH_FULL(sparse_mla_forward, "8192 rows and keys, top-k 2048", "FlashMLA 600, sustained 561")
{
    bench_full(0, 8192, 0, 0);
}

BENCH_FULL(sparse_mla_forward, "4096, causal: rows of fewer keys", "")
{
    bench_full(0, 4096, 0, 1);
}

BENCH_FULL(sparse_mla_forward, "32768 rows and keys, top-k 2048", "")
{
    bench_full(0, 32768, 0, 0);
}

BENCH_FULL(sparse_mla_backward, "4096 rows and keys, fast", "cuDNN 370 (published)")
{
    bench_full(1, 4096, 1, 0);
}

BENCH_FULL(sparse_mla_backward, "4096 rows and keys, fast, with target", "")
{
    bench_full(2, 4096, 1, 0);
}

BENCH_FULL(sparse_mla_backward, "4096 rows and keys, deterministic", "")
{
    bench_full(1, 4096, 0, 0);
}

BENCH_FULL(sparse_mla_backward, "4096, causal: rows of fewer keys, fast", "")
{
    bench_full(1, 4096, 1, 1);
}

BENCH_FULL(sparse_mla_backward, "8192 rows and keys, fast", "")
{
    bench_full(1, 8192, 1, 0);
}

BENCH_FULL(sparse_mla_backward, "8192 rows and keys, fast, with target", "")
{
    bench_full(2, 8192, 1, 0);
}

BENCH_FULL(sparse_mla_backward, "8192 rows and keys, deterministic", "")
{
    bench_full(1, 8192, 0, 0);
}

BENCH_FULL(sparse_mla_backward, "32768 rows and keys, fast", "")
{
    bench_full(1, 32768, 1, 0);
}

BENCH_FULL(sparse_mla_backward, "32768 rows and keys, fast, with target", "")
{
    bench_full(2, 32768, 1, 0);
}

BENCH_FULL(sparse_mla_backward, "32768 rows and keys, deterministic", "")
{
    bench_full(1, 32768, 0, 0);
}

BENCH_FULL(sparse_mla_backward, "4096, deterministic, with target", "")
{
    bench_full(2, 4096, 0, 0);
}

BENCH_FULL(sparse_mla_target, "4096 rows and keys, top-k 2048", "")
{
    bench_full(3, 4096, 0, 0);
}

BENCH_FULL(sparse_mla_target, "8192 rows and keys, top-k 2048", "")
{
    bench_full(3, 8192, 0, 0);
}

BENCH_FULL(sparse_mla_target, "32768 rows and keys, top-k 2048", "")
{
    bench_full(3, 32768, 0, 0);
}
