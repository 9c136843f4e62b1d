/* Grouped GEMM of the experts on CUDA: launchers with C linkage, the contract of lib/ops/ops.h.
 *
 * Everything runs on the stream given; nothing is allocated and nothing waits for the device, so
 * calls can be captured in a graph. Row counts are read on the device only. Results are bitwise
 * repeatable. */
#pragma once
#include <cuda_runtime_api.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum grouped_gemm_dtype { GROUPED_GEMM_BF16, GROUPED_GEMM_F32 };

/* One weight matrix [n,k] per group, `stride` elements apart. Rows offsets[g] .. offsets[g+1] - 1
 * of the row arrays belong to group g; offsets[0] = 0, ascending, offsets[groups] <= rows. Rows
 * behind the last group are neither written nor able to change a result, whatever they hold. */
struct grouped_gemm_shape {
    int64_t rows, n, k, stride; /* stride >= n * k */
    int32_t groups;
    int32_t add;         /* 0 overwrites the call's output, 1 adds to it (in fp32, rounded once) */
    int32_t type;        /* of x, w, y, dy, dx: enum grouped_gemm_dtype */
    int32_t weight_type; /* of dw: enum grouped_gemm_dtype */
};

/* Whether the calls take it: Hopper, bf16, n, k and stride multiples of 8, the call's three arrays
 * 16-byte aligned. They return cudaErrorInvalidValue for everything else. */
int grouped_gemm_cuda_takes(const struct grouped_gemm_shape *shape, const void *a, const void *b,
                            const void *c);

/* Bytes of workspace of any of the calls, 128-byte aligned, free again when the call's work on the
 * stream is done. */
size_t grouped_gemm_cuda_bytes(const struct grouped_gemm_shape *shape);

/* y[i,n] (+)= x[i,k] W_g^T. */
cudaError_t grouped_gemm_cuda_forward(cudaStream_t stream, const struct grouped_gemm_shape *shape,
                                      const int32_t *offsets, const void *x, const void *w, void *y,
                                      void *workspace);

/* dx[i,k] (+)= dy[i,n] W_g */
cudaError_t grouped_gemm_cuda_backward_rows(cudaStream_t stream,
                                            const struct grouped_gemm_shape *shape,
                                            const int32_t *offsets, const void *dy, const void *w,
                                            void *dx, void *workspace);

/* dW_g[n,k] (+)= sum over the rows i of g of dy[i,n] x[i,k]; matrices `stride` elements apart. A
 * group without rows gets zeros if add = 0 and is not touched if add = 1. */
cudaError_t grouped_gemm_cuda_backward_weight(cudaStream_t stream,
                                              const struct grouped_gemm_shape *shape,
                                              const int32_t *offsets, const void *dy, const void *x,
                                              void *dw, void *workspace);

#ifdef __cplusplus
}
#endif
