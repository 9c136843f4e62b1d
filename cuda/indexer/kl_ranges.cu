/* Which entries of a row belong to which keys (kl_selected.cuh), and how many rounds of kl_pairs.cu a group of keys
 * has. A block takes four rows, whose lists it has on chip. A thread a unit of keys finds where it begins in all four
 * at once; then a thread a group and row has its range. */
#include "indexer/kl_selected.cuh"

namespace {

constexpr int THREADS = 256, ROWS = 4;
constexpr int GROUPS = (THREADS - 1) / KL_UNITS; /* at a time: the unit behind the last is looked for too */

/* The lists are filled up with -1, which counts as the largest, to a power of two. */
int padded(int k)
{
    int all = 1;

    while (all < k) all *= 2;
    return all;
}

/* How many numbers of each list are below `key`. */
__device__ __forceinline__ void find(const int32_t *numbers, int padded, uint32_t key, int (&begin)[ROWS])
{
#pragma unroll
    for (int row = 0; row < ROWS; row++) begin[row] = 0;
    for (int step = padded / 2; step; step /= 2)
#pragma unroll
        for (int row = 0; row < ROWS; row++)
            if ((uint32_t)numbers[row * padded + begin[row] + step - 1] < key) begin[row] += step;
#pragma unroll
    for (int row = 0; row < ROWS; row++) begin[row] += (uint32_t)numbers[row * padded + begin[row]] < key;
}

__global__ __launch_bounds__(THREADS) void ranges_kernel(const kl_call c, int padded)
{
    extern __shared__ int32_t numbers[]; /* [ROWS, padded] */
    __shared__ int begins[ROWS][THREADS];
    const int64_t first = (int64_t)blockIdx.x * ROWS, rows = min(c.rows - first, (int64_t)ROWS);
    const int k = c.i.k;

    for (int row = 0; row < ROWS; row++)
        for (int j = threadIdx.x; j < padded; j += THREADS)
            numbers[row * padded + j] = row < rows && j < k ? __ldg(&c.selected[(c.first + first + row) * k + j]) : -1;
    for (int64_t base = 0; base < c.groups; base += GROUPS) {
        int begin[ROWS];

        __syncthreads();
        find(numbers, padded, (uint32_t)base * KL_GROUP + threadIdx.x * KL_UNIT, begin);
#pragma unroll
        for (int row = 0; row < ROWS; row++) begins[row][threadIdx.x] = begin[row];
        __syncthreads();
        const int64_t group = base + threadIdx.x / ROWS, row = threadIdx.x % ROWS;
        entry_range r = {};

        if (threadIdx.x < GROUPS * ROWS && group < c.groups && row < rows) {
            const int *at = &begins[row][threadIdx.x / ROWS * KL_UNITS];

            r.begin = at[0];
            if (c.row_weight[c.first + first + row] != 0) /* otherwise it gives keys nothing */
                for (int unit = 0; unit < KL_UNITS; unit++) r.counts |= (uint32_t)(at[unit + 1] - at[unit]) << unit * 8;
            c.ranges[group * c.most_rows + first + row] = r;
        }
        int rounds = rounds_of(r);
        static_assert(ROWS == 4, "of four lanes");
        rounds += __shfl_xor_sync(~0u, rounds, 1);
        rounds += __shfl_xor_sync(~0u, rounds, 2);
        if (row == 0 && rounds) atomicAdd(&c.counts[group], rounds);
    }
}

} /* namespace */

void kl_ranges(cuda_device *d, const kl_call &c)
{
    const int all = padded(c.i.k);
    const size_t bytes = sizeof(int32_t) * ROWS * all;

    allow_shared(ranges_kernel, bytes);
    ranges_kernel<<<(unsigned)divided(c.rows, ROWS), THREADS, bytes, d->stream>>>(c, all);
}
