/* The indexer's loss over selected keys. */
#include "index_kl.h"

/* Probabilities with some zeros among them, as of a teacher that underflows. */
static void draw_probabilities(double *p, int64_t n)
{
    double sum = 0;

    for (int64_t i = 0; i < n; i++) sum += p[i] = i > 0 && draw_below(4) == 0 ? 0 : exp(3 * draw_normal());
    for (int64_t i = 0; i < n; i++) p[i] /= sum;
}

/* Rows have no key, one, as many as fit, or some. */
static struct kl_problem selected_problem(struct indexer shape, int masked)
{
    struct kl_problem p = kl_student(shape, masked);
    int64_t fit = shape.keys < shape.k ? shape.keys : shape.k;

    p.selected = array_zero(GLM52_DTYPE_I32, shape.rows * shape.k);
    p.target = array_zero(GLM52_DTYPE_F32, shape.rows * shape.k);
    for (int64_t t = 0; t < shape.rows; t++) {
        int64_t count = t % 4 == 0 ? fit : t % 4 == 1 ? 0 : t % 4 == 2 ? 1 : draw_below(fit + 1), n = 0;
        double *selected = p.selected->value + t * shape.k;

        for (int64_t u = 0; u < shape.keys && n < count; u++)
            if (draw_below(shape.keys - u) < count - n) selected[n++] = (double)u;
        for (int64_t j = n; j < shape.k; j++) selected[j] = -1;
        draw_probabilities(p.target->value + t * shape.k, n);
        p.shape.pairs += (double)n;
    }
    array_push(p.selected);
    array_push(p.target);
    return p;
}

CASE(index_kl_selected, "rows with no key, one key and fewer than k, odd dimensions")
{
    kl_check(selected_problem((struct indexer){.rows = 37, .keys = 29, .heads = 3, .width = 13, .k = 9,
                                               .type = GLM52_DTYPE_F32}, 5));
}

CASE(index_kl_selected, "whole vectors, heads of two vectors, more keys than one trip of the kernel")
{
    kl_check(selected_problem((struct indexer){.rows = 21, .keys = 43, .heads = 11, .width = 40, .k = 31,
                                               .type = GLM52_DTYPE_F32}, 0));
    kl_check(selected_problem((struct indexer){.rows = 9, .keys = 19, .heads = 8, .width = 32, .k = 15,
                                               .type = GLM52_DTYPE_F32}, 3));
}

CASE(index_kl_selected, "k larger than the keys")
{
    kl_check(selected_problem((struct indexer){.rows = 7, .keys = 5, .heads = 2, .width = 51, .k = 21,
                                               .type = GLM52_DTYPE_F32}, 0));
}

CASE(index_kl_selected, "bf16")
{
    kl_check(selected_problem((struct indexer){.rows = 17, .keys = 23, .heads = 5, .width = 12, .k = 8,
                                               .type = GLM52_DTYPE_BF16}, 4));
}

CASE(index_kl_selected, "32 bf16 heads of 128")
{
    struct indexer shape = {.rows = 70, .keys = 601, .heads = 32, .width = 128, .k = 301, .type = GLM52_DTYPE_BF16};

    kl_check(selected_problem(shape, 9));
    shape.keys = 37; /* fewer than k */
    kl_check(selected_problem(shape, 0));
    shape.k = 5;
    kl_check(selected_problem(shape, 1));
}

CASE(index_kl_selected, "32 bf16 heads of 128, few of many keys")
{
    struct indexer shape = {.rows = 70, .keys = 2111, .heads = 32, .width = 128, .k = 301, .type = GLM52_DTYPE_BF16};

    kl_check(selected_problem(shape, 9));
    shape.keys = 47; /* fewer rounds of entries than blocks */
    shape.k = 5;
    kl_check(selected_problem(shape, 7));
}

CASE(index_kl_selected, "32 bf16 heads of 128, keys for several blocks a row")
{
    struct indexer shape = {.rows = 66, .keys = 1901, .heads = 32, .width = 128, .k = 2048, .type = GLM52_DTYPE_BF16};

    kl_check(selected_problem(shape, 0)); /* fewer than k: one block a row, of long rows */
    shape.keys = 5903;
    shape.k = 1301;
    kl_check(selected_problem(shape, 9));
    shape.keys = 11003; /* of which k are few */
    shape.k = 2047;
    kl_check(selected_problem(shape, 5));
}

CASE(index_kl_selected, "rows of weight 0 have a loss and no gradient")
{
    kl_check(selected_problem((struct indexer){.rows = 19, .keys = 14, .heads = 3, .width = 7, .k = 6,
                                               .type = GLM52_DTYPE_F32}, 1));
}

CASE(index_kl_selected, "no rows: dkey is zero all the same")
{
    kl_check(selected_problem((struct indexer){.rows = 0, .keys = 7, .heads = 3, .width = 5, .k = 4,
                                               .type = GLM52_DTYPE_F32}, 0));
}

CASE(index_kl_selected, "many rows and keys")
{
    kl_check(selected_problem((struct indexer){.rows = 301, .keys = 333, .heads = 6, .width = 17, .k = 50,
                                               .type = GLM52_DTYPE_F32}, 7));
}

/* Where q underflows, the gradient is -p and not nothing. */
CASE(index_kl_selected, "scores far apart")
{
    struct kl_problem p = selected_problem((struct indexer){.rows = 23, .keys = 18, .heads = 3, .width = 11, .k = 10,
                                                            .type = GLM52_DTYPE_F32}, 0);
    struct kl_results r;
    struct kl_wanted w;

    for (int64_t i = 0; i < p.weight->count; i++) p.weight->value[i] *= 400;
    array_push(p.weight);
    r = kl_run(&p);
    w = kl_plain(&p);
    check_close(r.kl, w.kl, tolerance(GLM52_DTYPE_F32, 100));
    check_close(r.dq, w.dq, 1e-3); /* a score of 1000 is known to 2^-14 */
    check_close(r.dkey, w.dkey, 1e-3);
    check_close(r.dweight, w.dweight, 1e-3);
}

/* ---- benches ---- */

/* The last rows of a document: each selects as many of the keys up to its own as it can, evenly spread. */
static void bench_selected(struct indexer shape)
{
    struct kl_problem p = selected_problem(shape, 0);

    p.shape.pairs = 0;
    for (int64_t t = 0; t < shape.rows; t++) {
        int64_t seen = shape.keys - shape.rows + t + 1, n = seen < shape.k ? seen : shape.k;

        for (int64_t j = 0; j < shape.k; j++) {
            p.selected->value[t * shape.k + j] = j < n ? (double)(j * seen / n) : -1;
            p.target->value[t * shape.k + j] = j < n ? 1 / (double)n : 0;
        }
        p.shape.pairs += (double)n;
    }
    array_push(p.selected);
    array_push(p.target);
    kl_bench(&p);
}

BENCH(index_kl_selected, "256 of 4096 causal, 8 heads of 64")
{
    bench_selected((struct indexer){.rows = 4096, .keys = 4096, .heads = 8, .width = 64, .k = 256,
                                    .type = GLM52_DTYPE_F32});
}

BENCH(index_kl_selected, "2048 of 4096, 64 rows, 32 heads of 128, bf16")
{
    bench_selected((struct indexer){.rows = 64, .keys = 4096, .heads = 32, .width = 128, .k = 2048,
                                    .type = GLM52_DTYPE_BF16});
}

BENCH_FULL(index_kl_selected, "4096 rows and keys, 2048 each, 32 x 128", "")
{
    enum { ROWS = 4096, K = 2048 };
    struct indexer i = {.rows = ROWS, .keys = ROWS, .heads = 32, .width = 128, .k = K, .type = GLM52_DTYPE_BF16,
                        .pairs = (double)ROWS * K};
    struct array *q = array_random(i.type, ROWS * 32 * 128), *key = array_random(i.type, ROWS * 128);
    struct array *weight = array_random(GLM52_DTYPE_F32, ROWS * 32), *target = array_random(GLM52_DTYPE_F32, ROWS * K);
    struct array *row_weight = array_random(GLM52_DTYPE_F32, ROWS), *selected = array_zero(GLM52_DTYPE_I32, ROWS * K);
    struct array *kl = array_output(GLM52_DTYPE_F32, ROWS), *dq = array_random(i.type, q->count);
    struct array *dkey = array_random(GLM52_DTYPE_F32, key->count),
                 *dweight = array_random(GLM52_DTYPE_F32, weight->count);
    struct array *workspace = array_workspace(ops->index_kl_selected_bytes(device, &i));

    for (int64_t t = 0; t < ROWS * K; t++) /* every other key, shifted or not from one pair to the next */
        selected->value[t] = (double)(t % K * 2 + (t * 7919 >> 11 & 1));
    array_push(selected);
    BENCH_LOOP
        ops->index_kl_selected(device, &i, q->at, key->at, weight->at, selected->at, target->at, row_weight->at, kl->at,
                               dq->at, dkey->at, dweight->at, workspace->at);
    bench_counted();
}
