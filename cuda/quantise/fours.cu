/* NVFP4 of bf16 rows that are whole blocks of 16: a lane takes a block, so that nothing is agreed on, since the number
 * of instructions decides. Codes are made of magnitudes alone, eight to a word by multiplications and additions, and
 * signs are added to all of them at once. Blocks that have a NaN, saturate or have an extreme scale go a longer way. */
#include "quantise/fours.cuh"

namespace quantising {
namespace {

constexpr int THREADS = 256, BLOCK = 16;
constexpr int AHEAD = 2, RESIDENT = 6; /* blocks of a thread; thread blocks a multiprocessor, by registers */

template <bool DIVIDES>
__global__ __launch_bounds__(THREADS, RESIDENT) void fours_kernel(const float *global, int64_t blocks, const bf16 *x,
                                                                  uint2 *codes, uint8_t *scales)
{
    constexpr int FORMAT = DIVIDES ? NVFP4_MODELOPT : NVFP4;
    const int64_t first = blockIdx.x * (int64_t)(THREADS * AHEAD) + threadIdx.x;
    several<bf16, RUN> part[AHEAD][2];

#pragma unroll
    for (int a = 0; a < AHEAD; a++) {
        const auto *from = (const several<bf16, RUN> *)(x + (first + a * THREADS) * BLOCK);

        if (first + a * THREADS >= blocks) break;
        part[a][0] = from[0];
        part[a][1] = from[1];
    }
    const fours_scaling<DIVIDES> scaling(*global);
#pragma unroll
    for (int a = 0; a < AHEAD; a++) {
        const int64_t block = first + a * THREADS;
        magnitudes<bf16> most;

        if (block >= blocks) break;
        most.take(part[a][0]);
        most.take(part[a][1]);
        const auto s = scaling.of(narrow_float(most.all()));
        scales[block] = s.code;
        if (s.plain) {
            codes[block] = make_uint2(encode_fours(part[a][0], s.by), encode_fours(part[a][1], s.by));
        } else {
            uint32_t word[2] = {0, 0};

#pragma unroll 1
            for (int i = 0; i < RUN; i++) {
                word[0] |= code_of(FORMAT, 0, s.encode, get(x[block * BLOCK + i])) << 4 * i;
                word[1] |= code_of(FORMAT, 0, s.encode, get(x[block * BLOCK + RUN + i])) << 4 * i;
            }
            codes[block] = make_uint2(word[0], word[1]);
        }
    }
}

} /* namespace */

bool quantise_fours(cuda_device *d, const quantised &q, const float *global, const void *x, void *codes, void *scales)
{
    const int64_t blocks = q.rows * q.width / BLOCK;

    if (!format_is_packed(q.format) || q.type != GLM52_DTYPE_BF16) return false;
    if (q.block_rows != 1 || q.block_columns != BLOCK || q.width % BLOCK) return false;
    if (!aligned16(x) || !aligned16(codes)) return false;
    auto kernel = format_divides(q.format) ? fours_kernel<true> : fours_kernel<false>;
    kernel<<<(unsigned)divided(blocks, THREADS * AHEAD), THREADS, 0, d->stream>>>(
        global, blocks, (const bf16 *)x, (uint2 *)codes, (uint8_t *)scales);
    return true;
}

} /* namespace quantising */
