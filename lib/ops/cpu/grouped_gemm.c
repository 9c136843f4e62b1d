/* Products of the experts: rows sorted by group, one weight matrix per group. Tiles are cut within a group. */
#include "base/dtype.h"
#include "ops/count.h"
#include "ops/cpu/cpu.h"
#include "ops/cpu/row.h"

enum { TILE_M = 512, TILE_N = 512 };

struct tile {
    int64_t group, i, j, rows, columns; /* rows and columns i.., j.. of the group's result */
};

static int64_t tiles_of(int64_t rows, int64_t columns)
{
    return (rows + TILE_M - 1) / TILE_M * ((columns + TILE_N - 1) / TILE_N);
}

static int64_t tiles_in_all(const struct grouped_gemm *g, const int32_t *offsets, int64_t columns)
{
    int64_t count = 0;

    for (int32_t group = 0; group < g->groups; group++)
        count += tiles_of(offsets[group + 1] - offsets[group], columns);
    return count;
}

/* Tile number `number` of results [rows of the group, columns], counted group by group. */
static struct tile find_tile(const int32_t *offsets, int64_t columns, int64_t number)
{
    struct tile t = {0};
    int64_t rows = offsets[1] - offsets[0], high;

    while (number >= tiles_of(rows, columns)) {
        number -= tiles_of(rows, columns);
        t.group++;
        rows = offsets[t.group + 1] - offsets[t.group];
    }
    high = (rows + TILE_M - 1) / TILE_M;
    t.i = number % high * TILE_M;
    t.j = number / high * TILE_N;
    t.rows = least(TILE_M, rows - t.i);
    t.columns = least(TILE_N, columns - t.j);
    return t;
}

static int team_of(const struct stream *s, const struct grouped_gemm *g)
{
    return cpu_team(s, (double)g->rows * (double)g->n * (double)g->k);
}

/* out[i, columns] = in[i, depth] W, where W is the group's matrix [n,k], transposed for the forward. */
static void rows_product(struct stream *s, const struct grouped_gemm *g, const int32_t *offsets, const void *in,
                         int64_t depth, const void *w, int transposed, void *out, int64_t columns)
{
    int64_t size = (int64_t)dtype_size(g->type), count = tiles_in_all(g, offsets, columns);

#pragma omp parallel for schedule(dynamic, 1) num_threads(team_of(s, g))
    for (int64_t number = 0; number < count; number++) {
        struct tile t = find_tile(offsets, columns, number);
        int64_t row = offsets[t.group] + t.i;
        struct operand x = {in, depth, 0, g->type};
        struct operand weight = {(const char *)w + t.group * g->stride * size, g->k, transposed, g->type};

        tile_gemm(t.rows, t.columns, depth, 1, operand_at(x, row, 0), operand_at(weight, 0, t.j),
                  (char *)out + (row * columns + t.j) * size, columns, g->type, g->add);
    }
}

void cpu_grouped_gemm_forward(struct stream *s, const struct grouped_gemm *g, const int32_t *offsets, const void *x,
                              const void *w, void *y)
{
    struct counted call = count_grouped_gemm_forward(s, g);

    rows_product(s, g, offsets, x, g->k, w, 1, y, g->n);
    count_end(call);
}

void cpu_grouped_gemm_backward_rows(struct stream *s, const struct grouped_gemm *g, const int32_t *offsets,
                                    const void *dy, const void *w, void *dx)
{
    struct counted call = count_grouped_gemm_backward_rows(s, g);

    rows_product(s, g, offsets, dy, g->n, w, 0, dx, g->k);
    count_end(call);
}

void cpu_grouped_gemm_backward_weight(struct stream *s, const struct grouped_gemm *g, const int32_t *offsets,
                                      const void *dy, const void *x, void *dw)
{
    struct counted call = count_grouped_gemm_backward_weight(s, g);
    int64_t each = tiles_of(g->n, g->k), high = (g->n + TILE_M - 1) / TILE_M, size = (int64_t)dtype_size(g->gradient);

#pragma omp parallel for schedule(dynamic, 1) num_threads(team_of(s, g))
    for (int64_t number = 0; number < g->groups * each; number++) {
        int64_t group = number / each, i = number % each % high * TILE_M, j = number % each / high * TILE_N;
        int64_t first = offsets[group], rows = offsets[group + 1] - first;
        struct operand left = {dy, g->n, 0, g->type}, right = {x, g->k, 0, g->type};

        left = operand_at(left, first, i);
        left.transposed = 1;
        if (rows > 0 || !g->add)
            tile_gemm(least(TILE_M, g->n - i), least(TILE_N, g->k - j), rows, 1, left, operand_at(right, first, j),
                      (char *)dw + (group * g->stride + i * g->k + j) * size, g->k, g->gradient, g->add);
    }
    count_end(call);
}
