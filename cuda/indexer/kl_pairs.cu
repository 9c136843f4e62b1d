/* dkey of a chunk (kl_selected.cuh): dkey[u] = sum over rows t and heads h of slope[t,u] active[t,h,u] weight[t,h]
 * q[t,h].
 *
 * A block has KL_GROUP keys and KL_COLUMNS columns of their dkey in shared memory. A round takes up to KL_ROUND
 * entries of one row for each of its four workers, warps that have KL_UNIT keys of their own. A fifth warp copies
 * entries and the row's weighted queries into a ring. A worker makes the left operand in registers, ones where heads
 * are active, and adds slope times the product to the sums of its entries' keys. Keys of a row are distinct and
 * workers own theirs, so nothing is added to at the same time, and always in the order of the rows.
 *
 * The rounds of all groups, listed first, are shared out evenly among the blocks; where a group is cut, its parts
 * are added up in their order at the end. */
#include "grouped_gemm/tensor.cuh"
#include "indexer/kl_selected.cuh"

using namespace hopper;

namespace {

constexpr int WORKERS = KL_UNITS * 32, THREADS = WORKERS + 32;
constexpr int BLOCKS_EACH = 2; /* of a multiprocessor */
constexpr int STAGES = 8;      /* rounds in the ring; loops are unrolled by as many, so that stages are constants */
constexpr int SUMS = KL_GROUP * KL_COLUMNS, UNIT_SUMS = KL_UNIT * KL_COLUMNS;
constexpr uint32_t SUM_BYTES = SUMS * sizeof(float), QUERY_BYTES = KL_TILE * sizeof(bf16);

struct shared {
    float sums[SUMS];
    bf16 queries[STAGES][KL_TILE];
    entry entries[STAGES][KL_UNITS][KL_ROUND];
    uint64_t full[STAGES], empty[STAGES];
};
static_assert((sizeof(shared) + 1024) * BLOCKS_EACH <= 228 << 10, "the device keeps 1 KB a block");

/* ---- the list of rounds: for each worker its first entry and how many, and the row of the chunk ---- */

static_assert(KL_ROUND < 1 << 5 && KL_MOST_ENTRIES <= 1 << 27, "fits 32 bits");

__device__ __forceinline__ uint32_t first_of(uint32_t round) { return round >> 5; }
__device__ __forceinline__ int entries_of(uint32_t round) { return round & 31; }

constexpr int LIST_THREADS = 256;

__device__ __forceinline__ void list_row(const kl_call &c, const entry_range &r, int64_t row, int rounds, int64_t to)
{
    for (int n = 0; n < rounds; n++) {
        uint32_t round[KL_UNITS], first = (uint32_t)(row * c.i.k) + r.begin + n * KL_ROUND;

#pragma unroll
        for (int unit = 0; unit < KL_UNITS; unit++) {
            const int count = count_of(r, unit);

            round[unit] = first << 5 | min(max(count - n * KL_ROUND, 0), KL_ROUND);
            first += count;
        }
        *(uint4 *)&c.rounds[(to + n) * KL_UNITS] = {round[0], round[1], round[2], round[3]};
        c.source[to + n] = (int32_t)row;
    }
}

/* A block for some of the rows of a group, which counts the rounds before its own once more. */
__global__ __launch_bounds__(LIST_THREADS) void list_kernel(const kl_call c)
{
    const int group = blockIdx.x;
    const int64_t each = (c.rows + gridDim.y - 1) / gridDim.y;
    const int64_t begin = each * blockIdx.y, end = min(begin + each, c.rows);
    const entry_range *ranges = c.ranges + group * c.most_rows;
    int before = 0;

    for (int g = threadIdx.x; g < group; g += LIST_THREADS) before += c.counts[g];
    if (blockIdx.y == 0) {
        const int all = block_sum<LIST_THREADS>(before);

        if (threadIdx.x == 0) c.before[group] = all;
        if (threadIdx.x == 0 && group == c.groups - 1) c.before[c.groups] = all + c.counts[group];
    }
    for (int64_t row = threadIdx.x; row < begin; row += LIST_THREADS) before += rounds_of(ranges[row]);
    before = block_sum<LIST_THREADS>(before);
    for (int64_t first = begin; first < end; first += LIST_THREADS) {
        const int64_t row = first + threadIdx.x;
        const entry_range r = row < end ? ranges[row] : entry_range{};
        const int rounds = rounds_of(r);
        int all;
        const int lower = block_before<LIST_THREADS>(rounds, &all);

        list_row(c, r, row, rounds, before + lower);
        before += all;
    }
}

/* ---- a block's share of the rounds ---- */

/* The blocks of a slice that have any. */
__device__ __forceinline__ int64_t sharers(const kl_call &c, int64_t all) { return min((int64_t)c.blocks, all); }

/* The group that round number `at` belongs to. */
__device__ __forceinline__ int group_of(const kl_call &c, int at)
{
    int low = 0, high = (int)c.groups - 1;

    while (low < high) { /* the last one that begins at or before it */
        const int middle = (low + high + 1) / 2;

        if (c.before[middle] <= at)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

/* Calls visit(group, first round, how many, how many with the empty ones that fill up the ring) for the groups that
 * block `part` of a slice has to do with. The last round is empty, as a product is added a round later. */
template <class F>
__device__ __forceinline__ void each_group(const kl_call &c, int part, F &&visit)
{
    const int64_t all = c.before[c.groups], blocks = sharers(c, all);

    if (part >= blocks) return;
    int at = (int)(all * part / blocks);
    const int end = (int)(all * (part + 1) / blocks);
    for (int group = group_of(c, at); at < end; group++) {
        const int stop = min(end, c.before[group + 1]), count = stop - at;

        if (count <= 0) continue;
        visit(group, at, count, (count + STAGES) / STAGES * STAGES);
        at = stop;
    }
}

/* ---- copying: a warp ---- */

/* 8 bytes, or zeros if !here. */
__device__ __forceinline__ void copy_entry(uint32_t to, const entry *from, bool here)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(here ? 8 : 0) : "memory");
}

struct copier {
    const kl_call &c;
    shared *s;
    const bf16 *queries; /* of the slice */
    uint32_t parity = 1;

    /* A round, in which a lane has entries of units lane / 16 and two more. Where it is empty, queries of some row
     * or other. */
    template <int STAGE>
    __device__ __forceinline__ void copy(const uint32_t (&round)[2], int row)
    {
        const int lane = threadIdx.x % 32, at = lane % 16;
        const uint32_t full = shared_address(&s->full[STAGE]), to = shared_address(&s->entries[STAGE][0][0]) + lane * 8;

        barrier_wait(shared_address(&s->empty[STAGE]), parity);
#pragma unroll
        for (int i = 0; i < 2; i++)
            copy_entry(to + i * 2 * KL_ROUND * 8, c.entries + first_of(round[i]) + at, at < entries_of(round[i]));
        copies_arrive(full);
        __syncwarp();
        if (elected()) {
            barrier_expect(full, QUERY_BYTES);
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                         ::"r"(shared_address(s->queries[STAGE])),
                         "l"(queries + (int64_t)row * KL_TILE), "r"(QUERY_BYTES), "r"(full)
                         : "memory");
        }
        __syncwarp();
    }

    /* Rounds of the list, and behind them empty ones: as many as there are stages. */
    __device__ __forceinline__ void run(int at, int count, int filled)
    {
        constexpr int BATCH = STAGES * KL_UNITS;
        static_assert(BATCH <= 32, "a lane a round of a unit");
        const int lane = threadIdx.x % 32, mine = lane % BATCH / KL_UNITS;
        const uint32_t *rounds = c.rounds + (int64_t)at * KL_UNITS + lane % BATCH;
        auto listed = [&](int n) { return n + mine < count ? __ldg(&rounds[n * KL_UNITS]) : 0; };
        auto source = [&](int n) { return n + mine < count ? __ldg(&c.source[at + n + mine]) : 0; };
        uint32_t list = listed(0), next = listed(STAGES);
        int rows = source(0), next_rows = source(STAGES);

        for (int n = 0; n < filled; n += STAGES) {
            uint32_t round[STAGES][2];
            int row[STAGES];

#pragma unroll
            for (int i = 0; i < STAGES; i++) {
                round[i][0] = __shfl_sync(~0u, list, i * KL_UNITS + lane / 16);
                round[i][1] = __shfl_sync(~0u, list, i * KL_UNITS + lane / 16 + 2);
                row[i] = __shfl_sync(~0u, rows, i * KL_UNITS);
            }
            list = next, rows = next_rows;
            next = listed(n + 2 * STAGES), next_rows = source(n + 2 * STAGES);
            repeat<0, STAGES>([&](auto stage) { copy<stage.value>(round[stage.value], row[stage.value]); });
            parity ^= 1;
        }
    }

    /* One that is awaited behind the last, and not used. */
    __device__ __forceinline__ void end() { copy<0>({}, 0); }
};

/* ---- a worker ---- */

/* 1 for each active head, as wgmma's left operand: keys x 32 heads; the first eight keys or the last. `active` has this
 * lane's heads at bits 12 and 28 and above. */
__device__ __forceinline__ void make_operand(uint32_t (&a)[2][4], uint32_t active, int eight)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t both;

        /* the signs of bytes 1 and 3, each to two bytes */
        asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(both) : "r"(active << (3 - i)));
        a[i / 2][i % 2 * 2 + eight] = both & 0x3f803f80;
    }
}

/* d[64, 32] = a[64, 32] times the queries. Rows of B lie as 64 bytes each, their 16-byte pieces swapped (64-byte
 * swizzle). */
__device__ __forceinline__ void multiply(float (&d)[16], uint32_t (&a)[2][4], uint32_t queries)
{
#define PRODUCT(step, add)                                                                                            \
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "                                              \
                 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, " #add ", 1, 1, 0;"\
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),    \
                   "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])\
                 : "r"(a[step][0]), "r"(a[step][1]), "r"(a[step][2]), "r"(a[step][3]),                                \
                   "l"((uint64_t)0x80000020 << 32 | 1 << 16 | ((queries & 0x3ffff) >> 4) + 2 * step))
#pragma unroll
    for (int i = 0; i < 8; i++) /* made before the fence: nothing then keeps the product from running on */
        asm volatile("" : "+r"(a[i / 4][i % 4])::"memory");
    mma_begin();
    PRODUCT(0, 0);
    PRODUCT(1, 1);
    mma_commit();
#undef PRODUCT
}

/* What a lane adds of a round: 8 columns, two pieces of 16 bytes, for the keys of entries lane / 4 and 8 more. Lanes
 * of odd entries take the second piece first: eight lanes, which have two keys, then touch all banks once. */
struct addition {
    float4 *at[2][2];
    float slope[2];
    bool here[2];

    __device__ __forceinline__ addition() : here{} {}
    __device__ __forceinline__ addition(float *sums, const entry (&e)[2])
    {
        const int lane = threadIdx.x % 32, odd = lane / 4 % 2;

#pragma unroll
        for (int key = 0; key < 2; key++) {
            float4 *row = (float4 *)(sums + key_of(e[key].slope) * KL_COLUMNS) + lane % 4 * 2;

            at[key][0] = row + odd, at[key][1] = row + (odd ^ 1);
            slope[key] = slope_of(e[key].slope);
            here[key] = e[key].active != 0; /* of none, or of an entry that gives nothing */
        }
    }

    __device__ __forceinline__ void load(float4 (&sum)[2][2]) const
    {
#pragma unroll
        for (int key = 0; key < 2; key++)
            if (here[key]) sum[key][0] = *at[key][0], sum[key][1] = *at[key][1];
    }

    __device__ __forceinline__ void add(float4 (&sum)[2][2], const float (&d)[16]) const
    {
        const bool odd = threadIdx.x / 4 % 2;

#pragma unroll
        for (int key = 0; key < 2; key++) {
            const float *low = d + key * 2, *high = low + 8, by = slope[key];
            const float4 x = {low[0], low[1], low[4], low[5]}, y = {high[0], high[1], high[4], high[5]};

            add_scaled(sum[key][0], by, odd ? y : x);
            add_scaled(sum[key][1], by, odd ? x : y);
        }
#pragma unroll
        for (int key = 0; key < 2; key++)
            if (here[key]) *at[key][0] = sum[key][0], *at[key][1] = sum[key][1];
    }

    static __device__ __forceinline__ void add_scaled(float4 &sum, float by, const float4 &x)
    {
        sum.x += by * x.x, sum.y += by * x.y, sum.z += by * x.z, sum.w += by * x.w;
    }
};

/* The rounds of a unit, through all groups. Of two buffers, those of one round are in use while the last one's
 * product is added. */
struct worker {
    shared *s;
    float *sums;
    int unit, shift;
    entry e[2];           /* of the round to come */
    uint32_t parity = 0;
    uint32_t a[2][2][4] = {};
    float d[2][16] = {};
    addition adds[2];
    bool frees = false;   /* from the second round on */

    __device__ __forceinline__ void await(int stage)
    {
        const entry *from = s->entries[stage][unit] + threadIdx.x % 32 / 4;

        barrier_wait(shared_address(&s->full[stage]), parity);
        e[0] = from[0], e[1] = from[8];
    }

    template <int STAGE>
    __device__ __forceinline__ void step()
    {
        constexpr int now = STAGE % 2, last = now ^ 1;
        float4 sum[2][2];

        __syncwarp(); /* what other lanes added before */
        adds[last].load(sum);
        make_operand(a[now], e[0].active << shift, 0);
        make_operand(a[now], e[1].active << shift, 1);
        adds[now] = addition(sums, e);
        if (STAGE == STAGES - 1) parity ^= 1;
        await((STAGE + 1) % STAGES);
        mma_wait<0>();
        settle(d[last]);
        if (frees) barrier_arrive(shared_address(&s->empty[(STAGE + STAGES - 1) % STAGES]));
        frees = true;
        multiply(d[now], a[now], shared_address(s->queries[STAGE]));
        adds[last].add(sum, d[last]);
    }

    __device__ __forceinline__ void run(int filled)
    {
        for (int i = threadIdx.x % 32; i < UNIT_SUMS / 4; i += 32) ((float4 *)sums)[i] = float4{};
        for (int n = 0; n < filled; n += STAGES) repeat<0, STAGES>([&](auto stage) { step<stage.value>(); });
    }
};

/* By all workers. */
__device__ __forceinline__ void store_sums(float *to, const float *sums)
{
    fence_async();
    named_barrier(1, WORKERS);
    if (threadIdx.x == 0) {
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(sums)),
                     "r"(SUM_BYTES)
                     : "memory");
        boxes_commit();
        boxes_read<0>();
    }
    named_barrier(1, WORKERS);
}

__global__ __launch_bounds__(THREADS, BLOCKS_EACH) void pairs_kernel(const kl_call c)
{
    extern __shared__ __align__(1024) char memory[];
    shared *s = (shared *)memory;
    const int part = blockIdx.x / KL_SLICES, slice = blockIdx.x % KL_SLICES, warp = threadIdx.x / 32;

    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(shared_address(&s->full[i]), 33); /* each lane's copies, and the queries */
            barrier_init(shared_address(&s->empty[i]), WORKERS);
        }
        fence_barrier_init();
    }
    __syncthreads();
    if (threadIdx.x >= WORKERS) {
        copier from = {c, s, c.queries + slice * c.most_rows * KL_TILE};

        each_group(c, part, [&](int, int at, int count, int filled) { from.run(at, count, filled); });
        from.end();
    } else {
        worker w = {s, s->sums + warp * UNIT_SUMS, warp, 12 - (int)threadIdx.x % 4 * 4};

        w.await(0);
        each_group(c, part, [&](int group, int, int, int filled) {
            w.run(filled);
            store_sums(c.part + ((int64_t)(part + group) * KL_SLICES + slice) * SUMS, s->sums);
        });
        mma_wait<0>();
        if (threadIdx.x == 0) boxes_written();
    }
}

/* ---- dkey (+)= the parts of its group in their order ---- */

constexpr int ADD_THREADS = 256, ADD_EACH = 4, ADD_BLOCKS = SUMS * KL_SLICES / 4 / (ADD_THREADS * ADD_EACH);

/* The block of a slice that has round number `at`. */
__device__ __forceinline__ int owner_of(const kl_call &c, int64_t at, int64_t all)
{
    return (int)(((at + 1) * sharers(c, all) - 1) / all);
}

__global__ __launch_bounds__(ADD_THREADS) void add_parts_kernel(const kl_call c)
{
    constexpr int SLICE_BLOCKS = ADD_BLOCKS / KL_SLICES;
    const int64_t group = blockIdx.x, all = c.before[c.groups], begin = c.before[group], end = c.before[group + 1];
    const int slice = blockIdx.y / SLICE_BLOCKS;
    const int first = begin < end ? owner_of(c, begin, all) : 0, last = begin < end ? owner_of(c, end - 1, all) : -1;

#pragma unroll
    for (int n = 0; n < ADD_EACH; n++) {
        const int i = (blockIdx.y % SLICE_BLOCKS * ADD_EACH + n) * ADD_THREADS + threadIdx.x;
        const int64_t key = group * KL_GROUP + i / (KL_COLUMNS / 4);
        if (key >= c.i.keys) return;
        float4 *to = (float4 *)&c.dkey[key * KL_WIDTH + slice * KL_COLUMNS + i % (KL_COLUMNS / 4) * 4];
        float4 sum = c.first ? *to : float4{};

        for (int part = first; part <= last; part++) {
            const float4 x = ((const float4 *)(c.part + ((part + group) * KL_SLICES + slice) * SUMS))[i];

            sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
        }
        *to = sum;
    }
}

} /* namespace */

int kl_pair_blocks(const cuda_device *d) { return std::max(1, d->multiprocessors * BLOCKS_EACH / KL_SLICES); }

void kl_pairs(cuda_device *d, const kl_call &c)
{
    const int64_t lists = std::max<int64_t>(1, std::min<int64_t>(d->multiprocessors / c.groups, c.rows / LIST_THREADS));

    allow_shared(pairs_kernel, sizeof(shared));
    kl_ranges(d, c);
    list_kernel<<<dim3((unsigned)c.groups, (unsigned)lists), LIST_THREADS, 0, d->stream>>>(c);
    pairs_kernel<<<(unsigned)(c.blocks * KL_SLICES), THREADS, sizeof(shared), d->stream>>>(c);
    add_parts_kernel<<<dim3((unsigned)c.groups, ADD_BLOCKS), ADD_THREADS, 0, d->stream>>>(c);
}
