/* Dense attention over whole documents, forward and backward. */
#include <string.h>

#include "case.h"

struct problem {
    struct dense_attention shape;
    struct array *q, *k, *v, *dout, *start, *end;
};

/* Documents of the given lengths, ended by 0; causal within each. Rows are the keys step - 1, 2 * step - 1, ..., from
 * the last to the first if `backwards`. Every `empty`-th row sees nothing (0: none). */
struct layout {
    int step, empty, backwards;
    const int *lengths;
};

static void see(const struct problem *p, const struct layout *layout, int64_t t, int64_t position)
{
    int64_t first = 0;

    for (int d = 0; position >= first + layout->lengths[d]; d++) first += layout->lengths[d];
    p->start->value[t] = (double)first;
    p->end->value[t] = (double)(layout->empty && t % layout->empty == layout->empty - 1 ? first : position + 1);
}

static struct problem problem(struct dense_attention shape, struct layout layout)
{
    struct problem p = {.shape = shape};

    for (int d = 0; layout.lengths[d]; d++) p.shape.keys += layout.lengths[d];
    p.shape.rows = p.shape.keys / layout.step;
    p.shape.scale = 0.45f;
    p.q = array_normal(shape.type, p.shape.rows * shape.heads * shape.qk, 1);
    p.k = array_normal(shape.type, p.shape.keys * shape.heads * shape.qk, 1);
    p.v = array_normal(shape.type, p.shape.keys * shape.heads * shape.v, 1);
    p.dout = array_normal(shape.type, p.shape.rows * shape.heads * shape.v, 1);
    p.start = array_zero(GLM52_DTYPE_I32, p.shape.rows);
    p.end = array_zero(GLM52_DTYPE_I32, p.shape.rows);
    for (int64_t t = 0; t < p.shape.rows; t++) {
        see(&p, &layout, t, ((layout.backwards ? p.shape.rows - 1 - t : t) + 1) * layout.step - 1);
        p.shape.pairs += p.end->value[t] - p.start->value[t];
    }
    array_push(p.start);
    array_push(p.end);
    return p;
}

/* ---- the plain loop ---- */

/* Probabilities of one row and head, from the first key it sees on, and its output; returns lse. */
static double plain_attend(const struct problem *p, int64_t t, int64_t h, double *probability, double *out)
{
    const struct dense_attention *a = &p->shape;
    int64_t start = (int64_t)p->start->value[t], end = (int64_t)p->end->value[t];
    double top = -INFINITY, sum = 0;

    for (int64_t c = 0; c < a->v; c++) out[c] = 0;
    for (int64_t u = start; u < end; u++) {
        probability[u - start] = 0;
        for (int64_t c = 0; c < a->qk; c++)
            probability[u - start] += (double)a->scale * p->q->value[(t * a->heads + h) * a->qk + c] *
                                      p->k->value[(u * a->heads + h) * a->qk + c];
        top = fmax(top, probability[u - start]);
    }
    if (start == end) return INFINITY;
    for (int64_t i = 0; i < end - start; i++) sum += probability[i] = exp(probability[i] - top);
    for (int64_t u = start; u < end; u++) {
        probability[u - start] /= sum;
        for (int64_t c = 0; c < a->v; c++)
            out[c] += probability[u - start] * p->v->value[(u * a->heads + h) * a->v + c];
    }
    return top + log(sum);
}

struct wanted {
    double *out, *lse, *dq, *dk, *dv;
};

/* Gradients of one row and head by the chain rule. */
static void plain_backward(const struct problem *p, int64_t t, int64_t h, const double *probability,
                           const struct wanted *w)
{
    const struct dense_attention *a = &p->shape;
    int64_t start = (int64_t)p->start->value[t], end = (int64_t)p->end->value[t], row = t * a->heads + h;
    const double *dout = p->dout->value + row * a->v, *out = w->out + row * a->v;

    for (int64_t u = start; u < end; u++) {
        int64_t key = u * a->heads + h;
        double slope = 0;

        for (int64_t c = 0; c < a->v; c++) {
            slope += dout[c] * (p->v->value[key * a->v + c] - out[c]);
            w->dv[key * a->v + c] += probability[u - start] * dout[c];
        }
        slope *= probability[u - start] * (double)a->scale;
        for (int64_t c = 0; c < a->qk; c++) {
            w->dq[row * a->qk + c] += slope * p->k->value[key * a->qk + c];
            w->dk[key * a->qk + c] += slope * p->q->value[row * a->qk + c];
        }
    }
}

static struct wanted plain(const struct problem *p)
{
    const struct dense_attention *a = &p->shape;
    struct wanted w = {doubles(p->dout->count), doubles(a->rows * a->heads), doubles(p->q->count), doubles(p->k->count),
                       doubles(p->v->count)};
    double *probability = doubles(a->keys);

    for (int64_t t = 0; t < a->rows; t++)
        for (int64_t h = 0; h < a->heads; h++) {
            w.lse[t * a->heads + h] = plain_attend(p, t, h, probability, w.out + (t * a->heads + h) * a->v);
            plain_backward(p, t, h, probability, &w);
        }
    return w;
}

/* sum of out * dout, of which the gradients are taken. */
static double objective(void *argument)
{
    static double probability[64], out[64];
    const struct problem *p = argument;
    const struct dense_attention *a = &p->shape;
    double sum = 0;

    for (int64_t t = 0; t < a->rows; t++)
        for (int64_t h = 0; h < a->heads; h++) {
            plain_attend(p, t, h, probability, out);
            for (int64_t c = 0; c < a->v; c++) sum += out[c] * p->dout->value[(t * a->heads + h) * a->v + c];
        }
    return sum;
}

/* ---- checks ---- */

struct results {
    struct array *out, *lse, *dq, *dk, *dv;
};

static struct results outputs(const struct problem *p)
{
    glm52_dtype type = p->shape.type;

    return (struct results){array_output(type, p->dout->count),
                            array_output(GLM52_DTYPE_F32, p->shape.rows * p->shape.heads),
                            array_output(type, p->q->count), array_output(type, p->k->count),
                            array_output(type, p->v->count)};
}

static void forward(const struct problem *p, const struct results *r, void *workspace)
{
    ops->dense_attention_forward(device, &p->shape, p->q->at, p->k->at, p->v->at, p->start->at, p->end->at, r->out->at,
                                 r->lse->at, workspace);
}

static void backward(const struct problem *p, const struct results *r, void *workspace)
{
    ops->dense_attention_backward(device, &p->shape, p->q->at, p->k->at, p->v->at, p->start->at, p->end->at, r->out->at,
                                  r->lse->at, p->dout->at, r->dq->at, r->dk->at, r->dv->at, workspace);
}

/* Runs with 1, 2 and 3 threads, which must agree to the bit. */
static struct results run(const struct problem *p)
{
    struct results r = outputs(p);

    for (int threads = 1; threads <= 3; threads++) {
        struct array *forward_space, *backward_space;

        device_threads(threads);
        forward_space = array_workspace(ops->dense_attention_forward_bytes(device, &p->shape));
        backward_space = array_workspace(ops->dense_attention_backward_bytes(device, &p->shape));
        forward(p, &r, forward_space->at);
        check_same(r.out);
        check_same(r.lse);
        backward(p, &r, backward_space->at);
        check_same(r.dq);
        check_same(r.dk);
        check_same(r.dv);
        array_fetch(forward_space);
        array_fetch(backward_space);
    }
    return r;
}

/* The gradient of a softmax is a difference of sums of about the largest terms; and the output it starts from was
 * rounded to the type. */
static void check_results(const struct problem *p, const struct results *r, const struct wanted *w, int64_t longest)
{
    int64_t terms = longest + p->shape.qk + p->shape.v;

    check_close(r->out, w->out, tolerance(p->shape.type, terms));
    check_close(r->lse, w->lse, tolerance(GLM52_DTYPE_F32, p->shape.qk));
    check_close(r->dq, w->dq, 4 * tolerance(p->shape.type, terms));
    check_close(r->dk, w->dk, 4 * tolerance(p->shape.type, terms));
    check_close(r->dv, w->dv, 4 * tolerance(p->shape.type, terms));
}

/* Against the plain loop; and that one against its differences, if they do not take too long. */
static void check(struct problem p, int64_t longest)
{
    struct results r = run(&p);
    struct wanted w = plain(&p);

    check_results(&p, &r, &w, longest);
    if (p.shape.rows > 64) return;
    differences(objective, &p, p.q->value, p.q->count, w.dq);
    differences(objective, &p, p.k->value, p.k->count, w.dk);
    differences(objective, &p, p.v->value, p.v->count, w.dv);
    check_results(&p, &r, &w, longest);
}

CASE(dense_attention, "several documents, rows that see one key or none, odd dimensions")
{
    check(problem((struct dense_attention){.heads = 3, .qk = 7, .v = 5, .type = GLM52_DTYPE_F32},
                  (struct layout){1, 7, 0, (const int[]){1, 13, 2, 19, 1, 0}}), 19);
}

CASE(dense_attention, "fewer rows than keys, in any order")
{
    check(problem((struct dense_attention){.heads = 2, .qk = 9, .v = 11, .type = GLM52_DTYPE_F32},
                  (struct layout){3, 0, 1, (const int[]){17, 5, 31, 0}}), 31);
}

CASE(dense_attention, "bf16")
{
    check(problem((struct dense_attention){.heads = 5, .qk = 6, .v = 13, .type = GLM52_DTYPE_BF16},
                  (struct layout){1, 5, 0, (const int[]){11, 18, 0}}), 18);
}

CASE(dense_attention, "nothing is visible")
{
    check(problem((struct dense_attention){.heads = 3, .qk = 4, .v = 6, .type = GLM52_DTYPE_F32},
                  (struct layout){1, 1, 0, (const int[]){23, 0}}), 1);
}

CASE(dense_attention, "no rows: dk and dv are zero all the same")
{
    check(problem((struct dense_attention){.heads = 3, .qk = 4, .v = 6, .type = GLM52_DTYPE_F32},
                  (struct layout){30, 0, 0, (const int[]){23, 0}}), 1);
}

CASE(dense_attention, "several tiles of rows and of keys, tiles that nobody sees")
{
    check(problem((struct dense_attention){.heads = 2, .qk = 7, .v = 3, .type = GLM52_DTYPE_F32},
                  (struct layout){1, 11, 0, (const int[]){303, 1, 129, 5, 301, 0}}), 303);
    check(problem((struct dense_attention){.heads = 17, .qk = 3, .v = 5, .type = GLM52_DTYPE_F32},
                  (struct layout){2, 0, 1, (const int[]){259, 131, 0}}), 259);
    check(problem((struct dense_attention){.heads = 2, .qk = 5, .v = 7, .type = GLM52_DTYPE_BF16},
                  (struct layout){3, 13, 0, (const int[]){401, 260, 0}}), 401);
}

CASE(dense_attention, "bf16, the widths of GLM-5.2, rows in any order, tiles that nobody sees")
{
    check(problem((struct dense_attention){.heads = 3, .qk = 256, .v = 256, .type = GLM52_DTYPE_BF16},
                  (struct layout){1, 11, 0, (const int[]){203, 1, 129, 5, 190, 0}}), 203);
    check(problem((struct dense_attention){.heads = 2, .qk = 256, .v = 256, .type = GLM52_DTYPE_BF16},
                  (struct layout){2, 7, 1, (const int[]){259, 131, 0}}), 259);
    check(problem((struct dense_attention){.heads = 1, .qk = 256, .v = 256, .type = GLM52_DTYPE_BF16},
                  (struct layout){1, 1, 0, (const int[]){130, 0}}), 1);
}

CASE(dense_attention, "bf16, the widths of GLM-5.2, so many rows that dS has no room")
{
    static int lengths[16460 / 70 + 2];
    struct problem p;

    for (int i = 0; i < 16460 / 70; i++) lengths[i] = 70;
    p = problem((struct dense_attention){.heads = 1, .qk = 256, .v = 256, .type = GLM52_DTYPE_BF16},
                (struct layout){1, 9, 0, lengths});
    p.shape.scale = 0.0625f; /* that of the model */
    check(p, 70);
}

/* One head of a problem by itself. */
static struct problem alone(const struct problem *p, int64_t head)
{
    struct problem one = *p;
    struct array *const from[] = {p->q, p->k, p->v, p->dout};
    struct array **const to[] = {&one.q, &one.k, &one.v, &one.dout};

    one.shape.heads = 1;
    for (int i = 0; i < 4; i++) {
        *to[i] = array_zero(p->shape.type, from[i]->count / p->shape.heads);
        for (int64_t at = 0; at < (*to[i])->count; at++)
            (*to[i])->value[at] = from[i]->value[(at / 256 * p->shape.heads + head) * 256 + at % 256];
        array_push(*to[i]);
    }
    return one;
}

/* Forward and backward with a workspace too large to look at. */
static struct results run_large(const struct problem *p)
{
    struct results r = outputs(p);
    size_t bytes = ops->dense_attention_backward_bytes(device, &p->shape);
    struct array *workspace = array_random(GLM52_DTYPE_F32, (int64_t)bytes / 4 + 1);

    forward(p, &r, workspace->at);
    backward(p, &r, workspace->at);
    array_fetch(r.out), array_fetch(r.dq), array_fetch(r.dk), array_fetch(r.dv);
    return r;
}

static void check_alone(const struct problem *p, const struct results *all, int64_t head)
{
    struct problem one = alone(p, head);
    struct results r = run_large(&one);
    struct array *const those[] = {all->out, all->dq, all->dk, all->dv}, *const these[] = {r.out, r.dq, r.dk, r.dv};

    for (int i = 0; i < 4; i++) {
        double *want = doubles(these[i]->count);

        for (int64_t at = 0; at < these[i]->count; at++)
            want[at] = those[i]->value[(at / 256 * p->shape.heads + head) * 256 + at % 256];
        check_exact(these[i], want);
    }
}

CASE(dense_attention, "bf16, the widths of GLM-5.2, more heads than dS is kept of at a time")
{
    struct problem p;
    struct results r;

    if (strcmp(ops->name, "cpu") == 0) return; /* makes no dS, and would take long */
    p = problem((struct dense_attention){.heads = 5, .qk = 256, .v = 256, .type = GLM52_DTYPE_BF16},
                (struct layout){1, 0, 0, (const int[]){3000, 4000, 1300, 0}});
    r = run_large(&p);
    check_alone(&p, &r, 2);
    check_alone(&p, &r, 4);
}

/* Logits far beyond what exp could take without its maximum, which moves from tile to tile. */
CASE(dense_attention, "logits of several hundreds")
{
    struct problem p = problem((struct dense_attention){.heads = 3, .qk = 13, .v = 4, .type = GLM52_DTYPE_F32},
                               (struct layout){1, 0, 0, (const int[]){541, 0}});
    struct results r;
    struct wanted w;

    for (int64_t i = 0; i < p.q->count; i++) p.q->value[i] *= 100;
    array_push(p.q);
    r = run(&p);
    w = plain(&p);
    check_close(r.out, w.out, 1e-3); /* a logit of 1000 is known to 2^-14 */
    check_close(r.lse, w.lse, tolerance(GLM52_DTYPE_F32, p.shape.qk));
}

/* ---- benches ---- */

static void bench_forward(struct dense_attention shape, const int *lengths)
{
    struct problem p = problem(shape, (struct layout){1, 0, 0, lengths});
    struct results r = outputs(&p);
    struct array *workspace = array_workspace(ops->dense_attention_forward_bytes(device, &p.shape));

    BENCH_LOOP
        forward(&p, &r, workspace->at);
    bench_rate(2 * p.shape.pairs * shape.heads * (shape.qk + shape.v), 0);
}

static void bench_backward(struct dense_attention shape, const int *lengths)
{
    struct problem p = problem(shape, (struct layout){1, 0, 0, lengths});
    struct results r = outputs(&p);
    struct array *workspace = array_workspace(ops->dense_attention_backward_bytes(device, &p.shape));

    forward(&p, &r, array_workspace(ops->dense_attention_forward_bytes(device, &p.shape))->at);
    BENCH_LOOP
        backward(&p, &r, workspace->at);
    bench_rate(2 * p.shape.pairs * shape.heads * (3 * shape.qk + 2 * shape.v), 0);
}

static const struct dense_attention preset = {.heads = 8, .qk = 64, .v = 64, .type = GLM52_DTYPE_F32};
static const struct dense_attention full = {.heads = 4, .qk = 256, .v = 256, .type = GLM52_DTYPE_F32};
static const struct dense_attention full_bf16 = {.heads = 4, .qk = 256, .v = 256, .type = GLM52_DTYPE_BF16};

BENCH(dense_attention_forward, "4096 causal, 8 heads of 64/64")
{
    bench_forward(preset, (const int[]){4096, 0});
}

BENCH(dense_attention_backward, "4096 causal, 8 heads of 64/64")
{
    bench_backward(preset, (const int[]){4096, 0});
}

BENCH(dense_attention_forward, "2048 causal, 4 heads of 256/256")
{
    bench_forward(full, (const int[]){2048, 0});
}

BENCH(dense_attention_backward, "2048 causal, 4 heads of 256/256")
{
    bench_backward(full, (const int[]){2048, 0});
}

BENCH(dense_attention_backward, "2048 causal, 4 heads of 256/256, bf16")
{
    bench_backward(full_bf16, (const int[]){2048, 0});
}

/* 64 heads of 256/256 in bf16: `count` documents of the same length in so many rows. */
static void bench_full(int back, int64_t rows, int count)
{
    struct problem p = {.shape = {.rows = rows, .keys = rows, .heads = 64, .qk = 256, .v = 256, .scale = 0.0625f,
                                  .type = GLM52_DTYPE_BF16}};
    const int64_t length = rows / count, elements = rows * 64 * 256;
    struct results r = {array_random(p.shape.type, elements), array_random(GLM52_DTYPE_F32, rows * 64),
                        array_random(p.shape.type, elements), array_random(p.shape.type, elements),
                        array_random(p.shape.type, elements)};
    struct array *workspace;
    size_t bytes = ops->dense_attention_forward_bytes(device, &p.shape);

    if (back && bytes < ops->dense_attention_backward_bytes(device, &p.shape))
        bytes = ops->dense_attention_backward_bytes(device, &p.shape);
    workspace = array_random(GLM52_DTYPE_F32, (int64_t)bytes / 4 + 1);
    p.q = array_random(p.shape.type, elements);
    p.k = array_random(p.shape.type, elements);
    p.v = array_random(p.shape.type, elements);
    p.dout = array_random(p.shape.type, elements);
    p.start = array_zero(GLM52_DTYPE_I32, rows);
    p.end = array_zero(GLM52_DTYPE_I32, rows);
    for (int64_t t = 0; t < rows; t++) {
        p.start->value[t] = (double)(t / length * length);
        p.end->value[t] = (double)(t + 1);
        p.shape.pairs += (double)(t % length + 1);
    }
    array_push(p.start);
    array_push(p.end);
    forward(&p, &r, workspace->at);
    BENCH_LOOP
        (back ? backward : forward)(&p, &r, workspace->at);
    bench_counted();
}

BENCH_FULL(dense_attention_forward, "4096, 64 heads of 256", "cuDNN 655 A, 568 C")
{
    bench_full(0, 4096, 1);
}

BENCH_FULL(dense_attention_forward, "8192, 64 heads of 256", "cuDNN 711 A, 606 C")
{
    bench_full(0, 8192, 1);
}

BENCH_FULL(dense_attention_forward, "8192, 8 documents", "")
{
    bench_full(0, 8192, 8);
}

BENCH_FULL(dense_attention_backward, "4096, 64 heads of 256", "cuDNN 366 A, 345 C")
{
    bench_full(1, 4096, 1);
}

BENCH_FULL(dense_attention_backward, "8192, 64 heads of 256", "cuDNN 379 A, 375 C")
{
    bench_full(1, 8192, 1);
}

BENCH_FULL(dense_attention_backward, "8192, 8 documents", "")
{
    bench_full(1, 8192, 8);
}
