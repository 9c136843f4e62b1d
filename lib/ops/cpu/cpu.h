/* Inside the cpu device: its operations, its threads, and the one way to call BLAS. Contracts are in ops/ops.h.
 *
 * Results do not depend on the number of threads: work is cut into tiles or blocks by shape alone, threads only decide
 * who does which, and sums over blocks are taken in the order of the blocks. */
#ifndef GLM52_OPS_CPU_CPU_H
#define GLM52_OPS_CPU_CPU_H

#include "ops/ops.h"

/* Threads of a stream opened with `wanted` threads: 0 means as many as OpenMP offers. */
int cpu_threads(int wanted);

/* Threads for a parallel region over `work` elements or multiply-adds: one if waking the others costs more. */
static inline int cpu_team(const struct stream *s, double work)
{
    return work < 32768 ? 1 : s->threads;
}

/* An operand of tile_gemm: element (i, j) at [i * ld + j], or at [j * ld + i] if transposed. */
struct operand {
    const void *at;
    int64_t ld;
    int transposed;
    glm52_dtype type;
};

/* The operand that starts at element (i, j) of o. */
struct operand operand_at(struct operand o, int64_t i, int64_t j);

static inline struct operand transposed(struct operand o)
{
    o.transposed = !o.transposed;
    return o;
}

/* Rows from `row` on of one head's columns in an array [rows, heads, width]. */
struct operand operand_of_head(glm52_dtype type, const void *array, int64_t heads, int64_t width, int64_t row,
                               int64_t head);

/* c[m,n] (+)= a[m,k] b[k,n] on the calling thread alone, at any place inside a parallel region and only there: it
 * limits BLAS to one thread, for which the region's end makes up. */
void tile_gemm(int64_t m, int64_t n, int64_t k, float scale, struct operand a, struct operand b, void *c, int64_t ldc,
               glm52_dtype c_type, int add);

/* gemm without a record in the tally, for operations made of others. */
void gemm_run(struct stream *s, const struct gemm *g, const void *a, const void *b, void *c);

void cpu_gemm(struct stream *s, const struct gemm *g, const void *a, const void *b, void *c);
void cpu_grouped_gemm_forward(struct stream *s, const struct grouped_gemm *g, const int32_t *offsets, const void *x,
                              const void *w, void *y);
void cpu_grouped_gemm_backward_rows(struct stream *s, const struct grouped_gemm *g, const int32_t *offsets,
                                    const void *dy, const void *w, void *dx);
void cpu_grouped_gemm_backward_weight(struct stream *s, const struct grouped_gemm *g, const int32_t *offsets,
                                      const void *dy, const void *x, void *dw);
void cpu_rmsnorm_forward(struct stream *s, const struct norm *n, const void *x, const void *gain, void *y,
                         float *rstd);
size_t cpu_norm_backward_bytes(struct stream *s, const struct norm *n);
void cpu_rmsnorm_backward(struct stream *s, const struct norm *n, const void *x, const void *gain, const float *rstd,
                          const void *dy, void *dx, float *dgain, void *workspace);
void cpu_layernorm_forward(struct stream *s, const struct norm *n, const void *x, const void *gain, const void *bias,
                           void *y, float *statistics);
void cpu_layernorm_backward(struct stream *s, const struct norm *n, const void *x, const void *gain,
                            const float *statistics, const void *dy, void *dx, float *dgain, float *dbias,
                            void *workspace);
void cpu_rope_table(struct stream *s, int64_t rows, int32_t half, const int32_t *position,
                    const float *inverse_frequency, float *table);
void cpu_rope(struct stream *s, const struct rope *r, const float *table, const void *x, void *y);
void cpu_latent_forward(struct stream *s, const struct latent *l, const float *table, const float *x, const void *gain,
                        void *y, float *rstd);
size_t cpu_latent_backward_bytes(struct stream *s, const struct latent *l);
void cpu_latent_backward(struct stream *s, const struct latent *l, const float *table, const float *x,
                         const void *gain, const float *rstd, const float *dy, void *dx, float *dgain,
                         void *workspace);
void cpu_spread_heads(struct stream *s, const struct spread *r, const void *x, void *y);
void cpu_sum_heads(struct stream *s, const struct spread *r, const void *y, float *x);
void cpu_multiply(struct stream *s, int64_t count, const float *x, float *y);
void cpu_embed_forward(struct stream *s, const struct embed *e, const int32_t *token, const void *table, void *y);
void cpu_embed_backward(struct stream *s, const struct embed *e, const int32_t *token, const void *dy, void *dtable);
size_t cpu_index_select_bytes(struct stream *s, const struct indexer *i);
void cpu_index_select(struct stream *s, const struct indexer *i, const void *q, const void *key, const float *weight,
                      const int32_t *start, const int32_t *end, int32_t *selected, void *workspace);
void cpu_index_scores(struct stream *s, const struct indexer *i, const void *q, const void *key, const float *weight,
                      const int32_t *start, const int32_t *end, float *scores);
void cpu_select_topk(struct stream *s, int64_t rows, int64_t keys, int32_t k, const float *scores,
                     const int32_t *start, const int32_t *end, int32_t *selected, int32_t *length);
void cpu_sparse_mla_forward(struct stream *s, const struct sparse_mla *a, const void *q, const void *kv,
                            const int32_t *selected, void *out, float *lse, void *workspace);
size_t cpu_sparse_mla_forward_bytes(struct stream *s, const struct sparse_mla *a);
void cpu_sparse_mla_backward(struct stream *s, const struct sparse_mla *a, const void *q, const void *kv,
                             const int32_t *selected, const void *out, const float *lse, const void *dout, void *dq,
                             float *dkv, float *target, void *workspace);
size_t cpu_sparse_mla_backward_bytes(struct stream *s, const struct sparse_mla *a);
void cpu_sparse_mla_target(struct stream *s, const struct sparse_mla *a, const void *q, const void *kv,
                           const int32_t *selected, const float *lse, float *target, void *workspace);
size_t cpu_sparse_mla_target_bytes(struct stream *s, const struct sparse_mla *a);
size_t cpu_dense_attention_forward_bytes(struct stream *s, const struct dense_attention *a);
void cpu_dense_attention_forward(struct stream *s, const struct dense_attention *a, const void *q, const void *k,
                                 const void *v, const int32_t *start, const int32_t *end, void *out, float *lse,
                                 void *workspace);
size_t cpu_dense_attention_backward_bytes(struct stream *s, const struct dense_attention *a);
void cpu_dense_attention_backward(struct stream *s, const struct dense_attention *a, const void *q, const void *k,
                                  const void *v, const int32_t *start, const int32_t *end, const void *out,
                                  const float *lse, const void *dout, void *dq, void *dk, void *dv, void *workspace);
size_t cpu_index_kl_selected_bytes(struct stream *s, const struct indexer *i);
void cpu_index_kl_selected(struct stream *s, const struct indexer *i, const void *q, const void *key,
                           const float *weight, const int32_t *selected, const float *target, const float *row_weight,
                           float *kl, void *dq, float *dkey, float *dweight, void *workspace);
size_t cpu_index_kl_dense_bytes(struct stream *s, const struct indexer *i, const struct teacher *t);
void cpu_index_kl_dense(struct stream *s, const struct indexer *i, const struct teacher *t, const void *q,
                        const void *key, const float *weight, const void *teacher_q, const void *teacher_key,
                        const float *teacher_lse, const int32_t *start, const int32_t *end, const float *row_weight,
                        float *kl, void *dq, float *dkey, float *dweight, void *workspace);
void cpu_route_forward(struct stream *s, const struct route *r, const float *logits, const float *bias,
                       int32_t *chosen, float *weight);
void cpu_route_backward(struct stream *s, const struct route *r, const float *logits, const int32_t *chosen,
                        const float *dweight, float *dlogits);
void cpu_route_auxiliary(struct stream *s, const struct route_auxiliary *a, const float *logits,
                         const int32_t *sequence, float *dlogits, double *loss, double *running);
void cpu_limit_capacity(struct stream *s, const struct route *r, int64_t capacity, int32_t by_weight,
                        const int32_t *chosen, float *weight, double *dropped);
void cpu_clear_where_zero(struct stream *s, int64_t count, const float *mask, float *x);
void cpu_count_experts(struct stream *s, const struct route *r, const int32_t *chosen, const float *counted,
                       double *counts);
void cpu_balance_bias(struct stream *s, int32_t experts, float rate, const float *coefficient, const double *counts,
                      float *bias);
size_t cpu_dispatch_sort_bytes(struct stream *s, const struct dispatch *d);
void cpu_dispatch_sort(struct stream *s, const struct dispatch *d, const int32_t *chosen, int32_t *offsets,
                       int32_t *source, int32_t *place, void *workspace);
void cpu_dispatch_spread(struct stream *s, const struct dispatch *d, const int32_t *place, const void *x, void *y);
void cpu_dispatch_collect(struct stream *s, const struct dispatch *d, const int32_t *place, const void *x, void *y);
void cpu_swiglu_forward(struct stream *s, const struct swiglu *g, const void *gate_up, const float *weight,
                        const int32_t *source, void *act);
void cpu_swiglu_backward(struct stream *s, const struct swiglu *g, const void *gate_up, const float *weight,
                         const int32_t *source, const void *dact, void *dgate_up, float *dweight, void *act);
size_t cpu_head_loss_bytes(struct stream *s, const struct head *h);
void cpu_head_loss(struct stream *s, const struct head *h, const void *x, const void *w, const int32_t *label,
                   const float *weight, float *loss, float *hit, void *dx, void *dw, void *workspace);
size_t cpu_head_tv_bytes(struct stream *s, const struct head_tv *h);
void cpu_head_tv(struct stream *s, const struct head_tv *h, const struct head_trunk *trunk,
                 const struct head_drafts *drafts, const void *w, void *workspace);
void cpu_add(struct stream *s, int64_t count, glm52_dtype type, const void *x, void *y);
void cpu_convert(struct stream *s, int64_t count, glm52_dtype from, const void *x, glm52_dtype to, void *y);
void cpu_quantise(struct stream *s, const struct quantised *q, const float *global, const void *x, void *codes,
                  void *scales, void *codes_t, void *scales_t);
void cpu_dequantise(struct stream *s, const struct quantised *q, const float *global, const void *codes,
                    const void *scales, void *y);
size_t cpu_sum_bytes(struct stream *s, int64_t count);
void cpu_sum(struct stream *s, int64_t count, const float *x, const float *w, double *out, void *workspace);
void cpu_sum_squares(struct stream *s, int64_t count, glm52_dtype type, const void *x, double *out, void *workspace);
void cpu_clip(struct stream *s, const double *squares, float limit, float *norm, float *coefficient);
void cpu_guard(struct stream *s, const struct guard *g, const double *sums, const float *norm, double *mean_loss,
               float *coefficient);
void cpu_adamw(struct stream *s, const struct adamw *a, const float *rates, const float *coefficient,
               const void *gradient, void *m, void *v, float *master, void *parameter);
size_t cpu_muon_bytes(struct stream *s, const struct muon *m);
void cpu_muon(struct stream *s, const struct muon *m, const float *rates, const float *coefficient,
              const void *gradient, void *momentum, float *master, void *parameter, void *workspace);

#endif
