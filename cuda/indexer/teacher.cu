/* p = mean over heads of exp(q k^T scale - lse), and lse where no attention has left one.
 *
 * A block has 128 rows and 128 keys, 64 rows for either of two warpgroups, whose products follow one another 64 columns
 * at a time and do not wait for what is made of them. For p the keys stay and the heads change, so the sum over heads
 * never leaves the registers; for lse the head stays and the keys change. Four blocks work together on 256 rows and
 * 256 keys: either half of a block's queries or keys is brought by one of the two that need it, for both. Block `rank`
 * of the four has rows rank % 2 and keys rank / 2. */
#include "indexer/teacher.cuh"

#include "attention/hopper.cuh"
#include "attention/visible.cuh"
#include "grouped_gemm/grouped_gemm.h"
#include "grouped_gemm/shape.cuh"

namespace {

using namespace hopper;

constexpr int STAGES = 6, GROUPS = 2, THREADS = (GROUPS + 1) * WARPGROUP;
constexpr int SIDE = GROUPS * TILE; /* rows, and keys, of a block */
constexpr int IN_FULL = 256, ABSORBED = 576; /* widths of a head */
constexpr uint32_t SIDE_BYTES = 2 * BLOCK_BYTES;

struct teacher_maps {
    CUtensorMap q, key;
};

struct shared_teacher {
    struct {
        unsigned char q[SIDE_BYTES], key[SIDE_BYTES]; /* 64 columns */
    } stage[STAGES];
    uint64_t full[STAGES], empty[STAGES];
};

/* What a block goes through: heads of one tile of keys, or tiles of keys (every second one) of one head. */
struct course {
    int64_t row, key, last; /* rows of all, and the first of them that is not there */
    int head, count, step;  /* step: of keys; 0: the head changes */

    __device__ int head_at(int i) const { return step ? head : i; }
    __device__ int64_t key_at(int i) const { return key + (int64_t)i * step; }
};

__device__ __forceinline__ void load_box_blocks(uint32_t to, const CUtensorMap *map, int column, int row, int head,
                                                uint32_t barrier, uint16_t blocks)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%2,%3,%4}], [%5], %6;" ::"r"(to),
                 "l"(map), "r"(column), "r"(row), "r"(head), "r"(barrier), "h"(blocks)
                 : "memory");
}

__device__ void bring(const teacher_maps &m, const teaching &x, shared_teacher &s, const course &c)
{
    const uint32_t rank = cluster_rank(), rows = rank % 2, keys = rank / 2;
    const uint16_t same_rows = 5 << rows, same_keys = 3 << 2 * keys;
    const int blocks = x.t.width / BLOCK;
    uint32_t slot = 0, parity = 1;

    for (int i = 0; i < c.count; i++) {
        const int head = c.head_at(i), key_head = (int)((int64_t)head * x.t.key_heads / x.t.heads);
        const int row = (int)c.row + (int)keys * TILE, key = (int)c.key_at(i) + (int)rows * TILE;

        for (int b = 0; b < blocks; b++) {
            const uint32_t full = shared_address(&s.full[slot]);

            barrier_wait(shared_address(&s.empty[slot]), parity);
            barrier_expect(full, 2 * SIDE_BYTES);
            load_box_blocks(shared_address(s.stage[slot].q) + keys * BLOCK_BYTES, &m.q, b * BLOCK, row, head, full,
                            same_rows);
            load_box_blocks(shared_address(s.stage[slot].key) + rows * BLOCK_BYTES, &m.key, b * BLOCK, key, key_head,
                            full, same_keys);
            if (++slot == STAGES) slot = 0, parity ^= 1;
        }
    }
}

/* Where a warpgroup stands in the ring. A stage is given back to all that bring something into it, LATE products after
 * its own began: so many are under way while the warpgroup does other things. */
constexpr int LATE = 3;

struct reader {
    shared_teacher &s;
    uint32_t empty; /* of slot 0: this block's in lane 0, its two neighbours' in 1 and 2 */
    uint32_t group, slot = 0, parity = 0, behind = 0;
    int held = 0;

    __device__ __forceinline__ explicit reader(shared_teacher &memory) : s(memory)
    {
        empty = cluster_address(shared_address(s.empty), cluster_rank() ^ threadIdx.x % 32 % 3);
        group = __reduce_max_sync(~0u, threadIdx.x / WARPGROUP);
    }
    __device__ __forceinline__ void give_back()
    {
        __syncwarp();
        if (threadIdx.x % 32 < 3) barrier_arrive_cluster(empty + behind * 8);
        if (++behind == STAGES) behind = 0;
    }
    /* 64 columns more of score; FIRST: the first */
    template <bool FIRST>
    __device__ __forceinline__ void multiply(float (&score)[64])
    {
        const uint32_t at = __reduce_max_sync(~0u, slot); /* for the compiler: the same in all lanes */
        const uint32_t q = descriptor(shared_address(s.stage[at].q) + group * BLOCK_BYTES, 16);
        const uint32_t k = descriptor(shared_address(s.stage[at].key), 16);

        barrier_wait(shared_address(&s.full[at]), parity);
        mma_begin();
#pragma unroll
        for (int step = 0; step < BLOCK / 16; step++) {
            if (FIRST && step == 0)
                product<SIDE, 0, 0>::start(score, q, k);
            else
                product<SIDE, 0, 0>::run(score, q + step * 2, k + step * 2);
        }
        mma_commit();
        mma_wait<LATE>();
        if (held == LATE)
            give_back();
        else
            held++;
        if (++slot == STAGES) slot = 0, parity ^= 1;
    }
    /* Begins score = this warpgroup's 64 rows times 128 keys; whatever was begun before it is then complete. */
    template <int WIDTH>
    __device__ __forceinline__ void begin(float (&score)[64])
    {
        static_assert(WIDTH / BLOCK >= LATE, "what was begun before is complete");
        multiply<true>(score);
#pragma unroll
        for (int b = 1; b < WIDTH / BLOCK; b++) multiply<false>(score);
    }
    __device__ __forceinline__ void finish()
    {
        mma_wait<0>();
        for (; held > 0; held--) give_back();
    }
};

/* Calls fold(i, scores) for all of a course, each while the products of the next are under way. */
template <int WIDTH, class F>
__device__ __forceinline__ void each_score(shared_teacher &s, int count, F &&fold)
{
    float even[64], odd[64];
    int i = 0;
    reader r(s);

    if (count == 0) return;
    auto make = [&](int at, float (&score)[64]) {
        settle(score);
        fold(at, score);
    };
    r.begin<WIDTH>(even);
    for (; i + 2 < count; i += 2) {
        r.begin<WIDTH>(odd);
        make(i, even);
        r.begin<WIDTH>(even);
        make(i + 1, odd);
    }
    if (i + 1 < count) {
        r.begin<WIDTH>(odd);
        make(i, even);
        r.finish();
        make(i + 1, odd);
    } else {
        r.finish();
        make(i, even);
    }
}

template <int WIDTH>
__device__ void mean(const teaching &x, shared_teacher &s, const course &c)
{
    const int64_t mine = c.row + threadIdx.x / WARPGROUP * TILE + fragment_row(); /* and the one 8 further on */
    const int heads = x.t.heads;
    const float scale = x.t.scale * LOG2_E;
    const float *lse = x.lse + (mine - x.first) * heads;
    const bool here[2] = {mine < c.last, mine + 8 < c.last};
    float sum[64] = {}, next[2] = {here[0] ? lse[0] : INFINITY, here[1] ? lse[8 * heads] : INFINITY};

    each_score<WIDTH>(s, heads, [&](int head, const float (&score)[64]) {
        const float now[2] = {next[0] * LOG2_E, next[1] * LOG2_E};

        if (head + 1 < heads) {
            if (here[0]) next[0] = lse[head + 1];
            if (here[1]) next[1] = lse[8 * heads + head + 1];
        }
#pragma unroll
        for (int i = 0; i < 64; i++) sum[i] += exp2_fast(fmaf(score[i], scale, -now[i / 2 % 2]));
    });
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int64_t t = mine + 8 * h;
        const int start = t < c.last ? x.start[t] : 0, end = t < c.last ? x.end[t] : 0;

#pragma unroll
        for (int i = 2 * h; i < 64; i += 4)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const int64_t u = c.key + 8 * (i / 4) + fragment_column() + j;

                if (u >= start && u < end) x.p[(t - x.first) * x.stride + u] = sum[i + j] / (float)heads;
            }
    }
}

template <int WIDTH>
__device__ void log_sums(const teaching &x, shared_teacher &s, const course &c, float *lse)
{
    const int64_t mine = c.row + threadIdx.x / WARPGROUP * TILE + fragment_row();
    const float scale = x.t.scale * LOG2_E;
    int start[2], count[2];
    float top[2] = {-INFINITY, -INFINITY}, sum[2] = {}; /* of this lane's columns; powers of two */

#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int64_t t = mine + 8 * h;

        start[h] = t < c.last ? x.start[t] : 0;
        count[h] = t < c.last ? max(x.end[t] - start[h], 0) : 0;
    }
    each_score<WIDTH>(s, c.count, [&](int tile, const float (&score)[64]) {
        const int key = (int)c.key_at(tile) + fragment_column();

#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int first = key - start[h];
            float most = top[h], here = 0;
            auto each = [&](auto &&visit) {
#pragma unroll
                for (int i = 2 * h; i < 64; i += 4)
#pragma unroll
                    for (int j = 0; j < 2; j++) {
                        const bool seen = (unsigned)(first + 8 * (i / 4) + j) < (unsigned)count[h];

                        visit(seen ? score[i + j] * scale : -INFINITY);
                    }
            };

            each([&](float logit) { most = fmaxf(most, logit); });
            if (most == -INFINITY) continue;
            each([&](float logit) { here += exp2_fast(logit - most); });
            sum[h] = sum[h] * exp2_fast(top[h] - most) + here;
            top[h] = most;
        }
    });
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float most = fmaxf(top[h], __shfl_xor_sync(~0u, top[h], 1));

        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        float all = top[h] == -INFINITY ? 0 : sum[h] * exp2_fast(top[h] - most);
        all += __shfl_xor_sync(~0u, all, 1);
        all += __shfl_xor_sync(~0u, all, 2);
        if (fragment_column() == 0 && mine + 8 * h < c.last)
            lse[(mine + 8 * h - x.first) * x.t.heads + c.head] =
                all == 0 ? -INFINITY : (most + log2f(all)) * 0.6931471805599453f;
    }
}

/* blockIdx: tile of the chunk's rows; tile of keys, or which half of these tiles; head. */
template <int WIDTH, bool LSE>
__global__ __cluster_dims__(2, 2) __launch_bounds__(THREADS, 1)
void teacher_kernel(const __grid_constant__ teacher_maps m, const teaching x)
{
    extern __shared__ unsigned char memory[];
    shared_teacher &s = *(shared_teacher *)(memory + (-shared_address(memory) & 1023));
    course c = {x.first + (int64_t)blockIdx.x * SIDE, (int64_t)blockIdx.y * SIDE, x.first + x.rows, (int)blockIdx.z,
                x.t.heads};
    const int64_t all_rows = c.row - blockIdx.x % 2 * SIDE, all_keys = c.key - blockIdx.y % 2 * SIDE;
    const int64_t left = c.last - all_rows;
    const range all = visible_range(x.start, x.end, all_rows, (int)max((int64_t)0, min((int64_t)(2 * SIDE), left)));

    if (LSE) {
        const int first = all.low / (2 * SIDE);

        c.key += (int64_t)first * 2 * SIDE;
        c.step = 2 * SIDE;
        c.count = all.low < all.high ? (all.high + 2 * SIDE - 1) / (2 * SIDE) - first : 0;
    } else if (all.low >= all_keys + 2 * SIDE || all.high <= all_keys) {
        return; /* all four do */
    }
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(shared_address(&s.full[i]), 1);
            barrier_init(shared_address(&s.empty[i]), 3 * GROUPS * 4);
        }
        fence_barrier_init();
    }
    __syncthreads();
    cluster_barrier();
    if (threadIdx.x >= GROUPS * WARPGROUP) {
        registers_fewer<24>();
        if (threadIdx.x == GROUPS * WARPGROUP) bring(m, x, s, c);
        __syncwarp();
    } else {
        registers_more<240>();
        if (LSE)
            log_sums<WIDTH>(x, s, c, x.own_lse + blockIdx.y * x.rows * x.t.heads);
        else
            mean<WIDTH>(x, s, c);
    }
    cluster_barrier(); /* the others may still bring or arrive */
}

/* lse of both halves into the first; +inf where there is no key. */
__global__ void join_kernel(float *lse, int64_t count)
{
    const int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;

    if (i >= count) return;
    const float a = lse[i], b = lse[count + i], most = fmaxf(a, b);

    lse[i] = most == -INFINITY ? INFINITY : most + logf(expf(a - most) + expf(b - most));
}

bool map_of(CUtensorMap *map, const void *array, int64_t width, int64_t rows, int64_t heads)
{
    const int64_t size[3] = {width, rows, heads};

    return encode_map(map, GROUPED_GEMM_BF16, array, 3, size, heads * width, width, BLOCK, TILE);
}

template <int WIDTH>
void teach(cuda_device *d, const teacher_maps &m, teaching x)
{
    const unsigned rows = (unsigned)(divided(x.rows, 2 * SIDE) * 2), keys = (unsigned)(divided(x.keys, 2 * SIDE) * 2);
    const size_t bytes = sizeof(shared_teacher) + 1024; /* alignment */

    if (!x.lse) {
        const int64_t count = x.rows * x.t.heads;
        const dim3 blocks(rows, TEACHER_PARTS, (unsigned)x.t.heads);

        allow_shared(teacher_kernel<WIDTH, true>, bytes);
        teacher_kernel<WIDTH, true><<<blocks, THREADS, bytes, d->stream>>>(m, x);
        join_kernel<<<(unsigned)divided(count, 256), 256, 0, d->stream>>>(x.own_lse, count);
        x.lse = x.own_lse;
    }
    allow_shared(teacher_kernel<WIDTH, false>, bytes);
    teacher_kernel<WIDTH, false><<<dim3(rows, keys), THREADS, bytes, d->stream>>>(m, x);
}

} /* namespace */

bool teach_hopper(cuda_device *d, const teaching &x)
{
    teacher_maps m;

    if (x.type != GLM52_DTYPE_BF16 || (x.t.width != IN_FULL && x.t.width != ABSORBED) ||
        (x.t.key_heads != x.t.heads && x.t.key_heads != 1) || !aligned16(x.q) || !aligned16(x.key) ||
        x.keys > INT32_MAX - 2 * SIDE || x.keys == 0 || x.all_rows > INT32_MAX - 2 * SIDE ||
        !map_of(&m.q, x.q, x.t.width, x.all_rows, x.t.heads) ||
        !map_of(&m.key, x.key, x.t.width, x.keys, x.t.key_heads))
        return false;
    if (x.t.width == IN_FULL)
        teach<IN_FULL>(d, m, x);
    else
        teach<ABSORBED>(d, m, x);
    return true;
}
