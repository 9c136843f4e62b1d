/* Causal attention over whole documents, backward (model.md 2.2, not absorbed). With P the probabilities, redone from
 * lse, and D = sum(out * dout):
 *     dS = P * (dout v^T - D) * scale,  dq = dS k,  dk = dS^T q,  dv = P^T dout.
 *
 * Keys are cut into as many parts as give TASKS tasks of one head and one part. A task goes over its keys tile by tile,
 * and over the rows of each: dk and dv of a tile are complete when its rows are done, while dq gets a share from every
 * part, and these are added in order of the parts. So every logit is computed once, and memory is linear in rows. */
#include <omp.h>

#include "ops/count.h"
#include "ops/cpu/cpu.h"
#include "ops/cpu/dense_attention.h"
#include "ops/cpu/expf.h"

enum { TASKS = 16 }; /* enough to share out */

struct scratch {
    float *weight, *slope; /* [ROWS, KEYS]: P and dS of a tile */
    float *dk, *dv;        /* [KEYS, qk], [KEYS, v] */
};

/* What all threads share. */
struct shared {
    int64_t parts, part; /* their number, and keys of each */
    float *delta;        /* [rows, heads]: D */
    float *dq;           /* [parts, rows, heads, qk]; the call's own if one part of fp32 is all there is */
    struct box *block;   /* [rows / ROWS]: what each block of rows sees */
};

struct arguments {
    const void *q, *k, *v;
    const int32_t *start, *end;
    const void *out;
    const float *lse;
    const void *dout;
    void *dq, *dk, *dv;
};

static size_t scratch_layout(const struct dense_attention *a, char *base, struct scratch *scratch)
{
    size_t used = 0;

    scratch->weight = carve_floats(base, &used, ROWS * KEYS);
    scratch->slope = carve_floats(base, &used, ROWS * KEYS);
    scratch->dk = carve_floats(base, &used, (int64_t)KEYS * a->qk);
    scratch->dv = carve_floats(base, &used, (int64_t)KEYS * a->v);
    return used;
}

static size_t shared_layout(const struct dense_attention *a, char *base, void *dq, struct shared *shared)
{
    int64_t tiles = most((a->keys + KEYS - 1) / KEYS, 1), wanted = least((TASKS + a->heads - 1) / a->heads, tiles);
    size_t used = 0;

    shared->part = (tiles + wanted - 1) / wanted * KEYS;
    shared->parts = most((a->keys + shared->part - 1) / shared->part, 1);
    shared->delta = carve_floats(base, &used, a->rows * a->heads);
    shared->block = carve(base, &used, (size_t)((a->rows + ROWS - 1) / ROWS) * sizeof *shared->block);
    shared->dq = shared->parts == 1 && a->type == GLM52_DTYPE_F32
                     ? dq
                     : carve_floats(base, &used, shared->parts * a->rows * a->heads * a->qk);
    return used;
}

size_t cpu_dense_attention_backward_bytes(struct stream *s, const struct dense_attention *a)
{
    struct scratch scratch;
    struct shared shared;

    return shared_layout(a, NULL, NULL, &shared) + (size_t)s->threads * scratch_layout(a, NULL, &scratch);
}

/* ---- before and after ---- */

static void row_deltas(const struct dense_attention *a, const struct arguments *x, int64_t t, float *delta)
{
    float out[CHUNK], dout[CHUNK];

    for (int64_t h = 0; h < a->heads; h++) {
        delta[h] = 0;
        for (int64_t c = 0; c < a->v; c += CHUNK) {
            int64_t count = least(CHUNK, a->v - c), at = (t * a->heads + h) * a->v + c;

            delta[h] += dot(load(a->type, x->out, at, count, out), load(a->type, x->dout, at, count, dout), count);
        }
    }
}

/* dq of row t: the shares of the parts, in their order. */
static void add_parts(const struct dense_attention *a, const struct shared *shared, int64_t t, void *dq)
{
    int64_t length = a->heads * a->qk;
    float sum[CHUNK];

    for (int64_t c = 0; c < length; c += CHUNK) {
        int64_t count = least(CHUNK, length - c);

        memcpy(sum, shared->dq + t * length + c, (size_t)count * sizeof *sum);
        for (int64_t part = 1; part < shared->parts; part++) {
            const float *share = shared->dq + (part * a->rows + t) * length + c;

            for (int64_t j = 0; j < count; j++) sum[j] += share[j];
        }
        write_floats(a->type, dq, t * length + c, count, sum);
    }
}

/* ---- one head and one part of the keys ---- */

/* From logits and dout v^T to P and dS. */
static void slopes(float *weight, float *slope, struct columns seen, int64_t keys, float lse, float delta, float scale)
{
    blank_unseen(weight, seen, keys);
    blank_unseen(slope, seen, keys);
    for (int64_t u = seen.low; u < seen.high; u++) {
        weight[u] = exp_f32(weight[u] - lse);
        slope[u] = weight[u] * (slope[u] - delta) * scale;
    }
}

/* What the rows of box b give to the keys of the tile that starts at `key`, and the keys to dq [rows, heads, qk]. */
static void box_backward(const struct dense_attention *a, const struct arguments *x, const struct shared *shared,
                         const struct scratch *scratch, int64_t h, struct box b, int64_t key, float *dq)
{
    glm52_dtype f32 = GLM52_DTYPE_F32;
    struct operand q = of_head(a, x->q, a->qk, b.row, h), k = of_head(a, x->k, a->qk, b.key, h);
    struct operand dout = of_head(a, x->dout, a->v, b.row, h), v = of_head(a, x->v, a->v, b.key, h);
    struct operand weight = in_tile(scratch->weight), slope = in_tile(scratch->slope);

    tile_gemm(b.rows, b.keys, a->qk, a->scale, q, transposed(k), scratch->weight, KEYS, f32, 0);
    tile_gemm(b.rows, b.keys, a->v, 1, dout, transposed(v), scratch->slope, KEYS, f32, 0);
    for (int64_t r = 0; r < b.rows; r++) {
        int64_t t = b.row + r, at = t * a->heads + h;

        slopes(scratch->weight + r * KEYS, scratch->slope + r * KEYS,
               visible_columns(x->start, x->end, t, b.key, b.keys), b.keys, x->lse[at], shared->delta[at], a->scale);
    }
    tile_gemm(b.keys, a->v, b.rows, 1, transposed(weight), dout, scratch->dv + (b.key - key) * a->v, a->v, f32, 1);
    tile_gemm(b.keys, a->qk, b.rows, 1, transposed(slope), q, scratch->dk + (b.key - key) * a->qk, a->qk, f32, 1);
    tile_gemm(b.rows, a->qk, b.keys, 1, slope, k, dq + (b.row * a->heads + h) * a->qk, a->heads * a->qk, f32, 1);
}

static void tile_backward(const struct dense_attention *a, const struct arguments *x, const struct shared *shared,
                          const struct scratch *scratch, int64_t h, int64_t key, int64_t keys, float *dq)
{
    memset(scratch->dk, 0, (size_t)(keys * a->qk) * sizeof(float));
    memset(scratch->dv, 0, (size_t)(keys * a->v) * sizeof(float));
    for (int64_t t = 0; t < a->rows; t += ROWS) {
        const struct box *all = &shared->block[t / ROWS];
        struct box b;

        if (all->key >= key + keys || all->key + all->keys <= key) continue;
        b = visible_box(x->start, x->end, t, least(ROWS, a->rows - t), key, keys);
        if (b.rows > 0) box_backward(a, x, shared, scratch, h, b, key, dq);
    }
    for (int64_t u = 0; u < keys; u++) {
        write_floats(a->type, x->dk, ((key + u) * a->heads + h) * a->qk, a->qk, scratch->dk + u * a->qk);
        write_floats(a->type, x->dv, ((key + u) * a->heads + h) * a->v, a->v, scratch->dv + u * a->v);
    }
}

static void part_backward(const struct dense_attention *a, const struct arguments *x, const struct shared *shared,
                          const struct scratch *scratch, int64_t h, int64_t part)
{
    float *dq = shared->dq + part * a->rows * a->heads * a->qk;
    int64_t end = least((part + 1) * shared->part, a->keys);

    for (int64_t t = 0; t < a->rows; t++) memset(dq + (t * a->heads + h) * a->qk, 0, (size_t)a->qk * sizeof *dq);
    for (int64_t key = part * shared->part; key < end; key += KEYS)
        tile_backward(a, x, shared, scratch, h, key, least(KEYS, end - key), dq);
}

void cpu_dense_attention_backward(struct stream *s, const struct dense_attention *a, const void *q, const void *k,
                                  const void *v, const int32_t *start, const int32_t *end, const void *out,
                                  const float *lse, const void *dout, void *dq, void *dk, void *dv, void *workspace)
{
    struct counted call = count_dense_attention_backward(s, a);
    struct arguments x = {q, k, v, start, end, out, lse, dout, dq, dk, dv};
    struct shared shared;
    size_t used = shared_layout(a, workspace, dq, &shared);

#pragma omp parallel num_threads(s->threads)
    {
        struct scratch scratch;
        size_t bytes = scratch_layout(a, NULL, &scratch);

        scratch_layout(a, (char *)workspace + used + (size_t)omp_get_thread_num() * bytes, &scratch);
#pragma omp for schedule(static) nowait
        for (int64_t t = 0; t < a->rows; t += ROWS)
            shared.block[t / ROWS] = visible_box(start, end, t, least(ROWS, a->rows - t), 0, a->keys);
#pragma omp for schedule(static)
        for (int64_t t = 0; t < a->rows; t++) row_deltas(a, &x, t, shared.delta + t * a->heads);
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < shared.parts * a->heads; task++) /* early keys have most rows, and come first */
            part_backward(a, &x, &shared, &scratch, task % a->heads, task / a->heads);
        if (shared.dq != dq) {
#pragma omp for schedule(static)
            for (int64_t t = 0; t < a->rows; t++) add_parts(a, &shared, t, dq);
        }
    }
    count_end(call);
}
