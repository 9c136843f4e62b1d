/* Which part of rows x keys a tile of rows sees, where row t sees keys start[t] .. end[t] - 1. */
#pragma once

#include "device/element.cuh"

struct range {
    int low, high; /* low = high: nothing */
};

/* The smallest range around all that `rows` <= 256 rows from `row` on see; for a whole block of 256 threads or more. */
__device__ __forceinline__ range visible_range(const int32_t *start, const int32_t *end, int64_t row, int rows)
{
    __shared__ int low, high;

    __syncthreads();
    if (threadIdx.x == 0) {
        low = INT32_MAX;
        high = 0;
    }
    __syncthreads();
    if ((int)threadIdx.x < rows && start[row + threadIdx.x] < end[row + threadIdx.x]) {
        atomicMin(&low, start[row + threadIdx.x]);
        atomicMax(&high, end[row + threadIdx.x]);
    }
    __syncthreads();
    return low < high ? range{low, high} : range{0, 0};
}
