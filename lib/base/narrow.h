/* Codes of narrow floats (posttraining.md 1.1, 2): the same functions for C and for CUDA, where they are the definition
 * that the hardware's own conversions are held to (tests/gpu/quantise.cu). Encoding rounds to nearest, ties to even,
 * and saturates, as the hardware's `satfinite` does; decoding is exact.
 *   E4M3  largest 448, step 2^-9 below 2^-6; 0x7f and 0xff are NaN, no infinities
 *   E5M2  largest 57344, step 2^-16 below 2^-14; infinities and NaN as IEEE has them
 *   E2M1  0 0.5 1 1.5 2 3 4 6, and 8 more for the negative ones
 *   E8M0  powers of two from 2^-127; 255 is NaN */
#ifndef GLM52_BASE_NARROW_H
#define GLM52_BASE_NARROW_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define NARROW static inline __host__ __device__
#else
#define NARROW static inline
#endif

NARROW uint32_t narrow_bits(float value)
{
    uint32_t bits;

    memcpy(&bits, &value, sizeof bits);
    return bits;
}

NARROW float narrow_float(uint32_t bits)
{
    float value;

    memcpy(&value, &bits, sizeof value);
    return value;
}

/* A float of so many bits of mantissa, and of bias; the sign is bit 7, and a NaN is 0x7f. Below the least normal number
 * the addition of a power of two whose last bit is the code's step rounds; above it the bits that fall away do. */
NARROW uint8_t narrow_encode(float value, int mantissa, int bias, uint32_t largest)
{
    const uint32_t bits = narrow_bits(value), magnitude = bits & 0x7fffffffu, sign = bits >> 24 & 0x80u;
    const int drop = 23 - mantissa;
    const uint32_t least_normal = (uint32_t)(128 - bias) << 23, step = (uint32_t)(128 - bias + drop) << 23;
    const uint32_t rounded = magnitude + (1u << (drop - 1)) - 1 + (magnitude >> drop & 1u);
    uint32_t code = (rounded >> drop) - ((uint32_t)(127 - bias) << mantissa);

    if (magnitude < least_normal) code = narrow_bits(narrow_float(magnitude) + narrow_float(step)) - step;
    if (code > largest) code = largest;
    return (uint8_t)(magnitude > 0x7f800000u ? 0x7fu : sign | code);
}

NARROW uint8_t f32_to_e4m3(float value)
{
    return narrow_encode(value, 3, 7, 0x7e);
}

NARROW uint8_t f32_to_e5m2(float value)
{
    return narrow_encode(value, 2, 15, 0x7b);
}

NARROW float e4m3_to_f32(uint8_t code)
{
    const uint32_t sign = (uint32_t)(code & 0x80) << 24, magnitude = code & 0x7f;

    if (magnitude == 0x7f) return narrow_float(sign | 0x7fc00000u);
    return narrow_float(sign | narrow_bits(narrow_float(magnitude << 20) * 0x1p120f));
}

NARROW float e5m2_to_f32(uint8_t code)
{
    const uint32_t sign = (uint32_t)(code & 0x80) << 24, magnitude = code & 0x7f;

    if (magnitude >= 0x7c) return narrow_float(sign | 0x7f800000u | (magnitude & 3) << 21);
    return narrow_float(sign | narrow_bits(narrow_float(magnitude << 21) * 0x1p112f));
}

/* In the low half of a byte. The sign of what rounds to 0 is kept. A NaN, which the format lacks, is 6 whatever its
 * sign, which machines do not agree on. Codes go up in steps of 1/2 to 2, of 1 to 4 and of 2 to 6, and the least of the
 * three counts is right; 2^23 makes each addition round to a whole number, which the last bits hold. */
NARROW uint8_t f32_to_e2m1(float value)
{
    const uint32_t bits = narrow_bits(value);
    const float x = narrow_float(bits & 0x7fffffffu), whole = 0x1p23f;
    const float code = fminf(fminf(2 * x + whole, x + (whole + 2)), fminf(x / 2 + (whole + 4), whole + 7));

    return (uint8_t)((x <= INFINITY ? bits >> 28 & 8 : 0) | (narrow_bits(code) & 7));
}

NARROW float e2m1_to_f32(uint8_t code)
{
    const uint32_t magnitude = code & 7;

    return narrow_float((uint32_t)(code & 8) << 28 | narrow_bits(narrow_float(magnitude << 22) * 0x1p126f));
}

NARROW float e8m0_to_f32(uint8_t code)
{
    if (code == 255) return narrow_float(0x7fc00000u);
    return narrow_float(code ? (uint32_t)code << 23 : 0x00400000u);
}

#endif
