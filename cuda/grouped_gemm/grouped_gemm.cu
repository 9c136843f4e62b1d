/* The launchers of grouped_gemm.h: check the shape, run the kernels. */
#include <climits>

#include "shape.cuh"

namespace {

bool type_ok(int32_t type)
{
    return type == GROUPED_GEMM_BF16 || type == GROUPED_GEMM_F32;
}

bool valid(const struct grouped_gemm_shape *g)
{
    return g->rows >= 0 && g->rows < INT_MAX - 2 * COMMON && g->n >= 1 && g->n < INT_MAX - PAIR &&
           g->k >= 1 && g->k < INT_MAX - PAIR && g->stride >= g->n * g->k && g->groups >= 1 &&
           g->groups <= 65535 && type_ok(g->type) && type_ok(g->weight_type);
}

bool aligned16(const void *p)
{
    return (uintptr_t)p % 16 == 0;
}

cudaError_t multiply_rows(cudaStream_t stream, const struct grouped_gemm_shape *g, bool backward,
                          const int32_t *offsets, const void *in, const void *w, void *out,
                          void *workspace)
{
    if (!grouped_gemm_cuda_takes(g, in, w, out))
        return cudaErrorInvalidValue;
    if (g->rows == 0)
        return cudaSuccess;
    return hopper_rows(stream, g, backward, offsets, in, w, out, workspace);
}

/* zeros into every matrix, not between them */
cudaError_t clear_weight(cudaStream_t stream, const struct grouped_gemm_shape *g, void *dw)
{
    const size_t bytes = g->weight_type == GROUPED_GEMM_BF16 ? 2 : 4;

    return cudaMemset2DAsync(dw, g->stride * bytes, 0, g->n * g->k * bytes, g->groups, stream);
}

} /* namespace */

int pairs_of_blocks()
{
    int device = 0, number = 2;

    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&number, cudaDevAttrMultiProcessorCount, device);
    return number / 2;
}

extern "C" {

int grouped_gemm_cuda_takes(const struct grouped_gemm_shape *g, const void *a, const void *b,
                            const void *c)
{
    int device = 0, major = 0;

    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    return major == 9 && valid(g) && g->type == GROUPED_GEMM_BF16 && g->n % 8 == 0 &&
           g->k % 8 == 0 && g->stride % 8 == 0 && aligned16(a) && aligned16(b) && aligned16(c);
}

size_t grouped_gemm_cuda_bytes(const struct grouped_gemm_shape *g)
{
    return (size_t)((char *)(maps_of(g, nullptr) + g->groups) - (char *)nullptr);
}

cudaError_t grouped_gemm_cuda_forward(cudaStream_t stream, const struct grouped_gemm_shape *g,
                                      const int32_t *offsets, const void *x, const void *w, void *y,
                                      void *workspace)
{
    return multiply_rows(stream, g, false, offsets, x, w, y, workspace);
}

cudaError_t grouped_gemm_cuda_backward_rows(cudaStream_t stream, const struct grouped_gemm_shape *g,
                                            const int32_t *offsets, const void *dy, const void *w,
                                            void *dx, void *workspace)
{
    return multiply_rows(stream, g, true, offsets, dy, w, dx, workspace);
}

cudaError_t grouped_gemm_cuda_backward_weight(cudaStream_t stream,
                                              const struct grouped_gemm_shape *g,
                                              const int32_t *offsets, const void *dy, const void *x,
                                              void *dw, void *workspace)
{
    if (!grouped_gemm_cuda_takes(g, dy, x, dw))
        return cudaErrorInvalidValue;
    if (g->rows == 0)
        return g->add ? cudaSuccess : clear_weight(stream, g, dw);
    return hopper_weight(stream, g, offsets, dy, x, dw, workspace);
}

} /* extern "C" */
