/* dk and dv of 64 keys of one head: the rows that see them pass by in tiles of 64, brought by a warp that does nothing
 * else. One warpgroup makes P^T = exp(k q^T - lse) and dv += P^T dout, and leaves P^T to the other, which makes
 * dS^T = P^T (v dout^T - delta) scale and dk += dS^T q: two products of each kind for either. dS^T goes to memory for
 * dq. */
#include "attention/hopper.cuh"

namespace {

using namespace hopper;

constexpr int STAGES = 2, THREADS = 3 * WARPGROUP;
constexpr int HELD = 4; /* steps of k and v in registers: 8 are no faster, 12 slower */

/* A tile of rows, in two halves that come and go by themselves: one warpgroup begins with q and ends with dout, the
 * other begins with dout and ends with q. */
struct shared_keys {
    unsigned char k[TILE_BYTES], v[TILE_BYTES], q[STAGES][TILE_BYTES], dout[STAGES][TILE_BYTES];
    unsigned char slope[SLOPE_BYTES]; /* dS^T on its way out */
    float4 p[8][WARPGROUP];           /* P^T, as its threads hold it */
    tile_facts tile[STAGES];          /* these come with q, */
    float lse[STAGES][TILE];
    float delta[STAGES][TILE];        /* and this with dout */
    uint64_t keys_full, q_full[STAGES], q_empty[STAGES], dout_full[STAGES], dout_empty[STAGES];
};

/* Warps of the two warpgroups meet at barriers of their own, of which the hardware has 16. */
enum meeting { EVERYBODY = 1, VALUES, KEYS, P_FULL, P_EMPTY = P_FULL + 4 };

/* The tiles of rows of which some see some keys of a tile, in order; for a whole warp. */
struct visitors {
    int first;
    uint32_t wanted;
};

__device__ __forceinline__ visitors visitors_before() { return {-32, 0}; }

/* The number of the next tile, or -1. */
__device__ __forceinline__ int next_visitor(const attention_call &c, visitors &v, int64_t key)
{
    const int tiles = (int)((c.rows + TILE - 1) / TILE);

    while (!v.wanted) {
        v.first += 32;
        if (v.first >= tiles) return -1;
        const int mine = v.first + threadIdx.x % 32;
        const range seen = mine < tiles ? c.seen[mine] : range{0, 0};

        v.wanted = __ballot_sync(~0u, seen.low < key + TILE && seen.high > key);
    }
    const int tile = v.first + __ffs(v.wanted) - 1;

    v.wanted &= v.wanted - 1;
    return tile;
}

/* One warp: the keys, then the rows that see them. */
__device__ void bring(const attention_maps &m, const attention_call &c, shared_keys &s, int64_t key, int head)
{
    const head_facts *const facts = c.of_head + head * ((c.rows + TILE - 1) / TILE);
    const int lane = threadIdx.x % 32;
    visitors v = visitors_before();
    uint32_t count = 0;

    if (lane == 0) {
        barrier_expect(shared_address(&s.keys_full), 2 * TILE_BYTES);
        load_tile(shared_address(s.k), &m.k, key, head, shared_address(&s.keys_full));
        load_tile(shared_address(s.v), &m.v, key, head, shared_address(&s.keys_full));
    }
    for (int tile; (tile = next_visitor(c, v, key)) >= 0; count++) {
        const int stage = count % STAGES;
        const uint32_t q_full = shared_address(&s.q_full[stage]), dout_full = shared_address(&s.dout_full[stage]);
        const uint32_t parity = ~(count / STAGES) & 1;

        if (lane == 0) {
            barrier_wait(shared_address(&s.q_empty[stage]), parity);
            barrier_expect(q_full, TILE_BYTES + sizeof(tile_facts) + sizeof facts->lse);
            load_tile(shared_address(s.q[stage]), &m.q, tile * TILE, head, q_full);
            load_bytes(shared_address(&s.tile[stage]), c.of_tile + tile, sizeof(tile_facts), q_full);
            load_bytes(shared_address(s.lse[stage]), facts[tile].lse, sizeof facts->lse, q_full);
            barrier_wait(shared_address(&s.dout_empty[stage]), parity);
            barrier_expect(dout_full, TILE_BYTES + sizeof facts->delta);
            load_tile(shared_address(s.dout[stage]), &m.dout, tile * TILE, head, dout_full);
            load_bytes(shared_address(s.delta[stage]), facts[tile].delta, sizeof facts->delta, dout_full);
        }
        __syncwarp();
    }
}

/* dot becomes P^T: rows of the accumulator are keys, its columns rows of the tile. */
__device__ __forceinline__ void probabilities(float (&dot)[32], const float *lse_of, const tile_facts &f, float scale,
                                              int64_t key)
{
    const int column = fragment_column();
    const int first = (int)key + fragment_row();
    const bool whole = f.latest <= key && f.earliest >= key + TILE;

#pragma unroll
    for (int i = 0; i < 32; i += 4) {
        const int at = 2 * i + column;
        const float2 lse = *(const float2 *)&lse_of[at];

        dot[i] = exp2_fast(dot[i] * scale - lse.x);
        dot[i + 1] = exp2_fast(dot[i + 1] * scale - lse.y);
        dot[i + 2] = exp2_fast(dot[i + 2] * scale - lse.x);
        dot[i + 3] = exp2_fast(dot[i + 3] * scale - lse.y);
        if (whole) continue;
        const int2 start = *(const int2 *)&f.start[at], end = *(const int2 *)&f.end[at];
        if (first < start.x || first >= end.x) dot[i] = 0;
        if (first < start.y || first >= end.y) dot[i + 1] = 0;
        if (first + 8 < start.x || first + 8 >= end.x) dot[i + 2] = 0;
        if (first + 8 < start.y || first + 8 >= end.y) dot[i + 3] = 0;
    }
}

__device__ void values(const attention_maps &m, const attention_call &c, shared_keys &s, int64_t key, int head)
{
    const int warp = threadIdx.x % WARPGROUP / 32;
    visitors v = visitors_before();
    float sum[128] = {};
    uint32_t count = 0, held[HELD][4];

    barrier_wait(shared_address(&s.keys_full), 0);
    hold(held, shared_address(s.k));
    for (; next_visitor(c, v, key) >= 0; count++) {
        const int stage = count % STAGES;
        float p[32];
        uint32_t operand[4][4];

        barrier_wait(shared_address(&s.q_full[stage]), count / STAGES & 1);
        multiply_held(p, held, shared_address(s.k), shared_address(s.q[stage]));
        mma_wait<1>();
        if (count) barrier_arrive_warp(shared_address(&s.dout_empty[(count - 1) % STAGES]));
        mma_wait<0>();
        settle(p);
        probabilities(p, s.lse[stage], s.tile[stage], c.scale * LOG2_E, key);
        barrier_arrive_warp(shared_address(&s.q_empty[stage]));
        if (count) named_barrier(P_EMPTY + warp, 64);
#pragma unroll
        for (int i = 0; i < 8; i++)
            s.p[i][threadIdx.x % WARPGROUP] = make_float4(p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3]);
        named_arrive(P_FULL + warp, 64);
        to_operand(p, operand);
        barrier_wait(shared_address(&s.dout_full[stage]), count / STAGES & 1);
        multiply_by_tile(sum, operand, shared_address(s.dout[stage]));
    }
    if (count) named_barrier(P_EMPTY + warp, 64);
    mma_wait<0>();
    settle(sum);
    named_barrier(EVERYBODY, 2 * WARPGROUP); /* v is not read any more */
    store_tile(sum, shared_address(s.v), &m.dv, key, head, VALUES);
}

/* dS^T of a warp's 16 keys, which lie in a row, to memory. */
__device__ __forceinline__ void store_slopes(const attention_call &c, shared_keys &s, const uint32_t (&slope)[4][4],
                                             int tile, int64_t key, int head)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x % WARPGROUP / 32, half = lane / 16;
    const uint32_t bytes = SLOPE_BYTES / 4, from = shared_address(s.slope), line = warp * 16 + lane % 16;

    if (lane == 0) boxes_read<0>(); /* the tile before has left */
    __syncwarp();
#pragma unroll
    for (int step = 0; step < 4; step++)
        store_matrices(from + line * 128 + (((step * 2 + half) ^ line % 8) << 4), slope[step][0], slope[step][1],
                       slope[step][2], slope[step][3]);
    fence_async();
    __syncwarp();
    if (lane == 0) {
        store_bytes(slope_at(c, head - c.first, (int64_t)tile * TILE, key) + warp * bytes, from + warp * bytes, bytes);
        boxes_commit();
    }
}

__device__ void keys(const attention_maps &m, const attention_call &c, shared_keys &s, int64_t key, int head)
{
    const int warp = threadIdx.x % WARPGROUP / 32, column = fragment_column();
    visitors v = visitors_before();
    float sum[128] = {};
    uint32_t count = 0, held[HELD][4];

    barrier_wait(shared_address(&s.keys_full), 0);
    hold(held, shared_address(s.v));
    for (int tile; (tile = next_visitor(c, v, key)) >= 0; count++) {
        const int stage = count % STAGES;
        float slope[32];
        uint32_t operand[4][4];

        barrier_wait(shared_address(&s.dout_full[stage]), count / STAGES & 1);
        multiply_held(slope, held, shared_address(s.v), shared_address(s.dout[stage]));
        mma_wait<1>();
        if (count) barrier_arrive_warp(shared_address(&s.q_empty[(count - 1) % STAGES]));
        mma_wait<0>();
        settle(slope);
        named_barrier(P_FULL + warp, 64);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float4 p = s.p[i][threadIdx.x % WARPGROUP];
            const float2 delta = *(const float2 *)&s.delta[stage][8 * i + column];

            slope[4 * i] = p.x * (slope[4 * i] - delta.x) * c.scale;
            slope[4 * i + 1] = p.y * (slope[4 * i + 1] - delta.y) * c.scale;
            slope[4 * i + 2] = p.z * (slope[4 * i + 2] - delta.x) * c.scale;
            slope[4 * i + 3] = p.w * (slope[4 * i + 3] - delta.y) * c.scale;
        }
        named_arrive(P_EMPTY + warp, 64);
        barrier_arrive_warp(shared_address(&s.dout_empty[stage]));
        to_operand(slope, operand);
        barrier_wait(shared_address(&s.q_full[stage]), count / STAGES & 1);
        multiply_by_tile(sum, operand, shared_address(s.q[stage]));
        if (c.slopes) store_slopes(c, s, operand, tile, key, head);
    }
    mma_wait<0>();
    settle(sum);
    named_barrier(EVERYBODY, 2 * WARPGROUP); /* nor is k */
    store_tile(sum, shared_address(s.k), &m.dk, key, head, KEYS);
    if (threadIdx.x % 32 == 0) boxes_written();
}

/* blockIdx: head; tile of keys, early ones first, which most rows see. */
__global__ __launch_bounds__(THREADS, 1) void keys_kernel(const __grid_constant__ attention_maps m,
                                                          const attention_call c)
{
    extern __shared__ __align__(1024) unsigned char memory[];
    shared_keys &s = *(shared_keys *)memory;
    const int64_t key = (int64_t)blockIdx.y * TILE;
    const int head = c.first + blockIdx.x;

    if (threadIdx.x == 0) {
        barrier_init(shared_address(&s.keys_full), 1);
        begin_stages(s.q_full, s.q_empty);
        begin_stages(s.dout_full, s.dout_empty);
        fence_async();
    }
    __syncthreads();
    divide_work([&] { bring(m, c, s, key, head); },
                [&] {
                    if (threadIdx.x < WARPGROUP)
                        values(m, c, s, key, head);
                    else
                        keys(m, c, s, key, head);
                });
}

} /* namespace */

void hopper::attend_keys(cudaStream_t stream, const attention_maps &maps, const attention_call &call)
{
    const dim3 grid((unsigned)call.count, (unsigned)((call.keys + TILE - 1) / TILE));

    allow_shared(keys_kernel, sizeof(shared_keys));
    keys_kernel<<<grid, THREADS, sizeof(shared_keys), stream>>>(maps, call);
}
