/* Element types: sizes, names, bfloat16 conversion (round to nearest even, NaN stays NaN). */
#ifndef GLM52_BASE_DTYPE_H
#define GLM52_BASE_DTYPE_H

#include <string.h>

#include "glm52.h"

size_t dtype_size(glm52_dtype type);       /* bytes; 0 for an unknown type */
const char *dtype_name(glm52_dtype type);  /* safetensors name: "F32", "BF16", ...; "?" */
glm52_dtype dtype_from_name(const char *name); /* 0 if unknown */

static inline float bf16_to_f32(uint16_t bits)
{
    uint32_t wide = (uint32_t)bits << 16;
    float value;

    memcpy(&value, &wide, sizeof value);
    return value;
}

static inline uint16_t f32_to_bf16(float value)
{
    uint32_t wide;

    memcpy(&wide, &value, sizeof wide);
    if ((wide & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)(wide >> 16 | 0x40u);
    return (uint16_t)((wide + 0x7fffu + (wide >> 16 & 1u)) >> 16);
}

#endif
