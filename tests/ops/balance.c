/* Auxiliary losses of the router, counts, correction bias. */
#include "case.h"

static const glm52_dtype F32 = GLM52_DTYPE_F32, F64 = GLM52_DTYPE_F64, I32 = GLM52_DTYPE_I32;

struct problem {
    struct route_auxiliary shape;
    struct array *logits, *sequence;
    double *map; /* [rows,experts]: 1 for the k best */
};

static double sigmoid(double x)
{
    return 1 / (1 + exp(-x));
}

/* An expert is among the k best if fewer than k are better, or equal and lower. */
static void fill_map(struct problem *p)
{
    int64_t experts = p->shape.experts;

    for (int64_t t = 0; t < p->shape.rows; t++)
        for (int64_t e = 0; e < experts; e++) {
            const double *logit = p->logits->value + t * experts;
            int32_t better = 0;

            for (int64_t i = 0; i < experts; i++) better += logit[i] > logit[e] || (logit[i] == logit[e] && i < e);
            p->map[t * experts + e] = better < p->shape.k;
        }
}

static struct problem problem(struct route_auxiliary shape, const double *sequence)
{
    struct problem p = {shape, array_normal(F32, shape.rows * shape.experts, 2),
                        array_from(I32, shape.sequences + 1, sequence), doubles(shape.rows * shape.experts)};

    fill_map(&p);
    return p;
}

static double balance(const struct problem *p, int64_t first, int64_t end)
{
    int64_t experts = p->shape.experts;
    double rows = (double)(end - first), sum = 0;

    for (int64_t e = 0; e < experts; e++) {
        double count = 0, share = 0;

        for (int64_t t = first; t < end; t++) {
            double s = 1e-20;

            for (int64_t i = 0; i < experts; i++) s += sigmoid(p->logits->value[t * experts + i]);
            share += sigmoid(p->logits->value[t * experts + e]) / s;
            count += p->map[t * experts + e];
        }
        sum += count * share;
    }
    return sum * (double)p->shape.coefficient * (double)experts / (p->shape.k * rows * rows);
}

static double objective(void *argument)
{
    const struct problem *p = argument;
    const double *at = p->sequence->value;
    double sequences = 0, sum = 0, squares = 0;

    for (int32_t n = 0; n < p->shape.sequences; n++) {
        if (at[n] == at[n + 1]) continue;
        sum += balance(p, (int64_t)at[n], (int64_t)at[n + 1]);
        sequences++;
    }
    if (sequences == 0) return 0;
    for (int64_t t = (int64_t)at[0]; t < (int64_t)at[p->shape.sequences]; t++) {
        double z = 0;

        for (int32_t e = 0; e < p->shape.experts; e++) z += exp(p->logits->value[t * p->shape.experts + e]);
        squares += log(z) * log(z);
    }
    return sum / sequences + (double)p->shape.z_coefficient * squares / (at[p->shape.sequences] - at[0]);
}

static void check(struct problem p)
{
    int64_t count = p.logits->count;
    struct array *dlogits = array_zero(F32, count), *loss = array_zero(F64, 1);
    double *want = doubles(count), want_loss = objective(&p) + 3;

    differences(objective, &p, p.logits->value, count, want);
    for (int threads = 1; threads <= 3; threads++) {
        device_threads(threads);
        memset(dlogits->value, 0, (size_t)count * sizeof(double));
        loss->value[0] = 3;
        array_push(dlogits);
        array_push(loss);
        ops->route_auxiliary(device, &p.shape, p.logits->at, p.sequence->at, dlogits->at, loss->at, NULL);
        check_same(dlogits);
        check_same(loss);
    }
    check_close(dlogits, want, tolerance(F32, p.shape.experts));
    check_close(loss, &want_loss, tolerance(F32, 1));
    for (int64_t i = 0; i < count; i++) { /* it is added to */
        want[i] += 1;
        dlogits->value[i] = 1;
    }
    array_push(dlogits);
    ops->route_auxiliary(device, &p.shape, p.logits->at, p.sequence->at, dlogits->at, loss->at, NULL);
    check_close(dlogits, want, tolerance(F32, 1));
}

static struct route_auxiliary shape_of(int64_t rows, int32_t experts, int32_t k, int32_t sequences)
{
    return (struct route_auxiliary){rows, experts, k, sequences, 0.5f, 0.25f};
}

CASE(route_auxiliary, "one sequence, several, rows of none, empty ones")
{
    check(problem(shape_of(23, 7, 3, 1), (double[]){0, 23}));
    check(problem(shape_of(29, 11, 2, 3), (double[]){0, 1, 12, 29}));
    check(problem(shape_of(19, 5, 2, 2), (double[]){4, 11, 17}));
    check(problem(shape_of(17, 6, 1, 5), (double[]){0, 0, 9, 9, 17, 17}));
}

CASE(route_auxiliary, "many rows")
{
    check(problem(shape_of(211, 3, 2, 2), (double[]){1, 140, 210}));
}

CASE(route_auxiliary, "no rows, no sequence, every expert chosen")
{
    check(problem(shape_of(0, 5, 2, 1), (double[]){0, 0}));
    check(problem(shape_of(3, 5, 2, 0), (double[]){0}));
    check(problem(shape_of(5, 7, 7, 1), (double[]){0, 5}));
}

CASE(route_auxiliary, "more experts than a warp has lanes, more sequences than parts")
{
    double sequence[301];

    check(problem(shape_of(3, 70, 8, 1), (double[]){0, 3}));
    check(problem(shape_of(2, 140, 3, 2), (double[]){0, 1, 2}));
    for (int n = 0; n <= 300; n++) sequence[n] = n < 40 ? n : 40;
    check(problem(shape_of(40, 3, 2, 300), sequence));
}

CASE(route_auxiliary, "either loss alone")
{
    struct route_auxiliary shape = shape_of(13, 9, 4, 2);

    shape.coefficient = 0;
    check(problem(shape, (double[]){0, 6, 13}));
    shape = shape_of(13, 9, 4, 2);
    shape.z_coefficient = 0;
    check(problem(shape, (double[]){0, 6, 13}));
}

CASE(route_auxiliary, "equal experts: the lower ones count")
{
    struct problem p = problem(shape_of(31, 8, 3, 2), (double[]){0, 14, 31});

    for (int64_t i = 0; i < p.logits->count; i++) p.logits->value[i] = (double)draw_below(2);
    array_push(p.logits);
    fill_map(&p);
    check(p);
}

/* Counts of an earlier call stand beside this one's: the loss is that of one sequence whose counts are the sum. */
CASE(route_auxiliary, "the step so far")
{
    struct problem whole = problem(shape_of(46, 7, 3, 1), (double[]){0, 46});
    struct array *running = array_zero(F64, 8), *dlogits = array_zero(F32, 46 * 7), *loss = array_zero(F64, 1);
    double first, want = 0, count[8] = {0};

    whole.shape.z_coefficient = 0;
    for (int part = 0; part < 2; part++) { /* rows 0 .. 22, then 23 .. 45 */
        struct route_auxiliary half = whole.shape;
        half.rows = 23;
        ops->route_auxiliary(device, &half, (float *)whole.logits->at + part * 23 * 7,
                             array_from(I32, 2, (double[]){0, 23})->at, (float *)dlogits->at + part * 23 * 7, loss->at,
                             running->at);
        for (int64_t t = part * 23; t < (part + 1) * 23; t++)
            for (int e = 0; e < 7; e++) count[e] += whole.map[t * 7 + e];
        count[7] += 23;
        for (int64_t t = part * 23; t < (part + 1) * 23; t++) {
            double sum = 0;
            for (int e = 0; e < 7; e++) sum += 1 / (1 + exp(-whole.logits->value[t * 7 + e]));
            for (int e = 0; e < 7; e++)
                want += 0.5 * 7 / (3 * 23 * count[7]) * count[e] / (1 + exp(-whole.logits->value[t * 7 + e])) / sum;
        }
        if (!part) first = want;
    }
    ck_assert(want > first);
    check_exact(running, count);
    check_close(loss, &want, tolerance(F32, 7));
}

CASE(limit_capacity, "by place, by weight, with ties; the others stay")
{
    struct route shape = {.rows = 4, .experts = 3, .k = 2};
    struct array *chosen = array_from(I32, 8, (double[]){0, 1, 0, 2, 0, 1, 1, 2}), *weight,
                 *dropped = array_zero(F64, 1);
    static const double start[] = {0.25, 1, 0.5, 1, 0.5, 2, 3, 1};
    static const double by_place[] = {0.25, 1, 0.5, 1, 0, 2, 0, 1}, by_weight[] = {0, 0, 0.5, 1, 0.5, 2, 3, 1};
    static const double first_rows[] = {1, 1, 0, 1, 0, 0, 0, 0};
    double lost = 2;

    for (int how = 0; how < 2; how++) {
        weight = array_from(F32, 8, start);
        dropped = array_zero(F64, 1);
        ops->limit_capacity(device, &shape, 2, how, chosen->at, weight->at, dropped->at);
        check_exact(weight, how ? by_weight : by_place);
        check_exact(dropped, &lost);
    }
    weight = array_from(F32, 8, (double[]){1, 1, 1, 1, 1, 1, 1, 1});
    ops->limit_capacity(device, &shape, 1, 1, chosen->at, weight->at, NULL); /* equal: the first rows */
    check_exact(weight, first_rows);
}

/* Assignments by chance, weights that are often equal: each is held to the number of those that come before it. */
static void check_capacity(int64_t rows, int32_t experts, int32_t k, int64_t capacity, int by_weight)
{
    struct route shape = {.rows = rows, .experts = experts, .k = k};
    struct array *chosen = array_zero(I32, rows * k), *weight = array_zero(F32, rows * k),
                 *dropped = array_zero(F64, 1);
    double *want = doubles(rows * k), lost = 0;

    for (int64_t i = 0; i < rows * k; i++) {
        chosen->value[i] = (double)((draw_below(experts / k) + i % k * (experts / k)) % experts);
        weight->value[i] = draw_below(2) ? draw_uniform() : (double)draw_below(4) / 8;
    }
    array_push(chosen);
    array_push(weight);
    for (int64_t i = 0; i < rows * k; i++) {
        int64_t before = 0;

        for (int64_t j = 0; j < rows * k; j++) {
            double other = weight->value[j], own = weight->value[i];

            if (chosen->value[j] == chosen->value[i])
                before += by_weight ? other > own || (other == own && j < i) : j < i;
        }
        want[i] = before < capacity ? weight->value[i] : 0;
        lost += before >= capacity;
    }
    ops->limit_capacity(device, &shape, capacity, by_weight, chosen->at, weight->at, dropped->at);
    check_exact(weight, want);
    check_exact(dropped, &lost);
}

CASE(limit_capacity, "many rows of few experts and of many, places for none and for all")
{
    for (int how = 0; how < 2; how++) {
        check_capacity(700, 9, 3, 190, how);
        check_capacity(120, 256, 8, 3, how);
        check_capacity(5200, 1, 1, 4500, how);
        check_capacity(53, 4, 2, 0, how);
        check_capacity(53, 4, 2, 53, how);
        check_capacity(0, 4, 2, 1, how);
    }
}

CASE(clear_where_zero, "only there, even what is not finite")
{
    struct array *x = array_from(F32, 4, (double[]){1, NAN, INFINITY, -2});
    static const double want[] = {1, 0, 0, -2};

    ops->clear_where_zero(device, 4, array_from(F32, 4, (double[]){1, 0, 0, -3})->at, x->at);
    check_exact(x, want);
}

CASE(count_experts, "all rows, some rows, none; added to what is there")
{
    struct route shape = {.rows = 41, .experts = 7, .k = 3};
    struct array *chosen = array_zero(I32, 41 * 3), *counted = array_zero(F32, 41), *counts;
    double want[2][7], start[7];

    for (int64_t e = 0; e < 7; e++) want[0][e] = want[1][e] = start[e] = ldexp(1, 24) + (double)e;
    for (int64_t t = 0; t < 41; t++) {
        counted->value[t] = (double)(t % 3) / 2;
        for (int64_t j = 0; j < 3; j++) {
            int64_t e = (draw_below(2) + 2 * j) % 7;

            chosen->value[t * 3 + j] = (double)e;
            want[0][e] += 1;
            want[1][e] += counted->value[t] != 0;
        }
    }
    array_push(chosen);
    array_push(counted);
    for (int masked = 0; masked < 2; masked++) {
        counts = array_from(F64, 7, start);
        ops->count_experts(device, &shape, chosen->at, masked ? counted->at : NULL, counts->at);
        check_exact(counts, want[masked]);
    }
    shape.rows = 0;
    ops->count_experts(device, &shape, chosen->at, NULL, counts->at);
    check_exact(counts, want[1]);
}

CASE(balance_bias, "above, below and at the mean; a step that moves nothing")
{
    struct array *bias = array_normal(F32, 5, 1), *counts = array_from(F64, 5, (double[]){0, 7, 5, 9, 4});
    struct array *moves = array_from(F32, 1, (double[]){0}), *stays = array_from(F32, 1, (double[]){-1});
    double want[5], sign[5] = {1, -1, 0, -1, 1};

    for (int e = 0; e < 5; e++) want[e] = (double)(float)(bias->value[e] + sign[e] * 0.125);
    ops->balance_bias(device, 5, 0.125f, NULL, counts->at, bias->at);
    check_exact(bias, want);
    ops->balance_bias(device, 5, 0.125f, stays->at, counts->at, bias->at);
    check_exact(bias, want);
    for (int e = 0; e < 5; e++) want[e] = (double)(float)(want[e] + sign[e] * 0.125);
    ops->balance_bias(device, 5, 0.125f, moves->at, counts->at, bias->at);
    check_exact(bias, want);
}

BENCH(route_auxiliary, "8 of 256 experts, 4096 rows")
{
    struct problem p = {.shape = shape_of(4096, 256, 8, 1), .logits = array_normal(F32, 4096 * 256, 2),
                        .sequence = array_from(I32, 2, (double[]){0, 4096})};
    struct array *dlogits = array_zero(F32, 4096 * 256), *loss = array_zero(F64, 1);

    BENCH_LOOP
        ops->route_auxiliary(device, &p.shape, p.logits->at, p.sequence->at, dlogits->at, loss->at, NULL);
    bench_rate(0, 12.0 * 4096 * 256);
}

BENCH_FULL(route_auxiliary, "8192 rows, 8 of 256, 1 sequence", "")
{
    struct route_auxiliary shape = shape_of(8192, 256, 8, 1);
    struct array *logits = array_random(F32, 8192 * 256), *sequence = array_from(I32, 2, (double[]){0, 8192});
    struct array *dlogits = array_zero(F32, 8192 * 256), *loss = array_zero(F64, 1);

    BENCH_LOOP
        ops->route_auxiliary(device, &shape, logits->at, sequence->at, dlogits->at, loss->at, NULL);
    bench_counted();
}

/* Skewed: low experts are chosen more often. what: 0 counts, 1 capacity by place, 2 by weight. */
static void bench_assignments(int what)
{
    enum { ROWS = 8192, EXPERTS = 256, K = 8 };
    struct route r = {.rows = ROWS, .experts = EXPERTS, .k = K};
    struct array *chosen = array_zero(I32, ROWS * K), *weight = array_normal(F32, ROWS * K, 1);
    struct array *counts = array_zero(F64, EXPERTS), *dropped = array_zero(F64, 1);

    for (int64_t i = 0; i < ROWS * K; i++) {
        double u = draw_uniform();

        weight->value[i] = fabs(weight->value[i]);
        chosen->value[i] = (double)(i % K * (EXPERTS / K)) + floor(u * u * (EXPERTS / K));
    }
    array_push(chosen);
    array_push(weight);
    BENCH_LOOP {
        if (what)
            ops->limit_capacity(device, &r, ROWS * K / EXPERTS, what == 2, chosen->at, weight->at, dropped->at);
        else
            ops->count_experts(device, &r, chosen->at, NULL, counts->at);
    }
    bench_counted();
}

BENCH_FULL(count_experts, "8192 rows, 8 of 256", "")
{
    bench_assignments(0);
}

BENCH_FULL(limit_capacity, "8192 rows, 8 of 256, by place", "")
{
    bench_assignments(1);
}

BENCH_FULL(limit_capacity, "8192 rows, 8 of 256, by weight", "")
{
    bench_assignments(2);
}

BENCH_FULL(clear_where_zero, "8192 x 8", "")
{
    struct array *mask = array_random(F32, 8192 * 8), *x = array_random(F32, 8192 * 8);

    BENCH_LOOP
        ops->clear_where_zero(device, x->count, mask->at, x->at);
    bench_counted();
}

BENCH_FULL(balance_bias, "256 experts", "")
{
    struct array *bias = array_random(F32, 256), *counts = array_zero(F64, 256);

    BENCH_LOOP
        ops->balance_bias(device, 256, 1e-3f, NULL, counts->at, bias->at);
    bench_counted();
}
