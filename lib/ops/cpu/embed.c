/* Rows of the embedding table by token, and the sum of gradients back into them. */
#include "ops/count.h"
#include "ops/cpu/cpu.h"
#include "ops/cpu/row.h"

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

static int came_before(const int32_t *token, int64_t row)
{
    int came = 0;

    for (int64_t i = 0; i < row; i++) came |= token[i] == token[row];
    return came;
}

/* The sum of all rows of one token, from its first row on, in order. */
static void add_rows(const struct embed *e, const int32_t *token, int64_t row, const void *dy, void *dtable)
{
    for (int64_t j = 0; j < e->width; j += CHUNK) {
        float sum[CHUNK] = {0}, chunk[CHUNK];
        int64_t count = least(CHUNK, e->width - j);

        for (int64_t i = row; i < e->rows; i++) {
            if (token[i] != token[row]) continue;
            const float *from = load(e->type, dy, i * e->width + j, count, chunk);
            for (int64_t c = 0; c < count; c++) sum[c] += from[c];
        }
        store(e->gradient, dtable, token[row] * e->width + j, count, sum, 1);
    }
}

/* The first row of a token adds up all of them: a row of the table has one writer. */
void cpu_embed_backward(struct stream *s, const struct embed *e, const int32_t *token, const void *dy, void *dtable)
{
    struct counted call = count_embed_backward(s, e);

#pragma omp parallel for schedule(dynamic, 1) num_threads(cpu_team(s, (double)e->rows * (double)e->width))
    for (int64_t row = 0; row < e->rows; row++)
        if (token[row] >= 0 && !came_before(token, row)) add_rows(e, token, row, dy, dtable);
    count_end(call);
}
