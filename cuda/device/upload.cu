/* Uploads pass through page-locked memory of the device's own, so that the caller may go on at once: a ring of
 * chunks, each free again when the copies out of it are done. The host waits only if it is a whole ring ahead. */
#include "device/upload.cuh"

#include <cstdlib>
#include <cstring>

#include "device/entry.cuh"

namespace {

constexpr int CHUNKS = 8;
constexpr size_t CHUNK_BYTES = (size_t)2 << 20;

} /* namespace */

struct upload_ring {
    char *memory;               /* page-locked */
    cudaEvent_t left[CHUNKS];   /* the copies out of each chunk are done */
    int at;                     /* the chunk that is being filled */
    size_t used;                /* of it */
};

glm52_status upload_open(struct stream *s)
{
    cuda_device *d = device_of(s);
    struct upload_ring *r = (struct upload_ring *)calloc(1, sizeof *r);
    cudaError_t error;

    if (!r) return fail(GLM52_E_NOMEM, "no memory for a device");
    d->uploads = r;
    error = cudaHostAlloc((void **)&r->memory, CHUNKS * CHUNK_BYTES, cudaHostAllocDefault);
    for (int i = 0; i < CHUNKS && error == cudaSuccess; i++)
        error = cudaEventCreateWithFlags(&r->left[i], cudaEventDisableTiming);
    if (error != cudaSuccess) {
        cudaGetLastError();
        fail(GLM52_E_NOMEM, "the host has no %zu MiB of page-locked memory for uploads: %s", CHUNKS * CHUNK_BYTES >> 20,
             cudaGetErrorString(error));
        return fail_hint("raise the limit of locked memory (ulimit -l), or free memory");
    }
    host_account(s->host, MEMORY_HOST, (int64_t)(CHUNKS * CHUNK_BYTES));
    return GLM52_OK;
}

void upload_close(struct stream *s)
{
    cuda_device *d = device_of(s);
    struct upload_ring *r = d->uploads;

    if (!r) return;
    if (r->left[CHUNKS - 1]) host_account(s->host, MEMORY_HOST, -(int64_t)(CHUNKS * CHUNK_BYTES));
    for (int i = 0; i < CHUNKS; i++)
        if (r->left[i]) cudaEventDestroy(r->left[i]);
    if (r->memory) cudaFreeHost(r->memory);
    free(r);
    d->uploads = nullptr;
}

/* Where the next `bytes` go; at most CHUNK_BYTES. */
static cudaError_t next_place(cuda_device *d, size_t bytes, char **place)
{
    struct upload_ring *r = d->uploads;
    cudaError_t error = cudaSuccess;

    if (r->used + bytes > CHUNK_BYTES) {
        error = cudaEventRecord(r->left[r->at], d->stream);
        r->at = (r->at + 1) % CHUNKS;
        r->used = 0;
        if (error == cudaSuccess) error = cudaEventSynchronize(r->left[r->at]); /* at once, if it was never recorded */
    }
    *place = r->memory + (size_t)r->at * CHUNK_BYTES + r->used;
    r->used += (bytes + 255) / 256 * 256;
    return error;
}

void device_upload(struct stream *s, void *to_device, const void *from_host, size_t bytes)
{
    cuda_device *d = device_of(s);

    for (size_t done = 0; done < bytes;) {
        const size_t piece = std::min(bytes - done, CHUNK_BYTES);
        char *place;
        cudaError_t error = next_place(d, piece, &place);

        if (error == cudaSuccess) {
            memcpy(place, (const char *)from_host + done, piece);
            error = cudaMemcpyAsync((char *)to_device + done, place, piece, cudaMemcpyHostToDevice, d->stream);
        }
        if (error != cudaSuccess) {
            record_error(d, error, "upload");
            return;
        }
        done += piece;
    }
}
