/* Recorded launches: a CUDA graph per recording. */
#include "device/entry.cuh"

static glm52_status graph_fail(cudaError_t error, const char *doing)
{
    cudaGetLastError();
    return fail(error == cudaErrorMemoryAllocation ? GLM52_E_NOMEM : GLM52_E_DEVICE, "CUDA: %s: %s (%s)", doing,
                cudaGetErrorString(error), cudaGetErrorName(error));
}

static glm52_status graph_record(struct stream *s)
{
    const cudaError_t error = cudaStreamBeginCapture(device_of(s)->stream, cudaStreamCaptureModeThreadLocal);

    return error == cudaSuccess ? GLM52_OK : graph_fail(error, "beginning to record launches");
}

/* An operation that failed to be recorded has not failed to run: its error ends here. */
static cudaError_t take_error(cuda_device *d, cudaError_t error)
{
    if (d->error != cudaSuccess) error = d->error;
    d->error = cudaSuccess;
    d->failed = nullptr;
    return error;
}

static glm52_status graph_recorded(struct stream *s, void **graph)
{
    cuda_device *d = device_of(s);
    const char *failed = d->failed ? d->failed : "recording launches";
    cudaGraph_t recorded = nullptr;
    cudaGraphExec_t ready = nullptr;
    cudaError_t error = take_error(d, cudaStreamEndCapture(d->stream, &recorded));

    if (error == cudaSuccess) error = cudaGraphInstantiate(&ready, recorded, 0);
    if (recorded) cudaGraphDestroy(recorded);
    if (error == cudaSuccess) error = cudaGraphUpload(ready, d->stream);
    if (error == cudaSuccess) {
        *graph = ready;
        return GLM52_OK;
    }
    if (ready) cudaGraphExecDestroy(ready);
    return graph_fail(error, failed);
}

static void graph_replay(struct stream *s, void *graph)
{
    cuda_device *d = device_of(s);
    const cudaError_t error = cudaGraphLaunch((cudaGraphExec_t)graph, d->stream);

    if (error != cudaSuccess) record_error(d, error, "replaying recorded launches");
}

static void graph_forget(struct stream *s, void *graph)
{
    cuda_device *d = device_of(s);
    const cudaError_t error = cudaStreamSynchronize(d->stream);

    if (error != cudaSuccess) record_error(d, error, "synchronize");
    cudaGraphExecDestroy((cudaGraphExec_t)graph);
}

void fill_graph(struct ops *t)
{
    t->record = graph_record;
    t->recorded = graph_recorded;
    t->replay = graph_replay;
    t->forget = graph_forget;
}
