/* Scales and codes of NVFP4 blocks in few instructions: what ops/scale.h and base/narrow.h say, to the bit
 * (tests/gpu/quantise.cu). A multiprocessor does half as many minima, shifts and bit operations in a cycle as
 * multiplications and additions of either kind. */
#pragma once

#include "quantise/codes.cuh"

namespace quantising {

/* Of a block. `plain`: no element is NaN or saturates, and `by` serves. */
template <class Scaling>
struct fours_scale {
    float encode;
    Scaling by;
    uint8_t code;
    bool plain;
};

__device__ __forceinline__ uint8_t hardware_e4m3(float x)
{
    return (uint8_t)__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
}

/* scale_nvfp4 with what blocks have in common done once. */
template <bool DIVIDES>
struct fours_scaling;

template <>
struct fours_scaling<false> {
    float sixth, decode;

    __device__ __forceinline__ explicit fours_scaling(float global)
    {
        const float encode = global > 0 ? scale_or_one(scale_finite(2688 / global)) : 1;

        sixth = encode * (1 / 6.0f);
        decode = 1 / encode;
    }
    __device__ __forceinline__ fours_scale<factor> of(float amax) const
    {
        const uint8_t code = hardware_e4m3(amax * sixth);
        const float encode = scale_finite(1 / (decode_pair<E4M3>(code).x * decode));

        return {encode, {encode}, code, amax * encode < 7};
    }
};

template <>
struct fours_scaling<true> {
    float global, divisor;

    __device__ __forceinline__ explicit fours_scaling(float of_all) : global(of_all), divisor(6 * of_all) {}
    __device__ __forceinline__ fours_scale<known_divisor> of(float amax) const
    {
        const float wanted = amax / divisor;
        const uint8_t code = hardware_e4m3(!(wanted > 0) ? 1 : wanted > 0x1p-9f ? wanted : 0x1p-9f);
        const float encode = scale_or_one(decode_pair<E4M3>(code).x * global);
        const known_divisor by(encode);

        return {encode, by, code, by.serves(amax) && amax * by.inverse < 6.5f};
    }
};

/* The code of a magnitude below 7 (f32_to_e2m1 says how), in the last bits of COUNTED. */
constexpr uint32_t COUNTED = 0x4b000000; /* of 2^23 */

__device__ __forceinline__ uint32_t fours_counted(float x)
{
    constexpr float whole = 0x1p23f;

    return narrow_bits(fminf(fminf(fmaf(2, x, whole), x + (whole + 2)), fmaf(0.5f, x, whole + 4)));
}

/* Bits 15 and 31 of four words as bits 3, 7, 11, ... 31 of one. */
__device__ __forceinline__ uint32_t fours_signs(uint4 x)
{
    const uint32_t first = __byte_perm(x.x, x.y, 0x7531), last = __byte_perm(x.z, x.w, 0x7531);
    const uint32_t even = __byte_perm(first, last, 0x6420), odd = __byte_perm(first, last, 0x7531);

    return (even >> 4 & 0x08080808u) | (odd & 0x80808080u);
}

/* Codes of a run of a plain block. */
template <class Scaling>
__device__ __forceinline__ uint32_t encode_fours(const several<bf16, RUN> &x, Scaling by)
{
    const uint4 pairs = *(const uint4 *)&x;
    uint32_t word = 0;

#pragma unroll
    for (int i = RUN - 1; i >= 0; i--) word = word * 16 + fours_counted(by(fabsf(element_of(x, i))));
    word -= COUNTED * 0x11; /* those of other elements have left the word */
    if (std::is_same<Scaling, factor>::value) return word + fours_signs(pairs);
    /* ModelOpt has no -0: what is added to 0 makes it 0. */
    const __nv_bfloat162 zero = __float2bfloat162_rn(0);
    const auto positive = [&](uint32_t pair) {
        const __nv_bfloat162 sum = __hadd2_rn(*(const __nv_bfloat162 *)&pair, zero);

        return *(const uint32_t *)&sum;
    };
    return word + fours_signs(make_uint4(positive(pairs.x), positive(pairs.y), positive(pairs.z), positive(pairs.w)));
}

} /* namespace quantising */
