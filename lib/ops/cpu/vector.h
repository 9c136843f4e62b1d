/* Eight floats at a time with the vector extension of GCC and Clang, which any instruction set can serve; rows of any
 * type read into fp32; workspace cut into pieces. */
#ifndef GLM52_OPS_CPU_VECTOR_H
#define GLM52_OPS_CPU_VECTOR_H

#include <stdint.h>
#include <string.h>

#include "base/dtype.h"

enum { LANES = 8 };

/* May lie at any address of a float: V8(p) is the vector that starts there. Arithmetic with a float broadcasts it. */
typedef float v8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t v8i __attribute__((vector_size(32), aligned(4), may_alias));
#define V8(p) (*(v8 *)(p))
#define V8_CONST(p) (*(const v8 *)(p))

/* Keeps a vector in its register: GCC would rather load it again at each of its uses, and loads are what limits small
 * products. No instruction, no effect on values. */
#if defined(__AVX__)
#define V8_HOLD(v) __asm__("" : "+x"(v))
#else
#define V8_HOLD(v) ((void)0)
#endif

#define ALWAYS_INLINE static inline __attribute__((always_inline))

static inline int64_t round_up(int64_t value, int64_t step)
{
    return (value + step - 1) / step * step;
}

/* Elements at .. at + count of an array of the given type (F32 or BF16), as fp32. */
static inline void read_floats(glm52_dtype type, const void *array, int64_t at, int64_t count, float *to)
{
    if (type == GLM52_DTYPE_F32) {
        memcpy(to, (const float *)array + at, (size_t)count * sizeof *to);
    } else {
        const uint16_t *from = (const uint16_t *)array + at;

        for (int64_t i = 0; i < count; i++)
            to[i] = bf16_to_f32(from[i]);
    }
}

static inline void write_floats(glm52_dtype type, void *array, int64_t at, int64_t count, const float *from)
{
    if (type == GLM52_DTYPE_F32) {
        memcpy((float *)array + at, from, (size_t)count * sizeof *from);
    } else {
        uint16_t *to = (uint16_t *)array + at;

        for (int64_t i = 0; i < count; i++)
            to[i] = f32_to_bf16(from[i]);
    }
}

/* The next `bytes` of the block at base, 64-byte aligned; with base = NULL only counts them. */
static inline void *carve(char *base, size_t *used, size_t bytes)
{
    void *piece = base ? base + *used : NULL;

    *used += (bytes + 63) / 64 * 64;
    return piece;
}

static inline float *carve_floats(char *base, size_t *used, int64_t count)
{
    return carve(base, used, (size_t)count * sizeof(float));
}

#endif
