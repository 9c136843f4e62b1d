/* The CUDA device behind a stream: everything runs on one CUDA stream, in order. Operations allocate nothing and never
 * wait; what a launch reports is kept until the next synchronize. Contracts are in ops/ops.h. */
#pragma once

#include <cublasLt.h>
#include <cuda_runtime.h>

#include <algorithm>

extern "C" {
#include "base/dtype.h"
#include "ops/count.h"
}

struct matmul_cache;
struct upload_ring;
struct timing;

struct cuda_device {
    cudaStream_t stream;
    int index, multiprocessors;
    cublasLtHandle_t blas;
    void *scratch;              /* SCRATCH_BYTES: cublasLt's, and of operations that get no workspace */
    struct matmul_cache *products;
    cudaEvent_t moment[MOMENTS];
    struct upload_ring *uploads;
    struct timing *timing;      /* NULL: nobody asked yet */
    cudaError_t error;          /* the first since the last synchronize */
    const char *failed;         /* the operation it showed in */
};

constexpr size_t SCRATCH_BYTES = (size_t)64 << 20;

/* Every operation begins with it: the thread may have used another GPU in between. */
static inline cuda_device *device_of(const struct stream *s)
{
    cuda_device *d = (cuda_device *)s->state;

    cudaSetDevice(d->index);
    return d;
}

void record_error(cuda_device *d, cudaError_t error, const char *operation);

/* After the launches of an operation. */
static inline void launched(cuda_device *d, const char *operation)
{
    cudaError_t error = cudaGetLastError();

    if (error != cudaSuccess) record_error(d, error, operation);
}

/* ---- host side of launches ---- */

static inline int64_t divided(int64_t count, int64_t by) { return (count + by - 1) / by; }

/* Blocks for a kernel that strides over `count` items; enough to fill the device several times. */
static inline unsigned blocks_for(const cuda_device *d, int64_t count, int threads)
{
    return (unsigned)std::max<int64_t>(1, std::min<int64_t>(divided(count, threads), (int64_t)d->multiprocessors * 32));
}

static inline bool aligned16(const void *p) { return ((uintptr_t)p & 15) == 0; }

/* Lets a kernel use more dynamic shared memory than the 48 KB that come without asking,
 * less what it may have of its own. */
template <class Kernel>
static inline void allow_shared(Kernel kernel, size_t bytes)
{
    if (bytes > 32 << 10) cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
}

/* The next `bytes` of a workspace, 256-byte aligned; base = NULL only counts. */
template <class T>
static inline T *carve(void *base, size_t *used, int64_t count)
{
    T *piece = base ? (T *)((char *)base + *used) : nullptr;

    *used += ((size_t)count * sizeof(T) + 255) / 256 * 256;
    return piece;
}

/* ---- each family fills in its part of the table ---- */

void fill_device(struct ops *t);
void fill_graph(struct ops *t);
void fill_timing(struct ops *t);
void fill_dense(struct ops *t);
void fill_norm(struct ops *t);
void fill_latent(struct ops *t);
void fill_rope(struct ops *t);
void fill_embed(struct ops *t);
void fill_indexer(struct ops *t);
void fill_index_kl_selected(struct ops *t);
void fill_index_kl_dense(struct ops *t);
void fill_sparse_mla(struct ops *t);
void fill_dense_attention(struct ops *t);
void fill_route(struct ops *t);
void fill_dispatch(struct ops *t);
void fill_swiglu(struct ops *t);
void fill_grouped(struct ops *t);
void fill_head(struct ops *t);
void fill_head_tv(struct ops *t);
void fill_arithmetic(struct ops *t);
void fill_quantise(struct ops *t);
void fill_adamw(struct ops *t);
void fill_guard(struct ops *t);
void fill_muon(struct ops *t);
