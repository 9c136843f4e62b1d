/* The scale of a block of each quantised format (ops/ops.h states the rules), for the cpu and for CUDA alike: every
 * operation is one rounded fp32 operation, so that both give the same bytes. */
#ifndef GLM52_OPS_SCALE_H
#define GLM52_OPS_SCALE_H

#include <float.h>

#include "base/narrow.h"
#include "ops/ops.h"

struct scale {
    float encode;   /* elements are multiplied by it, or divided if the format divides */
    float stored;   /* FP8 */
    uint8_t code;   /* of the others */
};

NARROW int format_is_packed(int format)
{
    return format >= NVFP4;
}

NARROW int format_divides(int format)
{
    return format == FP8_BLOCK_RELEASE || format == NVFP4_MODELOPT;
}

/* 1 for what is not a number that one can divide by. */
NARROW float scale_or_one(float x)
{
    return x > 0 && x <= FLT_MAX ? x : 1;
}

NARROW float scale_finite(float x)
{
    return x < FLT_MAX ? x : FLT_MAX;
}

NARROW struct scale scale_fp8(int format, float largest, float amax)
{
    struct scale s = {1, 1, 0};

    if (format == FP8_BLOCK_RELEASE) {
        s.encode = s.stored = scale_or_one(amax / largest);
        return s;
    }
    if (amax > 0 && amax <= FLT_MAX) s.encode = scale_finite(largest / amax);
    if (format == FP8_BLOCK_POWER) s.encode = narrow_float(narrow_bits(s.encode) & 0x7f800000u);
    s.stored = 1 / s.encode;
    return s;
}

NARROW struct scale scale_e8m0(int format, int e5m2, float amax)
{
    const uint32_t bits = narrow_bits(format == MXFP8 ? amax * (e5m2 ? 1 / 57344.0f : 1 / 448.0f) : amax);
    const uint32_t exponent = bits >> 23, mantissa = bits & 0x7fffffu, of_largest = e5m2 ? 15 : 8;
    struct scale s = {0, 0, 0};
    uint32_t code;

    if (exponent == 255)
        code = mantissa ? 255 : 254;
    else if (format == MXFP8_OCP)
        code = exponent > of_largest ? exponent - of_largest : 0;
    else
        code = exponent + (mantissa > (exponent ? 0 : 0x400000u)); /* 254 at most: amax was divided */
    s.code = (uint8_t)code;
    s.encode = narrow_float(code == 254 ? 0x00400000u : code == 255 ? 0x7fc00000u : (254 - code) << 23);
    return s;
}

NARROW struct scale scale_nvfp4(int format, float amax, float global)
{
    struct scale s = {0, 0, 0};

    if (format == NVFP4_MODELOPT) {
        const float wanted = amax / (6 * global);

        s.code = f32_to_e4m3(!(wanted > 0) ? 1 : wanted > 0x1p-9f ? wanted : 0x1p-9f);
        s.encode = scale_or_one(e4m3_to_f32(s.code) * global); /* 1: all of the matrix is 0 */
        return s;
    }
    const float encode = global > 0 ? scale_or_one(scale_finite(2688 / global)) : 1;

    s.code = f32_to_e4m3(amax * (encode * (1 / 6.0f)));
    s.encode = scale_finite(1 / (e4m3_to_f32(s.code) * (1 / encode)));
    return s;
}

/* amax: the largest magnitude of the block, NaN if it has a NaN. */
NARROW struct scale scale_make(int format, int e5m2, float amax, float global)
{
    if (format_is_packed(format)) return scale_nvfp4(format, amax, global);
    if (format >= MXFP8) return scale_e8m0(format, e5m2, amax);
    return scale_fp8(format, e5m2 ? 57344 : 448, amax);
}

NARROW void scale_store(int format, const struct scale *s, void *scales, int64_t at)
{
    if (format >= MXFP8)
        ((uint8_t *)scales)[at] = s->code;
    else
        ((float *)scales)[at] = s->stored;
}

/* What codes of block `at` are multiplied by. */
NARROW float scale_load(int format, const void *scales, int64_t at, float global)
{
    if (format == NVFP4) return e4m3_to_f32(((const uint8_t *)scales)[at]) * global * (1 / 2688.0f);
    if (format == NVFP4_MODELOPT) return e4m3_to_f32(((const uint8_t *)scales)[at]) * global;
    if (format >= MXFP8) return e8m0_to_f32(((const uint8_t *)scales)[at]);
    return ((const float *)scales)[at];
}

/* The code of x in a block of that scale; the low half of a byte if codes are packed. ModelOpt has no -0. */
NARROW uint8_t code_of(int format, int e5m2, float encode, float x)
{
    const float scaled = format_divides(format) ? x / encode : x * encode;

    if (format == NVFP4_MODELOPT) return (uint8_t)(f32_to_e2m1(scaled) & (x < 0 ? 15 : 7));
    if (format == NVFP4) return f32_to_e2m1(scaled);
    return e5m2 ? f32_to_e5m2(scaled) : f32_to_e4m3(scaled);
}

NARROW float code_value(int format, int e5m2, uint8_t code)
{
    if (format_is_packed(format)) return e2m1_to_f32(code);
    return e5m2 ? e5m2_to_f32(code) : e4m3_to_f32(code);
}

#endif
