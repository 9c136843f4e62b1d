/* Blocks of one row, where rows are whole blocks: the matrix is one run of blocks, whatever its rows. A few lanes take
 * a block and agree on its scale; each has several loads under way before it needs the first. */
#include "quantise/codes.cuh"

namespace quantising {
namespace {

constexpr int THREADS = 256;

template <class T>
constexpr int AHEAD = 8 / (int)sizeof(T); /* runs of a thread */

template <class T, int BLOCK, int FAMILY, code CODE>
__global__ __launch_bounds__(THREADS) void rows_kernel(int of_family, const float *global, int64_t runs, const T *x,
                                                       uint8_t *codes, void *scales)
{
    constexpr int LANES = BLOCK / RUN;
    const int format = format_within<FAMILY>(of_family);
    const int64_t first = blockIdx.x * (int64_t)(THREADS * AHEAD<T>) + threadIdx.x;
    const float of_all = CODE == E2M1 ? *global : 0;
    several<T, RUN> part[AHEAD<T>];
    uint32_t most[AHEAD<T>];
    float by[AHEAD<T>];

#pragma unroll
    for (int a = 0; a < AHEAD<T>; a++) {
        part[a] = {};
        if (first + a * THREADS < runs) part[a] = *(const several<T, RUN> *)(x + (first + a * THREADS) * RUN);
    }
#pragma unroll
    for (int a = 0; a < AHEAD<T>; a++) most[a] = largest_of(part[a]);
    agree<LANES>(format, CODE == E5M2, of_all, most, by, [&](int a, const struct scale &s) {
        if (first + a * THREADS < runs) scale_store(format, &s, scales, (first + a * THREADS) / LANES);
    });
#pragma unroll
    for (int a = 0; a < AHEAD<T>; a++) {
        const int64_t run = first + a * THREADS;
        float value[RUN];

        if (run >= runs) break;
#pragma unroll
        for (int i = 0; i < RUN; i++) value[i] = element_of(part[a], i);
        const uint2 coded = encode_run<CODE>(value, scaling_of<FAMILY>{by[a]});
        if (CODE == E2M1)
            ((uint32_t *)codes)[run] = coded.x;
        else
            ((uint2 *)codes)[run] = coded;
    }
}

} /* namespace */

bool quantise_rows(cuda_device *d, const quantised &q, const float *global, const void *x, void *codes, void *scales)
{
    const int64_t block = q.block_columns, runs = q.rows * q.width / RUN;
    const bool known = format_is_packed(q.format) ? block == 16 : block == 32 || block == 128;

    if (q.block_rows != 1 || !known || q.width % block || !aligned16(x) || !aligned16(codes)) return false;
    with_type(q.type, [&](auto element) {
        with_code(q, [&](auto family, auto code) {
            using T = decltype(element);
            constexpr auto CODE = decltype(code)::value;
            constexpr int FAMILY = decltype(family)::value;
            constexpr int LARGE = CODE == E2M1 ? 16 : 128, SMALL = CODE == E2M1 ? 16 : 32;
            auto kernel = block == LARGE ? rows_kernel<T, LARGE, FAMILY, CODE> : rows_kernel<T, SMALL, FAMILY, CODE>;

            kernel<<<(unsigned)divided(runs, THREADS * AHEAD<T>), THREADS, 0, d->stream>>>(
                q.format, global, runs, (const T *)x, (uint8_t *)codes, scales);
        });
    });
    return true;
}

} /* namespace quantising */
