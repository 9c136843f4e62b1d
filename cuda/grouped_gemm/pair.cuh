/* The frame of both kernels. A persistent pair of blocks takes tiles from the plan until none is
 * left. In each block one thread feeds a ring of stages through the copy engine, two warpgroups
 * multiply, and in the first block of the pair one warp deals out tiles. A warpgroup that is
 * through with its half of a tile writes it while the other still multiplies and the ring refills.
 */
#pragma once
#include "shape.cuh"
#include "tensor.cuh"

namespace pair {
using namespace hopper;

constexpr int STAGES = 4, MESSAGES = 2;
constexpr int GROUPS =
    2; /* warpgroups that multiply, 64 x 256 outputs each; after the one that loads */
constexpr int THREADS = (GROUPS + 1) * 128;
constexpr uint32_t A_BYTES = OWN * DEPTH * 2, B_BYTES = COMMON * DEPTH * 2;
constexpr uint32_t STAGE_BYTES = A_BYTES + B_BYTES;
constexpr uint32_t BLOCK_BYTES = 64 * 128; /* 64 rows of a swizzled block */
constexpr int STAGING_BLOCKS = 2;          /* per warpgroup, for outputs on their way */
constexpr uint32_t STAGING_BYTES = STAGING_BLOCKS * BLOCK_BYTES;
constexpr int LOOK_AHEAD =
    8; /* stages before the end of a tile at which the next one is asked for */

struct signals {
    int4 tile[MESSAGES];
    uint64_t full[STAGES], empty[STAGES];
    uint64_t tile_full[MESSAGES], tile_empty[MESSAGES];
    uint64_t wanted;
};
constexpr int READERS =
    GROUPS * 4 + 1; /* of a tile message: warps that multiply, the loading thread */

constexpr uint32_t SHARED_BYTES = STAGES * STAGE_BYTES + GROUPS * STAGING_BYTES +
                                  (uint32_t)sizeof(signals) + 1024; /* alignment */

/* addresses in shared memory */
struct frame {
    uint32_t stages, staging, signal;

    __device__ uint32_t a(int slot) const { return stages + slot * STAGE_BYTES; }
    __device__ uint32_t b(int slot) const { return stages + slot * STAGE_BYTES + A_BYTES; }
    __device__ uint32_t tile(int i) const { return signal + i * 16; }
    __device__ uint32_t full(int i) const { return signal + (int)offsetof(signals, full) + i * 8; }
    __device__ uint32_t empty(int i) const
    {
        return signal + (int)offsetof(signals, empty) + i * 8;
    }
    __device__ uint32_t tile_full(int i) const
    {
        return signal + (int)offsetof(signals, tile_full) + i * 8;
    }
    __device__ uint32_t tile_empty(int i) const
    {
        return signal + (int)offsetof(signals, tile_empty) + i * 8;
    }
    __device__ uint32_t wanted() const { return signal + (int)offsetof(signals, wanted); }
};

/* where a thread stands in a ring of N */
template <int N>
struct place {
    int slot = 0;
    uint32_t parity = 0;

    __device__ void advance()
    {
        if (++slot == N) {
            slot = 0;
            parity ^= 1;
        }
    }
};

/* All threads of both blocks. */
__device__ __forceinline__ frame open_frame(void *shared)
{
    frame f;

    f.stages = (shared_address(shared) + 1023) & ~1023u;
    f.staging = f.stages + STAGES * STAGE_BYTES;
    f.signal = f.staging + GROUPS * STAGING_BYTES;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(f.full(i), 1);
            barrier_init(f.empty(i), 2 * GROUPS);
        }
        for (int i = 0; i < MESSAGES; i++) {
            barrier_init(f.tile_full(i), 1);
            barrier_init(f.tile_empty(i), 2 * READERS);
        }
        barrier_init(f.wanted(), 1);
        fence_barrier_init();
        for (int i = 0; i < MESSAGES; i++)
            barrier_expect(f.tile_full(i), 16);
    }
    __syncwarp();
    cluster_barrier();
    return f;
}

/* ---- tiles ------------------------------------------------------------------------------------
 * A message is what a kernel needs to know of a tile; z is the group, or -1: no more tiles. */

__device__ __forceinline__ int4 read_tile(const frame &f, const place<MESSAGES> &mail)
{
    int4 t;

    barrier_wait(f.tile_full(mail.slot), mail.parity);
    asm volatile("ld.shared.v4.s32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(t.x), "=r"(t.y), "=r"(t.z), "=r"(t.w)
                 : "r"(f.tile(mail.slot))
                 : "memory");
    return t;
}

__device__ __forceinline__ void tile_was_read(const frame &f, place<MESSAGES> &mail)
{
    barrier_arrive_cluster(cluster_address(f.tile_empty(mail.slot), 0));
    mail.advance();
}

/* for the loading thread, which also readies its block's barrier for the message after next */
__device__ __forceinline__ int4 next_tile_to_load(const frame &f, place<MESSAGES> &mail)
{
    const int4 t = read_tile(f, mail);

    barrier_expect(f.tile_full(mail.slot), 16);
    tile_was_read(f, mail);
    return t;
}

/* for a warp that multiplies */
__device__ __forceinline__ int4 next_tile(const frame &f, place<MESSAGES> &mail)
{
    int4 t = read_tile(f, mail);

    t.x = __shfl_sync(~0u, t.x, 0); /* tells the compiler that the warp agrees */
    t.y = __shfl_sync(~0u, t.y, 0);
    t.z = __shfl_sync(~0u, t.z, 0);
    t.w = __shfl_sync(~0u, t.w, 0);
    if (threadIdx.x % 32 == 0)
        tile_was_read(f, mail);
    else
        mail.advance();
    return t;
}

/* The warp that deals: describe(tile number, group, number in the group) makes the message. Tiles
 * are taken one by one as they are wanted, so that pairs with small tiles take more of them. */
template <class F>
__device__ __forceinline__ void deal_tiles(const frame &f, struct plan *plan, int groups,
                                           F &&describe)
{
    const int lane = threadIdx.x % 32, tiles = plan->first[groups];
    place<MESSAGES> mail;
    uint32_t asked = 0;
    int group = 0, number = 0;

    for (;;) {
        int4 t = make_int4(0, 0, -1, 0);

        if (lane == 0)
            number = atomicAdd(&plan->next, 1);
        number = __shfl_sync(~0u, number, 0);
        if (number < tiles) {
            for (;;) { /* numbers only grow, so groups do */
                const int at = min(group + 1 + lane, groups);
                const int passed = __popc(__ballot_sync(~0u, plan->first[at] <= number));

                group += passed;
                if (passed < 32)
                    break;
            }
            t = describe(group, number - plan->first[group]);
        }
        barrier_wait(f.tile_empty(mail.slot), mail.parity ^ 1);
        if (lane < 2)
            send16(cluster_address(f.tile(mail.slot), lane), t,
                   cluster_address(f.tile_full(mail.slot), lane));
        if (t.z < 0)
            return;
        mail.advance();
        barrier_wait(f.wanted(), asked);
        asked ^= 1;
    }
}

/* ---- products ---------------------------------------------------------------------------------
 */

/* Both blocks' loads into the slot may go on once the four warpgroups are through with it. */
__device__ __forceinline__ void release(const frame &f, int slot)
{
    const uint32_t thread = threadIdx.x % 128;

    if (thread < 2)
        barrier_arrive_cluster(cluster_address(f.empty(slot), thread));
}

/* STEPS products of one stage */
template <int N, int TA, int TB, int STEPS>
__device__ __forceinline__ void multiply_stage(uint32_t a, uint32_t b, float (&d)[N / 2])
{
    mma_begin();
#pragma unroll
    for (int i = 0; i < STEPS; i++)
        product<N, TA, TB>::run(d, a + i * (TA ? 128 : 2), b + i * (TB ? 128 : 2));
    mma_commit();
}

/* d = A[64, 16 steps] B[16 steps, N] of the ring's next stages, all four steps of each, of the last
 * one `odd` (1 to 3) if that is not 0. TA, TB: operand stored across, [depth][64 columns] per block
 * of 64 columns, else [columns][depth]. */
template <int N, int TA, int TB>
__device__ __forceinline__ void multiply(const frame &f, place<STAGES> &at, int group, int stages,
                                         int odd, float (&d)[N / 2])
{
    const uint32_t a0 = descriptor(f.a(0) + group * BLOCK_BYTES, BLOCK_BYTES);
    const uint32_t b0 = descriptor(f.b(0), BLOCK_BYTES);
    const int whole = stages - (odd > 0);
    int before = -1;

#pragma unroll
    for (int i = 0; i < N / 2; i++)
        d[i] = 0; /* also keeps them from being live from one tile to the next */
    for (int i = 0; i < whole; i++) {
        const uint32_t next = at.slot * (STAGE_BYTES / 16);

        barrier_wait(f.full(at.slot), at.parity);
        multiply_stage<N, TA, TB, DEPTH / STEP>(a0 + next, b0 + next, d);
        if (before >= 0) {
            mma_wait<1>();
            release(f, before);
        }
        before = at.slot;
        at.advance();
    }
    mma_wait<0>();
    settle(d);
    if (before >= 0)
        release(f, before);
    if (odd > 0) {
        const uint32_t next = at.slot * (STAGE_BYTES / 16);

        barrier_wait(f.full(at.slot), at.parity);
        if (odd == 1)
            multiply_stage<N, TA, TB, 1>(a0 + next, b0 + next, d);
        else if (odd == 2)
            multiply_stage<N, TA, TB, 2>(a0 + next, b0 + next, d);
        else
            multiply_stage<N, TA, TB, 3>(a0 + next, b0 + next, d);
        mma_wait<0>();
        settle(d);
        release(f, at.slot);
        at.advance();
    }
}

} /* namespace pair */
