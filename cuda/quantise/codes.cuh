/* Runs of neighbours to codes and back by the hardware's conversions, which give what base/narrow.h says for every fp32
 * number (tests/gpu/quantise.cu). */
#pragma once

#include <cuda_fp8.h>

#include "device/element.cuh"
#include "ops/scale.h"

namespace quantising {

enum code { E4M3, E5M2, E2M1 };

constexpr int RUN = 8; /* elements that a thread takes at a time */

/* Calls f with std::integral_constant of the code that the format has. */
template <class F>
static inline void with_code(const quantised &q, F f)
{
    if (format_is_packed(q.format))
        f(std::integral_constant<code, E2M1>());
    else if (q.e5m2)
        f(std::integral_constant<code, E5M2>());
    else
        f(std::integral_constant<code, E4M3>());
}

/* The largest magnitudes of several runs, place by place, as bits: their order is that of whole numbers, with NaN above
 * all. Those of bf16 stay in pairs, for half the work. */
template <class T>
struct magnitudes {
    uint32_t most[RUN] = {};

    __device__ __forceinline__ void take(const several<T, RUN> &x)
    {
#pragma unroll
        for (int i = 0; i < RUN; i++) most[i] = max(most[i], narrow_bits(x.at[i]) & 0x7fffffffu);
    }
    __device__ __forceinline__ uint32_t at(int i) const { return most[i]; }
    __device__ __forceinline__ uint32_t all() const
    {
        uint32_t largest = most[0];

#pragma unroll
        for (int i = 1; i < RUN; i++) largest = max(largest, most[i]);
        return largest;
    }
};

template <>
struct magnitudes<bf16> {
    uint32_t most[RUN / 2] = {};

    __device__ __forceinline__ void take(const several<bf16, RUN> &x)
    {
        const uint4 pair = *(const uint4 *)&x;

        most[0] = __vmaxu2(most[0], pair.x & 0x7fff7fffu);
        most[1] = __vmaxu2(most[1], pair.y & 0x7fff7fffu);
        most[2] = __vmaxu2(most[2], pair.z & 0x7fff7fffu);
        most[3] = __vmaxu2(most[3], pair.w & 0x7fff7fffu);
    }
    __device__ __forceinline__ uint32_t at(int i) const
    {
        return i % 2 ? most[i / 2] & 0xffff0000u : most[i / 2] << 16;
    }
    __device__ __forceinline__ uint32_t all() const
    {
        const uint32_t pair = __vmaxu2(__vmaxu2(most[0], most[1]), __vmaxu2(most[2], most[3]));

        return max(pair & 0xffff0000u, pair << 16);
    }
};

template <class T>
__device__ __forceinline__ uint32_t largest_of(const several<T, RUN> &x)
{
    magnitudes<T> m;

    m.take(x);
    return m.all();
}

/* Codes of a run, one to a byte, or packed into the first word. */
template <code CODE>
__device__ __forceinline__ uint2 encode_run(int format, const float (&x)[RUN], float by)
{
    uint32_t word[2] = {0, 0};
    float scaled[RUN];

    if (format_divides(format)) {
#pragma unroll
        for (int i = 0; i < RUN; i++) scaled[i] = x[i] / by;
    } else {
#pragma unroll
        for (int i = 0; i < RUN; i++) scaled[i] = x[i] * by;
    }
#pragma unroll
    for (int i = 0; i < RUN; i += 2) {
        if (CODE == E2M1) {
            const uint32_t keep = format == NVFP4_MODELOPT ? 7 : 15; /* ModelOpt has no -0 */

            word[0] |= (f32_to_e2m1(scaled[i]) & (x[i] < 0 ? 15u : keep)) << 4 * i;
            word[0] |= (f32_to_e2m1(scaled[i + 1]) & (x[i + 1] < 0 ? 15u : keep)) << 4 * (i + 1);
        } else {
            const uint32_t pair = __nv_cvt_float2_to_fp8x2(make_float2(scaled[i], scaled[i + 1]), __NV_SATFINITE,
                                                           CODE == E5M2 ? __NV_E5M2 : __NV_E4M3);
            word[i / 4] |= pair << 8 * (i % 4);
        }
    }
    return make_uint2(word[0], word[1]);
}

/* Values of two codes in the low bytes, or in the low byte. */
template <code CODE>
__device__ __forceinline__ float2 decode_pair(uint32_t codes)
{
    if (CODE == E2M1) return make_float2(e2m1_to_f32(codes & 15), e2m1_to_f32(codes >> 4 & 15));
    return __half22float2(
        __half2(__nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)codes, CODE == E5M2 ? __NV_E5M2 : __NV_E4M3)));
}

/* Scales of COUNT blocks that LANES neighbours of a warp share: most[i] is the lane's part of block i, by[i] gets what
 * encodes it. Lanes halve the blocks between them at each step, so that a scale is made by one or two of them and not
 * by all, and store(i, scale) is called by one. */
template <int LANES, int COUNT, class Store>
__device__ __forceinline__ void agree(int format, bool e5m2, float global, uint32_t (&most)[COUNT], float (&by)[COUNT],
                                      Store store)
{
    constexpr int KEPT = COUNT > LANES ? COUNT / LANES : 1, SHARING = LANES > COUNT ? LANES / COUNT : 1;
    const int lane = threadIdx.x % LANES;

#pragma unroll
    for (int apart = LANES / 2, kept = COUNT / 2; apart; apart /= 2, kept /= 2) {
        const bool upper = lane & apart;

        if (kept == 0) most[0] = max(most[0], __shfl_xor_sync(~0u, most[0], apart));
#pragma unroll
        for (int i = 0; i < kept; i++) {
            const uint32_t gone = __shfl_xor_sync(~0u, upper ? most[i] : most[i + kept], apart);

            most[i] = max(upper ? most[i + kept] : most[i], gone);
        }
    }
#pragma unroll
    for (int i = 0; i < KEPT; i++) {
        const struct scale s = scale_make(format, e5m2, narrow_float(most[i]), global);

        by[i] = s.encode;
        if (lane % SHARING == 0) store(lane * COUNT / LANES + i, s);
    }
    float all[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; i++) all[i] = __shfl_sync(~0u, by[i % KEPT], i * LANES / COUNT, LANES);
#pragma unroll
    for (int i = 0; i < COUNT; i++) by[i] = all[i];
}

/* Each does nothing and says so where it has no kernel for the call. */
bool quantise_rows(cuda_device *d, const quantised &q, const float *global, const void *x, void *codes, void *scales);
bool quantise_tiles(cuda_device *d, const quantised &q, const void *x, void *codes, void *scales, void *codes_t,
                    void *scales_t);

} /* namespace quantising */
