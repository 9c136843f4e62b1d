/* The indexer's loss, over selected keys and over all visible ones. */
#include "case.h"

/* Either form: rows have a support of keys (selected, or start .. end), and the teacher's probabilities on it. */
struct problem {
    struct indexer shape;
    struct teacher teacher;                      /* heads = 0: the form with selected keys */
    struct array *q, *key, *weight, *row_weight; /* both */
    struct array *selected, *target;             /* selected */
    struct array *start, *end, *teacher_q, *teacher_key; /* dense */
    struct array *teacher_lse;                   /* dense; NULL: nobody has made it */
    struct array *open;                          /* of shape.open; NULL: not wanted */
};

static int is_dense(const struct problem *p)
{
    return p->teacher.heads > 0;
}

/* `masked`: every so many rows one has weight 0 (0: none, 1: all). */
static struct problem student(struct indexer shape, int masked)
{
    struct problem p = {.shape = shape};

    p.q = array_normal(shape.type, shape.rows * shape.heads * shape.width, 1);
    p.key = array_normal(shape.type, shape.keys * shape.width, 1);
    p.weight = array_normal(GLM52_DTYPE_F32, shape.rows * shape.heads, 0.5);
    p.row_weight = array_normal(GLM52_DTYPE_F32, shape.rows, 1);
    for (int64_t t = 0; t < shape.rows; t++)
        if (masked && t % masked == masked - 1) p.row_weight->value[t] = 0;
    array_push(p.row_weight);
    return p;
}

/* Probabilities with some zeros among them, as of a teacher that underflows. */
static void draw_probabilities(double *p, int64_t n)
{
    double sum = 0;

    for (int64_t i = 0; i < n; i++) sum += p[i] = i > 0 && draw_below(4) == 0 ? 0 : exp(3 * draw_normal());
    for (int64_t i = 0; i < n; i++) p[i] /= sum;
}

/* Rows have no key, one, as many as fit, or some. */
static struct problem selected_problem(struct indexer shape, int masked)
{
    struct problem p = student(shape, masked);
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

/* Documents of the given lengths, ended by 0; causal within each. Every `empty`-th row sees nothing (0: none). */
static struct problem dense_problem(struct indexer shape, struct teacher teacher, const int *lengths, int empty,
                                    int masked)
{
    struct problem p;
    int64_t t = 0;

    for (int d = 0; lengths[d]; d++) shape.rows += lengths[d];
    shape.keys = shape.rows;
    p = student(shape, masked);
    p.teacher = teacher;
    p.teacher_q = array_normal(shape.type, shape.rows * teacher.heads * teacher.width, 1);
    p.teacher_key = array_normal(shape.type, shape.keys * teacher.key_heads * teacher.width, 1);
    p.start = array_zero(GLM52_DTYPE_I32, shape.rows);
    p.end = array_zero(GLM52_DTYPE_I32, shape.rows);
    for (int d = 0; lengths[d]; d++)
        for (int64_t first = t; t < first + lengths[d]; t++) {
            p.start->value[t] = (double)first;
            p.end->value[t] = (double)(empty && t % empty == empty - 1 ? first : t + 1);
            p.shape.pairs += p.end->value[t] - p.start->value[t];
        }
    array_push(p.start);
    array_push(p.end);
    return p;
}

/* ---- the plain loop ---- */

/* Key number j of row t, -1 beyond the last. */
static int64_t key_of(const struct problem *p, int64_t t, int64_t j)
{
    if (is_dense(p)) return p->start->value[t] + (double)j < p->end->value[t] ? (int64_t)p->start->value[t] + j : -1;
    return j < p->shape.k ? (int64_t)p->selected->value[t * p->shape.k + j] : -1;
}

static double plain_dot(const double *x, const double *y, int64_t count)
{
    double sum = 0;

    for (int64_t c = 0; c < count; c++) sum += x[c] * y[c];
    return sum;
}

static double student_dot(const struct problem *p, int64_t t, int64_t h, int64_t u)
{
    int64_t width = p->shape.width;

    return plain_dot(p->q->value + (t * p->shape.heads + h) * width, p->key->value + u * width, width);
}

/* x[0 .. n) becomes its softmax; returns the logarithm of the sum of exponentials. */
static double softmax(double *x, int64_t n)
{
    double top = -INFINITY, sum = 0;

    for (int64_t j = 0; j < n; j++) top = fmax(top, x[j]);
    for (int64_t j = 0; j < n; j++) sum += x[j] = exp(x[j] - top);
    for (int64_t j = 0; j < n; j++) x[j] /= sum;
    return top + log(sum);
}

/* logit gets the softmax of head h of the teacher in row t; returns its lse. */
static double teacher_head(const struct problem *p, int64_t t, int64_t h, int64_t n, double *logit)
{
    const struct teacher *teacher = &p->teacher;

    for (int64_t j = 0; j < n; j++) {
        int64_t of = key_of(p, t, j) * teacher->key_heads + (teacher->key_heads == 1 ? 0 : h);
        const double *q = p->teacher_q->value + (t * teacher->heads + h) * teacher->width;

        logit[j] = (double)teacher->scale * plain_dot(q, p->teacher_key->value + of * teacher->width, teacher->width);
    }
    return n ? softmax(logit, n) : INFINITY;
}

/* The teacher's probabilities of row t: by the lse that is given, or if none is, of its own softmax. */
static void teach(const struct problem *p, int64_t t, int64_t n, double *probability)
{
    const struct teacher *teacher = &p->teacher;
    double *share = doubles(n);

    for (int64_t j = 0; j < n; j++) probability[j] = is_dense(p) ? 0 : p->target->value[t * p->shape.k + j];
    for (int64_t h = 0; h < teacher->heads; h++) {
        double lse = teacher_head(p, t, h, n, share);
        double change = p->teacher_lse ? exp(lse - p->teacher_lse->value[t * teacher->heads + h]) : 1;

        for (int64_t j = 0; j < n; j++) probability[j] += change * share[j] / teacher->heads;
    }
}

/* What the teacher's attention leaves for its loss, plus an offset. */
static void attend(struct problem *p, double offset)
{
    double *share = doubles(p->shape.keys);

    p->teacher_lse = array_zero(GLM52_DTYPE_F32, p->shape.rows * p->teacher.heads);
    for (int64_t i = 0; i < p->teacher_lse->count; i++) {
        int64_t t = i / p->teacher.heads, n = 0;

        while (key_of(p, t, n) >= 0) n++;
        p->teacher_lse->value[i] = teacher_head(p, t, i % p->teacher.heads, n, share) + offset;
    }
    array_push(p->teacher_lse);
}

struct wanted {
    double *kl, *dq, *dkey, *dweight;
    double *probability; /* [rows, keys], by number of the key */
    double *dq_size;     /* as dq, of the terms' magnitudes */
};

/* kl of row t; q, the student's softmax, if wanted. */
static double plain_kl(const struct problem *p, int64_t t, const double *probability, double *q)
{
    static double score[2048];
    int64_t n = 0;
    double kl = 0, log_sum;

    for (; key_of(p, t, n) >= 0; n++) {
        score[n] = 0;
        for (int64_t h = 0; h < p->shape.heads; h++)
            score[n] += p->weight->value[t * p->shape.heads + h] * fmax(0, student_dot(p, t, h, key_of(p, t, n)));
        q[n] = score[n];
    }
    log_sum = softmax(q, n);
    for (int64_t j = 0; j < n; j++) kl += probability[j] * (log(fmax(probability[j], 1e-10)) - (score[j] - log_sum));
    return kl;
}

/* Where open has head h of row t and its key number j, which is u. */
static int64_t place_of(const struct problem *p, int64_t t, int64_t h, int64_t j, int64_t u)
{
    int64_t head = t * p->shape.heads + h;

    return is_dense(p) ? head * p->shape.keys + u : head * p->shape.k + j;
}

/* Gradients of row t by the chain rule. */
static void plain_backward(const struct problem *p, int64_t t, const double *q, const struct wanted *w)
{
    int64_t heads = p->shape.heads, width = p->shape.width;
    const double *probability = w->probability + t * p->shape.keys;

    for (int64_t j = 0, u; (u = key_of(p, t, j)) >= 0; j++)
        for (int64_t h = 0; h < heads; h++) {
            double d = student_dot(p, t, h, u), slope = p->row_weight->value[t] * (q[j] - probability[j]);

            w->dweight[t * heads + h] += slope * fmax(0, d);
            int open = p->shape.sides == 2 ? p->open->value[place_of(p, t, h, j, u)] != 0 : d > 0;
            slope *= open ? p->weight->value[t * heads + h] : 0;
            for (int64_t c = 0; c < width; c++) {
                double term = slope * p->key->value[u * width + c];

                w->dq[(t * heads + h) * width + c] += term;
                w->dq_size[(t * heads + h) * width + c] += fabs(term);
                w->dkey[u * width + c] += slope * p->q->value[(t * heads + h) * width + c];
            }
        }
}

static struct wanted plain(const struct problem *p)
{
    struct wanted w = {doubles(p->shape.rows), doubles(p->q->count), doubles(p->key->count), doubles(p->weight->count),
                       doubles(p->shape.rows * p->shape.keys), doubles(p->q->count)};
    double *q = doubles(p->shape.keys);

    for (int64_t t = 0; t < p->shape.rows; t++) {
        double *probability = w.probability + t * p->shape.keys;
        int64_t n = 0;

        while (key_of(p, t, n) >= 0) n++;
        teach(p, t, n, probability);
        w.kl[t] = plain_kl(p, t, probability, q);
        plain_backward(p, t, q, &w);
    }
    return w;
}

struct objective {
    const struct problem *p;
    const struct wanted *w;
};

/* sum of row_weight * kl, of which the gradients are taken. */
static double objective(void *argument)
{
    static double q[2048];
    const struct objective *o = argument;
    double sum = 0;

    for (int64_t t = 0; t < o->p->shape.rows; t++)
        sum += o->p->row_weight->value[t] * plain_kl(o->p, t, o->w->probability + t * o->p->shape.keys, q);
    return sum;
}

/* ---- checks ---- */

struct results {
    struct array *kl, *dq, *dkey, *dweight;
};

static struct results outputs(const struct problem *p)
{
    return (struct results){array_output(GLM52_DTYPE_F32, p->shape.rows), array_output(p->shape.type, p->q->count),
                            array_output(GLM52_DTYPE_F32, p->key->count),
                            array_output(GLM52_DTYPE_F32, p->weight->count)};
}

static struct array *workspace_for(const struct problem *p)
{
    return array_workspace(is_dense(p) ? ops->index_kl_dense_bytes(device, &p->shape, &p->teacher)
                                       : ops->index_kl_selected_bytes(device, &p->shape));
}

static void learn(const struct problem *p, const struct results *r, void *workspace)
{
    struct indexer shape = p->shape;

    shape.open = p->open ? p->open->at : NULL;
    if (is_dense(p))
        ops->index_kl_dense(device, &shape, &p->teacher, p->q->at, p->key->at, p->weight->at, p->teacher_q->at,
                            p->teacher_key->at, p->teacher_lse ? p->teacher_lse->at : NULL, p->start->at, p->end->at,
                            p->row_weight->at, r->kl->at, r->dq->at, r->dkey->at, r->dweight->at, workspace);
    else
        ops->index_kl_selected(device, &shape, p->q->at, p->key->at, p->weight->at, p->selected->at, p->target->at,
                               p->row_weight->at, r->kl->at, r->dq->at, r->dkey->at, r->dweight->at, workspace);
}

/* Runs with 1, 2 and 3 threads, which must agree to the bit. */
static struct results run(const struct problem *p)
{
    struct results r = outputs(p);

    for (int threads = 1; threads <= 3; threads++) {
        struct array *workspace;

        device_threads(threads);
        workspace = workspace_for(p);
        learn(p, &r, workspace->at);
        check_same(r.kl);
        check_same(r.dq);
        check_same(r.dkey);
        check_same(r.dweight);
        array_fetch(workspace);
    }
    return r;
}

/* What dq may be where a device rounds the slopes to the operands' type before it sums, at most half a last place of
 * each term: `want` or, that far from it, what is nearest to r. */
static double *rounded_dq(const struct problem *p, const struct results *r, const struct wanted *w)
{
    double *near = doubles(p->q->count), relative = p->shape.type == GLM52_DTYPE_BF16 ? ldexp(1, -8) : 0;

    array_fetch(r->dq);
    for (int64_t i = 0; i < p->q->count; i++) {
        double by = relative * w->dq_size[i];

        near[i] = fmin(fmax(r->dq->value[i], w->dq[i] - by), w->dq[i] + by);
    }
    return near;
}

/* Probabilities carry the rounding of the logits and scores they are made from, which are sums of many products. */
static void check_results(const struct problem *p, const struct results *r, const struct wanted *w)
{
    int64_t support = is_dense(p) ? p->shape.keys : p->shape.k;
    int64_t terms = 4 * (p->shape.heads * p->shape.width + p->teacher.width) + support;

    check_close(r->kl, w->kl, tolerance(GLM52_DTYPE_F32, terms));
    check_close(r->dq, rounded_dq(p, r, w), tolerance(p->shape.type, terms));
    /* These are fp32, of slopes that a device may round to the operands' type. */
    check_close(r->dkey, w->dkey, tolerance(p->shape.type, terms));
    check_close(r->dweight, w->dweight, tolerance(p->shape.type, terms));
}

/* 1 where a dot is positive, either where it may be rounding; untouched outside the support. Rows of weight 0 may have
 * it. */
static void check_open(const struct problem *p)
{
    double *want = doubles(p->open->count);

    array_fetch(p->open);
    for (int64_t i = 0; i < p->open->count; i++) want[i] = -1;
    for (int64_t t = 0; t < p->shape.rows; t++)
        for (int64_t j = 0, u; (u = key_of(p, t, j)) >= 0; j++)
            for (int64_t h = 0; h < p->shape.heads; h++) {
                int64_t place = place_of(p, t, h, j, u);
                double d = student_dot(p, t, h, u), got = p->open->value[place];

                want[place] = (fabs(d) < 1e-4 && got >= 0) || (p->row_weight->value[t] == 0 && got == -1) ? got : d > 0;
            }
    check_exact(p->open, want);
}

/* Keeping sides changes nothing but the last bits; drawn ones rule the gradients of q and key. */
static void check_sides(struct problem p, const struct wanted *w)
{
    int64_t count = p.shape.rows * p.shape.heads * (is_dense(&p) ? p.shape.keys : p.shape.k);

    p.open = array_output(GLM52_DTYPE_I32, count);
    p.shape.sides = 1;
    struct results r = run(&p);
    check_results(&p, &r, w);
    check_open(&p);
    for (int64_t i = 0; i < count; i++) p.open->value[i] = (double)draw_below(2);
    array_push(p.open);
    p.shape.sides = 2;
    r = run(&p);
    struct wanted drawn = plain(&p);
    check_results(&p, &r, &drawn);
}

/* Against the plain loop; and that one against its differences, if they do not take too long. */
static void check(struct problem p)
{
    struct results r = run(&p);
    struct wanted w = plain(&p);
    struct objective o = {&p, &w};

    check_results(&p, &r, &w);
    if (p.shape.rows * p.shape.keys < 4096) check_sides(p, &w);
    if (p.shape.rows > 64) return;
    differences(objective, &o, p.q->value, p.q->count, w.dq);
    differences(objective, &o, p.key->value, p.key->count, w.dkey);
    differences(objective, &o, p.weight->value, p.weight->count, w.dweight);
    check_results(&p, &r, &w);
}

/* With an lse that is made here, with that of the attention, and with a wrong one, whose
 * probabilities sum to a half: it is taken as it is. */
static void check_dense(struct problem p)
{
    struct results r;
    struct wanted w;

    check(p);
    for (int wrong = 0; wrong < 2; wrong++) {
        attend(&p, wrong ? log(2) : 0);
        r = run(&p);
        w = plain(&p);
        check_results(&p, &r, &w);
    }
}

CASE(index_kl_selected, "rows with no key, one key and fewer than k, odd dimensions")
{
    check(selected_problem((struct indexer){.rows = 37, .keys = 29, .heads = 3, .width = 13, .k = 9,
                                            .type = GLM52_DTYPE_F32}, 5));
}

CASE(index_kl_selected, "whole vectors, heads of two vectors, more keys than one trip of the kernel")
{
    check(selected_problem((struct indexer){.rows = 21, .keys = 43, .heads = 11, .width = 40, .k = 31,
                                            .type = GLM52_DTYPE_F32}, 0));
    check(selected_problem((struct indexer){.rows = 9, .keys = 19, .heads = 8, .width = 32, .k = 15,
                                            .type = GLM52_DTYPE_F32}, 3));
}

CASE(index_kl_selected, "k larger than the keys")
{
    check(selected_problem((struct indexer){.rows = 7, .keys = 5, .heads = 2, .width = 51, .k = 21,
                                            .type = GLM52_DTYPE_F32}, 0));
}

CASE(index_kl_selected, "bf16")
{
    check(selected_problem((struct indexer){.rows = 17, .keys = 23, .heads = 5, .width = 12, .k = 8,
                                            .type = GLM52_DTYPE_BF16}, 4));
}

CASE(index_kl_selected, "32 bf16 heads of 128")
{
    struct indexer shape = {.rows = 70, .keys = 601, .heads = 32, .width = 128, .k = 301, .type = GLM52_DTYPE_BF16};

    check(selected_problem(shape, 9));
    shape.keys = 37; /* fewer than k */
    check(selected_problem(shape, 0));
    shape.k = 5;
    check(selected_problem(shape, 1));
}

CASE(index_kl_selected, "32 bf16 heads of 128, few of many keys")
{
    struct indexer shape = {.rows = 70, .keys = 2111, .heads = 32, .width = 128, .k = 301, .type = GLM52_DTYPE_BF16};

    check(selected_problem(shape, 9));
    shape.keys = 47; /* fewer rounds of entries than blocks */
    shape.k = 5;
    check(selected_problem(shape, 7));
}

CASE(index_kl_selected, "32 bf16 heads of 128, keys for several blocks a row")
{
    struct indexer shape = {.rows = 66, .keys = 1901, .heads = 32, .width = 128, .k = 2048, .type = GLM52_DTYPE_BF16};

    check(selected_problem(shape, 0)); /* fewer than k: one block a row, of long rows */
    shape.keys = 5903;
    shape.k = 1301;
    check(selected_problem(shape, 9));
    shape.keys = 11003; /* of which k are few */
    shape.k = 2047;
    check(selected_problem(shape, 5));
}

CASE(index_kl_selected, "rows of weight 0 have a loss and no gradient")
{
    check(selected_problem((struct indexer){.rows = 19, .keys = 14, .heads = 3, .width = 7, .k = 6,
                                            .type = GLM52_DTYPE_F32}, 1));
}

CASE(index_kl_selected, "no rows: dkey is zero all the same")
{
    check(selected_problem((struct indexer){.rows = 0, .keys = 7, .heads = 3, .width = 5, .k = 4,
                                            .type = GLM52_DTYPE_F32}, 0));
}

CASE(index_kl_selected, "many rows and keys")
{
    check(selected_problem((struct indexer){.rows = 301, .keys = 333, .heads = 6, .width = 17, .k = 50,
                                            .type = GLM52_DTYPE_F32}, 7));
}

/* Where q underflows, the gradient is -p and not nothing. */
CASE(index_kl_selected, "scores far apart")
{
    struct problem p = selected_problem((struct indexer){.rows = 23, .keys = 18, .heads = 3, .width = 11, .k = 10,
                                                         .type = GLM52_DTYPE_F32}, 0);
    struct results r;
    struct wanted w;

    for (int64_t i = 0; i < p.weight->count; i++) p.weight->value[i] *= 400;
    array_push(p.weight);
    r = run(&p);
    w = plain(&p);
    check_close(r.kl, w.kl, tolerance(GLM52_DTYPE_F32, 100));
    check_close(r.dq, w.dq, 1e-3); /* a score of 1000 is known to 2^-14 */
    check_close(r.dkey, w.dkey, 1e-3);
    check_close(r.dweight, w.dweight, 1e-3);
}

CASE(index_kl_dense, "several documents, rows that see one key or none, absorbed teacher, odd dimensions")
{
    check_dense(dense_problem((struct indexer){.heads = 3, .width = 13, .type = GLM52_DTYPE_F32},
                              (struct teacher){5, 1, 11, 0.4f}, (const int[]){1, 12, 2, 21, 1, 0}, 8, 5));
}

CASE(index_kl_dense, "a teacher with keys of every head")
{
    check_dense(dense_problem((struct indexer){.heads = 4, .width = 9, .type = GLM52_DTYPE_F32},
                              (struct teacher){3, 3, 7, 0.7f}, (const int[]){19, 15, 0}, 0, 0));
}

CASE(index_kl_dense, "bf16")
{
    check_dense(dense_problem((struct indexer){.heads = 3, .width = 10, .type = GLM52_DTYPE_BF16},
                              (struct teacher){2, 1, 17, 0.3f}, (const int[]){6, 23, 0}, 9, 4));
}

CASE(index_kl_dense, "32 bf16 heads of 128, teachers of the widths of GLM-5.2")
{
    struct indexer shape = {.heads = 32, .width = 128, .type = GLM52_DTYPE_BF16};

    check_dense(dense_problem(shape, (struct teacher){3, 3, 256, 0.06f}, (const int[]){6, 133, 1, 290, 0}, 9, 4));
    check_dense(dense_problem(shape, (struct teacher){5, 1, 576, 0.04f}, (const int[]){301, 0}, 0, 3));
}

/* Small enough for tools that watch every access. */
CASE(index_kl_dense, "32 bf16 heads of 128, few rows")
{
    struct indexer shape = {.heads = 32, .width = 128, .type = GLM52_DTYPE_BF16};

    check_dense(dense_problem(shape, (struct teacher){2, 2, 24, 0.2f}, (const int[]){3, 66, 0}, 0, 0));
    check_dense(dense_problem(shape, (struct teacher){2, 2, 256, 0.06f}, (const int[]){65, 0}, 0, 7));
    check_dense(dense_problem(shape, (struct teacher){3, 1, 576, 0.04f}, (const int[]){66, 2, 0}, 0, 0));
}

CASE(index_kl_dense, "few bf16 heads, a teacher of the widths of GLM-5.2; and the other way round, in fp32")
{
    check_dense(dense_problem((struct indexer){.heads = 3, .width = 10, .type = GLM52_DTYPE_BF16},
                              (struct teacher){3, 3, 256, 0.06f}, (const int[]){6, 133, 1, 190, 0}, 9, 4));
    check_dense(dense_problem((struct indexer){.heads = 32, .width = 128, .type = GLM52_DTYPE_F32},
                              (struct teacher){2, 1, 24, 0.2f}, (const int[]){5, 64, 0}, 4, 0));
}

CASE(index_kl_dense, "rows of weight 0 have a loss and no gradient; nothing is visible; no rows")
{
    struct indexer shape = {.heads = 3, .width = 5, .type = GLM52_DTYPE_F32};
    struct teacher teacher = {2, 1, 7, 0.5f};

    check_dense(dense_problem(shape, teacher, (const int[]){18, 0}, 0, 1));
    check_dense(dense_problem(shape, teacher, (const int[]){11, 0}, 1, 0));
    check_dense(dense_problem(shape, teacher, (const int[]){0}, 0, 0));
}

CASE(index_kl_dense, "several tiles of rows and of keys, tiles that nobody sees")
{
    check_dense(dense_problem((struct indexer){.heads = 3, .width = 7, .type = GLM52_DTYPE_F32},
                              (struct teacher){2, 1, 9, 0.4f}, (const int[]){281, 3, 67, 1, 317, 0}, 23, 7));
    check_dense(dense_problem((struct indexer){.heads = 2, .width = 11, .type = GLM52_DTYPE_BF16},
                              (struct teacher){3, 3, 5, 0.6f}, (const int[]){70, 300, 0}, 0, 3));
}

/* The attention itself hands over what the loss takes. */
CASE(index_kl_dense, "the lse of dense_attention_forward")
{
    struct problem p = dense_problem((struct indexer){.heads = 3, .width = 7, .type = GLM52_DTYPE_BF16},
                                     (struct teacher){5, 5, 9, 0.4f}, (const int[]){81, 3, 150, 0}, 23, 7);
    struct dense_attention shape = {.rows = p.shape.rows, .keys = p.shape.keys, .heads = p.teacher.heads,
                                    .qk = p.teacher.width, .v = p.teacher.width, .scale = p.teacher.scale,
                                    .type = p.shape.type, .pairs = p.shape.pairs};
    struct array *workspace = array_workspace(ops->dense_attention_forward_bytes(device, &shape));
    struct wanted w = plain(&p);
    struct results r;

    p.teacher_lse = array_output(GLM52_DTYPE_F32, shape.rows * shape.heads);
    ops->dense_attention_forward(device, &shape, p.teacher_q->at, p.teacher_key->at, p.teacher_key->at, p.start->at,
                                 p.end->at, array_output(shape.type, shape.rows * shape.heads * shape.v)->at,
                                 p.teacher_lse->at, workspace->at);
    r = run(&p);
    check_results(&p, &r, &w);
}

/* ---- benches ---- */

static void bench(const struct problem *p)
{
    struct results r = outputs(p);
    struct array *workspace = workspace_for(p);

    BENCH_LOOP
        learn(p, &r, workspace->at);
    bench_rate(2 * p->shape.pairs * (3.0 * p->shape.heads * p->shape.width + 1.0 * p->teacher.heads * p->teacher.width),
               0);
}

/* The last rows of a document: each selects as many of the keys up to its own as it can, evenly spread. */
static void bench_selected(struct indexer shape)
{
    struct problem p = selected_problem(shape, 0);

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
    bench(&p);
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

static void bench_dense(struct indexer shape, struct teacher teacher, int with_lse)
{
    struct problem p = dense_problem(shape, teacher, (const int[]){4096, 0}, 0, 0);

    if (with_lse) {
        p.teacher_lse = array_zero(GLM52_DTYPE_F32, p.shape.rows * teacher.heads);
        for (int64_t i = 0; i < p.teacher_lse->count; i++)
            p.teacher_lse->value[i] = log((double)(i / teacher.heads + 1));
        array_push(p.teacher_lse);
    }
    bench(&p);
}

BENCH(index_kl_dense, "4096 causal, 8 heads of 64, teacher 8 x 144")
{
    bench_dense((struct indexer){.heads = 8, .width = 64, .type = GLM52_DTYPE_F32}, (struct teacher){8, 1, 144, 0.1f},
                0);
}

BENCH(index_kl_dense, "the same, given the attention's lse")
{
    bench_dense((struct indexer){.heads = 8, .width = 64, .type = GLM52_DTYPE_F32}, (struct teacher){8, 1, 144, 0.1f},
                1);
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

/* 32 heads of 128, a teacher of 64 heads, in full (key_heads = 64, width 256) or absorbed (1, 576), bf16, causal. */
static void bench_widths(int64_t rows, int32_t key_heads, int32_t width, int with_lse)
{
    struct problem p = {.shape = {.rows = rows, .keys = rows, .heads = 32, .width = 128, .type = GLM52_DTYPE_BF16},
                        .teacher = {64, key_heads, width, 0.0625f}};
    struct results r = {array_random(GLM52_DTYPE_F32, rows), array_random(p.shape.type, rows * 32 * 128),
                        array_random(GLM52_DTYPE_F32, rows * 128), array_random(GLM52_DTYPE_F32, rows * 32)};
    struct array *workspace;

    p.q = array_random(p.shape.type, rows * 32 * 128);
    p.key = array_random(p.shape.type, rows * 128);
    p.weight = array_random(GLM52_DTYPE_F32, rows * 32);
    p.row_weight = array_random(GLM52_DTYPE_F32, rows);
    p.teacher_q = array_random(p.shape.type, rows * 64 * width);
    p.teacher_key = array_random(p.shape.type, rows * key_heads * width);
    p.teacher_lse = with_lse ? array_random(GLM52_DTYPE_F32, rows * 64) : NULL;
    p.start = array_zero(GLM52_DTYPE_I32, rows);
    p.end = array_zero(GLM52_DTYPE_I32, rows);
    for (int64_t t = 0; t < rows; t++) p.end->value[t] = (double)(t + 1);
    p.shape.pairs = (double)rows * ((double)rows + 1) / 2;
    array_push(p.start);
    array_push(p.end);
    workspace = workspace_for(&p);
    BENCH_LOOP
        learn(&p, &r, workspace->at);
    bench_counted();
}

BENCH_FULL(index_kl_dense, "2048 causal, dense attention", "")
{
    bench_widths(2048, 64, 256, 1);
}

BENCH_FULL(index_kl_dense, "4096 causal, dense attention", "")
{
    bench_widths(4096, 64, 256, 1);
}

BENCH_FULL(index_kl_dense, "8192 causal, dense attention", "")
{
    bench_widths(8192, 64, 256, 1);
}

BENCH_FULL(index_kl_dense, "4096 causal, sparse attention", "")
{
    bench_widths(4096, 1, 576, 0);
}
