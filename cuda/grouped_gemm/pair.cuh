/* The frame of both kernels. A persistent pair of blocks takes tiles from the plan until none is
 * left. In each block one thread feeds the ring, two warpgroups multiply, and in the first block of
 * the pair one warp deals out tiles. In rows.cu a warpgroup that is through with its half of a tile
 * writes it while the other still multiplies and the ring refills. */
#pragma once
#include "ring.cuh"

namespace pair {

constexpr int MESSAGES = 2;
constexpr int LOOK_AHEAD =
    8; /* stages before the end of a tile at which the next one is asked for */
constexpr int READERS =
    GROUPS * 4 + 1; /* of a tile message: warps that multiply, the loading thread */

struct messages {
    int4 tile[MESSAGES];
    uint64_t tile_full[MESSAGES], tile_empty[MESSAGES];
    uint64_t wanted;
};

/* addresses in shared memory of what tells a pair its tiles */
struct mailbox {
    uint32_t at;

    __device__ uint32_t tile(int i) const { return at + i * 16; }
    __device__ uint32_t tile_full(int i) const
    {
        return at + (int)offsetof(messages, tile_full) + i * 8;
    }
    __device__ uint32_t tile_empty(int i) const
    {
        return at + (int)offsetof(messages, tile_empty) + i * 8;
    }
    __device__ uint32_t wanted() const { return at + (int)offsetof(messages, wanted); }
};

/* The ring, the mailbox behind it, and room for MORE barriers of the kernel's own. */
template <int STAGES, int STAGING, int MORE = 0, int COLUMNS = COMMON>
struct frame : ring<STAGES, STAGING, COLUMNS>, mailbox {
    using base_ring = ring<STAGES, STAGING, COLUMNS>;
    static constexpr uint32_t SHARED_BYTES =
        base_ring::SHARED_BYTES + (uint32_t)sizeof(messages) + MORE * 8;

    /* All threads of both blocks; each of the kernel's own barriers has one arrival a phase. */
    __device__ __forceinline__ explicit frame(void *shared)
        : base_ring(shared), mailbox{base_ring::end()}
    {
        if (threadIdx.x == 0) {
            base_ring::init();
            for (int i = 0; i < MESSAGES; i++) {
                barrier_init(tile_full(i), 1);
                barrier_init(tile_empty(i), 2 * READERS);
            }
            barrier_init(wanted(), 1);
            for (int i = 0; i < MORE; i++)
                barrier_init(own(i), 1);
            fence_barrier_init();
            for (int i = 0; i < MESSAGES; i++)
                barrier_expect(tile_full(i), 16);
        }
        __syncwarp();
        cluster_barrier();
    }
    __device__ uint32_t own(int i) const { return at + (uint32_t)sizeof(messages) + i * 8; }
};

/* ---- tiles ------------------------------------------------------------------------------------
 * A message is what a kernel needs to know of a tile; z is the group, or -1: no more tiles. */

__device__ __forceinline__ int4 read_tile(const mailbox &f, const place<MESSAGES> &mail)
{
    int4 t;

    barrier_wait(f.tile_full(mail.slot), mail.parity);
    asm volatile("ld.shared.v4.s32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(t.x), "=r"(t.y), "=r"(t.z), "=r"(t.w)
                 : "r"(f.tile(mail.slot))
                 : "memory");
    return t;
}

__device__ __forceinline__ void tile_was_read(const mailbox &f, place<MESSAGES> &mail)
{
    barrier_arrive_cluster(cluster_address(f.tile_empty(mail.slot), 0));
    mail.advance();
}

/* for the loading thread, which also readies its block's barrier for the message after next */
__device__ __forceinline__ int4 next_tile_to_load(const mailbox &f, place<MESSAGES> &mail)
{
    const int4 t = read_tile(f, mail);

    barrier_expect(f.tile_full(mail.slot), 16);
    tile_was_read(f, mail);
    return t;
}

/* for a warp that multiplies */
__device__ __forceinline__ int4 next_tile(const mailbox &f, place<MESSAGES> &mail)
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
__device__ __forceinline__ void deal_tiles(const mailbox &f, struct plan *plan, int groups,
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

} /* namespace pair */
