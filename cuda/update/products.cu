/* A pair of blocks (a cluster) computes tiles of 256 x 256, each block 128 x 256 of them: 256 columns of b, which
 * both need and each loads half of for both, and its own 128 rows of a. In each block one thread feeds a ring of
 * stages through the copy engine and two warpgroups multiply. Of a symmetric result, tiles on and below the diagonal
 * are computed, and those below it are written twice. */
#include "update/products.cuh"

#include "device/early.cuh"
#include "update/half.cuh"

#include "grouped_gemm/ring.cuh"

using namespace pair;

namespace {

using frame = ring<4, 2>;

constexpr int TILE = PAIR, HALF_TILE = OWN, BLOCK = 64; /* BLOCK: columns of a swizzled block, and DEPTH of a stage */

struct maps {
    CUtensorMap a, b, c;
};

struct shape {
    int32_t m, n, k, down, tiles; /* tiles: of one matrix; down: tiles along m */
    int32_t all;                  /* tiles of all matrices */
    float alpha, beta, gamma;
    const __half *d;
};

struct tile {
    int row, column, matrix; /* of its first element; row: of the pair */
};

template <bool SYMMETRIC>
__device__ __forceinline__ tile tile_of(const shape &s, int number)
{
    const int matrix = number / s.tiles, at = number % s.tiles;
    int i = at % s.down, j = at / s.down;

    if (SYMMETRIC) { /* rows of the triangle */
        i = (int)((sqrtf(8.0f * at + 1) - 1) / 2);
        i += (i + 1) * (i + 2) / 2 <= at;
        i -= i * (i + 1) / 2 > at;
        j = at - i * (i + 1) / 2;
    }
    return {i * TILE, j * TILE, matrix};
}

/* All threads of both blocks. */
__device__ __forceinline__ frame open_frame(void *shared)
{
    const frame f(shared);

    if (threadIdx.x == 0) {
        f.init();
        fence_barrier_init();
    }
    __syncwarp();
    cluster_barrier();
    return f;
}

/* ---- loads ---- */

/* 128 rows (columns, where they are stored across) from `at` on, `depth` on, of an operand: for this block, or for
 * both. */
template <bool ACROSS, bool BOTH>
__device__ __forceinline__ void load_half(uint32_t to, const CUtensorMap *map, int at, int depth, int matrix,
                                          uint32_t full)
{
#pragma unroll
    for (int i = 0; i < (ACROSS ? 2 : 1); i++) {
        const int c0 = ACROSS ? at + i * BLOCK : depth, c1 = ACROSS ? depth : at;

        if (BOTH)
            load_box_pair(to + i * BLOCK_BYTES, map, c0, c1, matrix, full);
        else
            load_box(to + i * BLOCK_BYTES, map, c0, c1, matrix, full);
    }
}

template <int TA, int TB, bool SYMMETRIC>
__device__ __forceinline__ void load_tiles(const frame &f, const maps &m, const shape &s)
{
    const int rank = cluster_rank(), stages = (s.k + DEPTH - 1) / DEPTH;
    frame::place at;

    for (int number = blockIdx.x / 2; number < s.all; number += gridDim.x / 2) {
        const tile t = tile_of<SYMMETRIC>(s, number);

        for (int i = 0; i < stages; i++) {
            const uint32_t full = f.full(at.slot);

            barrier_wait(f.empty(at.slot), at.parity ^ 1);
            barrier_expect(full, frame::STAGE_BYTES);
            load_half<TA, false>(f.a(at.slot), &m.a, t.row + rank * OWN, i * DEPTH, t.matrix, full);
            load_half<TB, true>(f.b(at.slot) + rank * (B_BYTES / 2), &m.b, t.column + rank * (TILE / 2), i * DEPTH,
                                t.matrix, full);
            at.advance();
        }
    }
}

/* ---- products ---- */

/* d[64, 256] += A[64, 16] B[16, 256] */
template <int TA, int TB>
struct half_product {
    static constexpr int COLUMNS = TILE, A_ACROSS = TA, B_ACROSS = TB;

    static __device__ __forceinline__ void run(float (&d)[128], uint32_t a, uint32_t b)
    {
        asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {" L256
                     "}, %128, %129, 1, 1, 1, %130, %131;\n"
                     : F256
                     : "l"(whole_descriptor(a)), "l"(whole_descriptor(b)), "n"(TA), "n"(TB));
    }
};

/* ---- results ---- */

/* alpha d + beta D + gamma I for 64 columns of a warpgroup, whose first element is at (row, column). */
__device__ __forceinline__ void add_terms(const shape &s, float *d, int row, int column, int matrix)
{
    const int lane = threadIdx.x % 32;
    const __half *from = s.d + (int64_t)matrix * s.m * s.n;

    row += threadIdx.x / 32 % 4 * 16 + lane / 4;
    column += lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 32; i++) d[i] *= s.alpha;
    if (s.beta != 0) {
        __half2 terms[16];

#pragma unroll
        for (int i = 0; i < 16; i++) {
            const int r = row + i % 2 * 8, c = column + i / 2 * 8;

            terms[i] = r < s.m && c < s.n ? *(const __half2 *)(from + (int64_t)r * s.n + c) : __half2();
        }
#pragma unroll
        for (int i = 0; i < 16; i++) {
            d[2 * i] += s.beta * __low2float(terms[i]);
            d[2 * i + 1] += s.beta * __high2float(terms[i]);
        }
    }
    if (s.gamma == 0) return;
#pragma unroll
    for (int i = 0; i < 32; i++)
        if (row + i / 2 % 2 * 8 == column + i / 4 * 8 + i % 2) d[i] += s.gamma;
}

/* A block through shared memory to (row, column) of the result. Two blocks of shared memory take turns. */
template <bool TRANSPOSED>
__device__ __forceinline__ void write_block(const float *d, uint32_t block, int group, const CUtensorMap *c, int row,
                                            int column, int matrix)
{
    const bool first = threadIdx.x % 128 == 0;

    if (first) boxes_read<1>(); /* the block's last contents have left */
    named_barrier(1 + group, 128);
    stage_halves<TRANSPOSED>(d, block);
    fence_async();
    named_barrier(1 + group, 128);
    if (first) {
        store_box(c, column, row, matrix, block);
        boxes_commit();
    }
}

template <bool SYMMETRIC>
__device__ __forceinline__ void write_tile(float (&d)[128], uint32_t staging, int group, const CUtensorMap *c,
                                           const shape &s, const tile &t)
{
    const int row = t.row + cluster_rank() * OWN + group * BLOCK;

#pragma unroll
    for (int i = 0; i < TILE / BLOCK; i++) {
        const int column = t.column + i * BLOCK;
        float *v = d + i * 32;

        if (SYMMETRIC) add_terms(s, v, row, column, t.matrix);
        if (!SYMMETRIC || t.row == t.column) { /* tiles on the diagonal are whole */
            write_block<false>(v, staging + i % 2 * BLOCK_BYTES, group, c, row, column, t.matrix);
        } else {
            write_block<false>(v, staging, group, c, row, column, t.matrix);
            write_block<true>(v, staging + BLOCK_BYTES, group, c, column, row, t.matrix);
        }
    }
}

/* W: of the weights that are moved; __half: c is stored. */
template <int TA, int TB, bool SYMMETRIC, class W>
__global__ __cluster_dims__(2) __launch_bounds__(THREADS, 1)
    void products_kernel(const __grid_constant__ maps m, const shape s, const half_update u)
{
    extern __shared__ uint8_t shared[];
    const frame f = open_frame(shared);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);

    follow();
    if (warp < 4) {
        registers_fewer<24>();
        if (warp == 0 && elected()) load_tiles<TA, TB, SYMMETRIC>(f, m, s);
    } else {
        const int group = warp / 4 - 1, stages = (s.k + DEPTH - 1) / DEPTH;
        frame::place at;

        registers_more<240>();
        for (int number = blockIdx.x / 2; number < s.all; number += gridDim.x / 2) {
            float d[128];

            multiply<half_product<TA, TB>>(f, at, group, stages, d);
            const tile t = tile_of<SYMMETRIC>(s, number);
            if constexpr (std::is_same<W, __half>::value)
                write_tile<SYMMETRIC>(d, f.staging(group), group, &m.c, s, t);
            else
                move_weights<TILE, W>(d, u, t.row + cluster_rank() * OWN + group * BLOCK, t.column, s.m, s.n, t.matrix);
        }
        if (threadIdx.x % 128 == 0) boxes_written();
    }
    __syncwarp();
    cluster_barrier(); /* the other block may still reach into this one's memory */
}

/* ---- host ---- */

template <int TA, int TB, bool SYMMETRIC, class W>
void launch(cuda_device *device, const maps &m, const shape &s, const half_update &u)
{
    auto kernel = products_kernel<TA, TB, SYMMETRIC, W>;
    const int pairs = std::min(s.all, device->multiprocessors / 2);

    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, frame::SHARED_BYTES);
    launch_following(device->stream, kernel, 2 * pairs, THREADS, frame::SHARED_BYTES, m, s, u);
}

/* An operand of `lines` rows or columns of the result, stored [lines,k] or across. */
bool map_operand(CUtensorMap *map, const __half *at, int64_t batch, int64_t lines, int64_t k, bool across)
{
    return map_halves(map, at, batch, across ? k : lines, across ? lines : k, across ? DEPTH : HALF_TILE);
}

} /* namespace */

void half_products_run(cuda_device *device, const struct half_products *p)
{
    const int down = (int)divided(p->m, TILE), across = (int)divided(p->n, TILE);
    const int tiles = p->symmetric ? down * (down + 1) / 2 : down * across;
    const shape s = {(int)p->m, (int)p->n, (int)p->k, down,     tiles, (int)p->batch * tiles,
                     p->alpha,  p->beta,   p->gamma,  p->d};
    const half_update *o = p->update, u = o ? *o : half_update();
    maps m;

    if (!map_operand(&m.a, p->a, p->batch, p->m, p->k, p->a_across) ||
        !map_operand(&m.b, p->b, p->batch, p->n, p->k, p->b_across) ||
        (!o && !map_halves(&m.c, p->c, p->batch, p->m, p->n, BLOCK))) {
        record_error(device, cudaErrorNotSupported, "a tensor map");
        return;
    }
    if (p->symmetric)
        (p->a_across ? launch<1, 1, true, __half> : launch<0, 0, true, __half>)(device, m, s, u);
    else if (!o)
        (p->b_across ? launch<0, 1, false, __half> : launch<0, 0, false, __half>)(device, m, s, u);
    else if (o->rounded)
        (p->b_across ? launch<0, 1, false, float> : launch<0, 0, false, float>)(device, m, s, u);
    else
        (p->b_across ? launch<0, 1, false, bf16> : launch<0, 0, false, bf16>)(device, m, s, u);
}
