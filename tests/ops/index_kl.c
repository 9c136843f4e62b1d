/* What the cases of the indexer's loss do alike: students, runs, what a run is held to, times. */
#include "index_kl.h"

/* `masked`: every so many rows one has weight 0 (0: none, 1: all). */
struct kl_problem kl_student(struct indexer shape, int masked)
{
    struct kl_problem p = {.shape = shape};

    p.q = array_normal(shape.type, shape.rows * shape.heads * shape.width, 1);
    p.key = array_normal(shape.type, shape.keys * shape.width, 1);
    p.weight = array_normal(GLM52_DTYPE_F32, shape.rows * shape.heads, 0.5);
    p.row_weight = array_normal(GLM52_DTYPE_F32, shape.rows, 1);
    for (int64_t t = 0; t < shape.rows; t++)
        if (masked && t % masked == masked - 1) p.row_weight->value[t] = 0;
    array_push(p.row_weight);
    return p;
}

struct kl_results kl_outputs(const struct kl_problem *p)
{
    return (struct kl_results){array_output(GLM52_DTYPE_F32, p->shape.rows), array_output(p->shape.type, p->q->count),
                               array_output(GLM52_DTYPE_F32, p->key->count),
                               array_output(GLM52_DTYPE_F32, p->weight->count)};
}

struct array *kl_workspace(const struct kl_problem *p)
{
    return array_workspace(kl_is_dense(p) ? ops->index_kl_dense_bytes(device, &p->shape, &p->teacher)
                                          : ops->index_kl_selected_bytes(device, &p->shape));
}

void kl_learn(const struct kl_problem *p, const struct kl_results *r, void *workspace)
{
    struct indexer shape = p->shape;

    shape.open = p->open ? p->open->at : NULL;
    if (kl_is_dense(p))
        ops->index_kl_dense(device, &shape, &p->teacher, p->q->at, p->key->at, p->weight->at, p->teacher_q->at,
                            p->teacher_key->at, p->teacher_lse ? p->teacher_lse->at : NULL, p->start->at, p->end->at,
                            p->row_weight->at, r->kl->at, r->dq->at, r->dkey->at, r->dweight->at, workspace);
    else
        ops->index_kl_selected(device, &shape, p->q->at, p->key->at, p->weight->at, p->selected->at, p->target->at,
                               p->row_weight->at, r->kl->at, r->dq->at, r->dkey->at, r->dweight->at, workspace);
}

/* Runs with 1, 2 and 3 threads, which must agree to the bit. */
struct kl_results kl_run(const struct kl_problem *p)
{
    struct kl_results r = kl_outputs(p);

    for (int threads = 1; threads <= 3; threads++) {
        struct array *workspace;

        device_threads(threads);
        workspace = kl_workspace(p);
        kl_learn(p, &r, workspace->at);
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
static double *rounded_dq(const struct kl_problem *p, const struct kl_results *r, const struct kl_wanted *w)
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
void kl_check_results(const struct kl_problem *p, const struct kl_results *r, const struct kl_wanted *w)
{
    int64_t support = kl_is_dense(p) ? p->shape.keys : p->shape.k;
    int64_t terms = 4 * (p->shape.heads * p->shape.width + p->teacher.width) + support;

    check_close(r->kl, w->kl, tolerance(GLM52_DTYPE_F32, terms));
    check_close(r->dq, rounded_dq(p, r, w), tolerance(p->shape.type, terms));
    /* These are fp32, of slopes that a device may round to the operands' type. */
    check_close(r->dkey, w->dkey, tolerance(p->shape.type, terms));
    check_close(r->dweight, w->dweight, tolerance(p->shape.type, terms));
}

/* 1 where a dot is positive, either where it may be rounding; untouched outside the support. Rows of weight 0 may have
 * it. */
static void check_open(const struct kl_problem *p)
{
    double *want = doubles(p->open->count);

    array_fetch(p->open);
    for (int64_t i = 0; i < p->open->count; i++) want[i] = -1;
    for (int64_t t = 0; t < p->shape.rows; t++)
        for (int64_t j = 0, u; (u = kl_key_of(p, t, j)) >= 0; j++)
            for (int64_t h = 0; h < p->shape.heads; h++) {
                int64_t place = kl_place_of(p, t, h, j, u);
                double d = kl_student_dot(p, t, h, u), got = p->open->value[place];

                want[place] = (fabs(d) < 1e-4 && got >= 0) || (p->row_weight->value[t] == 0 && got == -1) ? got : d > 0;
            }
    check_exact(p->open, want);
}

/* Keeping sides changes nothing but the last bits; drawn ones rule the gradients of q and key. */
static void check_sides(struct kl_problem p, const struct kl_wanted *w)
{
    int64_t count = p.shape.rows * p.shape.heads * (kl_is_dense(&p) ? p.shape.keys : p.shape.k);

    p.open = array_output(GLM52_DTYPE_I32, count);
    p.shape.sides = 1;
    struct kl_results r = kl_run(&p);
    kl_check_results(&p, &r, w);
    check_open(&p);
    for (int64_t i = 0; i < count; i++) p.open->value[i] = (double)draw_below(2);
    array_push(p.open);
    p.shape.sides = 2;
    r = kl_run(&p);
    struct kl_wanted drawn = kl_plain(&p);
    kl_check_results(&p, &r, &drawn);
}

/* Against the plain loop; and that one against its differences, if they do not take too long. */
void kl_check(struct kl_problem p)
{
    struct kl_results r = kl_run(&p);
    struct kl_wanted w = kl_plain(&p);
    struct kl_objective o = {&p, &w};

    kl_check_results(&p, &r, &w);
    if (p.shape.rows * p.shape.keys < 4096) check_sides(p, &w);
    if (p.shape.rows > 64) return;
    differences(kl_objective, &o, p.q->value, p.q->count, w.dq);
    differences(kl_objective, &o, p.key->value, p.key->count, w.dkey);
    differences(kl_objective, &o, p.weight->value, p.weight->count, w.dweight);
    kl_check_results(&p, &r, &w);
}

void kl_bench(const struct kl_problem *p)
{
    struct kl_results r = kl_outputs(p);
    struct array *workspace = kl_workspace(p);

    BENCH_LOOP
        kl_learn(p, &r, workspace->at);
    bench_rate(2 * p->shape.pairs * (3.0 * p->shape.heads * p->shape.width + 1.0 * p->teacher.heads * p->teacher.width),
               0);
}
