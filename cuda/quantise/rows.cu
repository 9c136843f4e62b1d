/* Blocks of one row, where rows are whole blocks: the matrix is one run of blocks, whatever its rows. A few lanes take
 * a block and agree on its scale; each has several loads under way before it needs the first. */
#include "quantise/codes.cuh"

namespace quantising {
namespace {

constexpr int THREADS = 256;

template <class T>
constexpr int AHEAD = 8 / (int)sizeof(T);

template <class T, int BLOCK, code CODE>
__global__ __launch_bounds__(THREADS) void rows_kernel(int format, const float *global, int64_t runs, const T *x,
                                                       uint8_t *codes, void *scales)
{
    constexpr int LANES = BLOCK / RUN;
    const int64_t first = blockIdx.x * (int64_t)(THREADS * AHEAD<T>) + threadIdx.x;
    const float of_all = CODE == E2M1 ? *global : 0;
    several<T, RUN> part[AHEAD<T>];

#pragma unroll
    for (int a = 0; a < AHEAD<T>; a++) {
        part[a] = {};
        if (first + a * THREADS < runs) part[a] = *(const several<T, RUN> *)(x + (first + a * THREADS) * RUN);
    }
#pragma unroll
    for (int a = 0; a < AHEAD<T>; a++) {
        const int64_t run = first + a * THREADS;
        const uint32_t most = largest_of_lanes<LANES>(largest_of(part[a]));
        const struct scale s = scale_make(format, CODE == E5M2, narrow_float(most), of_all);
        float value[RUN];

        if (run >= runs) break;
#pragma unroll
        for (int i = 0; i < RUN; i++) value[i] = get(part[a].at[i]);
        const uint2 coded = encode_run<CODE>(format, value, s.encode);
        if (CODE == E2M1)
            ((uint32_t *)codes)[run] = coded.x;
        else
            ((uint2 *)codes)[run] = coded;
        if (run % LANES == 0) scale_store(format, &s, scales, run / LANES);
    }
}

} /* namespace */

bool quantise_rows(cuda_device *d, const quantised &q, const float *global, const void *x, void *codes, void *scales)
{
    const int64_t block = q.block_columns, runs = q.rows * q.width / RUN;
    const bool known = format_is_packed(q.format) ? block == 16 : block == 32 || block == 128;

    if (q.block_rows != 1 || !known || q.width % block || !aligned16(x) || !aligned16(codes)) return false;
    with_type(q.type, [&](auto element) {
        with_code(q, [&](auto code) {
            using T = decltype(element);
            constexpr auto CODE = decltype(code)::value;
            constexpr int WIDE_BLOCK = CODE == E2M1 ? 16 : 128, NARROW_BLOCK = CODE == E2M1 ? 16 : 32;
            auto kernel = block == WIDE_BLOCK ? rows_kernel<T, WIDE_BLOCK, CODE> : rows_kernel<T, NARROW_BLOCK, CODE>;

            kernel<<<(unsigned)divided(runs, THREADS * AHEAD<T>), THREADS, 0, d->stream>>>(
                q.format, global, runs, (const T *)x, (uint8_t *)codes, scales);
        });
    });
    return true;
}

} /* namespace quantising */
