/* Balance of the experts (training.md 5): auxiliary losses of the router, counts of assignments, correction bias. */
#include "ops/count.h"
#include "ops/cpu/route.h"
#include "ops/cpu/row.h"

enum {
    MOST_EXPERTS = 4096, /* as many as a configuration may have; arrays of one per expert live on the stack */
    BLOCK_ROWS = 64,     /* whose sums one thread takes */
};

/* Sums over the rows of a sequence. */
struct sums {
    double share[MOST_EXPERTS]; /* of s', per expert */
    double count[MOST_EXPERTS]; /* of rows with the expert among their k best */
    double squares;             /* of logsumexp */
};

static void clear(struct sums *to, int32_t experts)
{
    memset(to->share, 0, (size_t)experts * sizeof *to->share);
    memset(to->count, 0, (size_t)experts * sizeof *to->count);
    to->squares = 0;
}

/* Writes the sigmoids of a row; their sum. */
static double sigmoids(int32_t experts, const float *logit, float *s)
{
    double sum = (double)ROUTE_SUM_FLOOR;

    for (int32_t e = 0; e < experts; e++) s[e] = sigmoid(logit[e]);
    for (int32_t e = 0; e < experts; e++) sum += (double)s[e];
    return sum;
}

/* Writes exp(logit - largest); logsumexp, and the sum of what was written in *sum. */
static double exponentials(int32_t experts, const float *logit, float *e, double *sum)
{
    float most = logit[0];

    *sum = 0;
    for (int32_t i = 1; i < experts; i++) most = logit[i] > most ? logit[i] : most;
    for (int32_t i = 0; i < experts; i++) e[i] = exp_f32(logit[i] - most);
    for (int32_t i = 0; i < experts; i++) *sum += (double)e[i];
    return log(*sum) + (double)most;
}

static void sum_row(const struct route_auxiliary *a, const float *logit, struct sums *to)
{
    float row[MOST_EXPERTS];
    int32_t chosen[MOST_EXPERTS];
    double sum, z;

    if (a->z_coefficient != 0) {
        z = exponentials(a->experts, logit, row, &sum);
        to->squares += z * z;
    }
    if (a->coefficient == 0) return;
    route_choose(a->experts, a->k, logit, NULL, chosen, row);
    for (int32_t j = 0; j < a->k; j++) to->count[chosen[j]] += 1;
    sum = sigmoids(a->experts, logit, row);
    sum = 1 / sum;
    for (int32_t e = 0; e < a->experts; e++) to->share[e] += (double)row[e] * sum;
}

/* Rows first .. end - 1. Blocks of rows are added in their order. */
static void sum_rows(struct stream *s, const struct route_auxiliary *a, const float *logits, int64_t first, int64_t end,
                     struct sums *all)
{
    clear(all, a->experts);
#pragma omp parallel for ordered schedule(static, 1) num_threads(cpu_team(s, (double)(end - first) * a->experts * 16))
    for (int64_t block = first; block < end; block += BLOCK_ROWS) {
        struct sums part;

        clear(&part, a->experts);
        for (int64_t t = block; t < least(block + BLOCK_ROWS, end); t++) sum_row(a, logits + t * a->experts, &part);
#pragma omp ordered
        {
            for (int32_t e = 0; e < a->experts; e++) all->share[e] += part.share[e];
            for (int32_t e = 0; e < a->experts; e++) all->count[e] += part.count[e];
            all->squares += part.squares;
        }
    }
}

/* With S = sum s and balance = factor * sum_e count_e sum_t s'[t,e]:
 * ds_e = factor (count_e - sum_i count_i s_i / S) / S. */
static void add_gradient(const struct route_auxiliary *a, const float *logit, const double *count, double factor,
                         double z_factor, float *dlogit)
{
    float row[MOST_EXPERTS];
    double sum, mean = 0, z;

    if (factor != 0) {
        sum = sigmoids(a->experts, logit, row);
        for (int32_t e = 0; e < a->experts; e++) mean += count[e] * (double)row[e];
        mean /= sum;
        factor /= sum;
        for (int32_t e = 0; e < a->experts; e++)
            dlogit[e] += (float)(factor * (count[e] - mean)) * sigmoid_slope(logit[e]);
    }
    if (z_factor != 0) {
        z = exponentials(a->experts, logit, row, &sum);
        z_factor *= 2 * z / sum;
        for (int32_t e = 0; e < a->experts; e++) dlogit[e] += (float)z_factor * row[e];
    }
}

void cpu_route_auxiliary(struct stream *s, const struct route_auxiliary *a, const float *logits,
                         const int32_t *sequence, float *dlogits, double *loss, double *running)
{
    struct counted call = count_route_auxiliary(s, a);
    struct sums all;
    double sequences = 0, z_factor = 0, sum = 0;

    for (int32_t n = 0; n < a->sequences; n++) sequences += sequence[n + 1] > sequence[n];
    if (sequences > 0) z_factor = (double)a->z_coefficient / (sequence[a->sequences] - sequence[0]);
    for (int32_t n = 0; n < a->sequences; n++) {
        int64_t first = sequence[n], end = sequence[n + 1];
        double rows = (double)(end - first), all_rows = rows, factor, balance = 0;

        if (end <= first) continue;
        sum_rows(s, a, logits, first, end, &all);
        if (running) {
            for (int32_t e = 0; e < a->experts; e++) all.count[e] = running[e] += all.count[e];
            all_rows = running[a->experts] += rows;
        }
        factor = (double)a->coefficient * a->experts / (a->k * rows * all_rows * sequences);
        for (int32_t e = 0; e < a->experts; e++) balance += all.count[e] * all.share[e];
        sum += factor * balance + z_factor * all.squares;
#pragma omp parallel for schedule(static) num_threads(cpu_team(s, rows * a->experts * 16))
        for (int64_t t = first; t < end; t++)
            add_gradient(a, logits + t * a->experts, all.count, factor, z_factor, dlogits + t * a->experts);
    }
    *loss += sum;
    count_end(call);
}

void cpu_count_experts(struct stream *s, const struct route *r, const int32_t *chosen, const float *counted,
                       double *counts)
{
    struct counted call = count_count_experts(s, r, counted != NULL);

    for (int64_t t = 0; t < r->rows; t++)
        for (int32_t j = 0; j < r->k; j++)
            if (!counted || counted[t] != 0) counts[chosen[t * r->k + j]] += 1;
    count_end(call);
}

/* The assignment of this expert in row t, or -1. chosen is ascending. */
static int32_t slot_of(const struct route *r, const int32_t *chosen, int64_t t, int32_t expert)
{
    for (int32_t j = 0; j < r->k; j++)
        if (chosen[t * r->k + j] == expert) return j;
    return -1;
}

/* Would row t keep its place among the `capacity` largest weights of the expert? */
static int has_place(const struct route *r, int64_t capacity, const int32_t *chosen, const float *weight, int64_t t,
                     int32_t j)
{
    float own = weight[t * r->k + j];
    int64_t ahead = 0;

    for (int64_t u = 0; u < r->rows && ahead < capacity; u++) {
        int32_t i = slot_of(r, chosen, u, chosen[t * r->k + j]);
        if (i < 0 || u == t) continue;
        float other = fabsf(weight[u * r->k + i]);
        ahead += other > own || (other == own && u < t);
    }
    return ahead < capacity;
}

void cpu_limit_capacity(struct stream *s, const struct route *r, int64_t capacity, int32_t by_weight,
                        const int32_t *chosen, float *weight, double *dropped)
{
    struct counted call = count_limit_capacity(s, r);
    int64_t taken[MOST_EXPERTS] = {0}, all[MOST_EXPERTS] = {0}, lost = 0;

    for (int64_t i = 0; i < r->rows * r->k; i++) all[chosen[i]]++;
    for (int64_t t = 0; t < r->rows; t++)
        for (int32_t j = 0; j < r->k; j++) {
            int32_t e = chosen[t * r->k + j];
            float *w = &weight[t * r->k + j];
            int keeps = all[e] <= capacity ||
                        (by_weight ? has_place(r, capacity, chosen, weight, t, j) : taken[e] < capacity);
            taken[e] += keeps;
            if (keeps) continue;
            *w = -*w; /* marked: rows behind this one must still see how large it was */
            lost++;
        }
    for (int64_t i = 0; lost && i < r->rows * r->k; i++)
        if (signbit(weight[i])) weight[i] = 0;
    if (dropped) *dropped += (double)lost;
    count_end(call);
}

void cpu_clear_where_zero(struct stream *s, int64_t count, const float *mask, float *x)
{
    struct counted call = count_clear_where_zero(s, count);

#pragma omp parallel for schedule(static) num_threads(cpu_team(s, (double)count))
    for (int64_t i = 0; i < count; i++) x[i] = mask[i] == 0 ? 0 : x[i];
    count_end(call);
}

void cpu_balance_bias(struct stream *s, int32_t experts, float rate, const float *coefficient, const double *counts,
                      float *bias)
{
    struct counted call = count_balance_bias(s, experts);
    double mean = 0;

    for (int32_t e = 0; e < experts; e++) mean += counts[e];
    mean /= experts;
    for (int32_t e = 0; e < experts && (!coefficient || *coefficient >= 0); e++)
        bias[e] += rate * (float)((mean > counts[e]) - (mean < counts[e]));
    count_end(call);
}
