/* Memory, copies, opening and closing. */
#include "device/entry.cuh"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "dense/matmul.cuh"
#include "device/upload.cuh"

void record_error(cuda_device *d, cudaError_t error, const char *operation)
{
    if (d->error != cudaSuccess) return;
    d->error = error;
    d->failed = operation;
}

static glm52_status device_fail(cudaError_t error, const char *doing)
{
    fail(GLM52_E_DEVICE, "CUDA: %s: %s (%s)", doing, cudaGetErrorString(error), cudaGetErrorName(error));
    return fail_hint(
        "the context is lost: create a new one; run again with CUDA_LAUNCH_BLOCKING=1 to see where it began");
}

/* cudaMalloc hands out memory in pieces of this size; asked for whole ones, it takes exactly what it is asked for. */
constexpr size_t PIECE_BYTES = (size_t)2 << 20;

static size_t device_taken_bytes(struct stream *, size_t bytes)
{
    return (bytes / PIECE_BYTES + (bytes % PIECE_BYTES || !bytes)) * PIECE_BYTES;
}

static glm52_status device_allocate(struct stream *s, size_t bytes, enum memory_class of, void **out)
{
    cuda_device *d = device_of(s);
    const size_t taken = device_taken_bytes(s, bytes);
    size_t free_bytes = 0, all = 0;
    const cudaError_t error = cudaMalloc(out, taken);

    s->allocations++;
    if (error == cudaSuccess) {
        host_account(s->host, of, (int64_t)taken);
        return GLM52_OK;
    }
    cudaGetLastError();
    if (error != cudaErrorMemoryAllocation) return device_fail(error, "allocating");
    cudaMemGetInfo(&free_bytes, &all);
    fail(GLM52_E_NOMEM, "GPU %d has no %.1f MiB: %.1f of %.1f MiB are free", d->index, (double)bytes / (1 << 20),
         (double)free_bytes / (1 << 20), (double)all / (1 << 20));
    return fail_hint("fewer tokens per microbatch, train.recompute, or a smaller model need less");
}

static void device_release(struct stream *s, void *memory, size_t bytes, enum memory_class of)
{
    if (!memory) return;
    device_of(s);
    cudaFree(memory);
    host_account(s->host, of, -(int64_t)device_taken_bytes(s, bytes));
}

static void device_memory(struct stream *s, uint64_t *free, uint64_t *all)
{
    size_t free_bytes = 0, all_bytes = 0;

    device_of(s);
    cudaMemGetInfo(&free_bytes, &all_bytes);
    *free = free_bytes;
    *all = all_bytes;
}

static void device_download(struct stream *s, void *to_host, const void *from_device, size_t bytes)
{
    cuda_device *d = device_of(s);
    cudaError_t error = cudaMemcpyAsync(to_host, from_device, bytes, cudaMemcpyDeviceToHost, d->stream);

    if (error == cudaSuccess) error = cudaStreamSynchronize(d->stream);
    if (error != cudaSuccess) record_error(d, error, "download");
}

static void device_zero(struct stream *s, void *memory, size_t bytes)
{
    count_zero(s, bytes);
    if (bytes) cudaMemsetAsync(memory, 0, bytes, device_of(s)->stream);
    launched(device_of(s), "zero");
}

static void device_copy(struct stream *s, void *to, const void *from, size_t bytes)
{
    count_copy(s, bytes);
    if (bytes) cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, device_of(s)->stream);
    launched(device_of(s), "copy");
}

static glm52_status device_synchronize(struct stream *s)
{
    cuda_device *d = device_of(s);
    cudaError_t error = cudaStreamSynchronize(d->stream);
    const char *failed = d->failed ? d->failed : "synchronize";

    if (d->error != cudaSuccess) error = d->error;
    d->error = cudaSuccess;
    d->failed = nullptr;
    return error == cudaSuccess ? GLM52_OK : device_fail(error, failed);
}

static void device_mark(struct stream *s, int moment)
{
    cuda_device *d = device_of(s);
    const cudaError_t error = cudaEventRecord(d->moment[moment], d->stream);

    if (error != cudaSuccess) record_error(d, error, "mark");
}

static double device_elapsed(struct stream *s, int from, int to)
{
    cuda_device *d = device_of(s);
    float milliseconds = 0;
    const cudaError_t error = cudaEventElapsedTime(&milliseconds, d->moment[from], d->moment[to]);

    if (error != cudaSuccess) record_error(d, error, "elapsed");
    return 1e-3 * (double)milliseconds;
}

static void device_close(struct stream *s)
{
    cuda_device *d = device_of(s);

    for (cudaEvent_t moment : d->moment)
        if (moment) cudaEventDestroy(moment);
    if (d->stream) cudaStreamSynchronize(d->stream);
    if (d->scratch) {
        cudaFree(d->scratch);
        host_account(s->host, MEMORY_WORKSPACE, -(int64_t)SCRATCH_BYTES);
    }
    matmul_close(d);
    upload_close(s);
    timing_close(d);
    if (d->blas) cublasLtDestroy(d->blas);
    if (d->stream) cudaStreamDestroy(d->stream);
    free(d);
    s->state = nullptr;
}

void fill_device(struct ops *t)
{
    t->allocate = device_allocate;
    t->release = device_release;
    t->taken_bytes = device_taken_bytes;
    t->memory = device_memory;
    t->upload = device_upload;
    t->download = device_download;
    t->zero = device_zero;
    t->copy = device_copy;
    t->synchronize = device_synchronize;
    t->mark = device_mark;
    t->elapsed = device_elapsed;
    t->close = device_close;
}

/* ---- opening ---- */

int count_devices(void)
{
    int count = 0;

    if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
    cudaGetLastError();
    return 0;
}

void describe_device(int index, char *text, size_t bytes)
{
    cudaDeviceProp p;

    if (cudaGetDeviceProperties(&p, index) != cudaSuccess) {
        cudaGetLastError();
        snprintf(text, bytes, "cuda:%d", index);
        return;
    }
    snprintf(text, bytes, "cuda:%d, %s, %.0f GiB, %d multiprocessors", index, p.name,
             (double)p.totalGlobalMem / (1 << 30), p.multiProcessorCount);
}

static glm52_status check_device(int index)
{
    int count = 0, major = 0, minor = 0;
    cudaError_t error = cudaGetDeviceCount(&count);

    if (error != cudaSuccess || count == 0) {
        cudaGetLastError();
        fail(GLM52_E_DEVICE, "no GPU: %s", error == cudaSuccess ? "the driver shows none" : cudaGetErrorString(error));
        return fail_hint("install an NVIDIA driver for CUDA 13 or later, or use device \"cpu\"");
    }
    if (index < 0 || index >= count) {
        fail(GLM52_E_DEVICE, "GPU %d is not there: the driver shows %d, numbered from 0", index, count);
        return fail_hint("use \"cuda:0\" .. \"cuda:%d\"", count - 1);
    }
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index);
    if (major == 9 && minor == 0) return GLM52_OK;
    fail(GLM52_E_UNSUPPORTED, "GPU %d has compute capability %d.%d; this build has code for 9.0 (Hopper)", index, major,
         minor);
    return fail_hint("use a Hopper GPU, or device \"cpu\"");
}

static glm52_status set_up(struct stream *s, cuda_device *d)
{
    glm52_status status;
    cudaError_t error = cudaSetDevice(d->index);

    if (error == cudaSuccess) error = cudaStreamCreateWithFlags(&d->stream, cudaStreamNonBlocking);
    for (cudaEvent_t &moment : d->moment)
        if (error == cudaSuccess) error = cudaEventCreate(&moment);
    if (error != cudaSuccess) return device_fail(error, "opening the device");
    cudaDeviceGetAttribute(&d->multiprocessors, cudaDevAttrMultiProcessorCount, d->index);
    if (cublasLtCreate(&d->blas) != CUBLAS_STATUS_SUCCESS)
        return fail(GLM52_E_DEVICE, "cuBLASLt does not start on GPU %d", d->index);
    status = upload_open(s);
    if (!status) status = device_allocate(s, SCRATCH_BYTES, MEMORY_WORKSPACE, &d->scratch);
    return status ? status : matmul_open(d);
}

glm52_status open_device(struct stream *s, struct host *host, int index)
{
    glm52_status status = check_device(index);
    cuda_device *d;

    if (status) return status;
    if (!(d = (cuda_device *)calloc(1, sizeof *d))) return fail(GLM52_E_NOMEM, "no memory for a device");
    memset(s, 0, sizeof *s);
    s->ops = whole_table();
    s->host = host;
    s->threads = 1;
    s->label = "";
    s->state = d;
    d->index = index;
    status = set_up(s, d);
    if (status) device_close(s);
    return status;
}

/* Plans are for the first GPU there is, or for a whole Hopper chip. */
static cuda_device paper_device()
{
    cuda_device d = {};

    if (cudaDeviceGetAttribute(&d.multiprocessors, cudaDevAttrMultiProcessorCount, 0) != cudaSuccess) {
        cudaGetLastError();
        d.multiprocessors = 132;
    }
    return d;
}

void plan_device(struct stream *s, size_t *workspace)
{
    static cuda_device paper = paper_device();

    memset(s, 0, sizeof *s);
    s->ops = whole_table();
    s->state = &paper;
    *workspace = SCRATCH_BYTES;
}
