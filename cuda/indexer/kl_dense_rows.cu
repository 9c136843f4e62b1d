/* dq and dweight of a chunk (kl_dense.cuh).
 *
 * A block has 8 rows, four warpgroups two each: 64 rows of the product are 2 rows of 32 heads. Keys stream through
 * shared memory, 64 at a time; the left operand, slopes where a head is active, is made in registers from the slabs.
 * dweight needs no dots either: sum_u slope[u] relu(q[h] . key[u]) = q[h] . sum_u slope[u] active[h,u] key[u]. */
#include "device/tensor_map.cuh"
#include "grouped_gemm/tensor.cuh"
#include "indexer/kl_dense.cuh"

using namespace hopper;

namespace {

constexpr int GROUPS = 4, THREADS = GROUPS * 128; /* the first also loads: a warp for it would cost registers */
constexpr int KEYS = 64;                          /* of a stage */
constexpr int PIECE = 32;                         /* keys whose slopes are in registers */
constexpr int STAGES = 8, AHEAD = STAGES - 2;
constexpr uint32_t HALF_BYTES = KEYS * 64 * 2, STAGE_BYTES = 2 * HALF_BYTES;
constexpr size_t SHARED_BYTES = STAGES * STAGE_BYTES + 2 * STAGES * sizeof(uint64_t) + 1024;

static_assert(2 * GROUPS == DENSE_GROUP, "a block has the rows of a range");

/* Slopes and active heads of a lane's keys: 16 s + 2 c, 1 more, 8 and 9 more. */
struct piece {
    float2 slope[PIECE / 16][2];
    uint2 active[PIECE / 16][2];
};

__device__ __forceinline__ void read_piece(const float *slope, const uint32_t *active, piece &p)
{
#pragma unroll
    for (int s = 0; s < PIECE / 16; s++)
#pragma unroll
        for (int eight = 0; eight < 2; eight++) {
            p.slope[s][eight] = __ldg((const float2 *)(slope + s * 16 + eight * 8));
            p.active[s][eight] = __ldg((const uint2 *)(active + s * 16 + eight * 8));
        }
}

/* Rows of the operand: heads `shift` says, and eight further on, whose bit is the next one. */
__device__ __forceinline__ void make_operand(const piece &p, int s, int shift, uint32_t (&a)[4])
{
#pragma unroll
    for (int eight = 0; eight < 2; eight++) {
        const uint32_t both = pack_bf16(p.slope[s][eight].x, p.slope[s][eight].y);
        const uint32_t heads = (p.active[s][eight].x >> shift & 3) | (p.active[s][eight].y >> shift & 3) << 16;

#pragma unroll
        for (int i = 0; i < 2; i++) a[eight * 2 + i] = both & (heads >> i & 0x10001) * 0xffff;
    }
}

struct ring {
    uint32_t stages, full, empty, slot = 0, parity = 0;

    __device__ __forceinline__ void next()
    {
        if (++slot == STAGES) slot = 0, parity ^= 1;
    }
};

__device__ __forceinline__ void load(ring &r, const CUtensorMap *keys, int64_t key)
{
    const uint32_t full = r.full + r.slot * 8, stage = r.stages + r.slot * STAGE_BYTES;

    barrier_wait(r.empty + r.slot * 8, r.parity ^ 1);
    barrier_expect(full, STAGE_BYTES);
    load_box(stage, keys, 0, (int)key, full);
    load_box(stage + HALF_BYTES, keys, 64, (int)key, full);
    r.next();
}

/* sum[64, 128] over the keys from `low` to `high`, multiples of KEYS. */
__device__ __forceinline__ void sum_keys(const dense_slopes &x, const ring &fresh, const CUtensorMap *keys, int64_t row,
                                         int64_t low, int64_t high, float (&sum)[64])
{
    const int lane = threadIdx.x % 32, head = threadIdx.x / 32 % 2 * 16 + lane / 4;
    const int shift = active_bit(head);
    const float *slope = x.slope + row * x.stride + lane % 4 * 2;
    const uint32_t *active = x.active + row * x.stride + lane % 4 * 2;
    ring use = fresh, brought = fresh;
    int64_t next = low; /* to be loaded */
    piece p;

    if (low >= high) return;
    if (threadIdx.x == 0)
        for (int n = 0; n < AHEAD && next < high; n++, next += KEYS) load(brought, keys, next);
    read_piece(slope + low, active + low, p);
    for (int64_t key = low; key < high; key += KEYS) {
        const uint32_t b = descriptor(use.stages + use.slot * STAGE_BYTES, HALF_BYTES);

        if (threadIdx.x == 0 && next < high) {
            load(brought, keys, next);
            next += KEYS;
        }
        __syncwarp();
        barrier_wait(use.full + use.slot * 8, use.parity);
#pragma unroll
        for (int half = 0; half < KEYS / PIECE; half++) {
            uint32_t a[PIECE / 16][4];
            const int64_t after = key + (half + 1) * PIECE;

#pragma unroll
            for (int s = 0; s < PIECE / 16; s++) make_operand(p, s, shift, a[s]);
            if (after < high) read_piece(slope + after, active + after, p);
            mma_begin();
#pragma unroll
            for (int s = 0; s < PIECE / 16; s++) add_product128<1>(sum, a[s], b + (half * (PIECE / 16) + s) * 128);
            mma_commit();
            mma_wait<0>();
        }
        barrier_arrive_warp(use.empty + use.slot * 8);
        use.next();
    }
    settle(sum);
}

__device__ __forceinline__ void write_gradients(const dense_slopes &x, int64_t row, const float (&sum)[64])
{
    const int lane = threadIdx.x % 32;

#pragma unroll
    for (int eight = 0; eight < 2; eight++) {
        const int head = threadIdx.x / 32 % 2 * 16 + eight * 8 + lane / 4;
        const int64_t at = (x.first + row) * DENSE_HEADS + head;
        const float weight = x.weight[at];
        const bf16 *q = x.q + at * DENSE_WIDTH + lane % 4 * 2;
        bf16 *dq = x.dq + at * DENSE_WIDTH + lane % 4 * 2;
        float dweight = 0;

#pragma unroll
        for (int i = 0; i < DENSE_WIDTH / 8; i++) {
            const float a = sum[i * 4 + eight * 2], b = sum[i * 4 + eight * 2 + 1];
            const uint32_t both = __ldg((const uint32_t *)(q + i * 8));

            dweight += __uint_as_float(both << 16) * a + __uint_as_float(both & 0xffff0000) * b;
            *(uint32_t *)(dq + i * 8) = pack_bf16(weight * a, weight * b);
        }
        dweight += __shfl_xor_sync(~0u, dweight, 1);
        dweight += __shfl_xor_sync(~0u, dweight, 2);
        if (lane % 4 == 0) x.dweight[at] = dweight;
    }
}

/* blockIdx: group of rows, from the last, which sees most keys in causal attention. */
__global__ __launch_bounds__(THREADS, 1) void rows_kernel(const __grid_constant__ CUtensorMap keys,
                                                          const dense_slopes x)
{
    extern __shared__ char memory[];
    const uint32_t base = shared_address(memory), stages = (base + 1023) & ~1023u,
                   barriers = stages + STAGES * STAGE_BYTES;
    const ring fresh = {stages, barriers, barriers + STAGES * 8};
    const int64_t group = gridDim.x - 1 - (int64_t)blockIdx.x, row = group * DENSE_GROUP + threadIdx.x / 64;
    const range seen = x.seen[group];
    float sum[64] = {};

    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(fresh.full + i * 8, 1);
            barrier_init(fresh.empty + i * 8, GROUPS * 4);
        }
        fence_barrier_init();
    }
    __syncthreads();
    sum_keys(x, fresh, &keys, row, seen.low / KEYS * KEYS, (int64_t)(seen.high + KEYS - 1) / KEYS * KEYS, sum);
    if (row < x.rows) write_gradients(x, row, sum);
}

} /* namespace */

void dense_rows(cuda_device *d, const dense_slopes &x)
{
    CUtensorMap keys;

    if (!map_bf16_rows(&keys, x.key, x.keys, DENSE_WIDTH, KEYS))
        return record_error(d, cudaErrorNotSupported, "index_kl_dense");
    allow_shared(rows_kernel, SHARED_BYTES);
    rows_kernel<<<(unsigned)divided(x.rows, DENSE_GROUP), THREADS, SHARED_BYTES, d->stream>>>(keys, x);
}
