/* The meta device computes nothing and counts everything: memory through the host's accounting, FLOPs and bytes in the
 * stream's tally. Its pointers are distinct and are never dereferenced. */
#include <string.h>

#include "ops/count.h"
#include "ops/cpu/cpu.h"

/* Nearly every argument of these functions is there to be ignored. */
#pragma GCC diagnostic ignored "-Wunused-parameter"

enum { ALIGNMENT = 64, FIRST_ADDRESS = 4096 };

/* ---- device ---- */

static size_t meta_taken_bytes(struct stream *s, size_t bytes)
{
    return s->stands_for ? s->stands_for->ops->taken_bytes(s->stands_for, bytes) : bytes;
}

/* The stream's state is the next address to give out. */
static glm52_status meta_allocate(struct stream *s, size_t bytes, enum memory_class class, void **out)
{
    uintptr_t address = (uintptr_t)s->state;

    s->allocations++;
    if (bytes > PTRDIFF_MAX - ALIGNMENT - address) return fail_nomem(bytes, memory_class_name[class]);
    *out = s->state;
    s->state = (void *)(address + (bytes + ALIGNMENT) / ALIGNMENT * ALIGNMENT);
    host_account(s->host, class, (int64_t)meta_taken_bytes(s, bytes));
    return GLM52_OK;
}

static void meta_release(struct stream *s, void *memory, size_t bytes, enum memory_class class)
{
    if (memory) host_account(s->host, class, -(int64_t)meta_taken_bytes(s, bytes));
}

static void meta_upload(struct stream *s, void *to_device, const void *from_host, size_t bytes)
{
}

static void meta_download(struct stream *s, void *to_host, const void *from_device, size_t bytes)
{
    memset(to_host, 0, bytes);
}

static void meta_zero(struct stream *s, void *memory, size_t bytes)
{
    count_zero(s, bytes);
}

static void meta_copy(struct stream *s, void *to, const void *from, size_t bytes)
{
    count_copy(s, bytes);
}

static glm52_status meta_synchronize(struct stream *s)
{
    return GLM52_OK;
}

static void meta_mark(struct stream *s, int moment)
{
}

static double meta_elapsed(struct stream *s, int from, int to)
{
    return 0;
}

static void meta_close(struct stream *s)
{
}

/* ---- dense ---- */

static void meta_gemm(struct stream *s, const struct gemm *g, const void *a, const void *b, void *c)
{
    count_gemm(s, g);
}

static void meta_grouped_gemm_forward(struct stream *s, const struct grouped_gemm *g, const int32_t *offsets,
                                      const void *x, const void *w, void *y)
{
    count_grouped_gemm_forward(s, g);
}

static void meta_grouped_gemm_backward_rows(struct stream *s, const struct grouped_gemm *g, const int32_t *offsets,
                                            const void *dy, const void *w, void *dx)
{
    count_grouped_gemm_backward_rows(s, g);
}

static void meta_grouped_gemm_backward_weight(struct stream *s, const struct grouped_gemm *g, const int32_t *offsets,
                                              const void *dy, const void *x, void *dw)
{
    count_grouped_gemm_backward_weight(s, g);
}

/* ---- norms ---- */

static void meta_rmsnorm_forward(struct stream *s, const struct norm *n, const void *x, const void *gain, void *y,
                                 float *rstd)
{
    count_rmsnorm_forward(s, n);
}

static void meta_rmsnorm_backward(struct stream *s, const struct norm *n, const void *x, const void *gain,
                                  const float *rstd, const void *dy, void *dx, float *dgain, void *workspace)
{
    count_rmsnorm_backward(s, n);
}

static void meta_layernorm_forward(struct stream *s, const struct norm *n, const void *x, const void *gain,
                                   const void *bias, void *y, float *statistics)
{
    count_layernorm_forward(s, n);
}

static void meta_layernorm_backward(struct stream *s, const struct norm *n, const void *x, const void *gain,
                                    const float *statistics, const void *dy, void *dx, float *dgain, float *dbias,
                                    void *workspace)
{
    count_layernorm_backward(s, n);
}

/* ---- position and tokens ---- */

static void meta_rope_table(struct stream *s, int64_t rows, int32_t half, const int32_t *position,
                            const float *inverse_frequency, float *table)
{
    count_rope_table(s, rows, half);
}

static void meta_rope(struct stream *s, const struct rope *r, const float *table, const void *x, void *y)
{
    count_rope(s, r);
}

static void meta_latent_forward(struct stream *s, const struct latent *l, const float *table, const float *x,
                                const void *gain, void *y, float *rstd)
{
    count_latent_forward(s, l);
}

static void meta_latent_backward(struct stream *s, const struct latent *l, const float *table, const float *x,
                                 const void *gain, const float *rstd, const float *dy, void *dx, float *dgain,
                                 void *workspace)
{
    count_latent_backward(s, l);
}

static void meta_spread_heads(struct stream *s, const struct spread *r, const void *x, void *y)
{
    count_spread_heads(s, r);
}

static void meta_sum_heads(struct stream *s, const struct spread *r, const void *y, float *x)
{
    count_sum_heads(s, r);
}

static void meta_multiply(struct stream *s, int64_t count, const float *x, float *y)
{
    count_multiply(s, count);
}

static void meta_embed_forward(struct stream *s, const struct embed *e, const int32_t *token, const void *table,
                               void *y)
{
    count_embed_forward(s, e);
}

static void meta_embed_backward(struct stream *s, const struct embed *e, const int32_t *token, const void *dy,
                                void *dtable)
{
    count_embed_backward(s, e);
}

/* ---- selection and attention ---- */

static void meta_index_select(struct stream *s, const struct indexer *i, const void *q, const void *key,
                              const float *weight, const int32_t *start, const int32_t *end, int32_t *selected,
                              void *workspace)
{
    count_index_select(s, i);
}

static void meta_index_scores(struct stream *s, const struct indexer *i, const void *q, const void *key,
                              const float *weight, const int32_t *start, const int32_t *end, float *scores)
{
    count_index_scores(s, i);
}

static void meta_select_topk(struct stream *s, int64_t rows, int64_t keys, int32_t k, const float *scores,
                             const int32_t *start, const int32_t *end, int32_t *selected, int32_t *length)
{
    count_select_topk(s, rows, keys, k);
}

static void meta_sparse_mla_forward(struct stream *s, const struct sparse_mla *a, const void *q, const void *kv,
                                    const int32_t *selected, void *out, float *lse, void *workspace)
{
    count_sparse_mla_forward(s, a);
}

static void meta_sparse_mla_backward(struct stream *s, const struct sparse_mla *a, const void *q, const void *kv,
                                     const int32_t *selected, const void *out, const float *lse, const void *dout,
                                     void *dq, float *dkv, float *target, void *workspace)
{
    count_sparse_mla_backward(s, a, target != NULL);
}

static void meta_sparse_mla_target(struct stream *s, const struct sparse_mla *a, const void *q, const void *kv,
                                   const int32_t *selected, const float *lse, float *target, void *workspace)
{
    count_sparse_mla_target(s, a);
}

static void meta_dense_attention_forward(struct stream *s, const struct dense_attention *a, const void *q,
                                         const void *k, const void *v, const int32_t *start, const int32_t *end,
                                         void *out, float *lse, void *workspace)
{
    count_dense_attention_forward(s, a);
}

static void meta_dense_attention_backward(struct stream *s, const struct dense_attention *a, const void *q,
                                          const void *k, const void *v, const int32_t *start, const int32_t *end,
                                          const void *out, const float *lse, const void *dout, void *dq, void *dk,
                                          void *dv, void *workspace)
{
    count_dense_attention_backward(s, a);
}

/* ---- indexer loss ---- */

static void meta_index_kl_selected(struct stream *s, const struct indexer *i, const void *q, const void *key,
                                   const float *weight, const int32_t *selected, const float *target,
                                   const float *row_weight, float *kl, void *dq, float *dkey, float *dweight,
                                   void *workspace)
{
    count_index_kl_selected(s, i);
}

static void meta_index_kl_dense(struct stream *s, const struct indexer *i, const struct teacher *t, const void *q,
                                const void *key, const float *weight, const void *teacher_q, const void *teacher_key,
                                const float *teacher_lse, const int32_t *start, const int32_t *end,
                                const float *row_weight, float *kl, void *dq, float *dkey, float *dweight,
                                void *workspace)
{
    count_index_kl_dense(s, i, t, teacher_lse != NULL);
}

/* ---- experts ---- */

static void meta_route_forward(struct stream *s, const struct route *r, const float *logits, const float *bias,
                               int32_t *chosen, float *weight)
{
    count_route_forward(s, r);
}

static void meta_route_backward(struct stream *s, const struct route *r, const float *logits, const int32_t *chosen,
                                const float *dweight, float *dlogits)
{
    count_route_backward(s, r);
}

static void meta_route_auxiliary(struct stream *s, const struct route_auxiliary *a, const float *logits,
                                 const int32_t *sequence, float *dlogits, double *loss, double *running)
{
    count_route_auxiliary(s, a);
}

static void meta_limit_capacity(struct stream *s, const struct route *r, int64_t capacity, int32_t by_weight,
                                const int32_t *chosen, float *weight, double *dropped)
{
    count_limit_capacity(s, r);
}

static void meta_clear_where_zero(struct stream *s, int64_t count, const float *mask, float *x)
{
    count_clear_where_zero(s, count);
}

static void meta_count_experts(struct stream *s, const struct route *r, const int32_t *chosen, const float *counted,
                               double *counts)
{
    count_count_experts(s, r, counted != NULL);
}

static void meta_balance_bias(struct stream *s, int32_t experts, float rate, const float *coefficient,
                              const double *counts, float *bias)
{
    count_balance_bias(s, experts);
}

static void meta_dispatch_sort(struct stream *s, const struct dispatch *d, const int32_t *chosen, int32_t *offsets,
                               int32_t *source, int32_t *place, void *workspace)
{
    count_dispatch_sort(s, d);
}

static void meta_dispatch_spread(struct stream *s, const struct dispatch *d, const int32_t *place, const void *x,
                                 void *y)
{
    count_dispatch_spread(s, d);
}

static void meta_dispatch_collect(struct stream *s, const struct dispatch *d, const int32_t *place, const void *x,
                                  void *y)
{
    count_dispatch_collect(s, d);
}

static void meta_swiglu_forward(struct stream *s, const struct swiglu *g, const void *gate_up, const float *weight,
                                const int32_t *source, void *act)
{
    count_swiglu_forward(s, g, weight != NULL);
}

static void meta_swiglu_backward(struct stream *s, const struct swiglu *g, const void *gate_up, const float *weight,
                                 const int32_t *source, const void *dact, void *dgate_up, float *dweight, void *act)
{
    count_swiglu_backward(s, g, weight != NULL, act != NULL);
}

/* ---- loss, arithmetic, update ---- */

static void meta_head_loss(struct stream *s, const struct head *h, const void *x, const void *w, const int32_t *label,
                           const float *weight, float *loss, float *hit, void *dx, void *dw, void *workspace)
{
    count_head_loss(s, h, hit != NULL, (dx != NULL) + (dw != NULL));
}

static void meta_head_tv(struct stream *s, const struct head_tv *h, const struct head_trunk *trunk,
                         const struct head_drafts *drafts, const void *w, void *workspace)
{
    count_head_tv(s, h, (trunk->dx != NULL) + (trunk->dw != NULL), drafts->dx != NULL);
}

static void meta_add(struct stream *s, int64_t count, glm52_dtype type, const void *x, void *y)
{
    count_add(s, count, type);
}

static void meta_convert(struct stream *s, int64_t count, glm52_dtype from, const void *x, glm52_dtype to, void *y)
{
    count_convert(s, count, from, to);
}

static void meta_quantise(struct stream *s, const struct quantised *q, const float *global, const void *x, void *codes,
                          void *scales, void *codes_t, void *scales_t)
{
    count_quantise(s, q, codes_t != NULL);
}

static void meta_dequantise(struct stream *s, const struct quantised *q, const float *global, const void *codes,
                            const void *scales, void *y)
{
    count_dequantise(s, q);
}

static void meta_sum(struct stream *s, int64_t count, const float *x, const float *w, double *out, void *workspace)
{
    count_sum(s, count, w != NULL);
}

static void meta_sum_squares(struct stream *s, int64_t count, glm52_dtype type, const void *x, double *out,
                             void *workspace)
{
    count_sum_squares(s, count, type);
}

static void meta_clip(struct stream *s, const double *squares, float limit, float *norm, float *coefficient)
{
    count_clip(s);
}

static void meta_guard(struct stream *s, const struct guard *g, const double *sums, const float *norm,
                       double *mean_loss, float *coefficient)
{
    count_guard(s, g);
}

static void meta_adamw(struct stream *s, const struct adamw *a, const float *rates, const float *coefficient,
                       const void *gradient, void *m, void *v, float *master, void *parameter)
{
    count_adamw(s, a, master != NULL);
}

static void meta_muon(struct stream *s, const struct muon *m, const float *rates, const float *coefficient,
                      const void *gradient, void *momentum, float *master, void *parameter, void *workspace)
{
    count_muon(s, m, master != NULL);
}

/* Workspaces are those of the cpu, so that a plan equals the run it stands for. */
/* ---- workspaces: those of the device that it stands for ---- */

#define WORKSPACE(operation, shape)                                                                \
    static size_t meta_##operation(struct stream *s, const struct shape *x)                        \
    {                                                                                              \
        struct stream *other = s->stands_for;                                                      \
        return other ? other->ops->operation(other, x) : cpu_##operation(s, x);                    \
    }
WORKSPACE(norm_backward_bytes, norm)
WORKSPACE(latent_backward_bytes, latent)
WORKSPACE(index_select_bytes, indexer)
WORKSPACE(sparse_mla_forward_bytes, sparse_mla)
WORKSPACE(sparse_mla_backward_bytes, sparse_mla)
WORKSPACE(sparse_mla_target_bytes, sparse_mla)
WORKSPACE(dense_attention_forward_bytes, dense_attention)
WORKSPACE(dense_attention_backward_bytes, dense_attention)
WORKSPACE(index_kl_selected_bytes, indexer)
WORKSPACE(dispatch_sort_bytes, dispatch)
WORKSPACE(head_loss_bytes, head)
WORKSPACE(head_tv_bytes, head_tv)
WORKSPACE(muon_bytes, muon)

static size_t meta_index_kl_dense_bytes(struct stream *s, const struct indexer *i, const struct teacher *t)
{
    struct stream *other = s->stands_for;

    return other ? other->ops->index_kl_dense_bytes(other, i, t) : cpu_index_kl_dense_bytes(s, i, t);
}

static size_t meta_sum_bytes(struct stream *s, int64_t count)
{
    struct stream *other = s->stands_for;

    return other ? other->ops->sum_bytes(other, count) : cpu_sum_bytes(s, count);
}

static const struct ops meta_ops = {
    .name = "meta",
    .allocate = meta_allocate,
    .release = meta_release,
    .taken_bytes = meta_taken_bytes,
    .upload = meta_upload,
    .download = meta_download,
    .zero = meta_zero,
    .copy = meta_copy,
    .synchronize = meta_synchronize,
    .mark = meta_mark,
    .elapsed = meta_elapsed,
    .close = meta_close,
    .gemm = meta_gemm,
    .grouped_gemm_forward = meta_grouped_gemm_forward,
    .grouped_gemm_backward_rows = meta_grouped_gemm_backward_rows,
    .grouped_gemm_backward_weight = meta_grouped_gemm_backward_weight,
    .rmsnorm_forward = meta_rmsnorm_forward,
    .norm_backward_bytes = meta_norm_backward_bytes,
    .rmsnorm_backward = meta_rmsnorm_backward,
    .layernorm_forward = meta_layernorm_forward,
    .layernorm_backward = meta_layernorm_backward,
    .rope_table = meta_rope_table,
    .rope = meta_rope,
    .latent_forward = meta_latent_forward,
    .latent_backward_bytes = meta_latent_backward_bytes,
    .latent_backward = meta_latent_backward,
    .spread_heads = meta_spread_heads,
    .sum_heads = meta_sum_heads,
    .multiply = meta_multiply,
    .embed_forward = meta_embed_forward,
    .embed_backward = meta_embed_backward,
    .index_select_bytes = meta_index_select_bytes,
    .index_select = meta_index_select,
    .index_scores = meta_index_scores,
    .select_topk = meta_select_topk,
    .sparse_mla_forward = meta_sparse_mla_forward,
    .sparse_mla_forward_bytes = meta_sparse_mla_forward_bytes,
    .sparse_mla_backward = meta_sparse_mla_backward,
    .sparse_mla_backward_bytes = meta_sparse_mla_backward_bytes,
    .sparse_mla_target = meta_sparse_mla_target,
    .sparse_mla_target_bytes = meta_sparse_mla_target_bytes,
    .dense_attention_forward_bytes = meta_dense_attention_forward_bytes,
    .dense_attention_forward = meta_dense_attention_forward,
    .dense_attention_backward_bytes = meta_dense_attention_backward_bytes,
    .dense_attention_backward = meta_dense_attention_backward,
    .index_kl_selected_bytes = meta_index_kl_selected_bytes,
    .index_kl_selected = meta_index_kl_selected,
    .index_kl_dense_bytes = meta_index_kl_dense_bytes,
    .index_kl_dense = meta_index_kl_dense,
    .route_forward = meta_route_forward,
    .route_backward = meta_route_backward,
    .route_auxiliary = meta_route_auxiliary,
    .limit_capacity = meta_limit_capacity,
    .clear_where_zero = meta_clear_where_zero,
    .count_experts = meta_count_experts,
    .balance_bias = meta_balance_bias,
    .dispatch_sort_bytes = meta_dispatch_sort_bytes,
    .dispatch_sort = meta_dispatch_sort,
    .dispatch_spread = meta_dispatch_spread,
    .dispatch_collect = meta_dispatch_collect,
    .swiglu_forward = meta_swiglu_forward,
    .swiglu_backward = meta_swiglu_backward,
    .head_loss_bytes = meta_head_loss_bytes,
    .head_loss = meta_head_loss,
    .head_tv_bytes = meta_head_tv_bytes,
    .head_tv = meta_head_tv,
    .add = meta_add,
    .convert = meta_convert,
    .quantise = meta_quantise,
    .dequantise = meta_dequantise,
    .sum_bytes = meta_sum_bytes,
    .sum = meta_sum,
    .sum_squares = meta_sum_squares,
    .clip = meta_clip,
    .guard = meta_guard,
    .adamw = meta_adamw,
    .muon_bytes = meta_muon_bytes,
    .muon = meta_muon,
};

glm52_status stream_open_meta(struct stream *s, struct host *host)
{
    *s = (struct stream){
        .ops = &meta_ops,
        .host = host,
        .threads = cpu_threads(0),
        .label = "",
        .state = (void *)(uintptr_t)FIRST_ADDRESS,
    };
    return GLM52_OK;
}
