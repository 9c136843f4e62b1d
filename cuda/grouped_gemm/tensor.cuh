/* More sm_90a instructions under plain names: boxes of tensors copied by the copy engine (TMA),
 * clusters of two blocks, and wgmma of every width that is a multiple of 16. */
#pragma once
#include <cuda.h>

#include "../sparse_mla/hopper.cuh"

namespace hopper {

/* One lane of the warp, the same each time. */
__device__ __forceinline__ bool elected()
{
    uint32_t yes;

    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(yes));
    return yes;
}

/* ---- clusters ---------------------------------------------------------------------------------
 */

__device__ __forceinline__ uint32_t cluster_rank()
{
    uint32_t rank;

    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

/* The address in the cluster of block `rank`'s copy of a shared memory address. */
__device__ __forceinline__ uint32_t cluster_address(uint32_t address, uint32_t rank)
{
    uint32_t there;

    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

__device__ __forceinline__ void cluster_barrier()
{
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

/* Barriers initialised before this exist for the other block after a cluster_barrier(). */
__device__ __forceinline__ void fence_barrier_init()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/* Only for buffers that the copy engine and wgmma alone touch: orders no ordinary accesses. */
__device__ __forceinline__ void barrier_arrive_cluster(uint32_t cluster_barrier)
{
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(cluster_barrier) : "memory");
}

/* One arrival, and `bytes` more to land before the phase is over. */
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

/* 16 bytes into a block of the cluster; they count at a barrier of that block. */
__device__ __forceinline__ void send16(uint32_t to, int4 v, uint32_t barrier)
{
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.s32 "
                 "[%0], {%1,%2,%3,%4}, [%5];" ::"r"(to),
                 "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(barrier)
                 : "memory");
}

/* ---- boxes ------------------------------------------------------------------------------------
 * The box at coordinates c0 (along a row), c1, c2 of a tensor; what lies outside the tensor reads
 * as zeros, is not written, and counts at the barrier all the same. For one thread. */

__device__ __forceinline__ void load_box(uint32_t to, const CUtensorMap *map, int c0, int c1,
                                         uint32_t barrier)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2,%3}], [%4];" ::"r"(to),
                 "l"(map), "r"(c0), "r"(c1), "r"(barrier)
                 : "memory");
}

__device__ __forceinline__ void load_box(uint32_t to, const CUtensorMap *map, int c0, int c1,
                                         int c2, uint32_t barrier)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2,%3,%4}], [%5];" ::"r"(to),
                 "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(barrier)
                 : "memory");
}

/* to the same place in both blocks of the pair, counted at the same barrier in each */
__device__ __forceinline__ void load_box_pair(uint32_t to, const CUtensorMap *map, int c0, int c1,
                                              uint32_t barrier)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".multicast::cluster [%0], [%1, {%2,%3}], [%4], %5;" ::"r"(to),
                 "l"(map), "r"(c0), "r"(c1), "r"(barrier), "h"((uint16_t)3)
                 : "memory");
}

__device__ __forceinline__ void load_box_pair(uint32_t to, const CUtensorMap *map, int c0, int c1,
                                              int c2, uint32_t barrier)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".multicast::cluster [%0], [%1, {%2,%3,%4}], [%5], %6;" ::"r"(to),
                 "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(barrier), "h"((uint16_t)3)
                 : "memory");
}

__device__ __forceinline__ void store_box(const CUtensorMap *map, int c0, int c1, int c2,
                                          uint32_t from)
{
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1,%2,%3}], [%4];" ::"l"(map),
        "r"(c0), "r"(c1), "r"(c2), "r"(from)
        : "memory");
}

__device__ __forceinline__ void boxes_commit()
{
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/* until at most N committed groups still read shared memory */
template <int N>
__device__ __forceinline__ void boxes_read()
{
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

__device__ __forceinline__ void boxes_written()
{
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

/* ---- tensor maps made on the device ------------------------------------------------------------
 * The address and the length of dimension 1 of a map in shared memory are replaced by one thread;
 * then the warp copies it to global memory, where any block may use it after map_acquire. */

__device__ __forceinline__ void map_replace(uint32_t map, const void *address, int length)
{
    asm volatile("tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%0], %1;" ::"r"(map),
                 "l"(address)
                 : "memory");
    asm volatile("tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%0], 1, %1;" ::"r"(map),
                 "r"(length)
                 : "memory");
}

__device__ __forceinline__ void map_publish(CUtensorMap *to, uint32_t from)
{
    asm volatile("tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu"
                 ".sync.aligned [%0], [%1], 128;" ::"l"(to),
                 "r"(from)
                 : "memory");
}

__device__ __forceinline__ void map_acquire(const CUtensorMap *map)
{
    asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory");
}

/* ---- 8 x 8 blocks, transposed on the way -------------------------------------------------------
 */

__device__ __forceinline__ void store_matrices_across(uint32_t to, uint32_t a, uint32_t b,
                                                      uint32_t c, uint32_t d)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(to),
                 "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

__device__ __forceinline__ void load_matrices_across(uint32_t from, uint32_t (&v)[4])
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"(from)
                 : "memory");
}

/* ---- wgmma of any width -----------------------------------------------------------------------
 * d[64, N] += A[64, 16] B[16, N]; TA, TB: 1 if that operand is read transposed (hopper.cuh). */
template <int N, int TA, int TB>
struct product;

#define F8(i)                                                                                      \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]),    \
        "+f"(d[i + 6]), "+f"(d[i + 7])
#define F16 F8(0)
#define F32 F16, F8(8)
#define F48 F32, F8(16)
#define F64 F48, F8(24)
#define F80 F64, F8(32)
#define F96 F80, F8(40)
#define F112 F96, F8(48)
#define F128 F112, F8(56)
#define F144 F128, F8(64)
#define F160 F144, F8(72)
#define F176 F160, F8(80)
#define F192 F176, F8(88)
#define F208 F192, F8(96)
#define F224 F208, F8(104)
#define F240 F224, F8(112)
#define F256 F240, F8(120)
#define L16 "%0,%1,%2,%3,%4,%5,%6,%7"
#define L32 L16 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define L48 L32 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define L64 L48 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define L80 L64 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define L96 L80 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define L112 L96 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define L128 L112 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define L144 L128 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define L160 L144 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define L176 L160 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define L192 L176 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define L208 L192 ",%96,%97,%98,%99,%100,%101,%102,%103"
#define L224 L208 ",%104,%105,%106,%107,%108,%109,%110,%111"
#define L240 L224 ",%112,%113,%114,%115,%116,%117,%118,%119"
#define L256 L240 ",%120,%121,%122,%123,%124,%125,%126,%127"

/* A, B, TA_, TB_: the numbers of the operands behind the N / 2 accumulators */
#define PRODUCT(N, A, B, TA_, TB_)                                                                 \
    template <int TA, int TB>                                                                      \
    struct product<N, TA, TB> {                                                                    \
        static constexpr int COLUMNS = N, A_ACROSS = TA, B_ACROSS = TB;                            \
        static __device__ __forceinline__ void run(float (&d)[N / 2], uint32_t a, uint32_t b)      \
        {                                                                                          \
            asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" L##N         \
                         "}, %" #A ", %" #B ", 1, 1, 1, %" #TA_ ", %" #TB_ ";\n"                   \
                         : F##N                                                                    \
                         : "l"(whole_descriptor(a)), "l"(whole_descriptor(b)), "n"(TA), "n"(TB));  \
        }                                                                                          \
        /* d = A B: the first step of a sum */                                                     \
        static __device__ __forceinline__ void start(float (&d)[N / 2], uint32_t a, uint32_t b)    \
        {                                                                                          \
            asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" L##N         \
                         "}, %" #A ", %" #B ", 0, 1, 1, %" #TA_ ", %" #TB_ ";\n"                   \
                         : F##N                                                                    \
                         : "l"(whole_descriptor(a)), "l"(whole_descriptor(b)), "n"(TA), "n"(TB));  \
        }                                                                                          \
    };
PRODUCT(16, 8, 9, 10, 11)
PRODUCT(32, 16, 17, 18, 19)
PRODUCT(48, 24, 25, 26, 27)
PRODUCT(64, 32, 33, 34, 35)
PRODUCT(80, 40, 41, 42, 43)
PRODUCT(96, 48, 49, 50, 51)
PRODUCT(112, 56, 57, 58, 59)
PRODUCT(128, 64, 65, 66, 67)
PRODUCT(144, 72, 73, 74, 75)
PRODUCT(160, 80, 81, 82, 83)
PRODUCT(176, 88, 89, 90, 91)
PRODUCT(192, 96, 97, 98, 99)
PRODUCT(208, 104, 105, 106, 107)
PRODUCT(224, 112, 113, 114, 115)
PRODUCT(240, 120, 121, 122, 123)
PRODUCT(256, 128, 129, 130, 131)
#undef PRODUCT

/* d[64, 128] += A[64, 16] B[16, 128] with A in registers, as a warp's mma.sync has it, 16 rows a warp. */
template <int TB>
__device__ __forceinline__ void add_product128(float (&d)[64], const uint32_t (&a)[4], uint32_t b)
{
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" L128
                 "}, {%64,%65,%66,%67}, %68, 1, 1, 1, %69;\n"
                 : F128
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(whole_descriptor(b)), "n"(TB));
}

/* After mma_wait<0>: keeps the compiler from reading the accumulators before it. */
template <int N>
__device__ __forceinline__ void settle(float (&d)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++)
        asm volatile("" : "+f"(d[i])::"memory");
}

} /* namespace hopper */
