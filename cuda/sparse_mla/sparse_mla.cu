/* The launchers of sparse_mla.h: check the shape, count each row's keys, pick the kernels. */
#include "shape.cuh"

namespace {

size_t aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }

size_t counts_bytes(const struct sparse_mla *shape)
{
    return aligned((size_t)shape->rows * sizeof(int32_t));
}

bool valid(const struct sparse_mla *shape)
{
    return shape->rows >= 0 && shape->keys >= 0 && shape->heads >= 1 && shape->kv_rank >= 1 &&
           shape->rope >= 0 && shape->k >= 1 && shape->scale > 0 &&
           (shape->dtype == SPARSE_MLA_BF16 || shape->dtype == SPARSE_MLA_F32);
}

/* A warp a row. The valid entries are a prefix; each round probes 32 places of what is open. */
__global__ __launch_bounds__(256) void count_kernel(const int32_t *selected, int32_t *counts,
                                                    int64_t rows, int32_t k)
{
    const int64_t row = (int64_t)blockIdx.x * 8 + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    int low = 0, high = k; /* entries before low are valid, the one at high is not */

    if (row >= rows)
        return;
    while (low < high) {
        const int step = (high - low + 31) / 32, at = low + (lane + 1) * step - 1;
        const bool here = at < high && selected[row * k + at] >= 0;
        const int passed = __popc(__ballot_sync(~0u, here));

        low += passed * step;
        high = min(high, low + step - 1);
    }
    if (lane == 0)
        counts[row] = low;
}

/* What every operation begins with: the shape checked, the keys of each row counted. */
struct begun {
    cudaError_t status;
    int32_t *counts; /* NULL: the shape is out of range or has no rows */
    void *rest;      /* of the workspace, for the kernels */
};

begun begin(cudaStream_t stream, const struct sparse_mla *shape, const int32_t *selected,
            void *workspace)
{
    if (!valid(shape))
        return {cudaErrorInvalidValue, nullptr, nullptr};
    if (shape->rows == 0)
        return {cudaSuccess, nullptr, nullptr};
    count_kernel<<<(unsigned)((shape->rows + 7) / 8), 256, 0, stream>>>(
        selected, (int32_t *)workspace, shape->rows, shape->k);
    return {cudaSuccess, (int32_t *)workspace, (char *)workspace + counts_bytes(shape)};
}

} /* namespace */

int multiprocessors()
{
    int device = 0, number = 1;

    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&number, cudaDevAttrMultiProcessorCount, device);
    return number;
}

bool hopper_shape(const struct sparse_mla *shape)
{
    int device = 0, major = 0;

    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    return major == 9 && shape->dtype == SPARSE_MLA_BF16 && shape->heads <= HEADS &&
           shape->kv_rank == RANK && shape->rope == ROPE;
}

extern "C" {

size_t sparse_mla_cuda_forward_bytes(const struct sparse_mla *shape)
{
    return counts_bytes(shape) + aligned(hopper_forward_bytes(shape));
}

size_t sparse_mla_cuda_backward_bytes(const struct sparse_mla *shape)
{
    const size_t fast = hopper_backward_bytes(shape), plain = generic_backward_bytes(shape);

    return counts_bytes(shape) + aligned(fast > plain ? fast : plain);
}

cudaError_t sparse_mla_cuda_forward(cudaStream_t stream, const struct sparse_mla *shape,
                                    const void *q, const void *kv, const int32_t *selected,
                                    void *out, float *lse, void *workspace)
{
    const begun b = begin(stream, shape, selected, workspace);

    if (!b.counts)
        return b.status;
    return (hopper_shape(shape) ? hopper_forward : generic_forward)(stream, shape, q, kv, selected,
                                                                    b.counts, out, lse, b.rest);
}

cudaError_t sparse_mla_cuda_target(cudaStream_t stream, const struct sparse_mla *shape,
                                   const void *q, const void *kv, const int32_t *selected,
                                   const float *lse, float *target, void *workspace)
{
    const begun b = begin(stream, shape, selected, workspace);

    if (!b.counts)
        return b.status;
    return (hopper_shape(shape) ? hopper_target : generic_target)(
        stream, shape, q, kv, selected, b.counts, lse, target, b.rest);
}

cudaError_t sparse_mla_cuda_backward(cudaStream_t stream, const struct sparse_mla *shape,
                                     const void *q, const void *kv, const int32_t *selected,
                                     const void *out, const float *lse, const void *dout, void *dq,
                                     float *dkv, float *target, void *workspace)
{
    const begun b = begin(stream, shape, selected, workspace);

    if (b.status != cudaSuccess)
        return b.status;
    if (!b.counts)
        return cudaMemsetAsync(
            dkv, 0, (size_t)shape->keys * (shape->kv_rank + shape->rope) * sizeof(float), stream);
    return (hopper_shape(shape) && hopper_sums_fit(shape) ? hopper_backward : generic_backward)(
        stream, shape, q, kv, selected, b.counts, out, lse, dout, dq, dkv, target, b.rest);
}

} /* extern "C" */
