/* Runs of neighbours to codes and back by the hardware's conversions, which give what base/narrow.h says for every fp32
 * number (tests/gpu/quantise.cu). */
#pragma once

#include <cuda_fp8.h>

#include "device/element.cuh"
#include "ops/scale.h"

namespace quantising {

enum code { E4M3, E5M2, E2M1 };

constexpr int RUN = 8; /* elements that a thread takes at a time */

/* Formats of one family differ in what costs nothing; others' divisions and branches would be in the way even where
 * they are not taken. */
constexpr int family_of(int format)
{
    return format == FP8_BLOCK_POWER ? FP8_BLOCK : format == MXFP8_OCP ? MXFP8 : format;
}

/* The format, of which the compiler knows the family. */
template <int FAMILY>
__device__ __forceinline__ int format_within(int format)
{
    if (FAMILY == FP8_BLOCK) return format == FP8_BLOCK_POWER ? FP8_BLOCK_POWER : FP8_BLOCK;
    if (FAMILY == MXFP8) return format == MXFP8_OCP ? MXFP8_OCP : MXFP8;
    return FAMILY;
}

template <int FAMILY>
constexpr bool IS_DIVIDED = FAMILY == FP8_BLOCK_RELEASE || FAMILY == NVFP4_MODELOPT;

/* What takes elements to the range of codes. A quotient of bf16 is rounded right by three operations, for every pair of
 * mantissas (tests/gpu/quantise.cu), where nothing leaves the normal numbers: the remainder of a guess is exact. Its
 * sign is such that -0 stays. */
struct factor {
    float of;
    __device__ __forceinline__ float operator()(float x) const { return x * of; }
};
struct divisor {
    float of;
    __device__ __forceinline__ float operator()(float x) const { return x / of; }
};
struct known_divisor {
    float of, inverse;

    __device__ __forceinline__ explicit known_divisor(float x) : of(x), inverse(1 / x) {}
    __device__ __forceinline__ float operator()(float x) const
    {
        const float guess = x * inverse;

        return fmaf(-fmaf(guess, of, -x), inverse, guess);
    }
    /* Whether it may be used for magnitudes up to that one; not if that is NaN. */
    __device__ __forceinline__ bool serves(float largest) const
    {
        return of > 0x1p-60f && of < 0x1p60f && largest * inverse < 0x1p20f;
    }
};
template <int FAMILY>
using scaling_of = typename std::conditional<IS_DIVIDED<FAMILY>, divisor, factor>::type;

/* Calls f with std::integral_constant of the family and of the code that the format has. */
template <class F>
static inline void with_code(const quantised &q, F f)
{
    auto with_family = [&](auto family) {
        if (q.e5m2)
            f(family, std::integral_constant<code, E5M2>());
        else
            f(family, std::integral_constant<code, E4M3>());
    };

    switch (family_of(q.format)) {
    case FP8_BLOCK: return with_family(std::integral_constant<int, FP8_BLOCK>());
    case FP8_BLOCK_RELEASE: return with_family(std::integral_constant<int, FP8_BLOCK_RELEASE>());
    case MXFP8: return with_family(std::integral_constant<int, MXFP8>());
    case NVFP4: return f(std::integral_constant<int, NVFP4>(), std::integral_constant<code, E2M1>());
    default: return f(std::integral_constant<int, NVFP4_MODELOPT>(), std::integral_constant<code, E2M1>());
    }
}

/* The largest magnitudes of several runs, place by place, as bits: their order is that of whole numbers, with NaN above
 * all. Those of bf16 stay in pairs, for half the work. */
template <class T>
struct alignas(16) magnitudes {
    uint32_t most[RUN] = {};

    __device__ __forceinline__ void take(const several<T, RUN> &x)
    {
#pragma unroll
        for (int i = 0; i < RUN; i++) most[i] = max(most[i], narrow_bits(x.at[i]) & 0x7fffffffu);
    }
    __device__ __forceinline__ void take_from(int apart) /* what the lane so far away has */
    {
#pragma unroll
        for (int i = 0; i < RUN; i++) most[i] = max(most[i], __shfl_xor_sync(~0u, most[i], apart));
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
struct alignas(16) magnitudes<bf16> {
    uint32_t most[RUN / 2] = {};

    __device__ __forceinline__ void take(const several<bf16, RUN> &x)
    {
        const uint4 pair = *(const uint4 *)&x;

        most[0] = __vmaxu2(most[0], pair.x & 0x7fff7fffu);
        most[1] = __vmaxu2(most[1], pair.y & 0x7fff7fffu);
        most[2] = __vmaxu2(most[2], pair.z & 0x7fff7fffu);
        most[3] = __vmaxu2(most[3], pair.w & 0x7fff7fffu);
    }
    __device__ __forceinline__ void take_from(int apart)
    {
#pragma unroll
        for (int i = 0; i < RUN / 2; i++) most[i] = __vmaxu2(most[i], __shfl_xor_sync(~0u, most[i], apart));
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

/* Element i, which is known when this is compiled: half of a word in one instruction where it is bf16. */
__device__ __forceinline__ float element_of(const several<float, RUN> &x, int i) { return x.at[i]; }
__device__ __forceinline__ float element_of(const several<bf16, RUN> &x, int i)
{
    const uint32_t pair = ((const uint32_t *)&x)[i / 2];

    return narrow_float(i % 2 ? pair & 0xffff0000u : pair << 16);
}

/* Codes of four neighbours, one to a byte; not packed ones. */
template <code CODE, class Scaling>
__device__ __forceinline__ uint32_t encode_four(const float *x, Scaling by)
{
    constexpr auto to = CODE == E5M2 ? __NV_E5M2 : __NV_E4M3;
    const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(by(x[0]), by(x[1])), __NV_SATFINITE, to);
    const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(by(x[2]), by(x[3])), __NV_SATFINITE, to);

    return low | high << 16;
}

/* Codes of a run, one to a byte, or packed into the first word. */
template <code CODE, class Scaling>
__device__ __forceinline__ uint2 encode_run(const float (&x)[RUN], Scaling by)
{
    if (CODE == E2M1) {
        constexpr bool MODELOPT = std::is_same<Scaling, divisor>::value; /* has no -0 */
        uint32_t word = 0;

#pragma unroll
        for (int i = 0; i < RUN; i++) word |= (f32_to_e2m1(by(x[i])) & (MODELOPT && !(x[i] < 0) ? 7u : 15u)) << 4 * i;
        return make_uint2(word, 0);
    }
    return make_uint2(encode_four<CODE>(x, by), encode_four<CODE>(x + 4, by));
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
bool quantise_fours(cuda_device *d, const quantised &q, const float *global, const void *x, void *codes, void *scales);
bool quantise_rows(cuda_device *d, const quantised &q, const float *global, const void *x, void *codes, void *scales);
bool quantise_tiles(cuda_device *d, const quantised &q, const void *x, void *codes, void *scales, void *codes_t,
                    void *scales_t);

} /* namespace quantising */
