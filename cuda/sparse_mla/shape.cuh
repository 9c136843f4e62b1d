/* What the Hopper kernels are built for, and what they share: 64 heads, 512 + 64 columns, tiles of
 * 64 keys, everything in shared memory as blocks of [64 rows][64 columns] (8 KiB, swizzled). */
#pragma once
#include "hopper.cuh"
#include "sparse_mla.h"

constexpr int HEADS = 64; /* rows of Q; fewer real heads are padded with zeros */
constexpr int RANK = 512;
constexpr int ROPE = 64;
constexpr int WIDTH = RANK + ROPE;
constexpr int TILE = 64;  /* keys at a time */
constexpr int BLOCK = 64; /* columns of a block */
constexpr int BLOCKS = WIDTH / BLOCK;
constexpr uint32_t BLOCK_BYTES = 64 * BLOCK * 2;
constexpr int WARPGROUP = 128;
/* What L2 keeps in any order of access (machine.md 2: random gathers slow down from 40 MB on). */
constexpr size_t CACHED_BYTES = 40000000;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;

/* The thread's index, read anew wherever it is asked for: what follows from it is cheaper to
 * compute again than to keep in registers across a loop, which is what the compiler would do. */
__device__ __forceinline__ int thread_index()
{
    int thread;

    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

/* A wgmma accumulator of a warpgroup: element i of a thread is row fragment_row + 8 * (i / 2 % 2)
 * and column 8 * (i / 4) + fragment_column + i % 2. */
__device__ __forceinline__ int fragment_row()
{
    const int thread = thread_index();

    return thread % WARPGROUP / 32 * 16 + thread % 32 / 4;
}
__device__ __forceinline__ int fragment_column() { return thread_index() % 4 * 2; }

/* x, the same in all lanes, made known as such to the compiler: what depends on it (loop counters,
 * wgmma descriptors) then lives in uniform registers instead of being moved there product by
 * product. */
__device__ __forceinline__ uint32_t uniform(uint32_t x) { return __reduce_max_sync(~0u, x); }

/* Four lanes hold words 0..3 of four pieces each: give lane i the whole of piece i. */
__device__ __forceinline__ void quad_transpose(uint32_t (&w)[4])
{
    const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
    uint32_t got0 = __shfl_xor_sync(~0u, odd ? w[0] : w[1], 1);
    uint32_t got1 = __shfl_xor_sync(~0u, odd ? w[2] : w[3], 1);

    (odd ? w[0] : w[1]) = got0;
    (odd ? w[2] : w[3]) = got1;
    got0 = __shfl_xor_sync(~0u, high ? w[0] : w[2], 2);
    got1 = __shfl_xor_sync(~0u, high ? w[1] : w[3], 2);
    (high ? w[0] : w[2]) = got0;
    (high ? w[1] : w[3]) = got1;
}

/* Rows are dealt to the blocks in rounds of gridDim.x, and every list is ascending: blocks that
 * start their rows together sweep the keys together, and what one fetched into L2 the others find
 * there (machine.md 2, 3). Left alone they drift apart within some hundred rows. One thread of each
 * block calls this at each of its rows. It is a courtesy, not a barrier: patience is a sixth to a
 * quarter of what the row will take, so rows of unequal length cost little and a block that is not
 * resident cannot hang the others. (Backward at 32768 keys: 98 ms without, 66 ms with it.) */
__device__ __forceinline__ void start_together(uint32_t *started, int64_t row, int64_t rows,
                                               int count)
{
    const int64_t patience = 30 * count, all = row - blockIdx.x + gridDim.x;
    const long long begin = clock64();
    uint32_t seen;

    atomicAdd(started, 1);
    if (all > rows) /* the last round is not full */
        return;
    do
        asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(started) : "memory");
    while (seen < all && clock64() - begin < patience);
}

int multiprocessors();

/* A block per multiprocessor, or per row where there are fewer, with `shared` bytes of its own. */
template <class ARGUMENTS>
cudaError_t launch_rows(cudaStream_t stream, void (*kernel)(ARGUMENTS), int threads, size_t shared,
                        const ARGUMENTS &a)
{
    const int64_t grid = a.rows < multiprocessors() ? a.rows : multiprocessors();
    const cudaError_t status =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);

    if (status != cudaSuccess)
        return status;
    kernel<<<(unsigned)grid, threads, shared, stream>>>(a);
    return cudaGetLastError();
}

/* The word that start_together counts in, if there is one, from 0. */
inline cudaError_t reset_started(cudaStream_t stream, uint32_t *started)
{
    return started ? cudaMemsetAsync(started, 0, sizeof *started, stream) : cudaSuccess;
}

bool hopper_shape(const struct sparse_mla *shape);
/* counts[row]: how many entries of selected[row] stand before the first negative one. */
cudaError_t hopper_forward(cudaStream_t stream, const struct sparse_mla *shape, const void *q,
                           const void *kv, const int32_t *selected, const int32_t *counts,
                           void *out, float *lse, void *workspace);
cudaError_t hopper_backward(cudaStream_t stream, const struct sparse_mla *shape, const void *q,
                            const void *kv, const int32_t *selected, const int32_t *counts,
                            const void *out, const float *lse, const void *dout, void *dq,
                            float *dkv, float *target, void *workspace);
/* Workspace as for the forward. */
cudaError_t hopper_target(cudaStream_t stream, const struct sparse_mla *shape, const void *q,
                          const void *kv, const int32_t *selected, const int32_t *counts,
                          const float *lse, float *target, void *workspace);
size_t hopper_forward_bytes(const struct sparse_mla *shape);
size_t hopper_backward_bytes(const struct sparse_mla *shape);
/* Deterministic mode addresses its sums with 32 bits: at most 1.8 million keys. */
bool hopper_sums_fit(const struct sparse_mla *shape);

cudaError_t generic_forward(cudaStream_t stream, const struct sparse_mla *shape, const void *q,
                            const void *kv, const int32_t *selected, const int32_t *counts,
                            void *out, float *lse, void *workspace);
cudaError_t generic_backward(cudaStream_t stream, const struct sparse_mla *shape, const void *q,
                             const void *kv, const int32_t *selected, const int32_t *counts,
                             const void *out, const float *lse, const void *dout, void *dq,
                             float *dkv, float *target, void *workspace);
cudaError_t generic_target(cudaStream_t stream, const struct sparse_mla *shape, const void *q,
                           const void *kv, const int32_t *selected, const int32_t *counts,
                           const float *lse, float *target, void *workspace);
size_t generic_backward_bytes(const struct sparse_mla *shape);
