/* The latent of keys and values from its product in fp32: RMSNorm of the first columns, rotation of the others, in one
 * go, so that nothing between the product and what the attention reads is rounded; and back (model.md 2.2). */
#include <string.h>

#include "ops/count.h"
#include "ops/cpu/cpu.h"
#include "ops/cpu/parts.h"

struct halves {
    struct norm norm;
    struct rope rope;
    int64_t columns;
    int team;
};

static struct halves halves_of(const struct stream *s, const struct latent *l, int32_t inverse)
{
    struct halves h = {.columns = l->rank + 2 * (int64_t)l->half};

    h.norm = (struct norm){.rows = l->rows, .width = l->rank, .x_stride = h.columns, .y_stride = h.columns,
                           .epsilon = l->epsilon, .type = l->type};
    h.rope = (struct rope){.rows = l->rows, .heads = 1, .half = l->half, .inverse = inverse, .type = l->type};
    h.team = cpu_team(s, (double)l->rows * (double)h.columns);
    return h;
}

/* The columns behind the rank. */
static void rotate(const struct latent *l, const struct halves *h, const float *table, const float *x, void *y,
                   int64_t row)
{
    int64_t at = row * h->columns + l->rank;

    rope_head(&h->rope, GLM52_DTYPE_F32, table + row * 2 * l->half, x, at, y, at);
}

void cpu_latent_forward(struct stream *s, const struct latent *l, const float *table, const float *x, const void *gain,
                        void *y, float *rstd)
{
    struct counted call = count_latent_forward(s, l);
    struct halves h = halves_of(s, l, 0);

#pragma omp parallel for schedule(static) num_threads(h.team)
    for (int64_t row = 0; row < l->rows; row++) {
        rstd[row] = rmsnorm_row(&h.norm, GLM52_DTYPE_F32, x, gain, y, row);
        rotate(l, &h, table, x, y, row);
    }
    count_end(call);
}

size_t cpu_latent_backward_bytes(struct stream *s, const struct latent *l)
{
    struct halves h = halves_of(s, l, 1);

    return cpu_norm_backward_bytes(s, &h.norm);
}

void cpu_latent_backward(struct stream *s, const struct latent *l, const float *table, const float *x,
                         const void *gain, const float *rstd, const float *dy, void *dx, float *dgain, void *workspace)
{
    struct counted call = count_latent_backward(s, l);
    struct halves h = halves_of(s, l, 1);
    int64_t blocks = norm_blocks(l->rows);

#pragma omp parallel for schedule(dynamic, 1) num_threads(h.team)
    for (int64_t block = 0; block < blocks; block++) {
        float *partial = (float *)workspace + 2 * block * l->rank;

        memset(partial, 0, (size_t)l->rank * sizeof *partial);
        for (int64_t row = l->rows * block / blocks; row < l->rows * (block + 1) / blocks; row++) {
            rmsnorm_backward_row(&h.norm, GLM52_DTYPE_F32, x, gain, rstd[row], dy, dx, partial, row);
            rotate(l, &h, table, dy, dx, row);
        }
    }
    if (dgain) norm_add_blocks(s, &h.norm, workspace, dgain, NULL);
    count_end(call);
}
