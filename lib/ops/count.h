/* How many FLOPs and bytes each operation is, stated once for every device. A call to count_x() records one call of
 * operation x in the stream's tally, if it has one; a device that computes adds the time with count_end().
 * FLOPs: 2 per fused multiply-add of matrix work. Bytes: each operand once, twice if it is added to. */
#ifndef GLM52_OPS_COUNT_H
#define GLM52_OPS_COUNT_H

#include "ops/ops.h"

struct counted {
    struct tally_row *row; /* NULL: nobody counts */
    double began;
};

void count_end(struct counted call);

struct counted count_copy(struct stream *s, size_t bytes);
struct counted count_zero(struct stream *s, size_t bytes);

struct counted count_gemm(struct stream *s, const struct gemm *g);
struct counted count_grouped_gemm_forward(struct stream *s, const struct grouped_gemm *g);
struct counted count_grouped_gemm_backward_rows(struct stream *s, const struct grouped_gemm *g);
struct counted count_grouped_gemm_backward_weight(struct stream *s, const struct grouped_gemm *g);

struct counted count_rmsnorm_forward(struct stream *s, const struct norm *n);
struct counted count_rmsnorm_backward(struct stream *s, const struct norm *n);
struct counted count_layernorm_forward(struct stream *s, const struct norm *n);
struct counted count_layernorm_backward(struct stream *s, const struct norm *n);

struct counted count_rope_table(struct stream *s, int64_t rows, int32_t half);
struct counted count_rope(struct stream *s, const struct rope *r);
struct counted count_latent_forward(struct stream *s, const struct latent *l);
struct counted count_latent_backward(struct stream *s, const struct latent *l);
struct counted count_spread_heads(struct stream *s, const struct spread *r);
struct counted count_sum_heads(struct stream *s, const struct spread *r);
struct counted count_multiply(struct stream *s, int64_t elements);
struct counted count_embed_forward(struct stream *s, const struct embed *e);
struct counted count_embed_backward(struct stream *s, const struct embed *e);

struct counted count_index_select(struct stream *s, const struct indexer *i);
struct counted count_index_scores(struct stream *s, const struct indexer *i);
struct counted count_select_topk(struct stream *s, int64_t rows, int64_t keys, int32_t k);
struct counted count_sparse_mla_forward(struct stream *s, const struct sparse_mla *a);
struct counted count_sparse_mla_backward(struct stream *s, const struct sparse_mla *a, int with_target);
struct counted count_sparse_mla_target(struct stream *s, const struct sparse_mla *a);
struct counted count_dense_attention_forward(struct stream *s, const struct dense_attention *a);
struct counted count_dense_attention_backward(struct stream *s, const struct dense_attention *a);
struct counted count_index_kl_selected(struct stream *s, const struct indexer *i);
struct counted count_index_kl_dense(struct stream *s, const struct indexer *i, const struct teacher *t,
                                    int with_lse);

struct counted count_route_forward(struct stream *s, const struct route *r);
struct counted count_route_backward(struct stream *s, const struct route *r);
struct counted count_limit_capacity(struct stream *s, const struct route *r);
struct counted count_clear_where_zero(struct stream *s, int64_t elements);
struct counted count_route_auxiliary(struct stream *s, const struct route_auxiliary *a);
struct counted count_count_experts(struct stream *s, const struct route *r, int masked);
struct counted count_balance_bias(struct stream *s, int32_t experts);
struct counted count_dispatch_sort(struct stream *s, const struct dispatch *d);
struct counted count_dispatch_spread(struct stream *s, const struct dispatch *d);
struct counted count_dispatch_collect(struct stream *s, const struct dispatch *d);
struct counted count_swiglu_forward(struct stream *s, const struct swiglu *g, int weighted);
struct counted count_swiglu_backward(struct stream *s, const struct swiglu *g, int weighted, int with_act);

struct counted count_head_loss(struct stream *s, const struct head *h, int hits, int gradients);
struct counted count_head_tv(struct stream *s, const struct head_tv *h, int of_trunk, int of_drafts);

struct counted count_add(struct stream *s, int64_t count, glm52_dtype type);
struct counted count_convert(struct stream *s, int64_t count, glm52_dtype from, glm52_dtype to);
struct counted count_quantise(struct stream *s, const struct quantised *q, int transposed_too);
struct counted count_dequantise(struct stream *s, const struct quantised *q);
struct counted count_sum(struct stream *s, int64_t count, int weighted);
struct counted count_sum_squares(struct stream *s, int64_t count, glm52_dtype type);
struct counted count_clip(struct stream *s);
struct counted count_guard(struct stream *s, const struct guard *g);
struct counted count_adamw(struct stream *s, const struct adamw *a, int with_master);
struct counted count_muon(struct stream *s, const struct muon *m, int with_master);

#endif
