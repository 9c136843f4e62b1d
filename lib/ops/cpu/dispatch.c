/* The way of rows to their experts and back: a stable counting sort of the assignments, a copy in its order, and the
 * sum over a row's experts. */
#include "ops/count.h"
#include "ops/cpu/cpu.h"
#include "ops/cpu/row.h"

enum { BLOCK = 2048 }; /* assignments counted and placed by one thread at a time */

static int64_t block_count(const struct dispatch *d)
{
    return (d->rows * d->k + BLOCK - 1) / BLOCK;
}

size_t cpu_dispatch_sort_bytes(struct stream *s, const struct dispatch *d)
{
    (void)s;
    return (size_t)(block_count(d) * d->experts) * sizeof(int32_t);
}

/* Turns the blocks' counts [blocks, experts] into the slot where each block's first assignment of an expert goes. */
static void find_slots(const struct dispatch *d, int32_t *slot, int32_t *offsets)
{
    int32_t next = 0;

    for (int32_t e = 0; e < d->experts; e++) {
        offsets[e] = next;
        for (int64_t b = 0; b < block_count(d); b++) {
            int32_t count = slot[b * d->experts + e];

            slot[b * d->experts + e] = next;
            next += count;
        }
    }
    offsets[d->experts] = next;
}

void cpu_dispatch_sort(struct stream *s, const struct dispatch *d, const int32_t *chosen, int32_t *offsets,
                       int32_t *source, int32_t *place, void *workspace)
{
    struct counted call = count_dispatch_sort(s, d);
    int64_t assignments = d->rows * d->k, blocks = block_count(d);
    int32_t *slot = workspace;

#pragma omp parallel num_threads(s->threads)
    {
#pragma omp for schedule(static)
        for (int64_t b = 0; b < blocks; b++) {
            memset(slot + b * d->experts, 0, (size_t)d->experts * sizeof *slot);
            for (int64_t i = b * BLOCK; i < assignments && i < (b + 1) * BLOCK; i++)
                slot[b * d->experts + chosen[i]]++;
        }
#pragma omp single
        find_slots(d, slot, offsets);
#pragma omp for schedule(static)
        for (int64_t b = 0; b < blocks; b++)
            for (int64_t i = b * BLOCK; i < assignments && i < (b + 1) * BLOCK; i++) {
                int32_t at = slot[b * d->experts + chosen[i]]++;

                source[at] = (int32_t)i;
                place[i] = at;
            }
    }
    count_end(call);
}

void cpu_dispatch_spread(struct stream *s, const struct dispatch *d, const int32_t *place, const void *x, void *y)
{
    struct counted call = count_dispatch_spread(s, d);
    size_t bytes = (size_t)d->width * dtype_size(d->type);

#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t i = 0; i < d->rows * d->k; i++)
        memcpy((char *)y + (size_t)place[i] * bytes, (const char *)x + (size_t)(i / d->k) * bytes, bytes);
    count_end(call);
}

/* Columns c .. c + n - 1 of one row, n at most CHUNK. The sum is rounded to the type once. */
static void collect(const struct dispatch *d, const int32_t *place, const void *x, void *y, int64_t row, int64_t c,
                    int64_t n)
{
    float sum[CHUNK], buffer[CHUNK];

    if (d->add)
        read_floats(d->type, d->from ? d->from : y, row * d->width + c, n, sum);
    else
        memset(sum, 0, (size_t)n * sizeof *sum);
    if (d->add > 1) {
        const float *part = load(d->type, y, row * d->width + c, n, buffer);

        for (int64_t i = 0; i < n; i++)
            sum[i] += part[i];
    }
    for (int32_t j = 0; j < d->k; j++) {
        const float *part = load(d->type, x, place[row * d->k + j] * d->width + c, n, buffer);

        for (int64_t i = 0; i < n; i++)
            sum[i] += part[i];
    }
    write_floats(d->type, y, row * d->width + c, n, sum);
}

void cpu_dispatch_collect(struct stream *s, const struct dispatch *d, const int32_t *place, const void *x, void *y)
{
    struct counted call = count_dispatch_collect(s, d);

#pragma omp parallel for schedule(static) num_threads(s->threads)
    for (int64_t t = 0; t < d->rows; t++)
        for (int64_t c = 0; c < d->width; c += CHUNK)
            collect(d, place, x, y, t, c, least(d->width - c, CHUNK));
    count_end(call);
}
