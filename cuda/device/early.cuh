/* Kernels launched to begin before the kernel before them is over, as its blocks end or where it calls follow()
 * (programmatic dependent launch), so that they are there when all have. In a recorded graph the two are joined by a
 * programmatic edge. */
#pragma once

#include "device/device.cuh"

/* Until the kernel before is over, with all it wrote; what that does not write can be read before. */
__device__ __forceinline__ void wait_for_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

/* At the start of a kernel: the next may be launched as soon as all blocks of this one have got here; and nothing
 * that earlier kernels wrote may be read, nor what they read be written, before this. */
__device__ __forceinline__ void follow()
{
    asm volatile("griddepcontrol.launch_dependents;\ngriddepcontrol.wait;" ::: "memory");
}

/* For kernels that call wait_for_kernel_before() or follow(). */
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
