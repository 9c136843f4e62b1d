/* Sparse MLA attention on CUDA (model.md 2.2, absorbed form): launchers with C linkage.
 *
 * Everything runs on the stream given; nothing is allocated and nothing waits for the device, so
 * calls can be captured in a graph. Heads 1..64 with kv_rank 512, rope 64 and bf16 take the Hopper
 * kernels; every other shape, and fp32, takes the generic ones (exact fp32 sums, simple, slow). */
#pragma once
#include <cuda_runtime_api.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum sparse_mla_dtype { SPARSE_MLA_BF16, SPARSE_MLA_F32 };

struct sparse_mla {
    int64_t rows, keys;              /* query rows, key rows */
    int32_t heads, kv_rank, rope, k; /* local heads; GLM-5.2: 64 in all, 512, 64, 2048 */
    float scale;                     /* multiplies logits; > 0 */
    int32_t deterministic;           /* 1: bitwise repeatable backward (the forward always is) */
    int32_t dtype;                   /* of q, kv, out, dout, dq: enum sparse_mla_dtype */
};

/* Bytes of workspace, 256-byte aligned, free again when the call's work on the stream is done. */
size_t sparse_mla_cuda_forward_bytes(const struct sparse_mla *shape);
size_t sparse_mla_cuda_backward_bytes(const struct sparse_mla *shape);

/*   q        [rows, heads, kv_rank + rope]  absorbed queries, rope part rotated
 *   kv       [keys, kv_rank + rope]         shared latent; values are its first kv_rank columns
 *   selected [rows, k] int32                distinct, ascending; the first negative ends the row
 *   out      [rows, heads, kv_rank]         zeros where a row has no key
 *   lse      [rows, heads] fp32             natural log; +inf where a row has no key
 * A row costs its valid keys only: padding is neither gathered nor multiplied beyond its tile. All
 * pointers are 16-byte aligned. Returns cudaErrorInvalidValue for a shape out of range. */
cudaError_t sparse_mla_cuda_forward(cudaStream_t stream, const struct sparse_mla *shape,
                                    const void *q, const void *kv, const int32_t *selected,
                                    void *out, float *lse, void *workspace);

/*   out, lse from the forward; dout like out
 *   dq     like q
 *   dkv    [keys, kv_rank + rope] fp32  overwritten (keys that no row selects get zeros)
 *   target [rows, k] fp32 or NULL       mean over heads of each selected key's probability, the
 *                                       teacher of the indexer's KL; 0 where selected is padding */
cudaError_t sparse_mla_cuda_backward(cudaStream_t stream, const struct sparse_mla *shape,
                                     const void *q, const void *kv, const int32_t *selected,
                                     const void *out, const float *lse, const void *dout, void *dq,
                                     float *dkv, float *target, void *workspace);

/* The target alone, as the backward makes it but for rounding; workspace as for the forward. */
cudaError_t sparse_mla_cuda_target(cudaStream_t stream, const struct sparse_mla *shape,
                                   const void *q, const void *kv, const int32_t *selected,
                                   const float *lse, float *target, void *workspace);

#ifdef __cplusplus
}
#endif
