/* The seam between the model and its devices: every operation of the model as one table of functions.
 *
 * Rules for all of them
 *   - Shapes come in a struct, arrays as pointers into device memory, row-major and contiguous unless a stride says
 *     otherwise. `float *` arrays are fp32 on every device; `void *` arrays have the dtype of the shape.
 *   - No allocation, no host synchronisation, no error path: what can fail failed in validate or plan. Workspace comes
 *     from the caller, of X_bytes() size and 64-byte alignment. X_bytes() asks no device: a plan is made without one.
 *   - rows = 0 is legal and does nothing (outputs that accumulate stay, outputs that are written are empty).
 *   - Deterministic: the same inputs give the same bits, for any number of threads.
 *   - `add` in a shape: 0 overwrites the output, 1 adds to it.
 *   - Parameter gradients are added to, unless an `add` of their product says otherwise; fp32, or of the type
 *     `gradient` of the shape, rounded to nearest at each addition; a product may be rounded before it is added.
 *   - `pairs` is the exact number of (query, key) pairs that the documents of the call have; only a tally reads it. */
#ifndef GLM52_OPS_OPS_H
#define GLM52_OPS_OPS_H

#include "base/error.h"
#include "base/memory.h"
#include "ops/tally.h"

#ifdef __cplusplus /* of cuda/, which knows the host only by its address: C++ has no _Atomic */
struct host;
#else
#include "base/host.h"
#endif

struct ops;

enum { MOMENTS = 2 }; /* that a device keeps for mark */

/* Where operations run, in order. One per context. */
struct stream {
    const struct ops *ops;
    struct host *host;
    int threads;          /* of work on the host, the cpu device's above all; changes time, not results */
    struct tally *tally;  /* NULL: not wanted. The meta device needs none to run, one to count. */
    const char *label;    /* who asks, for the tally; a static string */
    uint64_t allocations; /* calls of allocate so far */
    void *state;          /* the device's own */
    struct stream *stands_for; /* of the meta device: whose workspaces it counts; NULL: the cpu's */
    double moment[MOMENTS]; /* of the cpu device, in seconds */
};

/* c[m,n] (+)= a[m,k] b[k,n], `batch` times with the given strides (elements). a is stored [k,m] if transpose_a,
 * b is stored [n,k] if transpose_b. fp32 accumulation. batch = 1 ignores the strides. An fp32 operand beside a bf16 one
 * may count as bf16 where c is bf16, and as the sum of two bf16 numbers, which lose 2^-18 of it, where c is fp32. */
struct gemm {
    int64_t m, n, k, lda, ldb, ldc;
    int64_t batch, stride_a, stride_b, stride_c;
    int32_t transpose_a, transpose_b, add;
    float scale; /* of the product; 0 means 1 */
    glm52_dtype a_type, b_type, c_type;
    const void *from; /* with add: what the product is added to, of c's type, stride and gaps; NULL: c itself */
};

/* One weight matrix [n,k] per group, `stride` elements apart; rows of group g are offsets[g] .. offsets[g+1]. */
struct grouped_gemm {
    int64_t rows, n, k, stride; /* rows = offsets[groups] at most */
    int32_t groups, add;        /* of dw too: overwritten, that of a group without rows is 0 */
    glm52_dtype type, gradient; /* of rows and weights; of dw: fp32 or bf16 */
};

struct norm {
    int64_t rows, width, x_stride, y_stride; /* strides of rows, in elements; dx has x_stride, dy has y_stride */
    float epsilon;
    int32_t add;
    glm52_dtype type;
};

/* Rotates pairs (2i, 2i+1) of the first 2*half columns; model.md "Interleaved application". */
struct rope {
    int64_t rows;
    int32_t heads, half;
    int64_t x_row, x_head, y_row, y_head; /* strides in elements */
    int32_t inverse, add;
    glm52_dtype type;
};

/* Rows of keys and values of latent attention (model.md 2.2): `rank` columns are normed, 2*half more are rotated. */
struct latent {
    int64_t rows;
    int32_t rank, half;
    float epsilon;
    glm52_dtype type; /* of gain, y and dx */
};

/* One row of `width` columns for all heads, and back: x[t] at t * x_row; y[t,h] at t * y_row + h * y_head. */
struct spread {
    int64_t rows, width, x_row, y_row, y_head;
    int32_t heads;
    glm52_dtype type;
};

struct embed {
    int64_t rows, width, vocabulary;
    glm52_dtype type, gradient; /* gradient: of the table, F32 or BF16 */
};

/* Lightning indexer (model.md 2.3): score[t,u] = sum_h weight[t,h] * relu(q[t,h] . key[u]); scales are
 * in weight. q and key are 16-byte aligned. */
struct indexer {
    int64_t rows, keys;
    int32_t heads, width, k;
    glm52_dtype type;
    double pairs;
    int32_t sides; /* of a loss: 1 leaves in `open` whether the relu of head and key is open, 2 takes it from there */
    int32_t *open; /* [rows,heads,keys]; with selected keys [rows,heads,k]. Of pairs outside the support it stays. */
};

/* Absorbed MLA attention over selected keys (model.md 2.2). */
struct sparse_mla {
    int64_t rows, keys;
    int32_t heads, kv_rank, rope, k;
    float scale;
    int32_t fast;       /* 1 permits results that differ in the last bits from run to run */
    glm52_dtype type;
    double pairs;       /* selected ones */
};

/* Causal attention over whole documents, keys and values of every head in full (model.md 2.2, not absorbed). */
struct dense_attention {
    int64_t rows, keys;
    int32_t heads, qk, v;   /* widths per head of queries and keys, and of values */
    float scale;
    int32_t fast;
    glm52_dtype type;
    double pairs;           /* visible ones */
};

/* Whose attention the indexer learns: main attention heads, absorbed (key_heads = 1) or in full (key_heads = heads). */
struct teacher {
    int32_t heads, key_heads, width;
    float scale;
};

/* Sigmoid router (model.md 2.6). */
struct route {
    int64_t rows;
    int32_t experts, k, normalize;
    int32_t forced;     /* row t takes experts (t k + j) mod experts whatever the logits say; for benchmarks */
    int32_t given;      /* chosen stands: forward makes the weights alone */
    float scale;
};

/* The rows * k (row, expert) assignments in expert order. */
struct dispatch {
    int64_t rows, width;
    int32_t k, experts, add;
    glm52_dtype type;
    const void *from; /* with add: what collect adds to, laid out as y; NULL: y itself. With add = 2: to both */
};

struct swiglu {
    int64_t rows, width;
    glm52_dtype type;
};

/* Auxiliary losses of the router (training.md 5): balance = coefficient * E / (k T^2) * sum_e count_e * sum_t s'[t,e]
 * for each sequence, averaged over the sequences that have rows; z = z_coefficient * mean_t logsumexp(z_t)^2. */
struct route_auxiliary {
    int64_t rows;
    int32_t experts, k, sequences;
    float coefficient, z_coefficient;
};

struct head {
    int64_t rows, width, vocabulary;
    glm52_dtype type, gradient; /* of x, w and dx; of dw */
};

/* The trunk's cross-entropy, and the end-to-end total variation of `depths` drafts against it (training.md 3.4). */
struct head_tv {
    int64_t rows, width, vocabulary;
    int32_t depths;
    glm52_dtype type, gradient; /* of states, w and their gradients; of dw */
};

/* What head_tv has of either side; each with or without its gradient. */
struct head_trunk {
    const void *x;        /* [rows,width] */
    const int32_t *label; /* these as in head_loss */
    const float *weight;
    float *loss;
    void *dx, *dw;
};

struct head_drafts {
    const void *x; /* [depths,rows,width] */
    const float *weight;
    float *alpha, *loss; /* [depths,rows], [rows] */
    void *dx;            /* like x */
    int32_t *side;       /* [depths,rows,vocabulary], NULL: not wanted */
    int32_t given;       /* side stands */
};

/* Matrices of narrow floats with a scale for each block of block_rows x block_columns (posttraining.md 1, 2); the last
 * blocks of rows and of columns may be smaller. a: the largest magnitude in a block; F: that of the codes; rn(): the
 * nearest code, ties to even, saturating (base/narrow.h). By format:
 *   FP8_BLOCK          e = F / a (FLT_MAX if that is infinite; 1 if a is 0, infinite or NaN); code = rn(x * e),
 *                      scale = 1 / e
 *   FP8_BLOCK_POWER    the same, e rounded down to a power of two
 *   FP8_BLOCK_RELEASE  the order of released checkpoints: scale = a / F (1 if that is 0, infinite or NaN); code =
 *                      rn(x / scale)
 *   MXFP8              scale = the least power of two not below a * (1 / F); code = rn(x / scale); saturates nothing
 *   MXFP8_OCP          scale = the greatest power of two not above a, over that of F; the largest may saturate
 *   NVFP4              A = *global, the largest magnitude of all, E = 2688 / A (FLT_MAX if that is infinite; 1 if A or
 *                      E is 0 or NaN); scale = rn(a * (E * (1 / 6))); code = rn(x * (1 / (scale * (1 / E)))), that
 *                      quotient FLT_MAX where it is infinite or NaN
 *   NVFP4_MODELOPT     G = *global = A / 2688, as a checkpoint keeps it; scale = rn(a / (6 * G)), 2^-9 at least, 1 if
 *                      that quotient is 0 or NaN; code = rn(x / (scale * G)), which is never -0 for x = 0; divided by 1
 *                      where that product is 0 or not finite
 * FP8: codes E4M3 (or E5M2), a byte each; scales fp32. MXFP8: the same codes; scales E8M0; usual blocks 1 x 32. NVFP4:
 * codes E2M1, two to a byte, the even column in the low half (width and block_columns even); scales E4M3; usual blocks
 * 1 x 16. */
enum quantised_format { FP8_BLOCK, FP8_BLOCK_POWER, FP8_BLOCK_RELEASE, MXFP8, MXFP8_OCP, NVFP4, NVFP4_MODELOPT };

struct quantised {
    int64_t rows, width;
    int64_t block_rows, block_columns; /* 1 x 128 for activations, 128 x 128 for weights */
    int32_t format, e5m2;
    glm52_dtype type; /* F32 or BF16: of what is quantised, or of what comes back */
};

/* What a step's loss is the sum of, as ranges of its sums; and from which multiple of the mean on it is a spike. */
enum { GUARD_PARTS = 4 };
struct guard {
    int32_t parts, first[GUARD_PARTS], count[GUARD_PARTS];
    double spike;                       /* 0: none is */
};

struct adamw {
    int64_t count;
    float beta1, beta2, epsilon, decay; /* decay: decoupled, times the learning rate */
    glm52_dtype type;                   /* of the parameter */
    glm52_dtype gradient, moments;      /* theirs: F32 or BF16 */
};

enum { MUON_STEPS = 16 };

/* Muon on `batch` blocks of equal shape (training.md 4.1), each orthogonalised and scaled on its own. Row i, column j
 * of block b lies at b * stride + i / group_rows * group_stride + i % group_rows * columns + j, in the gradient,
 * momentum, master and parameter alike; a block of rows that follow one another has group_rows = rows. */
struct muon {
    int64_t batch, stride, rows, columns, group_rows, group_stride;
    float momentum, decay, scale;        /* scale: of the orthogonalised block, 0.2 sqrt(max(rows, columns)) */
    int32_t nesterov, classic;           /* classic: M = b M + G instead of b M + (1 - b) G */
    int32_t steps;                       /* Newton-Schulz iterations */
    float coefficient[MUON_STEPS][3];    /* a, b, c of each */
    glm52_dtype type;                    /* of the parameter */
    glm52_dtype gradient, moments;       /* of the gradient and of the momentum: F32 or BF16 */
};

/* Values that change from step to step live in device memory, so that a captured step stays valid. */
enum { RATE_LR, RATE_CORRECTION1, RATE_CORRECTION2, RATES }; /* lr, 1 - beta1^t, 1 - beta2^t */

struct ops {
    const char *name;

    /* ---- device ---- */
    /* Zeroed by nobody. A failure is a status with what was asked and what is there. */
    glm52_status (*allocate)(struct stream *s, size_t bytes, enum memory_class of, void **out);
    void (*release)(struct stream *s, void *memory, size_t bytes, enum memory_class of);
    /* What an allocation of so many bytes really takes; the accounting counts it. */
    size_t (*taken_bytes)(struct stream *s, size_t bytes);
    /* Bytes that are free, and all there are; NULL where nobody knows. */
    void (*memory)(struct stream *s, uint64_t *free, uint64_t *all);
    void (*upload)(struct stream *s, void *to_device, const void *from_host, size_t bytes);
    void (*download)(struct stream *s, void *to_host, const void *from_device, size_t bytes); /* complete on return */
    void (*zero)(struct stream *s, void *memory, size_t bytes);
    void (*copy)(struct stream *s, void *to, const void *from, size_t bytes);
    glm52_status (*synchronize)(struct stream *s); /* waits; reports what failed since the last call */
    /* Notes when the device gets here, as moment 0 .. MOMENTS - 1; seconds between two moments, after synchronize. */
    void (*mark)(struct stream *s, int moment);
    double (*elapsed)(struct stream *s, int from, int to);
    void (*close)(struct stream *s);
    /* Between the two, what the stream's tally counts is timed as well: each operation until the next one begins.
     * time_end waits. NULL where count_end() takes the time, or nothing takes any. */
    glm52_status (*time_begin)(struct stream *s);
    glm52_status (*time_end)(struct stream *s);

    /* ---- recorded launches; NULL where a device has none ---- */
    /* Between the two, operations are recorded and do not run; uploads, downloads and synchronize are not allowed. All
     * arguments of the operations are kept as they are; what changes from replay to replay lies in
     * device memory. The same operations, with the same shapes, must have run before: what a
     * device sets up at first use is not recorded. */
    glm52_status (*record)(struct stream *s);
    glm52_status (*recorded)(struct stream *s, void **graph);
    void (*replay)(struct stream *s, void *graph);
    void (*forget)(struct stream *s, void *graph); /* waits: it may be running */

    /* ---- dense ---- */
    void (*gemm)(struct stream *s, const struct gemm *g, const void *a, const void *b, void *c);
    /* forward: y[i,n] = x[i,k] W_g^T; backward_rows: dx[i,k] = dy[i,n] W_g; backward_weight: dW_g[n,k] (+)= dy^T x. */
    void (*grouped_gemm_forward)(struct stream *s, const struct grouped_gemm *g, const int32_t *offsets, const void *x,
                                 const void *w, void *y);
    void (*grouped_gemm_backward_rows)(struct stream *s, const struct grouped_gemm *g, const int32_t *offsets,
                                       const void *dy, const void *w, void *dx);
    void (*grouped_gemm_backward_weight)(struct stream *s, const struct grouped_gemm *g, const int32_t *offsets,
                                         const void *dy, const void *x, void *dw);

    /* ---- norms ---- */
    /* y = x * rstd * gain, rstd = rsqrt(mean(x^2) + epsilon), kept [rows] for backward. dgain [width] is added to;
     * NULL: not wanted. dx may be dy. */
    void (*rmsnorm_forward)(struct stream *s, const struct norm *n, const void *x, const void *gain, void *y,
                            float *rstd);
    size_t (*norm_backward_bytes)(struct stream *s, const struct norm *n);
    void (*rmsnorm_backward)(struct stream *s, const struct norm *n, const void *x, const void *gain, const float *rstd,
                             const void *dy, void *dx, float *dgain, void *workspace);
    /* y = (x - mean) * rstd * gain + bias; statistics [rows,2] = mean, rstd. */
    void (*layernorm_forward)(struct stream *s, const struct norm *n, const void *x, const void *gain, const void *bias,
                              void *y, float *statistics);
    void (*layernorm_backward)(struct stream *s, const struct norm *n, const void *x, const void *gain,
                               const float *statistics, const void *dy, void *dx, float *dgain, float *dbias,
                               void *workspace);

    /* ---- position and tokens ---- */
    /* table [rows,half,2] = cos, sin of fp32 angles position * inverse_frequency[half] (fp32 product). */
    void (*rope_table)(struct stream *s, int64_t rows, int32_t half, const int32_t *position,
                       const float *inverse_frequency, float *table);
    /* inverse = 1 rotates back, which is the backward. x and y may be the same array. */
    void (*rope)(struct stream *s, const struct rope *r, const float *table, const void *x, void *y);
    /* rmsnorm and rope of rows [rank+2*half] from what a product leaves in fp32, so that y is rounded once. backward
     * takes dy in fp32 as the attention leaves it, and overwrites dx; dgain [rank] is added to; NULL: not wanted. */
    void (*latent_forward)(struct stream *s, const struct latent *l, const float *table, const float *x,
                           const void *gain, void *y, float *rstd);
    size_t (*latent_backward_bytes)(struct stream *s, const struct latent *l);
    void (*latent_backward)(struct stream *s, const struct latent *l, const float *table, const float *x,
                            const void *gain, const float *rstd, const float *dy, void *dx, float *dgain,
                            void *workspace);
    /* y[t,h] = x[t]. */
    void (*spread_heads)(struct stream *s, const struct spread *r, const void *x, void *y);
    /* x[t] = sum over h of y[t,h], fp32. */
    void (*sum_heads)(struct stream *s, const struct spread *r, const void *y, float *x);
    /* A negative token stands for none: its row is 0 and passes nothing back. backward adds the sum of a
     * token's rows, in fp32, to its row of dtable. */
    void (*embed_forward)(struct stream *s, const struct embed *e, const int32_t *token, const void *table, void *y);
    void (*embed_backward)(struct stream *s, const struct embed *e, const int32_t *token, const void *dy, void *dtable);

    /* ---- selection ---- */
    /* q [rows,heads,width], key [keys,width], weight [rows,heads] fp32; row t sees keys start[t] .. end[t] - 1.
     * selected [rows,k]: the k highest scores, score descending then key ascending, emitted ascending, -1 padded. */
    size_t (*index_select_bytes)(struct stream *s, const struct indexer *i);
    void (*index_select)(struct stream *s, const struct indexer *i, const void *q, const void *key, const float *weight,
                         const int32_t *start, const int32_t *end, int32_t *selected, void *workspace);
    /* scores [rows,keys], -inf where not visible. For inspection: rows x keys of memory. */
    void (*index_scores)(struct stream *s, const struct indexer *i, const void *q, const void *key, const float *weight,
                         const int32_t *start, const int32_t *end, float *scores);
    /* The selection rule alone, on given scores [rows,keys]; -0 equals +0, NaN counts as -inf and is never selected. */
    void (*select_topk)(struct stream *s, int64_t rows, int64_t keys, int32_t k, const float *scores,
                        const int32_t *start, const int32_t *end, int32_t *selected, int32_t *length);

    /* ---- attention ----
     *   q        [rows,heads,kv_rank+rope]   absorbed queries, rope part rotated
     *   kv       [keys,kv_rank+rope]         shared latent; values are its first kv_rank columns
     *   selected [rows,k]                    ascending, -1 padded at the end
     *   out      [rows,heads,kv_rank]        0 where a row has no key
     *   lse      [rows,heads] fp32           natural log; +inf where a row has no key
     * backward writes dq like q and dkv [keys,kv_rank+rope] fp32 (overwritten); target [rows,k] fp32, if not NULL,
     * gets the mean over heads of each selected key's probability (0 at -1).
     * sparse_mla_target makes that target where no backward runs: exp(logit - lse), by one product of queries and
     * keys. */
    void (*sparse_mla_forward)(struct stream *s, const struct sparse_mla *a, const void *q, const void *kv,
                               const int32_t *selected, void *out, float *lse, void *workspace);
    size_t (*sparse_mla_forward_bytes)(struct stream *s, const struct sparse_mla *a);
    void (*sparse_mla_backward)(struct stream *s, const struct sparse_mla *a, const void *q, const void *kv,
                                const int32_t *selected, const void *out, const float *lse, const void *dout, void *dq,
                                float *dkv, float *target, void *workspace);
    size_t (*sparse_mla_backward_bytes)(struct stream *s, const struct sparse_mla *a);
    void (*sparse_mla_target)(struct stream *s, const struct sparse_mla *a, const void *q, const void *kv,
                              const int32_t *selected, const float *lse, float *target, void *workspace);
    size_t (*sparse_mla_target_bytes)(struct stream *s, const struct sparse_mla *a);

    /* q [rows,heads,qk], k [keys,heads,qk], v [keys,heads,v], out [rows,heads,v], lse [rows,heads] fp32 (+inf: no
     * key). Row t sees keys start[t] .. end[t] - 1. backward overwrites dq, dk, dv (the type of the others). */
    size_t (*dense_attention_forward_bytes)(struct stream *s, const struct dense_attention *a);
    void (*dense_attention_forward)(struct stream *s, const struct dense_attention *a, const void *q, const void *k,
                                    const void *v, const int32_t *start, const int32_t *end, void *out, float *lse,
                                    void *workspace);
    size_t (*dense_attention_backward_bytes)(struct stream *s, const struct dense_attention *a);
    void (*dense_attention_backward)(struct stream *s, const struct dense_attention *a, const void *q, const void *k,
                                     const void *v, const int32_t *start, const int32_t *end, const void *out,
                                     const float *lse, const void *dout, void *dq, void *dk, void *dv, void *workspace);

    /* ---- indexer loss (training.md 1.4) ----
     * kl[t] = sum_u p (log max(p, 1e-10) - log softmax(score[t])[u]) over the support of row t, 0 where it is empty.
     * Gradients of sum_t row_weight[t] * kl[t]: dq like q, dkey [keys,width] fp32, dweight [rows,heads] fp32, all
     * overwritten. Rows of weight 0 get a kl, but no gradient. That of q and key jumps where a relu opens: `sides`.
     * The indexer's pairs are those of the support.
     * selected: the support is `selected`, p = target as sparse_mla_backward or _target gave it.
     * dense: the support is start .. end; p = mean over the teacher's heads of softmax(scale * teacher_q . teacher_key)
     * over the support, teacher_q [rows,heads,width], teacher_key [keys,key_heads,width]. teacher_lse
     * [rows,heads] is what dense_attention_forward left for these queries, keys and support: p = mean of
     * exp(logit - lse), the attention's own probabilities. NULL where no attention has seen all of the support:
     * lse is made here then. Never rows x keys of memory. */
    size_t (*index_kl_selected_bytes)(struct stream *s, const struct indexer *i);
    void (*index_kl_selected)(struct stream *s, const struct indexer *i, const void *q, const void *key,
                              const float *weight, const int32_t *selected, const float *target,
                              const float *row_weight, float *kl, void *dq, float *dkey, float *dweight,
                              void *workspace);
    size_t (*index_kl_dense_bytes)(struct stream *s, const struct indexer *i, const struct teacher *t);
    void (*index_kl_dense)(struct stream *s, const struct indexer *i, const struct teacher *t, const void *q,
                           const void *key, const float *weight, const void *teacher_q, const void *teacher_key,
                           const float *teacher_lse, const int32_t *start, const int32_t *end, const float *row_weight,
                           float *kl, void *dq, float *dkey, float *dweight, void *workspace);

    /* ---- experts ---- */
    /* logits [rows,experts] fp32; chosen [rows,k] ascending: the k largest sigmoid + bias (ties: lower expert);
     * weight [rows,k] = sigmoid / (sum of the chosen + 1e-20) * scale (without the division if !normalize).
     * backward overwrites dlogits. */
    void (*route_forward)(struct stream *s, const struct route *r, const float *logits, const float *bias,
                          int32_t *chosen, float *weight);
    void (*route_backward)(struct stream *s, const struct route *r, const float *logits, const int32_t *chosen,
                           const float *dweight, float *dlogits);
    /* Auxiliary losses on the unbiased sigmoids: s' = s / (sum s + 1e-20), count_e of the k largest s (no bias).
     * Sequence n is rows sequence[n] .. sequence[n+1] - 1; rows of no sequence take part in nothing. dlogits is added
     * to; *loss (balance + z, fp64) is added to. running [experts+1], if not NULL (one sequence then): counts and
     * rows of earlier calls, to which this one's are added before they take the place of its own. */
    void (*route_auxiliary)(struct stream *s, const struct route_auxiliary *a, const float *logits,
                            const int32_t *sequence, float *dlogits, double *loss, double *running);
    /* counts[e] += assignments to expert e, of the rows with counted[t] != 0 (NULL: all). Whole numbers in fp32,
     * exact to 2^24 per call and added in fp64: counts [experts] fp64. */
    void (*count_experts)(struct stream *s, const struct route *r, const int32_t *chosen, const float *counted,
                          double *counts);
    /* Each expert takes at most `capacity` assignments: those of lower rows, or with by_weight
     * those of larger weight (ties: lower rows). The weight of the others becomes 0; their number
     * is added to *dropped, if that is not NULL. */
    void (*limit_capacity)(struct stream *s, const struct route *r, int64_t capacity, int32_t by_weight,
                           const int32_t *chosen, float *weight, double *dropped);
    /* x = 0 where mask = 0. */
    void (*clear_where_zero)(struct stream *s, int64_t count, const float *mask, float *x);
    /* bias[e] += rate * sign(mean(counts) - counts[e]); nothing where coefficient is not NULL and *coefficient < 0. */
    void (*balance_bias)(struct stream *s, int32_t experts, float rate, const float *coefficient, const double *counts,
                         float *bias);
    /* Stable counting sort of assignments row*k+j by expert. offsets [experts+1]; source [rows*k]: sorted slot ->
     * row*k+j; place [rows*k]: row*k+j -> sorted slot. */
    size_t (*dispatch_sort_bytes)(struct stream *s, const struct dispatch *d);
    void (*dispatch_sort)(struct stream *s, const struct dispatch *d, const int32_t *chosen, int32_t *offsets,
                          int32_t *source, int32_t *place, void *workspace);
    /* spread: y[place[row*k+j]] = x[row], y [rows*k,width]. collect: y[row] (+)= sum_j x[place[row*k+j]]. */
    void (*dispatch_spread)(struct stream *s, const struct dispatch *d, const int32_t *place, const void *x, void *y);
    void (*dispatch_collect)(struct stream *s, const struct dispatch *d, const int32_t *place, const void *x, void *y);
    /* gate_up [rows,2*width], gate columns first. act = silu(gate) * up * p, p = weight[source[row]], or 1 if weight is
     * NULL. backward writes dgate_up, with weight dweight[source[row]], and act again unless it is NULL; act
     * may be dact, and dgate_up may be gate_up. */
    void (*swiglu_forward)(struct stream *s, const struct swiglu *g, const void *gate_up, const float *weight,
                           const int32_t *source, void *act);
    void (*swiglu_backward)(struct stream *s, const struct swiglu *g, const void *gate_up, const float *weight,
                            const int32_t *source, const void *dact, void *dgate_up, float *dweight, void *act);

    /* ---- loss ---- */
    /* Fused head and cross-entropy in chunks of rows: loss[t] = logsumexp(x[t] W^T) - (x[t] W^T)[label[t]]; hit[t]
     * (NULL: not wanted) = 1 where the largest logit of row t (the first, if several) is label[t], else 0. Both 0
     * where label[t] < 0. If dx is not NULL: gradient of sum_t weight[t] * loss[t]; dx overwritten, dw
     * [vocabulary,width] added to in its own type, if that is bf16 with one rounding to nearest for each chunk
     * (NULL: not wanted). weight counts as 0 where label < 0. With x in bf16 the logits may be rounded to bf16, but
     * that of the label is not, and sums are fp32. */
    size_t (*head_loss_bytes)(struct stream *s, const struct head *h);
    void (*head_loss)(struct stream *s, const struct head *h, const void *x, const void *w, const int32_t *label,
                      const float *weight, float *loss, float *hit, void *dx, void *dw, void *workspace);
    /* head_loss of the trunk and the total variation of its drafts, which look at the same logits of the trunk.
     * alpha[d,t] = sum_v min(p, q), p = softmax of the trunk at row t + d + 1, q = softmax of draft d at row t; the
     * drafts' loss[t] = 1 - mean over prefixes of the product of alphas. Rows where the drafts' weight is 0 have no
     * complete chain: alpha and loss 0, whatever the trunk has there. The drafts' dx is overwritten: gradient of
     * sum_t weight[t] * loss[t] through the drafts alone; NULL: not wanted. It jumps where q = p: side is 1 where q
     * counts as no larger than p, else 0, 0 too in rows of weight 0; if `given`, the gradient takes it from there.
     * With states in bf16 the logits may be rounded to bf16; sums are fp32. */
    size_t (*head_tv_bytes)(struct stream *s, const struct head_tv *h);
    void (*head_tv)(struct stream *s, const struct head_tv *h, const struct head_trunk *trunk,
                    const struct head_drafts *drafts, const void *w, void *workspace);

    /* ---- arithmetic ---- */
    void (*add)(struct stream *s, int64_t count, glm52_dtype type, const void *x, void *y); /* y += x */
    void (*multiply)(struct stream *s, int64_t count, const float *x, float *y); /* y *= x */
    void (*convert)(struct stream *s, int64_t count, glm52_dtype from, const void *x, glm52_dtype to, void *y);
    /* codes [rows,width] and scales [ceil(rows/block_rows),ceil(width/block_columns)] of x [rows,width], row-major, as
     * checkpoints keep them. codes_t [width,rows] and scales_t [ceil(width/block_rows),ceil(rows/block_columns)] get
     * x^T as the same call would quantise it, for products that contract over rows; NULL: not wanted; not for NVFP4.
     * global: NVFP4 alone. Arithmetic is fp32, each operation rounded. The code of a NaN is 0x7f (NVFP4: 7), in MXFP8
     * that of all its block. */
    void (*quantise)(struct stream *s, const struct quantised *q, const float *global, const void *x, void *codes,
                     void *scales, void *codes_t, void *scales_t);
    /* y [rows,width] = code * scale in fp32, then rounded to its type; NVFP4: code * ((scale * A) * (1 / 2688)),
     * NVFP4_MODELOPT: code * (scale * G). A NaN code or scale gives NaN. */
    void (*dequantise)(struct stream *s, const struct quantised *q, const float *global, const void *codes,
                       const void *scales, void *y);
    /* *out += sum x[i] * w[i] (w NULL: 1), respectively sum x[i]^2, x of either type, in fp64 in a fixed order; two
     * squares of BF16, exact in fp32, may be added there. */
    size_t (*sum_bytes)(struct stream *s, int64_t count);
    void (*sum)(struct stream *s, int64_t count, const float *x, const float *w, double *out, void *workspace);
    void (*sum_squares)(struct stream *s, int64_t count, glm52_dtype type, const void *x, double *out, void *workspace);

    /* ---- update ---- */
    /* *norm = sqrt(*squares); *coefficient = min(1, limit / (norm + 1e-6)), 1 if limit <= 0; -1 if *squares is not
     * finite, which makes the updates below leave everything as it is. */
    void (*clip)(struct stream *s, const double *squares, float limit, float *norm, float *coefficient);
    /* loss = the sum over the parts of the sum of each, in their order. *coefficient becomes -1 where the loss or
     * *norm is not finite, and where spike and *mean_loss are above 0 and the loss is above spike * *mean_loss.
     * Otherwise *mean_loss becomes fma(0.05, loss, 0.95 * *mean_loss), or the loss where it was not above 0. */
    void (*guard)(struct stream *s, const struct guard *g, const double *sums, const float *norm, double *mean_loss,
                  float *coefficient);
    /* g = gradient * *coefficient; moments m, v; W = W (1 - lr decay) - lr mh / (sqrt(vh) + epsilon);
     * adamw_clip_lr.json states the formula. W is the fp32 master, of which the parameter is the rounded copy, or,
     * where master = NULL, the parameter itself. Arithmetic is fp32; what is kept in BF16 is rounded to nearest when
     * it is written, and the update is made of the moments before that. */
    void (*adamw)(struct stream *s, const struct adamw *a, const float *rates, const float *coefficient,
                  const void *gradient, void *m, void *v, float *master, void *parameter);
    /* X = U / max(|U|_F, 1e-7), transposed if rows > columns; per iteration A = X X^T, X = a X + (b A + c A A) X;
     * W = W (1 - lr decay) - lr scale X, W and roundings as for adamw, but U is made of the momentum as it is kept.
     * fp32 throughout where the parameter is F32; where it is BF16, products may be taken of operands in half
     * precision, within the bounds of semantics.md. A block whose U is 0 only decays. */
    size_t (*muon_bytes)(struct stream *s, const struct muon *m);
    void (*muon)(struct stream *s, const struct muon *m, const float *rates, const float *coefficient,
                 const void *gradient, void *momentum, float *master, void *parameter, void *workspace);
};

/* Opens a device on the host's memory. threads: cpu only, 0 = what OpenMP offers. */
glm52_status stream_open_cpu(struct stream *s, struct host *host, int threads);
glm52_status stream_open_meta(struct stream *s, struct host *host);
/* UNSUPPORTED without the CUDA back end or a GPU it has code for, DEVICE where driver or device fail. */
glm52_status stream_open_cuda(struct stream *s, struct host *host, int index);
/* A stream of the CUDA back end for a meta stream to stand for, with no need of a GPU; nothing else may be done with
 * it, and it is not closed. *workspace: bytes that the device takes for itself. UNSUPPORTED without the back end. */
glm52_status stream_plan_cuda(struct stream *s, size_t *workspace);
/* GPUs that stream_open_cuda can be asked for; 0 where anything it needs is missing. */
int cuda_device_count(void);
void cuda_describe(int index, char *text, size_t bytes);
void stream_close(struct stream *s);

/* Elements of a device array of fp32 or bf16 to and from fp32 host memory, through a buffer of `count` elements of the
 * device's type. Reading is complete on return. */
void stream_read(struct stream *s, glm52_dtype type, const void *from_device, uint64_t count, float *values,
                 void *buffer);
void stream_write(struct stream *s, glm52_dtype type, void *to_device, uint64_t count, const float *values,
                  void *buffer);

#endif
