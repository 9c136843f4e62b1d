/* dq of 128 rows of one head, 64 for either of two warpgroups, from dS as hopper_keys.cu left it: dq = dS k. Tiles of
 * 64 keys and their dS are brought by a warp that does nothing else. */
#include "attention/hopper.cuh"

namespace {

using namespace hopper;

constexpr int STAGES = 4, THREADS = 3 * WARPGROUP, ROWS = 2 * TILE;

struct shared_slopes {
    unsigned char k[STAGES][TILE_BYTES], slope[STAGES][2][SLOPE_BYTES];
    uint64_t full[STAGES], empty[STAGES];
};

/* What a tile of rows sees; nothing if there is none. Outside of that there is no dS. */
__device__ __forceinline__ range keys_of_one(const attention_call &c, int64_t row)
{
    return row < c.rows ? c.seen[row / TILE] : range{0, 0};
}
__device__ __forceinline__ bool has(range r, int64_t key) { return r.low < key + TILE && r.high > key; }

/* A stage of which a warpgroup uses nothing. */
__device__ __forceinline__ void pass_by(shared_slopes &s, uint32_t i)
{
    barrier_wait(shared_address(&s.full[i % STAGES]), i / STAGES & 1);
    barrier_arrive_warp(shared_address(&s.empty[i % STAGES]));
}

__device__ void bring(const attention_maps &m, const attention_call &c, shared_slopes &s, int64_t row, int head)
{
    const range all = keys_of_two(c, row), one[2] = {keys_of_one(c, row), keys_of_one(c, row + TILE)};
    uint32_t count = 0;

    for (int64_t key = all.low; key < all.high; key += TILE, count++) {
        const int stage = count % STAGES;
        const uint32_t full = shared_address(&s.full[stage]);

        barrier_wait(shared_address(&s.empty[stage]), ~(count / STAGES) & 1);
        barrier_expect(full, TILE_BYTES + (has(one[0], key) + has(one[1], key)) * SLOPE_BYTES);
        load_tile(shared_address(s.k[stage]), &m.k, key, head, full);
        for (int i = 0; i < 2; i++)
            if (has(one[i], key))
                load_bytes(shared_address(s.slope[stage][i]), slope_at(c, head - c.first, row + i * TILE, key),
                           SLOPE_BYTES, full);
    }
}

/* All tiles of keys pass by; of the warpgroup's own rows there is dS for some of them, which lie in a row. */
__device__ void gather(const attention_maps &m, const attention_call &c, shared_slopes &s, int64_t row, int head)
{
    const int group = threadIdx.x / WARPGROUP;
    const range all = keys_of_two(c, row), one = keys_of_one(c, row + group * TILE);
    const uint32_t tiles = (uint32_t)((all.high - all.low + TILE - 1) / TILE);
    const uint32_t low = one.low < one.high ? (one.low - all.low) / TILE : tiles;
    const uint32_t high = one.low < one.high ? (one.high - all.low + TILE - 1) / TILE : tiles;
    float sum[128] = {};

    for (uint32_t i = 0; i < low; i++) pass_by(s, i);
    for (uint32_t i = low; i < high; i++) {
        const int stage = i % STAGES;
        const uint32_t left = descriptor(shared_address(s.slope[stage][group]), BLOCK_BYTES);
        const uint32_t right = descriptor(shared_address(s.k[stage]), BLOCK_BYTES);

        barrier_wait(shared_address(&s.full[stage]), i / STAGES & 1);
        mma_begin();
#pragma unroll
        for (int step = 0; step < 4; step++) product<COLUMNS, 1, 1>::run(sum, left + step * 128, right + step * 128);
        mma_commit();
        mma_wait<1>();
        if (i > low) barrier_arrive_warp(shared_address(&s.empty[(i - 1) % STAGES]));
    }
    mma_wait<0>();
    settle(sum);
    if (low < high) barrier_arrive_warp(shared_address(&s.empty[(high - 1) % STAGES]));
    for (uint32_t i = high; i < tiles; i++) pass_by(s, i);
    named_barrier(1, 2 * WARPGROUP); /* no stage is read any more */
    store_tile(sum, shared_address(s.k[group]), &m.dq, row + group * TILE, head, 2 + group);
}

/* blockIdx: head; tile of rows, late ones first, which see most. */
__global__ __launch_bounds__(THREADS, 1) void slopes_kernel(const __grid_constant__ attention_maps m,
                                                            const attention_call c)
{
    extern __shared__ __align__(1024) unsigned char memory[];
    shared_slopes &s = *(shared_slopes *)memory;
    const int64_t row = (int64_t)(gridDim.y - 1 - blockIdx.y) * ROWS;
    const int head = c.first + blockIdx.x;

    if (threadIdx.x == 0) {
        begin_stages(s.full, s.empty);
        fence_async();
    }
    __syncthreads();
    divide_work([&] { if (threadIdx.x % 32 == 0) bring(m, c, s, row, head); }, [&] { gather(m, c, s, row, head); });
}

} /* namespace */

void hopper::attend_slopes(cudaStream_t stream, const attention_maps &maps, const attention_call &call)
{
    const dim3 grid((unsigned)call.count, (unsigned)((call.rows + ROWS - 1) / ROWS));

    allow_shared(slopes_kernel, sizeof(shared_slopes));
    slopes_kernel<<<grid, THREADS, sizeof(shared_slopes), stream>>>(maps, call);
}
