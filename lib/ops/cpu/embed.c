/* Rows of the embedding table by token, and the sum of gradients back into them. */
#include "ops/count.h"
#include "ops/cpu/cpu.h"
#include "ops/cpu/row.h"

enum { SLICE = 64 }; /* columns that one thread adds up; every slice meets its rows in order */

void cpu_embed_forward(struct stream *s, const struct embed *e, const int32_t *token, const void *table, void *y)
{
    struct counted call = count_embed_forward(s, e);
    size_t bytes = (size_t)e->width * dtype_size(e->type);

#pragma omp parallel for schedule(static) num_threads(cpu_team(s, (double)e->rows * (double)e->width))
    for (int64_t row = 0; row < e->rows; row++) {
        char *to = (char *)y + (size_t)row * bytes;

        if (token[row] < 0)
            memset(to, 0, bytes);
        else
            memcpy(to, (const char *)table + (size_t)token[row] * bytes, bytes);
    }
    count_end(call);
}

void cpu_embed_backward(struct stream *s, const struct embed *e, const int32_t *token, const void *dy, float *dtable)
{
    struct counted call = count_embed_backward(s, e);

#pragma omp parallel for schedule(dynamic, 1) num_threads(cpu_team(s, (double)e->rows * (double)e->width))
    for (int64_t first = 0; first < e->width; first += SLICE)
        for (int64_t row = 0; row < e->rows; row++) {
            float chunk[SLICE];
            int64_t count = least(SLICE, e->width - first);
            const float *from = load(e->type, dy, row * e->width + first, count, chunk);

            if (token[row] < 0) continue;
            for (int64_t j = 0; j < count; j++) dtable[token[row] * e->width + first + j] += from[j];
        }
    count_end(call);
}
