/* Loss, dq and dweight of a row, and what the sums of dkey need of it (kl_selected.cuh).
 *
 * Warps work on their own, 16 keys at a time, which they copy into a ring of their own; heads and keys meet in
 * mma.sync m16n8k16. The gradient of q is summed per warp over its keys and at the end over the warps. Weights of
 * heads come last, in fp32: without them, dq[h] = weight[h] sum_u g[u] active[h,u] key[u] is also what dweight[h]
 * needs, since sum_u g[u] relu(q[h] . key[u]) = q[h] . sum_u g[u] active[h,u] key[u]. */
#include "indexer/index_kl.cuh"
#include "indexer/kl_rows.cuh"

namespace {

constexpr int WARPS = 4, THREADS = WARPS * 32;
constexpr int STAGES = 3;
constexpr uint32_t STAGE_BYTES = GROUP * ROW_BYTES;
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

/* ---- the first pass: scores and active heads ---- */

/* The queries pass through the ring. */
__device__ __forceinline__ void load_queries(const kl_call &c, const bf16 *q, const float *weight, uint32_t ring,
                                             query_operand<4> &b)
{
    static_assert(THREADS == KL_WIDTH, "a thread a column");

    for (int i = threadIdx.x; i < KL_HEADS * KL_WIDTH / 8; i += THREADS)
        hopper::copy16<0, 0>(place(ring, i / 16, i % 16), q + i * 8, 16);
    asm volatile("cp.async.commit_group;\ncp.async.wait_group 0;" ::: "memory");
    __syncthreads();
    load_operand<4>(ring, 0, b);
    if (!c.dense)
        for (int piece = 0; piece < KL_HEADS / 8; piece++)
            write_query<8>(c, blockIdx.x, ring, weight, threadIdx.x, piece, 0);
    __syncthreads();
}

__device__ __forceinline__ void score_keys(const kl_call &c, const row_state &r, const bf16 *q, const float *weight)
{
    const int lane = threadIdx.x % 32;
    query_operand<4> b;
    float w[4][2];

    load_queries(c, q, weight, r.ring, b);
    first_fetches(c, r);
    load_weights<4>(weight, w);
    each_group(c, r, [&](int group, uint32_t stage) {
        float score[2];
        uint32_t active[2];

        score_group<4>(stage, b, w, 0, score, active);
        float all = reduce_one(score[0], score[1], 1, plus());
        uint32_t heads = reduce_one(active[0], active[1], 1, either());
        const int at = group * GROUP + lane / 4 + lane % 2 * 8; /* of two lanes */

        all += __shfl_xor_sync(~0u, all, 2);
        heads |= __shfl_xor_sync(~0u, heads, 2);
        r.score[at] = at < r.count ? all : 0;
        r.active[at] = at < r.count ? heads : 0;
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
        const float4 sum = *(const float4 *)&part[head * KL_WIDTH + (lane * 4 + head * 8) % KL_WIDTH];

        write_head(c, t, head, load_head(c, t, head), sum);
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

__device__ void write_entries(const kl_call &c, const row_state &r, int64_t row)
{
    for (int j = threadIdx.x; j < r.count; j += THREADS)
        write_entry(c, row, j, r.number[j], r.score[j], r.active[j]);
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
