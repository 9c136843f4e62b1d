/* Indexer loss over all visible keys (training.md 1.4). The teacher's probabilities are exp(logit - lse) with the lse
 * that its attention left: one product of its queries and keys, and no pass for a softmax.
 * Equations of the gradients: index_kl_selected.c.
 *
 * A thread takes a block of ROWS rows and keeps two strips over the keys that the block sees: the logits of one head of
 * the teacher after the other become probabilities and are added up in p; then the student's scores take the place of
 * the logits, and p turns into the gradient of the scores. With it each head of the student is done once more, tile by
 * tile. */
#include <omp.h>

#include "ops/count.h"
#include "ops/cpu/cpu.h"
#include "ops/cpu/index_kl.h"
#include "ops/cpu/visible.h"

enum { ROWS = 64, KEYS = 256 }; /* of a tile: it stays in the second-level cache */

struct strips {
    float *score, *p;    /* [ROWS, keys] */
    float *dot;          /* [ROWS, KEYS] */
    float *dq, *dweight; /* [ROWS, width], [ROWS] */
};

struct arguments {
    const struct indexer *i;
    const struct teacher *teacher;
    const void *q, *key;
    const float *weight;
    const void *teacher_q, *teacher_key;
    const float *teacher_lse;
    const int32_t *start, *end;
    const float *row_weight;
    float *kl;
    void *dq;
    float *dweight;
};

/* One block of rows: all that it sees, and where key u stands in the strips: column u - all.key. */
struct block {
    int64_t t, rows;
    struct box all;
};

static size_t strips_layout(const struct indexer *i, char *base, struct strips *strips)
{
    size_t used = 0;

    strips->score = carve_floats(base, &used, ROWS * i->keys);
    strips->p = carve_floats(base, &used, ROWS * i->keys);
    strips->dot = carve_floats(base, &used, ROWS * KEYS);
    strips->dq = carve_floats(base, &used, (int64_t)ROWS * i->width);
    strips->dweight = carve_floats(base, &used, ROWS);
    return used;
}

static int64_t block_count(const struct indexer *i)
{
    return (i->rows + ROWS - 1) / ROWS;
}

static size_t share_bytes(const struct indexer *i)
{
    size_t used = 0;

    carve_floats(NULL, &used, group_count(block_count(i)) * i->keys * i->width);
    return used;
}

size_t cpu_index_kl_dense_bytes(struct stream *s, const struct indexer *i, const struct teacher *t)
{
    struct strips strips;

    (void)t;
    return share_bytes(i) + (size_t)s->threads * strips_layout(i, NULL, &strips);
}

/* The visible part of the tile at `key`. */
static struct box tile_box(const struct arguments *x, const struct block *b, int64_t key)
{
    return visible_box(x->start, x->end, b->t, b->rows, key, least(KEYS, b->all.key + b->all.keys - key));
}

/* ---- the teacher ---- */

/* Adds the probabilities of a row's logits, over `heads`, to p. */
static void add_probabilities(const float *logit, int64_t n, float lse, int32_t heads, float *p)
{
    float share = 1 / (float)heads;

    for (int64_t u = 0; u < n; u++) p[u] += exp_f32(logit[u] - lse) * share;
}

/* The same of a row whose sum of exponentials nobody has made before. The logits do not survive. */
static void add_softmax(float *logit, int64_t n, int32_t heads, float *p)
{
    float top = largest(logit, n), scale;

    for (int64_t u = 0; u < n; u++) logit[u] = exp_f32(logit[u] - top);
    scale = 1 / (total(logit, n) * (float)heads);
    for (int64_t u = 0; u < n; u++) p[u] += logit[u] * scale;
}

static void teacher_head(const struct arguments *x, const struct block *b, const struct strips *strips, int32_t h)
{
    const struct teacher *teacher = x->teacher;
    glm52_dtype type = x->i->type;
    int64_t stride = x->i->keys, end = b->all.key + b->all.keys, of = (int64_t)h * teacher->key_heads / teacher->heads;

    for (int64_t key = b->all.key; key < end; key += KEYS) {
        struct box tile = tile_box(x, b, key);

        if (tile.rows == 0) continue;
        tile_gemm(tile.rows, tile.keys, teacher->width, teacher->scale,
                  operand_of_head(type, x->teacher_q, teacher->heads, teacher->width, tile.row, h),
                  transposed(operand_of_head(type, x->teacher_key, teacher->key_heads, teacher->width, tile.key, of)),
                  strips->score + (tile.row - b->t) * stride + tile.key - b->all.key, stride, GLM52_DTYPE_F32, 0);
    }
    for (int64_t r = 0; r < b->rows; r++) {
        struct columns seen = visible_columns(x->start, x->end, b->t + r, b->all.key, b->all.keys);
        float *logit = strips->score + r * stride + seen.low, *p = strips->p + r * stride + seen.low;
        int64_t count = seen.high - seen.low, row = b->t + r;

        if (count == 0) continue;
        if (x->teacher_lse)
            add_probabilities(logit, count, x->teacher_lse[row * teacher->heads + h], teacher->heads, p);
        else
            add_softmax(logit, count, teacher->heads, p);
    }
}

/* ---- the student ---- */

static struct operand queries_of(const struct arguments *x, struct box tile, int32_t h)
{
    return operand_of_head(x->i->type, x->q, x->i->heads, x->i->width, tile.row, h);
}

static struct operand keys_of(const struct arguments *x, struct box tile)
{
    return operand_of_head(x->i->type, x->key, 1, x->i->width, tile.key, 0);
}

/* d of one head in a tile. */
static void tile_dots(const struct arguments *x, const struct strips *strips, struct box tile, int32_t h)
{
    tile_gemm(tile.rows, tile.keys, x->i->width, 1, queries_of(x, tile, h), transposed(keys_of(x, tile)),
              strips->dot, KEYS, GLM52_DTYPE_F32, 0);
}

static void tile_scores(const struct arguments *x, const struct block *b, const struct strips *strips, struct box tile)
{
    int64_t stride = x->i->keys;

    for (int32_t h = 0; h < x->i->heads; h++) {
        tile_dots(x, strips, tile, h);
        for (int64_t r = 0; r < tile.rows; r++) {
            float weight = x->weight[(tile.row + r) * x->i->heads + h];
            const float *d = strips->dot + r * KEYS;
            float *score = strips->score + (tile.row - b->t + r) * stride + tile.key - b->all.key;

            if (h == 0) memset(score, 0, (size_t)tile.keys * sizeof *score);
            for (int64_t u = 0; u < tile.keys; u++) score[u] += weight * (d[u] > 0 ? d[u] : 0);
        }
    }
}

/* kl of the block's rows; p becomes the gradient of the scores. Returns whether there is any. */
static int block_kl(const struct arguments *x, const struct block *b, const struct strips *strips)
{
    int any = 0;

    for (int64_t r = 0; r < b->rows; r++) {
        struct columns seen = visible_columns(x->start, x->end, b->t + r, b->all.key, b->all.keys);
        int64_t at = r * x->i->keys + seen.low;
        float row_weight = x->row_weight[b->t + r];

        x->kl[b->t + r] = 0;
        if (seen.low == seen.high) continue;
        x->kl[b->t + r] =
            kl_row(strips->score + at, strips->p + at, seen.high - seen.low, row_weight, strips->p + at);
        any |= row_weight != 0;
    }
    return any;
}

/* What each relu lets through; `open` (of the tile's first key) has the last word, or is told. */
static float sided_coefficients(float *d, const float *slope, struct columns seen, float weight, int given,
                                int32_t *open)
{
    float sum = 0;

    for (int64_t u = seen.low; u < seen.high; u++) {
        if (!given) open[u] = d[u] > 0;
        sum += d[u] > 0 ? slope[u] * d[u] : 0;
        d[u] = open[u] ? slope[u] * weight : 0;
    }
    return sum;
}

/* One row of a tile: d becomes c, the gradient of the dots. Returns its share of dweight. */
static float row_coefficients(float *d, const float *slope, struct columns seen, int64_t keys, float weight, int sides,
                              int32_t *open)
{
    float share[KEYS];

    blank_unseen(d, seen, keys);
    if (sides) return sided_coefficients(d, slope, seen, weight, sides == 2, open);
    for (int64_t u = seen.low; u < seen.high; u++) {
        share[u] = d[u] > 0 ? slope[u] * d[u] : 0;
        d[u] = d[u] > 0 ? slope[u] * weight : 0;
    }
    return total(share + seen.low, seen.high - seen.low);
}

static void tile_gradients(const struct arguments *x, const struct block *b, const struct strips *strips,
                           struct box tile, int32_t h, float *dkey)
{
    const struct indexer *i = x->i;
    struct operand c = {strips->dot, KEYS, 0, GLM52_DTYPE_F32};
    int64_t width = i->width, first = tile.row - b->t;

    tile_dots(x, strips, tile, h);
    for (int64_t r = 0; r < tile.rows; r++)
        strips->dweight[first + r] +=
            row_coefficients(strips->dot + r * KEYS, strips->p + (first + r) * i->keys + tile.key - b->all.key,
                             visible_columns(x->start, x->end, tile.row + r, tile.key, tile.keys), tile.keys,
                             x->weight[(tile.row + r) * i->heads + h], i->sides,
                             i->sides ? i->open + ((tile.row + r) * i->heads + h) * i->keys + tile.key : NULL);
    tile_gemm(tile.rows, width, tile.keys, 1, c, keys_of(x, tile), strips->dq + first * width, width,
              GLM52_DTYPE_F32, 1);
    tile_gemm(tile.keys, width, tile.rows, 1, transposed(c), queries_of(x, tile, h), dkey + tile.key * width, width,
              GLM52_DTYPE_F32, 1);
}

/* dq and dweight of one head; with `any` = 0 they are zero. */
static void head_gradients(const struct arguments *x, const struct block *b, const struct strips *strips, int32_t h,
                           int any, float *dkey)
{
    const struct indexer *i = x->i;
    int64_t end = any ? b->all.key + b->all.keys : 0;

    memset(strips->dq, 0, (size_t)(b->rows * i->width) * sizeof(float));
    memset(strips->dweight, 0, (size_t)b->rows * sizeof(float));
    for (int64_t key = b->all.key; key < end; key += KEYS) {
        struct box tile = tile_box(x, b, key);

        if (tile.rows > 0) tile_gradients(x, b, strips, tile, h, dkey);
    }
    for (int64_t r = 0; r < b->rows; r++) {
        int64_t at = (b->t + r) * i->heads + h;

        write_floats(i->type, x->dq, at * i->width, i->width, strips->dq + r * i->width);
        x->dweight[at] = strips->dweight[r];
    }
}

static void learn_block(const struct arguments *x, int64_t t, const struct strips *strips, float *dkey)
{
    struct block b = {t, least(ROWS, x->i->rows - t), {0}};
    int any;

    b.all = visible_box(x->start, x->end, t, b.rows, 0, x->i->keys);
    for (int64_t r = 0; r < b.rows; r++) memset(strips->p + r * x->i->keys, 0, (size_t)b.all.keys * sizeof(float));
    for (int32_t h = 0; h < x->teacher->heads; h++) teacher_head(x, &b, strips, h);
    for (int64_t key = b.all.key; key < b.all.key + b.all.keys; key += KEYS) {
        struct box tile = tile_box(x, &b, key);

        if (tile.rows > 0) tile_scores(x, &b, strips, tile);
    }
    any = block_kl(x, &b, strips);
    for (int32_t h = 0; h < x->i->heads; h++) head_gradients(x, &b, strips, h, any, dkey);
}

void cpu_index_kl_dense(struct stream *s, const struct indexer *i, const struct teacher *t, const void *q,
                        const void *key, const float *weight, const void *teacher_q, const void *teacher_key,
                        const float *teacher_lse, const int32_t *start, const int32_t *end, const float *row_weight,
                        float *kl, void *dq, float *dkey, float *dweight, void *workspace)
{
    struct counted call = count_index_kl_dense(s, i, t, teacher_lse != NULL);
    struct arguments x = {i,     t,   q,          key, weight, teacher_q, teacher_key, teacher_lse,
                          start, end, row_weight, kl,  dq,     dweight};
    int64_t blocks = block_count(i), groups = group_count(blocks), size = i->keys * i->width;
    float *share = workspace;

#pragma omp parallel num_threads(s->threads)
    {
        struct strips strips;
        size_t bytes = strips_layout(i, NULL, &strips);

        strips_layout(i, (char *)workspace + share_bytes(i) + (size_t)omp_get_thread_num() * bytes, &strips);
#pragma omp for schedule(dynamic, 1)
        for (int64_t g = 0; g < groups; g++) {
            memset(share + g * size, 0, (size_t)size * sizeof *share);
            for (int64_t b = g; b < blocks; b += groups) learn_block(&x, b * ROWS, &strips, share + g * size);
        }
        add_groups(groups, i->keys, i->width, i->width, share, dkey);
    }
    count_end(call);
}
