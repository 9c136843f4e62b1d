/* Sparse MLA attention, backward (model.md 2.2, absorbed form). With P the probabilities and D = sum(out * dout):
 *     dS = P * (dout . value - D) * scale,  dq = dS K,  dK = dS^T q,  and the values, the first kv_rank columns of K,
 *     get P^T dout besides.
 * A chunk of rows at a time, first its rows in parallel: P and dS from lse, kept for the chunk, and dq. Then tiles of
 * keys in parallel: each adds what the chunk's rows give to its keys, in order of rows. So a key's gradient is summed
 * in order of rows whatever the chunk, the tile and the number of threads, and nothing of rows x keys exists. */
#include <omp.h>

#include "ops/count.h"
#include "ops/cpu/cpu.h"
#include "ops/cpu/sparse_mla.h"

enum {
    CHUNK_ROWS = 256,       /* enough to keep threads busy between two barriers */
    CHUNK_BYTES = 16 << 20, /* of kept P and dS: fewer rows where they are long */
    TILES = 32,             /* of keys: enough to share out */
    TILE_KEYS = 64,         /* but not so small that a row has one key in each */
};

struct scratch {
    struct row_scratch row; /* first for q, then for dout */
    float *dq;              /* [lanes, columns] */
    float *out;             /* [heads, kv_rank] */
    float *lse, *delta;     /* [lanes]: of the row, and D */
};

/* What all threads share. */
struct kept {
    int64_t rows;       /* of a chunk */
    int64_t tile;       /* keys of a tile */
    const float *kv;    /* [keys, columns] */
    float *dkv;         /* [keys, columns] */
    float *gradient;    /* [rows, 2, heads, columns]: q, and dout padded */
    float *coefficient; /* [rows, k, 2, lanes]: dS, and P */
    int64_t *count;     /* [rows]: keys of a row */
};

static size_t scratch_layout(const struct sparse_mla *a, const struct padded *p, char *base, struct scratch *scratch)
{
    size_t used = 0;

    row_layout(a, p, base, &used, &scratch->row);
    scratch->dq = carve_floats(base, &used, p->lanes * p->columns);
    scratch->out = carve_floats(base, &used, a->heads * a->kv_rank);
    scratch->lse = carve_floats(base, &used, p->lanes);
    scratch->delta = carve_floats(base, &used, p->lanes);
    return used;
}

static size_t kept_layout(const struct sparse_mla *a, const struct padded *p, char *base, const void *kv, float *dkv,
                          struct kept *kept)
{
    int64_t row_bytes = (int64_t)sizeof(float) * 2 * a->k * p->lanes;
    size_t used = 0;

    kept->rows = CHUNK_BYTES / row_bytes < 1 ? 1 : CHUNK_BYTES / row_bytes;
    kept->rows = kept->rows < CHUNK_ROWS ? kept->rows : CHUNK_ROWS;
    kept->tile = (a->keys + TILES - 1) / TILES < TILE_KEYS ? TILE_KEYS : (a->keys + TILES - 1) / TILES;
    kept->kv = p->in_place ? kv : carve_floats(base, &used, a->keys * p->columns);
    kept->dkv = p->width == p->columns ? dkv : carve_floats(base, &used, a->keys * p->columns);
    kept->gradient = carve_floats(base, &used, kept->rows * 2 * a->heads * p->columns);
    kept->coefficient = carve_floats(base, &used, kept->rows * a->k * 2 * p->lanes);
    kept->count = carve(base, &used, (size_t)kept->rows * sizeof *kept->count);
    return used;
}

size_t cpu_sparse_mla_backward_bytes(struct stream *s, const struct sparse_mla *a)
{
    struct padded p = padded_shape(a);
    struct scratch scratch;
    struct kept kept;

    return kept_layout(a, &p, NULL, NULL, NULL, &kept) + (size_t)s->threads * scratch_layout(a, &p, NULL, &scratch);
}

/* ---- rows ---- */

/* P into the second half of each key's coefficients. */
static void keep_probabilities(const struct padded *p, int64_t n, const float *probability, float *coefficient)
{
    for (int64_t i = 0; i < n; i++)
        for (int64_t l = 0; l < p->lanes; l += LANES)
            V8(coefficient + (2 * i + 1) * p->lanes + l) = V8_CONST(probability + i * p->lanes + l);
}

/* dS = P * (dot - D) * scale into the first half. */
static void logit_gradients(const struct padded *p, int64_t n, float scale, const float *dot, const float *delta,
                            float *coefficient)
{
    for (int64_t i = 0; i < n; i++) {
        float *to = coefficient + i * 2 * p->lanes;

        for (int64_t l = 0; l < p->lanes; l += LANES)
            V8(to + l) = V8(to + p->lanes + l) * (V8_CONST(dot + i * p->lanes + l) - V8_CONST(delta + l)) * scale;
    }
}

/* Copies [heads, count] into rows of p->columns, 0 beyond. */
static void pad_heads(const struct padded *p, int64_t heads, int64_t count, const float *from, float *to)
{
    for (int64_t h = 0; h < heads; h++) {
        memcpy(to + h * p->columns, from + h * count, (size_t)count * sizeof *to);
        memset(to + h * p->columns + count, 0, (size_t)(p->columns - count) * sizeof *to);
    }
}

struct arguments {
    const void *q, *out, *dout;
    const int32_t *selected;
    const float *lse;
    void *dq;
    float *target;
};

/* P of row t, its q as gradient of the logits, and the target. */
static void redo_forward(const struct sparse_mla *a, const struct padded *p, const struct arguments *x, int64_t n,
                         const struct scratch *scratch, int64_t t, float *gradient, float *coefficient)
{
    row_logits(a, p, x->q, t, n, &scratch->row);
    pad_heads(p, a->heads, p->width, scratch->row.input, gradient);
    row_probabilities(a, p, x->lse, t, n, &scratch->row, scratch->lse);
    keep_probabilities(p, n, scratch->row.dot, coefficient);
    if (x->target)
        mean_over_heads(a, p, n, scratch->row.dot, x->target + t * a->k);
}

/* Row t, number r of its chunk: P, dS and the gradients they will be multiplied with are kept, dq is done. */
static void row_backward(const struct sparse_mla *a, const struct padded *p, const struct arguments *x,
                         const struct kept *kept, const struct scratch *scratch, int64_t t, int64_t r)
{
    float *coefficient = kept->coefficient + r * a->k * 2 * p->lanes;
    float *gradient = kept->gradient + r * 2 * a->heads * p->columns;
    const struct row_scratch *s = &scratch->row;
    int64_t n = find_keys(p, a->k, kept->kv, x->selected + t * a->k, s->key), latent = a->heads * a->kv_rank;

    kept->count[r] = n;
    redo_forward(a, p, x, n, scratch, t, gradient, coefficient);

    read_floats(a->type, x->dout, t * latent, latent, s->input);
    read_floats(a->type, x->out, t * latent, latent, scratch->out);
    pad_heads(p, a->heads, a->kv_rank, s->input, gradient + a->heads * p->columns);
    transpose_heads(p, a->heads, a->kv_rank, 1, s->input, s->query);
    keys_times_query(p, s->key, n, round_up(a->kv_rank, LANES), s->query, s->dot);
    memset(scratch->delta, 0, (size_t)p->lanes * sizeof(float));
    for (int64_t h = 0; h < a->heads; h++)
        for (int64_t c = h * a->kv_rank; c < (h + 1) * a->kv_rank; c++)
            scratch->delta[h] += s->input[c] * scratch->out[c];
    logit_gradients(p, n, a->scale, s->dot, scratch->delta, coefficient);

    weigh_keys(p, s->key, n, a->heads, coefficient, 2 * p->lanes, p->columns, scratch->dq);
    for (int64_t h = 0; h < a->heads; h++)
        write_floats(a->type, x->dq, (t * a->heads + h) * p->width, p->width, scratch->dq + h * p->columns);
}

/* ---- keys ---- */

/* Two keys' rows of dkv (or one twice) += their coefficients times the gradients, from column c on. */
ALWAYS_INLINE void add_to_keys(const struct padded *p, int64_t heads, const float *gradient, int halves, const float *a,
                               const float *b, float *to_a, float *to_b, int64_t c, const int vectors)
{
    v8 sum[2][6];

#pragma GCC unroll 6
    for (int v = 0; v < vectors; v++) {
        sum[0][v] = V8(to_a + c + v * LANES);
        sum[1][v] = V8(to_b + c + v * LANES);
    }
    for (int half = 0; half < halves; half++)
        for (int64_t h = 0; h < heads; h++) {
            const float *row = gradient + (half * heads + h) * p->columns + c;

#pragma GCC unroll 6
            for (int v = 0; v < vectors; v++) {
                v8 x = V8_CONST(row + v * LANES);

                V8_HOLD(x);
                sum[0][v] += x * a[half * p->lanes + h];
                sum[1][v] += x * b[half * p->lanes + h];
            }
        }
#pragma GCC unroll 6
    for (int v = 0; v < vectors; v++) {
        V8(to_b + c + v * LANES) = sum[1][v]; /* b first: where both are one key, they are equal */
        V8(to_a + c + v * LANES) = sum[0][v];
    }
}

/* First of selected[0 .. n) that is not below key. */
static int64_t lower_bound(const int32_t *selected, int64_t n, int64_t key)
{
    int64_t low = 0;

    while (n > 0) {
        int64_t half = n / 2;

        if (selected[low + half] < key) {
            low += half + 1;
            n -= half + 1;
        } else {
            n = half;
        }
    }
    return low;
}

/* What row r of the chunk gives to keys `first` .. `last` - 1. */
static void add_row(const struct sparse_mla *a, const struct padded *p, const struct kept *kept,
                    const int32_t *selected, int64_t r, int64_t first, int64_t last)
{
    const float *gradient = kept->gradient + r * 2 * a->heads * p->columns;
    int64_t i = lower_bound(selected, kept->count[r], first);
    int64_t n = i + lower_bound(selected + i, kept->count[r] - i, last);

    for (; i < n; i += 2) {
        int64_t other = i + 1 < n ? i + 1 : i, c = 0;
        const float *x = kept->coefficient + (r * a->k + i) * 2 * p->lanes;
        const float *y = kept->coefficient + (r * a->k + other) * 2 * p->lanes;
        float *to_x = kept->dkv + selected[i] * p->columns, *to_y = kept->dkv + selected[other] * p->columns;

        for (; c + 6 * LANES <= p->columns; c += 6 * LANES)
            add_to_keys(p, a->heads, gradient, c < a->kv_rank ? 2 : 1, x, y, to_x, to_y, c, 6);
        for (; c < p->columns; c += LANES)
            add_to_keys(p, a->heads, gradient, c < a->kv_rank ? 2 : 1, x, y, to_x, to_y, c, 1);
    }
}

/* ---- the whole ---- */

static void chunk_backward(const struct sparse_mla *a, const struct padded *p, const struct arguments *x,
                           const struct kept *kept, const struct scratch *scratch, int64_t from)
{
    int64_t rows = a->rows - from < kept->rows ? a->rows - from : kept->rows;

#pragma omp for schedule(dynamic, 1)
    for (int64_t r = 0; r < rows; r++)
        row_backward(a, p, x, kept, scratch, from + r, r);
#pragma omp for schedule(dynamic, 1)
    for (int64_t first = 0; first < a->keys; first += kept->tile)
        for (int64_t r = 0; r < rows; r++)
            add_row(a, p, kept, x->selected + (from + r) * a->k, r, first, first + kept->tile);
}

void cpu_sparse_mla_backward(struct stream *s, const struct sparse_mla *a, const void *q, const void *kv,
                             const int32_t *selected, const void *out, const float *lse, const void *dout, void *dq,
                             float *dkv, float *target, void *workspace)
{
    struct counted call = count_sparse_mla_backward(s, a, target != NULL);
    struct arguments x = {q, out, dout, selected, lse, dq, target};
    struct padded p = padded_shape(a);
    struct kept kept;
    size_t shared = kept_layout(a, &p, workspace, kv, dkv, &kept);

#pragma omp parallel num_threads(s->threads)
    {
        struct scratch scratch;
        size_t bytes = scratch_layout(a, &p, NULL, &scratch);

        scratch_layout(a, &p, (char *)workspace + shared + (size_t)omp_get_thread_num() * bytes, &scratch);
        pad_latent(a, &p, kv, workspace); /* where kept.kv is */
#pragma omp for schedule(static)
        for (int64_t u = 0; u < a->keys; u++)
            memset(kept.dkv + u * p.columns, 0, (size_t)p.columns * sizeof(float));
        for (int64_t from = 0; from < a->rows; from += kept.rows)
            chunk_backward(a, &p, &x, &kept, &scratch, from);
        if (kept.dkv != dkv) {
#pragma omp for schedule(static)
            for (int64_t u = 0; u < a->keys; u++)
                memcpy(dkv + u * p.width, kept.dkv + u * p.columns, (size_t)p.width * sizeof(float));
        }
    }
    count_end(call);
}
