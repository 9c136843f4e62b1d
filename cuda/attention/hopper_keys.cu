/* dk and dv of 64 keys of one head: the rows that see them pass by in tiles of 64, brought by a warp that does nothing else.
 * One warpgroup makes P^T = exp(k q^T - lse) and dv += P^T dout, and leaves P^T to the other, which makes
 * dS^T = P^T (v dout^T - delta) scale and dk += dS^T q: two products of each kind for either. */
#include "attention/hopper.cuh"

namespace {

using namespace hopper;

constexpr int STAGES = 2, THREADS = 3 * WARPGROUP;

/* What goes with a tile of rows. */
struct row_facts {
    float lse[TILE], delta[TILE]; /* lse times log2 e */
    int start[TILE], end[TILE];
    int more;                     /* 0: there is no tile, this was the last */
    int whole;                    /* every row sees every key, or nothing */
};

struct shared_keys {
    unsigned char k[TILE_BYTES], v[TILE_BYTES];
    struct {
        unsigned char q[TILE_BYTES], dout[TILE_BYTES];
    } rows[STAGES];
    float4 p[8][WARPGROUP]; /* P^T, as its threads hold it */
    row_facts facts[STAGES];
    uint64_t keys_full, full[STAGES], empty[STAGES], p_full[4], p_empty[4];
};

__device__ __forceinline__ void describe_rows(const attention_call &c, row_facts *to, int64_t row, int64_t key, int head)
{
    const int lane = threadIdx.x % 32;
    bool whole = true;

#pragma unroll
    for (int r = lane; r < TILE; r += 32) {
        const int64_t t = row + r;
        const bool here = t < c.rows;
        const float lse = here ? c.lse[t * c.heads + head] : INFINITY;
        const int start = here ? c.start[t] : 0, end = here ? c.end[t] : 0;

        to->lse[r] = lse * LOG2_E;
        to->delta[r] = here ? c.delta[t * c.heads + head] : 0;
        to->start[r] = start;
        to->end[r] = end;
        whole = whole && (lse == INFINITY || (start <= key && end >= key + TILE));
    }
    whole = __all_sync(~0u, whole);
    if (lane == 0) {
        to->more = 1;
        to->whole = whole;
    }
}

/* One warp: the keys, then every tile of rows of which some see some of them. */
__device__ void bring(const attention_maps &m, const attention_call &c, shared_keys &s, int64_t key, int head)
{
    const int64_t tiles = (c.rows + TILE - 1) / TILE;
    const int lane = threadIdx.x % 32;
    uint32_t count = 0;

    if (lane == 0) {
        barrier_expect(shared_address(&s.keys_full), 2 * TILE_BYTES);
        load_tile(shared_address(s.k), &m.k, key, head, shared_address(&s.keys_full));
        load_tile(shared_address(s.v), &m.v, key, head, shared_address(&s.keys_full));
    }
    for (int64_t first = 0; first < tiles; first += 32) {
        const int64_t mine = first + lane;
        const range seen = mine < tiles ? c.seen[mine] : range{0, 0};
        uint32_t wanted = __ballot_sync(~0u, seen.low < key + TILE && seen.high > key);

        for (; wanted; wanted &= wanted - 1, count++) {
            const int64_t row = (first + __ffs(wanted) - 1) * TILE;
            const int stage = count % STAGES;
            const uint32_t full = shared_address(&s.full[stage]);

            barrier_wait(shared_address(&s.empty[stage]), ~(count / STAGES) & 1);
            if (lane == 0) {
                barrier_expect(full, 2 * TILE_BYTES);
                load_tile(shared_address(s.rows[stage].q), &m.q, row, head, full);
                load_tile(shared_address(s.rows[stage].dout), &m.dout, row, head, full);
            }
            describe_rows(c, &s.facts[stage], row, key, head);
            barrier_arrive_warp(full);
        }
    }
    barrier_wait(shared_address(&s.empty[count % STAGES]), ~(count / STAGES) & 1);
    if (lane == 0) {
        s.facts[count % STAGES].more = 0;
        barrier_arrive(shared_address(&s.full[count % STAGES]));
        barrier_arrive(shared_address(&s.full[count % STAGES]));
    }
}

/* dot becomes P^T: rows of the accumulator are keys, its columns rows of the tile. */
__device__ __forceinline__ void probabilities(float (&dot)[32], const row_facts &f, float scale, int64_t key)
{
    const int column = fragment_column();
    const int first = (int)key + fragment_row();

#pragma unroll
    for (int i = 0; i < 32; i += 4) {
        const int at = 2 * i + column;
        const float2 lse = *(const float2 *)&f.lse[at];

        dot[i] = exp2_fast(dot[i] * scale - lse.x);
        dot[i + 1] = exp2_fast(dot[i + 1] * scale - lse.y);
        dot[i + 2] = exp2_fast(dot[i + 2] * scale - lse.x);
        dot[i + 3] = exp2_fast(dot[i + 3] * scale - lse.y);
        if (f.whole) continue;
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
    float sum[128] = {};
    uint32_t count = 0;

    barrier_wait(shared_address(&s.keys_full), 0);
    for (;; count++) {
        const int stage = count % STAGES;
        float p[32];
        uint32_t operand[4][4];

        barrier_wait(shared_address(&s.full[stage]), count / STAGES & 1);
        if (!s.facts[stage].more) break;
        multiply_tiles(p, shared_address(s.k), shared_address(s.rows[stage].q));
        mma_wait<0>();
        settle(p);
        if (count) barrier_arrive_warp(shared_address(&s.empty[(count - 1) % STAGES]));
        probabilities(p, s.facts[stage], c.scale * LOG2_E, key);
        barrier_wait(shared_address(&s.p_empty[warp]), ~count & 1);
#pragma unroll
        for (int i = 0; i < 8; i++)
            s.p[i][threadIdx.x % WARPGROUP] = make_float4(p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3]);
        barrier_arrive_warp(shared_address(&s.p_full[warp]));
        to_operand(p, operand);
        multiply_by_tile(sum, operand, shared_address(s.rows[stage].dout));
    }
    mma_wait<0>();
    settle(sum);
    named_barrier(1, 2 * WARPGROUP); /* v is not read any more */
    store_tile(sum, shared_address(s.v), &m.dv, key, head, 2);
}

__device__ void keys(const attention_maps &m, const attention_call &c, shared_keys &s, int64_t key, int head)
{
    const int warp = threadIdx.x % WARPGROUP / 32, column = fragment_column();
    float sum[128] = {};
    uint32_t count = 0;

    barrier_wait(shared_address(&s.keys_full), 0);
    for (;; count++) {
        const int stage = count % STAGES;
        float slope[32];
        uint32_t operand[4][4];

        barrier_wait(shared_address(&s.full[stage]), count / STAGES & 1);
        if (!s.facts[stage].more) break;
        multiply_tiles(slope, shared_address(s.v), shared_address(s.rows[stage].dout));
        mma_wait<0>();
        settle(slope);
        if (count) barrier_arrive_warp(shared_address(&s.empty[(count - 1) % STAGES]));
        barrier_wait(shared_address(&s.p_full[warp]), count & 1);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float4 p = s.p[i][threadIdx.x % WARPGROUP];
            const float2 delta = *(const float2 *)&s.facts[stage].delta[8 * i + column];

            slope[4 * i] = p.x * (slope[4 * i] - delta.x) * c.scale;
            slope[4 * i + 1] = p.y * (slope[4 * i + 1] - delta.y) * c.scale;
            slope[4 * i + 2] = p.z * (slope[4 * i + 2] - delta.x) * c.scale;
            slope[4 * i + 3] = p.w * (slope[4 * i + 3] - delta.y) * c.scale;
        }
        barrier_arrive_warp(shared_address(&s.p_empty[warp]));
        to_operand(slope, operand);
        multiply_by_tile(sum, operand, shared_address(s.rows[stage].q));
    }
    mma_wait<0>();
    settle(sum);
    named_barrier(1, 2 * WARPGROUP); /* nor is k */
    store_tile(sum, shared_address(s.k), &m.dk, key, head, 3);
}

/* blockIdx: tile of keys, early ones first, which most rows see; head. */
__global__ __launch_bounds__(THREADS, 1) void keys_kernel(const __grid_constant__ attention_maps m, const attention_call c)
{
    extern __shared__ __align__(1024) unsigned char memory[];
    shared_keys &s = *(shared_keys *)memory;
    const int64_t key = (int64_t)blockIdx.x * TILE;
    const int head = blockIdx.y;

    if (threadIdx.x == 0) {
        barrier_init(shared_address(&s.keys_full), 1);
        for (int i = 0; i < STAGES; i++) {
            barrier_init(shared_address(&s.full[i]), 2);
            barrier_init(shared_address(&s.empty[i]), 8);
        }
        for (int i = 0; i < 4; i++) {
            barrier_init(shared_address(&s.p_full[i]), 1);
            barrier_init(shared_address(&s.p_empty[i]), 1);
        }
        fence_async();
    }
    __syncthreads();
    if (threadIdx.x >= 2 * WARPGROUP) {
        registers_fewer<24>();
        if (threadIdx.x < 2 * WARPGROUP + 32) bring(m, c, s, key, head);
    } else {
        registers_more<240>();
        if (threadIdx.x < WARPGROUP)
            values(m, c, s, key, head);
        else
            keys(m, c, s, key, head);
    }
}

} /* namespace */

void hopper::attend_keys(cudaStream_t stream, const attention_maps &maps, const attention_call &call)
{
    const dim3 grid((unsigned)((call.keys + TILE - 1) / TILE), (unsigned)call.heads);

    allow_shared(keys_kernel, sizeof(shared_keys));
    keys_kernel<<<grid, THREADS, sizeof(shared_keys), stream>>>(maps, call);
}
