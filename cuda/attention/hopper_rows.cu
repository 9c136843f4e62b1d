/* What backward must know of each row, laid out so that a tile's worth lies together: D =
 * sum(out * dout), lse, and which keys it sees. */
#include "attention/hopper.cuh"

namespace {

using namespace hopper;

constexpr int WARPS = 8;

__device__ __forceinline__ float dot8(uint4 a, uint4 b)
{
    const uint32_t x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
    float sum = 0;

#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 u = __bfloat1622float2(*(const __nv_bfloat162 *)&x[i]);
        const float2 v = __bfloat1622float2(*(const __nv_bfloat162 *)&y[i]);

        sum += u.x * v.x + u.y * v.y;
    }
    return sum;
}

/* blockIdx: WARPS rows, up to whole tiles; a warp takes one in all heads. */
__global__ __launch_bounds__(WARPS * 32) void heads_kernel(const attention_call c, const uint4 *out, const uint4 *dout,
                                                           const float *lse, head_facts *to)
{
    const int64_t row = blockIdx.x * (int64_t)WARPS + threadIdx.x / 32, tiles = (c.rows + TILE - 1) / TILE;
    const int lane = threadIdx.x % 32;

#pragma unroll 4
    for (int head = 0; head < c.heads; head++) {
        const int64_t at = row * c.heads + head;
        float sum = row < c.rows ? dot8(out[at * 32 + lane], dout[at * 32 + lane]) : 0;

        static_assert(COLUMNS == 32 * 8, "a lane takes 16 bytes of a row");
        sum = warp_reduce(sum, plus());
        if (lane == 0) {
            head_facts &f = to[head * tiles + row / TILE];

            f.lse[row % TILE] = row < c.rows ? lse[at] * LOG2_E : INFINITY;
            f.delta[row % TILE] = sum;
        }
    }
}

/* blockIdx: tile of rows. */
__global__ __launch_bounds__(TILE) void tiles_kernel(const attention_call c, tile_facts *to)
{
    __shared__ int latest, earliest;
    const int64_t row = blockIdx.x * (int64_t)TILE + threadIdx.x;
    const int start = row < c.rows ? c.start[row] : 0, end = row < c.rows ? c.end[row] : 0;
    tile_facts &f = to[blockIdx.x];

    if (threadIdx.x == 0) {
        latest = 0;
        earliest = INT32_MAX;
    }
    __syncthreads();
    if (start < end) {
        atomicMax(&latest, start);
        atomicMin(&earliest, end);
    }
    f.start[threadIdx.x] = start;
    f.end[threadIdx.x] = end;
    __syncthreads();
    if (threadIdx.x == 0) {
        f.latest = latest;
        f.earliest = earliest;
    }
}

} /* namespace */

void hopper::describe_rows(cudaStream_t stream, const attention_call &call, const void *out, const void *dout,
                           const float *lse)
{
    const int64_t tiles = divided(call.rows, TILE);

    heads_kernel<<<(unsigned)(tiles * TILE / WARPS), WARPS * 32, 0, stream>>>(
        call, (const uint4 *)out, (const uint4 *)dout, lse, (head_facts *)call.of_head);
    tiles_kernel<<<(unsigned)tiles, TILE, 0, stream>>>(call, (tile_facts *)call.of_tile);
}
