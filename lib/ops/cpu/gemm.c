/* Matrix products: c is cut into tiles by shape, and one thread computes a tile over all of k with BLAS. */
#include <cblas.h>
#include <omp.h>

#include "ops/count.h"
#include "ops/cpu/cpu.h"
#include "ops/cpu/row.h"

/* A tile of TILE x TILE runs at BLAS's own rate on one core. It is halved until there are TILES_WANTED, or it has
 * SMALL elements, below which packing costs too much; but TILES_NEEDED are worth tiles of SMALLEST. */
enum { TILE = 512, TILES_WANTED = 16, SMALL = 256 * 256, TILES_NEEDED = 4, SMALLEST = 128 * 128 };

/* Pieces of a tile for operands that are not fp32; their copies live on the stack. */
enum { PIECE_M = 64, PIECE_N = 128, PIECE_K = 256 };

static void sgemm(int64_t m, int64_t n, int64_t k, float scale, struct operand a, struct operand b, float *c,
                  int64_t ldc, int add)
{
    omp_set_num_threads(1); /* in a region of one thread BLAS would start threads of its own */
    cblas_sgemm(CblasRowMajor, a.transposed ? CblasTrans : CblasNoTrans, b.transposed ? CblasTrans : CblasNoTrans,
                (blasint)m, (blasint)n, (blasint)k, scale, a.at, (blasint)a.ld, b.at, (blasint)b.ld,
                add ? 1.0f : 0.0f, c, (blasint)ldc);
}

struct operand operand_at(struct operand o, int64_t i, int64_t j)
{
    int64_t at = o.transposed ? j * o.ld + i : i * o.ld + j;

    o.at = (const char *)o.at + at * (int64_t)dtype_size(o.type);
    return o;
}

struct operand operand_of_head(glm52_dtype type, const void *array, int64_t heads, int64_t width, int64_t row,
                               int64_t head)
{
    return operand_at((struct operand){array, heads * width, 0, type}, row, head * width);
}

/* Rows i .. i + rows and columns j .. j + columns of an operand as fp32: where they are, or converted into buffer. */
static struct operand piece(struct operand o, int64_t i, int64_t j, int64_t rows, int64_t columns, float *buffer)
{
    int64_t lines = o.transposed ? columns : rows, length = o.transposed ? rows : columns;

    o = operand_at(o, i, j);
    if (o.type == GLM52_DTYPE_F32) return o;
    for (int64_t line = 0; line < lines; line++)
        read_floats(o.type, o.at, line * o.ld, length, buffer + line * length);
    return (struct operand){buffer, length, o.transposed, GLM52_DTYPE_F32};
}

/* tile_gemm where some operand is not fp32; c is summed in fp32 and rounded once. */
static void tile_gemm_converted(int64_t m, int64_t n, int64_t k, float scale, struct operand a, struct operand b,
                                void *c, int64_t ldc, glm52_dtype c_type, int add)
{
    float a_piece[PIECE_M * PIECE_K], b_piece[PIECE_K * PIECE_N], sum[PIECE_M * PIECE_N];

    for (int64_t i = 0; i < m; i += PIECE_M)
        for (int64_t j = 0; j < n; j += PIECE_N) {
            int64_t rows = least(PIECE_M, m - i), columns = least(PIECE_N, n - j);

            memset(sum, 0, sizeof sum);
            for (int64_t l = 0; l < k; l += PIECE_K) {
                int64_t depth = least(PIECE_K, k - l);

                sgemm(rows, columns, depth, scale, piece(a, i, l, rows, depth, a_piece),
                      piece(b, l, j, depth, columns, b_piece), sum, PIECE_N, 1);
            }
            for (int64_t row = 0; row < rows; row++)
                store(c_type, c, (i + row) * ldc + j, columns, sum + row * PIECE_N, add);
        }
}

void tile_gemm(int64_t m, int64_t n, int64_t k, float scale, struct operand a, struct operand b, void *c, int64_t ldc,
               glm52_dtype c_type, int add)
{
    if (a.type == GLM52_DTYPE_F32 && b.type == GLM52_DTYPE_F32 && c_type == GLM52_DTYPE_F32)
        sgemm(m, n, k, scale, a, b, c, ldc, add);
    else
        tile_gemm_converted(m, n, k, scale, a, b, c, ldc, c_type, add);
}

/* ---- the operation ---- */

struct tiling {
    int64_t m, n;          /* of a tile */
    int64_t rows, columns; /* of tiles */
};

static struct tiling choose_tiling(const struct gemm *g)
{
    struct tiling t = {.m = least(TILE, g->m), .n = least(TILE, g->n)};

    for (;;) {
        int64_t count, area = t.m * t.n;

        t.rows = (g->m + t.m - 1) / t.m;
        t.columns = (g->n + t.n - 1) / t.n;
        count = t.rows * t.columns * g->batch;
        if (count >= TILES_WANTED || area <= SMALLEST || (count >= TILES_NEEDED && area <= SMALL)) return t;
        if (t.m >= t.n)
            t.m = (t.m + 1) / 2;
        else
            t.n = (t.n + 1) / 2;
    }
}

void gemm_run(struct stream *s, const struct gemm *g, const void *a, const void *b, void *c)
{
    struct tiling t;
    int team = cpu_team(s, (double)g->m * (double)g->n * (double)g->k * (double)g->batch);

    if (g->m == 0 || g->n == 0 || g->batch == 0) return;
    t = choose_tiling(g);
#pragma omp parallel for schedule(dynamic, 1) num_threads(team)
    for (int64_t tile = 0; tile < g->batch * t.columns * t.rows; tile++) {
        int64_t i = tile % t.rows * t.m, j = tile / t.rows % t.columns * t.n, batch = tile / (t.rows * t.columns);
        struct operand left = {a, g->lda, g->transpose_a, g->a_type}, right = {b, g->ldb, g->transpose_b, g->b_type};
        char *to = (char *)c + (batch * g->stride_c + i * g->ldc + j) * (int64_t)dtype_size(g->c_type);

        left.at = (const char *)left.at + batch * g->stride_a * (int64_t)dtype_size(g->a_type);
        right.at = (const char *)right.at + batch * g->stride_b * (int64_t)dtype_size(g->b_type);
        tile_gemm(least(t.m, g->m - i), least(t.n, g->n - j), g->k, g->scale == 0 ? 1 : g->scale,
                  operand_at(left, i, 0), operand_at(right, 0, j), to, g->ldc, g->c_type, g->add);
    }
}

static void copy_lines(const struct gemm *g, void *c)
{
    size_t size = dtype_size(g->c_type), line = (size_t)g->n * size;

    for (int64_t i = 0; i < g->batch * g->m; i++) {
        size_t at = (size_t)(i / g->m * g->stride_c + i % g->m * g->ldc) * size;

        memcpy((char *)c + at, (const char *)g->from + at, line);
    }
}

void cpu_gemm(struct stream *s, const struct gemm *g, const void *a, const void *b, void *c)
{
    struct counted call = count_gemm(s, g);

    if (g->add && g->from && g->from != c) copy_lines(g, c);
    gemm_run(s, g, a, b, c);
    count_end(call);
}
