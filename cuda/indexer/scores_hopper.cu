/* Scores of 32 bf16 heads of 128 columns on Hopper's tensor cores.
 *
 * A block keeps the queries of 16 rows in shared memory and streams keys past them, 64 at a time. Four warpgroups have
 * four rows each and multiply keys [64, 128] by the heads of these rows [128, 4 * 32]: a thread then holds a quarter of
 * the heads of two keys, folds them with relu and weight, and four threads add up. The warpgroups take turns, so that
 * the product of one runs while the others fold; a warp loads. No score leaves the chip before it is whole.
 *
 * The work is cut on the device: tiles of 16 rows see ranges of keys, and all pairs of (tile, 64 keys) in
 * order are shared out evenly among the blocks. */
#include "device/tensor_map.cuh"
#include "grouped_gemm/tensor.cuh"
#include "indexer/scores.cuh"

using namespace hopper;

namespace {

constexpr int HEADS = 32, WIDTH = 128;
constexpr int ROWS = 16, KEYS = 64;        /* of a tile */
constexpr int GROUPS = 4;                  /* warpgroups that multiply */
constexpr int OWN = ROWS / GROUPS;         /* rows of each */
constexpr int STAGES = 5;
constexpr int THREADS = (GROUPS + 1) * 128;
constexpr int MOST_TILES = THREADS;        /* of a launch: a thread finds the range of one */

constexpr uint32_t HALF_Q = ROWS * HEADS * 64 * 2, HALF_KEYS = KEYS * 64 * 2; /* bytes of 64 columns */
constexpr uint32_t STAGE_BYTES = 2 * HALF_KEYS;
constexpr int BOX_ROWS = 256;

struct arguments {
    int64_t first, rows, keys, stride;
    int32_t k, use;
    const float *weight;
    const int32_t *start, *end;
    float *scores;
    uint32_t *active;
};
static_assert(OWN == 4, "a quarter of a warp's lanes has a row each");

struct shared {
    float weight[ROWS][4][8];       /* [row][lane % 4]: heads 8 i + 2 lane + (0, 1), as an accumulator has them */
    int32_t low[MOST_TILES];        /* first tile of keys that a tile of rows needs */
    int32_t before[MOST_TILES + 1]; /* pairs before it */
    int32_t sums[THREADS / 32];
    uint64_t q_full, q_empty, full[STAGES], empty[STAGES];
};

constexpr size_t SHARED_BYTES = 2 * HALF_Q + STAGES * STAGE_BYTES + sizeof(shared) + 1024; /* alignment */

/* The tiles of keys that the rows of tile `number` need, and where the first of them is. */
__device__ int keys_needed(const arguments &a, int64_t number, int32_t *low)
{
    int64_t from = a.keys, to = 0;

    if (a.use == SCORES_ALL)
        from = 0, to = a.keys;
    else
        for (int64_t row = number * ROWS; row < min((number + 1) * ROWS, a.rows); row++) {
            const int start = a.start[a.first + row], end = a.end[a.first + row];

            if (start < end && (a.use == SCORES_SEEN || end - start > a.k)) {
                from = min(from, (int64_t)start);
                to = max(to, (int64_t)end);
            }
        }
    *low = (int32_t)(from / KEYS);
    return from < to ? (int)((to + KEYS - 1) / KEYS - from / KEYS) : 0;
}

/* All threads: fills in low and before. */
__device__ void share_out(const arguments &a, shared *s, int tiles)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int32_t low = 0;
    int sum = (int)threadIdx.x < tiles ? keys_needed(a, threadIdx.x, &low) : 0;

    s->low[threadIdx.x] = low;
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) {
        const int lower = __shfl_up_sync(~0u, sum, apart);

        sum += lane >= apart ? lower : 0;
    }
    if (lane == 31) s->sums[warp] = sum;
    __syncthreads();
    for (int w = 0; w < warp; w++) sum += s->sums[w];
    s->before[threadIdx.x + 1] = sum;
    if (threadIdx.x == 0) s->before[0] = 0;
    __syncthreads();
}

/* Calls visit(tile of rows, first tile of keys, one behind the last) for this block's share. */
template <class F>
__device__ __forceinline__ void each_share(const shared *s, int tiles, F &&visit)
{
    const int64_t all = s->before[tiles];
    int at = (int)(all * blockIdx.x / gridDim.x), tile = 0;
    const int end = (int)(all * (blockIdx.x + 1) / gridDim.x);

    for (int low = 0, high = tiles - 1; low <= high;) { /* the last tile that begins at or before `at` */
        const int middle = (low + high) / 2;

        if (s->before[middle] <= at)
            tile = middle, low = middle + 1;
        else
            high = middle - 1;
    }
    for (; at < end; tile++) {
        const int before = s->before[tile], stop = min(end, s->before[tile + 1]);

        if (stop <= at) continue;
        visit(tile, s->low[tile] + at - before, s->low[tile] + stop - before);
        at = stop;
    }
}

/* ---- loading: one thread ---- */

__device__ __forceinline__ void load(const shared *s, uint32_t q, uint32_t keys, int tiles, const arguments &a,
                                     const CUtensorMap *q_map, const CUtensorMap *key_map)
{
    int slot = 0;
    uint32_t parity = 0, q_parity = 0;

    each_share(s, tiles, [&](int tile, int from, int to) {
        const int row = (int)(a.first + (int64_t)tile * ROWS) * HEADS;

        barrier_wait(shared_address(&s->q_empty), q_parity ^ 1);
        q_parity ^= 1;
        barrier_expect(shared_address(&s->q_full), 2 * HALF_Q);
        for (int half = 0; half < 2; half++)
            for (int box = 0; box < ROWS * HEADS / BOX_ROWS; box++)
                load_box(q + half * HALF_Q + box * BOX_ROWS * 128, q_map, half * 64, row + box * BOX_ROWS,
                         shared_address(&s->q_full));
        for (int t = from; t < to; t++) {
            const uint32_t full = shared_address(&s->full[slot]), stage = keys + slot * STAGE_BYTES;

            barrier_wait(shared_address(&s->empty[slot]), parity ^ 1);
            barrier_expect(full, STAGE_BYTES);
            load_box(stage, key_map, 0, t * KEYS, full);
            load_box(stage + HALF_KEYS, key_map, 64, t * KEYS, full);
            if (++slot == STAGES) slot = 0, parity ^= 1;
        }
    });
}

/* ---- multiplying and folding: a warpgroup ---- */

using dots = product<OWN * HEADS, 0, 0>;
constexpr int COUNT = OWN * HEADS / 2; /* accumulators of a thread */

/* d = keys of a stage times the heads of the warpgroup's rows; the last LAST steps still run when this returns. */
constexpr int LAST = 3;

__device__ __forceinline__ void multiply(float (&d)[COUNT], uint32_t keys, uint32_t q)
{
    mma_begin();
#pragma unroll
    for (int step = 0; step < WIDTH / 16; step++) {
        const uint32_t a = descriptor(keys + step / 4 * HALF_KEYS, 16) + step % 4 * 2;
        const uint32_t b = descriptor(q + step / 4 * HALF_Q, 16) + step % 4 * 2;

        if (step == 0)
            dots::start(d, a, b);
        else
            dots::run(d, a, b);
        if (step == WIDTH / 16 - 1 - LAST) mma_commit();
    }
    mma_commit();
    mma_wait<1>();
}

__device__ __forceinline__ float relu(float x) /* NaN goes through */
{
    float y;

    asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
    return y;
}

/* Where a lane's scores go: row lane % 4 of four, for two keys of every 64. */
struct column {
    float *scores; /* of its row at key 0 */
    uint32_t *active;
    int start, count;
};

/* Of four values, one per row, in each of four lanes: what `add` makes of those of row lane % 4. */
template <class T, class F>
__device__ __forceinline__ T join_lanes(const T (&x)[4], F add)
{
    const bool upper = threadIdx.x & 2, odd = threadIdx.x & 1;
    const T kept0 = add(upper ? x[2] : x[0], __shfl_xor_sync(~0u, upper ? x[0] : x[2], 2));
    const T kept1 = add(upper ? x[3] : x[1], __shfl_xor_sync(~0u, upper ? x[1] : x[3], 2));

    return add(odd ? kept1 : kept0, __shfl_xor_sync(~0u, odd ? kept0 : kept1, 1));
}

/* Four rows' active heads of one of a lane's keys. */
__device__ __forceinline__ uint32_t fold_active(const float (&d)[COUNT], int key)
{
    uint32_t word[4];

#pragma unroll
    for (int r = 0; r < 4; r++) {
        word[r] = 0;
#pragma unroll
        for (int h = 0; h < 8; h++)
            word[r] |= d[r * 16 + h / 2 * 4 + key * 2 + h % 2] > 0 ? 1u << (h % 2 * 16 + h / 2) : 0;
        word[r] <<= threadIdx.x % 4 * 4;
    }
    return join_lanes(word, [](uint32_t a, uint32_t b) { return a | b; });
}

/* Four rows' scores of 64 keys; `mine` and mine + 8 are this lane's keys. */
template <bool ACTIVE>
__device__ __forceinline__ void fold(const float (&d)[COUNT], const float (*weight)[4][8], const column &to, int mine,
                                     const arguments &a)
{
    const int quarter = threadIdx.x % 4;
    float total[2][4];

#pragma unroll
    for (int r = 0; r < 4; r++) {
        const float4 low = *(const float4 *)&weight[r][quarter][0], high = *(const float4 *)&weight[r][quarter][4];
        const float w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};

#pragma unroll
        for (int key = 0; key < 2; key++) {
            float sum = 0;

#pragma unroll
            for (int h = 0; h < 8; h++) sum += w[h] * relu(d[r * 16 + h / 2 * 4 + key * 2 + h % 2]);
            total[key][r] = sum;
        }
    }
    /* Four lanes have partial sums of four rows: each adds up one row's. */
#pragma unroll
    for (int key = 0; key < 2; key++) {
        const float score = join_lanes(total[key], [](float x, float y) { return x + y; });
        const uint32_t active = ACTIVE ? fold_active(d, key) : 0;
        const int at = mine + key * 8;

        if ((unsigned)(at - to.start) < (unsigned)to.count) {
            to.scores[at] = score;
            if (ACTIVE) to.active[at] = active;
        } else if (a.use == SCORES_ALL && to.scores && at < a.keys) {
            to.scores[at] = -INFINITY;
        }
    }
}

__device__ __forceinline__ column column_of(const arguments &a, int64_t row)
{
    column c = {};

    if (row < a.rows) {
        c.start = a.start[a.first + row];
        c.count = max(a.end[a.first + row] - c.start, 0);
        c.scores = a.scores + row * a.stride;
        c.active = a.active + row * a.stride;
    }
    return c;
}

/* Named barriers: of one warpgroup's warps, and for its turn to multiply. */
__device__ __forceinline__ void group_barrier(int group) { named_barrier(1 + group, 128); }
__device__ __forceinline__ void await_turn(int group) { named_barrier(1 + GROUPS + group, 256); }
__device__ __forceinline__ void give_turn(int group)
{
    asm volatile("bar.arrive %0, 256;" ::"r"(1 + GROUPS + group) : "memory");
}

__device__ __forceinline__ void take_weights(const arguments &a, shared *s, int group, int64_t row)
{
    group_barrier(group); /* the last ones are used */
    for (int i = threadIdx.x % 128; i < OWN * HEADS; i += 128) {
        const int r = i / HEADS, h = i % HEADS;

        s->weight[group * OWN + r][h % 8 / 2][h / 8 * 2 + h % 2] =
            row + r < a.rows ? a.weight[(a.first + row + r) * HEADS + h] : 0;
    }
    group_barrier(group);
}

template <bool ACTIVE>
__device__ __forceinline__ void score(shared *s, uint32_t q, uint32_t keys, int tiles, const arguments &a, int group)
{
    const int lane = threadIdx.x % 32, key_in_tile = threadIdx.x % 128 / 32 * 16 + lane / 4;
    const uint32_t own_q = q + group * OWN * HEADS * 128;
    int slot = 0;
    uint32_t parity = 0, q_parity = 0;
    float d[COUNT];

    if (group == GROUPS - 1) give_turn(0);
    each_share(s, tiles, [&](int tile, int from, int to) {
        const int64_t row = (int64_t)tile * ROWS + group * OWN;
        const column to_column = column_of(a, row + lane % 4);
        const float(*weight)[4][8] = &s->weight[group * OWN];

        take_weights(a, s, group, row);
        barrier_wait(shared_address(&s->q_full), q_parity);
        q_parity ^= 1;
        for (int t = from; t < to; t++) {
            barrier_wait(shared_address(&s->full[slot]), parity);
            await_turn(group);
            multiply(d, keys + slot * STAGE_BYTES, own_q);
            give_turn((group + 1) % GROUPS);
            mma_wait<0>();
            settle(d);
            barrier_arrive_warp(shared_address(&s->empty[slot]));
            if (t == to - 1) barrier_arrive_warp(shared_address(&s->q_empty));
            fold<ACTIVE>(d, weight, to_column, t * KEYS + key_in_tile, a);
            if (++slot == STAGES) slot = 0, parity ^= 1;
        }
    });
    if (group == 0) await_turn(0); /* takes what the last one gave last */
}

template <bool ACTIVE>
__global__ __launch_bounds__(THREADS, 1) void scores_kernel(const __grid_constant__ CUtensorMap q_map,
                                                            const __grid_constant__ CUtensorMap key_map,
                                                            const arguments a)
{
    extern __shared__ char memory[];
    const uint32_t base = shared_address(memory), q = (base + 1023) & ~1023u, keys = q + 2 * HALF_Q;
    shared *s = (shared *)(memory + (keys + STAGES * STAGE_BYTES - base));
    const int tiles = (int)((a.rows + ROWS - 1) / ROWS);

    if (threadIdx.x == 0) {
        barrier_init(shared_address(&s->q_full), 1);
        barrier_init(shared_address(&s->q_empty), GROUPS * 4);
        for (int i = 0; i < STAGES; i++) {
            barrier_init(shared_address(&s->full[i]), 1);
            barrier_init(shared_address(&s->empty[i]), GROUPS * 4);
        }
        fence_barrier_init();
    }
    share_out(a, s, tiles);
    if (threadIdx.x >= GROUPS * 128) {
        registers_fewer<24>();
        if (threadIdx.x == GROUPS * 128) load(s, q, keys, tiles, a, &q_map, &key_map);
    } else {
        registers_more<112>();
        score<ACTIVE>(s, q, keys, tiles, a, threadIdx.x / 128);
    }
}

} /* namespace */

bool hopper_score_rows(cuda_device *d, const score_call &c, int64_t first, int64_t rows, score_use use, int64_t stride,
                       float *scores, uint32_t *active)
{
    const auto kernel = active ? scores_kernel<true> : scores_kernel<false>;
    CUtensorMap q, key;

    if (c.i.type != GLM52_DTYPE_BF16 || c.i.heads != HEADS || c.i.width != WIDTH || !c.wide ||
        c.i.rows > INT32_MAX / HEADS || c.i.keys > INT32_MAX - KEYS ||
        !map_bf16_rows(&q, c.q, c.i.rows * HEADS, WIDTH, BOX_ROWS) ||
        !map_bf16_rows(&key, c.key, c.i.keys, WIDTH, KEYS))
        return false;
    allow_shared(kernel, SHARED_BYTES);
    for (int64_t done = 0; done < rows; done += MOST_TILES * ROWS) {
        const arguments a = {first + done, std::min<int64_t>(rows - done, MOST_TILES * ROWS), c.i.keys, stride, c.i.k,
                             use, c.weight, c.start, c.end, scores + done * stride,
                             active ? active + done * stride : nullptr};

        kernel<<<d->multiprocessors, THREADS, SHARED_BYTES, d->stream>>>(q, key, a);
    }
    return true;
}
