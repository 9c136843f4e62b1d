/* Time per operation: an event before each, and an NVTX range for each stretch of operations with
 * one label, which shows in Nsight Systems. */
#include <nvtx3/nvToolsExt.h>

#include <cstdlib>

#include "device/entry.cuh"

namespace {

constexpr int EVENTS = 4096; /* that wait to be read; when they are used up, the host waits for them */

} /* namespace */

struct timing {
    cuda_device *device;
    struct tally *tally;
    cudaEvent_t event[EVENTS];
    struct tally_row *row[EVENTS]; /* of the operation that begins at each event */
    int made, used;
    const char *label;             /* of the open range; NULL: none is */
};

/* Adds the times between the events to their rows; the last event, of no operation, becomes the first. */
static cudaError_t read_times(struct timing *t)
{
    cudaError_t error = cudaEventSynchronize(t->event[t->used - 1]);

    for (int i = 0; i + 1 < t->used && error == cudaSuccess; i++) {
        float milliseconds = 0;

        error = cudaEventElapsedTime(&milliseconds, t->event[i], t->event[i + 1]);
        if (t->row[i]) t->row[i]->seconds += 1e-3 * (double)milliseconds;
    }
    std::swap(t->event[0], t->event[t->used - 1]);
    t->row[0] = nullptr;
    t->used = 1;
    return error;
}

static void begin_row(struct timing *t, struct tally_row *row)
{
    cudaError_t error = cudaSuccess;

    if (t->used == t->made) error = cudaEventCreate(&t->event[t->made++]);
    if (error == cudaSuccess) error = cudaEventRecord(t->event[t->used], t->device->stream);
    t->row[t->used++] = row;
    if (error == cudaSuccess && t->used == EVENTS) {
        error = read_times(t);
        t->row[0] = row;
    }
    if (error != cudaSuccess) record_error(t->device, error, "timing");
}

static void show_label(struct timing *t, const char *label)
{
    if (t->label == label) return;
    if (t->label) nvtxRangePop();
    if (label) nvtxRangePushA(label);
    t->label = label;
}

static void begins(void *user, struct tally_row *row)
{
    struct timing *t = (struct timing *)user;

    begin_row(t, row);
    show_label(t, row->label);
}

static glm52_status time_begin(struct stream *s)
{
    cuda_device *d = device_of(s);

    if (!d->timing && !(d->timing = (struct timing *)calloc(1, sizeof *d->timing)))
        return fail(GLM52_E_NOMEM, "no memory for times");
    d->timing->device = d;
    d->timing->tally = s->tally;
    d->timing->used = 0;
    s->tally->begins = begins;
    s->tally->user = d->timing;
    return GLM52_OK;
}

static glm52_status time_end(struct stream *s)
{
    struct timing *t = device_of(s)->timing;
    cudaError_t error;

    begin_row(t, nullptr);
    show_label(t, nullptr);
    error = read_times(t);
    if (error != cudaSuccess) record_error(t->device, error, "timing");
    t->tally->begins = nullptr;
    return s->ops->synchronize(s);
}

void timing_close(cuda_device *d)
{
    struct timing *t = d->timing;

    if (!t) return;
    for (int i = 0; i < t->made; i++) cudaEventDestroy(t->event[i]);
    free(t);
    d->timing = nullptr;
}

void fill_timing(struct ops *t)
{
    t->time_begin = time_begin;
    t->time_end = time_end;
}
