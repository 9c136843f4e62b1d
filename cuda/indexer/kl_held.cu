/* Loss, dq and dweight of a row as kl_rows.cu has them, by a cluster of eight blocks that hold all of the row's keys
 * in shared memory, 256 a block, so that each is gathered once.
 *
 * A warp scores the 64 keys that it fetched, two a lane. The blocks tell each other the largest score and the sum of
 * exponentials of every warp, and each lane makes the slopes of its keys. Then a warp sums the gradient of q of 16
 * heads and 64 columns over the block's keys; a block adds up what all blocks have of four heads, in their order. */
#include "grouped_gemm/tensor.cuh"
#include "indexer/kl_rows.cuh"

using namespace hopper;

namespace {

constexpr int BLOCKS = 8; /* of a cluster */
constexpr int WARPS = 4, THREADS = WARPS * 32, BLOCKS_EACH = 3;
constexpr int WARP_KEYS = 64, KEYS = WARPS * WARP_KEYS;
constexpr int FETCHES = 2;                 /* commit groups that a warp's keys are fetched in: a key a lane */
constexpr int TILES = KL_HEADS / 8;
constexpr int COLUMNS_EACH = KL_WIDTH / 2; /* of whose sums a warp has half the heads */
constexpr uint32_t GROUP_BYTES = GROUP * ROW_BYTES;
static_assert(KL_HELD_KEYS == BLOCKS * KEYS && BLOCKS * WARPS == 32, "a lane for each warp of the cluster");
static_assert(KL_HEADS == BLOCKS * WARPS, "a warp for each head in the end");

struct statistics { /* of a warp's scores */
    float top, sum;
};

/* The slopes of two neighbours in bf16, and 16 bits of each: their active heads of even numbers, or of odd ones. */
struct slope_pair {
    uint32_t slopes, active;
};

struct shared {
    union {
        char keys[KEYS * ROW_BYTES];
        float part[KL_HEADS * KL_WIDTH]; /* the gradient of q, once the keys are not read any more; part_place */
    };
    union {
        bf16 queries[KL_HEADS * KL_WIDTH];
        slope_pair pairs[KEYS / 2][2]; /* once those are in registers: even heads, odd heads */
    };
    union {
        int32_t number[KEYS]; /* till all have barriers */
        struct {
            statistics warps[BLOCKS * WARPS];
            double kl[BLOCKS * WARPS]; /* in the first block */
        };
    };
    uint64_t told, told_kl;    /* barriers of both */
};
static_assert((sizeof(shared) + 1024) * BLOCKS_EACH <= 228 << 10, "the device keeps 1 KB a block");

/* ---- between the blocks ----
 * A barrier of the cluster that is to order memory waits for all that was written, to global memory too. So only one
 * of them does, and entries are written behind it. */

__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_arrive_relaxed()
{
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

__device__ __forceinline__ uint32_t address_of(const void *here, uint32_t rank)
{
    return cluster_address(shared_address(here), rank);
}

/* 8 bytes to the same place of another block, which count at its barrier. */
template <class T>
__device__ __forceinline__ void send(const T *here, const uint64_t *barrier, uint32_t rank, uint32_t low, uint32_t high)
{
    static_assert(sizeof(T) == 8, "");
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1,%2}, [%3];"
                 ::"r"(address_of(here, rank)), "r"(low), "r"(high), "r"(address_of(barrier, rank))
                 : "memory");
}

__device__ __forceinline__ float4 load_part(uint32_t from)
{
    float4 v;

    asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(from)
                 : "memory");
    return v;
}

__device__ __forceinline__ void make_barriers(shared *s)
{
    if (threadIdx.x == 0) {
        barrier_init(shared_address(&s->told), 1);
        barrier_init(shared_address(&s->told_kl), 1);
        barrier_expect(shared_address(&s->told), sizeof s->warps);
        barrier_expect(shared_address(&s->told_kl), sizeof s->kl);
        fence_barrier_init();
    }
}

/* ---- fetching ---- */

__device__ __forceinline__ void fetch_queries(const bf16 *q, const shared *s)
{
    const int row = threadIdx.x / 16, piece = threadIdx.x % 16;
    const uint32_t to = place(shared_address(s->queries), row, piece);

    q += threadIdx.x * 8;
    asm volatile("" : "+l"(q));
#pragma unroll
    for (int i = 0; i < KL_HEADS * KL_WIDTH / 8 / THREADS; i++)
        copy16<0, 0>(to + i * (THREADS / 16) * ROW_BYTES, q + i * THREADS * 8, 16);
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* What a lane knows of its keys, 32 apart. */
struct lane_keys {
    int at[2]; /* of the block's */
    bool here[2];
    int number[2];
    float score[2], target[2], slope[2];
    uint32_t active[2];
};

/* Starts copying a warp's keys; for those that are none, the first. */
__device__ __forceinline__ void fetch_keys(const bf16 *key, const lane_keys &x, shared *s)
{
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * WARP_KEYS, upper = lane / 16 * 8;
    const int any = __shfl_sync(~0u, x.number[0], 0);
    const char *from = (const char *)(key + lane % 16 * 8);
    uint32_t to = place(shared_address(s->keys), first + upper, lane % 16); /* the first of 8 rows */

#pragma unroll
    for (int i = 0; i < 2; i++) s->number[x.at[i]] = x.here[i] ? x.number[i] : any;
    __syncwarp();
    asm volatile("" : "+l"(from), "+r"(to)); /* the lane's own addresses: then a product a key is all that is added */
#pragma unroll
    for (int n = 0; n < WARP_KEYS; n += GROUP) {
        if (any >= 0)
#pragma unroll
            for (int four = 0; four < GROUP / 2; four += 4) { /* these rows of the group, and 8 more */
                const int4 u = *(const int4 *)&s->number[first + n + upper + four];
                const uint32_t numbers[4] = {(uint32_t)u.x, (uint32_t)u.y, (uint32_t)u.z, (uint32_t)u.w};

#pragma unroll
                for (int i = 0; i < 4; i++)
                    copy16<0, 0>((to ^ (four + i) * 16) + (n + four + i) * ROW_BYTES,
                                 from + (uint64_t)numbers[i] * ROW_BYTES, 16);
            }
        if ((n + GROUP) % (WARP_KEYS / FETCHES) == 0) asm volatile("cp.async.commit_group;" ::: "memory");
    }
}

/* ---- scores ---- */

/* Two groups give each lane the sums of one key. */
__device__ __forceinline__ void score_keys(const shared *s, const query_operand<TILES> &b, const float (&w)[TILES][2],
                                           lane_keys &x)
{
    const uint32_t keys = shared_address(s->keys) + threadIdx.x / 32 * WARP_KEYS * ROW_BYTES;

    repeat<0, FETCHES>([&](auto n) {
        float score[2][2];
        uint32_t active[2][2];

        asm volatile("cp.async.wait_group %0;" ::"n"(FETCHES - 1 - n.value) : "memory");
        __syncwarp();
        if (!__any_sync(~0u, x.here[n.value])) return;
#pragma unroll
        for (int group = 0; group < 2; group++)
            score_group<TILES>(keys + (n.value * 2 + group) * GROUP_BYTES, b, w, 0, score[group], active[group]);
        x.score[n.value] =
            reduce_one(reduce_one(score[0][0], score[1][0], 1, plus()), reduce_one(score[0][1], score[1][1], 1, plus()),
                       2, plus());
        x.active[n.value] =
            reduce_one(reduce_one(active[0][0], active[1][0], 1, either()),
                       reduce_one(active[0][1], active[1][1], 1, either()), 2, either());
    });
}

/* The number in the block of a lane's first key: what score_keys leaves it with. */
__device__ __forceinline__ int first_key()
{
    const int lane = threadIdx.x % 32;

    return threadIdx.x / 32 * WARP_KEYS + lane % 2 * GROUP + lane % 4 / 2 * 8 + lane / 4;
}

/* The order of floats as that of integers, and back. */
__device__ __forceinline__ int ordered(int bits) { return bits ^ (bits >> 31 & 0x7fffffff); }
__device__ __forceinline__ float warp_largest(float x)
{
    return __int_as_float(ordered(__reduce_max_sync(~0u, ordered(__float_as_int(x)))));
}

__device__ __forceinline__ void tell_statistics(const shared *s, lane_keys &x, int rank)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

#pragma unroll
    for (int i = 0; i < 2; i++)
        if (!x.here[i]) x.score[i] = -INFINITY, x.active[i] = 0;
    const float top = warp_largest(fmaxf(x.score[0], x.score[1])), base = top == -INFINITY ? 0 : top;
    const float sum = warp_reduce(expf(x.score[0] - base) + expf(x.score[1] - base), plus());
    if (lane < BLOCKS)
        send(&s->warps[rank * WARPS + warp], &s->told, lane, __float_as_uint(top), __float_as_uint(sum));
}

/* The slopes, and this lane's part of the loss (index_kl.cuh). */
__device__ __forceinline__ double make_slopes(const shared *s, lane_keys &x, float row_weight)
{
    float log_target[2];
    double kl = 0;

#pragma unroll
    for (int i = 0; i < 2; i++) log_target[i] = logf(x.target[i] < 1e-10f ? 1e-10f : x.target[i]);
    barrier_wait(shared_address(&s->told), 0);
    const statistics all = s->warps[threadIdx.x % 32];
    const float top = warp_largest(all.top);
    const float shift = top + logf(warp_reduce(all.sum * expf(all.top - top), plus()));
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float log_q = x.score[i] - shift;

        x.slope[i] = x.here[i] && row_weight != 0 ? row_weight * (expf(log_q) - x.target[i]) : 0;
        if (x.here[i] && x.target[i] != 0) kl += (double)(x.target[i] * (log_target[i] - log_q));
    }
    return kl;
}

/* Neighbours are lanes that differ in bit 2: one makes the pair of their first keys, the other of their second ones. */
__device__ __forceinline__ void write_pair(shared *s, const lane_keys &x)
{
    const bool odd = threadIdx.x & 4;
    const float slope = __shfl_xor_sync(~0u, odd ? x.slope[0] : x.slope[1], 4);
    const uint32_t active = __shfl_xor_sync(~0u, odd ? x.active[0] : x.active[1], 4);
    const uint32_t slopes = odd ? pack_bf16(slope, x.slope[1]) : pack_bf16(x.slope[0], slope);
    const uint32_t a = odd ? active : x.active[0], b = odd ? x.active[1] : active;

    *(uint4 *)s->pairs[(x.at[0] + (odd ? 32 : 0)) / 2] = {slopes, __byte_perm(a, b, 0x5410), slopes,
                                                          __byte_perm(a, b, 0x7632)};
}

/* ---- the gradient of q ---- */

/* Of a warp: which half of the heads and of the columns it has. */
struct share {
    int heads, columns;
};
__device__ __forceinline__ share share_of(int warp) { return {warp % 2, warp / 2}; }

typedef float sums[COLUMNS_EACH / 8][4]; /* [8 columns] of 16 heads */

/* The slopes of 16 keys where a head is active, as the left operand: heads 16 half .. 16 half + 15. */
__device__ __forceinline__ void load_slopes(const slope_pair *from, int shift, uint32_t (&a)[4])
{
#pragma unroll
    for (int eight = 0; eight < 2; eight++) { /* of the keys */
        const uint2 pair = *(const uint2 *)&from[eight * 8];
        const uint32_t active = pair.y << shift;
        uint32_t low, high;

        /* the signs of bytes 1 and 3, each to two bytes */
        asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(high) : "r"(active));
        asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(low) : "r"(active << 1));
        a[eight * 2] = low & pair.x, a[eight * 2 + 1] = high & pair.x;
    }
}

__device__ __forceinline__ void sum_keys(const shared *s, const share &of, int groups, sums &d)
{
    const int lane = threadIdx.x % 32;
    const uint32_t from = place(shared_address(s->keys), lane % 16, of.columns * (COLUMNS_EACH / 8) + lane / 16);
    const slope_pair *pairs = &s->pairs[lane % 4][lane / 4 % 2];
    const int shift = 14 - lane / 8 * 4 - of.heads * 2; /* heads 8 i + lane / 4, of which there are two: i to bit 15 */

#pragma unroll 4
    for (int group = 0; group < groups; group++) {
        uint32_t a[4];

        load_slopes(pairs + group * GROUP, shift, a);
#pragma unroll
        for (int pair = 0; pair < COLUMNS_EACH / 16; pair++) { /* 16 columns */
            uint32_t b[4];

            load4_across(at_step(from, pair) + group * GROUP_BYTES, b);
            multiply(d[pair * 2], a, b[0], b[1]);
            multiply(d[pair * 2 + 1], a, b[2], b[3]);
        }
    }
}

/* [heads, columns]; pieces of 8 columns are swapped, so that 8 heads lie in different banks. */
__device__ __forceinline__ int part_place(int head, int column) { return head * KL_WIDTH + (column ^ head % 8 * 8); }

__device__ __forceinline__ void write_part(shared *s, const share &of, const sums &d)
{
    const int lane = threadIdx.x % 32;
    const int at = part_place(of.heads * 16 + lane / 4, of.columns * COLUMNS_EACH + lane % 4 * 2);

#pragma unroll
    for (int tile = 0; tile < COLUMNS_EACH / 8; tile++)
#pragma unroll
        for (int eight = 0; eight < 2; eight++)
            *(float2 *)&s->part[(at ^ tile * 8) + eight * 8 * KL_WIDTH] = {d[tile][eight * 2], d[tile][eight * 2 + 1]};
}

/* Four columns a lane of a head, of all blocks. */
__device__ __forceinline__ float4 add_parts(const shared *s, int head)
{
    const float *at = &s->part[part_place(head, threadIdx.x % 32 * 4)];
    float4 x[BLOCKS], sum = {};

#pragma unroll
    for (int rank = 0; rank < BLOCKS; rank++) x[rank] = load_part(address_of(at, rank));
#pragma unroll
    for (int rank = 0; rank < BLOCKS; rank++)
        sum.x += x[rank].x, sum.y += x[rank].y, sum.z += x[rank].z, sum.w += x[rank].w;
    return sum;
}

/* ---- a row ---- */

__device__ __forceinline__ void send_kl(const shared *s, double mine, int rank)
{
    const double kl = warp_reduce(mine, plus());

    if (threadIdx.x % 32 == 0)
        send(&s->kl[rank * WARPS + threadIdx.x / 32], &s->told_kl, 0, __double2loint(kl), __double2hiint(kl));
}

__device__ __forceinline__ void write_kl(const kl_call &c, int64_t t, const shared *s)
{
    barrier_wait(shared_address(&s->told_kl), 0);
    const double kl = warp_reduce(s->kl[threadIdx.x % 32], plus());
    if (threadIdx.x % 32 == 0) c.kl[t] = (float)kl;
}

__global__ __cluster_dims__(BLOCKS) __launch_bounds__(THREADS, BLOCKS_EACH) void held_kernel(const kl_call c)
{
    extern __shared__ __align__(1024) char memory[];
    shared *s = (shared *)memory;
    const int warp = threadIdx.x / 32, rank = blockIdx.x % BLOCKS, head = rank * WARPS + warp, k = c.i.k;
    const int64_t row = blockIdx.x / BLOCKS, t = c.first + row;
    const float *weight = c.weight + t * KL_HEADS;
    lane_keys x;
    query_operand<TILES> b;
    float w[TILES][2];

#pragma unroll
    for (int i = 0; i < 2; i++) {
        x.at[i] = first_key() + i * 32;
        x.number[i] = rank * KEYS + x.at[i] < k ? __ldg(&c.selected[t * k + rank * KEYS + x.at[i]]) : -1;
        x.here[i] = x.number[i] >= 0;
    }
    fetch_queries(c.q + t * KL_HEADS * KL_WIDTH, s);
    make_barriers(s);
    fetch_keys(c.key, x, s);
    cluster_arrive_relaxed(); /* all have their barriers, when it is awaited */
#pragma unroll
    for (int i = 0; i < 2; i++) x.target[i] = x.here[i] ? __ldg(&c.target[t * k + rank * KEYS + x.at[i]]) : 0;
    const float row_weight = __ldg(&c.row_weight[t]);
    load_weights<TILES>(weight, w);
    asm volatile("cp.async.wait_group %0;" ::"n"(FETCHES) : "memory");
    int count = __syncthreads_count(x.here[0]);
    load_operand<TILES>(shared_address(s->queries), 0, b);
    if (!c.dense) /* an eighth of the queries */
        write_query<4>(c, row, shared_address(s->queries), weight, rank / 4 * (KL_WIDTH / 2) + threadIdx.x / 2,
                       rank % 4, threadIdx.x % 2 * 4);
    cluster_wait();
    count += __syncthreads_count(x.here[1]); /* pairs take the place of queries */
    score_keys(s, b, w, x);
    tell_statistics(s, x, rank);
    const double kl = make_slopes(s, x, row_weight);
    write_pair(s, x);
    __syncthreads();
    const share of = share_of(warp);
    sums d = {};
    sum_keys(s, of, row_weight != 0 ? (count + GROUP - 1) / GROUP : 0, d);
    __syncthreads(); /* nobody reads the keys any more */
    write_part(s, of, d);
    cluster_arrive();
    const head_inputs h = load_head(c, t, head);
#pragma unroll
    for (int i = 0; i < 2; i++)
        if (x.here[i] && row_weight != 0)
            write_entry(c, row, rank * KEYS + x.at[i], x.number[i], x.slope[i], x.active[i]);
    send_kl(s, kl, rank);
    cluster_wait();
    write_head(c, t, head, h, add_parts(s, head));
    if (rank == 0 && warp == 0) write_kl(c, t, s);
    cluster_arrive_relaxed();
    cluster_wait(); /* the others have read what this one has */
}

} /* namespace */

void kl_held(cuda_device *d, const kl_call &c)
{
    allow_shared(held_kernel, sizeof(shared));
    held_kernel<<<(unsigned)(c.rows * BLOCKS), THREADS, sizeof(shared), d->stream>>>(c);
}
