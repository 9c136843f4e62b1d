/* The indexer's loss, over selected keys and over all visible ones: what the cases of both share. */
#ifndef GLM52_TESTS_OPS_INDEX_KL_H
#define GLM52_TESTS_OPS_INDEX_KL_H

#include "case.h"

/* Either form: rows have a support of keys (selected, or start .. end), and the teacher's probabilities on it. */
struct kl_problem {
    struct indexer shape;
    struct teacher teacher;                      /* heads = 0: the form with selected keys */
    struct array *q, *key, *weight, *row_weight; /* both */
    struct array *selected, *target;             /* selected */
    struct array *start, *end, *teacher_q, *teacher_key; /* dense */
    struct array *teacher_lse;                   /* dense; NULL: nobody has made it */
    struct array *open;                          /* of shape.open; NULL: not wanted */
};

static inline int kl_is_dense(const struct kl_problem *p)
{
    return p->teacher.heads > 0;
}

/* With random q, key, weight and row_weight. `masked`: every so many rows one has weight 0 (0: none, 1: all). */
struct kl_problem kl_student(struct indexer shape, int masked);

/* ---- the plain loop ---- */

struct kl_wanted {
    double *kl, *dq, *dkey, *dweight;
    double *probability; /* [rows, keys], by number of the key */
    double *dq_size;     /* as dq, of the terms' magnitudes */
};

struct kl_wanted kl_plain(const struct kl_problem *p);

/* Key number j of row t, -1 beyond the last. */
int64_t kl_key_of(const struct kl_problem *p, int64_t t, int64_t j);
/* Where open has head h of row t and its key number j, which is u. */
int64_t kl_place_of(const struct kl_problem *p, int64_t t, int64_t h, int64_t j, int64_t u);
double kl_student_dot(const struct kl_problem *p, int64_t t, int64_t h, int64_t u);
/* Makes teacher_lse: what the teacher's attention leaves for its loss, plus an offset. */
void kl_attend(struct kl_problem *p, double offset);

/* For differences(): sum of row_weight * kl, of which the gradients are taken. */
struct kl_objective {
    const struct kl_problem *p;
    const struct kl_wanted *w;
};
double kl_objective(void *objective);

/* ---- the operation ---- */

struct kl_results {
    struct array *kl, *dq, *dkey, *dweight;
};

struct kl_results kl_outputs(const struct kl_problem *p);
struct array *kl_workspace(const struct kl_problem *p);
void kl_learn(const struct kl_problem *p, const struct kl_results *r, void *workspace);
/* With 1, 2 and 3 threads, which must agree to the bit. */
struct kl_results kl_run(const struct kl_problem *p);

void kl_check_results(const struct kl_problem *p, const struct kl_results *r, const struct kl_wanted *w);
/* A run against the plain loop; and that one against its differences, if they do not take too long. */
void kl_check(struct kl_problem p);

void kl_bench(const struct kl_problem *p);

#endif
