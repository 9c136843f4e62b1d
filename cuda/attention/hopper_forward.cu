/* Attention of 128 rows of one head, 64 for either of two warpgroups; the keys that any of them sees
 * pass by in tiles of 64, brought by a warp that does nothing else. The scores of the next tile are
 * made while the values of this one are added.
 *
 * Exponentials are taken under a reference per row, which follows the largest score only when that has grown by a
 * factor of 2^8 beyond it: sums stay far from overflow, and the sums of values are rarely scaled anew. */
#include "attention/hopper.cuh"

namespace {

using namespace hopper;

constexpr int STAGES = 2, THREADS = 3 * WARPGROUP, ROWS = 2 * TILE;
/* Keys and values of heads that go together, which blocks share; 4096 rows are slower with 12 MiB and with 32. */
constexpr int64_t L2_BYTES = 16 << 20;
constexpr float PATIENCE = 8, LN_2 = 0.6931471805599453f;

struct shared_forward {
    unsigned char q[2][TILE_BYTES], k[STAGES][TILE_BYTES], v[STAGES][TILE_BYTES];
    uint64_t rows_full, k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
};

/* What of the keys 64 rows see, from a whole tile on; low > high: nothing. For a warp. */
__device__ __forceinline__ range keys_of(const attention_call &c, int64_t row)
{
    int low = INT32_MAX, high = 0;

#pragma unroll
    for (int i = 0; i < TILE; i += 32) {
        const int64_t t = row + i + threadIdx.x % 32;
        const int start = t < c.rows ? c.start[t] : 0, end = t < c.rows ? c.end[t] : 0;

        if (start < end) {
            low = min(low, start);
            high = max(high, end);
        }
    }
    return {__reduce_min_sync(~0u, low) / TILE * TILE, __reduce_max_sync(~0u, high)};
}

__device__ __forceinline__ range around(range a, range b) { return {min(a.low, b.low), max(a.high, b.high)}; }
__device__ __forceinline__ int tiles_of(int low, int high) { return low < high ? (high - low + TILE - 1) / TILE : 0; }

/* One warp. */
__device__ void bring(const attention_maps &m, const attention_call &c, shared_forward &s, int64_t row, int head)
{
    const uint32_t rows_full = shared_address(&s.rows_full);
    uint32_t count = 0;

    if (threadIdx.x % 32 == 0) {
        barrier_expect(rows_full, 2 * TILE_BYTES);
        for (int i = 0; i < 2; i++) load_tile(shared_address(s.q[i]), &m.q, row + i * TILE, head, rows_full);
    }
    __syncwarp();
    const range all = around(keys_of(c, row), keys_of(c, row + TILE));
    if (threadIdx.x % 32 > 0) return;
    for (int64_t key = all.low; key < all.high; key += TILE, count++) {
        const int stage = count % STAGES;
        const uint32_t k_full = shared_address(&s.k_full[stage]), v_full = shared_address(&s.v_full[stage]);

        barrier_wait(shared_address(&s.k_empty[stage]), ~(count / STAGES) & 1);
        barrier_expect(k_full, TILE_BYTES);
        load_tile(shared_address(s.k[stage]), &m.k, key, head, k_full);
        barrier_wait(shared_address(&s.v_empty[stage]), ~(count / STAGES) & 1);
        barrier_expect(v_full, TILE_BYTES);
        load_tile(shared_address(s.v[stage]), &m.v, key, head, v_full);
    }
}

/* The two rows of a thread: what they see, and their softmax so far, in powers of 2. */
struct row_state {
    int start[2], end[2];
    float reference[2], sum[2]; /* of this thread's columns */
};

__device__ __forceinline__ row_state begin_rows(const attention_call &c, int64_t row)
{
    row_state r;

#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int64_t t = row + fragment_row() + 8 * i;
        const bool here = t < c.rows;

        r.start[i] = here ? c.start[t] : 0;
        r.end[i] = here ? c.end[t] : 0;
        r.reference[i] = -INFINITY;
        r.sum[i] = 0;
    }
    return r;
}

__device__ __forceinline__ void blank_unseen(float (&score)[32], const row_state &r, int64_t key)
{
    const bool mine = r.start[0] <= key && r.end[0] >= key + TILE && r.start[1] <= key && r.end[1] >= key + TILE;
    const int first = (int)key + fragment_column();

    if (__all_sync(~0u, mine)) return;
#pragma unroll
    for (int i = 0; i < 32; i++) {
        const int h = i / 2 % 2, u = first + 8 * (i / 4) + i % 2;

        if (u < r.start[h] || u >= r.end[h]) score[i] = -INFINITY;
    }
}

/* Scores become exponentials. Returns whether sums of values must be multiplied by `shrink`, the same for the warp. */
__device__ __forceinline__ bool soften(float (&score)[32], row_state &r, float scale, float (&shrink)[2])
{
    bool moved = false;

#pragma unroll
    for (int h = 0; h < 2; h++) {
        float top = -INFINITY;

#pragma unroll
        for (int i = 0; i < 32; i += 4) top = fmaxf(top, fmaxf(score[i + 2 * h], score[i + 2 * h + 1]));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2)) * scale;
        shrink[h] = 1;
        if (top > r.reference[h] + PATIENCE || (r.reference[h] == -INFINITY && top > -INFINITY)) {
            shrink[h] = exp2_fast(r.reference[h] - top);
            r.reference[h] = top;
            r.sum[h] *= shrink[h];
            moved = true;
        }
        const float reference = r.reference[h] == -INFINITY ? 0 : r.reference[h];
#pragma unroll
        for (int i = 0; i < 32; i += 4)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                float &e = score[i + 2 * h + j];

                e = exp2_fast(e * scale - reference);
                r.sum[h] += e;
            }
    }
    return __any_sync(~0u, moved);
}

__device__ __forceinline__ void scale_rows(float (&sum)[128], float first, float second)
{
#pragma unroll
    for (int i = 0; i < 128; i++) sum[i] *= i / 2 % 2 ? second : first;
}

/* Ends the softmax: sums of values become outputs. */
__device__ __forceinline__ void finish_rows(const attention_call &c, float *lse, row_state &r, float (&sum)[128],
                                            int64_t row, int head)
{
    float factor[2];

#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int64_t t = row + fragment_row() + 8 * h;
        float all = r.sum[h];

        all += __shfl_xor_sync(~0u, all, 1);
        all += __shfl_xor_sync(~0u, all, 2);
        factor[h] = all == 0 ? 0 : 1 / all;
        if (threadIdx.x % 4 == 0 && t < c.rows)
            lse[t * c.heads + head] = all == 0 ? INFINITY : r.reference[h] * LN_2 + logf(all);
    }
    scale_rows(sum, factor[0], factor[1]);
}

/* Tiles first .. last - 1, of which only the other warpgroup's rows see anything. */
__device__ __forceinline__ void pass_by(shared_forward &s, uint32_t first, uint32_t last)
{
    for (uint32_t i = first; i < last; i++) {
        barrier_wait(shared_address(&s.k_full[i % STAGES]), i / STAGES & 1);
        barrier_arrive_warp(shared_address(&s.k_empty[i % STAGES]));
        barrier_wait(shared_address(&s.v_full[i % STAGES]), i / STAGES & 1);
        barrier_arrive_warp(shared_address(&s.v_empty[i % STAGES]));
    }
}

/* All tiles of keys pass by; this warpgroup's 64 rows see some of them, which lie in a row. */
__device__ void attend(const attention_maps &m, const attention_call &c, float *lse, shared_forward &s, int64_t row,
                       int head)
{
    const int group = __reduce_max_sync(~0u, threadIdx.x / WARPGROUP); /* so the compiler knows it is one */
    const range one = keys_of(c, row + group * TILE), all = around(one, keys_of(c, row + (1 - group) * TILE));
    const uint32_t tiles = tiles_of(all.low, all.high), count = tiles_of(one.low, one.high);
    const uint32_t first = count > 0 ? (one.low - all.low) / TILE : 0, end = first + count;
    const uint32_t q = shared_address(s.q[group]);
    const float scale = c.scale * LOG2_E;
    float sum[128] = {}, score[32], shrink[2];
    uint32_t operand[4][4];

    row += group * TILE;
    row_state r = begin_rows(c, row);
    barrier_wait(shared_address(&s.rows_full), 0);
    pass_by(s, 0, first);
    if (count > 0) {
        barrier_wait(shared_address(&s.k_full[first % STAGES]), first / STAGES & 1);
        multiply_tiles(score, q, shared_address(s.k[first % STAGES]));
        mma_wait<0>();
        settle(score);
        barrier_arrive_warp(shared_address(&s.k_empty[first % STAGES]));
        blank_unseen(score, r, one.low);
        soften(score, r, scale, shrink);
        to_operand(score, operand);
    }
    for (uint32_t i = first; i + 1 < end; i++) {
        const int stage = i % STAGES, next = (i + 1) % STAGES;

        barrier_wait(shared_address(&s.k_full[next]), (i + 1) / STAGES & 1);
        multiply_tiles(score, q, shared_address(s.k[next]));
        barrier_wait(shared_address(&s.v_full[stage]), i / STAGES & 1);
        multiply_by_tile(sum, operand, shared_address(s.v[stage]));
        mma_wait<1>();
        settle(score);
        barrier_arrive_warp(shared_address(&s.k_empty[next]));
        blank_unseen(score, r, all.low + (int64_t)(i + 1) * TILE);
        const bool moved = soften(score, r, scale, shrink);
        mma_wait<0>();
        settle(sum);
        barrier_arrive_warp(shared_address(&s.v_empty[stage]));
        if (moved) scale_rows(sum, shrink[0], shrink[1]);
        to_operand(score, operand);
    }
    if (count > 0) {
        const uint32_t stage = (end - 1) % STAGES;

        barrier_wait(shared_address(&s.v_full[stage]), (end - 1) / STAGES & 1);
        multiply_by_tile(sum, operand, shared_address(s.v[stage]));
        mma_wait<0>();
        settle(sum);
        barrier_arrive_warp(shared_address(&s.v_empty[stage]));
    }
    finish_rows(c, lse, r, sum, row, head);
    named_barrier(1 + group, WARPGROUP);
    store_tile(sum, q, &m.out, row, head, 1 + group);
    pass_by(s, end, tiles);
}

/* blockIdx: head among those that go together; tile of rows, late ones first, which see most; which heads go
 * together. */
__global__ __launch_bounds__(THREADS, 1) void forward_kernel(const __grid_constant__ attention_maps m,
                                                             const attention_call c, float *lse)
{
    extern __shared__ __align__(1024) unsigned char memory[];
    shared_forward &s = *(shared_forward *)memory;
    const int64_t row = (int64_t)(gridDim.y - 1 - blockIdx.y) * ROWS;
    const int head = blockIdx.z * gridDim.x + blockIdx.x;

    if (head >= c.heads) return;
    if (threadIdx.x == 0) {
        barrier_init(shared_address(&s.rows_full), 1);
        begin_stages(s.k_full, s.k_empty);
        begin_stages(s.v_full, s.v_empty);
        fence_async();
    }
    __syncthreads();
    divide_work([&] { bring(m, c, s, row, head); }, [&] { attend(m, c, lse, s, row, head); });
}

} /* namespace */

void hopper::attend_forward(cudaStream_t stream, const attention_maps &maps, const attention_call &call, float *lse)
{
    const int64_t head_bytes = call.keys * 2 * COLUMNS * 2;
    const int together = (int)std::clamp<int64_t>(L2_BYTES / head_bytes, 1, call.heads);
    const dim3 grid((unsigned)together, (unsigned)divided(call.rows, ROWS), (unsigned)divided(call.heads, together));

    allow_shared(forward_kernel, sizeof(shared_forward));
    forward_kernel<<<grid, THREADS, sizeof(shared_forward), stream>>>(maps, call, lse);
}
