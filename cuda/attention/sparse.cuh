/* Between ops/ops.h and cuda/sparse_mla, which have a struct sparse_mla each: the call in plain numbers. */
#pragma once

#include <cuda_runtime.h>
#include <stddef.h>
#include <stdint.h>

struct sparse_call {
    int64_t rows, keys;
    int32_t heads, kv_rank, rope, k;
    float scale;
    bool fast, is_bf16;
};

size_t sparse_forward_bytes(const sparse_call &c);
size_t sparse_backward_bytes(const sparse_call &c);
cudaError_t sparse_forward(cudaStream_t stream, const sparse_call &c, const void *q, const void *kv,
                           const int32_t *selected, void *out, float *lse, void *workspace);
/* Workspace as for the forward. */
cudaError_t sparse_target(cudaStream_t stream, const sparse_call &c, const void *q, const void *kv,
                          const int32_t *selected, const float *lse, float *target, void *workspace);
cudaError_t sparse_backward(cudaStream_t stream, const sparse_call &c, const void *q, const void *kv,
                            const int32_t *selected, const void *out, const float *lse, const void *dout, void *dq,
                            float *dkv, float *target, void *workspace);
