/* dkey of a chunk (kl_dense.cuh).
 *
 * A block has 256 keys, four warpgroups 64 each with their sums in registers, and takes every parts-th step of four
 * rows. The queries of a step, [4 * 32 heads, 128], come through the copy engine; the left operand is made in
 * registers from the slabs and the weights of the heads. Steps in which no row sees any of the keys are passed over. */
#include "device/tensor_map.cuh"
#include "grouped_gemm/tensor.cuh"
#include "indexer/kl_dense.cuh"

using namespace hopper;

namespace {

constexpr int GROUPS = DENSE_KEYS / 64, /* the first also loads: a warp for it would cost registers */
              THREADS = GROUPS * 128;
constexpr int ROWS = 4;                                         /* of a step */
constexpr int STAGES = 6, AHEAD = STAGES - 2;                   /* steps between loading and using */
constexpr int DEPTH = ROWS * DENSE_HEADS;                       /* of a step's product */
constexpr uint32_t HALF_BYTES = DEPTH * 64 * 2, STAGE_BYTES = 2 * HALF_BYTES;
constexpr size_t SHARED_BYTES = STAGES * STAGE_BYTES + 2 * STAGES * sizeof(uint64_t) + 1024;

/* blockIdx: part, tile of keys. */
__device__ __forceinline__ bool sees(const dense_slopes &x, int64_t step)
{
    const int2 seen = __ldg((const int2 *)&x.seen[step * ROWS / DENSE_GROUP]);
    const int64_t key = (int64_t)blockIdx.y * DENSE_KEYS;

    return seen.x < key + DENSE_KEYS && seen.y > key;
}

/* Loads the queries of this block's steps one after the other. */
struct loader {
    uint32_t stages, full, empty, slot = 0, parity = 1;
    int64_t next;

    /* the next step, once its place in the ring is free; nothing behind the last */
    __device__ __forceinline__ void load(const dense_slopes &x, int64_t steps, const CUtensorMap *q)
    {
        while (next < steps && !sees(x, next)) next += gridDim.x;
        if (next >= steps) return;
        const uint32_t at = full + slot * 8, stage = stages + slot * STAGE_BYTES;
        const int row = (int)(x.first + next * ROWS) * DENSE_HEADS;

        barrier_wait(empty + slot * 8, parity);
        barrier_expect(at, STAGE_BYTES);
        load_box(stage, q, 0, row, at);
        load_box(stage + HALF_BYTES, q, 64, row, at);
        if (++slot == STAGES) slot = 0, parity ^= 1;
        next += gridDim.x;
    }
};

/* Slopes and active heads of a row's two keys of a lane. */
struct two_keys {
    float slope[2];
    uint32_t active[2];
};

__device__ __forceinline__ void read_keys(const dense_slopes &x, int64_t step, int64_t key, two_keys (&e)[ROWS])
{
#pragma unroll
    for (int row = 0; row < ROWS; row++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int64_t at = (step * ROWS + row) * x.stride + key + 8 * i;

            e[row].slope[i] = __ldcs(x.slope + at);
            e[row].active[i] = __ldcs(x.active + at);
        }
}

/* Slope times weights where active: keys x 16 heads, the heads' first 16 or last. */
__device__ __forceinline__ void make_operand(const two_keys &e, const float2 (&weight)[4], int half, uint32_t (&a)[4])
{
    const int quarter = threadIdx.x % 4;

#pragma unroll
    for (int key = 0; key < 2; key++)
#pragma unroll
        for (int eight = 0; eight < 2; eight++) {
            const int i = half * 2 + eight;
            const uint32_t both = e.active[key] >> (quarter * 4 + i) & 0x10001;

            a[eight * 2 + key] = pack_bf16(e.slope[key] * weight[i].x, e.slope[key] * weight[i].y) & both * 0xffff;
        }
}

__device__ __forceinline__ void add_row(const dense_slopes &x, int64_t row, const two_keys &e, uint32_t q,
                                        float (&sum)[64])
{
    const int64_t t = min(x.first + row, x.all_rows - 1);
    uint32_t a[2][4];
    float2 weight[4];

#pragma unroll
    for (int i = 0; i < 4; i++)
        weight[i] = __ldg((const float2 *)&x.weight[t * DENSE_HEADS + 8 * i + threadIdx.x % 4 * 2]);
    make_operand(e, weight, 0, a[0]);
    make_operand(e, weight, 1, a[1]);
    mma_begin();
#pragma unroll
    for (int half = 0; half < 2; half++) add_product128<1>(sum, a[half], q + half * 128);
    mma_commit();
    mma_wait<0>();
}

__global__ __launch_bounds__(THREADS, 1) void keys_kernel(const __grid_constant__ CUtensorMap q, const dense_slopes x)
{
    extern __shared__ char memory[];
    const uint32_t base = shared_address(memory), stages = (base + 1023) & ~1023u, full = stages + STAGES * STAGE_BYTES;
    const uint32_t empty = full + STAGES * 8;
    const int64_t steps = (x.rows + ROWS - 1) / ROWS;
    const int64_t key = (int64_t)blockIdx.y * DENSE_KEYS + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    loader ring = {stages, full, empty};
    uint32_t slot = 0, parity = 0;
    float sum[64] = {};

    ring.next = blockIdx.x;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(full + i * 8, 1);
            barrier_init(empty + i * 8, GROUPS * 4);
        }
        fence_barrier_init();
        for (int n = 0; n < AHEAD; n++) ring.load(x, steps, &q);
    }
    __syncthreads();
    for (int64_t step = blockIdx.x; step < steps; step += gridDim.x) {
        if (!sees(x, step)) continue;
        const uint32_t b = descriptor(stages + slot * STAGE_BYTES, HALF_BYTES);
        two_keys e[ROWS];

        read_keys(x, step, key, e);
        if (threadIdx.x == 0) ring.load(x, steps, &q);
        __syncwarp();
        barrier_wait(full + slot * 8, parity);
#pragma unroll
        for (int row = 0; row < ROWS; row++) add_row(x, step * ROWS + row, e[row], b + row * 256, sum);
        barrier_arrive_warp(empty + slot * 8);
        if (++slot == STAGES) slot = 0, parity ^= 1;
    }
    settle(sum);
    float *to = x.part + ((int64_t)blockIdx.x * gridDim.y * DENSE_KEYS + key) * DENSE_WIDTH + threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < 64; i += 2)
        *(float2 *)&to[i / 2 % 2 * 8 * DENSE_WIDTH + i / 4 * 8] = {sum[i], sum[i + 1]};
}

/* dkey (+)= the parts in their order. */
__global__ void add_parts_kernel(const dense_slopes x)
{
    const int64_t count = x.keys * DENSE_WIDTH / 4, apart = x.stride * DENSE_WIDTH / 4;

    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < count; i += (int64_t)gridDim.x * blockDim.x) {
        float4 sum = x.first ? ((const float4 *)x.dkey)[i] : float4{};

        for (int part = 0; part < x.parts; part++) {
            const float4 y = ((const float4 *)x.part)[part * apart + i];

            sum.x += y.x, sum.y += y.y, sum.z += y.z, sum.w += y.w;
        }
        ((float4 *)x.dkey)[i] = sum;
    }
}

} /* namespace */

void dense_keys(cuda_device *d, const dense_slopes &x)
{
    CUtensorMap q;

    if (!map_bf16_rows(&q, x.q, x.all_rows * DENSE_HEADS, DENSE_WIDTH, DEPTH))
        return record_error(d, cudaErrorNotSupported, "index_kl_dense");
    allow_shared(keys_kernel, SHARED_BYTES);
    keys_kernel<<<dim3((unsigned)x.parts, (unsigned)divided(x.keys, DENSE_KEYS)), THREADS, SHARED_BYTES, d->stream>>>(
        q, x);
    add_parts_kernel<<<blocks_for(d, x.keys * DENSE_WIDTH / 4, 256), 256, 0, d->stream>>>(x);
}
