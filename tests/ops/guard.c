/* Whether an update is made. */
#include "case.h"

static const glm52_dtype F32 = GLM52_DTYPE_F32, F64 = GLM52_DTYPE_F64;

/* Sums 1 .. 7 around a loss of `loss`: what counts is ranges {2}, {4, 5} and {}. */
static void check_guard(double loss, double norm, double spike, double mean, int passes)
{
    struct guard g = {.parts = 3, .first = {2, 4, 6}, .count = {1, 2, 0}, .spike = spike};
    struct array *sums = array_from(F64, 7, (double[]){NAN, 9, loss - 0.75, NAN, 0.5, 0.25, INFINITY});
    struct array *length = array_from(F32, 1, &norm), *factor = array_from(F32, 1, (double[]){0.5});
    struct array *running = array_from(F64, 1, &mean);
    double total = (loss - 0.75) + (0.5 + 0.25);
    double next = !passes ? mean : mean > 0 ? fma(0.05, total, 0.95 * mean) : total;
    double want = passes ? 0.5 : -1;

    ops->guard(device, &g, sums->at, length->at, running->at, factor->at);
    check_exact(factor, &want);
    check_exact(running, &next); /* the same bits: a resumed run goes on with them */
}

CASE(guard, "good, not finite, a spike, the first loss")
{
    check_guard(2.375, 1, 0, 0, 1);
    check_guard(2.375, 1, 0, 1.1, 1);
    check_guard(2.375, 1, 2, 0, 1);  /* no mean yet */
    check_guard(2.375, 1, 2, -1, 1); /* nor one that means anything */
    check_guard(2.375, 1, 2, 1.1, 0);
    check_guard(2.375, 1, 2, 1.1875, 1); /* twice the mean, not above it */
    check_guard(2.375, INFINITY, 2, 3.3, 0);
    check_guard(2.375, NAN, 0, 3.3, 0);
    check_guard(INFINITY, 1, 0, 3.3, 0);
    check_guard(-INFINITY, 1, 0, 3.3, 0);
    check_guard(NAN, 1, 2, 3.3, 0);
    check_guard(-4.1, 1, 2, 3.3, 1);
}
