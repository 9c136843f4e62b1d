/* Muon (training.md 4.1): momentum, orthogonalisation by Newton-Schulz, decoupled decay. Blocks of more rows than
 * columns are not transposed: their products are taken from the other side. */
#include <math.h>

#include "ops/count.h"
#include "ops/cpu/cpu.h"
#include "ops/cpu/row.h"

enum {
    BATCH_BYTES = 32 << 20, /* of workspace, for as many blocks as fit: tiles for many threads, not much memory */
    SLAB = 1 << 14,         /* elements that one thread passes over at a time */
    TILE_M = 256,
    TILE_N = 512,
    TILE_SYMMETRIC = 256,   /* smaller ones save more work below the diagonal, but run at a lower rate */
    MIRROR = 16,            /* edge of the squares in which a tile is transposed; a line of cache */
};

static const float NORM_FLOOR = 1e-7f; /* as published code has it */

/* The blocks that are worked on together, and their arrays: x and y [blocks,rows,columns], gram and polynomial
 * [blocks,side,side], sums of squares [blocks,slabs]. */
struct batch {
    int64_t blocks, side, slab_rows, slabs;
    float *x, *y, *gram, *polynomial;
    double *squares;
    size_t bytes;
};

static struct batch batch_of(const struct muon *m, void *workspace)
{
    int64_t side = least(m->rows, m->columns), area = m->rows * m->columns, square = side * side;
    struct batch b = {.side = side};

    if (m->batch == 0 || area == 0) return b;
    b.blocks = BATCH_BYTES / (int64_t)sizeof(float) / (2 * (area + square));
    b.blocks = least(b.blocks > 1 ? b.blocks : 1, m->batch);
    b.slab_rows = least(SLAB / m->columns > 1 ? SLAB / m->columns : 1, m->rows);
    b.slabs = (m->rows + b.slab_rows - 1) / b.slab_rows;
    b.x = carve_floats(workspace, &b.bytes, b.blocks * area);
    b.y = carve_floats(workspace, &b.bytes, b.blocks * area);
    b.gram = carve_floats(workspace, &b.bytes, b.blocks * square);
    b.polynomial = carve_floats(workspace, &b.bytes, b.blocks * square);
    b.squares = carve(workspace, &b.bytes, (size_t)(b.blocks * b.slabs) * sizeof(double));
    return b;
}

size_t cpu_muon_bytes(struct stream *s, const struct muon *m)
{
    (void)s;
    return batch_of(m, NULL).bytes;
}

/* ---- products ---- */

/* c = p d + q a b for each of `blocks` blocks that follow one another; p = 0: d is not read. */
struct product {
    int64_t blocks, m, n, k;
    struct operand a, b;
    int64_t stride_a, stride_b; /* in elements */
    float p, q;
    const float *d;
    float *c;
    int symmetric;              /* c is: half of its tiles are the others' mirror images */
};

static void mirror(float *c, int64_t ld, int64_t i, int64_t j, int64_t rows, int64_t columns)
{
    for (int64_t row = 0; row < rows; row += MIRROR)
        for (int64_t column = 0; column < columns; column += MIRROR)
            for (int64_t r = row; r < least(row + MIRROR, rows); r++)
                for (int64_t t = column; t < least(column + MIRROR, columns); t++)
                    c[(j + t) * ld + i + r] = c[(i + r) * ld + j + t];
}

/* Rows i .. i + rows, columns j .. j + columns of c in one block. */
static void tile(const struct product *p, int64_t block, int64_t i, int64_t j, int64_t rows, int64_t columns)
{
    struct operand a = p->a, b = p->b;
    float *c = p->c + block * p->m * p->n;
    const float *d = p->d + block * p->m * p->n;

    a.at = (const float *)a.at + block * p->stride_a;
    b.at = (const float *)b.at + block * p->stride_b;
    if (p->p != 0)
        for (int64_t row = i; row < i + rows; row++)
            for (int64_t column = j; column < j + columns; column++)
                c[row * p->n + column] = p->p * d[row * p->n + column];
    tile_gemm(rows, columns, p->k, p->q, operand_at(a, i, 0), operand_at(b, 0, j), c + i * p->n + j, p->n,
              GLM52_DTYPE_F32, p->p != 0);
    if (p->symmetric && j > i) mirror(c, p->n, i, j, rows, columns);
}

static void multiply(struct stream *s, const struct product *p)
{
    int64_t high = p->symmetric ? TILE_SYMMETRIC : TILE_M, wide = p->symmetric ? TILE_SYMMETRIC : TILE_N;
    int64_t down = (p->m + high - 1) / high, across = (p->n + wide - 1) / wide;
    int team = cpu_team(s, (double)p->blocks * (double)p->m * (double)p->n * (double)p->k);

#pragma omp parallel for schedule(dynamic, 1) num_threads(team)
    for (int64_t number = 0; number < p->blocks * down * across; number++) {
        int64_t i = number % down * high, j = number / down % across * wide;

        if (p->symmetric && j < i) continue;
        tile(p, number / (down * across), i, j, least(high, p->m - i), least(wide, p->n - j));
    }
}

static struct operand matrix(const float *at, int64_t ld, int transposed)
{
    return (struct operand){at, ld, transposed, GLM52_DTYPE_F32};
}

/* One iteration with coefficients a, b, c, x -> y. */
static void iterate(struct stream *s, const struct muon *m, const struct batch *w, int64_t blocks,
                    const float *coefficient)
{
    int64_t side = w->side, area = m->rows * m->columns, square = side * side, longer = m->rows + m->columns - side;
    int wide = m->rows <= m->columns;
    struct operand x = matrix(w->x, m->columns, 0), x_transposed = matrix(w->x, m->columns, 1);
    struct operand gram = matrix(w->gram, side, 0), polynomial = matrix(w->polynomial, side, 0);
    struct product to_gram = {.blocks = blocks, .m = side, .n = side, .k = longer, .a = wide ? x : x_transposed,
                              .b = wide ? x_transposed : x, .stride_a = area, .stride_b = area, .q = 1,
                              .d = w->gram, .c = w->gram, .symmetric = 1};
    struct product to_polynomial = {.blocks = blocks, .m = side, .n = side, .k = side, .a = gram, .b = gram,
                                    .stride_a = square, .stride_b = square, .p = coefficient[1], .q = coefficient[2],
                                    .d = w->gram, .c = w->polynomial, .symmetric = 1};
    struct product to_y = {.blocks = blocks, .m = m->rows, .n = m->columns, .k = side, .a = wide ? polynomial : x,
                           .b = wide ? x : polynomial, .stride_a = wide ? square : area,
                           .stride_b = wide ? area : square, .p = coefficient[0], .q = 1, .d = w->x, .c = w->y};

    multiply(s, &to_gram);
    multiply(s, &to_polynomial);
    multiply(s, &to_y);
}

/* ---- passes over the elements, a slab of rows at a time ---- */

struct arrays {
    const void *gradient;
    void *momentum, *weight; /* weight: the master, or the parameter where there is none */
    void *rounded;           /* the parameter where there is a master */
    glm52_dtype weight_type;
    float coefficient, lr;
};

static int64_t row_at(const struct muon *m, int64_t block, int64_t row)
{
    return block * m->stride + row / m->group_rows * m->group_stride + row % m->group_rows * m->columns;
}

/* Moves the momentum of some neighbours. */
static void move_some(const struct muon *m, float coefficient, int64_t count, const float *restrict gradient,
                      float *restrict momentum)
{
    float beta = m->momentum, share = m->classic ? 1.0f : 1.0f - beta;

    for (int64_t j = 0; j < count; j++) momentum[j] = beta * momentum[j] + share * (gradient[j] * coefficient);
}

/* Writes their update. */
static void update_some(const struct muon *m, float coefficient, int64_t count, const float *restrict gradient,
                        const float *restrict momentum, float *restrict update)
{
    float beta = m->momentum, share = m->classic ? 1.0f : 1.0f - beta;
    float of_gradient = m->nesterov ? 1.0f : 0.0f, of_momentum = m->nesterov ? beta : 1.0f;

    for (int64_t j = 0; j < count; j++)
        update[j] = of_gradient * (share * (gradient[j] * coefficient)) + of_momentum * momentum[j];
}

/* Moves the momentum of the row at element `at` and writes its update, which is made of the momentum as it
 * is kept; the sum of the update's squares. */
static double update_row(const struct muon *m, const struct arrays *a, int64_t at, float *update)
{
    double sum = 0;

    for (int64_t j = 0; j < m->columns; j += CHUNK) {
        int64_t count = least(CHUNK, m->columns - j);
        float buffer[2][CHUNK];
        const float *gradient = load(m->gradient, a->gradient, at + j, count, buffer[0]);
        int narrow = m->moments != GLM52_DTYPE_F32;
        float *momentum = narrow ? buffer[1] : (float *)a->momentum + at + j;

        if (narrow) read_floats(m->moments, a->momentum, at + j, count, momentum);
        move_some(m, a->coefficient, count, gradient, momentum);
        if (narrow) {
            write_floats(m->moments, a->momentum, at + j, count, momentum);
            read_floats(m->moments, a->momentum, at + j, count, momentum);
        }
        update_some(m, a->coefficient, count, gradient, momentum, update + j);
        sum += (double)dot(update + j, update + j, count);
    }
    return sum;
}

static void start(struct stream *s, const struct muon *m, const struct batch *w, const struct arrays *a, int64_t first,
                  int64_t blocks)
{
    int64_t columns = m->columns;

#pragma omp parallel for schedule(static) num_threads(cpu_team(s, (double)(blocks * m->rows * columns)))
    for (int64_t slab = 0; slab < blocks * w->slabs; slab++) {
        int64_t block = slab / w->slabs, row = slab % w->slabs * w->slab_rows, end = least(row + w->slab_rows, m->rows);
        double sum = 0;

        for (; row < end; row++)
            sum += update_row(m, a, row_at(m, first + block, row), w->x + (block * m->rows + row) * columns);
        w->squares[slab] = sum;
    }
}

static void normalise(struct stream *s, const struct muon *m, const struct batch *w, int64_t blocks)
{
    int64_t area = m->rows * m->columns, slab_area = w->slab_rows * m->columns;

#pragma omp parallel for schedule(static) num_threads(cpu_team(s, (double)(blocks * area)))
    for (int64_t slab = 0; slab < blocks * w->slabs; slab++) {
        int64_t block = slab / w->slabs, from = slab % w->slabs * slab_area, end = least(from + slab_area, area);
        double sum = 0;
        float norm;

        for (int64_t i = 0; i < w->slabs; i++) sum += w->squares[block * w->slabs + i];
        norm = fmaxf((float)sqrt(sum), NORM_FLOOR);
        for (int64_t i = block * area + from; i < block * area + end; i++) w->x[i] /= norm;
    }
}

static void apply(struct stream *s, const struct muon *m, const struct batch *w, const struct arrays *a, int64_t first,
                  int64_t blocks)
{
    float keep = 1.0f - a->lr * m->decay, reach = a->lr * m->scale;
    int64_t columns = m->columns;

#pragma omp parallel for schedule(static) num_threads(cpu_team(s, (double)(blocks * m->rows * columns)))
    for (int64_t number = 0; number < blocks * m->rows; number++) {
        int64_t row = row_at(m, first + number / m->rows, number % m->rows);

        for (int64_t from = 0; from < columns; from += CHUNK) {
            int64_t count = least(CHUNK, columns - from), at = row + from;
            const float *restrict x = w->x + number * columns + from;
            float buffer[CHUNK];

            read_floats(a->weight_type, a->weight, at, count, buffer);
            for (int64_t j = 0; j < count; j++) buffer[j] = buffer[j] * keep - reach * x[j];
            write_floats(a->weight_type, a->weight, at, count, buffer);
            if (a->rounded) write_floats(m->type, a->rounded, at, count, buffer);
        }
    }
}

/* ---- the operation ---- */

void cpu_muon(struct stream *s, const struct muon *m, const float *rates, const float *coefficient,
              const void *gradient, void *momentum, float *master, void *parameter, void *workspace)
{
    struct counted call = count_muon(s, m, master != NULL);
    struct batch w = batch_of(m, workspace);
    struct arrays a = {gradient, momentum, master ? master : parameter, master ? parameter : NULL,
                       master ? GLM52_DTYPE_F32 : m->type, *coefficient, rates[RATE_LR]};

    for (int64_t first = 0; w.blocks > 0 && a.coefficient >= 0 && first < m->batch; first += w.blocks) {
        int64_t blocks = least(w.blocks, m->batch - first);

        start(s, m, &w, &a, first, blocks);
        normalise(s, m, &w, blocks);
        for (int32_t step = 0; step < m->steps; step++) {
            float *x = w.x;

            iterate(s, m, &w, blocks, m->coefficient[step]);
            w.x = w.y;
            w.y = x;
        }
        apply(s, m, &w, &a, first, blocks);
    }
    count_end(call);
}
