/* Kernels launched to begin as the blocks of the kernel before end (programmatic dependent launch), so that they are
 * there when all have. In a recorded graph the two are joined by a programmatic edge. */
#pragma once

#include "device/device.cuh"

/* Until the kernel before is over, with all it wrote; what that does not write can be read before. */
__device__ __forceinline__ void wait_for_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

template <class... Parameters, class... Arguments>
static inline void launch_early(cudaStream_t stream, dim3 blocks, unsigned threads, void (*kernel)(Parameters...),
                                Arguments... arguments)
{
    cudaLaunchConfig_t how = {};
    cudaLaunchAttribute early = {};

    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    how.gridDim = blocks;
    how.blockDim = dim3(threads);
    how.stream = stream;
    how.attrs = &early;
    how.numAttrs = 1;
    cudaLaunchKernelEx(&how, kernel, arguments...);
}
