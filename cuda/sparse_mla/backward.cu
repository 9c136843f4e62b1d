/* Sparse MLA backward for sm_90a: dq, dkv and, on request, the KL target.
 *
 *   P = 2^(S - lse)   dP = dO V^T   dS = scale P (dP - delta)   delta = rowsum(out dout)
 *   dQ = dS K         dKV[:, :512] += P^T dO    dKV += dS^T Q
 *
 * A persistent block per multiprocessor works through rows; warpgroups 0 and 1 make their products with keys as rows of
 * the accumulator (S^T, dP^T), so that P^T and dS^T need no transposition for dKV:
 *   0  gathers columns 0-287 of a tile's keys; S^T, P^T;  keeps dQ columns 0-287
 *   1  gathers columns 288-575;                dP^T, dS^T; keeps dQ columns 288-575
 *   2  dKV of the tile, 64 columns at a time, reduced into global memory from registers
 * The reductions into L2 are what bounds the kernel (machine.md 1): warpgroup 2 never waits for a gather, because 0 and
 * 1 have the next tile's P and dS ready while it still reduces this one's. */
#include "backward_fixed.cuh"
#include "backward_keys.cuh"
#include "backward_queries.cuh"

namespace {

constexpr int THREADS = 3 * WARPGROUP;

template <bool FIXED>
__global__ __launch_bounds__(THREADS, 1) void backward_kernel(const backward_arguments a)
{
    extern __shared__ __align__(1024) uint8_t memory[];
    shared_backward &s = *(shared_backward *)memory;
    const int role = __shfl_sync(~0u, threadIdx.x / WARPGROUP, 0);

    if (threadIdx.x == 0) {
        for (int b = 0; b < BLOCKS; b++)
            barrier_init(shared_address(&s.kv_full[b]), b == 4 ? 2 * WARPGROUP : WARPGROUP);
        barrier_init(shared_address(&s.q_full), WARPGROUP);
        barrier_init(shared_address(&s.dout_full), WARPGROUP);
        barrier_init(shared_address(&s.p_full), 4);
        barrier_init(shared_address(&s.ds_full), 4);
        barrier_init(shared_address(&s.used), 4);
        barrier_init(shared_address(&s.p_used), 4);
    }
    __syncthreads();
    if (role == 2) {
        registers_fewer<88>();
        if (FIXED)
            key_gradients_fixed(a, s);
        else
            key_gradients(a, s);
    } else if (role == 0) {
        registers_more<208>();
        queries<0>(a, s);
    } else {
        registers_more<208>();
        queries<1>(a, s);
    }
}

/* Workspace: the head, delta, then the middle and coarse sums. */
struct workspace_head {
    fixed_units units;
    uint32_t scratch[3], started;
};

size_t delta_bytes(const struct sparse_mla *shape)
{
    return ((size_t)shape->rows * shape->heads * sizeof(float) + 255) / 256 * 256;
}

size_t sums_bytes(const struct sparse_mla *shape)
{
    return (size_t)shape->keys * WIDTH * sizeof(float);
}

constexpr size_t HEAD_BYTES = 256;
static_assert(sizeof(workspace_head) <= HEAD_BYTES, "the head fits its place");

} /* namespace */

bool hopper_sums_fit(const struct sparse_mla *shape)
{
    return !shape->deterministic || sums_bytes(shape) < NO_KEY;
}

size_t hopper_backward_bytes(const struct sparse_mla *shape)
{
    return HEAD_BYTES + delta_bytes(shape) + (shape->deterministic ? 2 * sums_bytes(shape) : 0);
}

cudaError_t hopper_backward(cudaStream_t stream, const struct sparse_mla *shape, const void *q,
                            const void *kv, const int32_t *selected, const int32_t *counts,
                            const void *out, const float *lse, const void *dout, void *dq,
                            float *dkv, float *target, void *workspace)
{
    const bool fixed = shape->deterministic;
    workspace_head *head = (workspace_head *)workspace;
    float *delta = (float *)((char *)workspace + HEAD_BYTES);
    char *coarser = (char *)delta + delta_bytes(shape);
    const size_t bytes = sums_bytes(shape);
    /* keys and their sums together: beyond this size the order of access decides */
    const bool together = bytes + (size_t)shape->keys * WIDTH * 2 > CACHED_BYTES;
    const backward_arguments a = {(const __nv_bfloat16 *)q,
                                  (const __nv_bfloat16 *)kv,
                                  (const __nv_bfloat16 *)dout,
                                  selected,
                                  counts,
                                  lse,
                                  delta,
                                  (__nv_bfloat16 *)dq,
                                  dkv,
                                  target,
                                  shape->rows,
                                  shape->heads,
                                  shape->k,
                                  shape->scale,
                                  together ? &head->started : nullptr,
                                  &head->units,
                                  coarser - (char *)dkv,
                                  coarser - (char *)dkv + (int64_t)bytes};
    cudaError_t status = cudaMemsetAsync(dkv, 0, bytes, stream);

    if (status == cudaSuccess)
        status = reset_started(stream, a.started);
    if (status == cudaSuccess && fixed)
        status = cudaMemsetAsync(coarser, 0, 2 * bytes, stream);
    if (status != cudaSuccess)
        return status;
    if (fixed)
        launch_delta_units(stream, shape, q, kv, out, dout, delta, head->scratch, &head->units);
    else
        launch_delta(stream, shape->rows * shape->heads, out, dout, delta);
    status = launch_rows(stream, fixed ? backward_kernel<true> : backward_kernel<false>, THREADS,
                         sizeof(shared_backward), a);
    if (status != cudaSuccess)
        return status;
    if (fixed)
        launch_fixed_to_float(stream, shape->keys, dkv, coarser, &head->units);
    else
        launch_order(stream, shape->keys, dkv);
    return cudaGetLastError();
}
