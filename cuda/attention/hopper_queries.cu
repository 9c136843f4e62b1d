/* dq of 128 rows of one head, 64 for either of two warpgroups; the keys that any of them sees pass by in tiles of 64,
 * brought by a warp that does nothing else. P = exp(q k^T - lse), dS = P (dout v^T - delta) scale, dq += dS k. */
#include "attention/hopper.cuh"

namespace {

using namespace hopper;

constexpr int STAGES = 2, THREADS = 3 * WARPGROUP, ROWS = 2 * TILE;

struct shared_queries {
    unsigned char q[2][TILE_BYTES], dout[2][TILE_BYTES];
    unsigned char k[STAGES][TILE_BYTES], v[TILE_BYTES];
    uint64_t rows_full, k_full[STAGES], k_empty[STAGES], v_full[1], v_empty[1];
};

__device__ void bring(const attention_maps &m, const attention_call &c, shared_queries &s, int64_t row, int head)
{
    const range all = keys_of_two(c, row);
    const uint32_t rows_full = shared_address(&s.rows_full), v_full = shared_address(s.v_full);
    uint32_t count = 0;

    barrier_expect(rows_full, 4 * TILE_BYTES);
    for (int i = 0; i < 2; i++) {
        load_tile(shared_address(s.q[i]), &m.q, row + i * TILE, head, rows_full);
        load_tile(shared_address(s.dout[i]), &m.dout, row + i * TILE, head, rows_full);
    }
    for (int64_t key = all.low; key < all.high; key += TILE, count++) {
        const int stage = count % STAGES;
        const uint32_t k_full = shared_address(&s.k_full[stage]);

        barrier_wait(shared_address(&s.k_empty[stage]), ~(count / STAGES) & 1);
        barrier_expect(k_full, TILE_BYTES);
        load_tile(shared_address(s.k[stage]), &m.k, key, head, k_full);
        barrier_wait(shared_address(s.v_empty), ~count & 1);
        barrier_expect(v_full, TILE_BYTES);
        load_tile(shared_address(s.v), &m.v, key, head, v_full);
    }
}

/* The two rows of a thread. */
struct row_facts {
    float lse[2], delta[2]; /* lse times log2 e */
    int start[2], end[2];
};

__device__ __forceinline__ row_facts facts_of(const attention_call &c, int64_t row, int head)
{
    /* Not read if there is no row. */
    const head_facts &of = c.of_head[head * ((c.rows + TILE - 1) / TILE) + row / TILE];
    row_facts f;

#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int64_t t = row + fragment_row() + 8 * i;
        const bool here = t < c.rows;

        f.lse[i] = here ? of.lse[t % TILE] : INFINITY;
        f.delta[i] = here ? of.delta[t % TILE] : 0;
        f.start[i] = here ? c.start[t] : 0;
        f.end[i] = here ? c.end[t] : 0;
    }
    return f;
}

/* dot becomes P. */
__device__ __forceinline__ void probabilities(float (&dot)[32], const row_facts &f, float scale, int64_t key)
{
    const bool mine = (f.lse[0] == INFINITY || (f.start[0] <= key && f.end[0] >= key + TILE)) &&
                      (f.lse[1] == INFINITY || (f.start[1] <= key && f.end[1] >= key + TILE));
    const bool whole = __all_sync(~0u, mine);
    const int first = (int)key + fragment_column();

#pragma unroll
    for (int i = 0; i < 32; i++) {
        const int r = i / 2 % 2, u = first + 8 * (i / 4) + i % 2;

        dot[i] = exp2_fast(dot[i] * scale - f.lse[r]);
        if (!whole && (u < f.start[r] || u >= f.end[r])) dot[i] = 0;
    }
}

__device__ void queries(const attention_maps &m, const attention_call &c, shared_queries &s, int64_t row, int head)
{
    const int group = threadIdx.x / WARPGROUP;
    const range all = keys_of_two(c, row);
    const uint32_t q = shared_address(s.q[group]), dout = shared_address(s.dout[group]);
    float sum[128] = {};
    uint32_t count = 0;

    row += group * TILE;
    const row_facts f = facts_of(c, row, head);
    barrier_wait(shared_address(&s.rows_full), 0);
    for (int64_t key = all.low; key < all.high; key += TILE, count++) {
        const int stage = count % STAGES;
        const uint32_t k = shared_address(s.k[stage]);
        float p[32], slope[32];
        uint32_t operand[4][4];

        barrier_wait(shared_address(&s.k_full[stage]), count / STAGES & 1);
        multiply_tiles(p, q, k);
        barrier_wait(shared_address(s.v_full), count & 1);
        multiply_tiles(slope, dout, shared_address(s.v));
        mma_wait<1>();
        settle(p);
        if (count) barrier_arrive_warp(shared_address(&s.k_empty[(count - 1) % STAGES]));
        probabilities(p, f, c.scale * LOG2_E, key);
        mma_wait<0>();
        settle(slope);
        barrier_arrive_warp(shared_address(s.v_empty));
#pragma unroll
        for (int i = 0; i < 32; i++) slope[i] = p[i] * (slope[i] - f.delta[i / 2 % 2]) * c.scale;
        to_operand(slope, operand);
        multiply_by_tile(sum, operand, k);
    }
    mma_wait<0>();
    settle(sum);
    named_barrier(1 + group, WARPGROUP);
    store_tile(sum, q, &m.dq, row, head, 1 + group);
}

/* blockIdx: tile of rows, late ones first, which see most; head. */
__global__ __launch_bounds__(THREADS, 1) void queries_kernel(const __grid_constant__ attention_maps m,
                                                             const attention_call c)
{
    extern __shared__ __align__(1024) unsigned char memory[];
    shared_queries &s = *(shared_queries *)memory;
    const int64_t row = (int64_t)(gridDim.x - 1 - blockIdx.x) * ROWS;
    const int head = c.first + blockIdx.y;

    if (threadIdx.x == 0) {
        barrier_init(shared_address(&s.rows_full), 1);
        begin_stages(s.k_full, s.k_empty);
        begin_stages(s.v_full, s.v_empty);
        fence_async();
    }
    __syncthreads();
    divide_work([&] { if (threadIdx.x % 32 == 0) bring(m, c, s, row, head); }, [&] { queries(m, c, s, row, head); });
}

} /* namespace */

void hopper::attend_queries(cudaStream_t stream, const attention_maps &maps, const attention_call &call)
{
    const dim3 grid((unsigned)((call.rows + ROWS - 1) / ROWS), (unsigned)call.count);

    allow_shared(queries_kernel, sizeof(shared_queries));
    queries_kernel<<<grid, THREADS, sizeof(shared_queries), stream>>>(maps, call);
}
