/* Sparse MLA attention: the operations, computed by cuda/sparse_mla. */
#include "attention/sparse.cuh"

#include "device/device.cuh"

namespace {

sparse_call call_of(const struct sparse_mla *a)
{
    return {a->rows, a->keys, a->heads, a->kv_rank, a->rope, a->k, a->scale, a->fast != 0, a->type == GLM52_DTYPE_BF16};
}

/* Workspaces of the table are 64-byte aligned, those of cuda/sparse_mla 256. */
constexpr size_t ALIGNMENT = 256;

void *aligned(void *workspace)
{
    return (void *)(((uintptr_t)workspace + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
}

size_t sparse_mla_forward_bytes(struct stream *, const struct sparse_mla *a)
{
    return sparse_forward_bytes(call_of(a)) + ALIGNMENT;
}

size_t sparse_mla_backward_bytes(struct stream *, const struct sparse_mla *a)
{
    return sparse_backward_bytes(call_of(a)) + ALIGNMENT;
}

void sparse_mla_forward(struct stream *s, const struct sparse_mla *a, const void *q, const void *kv,
                        const int32_t *selected, void *out, float *lse, void *workspace)
{
    cuda_device *d = device_of(s);

    count_sparse_mla_forward(s, a);
    const cudaError_t error = sparse_forward(d->stream, call_of(a), q, kv, selected, out, lse, aligned(workspace));
    if (error != cudaSuccess) record_error(d, error, "sparse_mla_forward");
}

void sparse_mla_backward(struct stream *s, const struct sparse_mla *a, const void *q, const void *kv,
                         const int32_t *selected, const void *out, const float *lse, const void *dout, void *dq,
                         float *dkv, float *target, void *workspace)
{
    cuda_device *d = device_of(s);

    count_sparse_mla_backward(s, a, target != nullptr);
    const cudaError_t error =
        sparse_backward(d->stream, call_of(a), q, kv, selected, out, lse, dout, dq, dkv, target, aligned(workspace));
    if (error != cudaSuccess) record_error(d, error, "sparse_mla_backward");
}

void sparse_mla_target(struct stream *s, const struct sparse_mla *a, const void *q, const void *kv,
                       const int32_t *selected, const float *lse, float *target, void *workspace)
{
    cuda_device *d = device_of(s);

    count_sparse_mla_target(s, a);
    const cudaError_t error = sparse_target(d->stream, call_of(a), q, kv, selected, lse, target, aligned(workspace));
    if (error != cudaSuccess) record_error(d, error, "sparse_mla_target");
}

} /* namespace */

void fill_sparse_mla(struct ops *t)
{
    t->sparse_mla_forward = sparse_mla_forward;
    t->sparse_mla_forward_bytes = sparse_mla_forward_bytes;
    t->sparse_mla_backward = sparse_mla_backward;
    t->sparse_mla_backward_bytes = sparse_mla_backward_bytes;
    t->sparse_mla_target = sparse_mla_target;
    t->sparse_mla_target_bytes = sparse_mla_forward_bytes;
}
