/* Products by cuBLASLt, for the operation gemm and for operations made of products. */
#pragma once

#include "device/device.cuh"

glm52_status matmul_open(cuda_device *d);
void matmul_close(cuda_device *d);

/* c = alpha a b + beta * from, with the shape and strides of g, whose `scale` and `add` do not count here; from has
 * the type, stride and gaps of c, and may be c. beta = 0: from is not read. */
void matmul(cuda_device *d, const struct gemm *g, const void *a, const void *b, float alpha, float beta,
            const void *from, void *c);

/* The operation: alpha is g->scale, beta is g->add, from is g->from or c. */
static inline void matmul(cuda_device *d, const struct gemm *g, const void *a, const void *b, void *c)
{
    matmul(d, g, a, b, g->scale == 0 ? 1.0f : g->scale, g->add ? 1.0f : 0.0f, g->from ? g->from : c, c);
}

/* The scratch is cuBLASLt's in its first half and that of products of two types in its second. */
constexpr size_t PRODUCT_BYTES = SCRATCH_BYTES / 2, MIXED_BYTES = SCRATCH_BYTES - PRODUCT_BYTES;

/* fp32 times bf16 on tensor cores, where that serves. */
bool mixed_serves(const struct gemm *g);
void matmul_mixed(cuda_device *d, const struct gemm *g, const void *a, const void *b, float alpha, float beta,
                  const void *from, void *c);

/* The same as the first by own kernels, which take any shape and mixed types. */
void matmul_plain(cuda_device *d, const struct gemm *g, const void *a, const void *b, float alpha, float beta,
                  const void *from, void *c);
