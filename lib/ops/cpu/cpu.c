/* The cpu device: memory of the host, and the table of its operations. */
#include "ops/cpu/cpu.h"

#include <omp.h>
#include <string.h>

#include "ops/count.h"

enum { MOVE = 1 << 20 }; /* bytes that one thread copies or zeroes at a time */

int cpu_threads(int wanted)
{
    return wanted > 0 ? wanted : omp_get_max_threads();
}

static glm52_status cpu_allocate(struct stream *s, size_t bytes, enum memory_class class, void **out)
{
    s->allocations++;
    *out = host_alloc(s->host, bytes, class);
    return *out ? GLM52_OK : GLM52_E_NOMEM;
}

static void cpu_release(struct stream *s, void *memory, size_t bytes, enum memory_class class)
{
    host_free(s->host, memory, bytes, class);
}

static size_t cpu_taken_bytes(struct stream *s, size_t bytes)
{
    (void)s;
    return bytes;
}

static void move(struct stream *s, void *to, const void *from, size_t bytes)
{
#pragma omp parallel for schedule(static) num_threads(bytes <= MOVE ? 1 : s->threads)
    for (size_t at = 0; at < bytes; at += MOVE)
        memcpy((char *)to + at, (const char *)from + at, bytes - at < MOVE ? bytes - at : MOVE);
}

static void cpu_upload(struct stream *s, void *to_device, const void *from_host, size_t bytes)
{
    move(s, to_device, from_host, bytes);
}

static void cpu_download(struct stream *s, void *to_host, const void *from_device, size_t bytes)
{
    move(s, to_host, from_device, bytes);
}

static void cpu_copy(struct stream *s, void *to, const void *from, size_t bytes)
{
    struct counted call = count_copy(s, bytes);

    move(s, to, from, bytes);
    count_end(call);
}

static void cpu_zero(struct stream *s, void *memory, size_t bytes)
{
    struct counted call = count_zero(s, bytes);

#pragma omp parallel for schedule(static) num_threads(bytes <= MOVE ? 1 : s->threads)
    for (size_t at = 0; at < bytes; at += MOVE)
        memset((char *)memory + at, 0, bytes - at < MOVE ? bytes - at : MOVE);
    count_end(call);
}

static glm52_status cpu_synchronize(struct stream *s)
{
    (void)s;
    return GLM52_OK;
}

static void cpu_mark(struct stream *s, int moment)
{
    s->moment[moment] = omp_get_wtime();
}

static double cpu_elapsed(struct stream *s, int from, int to)
{
    return s->moment[to] - s->moment[from];
}

static void cpu_close(struct stream *s)
{
    (void)s;
}

static const struct ops cpu_ops = {
    .name = "cpu",
    .allocate = cpu_allocate,
    .release = cpu_release,
    .taken_bytes = cpu_taken_bytes,
    .upload = cpu_upload,
    .download = cpu_download,
    .zero = cpu_zero,
    .copy = cpu_copy,
    .synchronize = cpu_synchronize,
    .mark = cpu_mark,
    .elapsed = cpu_elapsed,
    .close = cpu_close,
    .gemm = cpu_gemm,
    .grouped_gemm_forward = cpu_grouped_gemm_forward,
    .grouped_gemm_backward_rows = cpu_grouped_gemm_backward_rows,
    .grouped_gemm_backward_weight = cpu_grouped_gemm_backward_weight,
    .rmsnorm_forward = cpu_rmsnorm_forward,
    .norm_backward_bytes = cpu_norm_backward_bytes,
    .rmsnorm_backward = cpu_rmsnorm_backward,
    .layernorm_forward = cpu_layernorm_forward,
    .layernorm_backward = cpu_layernorm_backward,
    .rope_table = cpu_rope_table,
    .rope = cpu_rope,
    .latent_forward = cpu_latent_forward,
    .latent_backward_bytes = cpu_latent_backward_bytes,
    .latent_backward = cpu_latent_backward,
    .spread_heads = cpu_spread_heads,
    .sum_heads = cpu_sum_heads,
    .multiply = cpu_multiply,
    .embed_forward = cpu_embed_forward,
    .embed_backward = cpu_embed_backward,
    .index_select_bytes = cpu_index_select_bytes,
    .index_select = cpu_index_select,
    .index_scores = cpu_index_scores,
    .select_topk = cpu_select_topk,
    .sparse_mla_forward = cpu_sparse_mla_forward,
    .sparse_mla_forward_bytes = cpu_sparse_mla_forward_bytes,
    .sparse_mla_backward = cpu_sparse_mla_backward,
    .sparse_mla_backward_bytes = cpu_sparse_mla_backward_bytes,
    .sparse_mla_target = cpu_sparse_mla_target,
    .sparse_mla_target_bytes = cpu_sparse_mla_target_bytes,
    .dense_attention_forward_bytes = cpu_dense_attention_forward_bytes,
    .dense_attention_forward = cpu_dense_attention_forward,
    .dense_attention_backward_bytes = cpu_dense_attention_backward_bytes,
    .dense_attention_backward = cpu_dense_attention_backward,
    .index_kl_selected_bytes = cpu_index_kl_selected_bytes,
    .index_kl_selected = cpu_index_kl_selected,
    .index_kl_dense_bytes = cpu_index_kl_dense_bytes,
    .index_kl_dense = cpu_index_kl_dense,
    .route_forward = cpu_route_forward,
    .route_backward = cpu_route_backward,
    .route_auxiliary = cpu_route_auxiliary,
    .limit_capacity = cpu_limit_capacity,
    .clear_where_zero = cpu_clear_where_zero,
    .count_experts = cpu_count_experts,
    .balance_bias = cpu_balance_bias,
    .dispatch_sort_bytes = cpu_dispatch_sort_bytes,
    .dispatch_sort = cpu_dispatch_sort,
    .dispatch_spread = cpu_dispatch_spread,
    .dispatch_collect = cpu_dispatch_collect,
    .swiglu_forward = cpu_swiglu_forward,
    .swiglu_backward = cpu_swiglu_backward,
    .head_loss_bytes = cpu_head_loss_bytes,
    .head_loss = cpu_head_loss,
    .head_tv_bytes = cpu_head_tv_bytes,
    .head_tv = cpu_head_tv,
    .add = cpu_add,
    .convert = cpu_convert,
    .quantise = cpu_quantise,
    .dequantise = cpu_dequantise,
    .sum_bytes = cpu_sum_bytes,
    .sum = cpu_sum,
    .sum_squares = cpu_sum_squares,
    .clip = cpu_clip,
    .guard = cpu_guard,
    .adamw = cpu_adamw,
    .muon_bytes = cpu_muon_bytes,
    .muon = cpu_muon,
};

glm52_status stream_open_cpu(struct stream *s, struct host *host, int threads)
{
    *s = (struct stream){.ops = &cpu_ops, .host = host, .threads = cpu_threads(threads), .label = ""};
    return GLM52_OK;
}
