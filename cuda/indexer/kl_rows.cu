/* Loss, dq and dweight of a row, and what the sums of dkey need of it (kl_selected.cuh).
 *
 * Warps work on their own, 16 keys at a time, which they copy into a ring of their own; heads and keys meet in
 * mma.sync m16n8k16. The gradient of q is summed per warp over its keys and at the end over the warps. Weights of
 * heads come last, in fp32: without them, dq[h] = weight[h] sum_u g[u] active[h,u] key[u] is also what dweight[h]
 * needs, since sum_u g[u] relu(q[h] . key[u]) = q[h] . sum_u g[u] active[h,u] key[u]. */
#include "indexer/index_kl.cuh"
#include "indexer/kl_selected.cuh"
#include "sparse_mla/hopper.cuh"

namespace {

constexpr int WARPS = 4, THREADS = WARPS * 32;
constexpr int GROUP = 16;                      /* keys at a time */
constexpr int STAGES = 3;
constexpr uint32_t ROW_BYTES = KL_WIDTH * 2, STAGE_BYTES = GROUP * ROW_BYTES;
constexpr uint32_t RING_BYTES = WARPS * STAGES * STAGE_BYTES;
constexpr int HEADS_EACH = KL_HEADS / WARPS;

static_assert(RING_BYTES >= KL_HEADS * KL_WIDTH * sizeof(float), "the gradient of q takes the place of the ring");

/* Dynamic shared memory: the ring, then for each key of the row its number, score (later slope) and active heads. */
struct row_state {
    uint32_t ring;
    int32_t *number;
    float *score;
    uint32_t *active;
    int count, groups; /* keys, and how often GROUP of them */
};

__host__ __device__ constexpr int padded(int k) { return (k + GROUP - 1) / GROUP * GROUP; }
size_t shared_bytes(int k) { return RING_BYTES + (size_t)padded(k) * 12; }

/* 16-byte piece `piece` of row `row` where rows are 256 bytes: pieces swapped so that 8 rows lie in different banks. */
__device__ __forceinline__ uint32_t place(uint32_t base, int row, int piece)
{
    return base + row * ROW_BYTES + (piece ^ (row & 7)) * 16;
}

/* Starts copying the warp's n-th group into its ring; a commit group even if there is none. */
__device__ __forceinline__ void fetch(const kl_call &c, const row_state &r, int n)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = n * WARPS + warp;

    if (group < r.groups) {
        const uint32_t stage = r.ring + (warp * STAGES + n % STAGES) * STAGE_BYTES;

#pragma unroll
        for (int i = 0; i < GROUP / 2; i++) {
            const int row = i * 2 + lane / 16, at = group * GROUP + row;
            const bool here = at < r.count;

            hopper::copy16<0, 0>(place(stage, row, lane % 16),
                                 c.key + (here ? (int64_t)r.number[at] : 0) * KL_WIDTH + lane % 16 * 8, here ? 16 : 0);
        }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Calls visit(group, where it lies) for the warp's groups, of which the first two are being fetched. */
template <class F>
__device__ __forceinline__ void each_group(const kl_call &c, const row_state &r, F &&visit)
{
    const int warp = threadIdx.x / 32;

    for (int n = 0; n * WARPS + warp < r.groups; n++) {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
        __syncwarp();
        fetch(c, r, n + STAGES - 1); /* over the group before this one, with which all lanes are through */
        visit(n * WARPS + warp, r.ring + (warp * STAGES + n % STAGES) * STAGE_BYTES);
    }
}

__device__ __forceinline__ void first_fetches(const kl_call &c, const row_state &r)
{
    __syncwarp(); /* all lanes are through with what was there */
    for (int n = 0; n < STAGES - 1; n++) fetch(c, r, n);
}

__device__ __forceinline__ void load4(uint32_t from, uint32_t (&v)[4]) { hopper::load_matrices(from, v); }
__device__ __forceinline__ void load4_across(uint32_t from, uint32_t (&v)[4])
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"(from)
                 : "memory");
}

/* d[16,8] += a[16,16] b[16,8] */
__device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* ---- the first pass: scores and active heads ---- */

/* Of queries in shared memory: as kl_pairs.cu takes them, times their weights. Each slice has a line of 32 heads for
 * each column, its 16-byte pieces swapped. Columns are so ordered that a lane's sums are neighbours: 8 j + 2 l + b is
 * 8 l + 2 j + b. */
__device__ __forceinline__ void write_queries(const kl_call &c, int64_t row, uint32_t from, const float *weight)
{
    static_assert(THREADS == KL_WIDTH && KL_HEADS == 32 && KL_COLUMNS == 32, "a thread a column");
    const int slice = threadIdx.x / KL_COLUMNS, line = threadIdx.x % KL_COLUMNS;
    const int column = slice * KL_COLUMNS + line % 8 / 2 * 8 + line / 8 * 2 + line % 2;
    bf16 *to = c.queries + (slice * c.most_rows + row) * KL_TILE + line * KL_HEADS;

#pragma unroll
    for (int piece = 0; piece < 4; piece++) {
        float x[8];

#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int head = piece * 8 + i;
            uint16_t q;

            asm volatile("ld.shared.u16 %0, [%1];"
                         : "=h"(q)
                         : "r"(place(from, head, column / 8) + column % 8 * 2)
                         : "memory");
            x[i] = weight[head] * __uint_as_float((uint32_t)q << 16);
        }
        store(to + (piece ^ (line / 2 & 3)) * 8, x);
    }
}

/* The queries as the right operand: b[step][i] of heads 8 i .. 8 i + 7. They pass through the ring. */
__device__ __forceinline__ void load_queries(const kl_call &c, const bf16 *q, const float *weight, uint32_t ring,
                                             uint32_t (&b)[KL_WIDTH / 16][4][2])
{
    const int lane = threadIdx.x % 32;

    for (int i = threadIdx.x; i < KL_HEADS * KL_WIDTH / 8; i += THREADS)
        hopper::copy16<0, 0>(place(ring, i / 16, i % 16), q + i * 8, 16);
    asm volatile("cp.async.commit_group;\ncp.async.wait_group 0;" ::: "memory");
    __syncthreads();
#pragma unroll
    for (int step = 0; step < KL_WIDTH / 16; step++)
#pragma unroll
        for (int half = 0; half < 2; half++) { /* 16 heads */
            uint32_t v[4];

            load4(place(ring, half * 16 + lane / 16 * 8 + lane % 8, step * 2 + lane / 8 % 2), v);
            b[step][half * 2][0] = v[0], b[step][half * 2][1] = v[1];
            b[step][half * 2 + 1][0] = v[2], b[step][half * 2 + 1][1] = v[3];
        }
    if (!c.dense) write_queries(c, blockIdx.x, ring, weight);
    __syncthreads();
}

__device__ __forceinline__ void score_keys(const kl_call &c, const row_state &r, const bf16 *q, const float *weight)
{
    const int lane = threadIdx.x % 32, quarter = lane % 4;
    uint32_t b[KL_WIDTH / 16][4][2];
    float w[4][2];

    load_queries(c, q, weight, r.ring, b);
    first_fetches(c, r);
#pragma unroll
    for (int i = 0; i < 4; i++) w[i][0] = weight[8 * i + 2 * quarter], w[i][1] = weight[8 * i + 2 * quarter + 1];
    each_group(c, r, [&](int group, uint32_t stage) {
        float d[4][4] = {};

#pragma unroll
        for (int step = 0; step < KL_WIDTH / 16; step++) {
            uint32_t a[4];

            load4(place(stage, lane % 16, step * 2 + lane / 16), a);
#pragma unroll
            for (int i = 0; i < 4; i++) multiply(d[i], a, b[step][i][0], b[step][i][1]);
        }
        float score[2] = {};
        uint32_t active[2] = {};
#pragma unroll
        for (int key = 0; key < 2; key++) { /* lane / 4 and 8 more */
#pragma unroll
            for (int e = 0; e < 8; e++) {
                const float dot = d[e / 2][key * 2 + e % 2];

                score[key] += w[e / 2][e % 2] * fmaxf(dot, 0);
                active[key] |= dot > 0 ? 1u << (e % 2 * 16 + e / 2) : 0;
            }
            active[key] <<= quarter * 4;
#pragma unroll
            for (int apart = 1; apart < 4; apart *= 2) {
                score[key] += __shfl_xor_sync(~0u, score[key], apart);
                active[key] |= __shfl_xor_sync(~0u, active[key], apart);
            }
        }
        if (quarter < 2) {
            const int at = group * GROUP + lane / 4 + quarter * 8;

            r.score[at] = at < r.count ? score[quarter] : 0;
            r.active[at] = at < r.count ? active[quarter] : 0;
        }
    });
}

/* ---- the second pass: the gradient of q ---- */

/* The slopes of 16 keys where a head is active, as the left operand: heads 16 half .. 16 half + 15. */
__device__ __forceinline__ void load_slopes(const row_state &r, int group, uint32_t (&a)[2][4])
{
    const int lane = threadIdx.x % 32, at = group * GROUP + lane % 4 * 2;

#pragma unroll
    for (int eight = 0; eight < 2; eight++) { /* of the keys */
        const float2 slope = *(const float2 *)&r.score[at + eight * 8];
        const uint2 active = *(const uint2 *)&r.active[at + eight * 8];
        const uint32_t both = hopper::pack_bf16(slope.x, slope.y);
        const int shift = active_bit(lane / 4);
        const uint32_t heads = (active.x >> shift & 15) | (active.y >> shift & 15) << 16; /* 8 i + lane / 4: bit i */

#pragma unroll
        for (int i = 0; i < 4; i++) a[i / 2][eight * 2 + i % 2] = both & (heads >> i & 0x10001) * 0xffff;
    }
}

typedef float sums[2][KL_WIDTH / 8][4]; /* [16 heads][8 columns] */

__device__ __forceinline__ void sum_keys(const kl_call &c, const row_state &r, sums &d)
{
    const int lane = threadIdx.x % 32;

    each_group(c, r, [&](int group, uint32_t stage) {
        uint32_t a[2][4];

        load_slopes(r, group, a);
#pragma unroll
        for (int pair = 0; pair < KL_WIDTH / 16; pair++) { /* 16 columns */
            uint32_t b[4];

            load4_across(place(stage, lane % 16, pair * 2 + lane / 16), b);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                multiply(d[half][pair * 2], a[half], b[0], b[1]);
                multiply(d[half][pair * 2 + 1], a[half], b[2], b[3]);
            }
        }
    });
}

/* Adds up the warps' sums in their order and writes dq and dweight. part [heads, columns], where the ring was; the
 * columns of a head are rotated by 8 times its number, so that heads lie in different banks. */
__device__ __forceinline__ void write_gradients(const kl_call &c, int64_t t, float *part, const sums &d)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

    __syncthreads(); /* nobody reads the ring any more */
    for (int turn = 0; turn < WARPS; turn++) {
        if (warp == turn)
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int tile = 0; tile < KL_WIDTH / 8; tile++)
#pragma unroll
                    for (int eight = 0; eight < 2; eight++) {
                        const int head = half * 16 + eight * 8 + lane / 4;
                        const int column = (tile * 8 + lane % 4 * 2 + head * 8) % KL_WIDTH;
                        float2 *to = (float2 *)&part[head * KL_WIDTH + column];
                        float2 sum = {d[half][tile][eight * 2], d[half][tile][eight * 2 + 1]};

                        if (turn > 0) sum.x += to->x, sum.y += to->y;
                        *to = sum;
                    }
        __syncthreads();
    }
    for (int head = warp * HEADS_EACH; head < (warp + 1) * HEADS_EACH; head++) {
        const float weight = c.weight[t * KL_HEADS + head];
        const int64_t at = (t * KL_HEADS + head) * KL_WIDTH + lane * 4;
        const float4 sum = *(const float4 *)&part[head * KL_WIDTH + (lane * 4 + head * 8) % KL_WIDTH];
        float q[4], out[4] = {weight * sum.x, weight * sum.y, weight * sum.z, weight * sum.w};

        load(c.q + at, q);
        store(c.dq + at, out);
        const float dweight = warp_reduce(q[0] * sum.x + q[1] * sum.y + q[2] * sum.z + q[3] * sum.w, plus());
        if (lane == 0) c.dweight[t * KL_HEADS + head] = dweight;
    }
}

/* ---- a row ---- */

__device__ int read_numbers(const int32_t *selected, int k, int32_t *number)
{
    int n = 0;

    for (int j = threadIdx.x; j < k; j += THREADS) {
        const int key = selected[j];

        number[j] = key;
        n += key >= 0;
    }
    return block_sum<THREADS>(n);
}

/* How many of number[begin .. end) are below `key`, and begin. */
__device__ int below(const int32_t *number, int begin, int end, int64_t key)
{
    while (begin < end) {
        const int middle = (begin + end) / 2;

        if (number[middle] < key)
            begin = middle + 1;
        else
            end = middle;
    }
    return begin;
}

/* Which of the first `count` entries belong to which keys. */
__device__ void write_ranges(const kl_call &c, const row_state &r, int64_t row, int count)
{
    for (int64_t group = threadIdx.x; group < c.groups; group += THREADS) {
        int at = below(r.number, 0, count, group * KL_GROUP);
        range found = {(uint32_t)at, 0};

        for (int unit = 0; unit < KL_UNITS; unit++) {
            const int end = below(r.number, at, min(count, at + KL_UNIT), group * KL_GROUP + (unit + 1) * KL_UNIT);

            found.counts |= (uint32_t)(end - at) << unit * 8;
            at = end;
        }
        c.ranges[group * c.most_rows + row] = found;
        if (found.counts) atomicAdd(&c.counts[group], rounds_of(found));
    }
}

__device__ void write_entries(const kl_call &c, const row_state &r, int64_t row)
{
    entry *to = c.entries + row * (c.dense ? c.tiles * KL_KEYS : c.i.k);

    for (int j = threadIdx.x; j < r.count; j += THREADS) {
        const int key = r.number[j];

        to[c.dense ? key : j] = {pack_slope(r.score[j], key), r.active[j]};
        if (c.dense) c.filled[key / KL_KEYS * c.steps + row / KL_ROWS] = 1; /* whoever writes, writes 1 */
    }
}

__global__ __launch_bounds__(THREADS, 3) void rows_kernel(const kl_call c)
{
    extern __shared__ __align__(1024) char memory[];
    const int64_t t = c.first + blockIdx.x;
    const bf16 *q = c.q + t * KL_HEADS * KL_WIDTH;
    const float row_weight = c.row_weight[t];
    const int k = c.i.k;
    row_state r = {hopper::shared_address(memory), (int32_t *)(memory + RING_BYTES)};
    float kl = 0;

    r.score = (float *)(r.number + padded(k));
    r.active = (uint32_t *)(r.score + padded(k));
    r.count = read_numbers(c.selected + t * k, k, r.number);
    r.groups = (r.count + GROUP - 1) / GROUP;
    if (r.count > 0) {
        score_keys(c, r, q, c.weight + t * KL_HEADS);
        first_fetches(c, r); /* of the second pass, while the loss is made */
        __syncthreads();
        kl = kl_row<THREADS>(r.score, c.target + t * k, r.count, row_weight, r.score);
    }
    __syncthreads();
    if (threadIdx.x == 0) c.kl[t] = kl;
    if (!c.dense) write_ranges(c, r, blockIdx.x, row_weight != 0 ? r.count : 0);
    sums d = {};
    if (row_weight != 0 && r.count > 0) {
        write_entries(c, r, blockIdx.x);
        sum_keys(c, r, d);
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    write_gradients(c, t, (float *)memory, d);
}

} /* namespace */

void kl_rows(cuda_device *d, const kl_call &c)
{
    const size_t bytes = shared_bytes(c.i.k);

    allow_shared(rows_kernel, bytes);
    rows_kernel<<<(unsigned)c.rows, THREADS, bytes, d->stream>>>(c);
}
