/* Kernels that follow one another closely: the next is launched while the last still runs, gets ready, and waits. */
#pragma once

#include "device/device.cuh"

/* At the start of a kernel: the next may be launched as soon as all blocks of this one have got here; and nothing
 * that earlier kernels wrote may be read, nor what they read be written, before this. */
__device__ __forceinline__ void follow()
{
    asm volatile("griddepcontrol.launch_dependents;\ngriddepcontrol.wait;" ::: "memory");
}

/* For kernels that call follow(). */
template <class... Parameters, class... Arguments>
static inline void launch_following(cudaStream_t stream, void (*kernel)(Parameters...), dim3 grid, int threads,
                                    size_t shared, const Arguments &...arguments)
{
    cudaLaunchAttribute closely = {};
    cudaLaunchConfig_t launch = {};

    closely.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    closely.val.programmaticStreamSerializationAllowed = 1;
    launch.gridDim = grid;
    launch.blockDim = dim3((unsigned)threads);
    launch.dynamicSmemBytes = shared;
    launch.stream = stream;
    launch.attrs = &closely;
    launch.numAttrs = 1;
    cudaLaunchKernelEx(&launch, kernel, Parameters(arguments)...);
}
