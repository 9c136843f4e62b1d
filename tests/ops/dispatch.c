/* Sorting assignments by expert, and the way of rows there and back. */
#include "case.h"

/* Assignments as the router makes them: k different experts per row, ascending, some experts never chosen. */
static struct array *draw_chosen(const struct dispatch *d)
{
    struct array *chosen = array_zero(GLM52_DTYPE_I32, d->rows * d->k);
    int32_t usable = d->experts - d->experts / 4;

    for (int64_t t = 0; t < d->rows; t++)
        for (int32_t e = 0, n = 0; e < usable && n < d->k; e++)
            if (draw_below(usable - e) < d->k - n)
                chosen->value[t * d->k + n++] = e;
    array_push(chosen);
    return chosen;
}

static void check_sort(struct dispatch d)
{
    int64_t count = d.rows * d.k, n = 0;
    struct array *chosen = draw_chosen(&d), *offsets = array_output(GLM52_DTYPE_I32, d.experts + 1);
    struct array *source = array_output(GLM52_DTYPE_I32, count), *place = array_output(GLM52_DTYPE_I32, count);
    double *want_offsets = doubles(d.experts + 1), *want_source = doubles(count), *want_place = doubles(count);

    for (int32_t e = 0; e < d.experts; e++) {
        want_offsets[e] = (double)n;
        for (int64_t i = 0; i < count; i++)
            if (chosen->value[i] == e) {
                want_place[i] = (double)n;
                want_source[n++] = (double)i;
            }
    }
    want_offsets[d.experts] = (double)n;
    for (int threads = 1; threads <= 3; threads++) {
        device_threads(threads);
        ops->dispatch_sort(device, &d, chosen->at, offsets->at, source->at, place->at,
                           array_workspace(ops->dispatch_sort_bytes(device, &d))->at);
        check_exact(offsets, want_offsets);
        check_exact(source, want_source);
        check_exact(place, want_place);
    }
}

CASE(dispatch_sort, "stable, with experts that nobody chose")
{
    check_sort((struct dispatch){.rows = 37, .k = 3, .experts = 11});
    check_sort((struct dispatch){.rows = 41, .k = 1, .experts = 1});
}

CASE(dispatch_sort, "more assignments than a thread takes at a time")
{
    check_sort((struct dispatch){.rows = 2503, .k = 5, .experts = 19});
}

CASE(dispatch_sort, "at the numbers of GLM-5.2, and more experts than there are threads")
{
    check_sort((struct dispatch){.rows = 601, .k = 8, .experts = 256});
    check_sort((struct dispatch){.rows = 1000, .k = 2, .experts = 1100});
    check_sort((struct dispatch){.rows = 300, .k = 3, .experts = 2500});
    check_sort((struct dispatch){.rows = 140000, .k = 1, .experts = 3});
}

CASE(dispatch_sort, "no rows: all offsets are 0")
{
    check_sort((struct dispatch){.rows = 0, .k = 3, .experts = 5});
}

static void check_moves(struct dispatch d)
{
    int64_t count = d.rows * d.k;
    struct array *chosen = draw_chosen(&d), *offsets = array_output(GLM52_DTYPE_I32, d.experts + 1);
    struct array *source = array_output(GLM52_DTYPE_I32, count), *place = array_output(GLM52_DTYPE_I32, count);
    struct array *x = array_normal(d.type, d.rows * d.width, 1), *spread = array_output(d.type, count * d.width);
    struct array *slots = array_normal(d.type, count * d.width, 1), *y = array_normal(d.type, d.rows * d.width, 1);
    double *want_spread = doubles(count * d.width), *want = doubles(d.rows * d.width);

    ops->dispatch_sort(device, &d, chosen->at, offsets->at, source->at, place->at,
                       array_workspace(ops->dispatch_sort_bytes(device, &d))->at);
    array_fetch(source);
    array_fetch(place);
    for (int64_t i = 0; i < count; i++)
        for (int64_t c = 0; c < d.width; c++)
            want_spread[i * d.width + c] = x->value[(int64_t)source->value[i] / d.k * d.width + c];
    ops->dispatch_spread(device, &d, place->at, x->at, spread->at);
    check_exact(spread, want_spread);

    for (int64_t t = 0; t < d.rows; t++)
        for (int64_t c = 0; c < d.width; c++) {
            want[t * d.width + c] = d.add ? y->value[t * d.width + c] : 0;
            for (int32_t j = 0; j < d.k; j++)
                want[t * d.width + c] += slots->value[(int64_t)place->value[t * d.k + j] * d.width + c];
        }
    if (d.add) { /* to another array, which stays */
        struct dispatch other = d;
        struct array *to = array_output(d.type, y->count);

        other.from = y->at;
        ops->dispatch_collect(device, &other, place->at, slots->at, to->at);
        check_close(to, want, tolerance(d.type, d.k));

        struct array *both = array_normal(d.type, y->count, 1);
        double *want_both = doubles(y->count);
        for (int64_t i = 0; i < y->count; i++) want_both[i] = want[i] + both->value[i];
        other.add = 2;
        ops->dispatch_collect(device, &other, place->at, slots->at, both->at);
        check_close(both, want_both, tolerance(d.type, d.k + 1));
    } else {
        array_poison(y);
    }
    ops->dispatch_collect(device, &d, place->at, slots->at, y->at);
    check_close(y, want, tolerance(d.type, d.k));
}

CASE(dispatch_collect, "there and back, overwriting and adding, in both types")
{
    const struct dispatch shape[] = {
        {.rows = 29, .width = 21, .k = 4, .experts = 9, .type = GLM52_DTYPE_F32},
        {.rows = 23, .width = 16, .k = 3, .experts = 7, .type = GLM52_DTYPE_BF16},
        {.rows = 31, .width = 5, .k = 1, .experts = 4, .type = GLM52_DTYPE_F32},
        {.rows = 7, .width = 1031, .k = 2, .experts = 5, .type = GLM52_DTYPE_BF16},
        {.rows = 0, .width = 5, .k = 2, .experts = 4, .type = GLM52_DTYPE_F32},
        {.rows = 5, .width = 2056, .k = 8, .experts = 16, .type = GLM52_DTYPE_BF16},
        {.rows = 3, .width = 24, .k = 11, .experts = 21, .type = GLM52_DTYPE_BF16},
    };

    for (int i = 0; i < 14; i++) {
        struct dispatch d = shape[i / 2];

        d.add = i % 2;
        check_moves(d);
    }
}

BENCH(dispatch_spread, "4096 rows of 512, 4 of 16 experts")
{
    struct dispatch d = {.rows = 4096, .width = 512, .k = 4, .experts = 16, .type = GLM52_DTYPE_F32};
    struct array *place = array_zero(GLM52_DTYPE_I32, d.rows * d.k);
    struct array *x = array_normal(d.type, d.rows * d.width, 1), *y = array_output(d.type, d.rows * d.k * d.width);

    for (int64_t i = 0; i < d.rows * d.k; i++)
        place->value[i] = (double)(i % d.k * d.rows + i / d.k);
    array_push(place);
    BENCH_LOOP
        ops->dispatch_spread(device, &d, place->at, x->at, y->at);
    bench_rate(0, 2.0 * 4 * (double)(d.rows * d.k * d.width));
}

BENCH(dispatch_collect, "4096 rows of 512, 4 of 16 experts")
{
    struct dispatch d = {.rows = 4096, .width = 512, .k = 4, .experts = 16, .type = GLM52_DTYPE_F32};
    struct array *place = array_zero(GLM52_DTYPE_I32, d.rows * d.k);
    struct array *x = array_normal(d.type, d.rows * d.k * d.width, 1), *y = array_output(d.type, d.rows * d.width);

    for (int64_t i = 0; i < d.rows * d.k; i++)
        place->value[i] = (double)(i % d.k * d.rows + i / d.k);
    array_push(place);
    BENCH_LOOP
        ops->dispatch_collect(device, &d, place->at, x->at, y->at);
    bench_rate(0, 4 * (double)(d.rows * (d.k + 1) * d.width));
}

/* At the width of GLM-5.2, bf16, 8 experts a row. what: 0 sort, 1 spread, 2 collect. */
static void bench_full(int what, int64_t rows, int32_t experts, int32_t add)
{
    struct dispatch d = {.rows = rows, .width = 6144, .k = 8, .experts = experts, .add = add, .type = GLM52_DTYPE_BF16};
    struct array *chosen = draw_chosen(&d), *offsets = array_output(GLM52_DTYPE_I32, experts + 1);
    struct array *source = array_output(GLM52_DTYPE_I32, rows * d.k),
                 *place = array_output(GLM52_DTYPE_I32, rows * d.k);
    struct array *workspace = array_workspace(ops->dispatch_sort_bytes(device, &d));
    struct array *x = array_random(d.type, what ? rows * d.width : 0);
    struct array *slots = array_random(d.type, what ? rows * d.k * d.width : 0);

    if (add > 1) d.from = array_random(d.type, rows * d.width)->at;
    ops->dispatch_sort(device, &d, chosen->at, offsets->at, source->at, place->at, workspace->at);
    BENCH_LOOP {
        if (what == 0)
            ops->dispatch_sort(device, &d, chosen->at, offsets->at, source->at, place->at, workspace->at);
        else if (what == 1)
            ops->dispatch_spread(device, &d, place->at, x->at, slots->at);
        else
            ops->dispatch_collect(device, &d, place->at, slots->at, x->at);
    }
    bench_counted();
}

BENCH_FULL(dispatch_sort, "8192 rows, 8 of 256", "")
{
    bench_full(0, 8192, 256, 0);
}

BENCH_FULL(dispatch_sort, "16384 rows, 8 of 32", "")
{
    bench_full(0, 16384, 32, 0);
}

BENCH_FULL(dispatch_spread, "8192 x 6144, 8 of 256", "")
{
    bench_full(1, 8192, 256, 0);
}

BENCH_FULL(dispatch_spread, "4096 x 6144, 8 of 32", "")
{
    bench_full(1, 4096, 32, 0);
}

BENCH_FULL(dispatch_spread, "16384 x 6144, 8 of 32", "")
{
    bench_full(1, 16384, 32, 0);
}

BENCH_FULL(dispatch_collect, "8192 x 6144, 8 of 256", "")
{
    bench_full(2, 8192, 256, 0);
}

BENCH_FULL(dispatch_collect, "8192 x 6144, 8 of 32, added", "")
{
    bench_full(2, 8192, 32, 1);
}

BENCH_FULL(dispatch_collect, "4096 x 6144, 8 of 32, added", "")
{
    bench_full(2, 4096, 32, 1);
}

BENCH_FULL(dispatch_collect, "8192 x 6144, 8 of 32, added to two", "")
{
    bench_full(2, 8192, 32, 2);
}
