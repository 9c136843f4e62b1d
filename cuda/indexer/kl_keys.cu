/* dkey of a chunk (kl_selected.cuh): dkey[u] = sum over rows t and heads h of
 * slope[t,u] weight[t,h] active[t,h,u] q[t,h].
 *
 * A block has 256 keys, four warpgroups 64 each with their sums in registers, and takes every parts-th step of four
 * rows. The queries of a step, [4 * 32 heads, 128], come through the copy engine; the left operand is made in
 * registers from the entries of the slab. Steps in which no row has an entry for the keys are passed over. */
#include "device/tensor_map.cuh"
#include "grouped_gemm/tensor.cuh"
#include "indexer/kl_selected.cuh"

using namespace hopper;

namespace {

constexpr int GROUPS = KL_KEYS / 64;               /* the first also loads: a warp for it would cost registers */
constexpr int THREADS = GROUPS * 128;
constexpr int STAGES = 6, AHEAD = STAGES - 2;      /* steps between loading and using */
constexpr int DEPTH = KL_ROWS * KL_HEADS;          /* of a step's product */
constexpr uint32_t HALF_BYTES = DEPTH * 64 * 2, STAGE_BYTES = 2 * HALF_BYTES;

struct shared {
    uint64_t full[STAGES], empty[STAGES];
    uint8_t filled[KL_MOST_STEPS]; /* of this block's steps */
};
constexpr size_t SHARED_BYTES = STAGES * STAGE_BYTES + sizeof(shared) + 1024;

/* Loads the queries of this block's steps one after the other. */
struct loader {
    int next = 0, slot = 0;
    uint32_t parity = 1;

    /* the next step, once its place in the ring is free; nothing behind the last */
    __device__ __forceinline__ void load(const kl_call &c, const shared *s, uint32_t stages, int steps,
                                         const CUtensorMap *q)
    {
        while (next < steps && !s->filled[next]) next++;
        if (next >= steps) return;
        const uint32_t full = shared_address(&s->full[slot]), stage = stages + slot * STAGE_BYTES;
        const int row = (int)(c.first + ((int64_t)next * gridDim.y + blockIdx.y) * KL_ROWS) * KL_HEADS;

        barrier_wait(shared_address(&s->empty[slot]), parity);
        barrier_expect(full, STAGE_BYTES);
        load_box(stage, q, 0, row, full);
        load_box(stage + HALF_BYTES, q, 64, row, full);
        if (++slot == STAGES) slot = 0, parity ^= 1;
        next++;
    }
};

/* Slope times weights where active, as wgmma's left operand: keys x 16 heads, the heads' first 16 or last. */
__device__ __forceinline__ void make_operand(uint32_t (&a)[4], const entry (&e)[2], const float2 (&weight)[4], int half)
{
    const int quarter = threadIdx.x % 4;

#pragma unroll
    for (int key = 0; key < 2; key++)
#pragma unroll
        for (int eight = 0; eight < 2; eight++) {
            const int i = half * 2 + eight;
            const float2 w = weight[i];
            const uint32_t both = e[key].active >> (quarter * 4 + i) & 0x10001;

            a[eight * 2 + key] = pack_bf16(slope_of(e[key].slope) * w.x, slope_of(e[key].slope) * w.y) & both * 0xffff;
        }
}

__device__ __forceinline__ entry read_entry(const entry *at)
{
    const uint2 v = __ldcs((const uint2 *)at);

    return {v.x, v.y};
}

/* The entries of a step, of this lane's two keys. */
__device__ __forceinline__ void read_entries(const kl_call &c, int64_t step, int64_t key, entry (&e)[KL_ROWS][2])
{
    const int64_t stride = c.tiles * KL_KEYS;
    const entry *from = c.entries + step * KL_ROWS * stride + key;

#pragma unroll
    for (int row = 0; row < KL_ROWS; row++) {
        e[row][0] = read_entry(from + row * stride);
        e[row][1] = read_entry(from + row * stride + 8);
    }
}

__device__ __forceinline__ void sum_rows(const kl_call &c, const shared *s, uint32_t stages, int steps,
                                         const CUtensorMap *map)
{
    const int lane = threadIdx.x % 32, quarter = lane % 4;
    const int64_t key = (int64_t)blockIdx.x * KL_KEYS + threadIdx.x / 32 * 16 + lane / 4;
    int slot = 0;
    uint32_t parity = 0;
    float d[KL_WIDTH / 2] = {};
    loader ring;

    if (threadIdx.x == 0)
        for (int n = 0; n < AHEAD; n++) ring.load(c, s, stages, steps, map);
    for (int n = 0; n < steps; n++) {
        if (!s->filled[n]) continue;
        const int64_t step = (int64_t)n * gridDim.y + blockIdx.y;
        const uint32_t q = descriptor(stages + slot * STAGE_BYTES, HALF_BYTES);
        entry e[KL_ROWS][2];

        read_entries(c, step, key, e);
        if (threadIdx.x == 0) ring.load(c, s, stages, steps, map);
        __syncwarp();
        barrier_wait(shared_address(&s->full[slot]), parity);
#pragma unroll
        for (int pair = 0; pair < KL_ROWS; pair += 2) {
            uint32_t a[4][4];

#pragma unroll
            for (int row = 0; row < 2; row++) {
                const int64_t t = min(c.first + step * KL_ROWS + pair + row, c.i.rows - 1);
                float2 weight[4];

#pragma unroll
                for (int i = 0; i < 4; i++)
                    weight[i] = __ldg((const float2 *)&c.weight[t * KL_HEADS + 8 * i + 2 * quarter]);
                make_operand(a[row * 2], e[pair + row], weight, 0);
                make_operand(a[row * 2 + 1], e[pair + row], weight, 1);
            }
            mma_begin();
#pragma unroll
            for (int k = 0; k < 4; k++) add_product128<1>(d, a[k], q + (pair * 2 + k) * 128);
            mma_commit();
            mma_wait<0>();
        }
        barrier_arrive_warp(shared_address(&s->empty[slot]));
        if (++slot == STAGES) slot = 0, parity ^= 1;
    }
    settle(d);
    float *to = c.part + (blockIdx.y * c.tiles * KL_KEYS + key) * KL_WIDTH + 2 * quarter;
#pragma unroll
    for (int i = 0; i < KL_WIDTH / 2; i += 2)
        *(float2 *)&to[i / 2 % 2 * 8 * KL_WIDTH + i / 4 * 8] = {d[i], d[i + 1]};
}

__global__ __launch_bounds__(THREADS, 1) void keys_kernel(const __grid_constant__ CUtensorMap q, const kl_call c)
{
    extern __shared__ char memory[];
    const uint32_t base = shared_address(memory), stages = (base + 1023) & ~1023u;
    shared *s = (shared *)(memory + (stages + STAGES * STAGE_BYTES - base));
    const int steps = (int)((c.steps - blockIdx.y + gridDim.y - 1) / gridDim.y);

    for (int n = threadIdx.x; n < steps; n += THREADS)
        s->filled[n] = c.filled[blockIdx.x * c.steps + (int64_t)n * gridDim.y + blockIdx.y];
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(shared_address(&s->full[i]), 1);
            barrier_init(shared_address(&s->empty[i]), GROUPS * 4);
        }
        fence_barrier_init();
    }
    __syncthreads();
    sum_rows(c, s, stages, steps, &q);
}

/* dkey (+)= the parts in their order. */
__global__ void add_parts_kernel(const kl_call c)
{
    const int64_t count = c.i.keys * KL_WIDTH / 4, apart = c.tiles * KL_KEYS * KL_WIDTH / 4;

    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < count; i += (int64_t)gridDim.x * blockDim.x) {
        float4 sum = c.first ? ((const float4 *)c.dkey)[i] : float4{};

        for (int part = 0; part < c.parts; part++) {
            const float4 x = ((const float4 *)c.part)[part * apart + i];

            sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
        }
        ((float4 *)c.dkey)[i] = sum;
    }
}

} /* namespace */

void kl_keys(cuda_device *d, const kl_call &c)
{
    CUtensorMap q;

    if (!map_bf16_rows(&q, c.q, c.i.rows * KL_HEADS, KL_WIDTH, DEPTH))
        return record_error(d, cudaErrorNotSupported, "index_kl_selected");
    allow_shared(keys_kernel, SHARED_BYTES);
    keys_kernel<<<dim3((unsigned)c.tiles, (unsigned)c.parts), THREADS, SHARED_BYTES, d->stream>>>(q, c);
    add_parts_kernel<<<blocks_for(d, c.i.keys * KL_WIDTH / 4, 256), 256, 0, d->stream>>>(c);
}
