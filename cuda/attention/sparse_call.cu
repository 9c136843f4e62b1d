/* The side of cuda/sparse_mla. */
#include "attention/sparse.cuh"

#include "sparse_mla/sparse_mla.h"

static struct sparse_mla shape_of(const sparse_call &c)
{
    struct sparse_mla a = {};

    a.rows = c.rows;
    a.keys = c.keys;
    a.heads = c.heads;
    a.kv_rank = c.kv_rank;
    a.rope = c.rope;
    a.k = c.k;
    a.scale = c.scale;
    a.deterministic = !c.fast;
    a.dtype = c.is_bf16 ? SPARSE_MLA_BF16 : SPARSE_MLA_F32;
    return a;
}

size_t sparse_forward_bytes(const sparse_call &c)
{
    const struct sparse_mla a = shape_of(c);

    return sparse_mla_cuda_forward_bytes(&a);
}

size_t sparse_backward_bytes(const sparse_call &c)
{
    const struct sparse_mla a = shape_of(c);

    return sparse_mla_cuda_backward_bytes(&a);
}

cudaError_t sparse_forward(cudaStream_t stream, const sparse_call &c, const void *q, const void *kv,
                           const int32_t *selected, void *out, float *lse, void *workspace)
{
    const struct sparse_mla a = shape_of(c);

    return sparse_mla_cuda_forward(stream, &a, q, kv, selected, out, lse, workspace);
}

cudaError_t sparse_backward(cudaStream_t stream, const sparse_call &c, const void *q, const void *kv,
                            const int32_t *selected, const void *out, const float *lse, const void *dout, void *dq,
                            float *dkv, float *target, void *workspace)
{
    const struct sparse_mla a = shape_of(c);

    return sparse_mla_cuda_backward(stream, &a, q, kv, selected, out, lse, dout, dq, dkv, target, workspace);
}

cudaError_t sparse_target(cudaStream_t stream, const sparse_call &c, const void *q, const void *kv,
                          const int32_t *selected, const float *lse, float *target, void *workspace)
{
    const struct sparse_mla a = shape_of(c);

    return sparse_mla_cuda_target(stream, &a, q, kv, selected, lse, target, workspace);
}
