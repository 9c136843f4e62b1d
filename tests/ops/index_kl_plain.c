/* The indexer's loss in double, by a plain loop over the support of each row. */
#include "index_kl.h"

/* Key number j of row t, -1 beyond the last. */
int64_t kl_key_of(const struct kl_problem *p, int64_t t, int64_t j)
{
    if (kl_is_dense(p)) return p->start->value[t] + (double)j < p->end->value[t] ? (int64_t)p->start->value[t] + j : -1;
    return j < p->shape.k ? (int64_t)p->selected->value[t * p->shape.k + j] : -1;
}

static double plain_dot(const double *x, const double *y, int64_t count)
{
    double sum = 0;

    for (int64_t c = 0; c < count; c++) sum += x[c] * y[c];
    return sum;
}

double kl_student_dot(const struct kl_problem *p, int64_t t, int64_t h, int64_t u)
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
static double teacher_head(const struct kl_problem *p, int64_t t, int64_t h, int64_t n, double *logit)
{
    const struct teacher *teacher = &p->teacher;

    for (int64_t j = 0; j < n; j++) {
        int64_t of = kl_key_of(p, t, j) * teacher->key_heads + (teacher->key_heads == 1 ? 0 : h);
        const double *q = p->teacher_q->value + (t * teacher->heads + h) * teacher->width;

        logit[j] = (double)teacher->scale * plain_dot(q, p->teacher_key->value + of * teacher->width, teacher->width);
    }
    return n ? softmax(logit, n) : INFINITY;
}

/* The teacher's probabilities of row t: by the lse that is given, or if none is, of its own softmax. */
static void teach(const struct kl_problem *p, int64_t t, int64_t n, double *probability)
{
    const struct teacher *teacher = &p->teacher;
    double *share = doubles(n);

    for (int64_t j = 0; j < n; j++) probability[j] = kl_is_dense(p) ? 0 : p->target->value[t * p->shape.k + j];
    for (int64_t h = 0; h < teacher->heads; h++) {
        double lse = teacher_head(p, t, h, n, share);
        double change = p->teacher_lse ? exp(lse - p->teacher_lse->value[t * teacher->heads + h]) : 1;

        for (int64_t j = 0; j < n; j++) probability[j] += change * share[j] / teacher->heads;
    }
}

/* What the teacher's attention leaves for its loss, plus an offset. */
void kl_attend(struct kl_problem *p, double offset)
{
    double *share = doubles(p->shape.keys);

    p->teacher_lse = array_zero(GLM52_DTYPE_F32, p->shape.rows * p->teacher.heads);
    for (int64_t i = 0; i < p->teacher_lse->count; i++) {
        int64_t t = i / p->teacher.heads, n = 0;

        while (kl_key_of(p, t, n) >= 0) n++;
        p->teacher_lse->value[i] = teacher_head(p, t, i % p->teacher.heads, n, share) + offset;
    }
    array_push(p->teacher_lse);
}

/* kl of row t; q, the student's softmax, if wanted. */
static double plain_kl(const struct kl_problem *p, int64_t t, const double *probability, double *q)
{
    static double score[2048];
    int64_t n = 0;
    double kl = 0, log_sum;

    for (; kl_key_of(p, t, n) >= 0; n++) {
        score[n] = 0;
        for (int64_t h = 0; h < p->shape.heads; h++)
            score[n] += p->weight->value[t * p->shape.heads + h] * fmax(0, kl_student_dot(p, t, h, kl_key_of(p, t, n)));
        q[n] = score[n];
    }
    log_sum = softmax(q, n);
    for (int64_t j = 0; j < n; j++) kl += probability[j] * (log(fmax(probability[j], 1e-10)) - (score[j] - log_sum));
    return kl;
}

/* Where open has head h of row t and its key number j, which is u. */
int64_t kl_place_of(const struct kl_problem *p, int64_t t, int64_t h, int64_t j, int64_t u)
{
    int64_t head = t * p->shape.heads + h;

    return kl_is_dense(p) ? head * p->shape.keys + u : head * p->shape.k + j;
}

/* Gradients of row t by the chain rule. */
static void plain_backward(const struct kl_problem *p, int64_t t, const double *q, const struct kl_wanted *w)
{
    int64_t heads = p->shape.heads, width = p->shape.width;
    const double *probability = w->probability + t * p->shape.keys;

    for (int64_t j = 0, u; (u = kl_key_of(p, t, j)) >= 0; j++)
        for (int64_t h = 0; h < heads; h++) {
            double d = kl_student_dot(p, t, h, u), slope = p->row_weight->value[t] * (q[j] - probability[j]);

            w->dweight[t * heads + h] += slope * fmax(0, d);
            int open = p->shape.sides == 2 ? p->open->value[kl_place_of(p, t, h, j, u)] != 0 : d > 0;
            slope *= open ? p->weight->value[t * heads + h] : 0;
            for (int64_t c = 0; c < width; c++) {
                double term = slope * p->key->value[u * width + c];

                w->dq[(t * heads + h) * width + c] += term;
                w->dq_size[(t * heads + h) * width + c] += fabs(term);
                w->dkey[u * width + c] += slope * p->q->value[(t * heads + h) * width + c];
            }
        }
}

struct kl_wanted kl_plain(const struct kl_problem *p)
{
    struct kl_wanted w = {doubles(p->shape.rows), doubles(p->q->count), doubles(p->key->count),
                          doubles(p->weight->count), doubles(p->shape.rows * p->shape.keys), doubles(p->q->count)};
    double *q = doubles(p->shape.keys);

    for (int64_t t = 0; t < p->shape.rows; t++) {
        double *probability = w.probability + t * p->shape.keys;
        int64_t n = 0;

        while (kl_key_of(p, t, n) >= 0) n++;
        teach(p, t, n, probability);
        w.kl[t] = plain_kl(p, t, probability, q);
        plain_backward(p, t, q, &w);
    }
    return w;
}

/* sum of row_weight * kl, of which the gradients are taken. */
double kl_objective(void *argument)
{
    static double q[2048];
    const struct kl_objective *o = argument;
    double sum = 0;

    for (int64_t t = 0; t < o->p->shape.rows; t++)
        sum += o->p->row_weight->value[t] * plain_kl(o->p, t, o->w->probability + t * o->p->shape.keys, q);
    return sum;
}
