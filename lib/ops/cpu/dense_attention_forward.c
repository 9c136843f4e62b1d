/* Causal attention over whole documents, forward (model.md 2.2, not absorbed): out = softmax(scale * q k^T) v.
 *
 * A thread takes ROWS queries of one head and goes over their keys in tiles, keeping per row the largest logit so far,
 * the sum of exponentials under it, and the sum of values under it; a new largest logit shrinks both sums. No more than
 * a tile of logits exists at a time, and a tile is cut to what its rows see. */
#include <math.h>
#include <omp.h>

#include "ops/count.h"
#include "ops/cpu/cpu.h"
#include "ops/cpu/dense_attention.h"
#include "ops/cpu/expf.h"

struct scratch {
    float *weight;          /* [ROWS, KEYS] logits, then their exponentials */
    float *out;             /* [ROWS, v] */
    float *largest, *total; /* [ROWS] */
};

static size_t scratch_layout(const struct dense_attention *a, char *base, struct scratch *scratch)
{
    size_t used = 0;

    scratch->weight = carve_floats(base, &used, ROWS * KEYS);
    scratch->out = carve_floats(base, &used, (int64_t)ROWS * a->v);
    scratch->largest = carve_floats(base, &used, ROWS);
    scratch->total = carve_floats(base, &used, ROWS);
    return used;
}

size_t cpu_dense_attention_forward_bytes(struct stream *s, const struct dense_attention *a)
{
    struct scratch scratch;

    return (size_t)s->threads * scratch_layout(a, NULL, &scratch);
}

/* Row r of the scratch takes in the logits of a tile, which become exponentials. */
static void soften_row(float *logit, struct columns seen, int64_t keys, const struct scratch *scratch, int64_t r,
                       int64_t width)
{
    float *out = scratch->out + r * width, shrink, top;

    blank_unseen(logit, seen, keys);
    if (seen.low == seen.high) return;
    top = largest(logit + seen.low, seen.high - seen.low);
    if (top < scratch->largest[r]) top = scratch->largest[r];
    shrink = exp_f32(scratch->largest[r] - top);
    for (int64_t u = seen.low; u < seen.high; u++) logit[u] = exp_f32(logit[u] - top);
    for (int64_t c = 0; c < width; c++) out[c] *= shrink;
    scratch->total[r] = scratch->total[r] * shrink + total(logit + seen.low, seen.high - seen.low);
    scratch->largest[r] = top;
}

struct arguments {
    const void *q, *k, *v;
    const int32_t *start, *end;
    void *out;
    float *lse;
};

static void write_rows(const struct dense_attention *a, const struct arguments *x, const struct scratch *scratch,
                       int64_t h, int64_t t, int64_t rows)
{
    for (int64_t r = 0; r < rows; r++) {
        float *out = scratch->out + r * a->v, scale = scratch->total[r] == 0 ? 0 : 1 / scratch->total[r];
        int64_t at = (t + r) * a->heads + h;

        for (int64_t c = 0; c < a->v; c++) out[c] *= scale;
        write_floats(a->type, x->out, at * a->v, a->v, out);
        x->lse[at] = scratch->total[r] == 0 ? INFINITY : scratch->largest[r] + logf(scratch->total[r]);
    }
}

static void attend_block(const struct dense_attention *a, const struct arguments *x, const struct scratch *scratch,
                         int64_t h, int64_t t, int64_t rows)
{
    struct box all = visible_box(x->start, x->end, t, rows, 0, a->keys);

    memset(scratch->out, 0, (size_t)(rows * a->v) * sizeof(float));
    for (int64_t r = 0; r < rows; r++) {
        scratch->largest[r] = -INFINITY;
        scratch->total[r] = 0;
    }
    for (int64_t key = all.key; key < all.key + all.keys; key += KEYS) {
        struct box b = visible_box(x->start, x->end, t, rows, key, least(KEYS, all.key + all.keys - key));

        if (b.rows == 0) continue;
        tile_gemm(b.rows, b.keys, a->qk, a->scale, of_head(a, x->q, a->qk, b.row, h),
                  transposed(of_head(a, x->k, a->qk, b.key, h)), scratch->weight, KEYS, GLM52_DTYPE_F32, 0);
        for (int64_t r = 0; r < b.rows; r++)
            soften_row(scratch->weight + r * KEYS, visible_columns(x->start, x->end, b.row + r, b.key, b.keys), b.keys,
                       scratch, b.row - t + r, a->v);
        tile_gemm(b.rows, a->v, b.keys, 1, in_tile(scratch->weight), of_head(a, x->v, a->v, b.key, h),
                  scratch->out + (b.row - t) * a->v, a->v, GLM52_DTYPE_F32, 1);
    }
    write_rows(a, x, scratch, h, t, rows);
}

void cpu_dense_attention_forward(struct stream *s, const struct dense_attention *a, const void *q, const void *k,
                                 const void *v, const int32_t *start, const int32_t *end, void *out, float *lse,
                                 void *workspace)
{
    struct counted call = count_dense_attention_forward(s, a);
    struct arguments x = {q, k, v, start, end, out, lse};
    int64_t blocks = (a->rows + ROWS - 1) / ROWS;

#pragma omp parallel num_threads(s->threads)
    {
        struct scratch scratch;
        size_t bytes = scratch_layout(a, NULL, &scratch);

        scratch_layout(a, (char *)workspace + (size_t)omp_get_thread_num() * bytes, &scratch);
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < blocks * a->heads; task++) {
            int64_t t = (blocks - 1 - task / a->heads) * ROWS; /* late rows see most, so they come first */

            attend_block(a, &x, &scratch, task % a->heads, t, least(ROWS, a->rows - t));
        }
    }
    count_end(call);
}
