/* exp in fp32 that compilers vectorise: no branch, no table, no call. Within 2 ulp of the exact value;
 * results below 2^-125 are 0, beyond FLT_MAX they are infinite, and NaN stays NaN. */
#ifndef GLM52_OPS_CPU_EXPF_H
#define GLM52_OPS_CPU_EXPF_H

#include <stdint.h>
#include <string.h>

static inline float exp_f32(float x)
{
    /* Adding 1.5 * 2^23 rounds to an integer, which then stands in the low bits of the sum. */
    const float round = 12582912.0f, log2e = 1.44269504f;
    const float ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f; /* their products with n are exact, and small */
    float n, r, p, scale;
    uint32_t bits;

    x = x < -87.3f ? -87.3f : x; /* the scale below reaches 0 here, and must not wrap around */
    x = x > 89.0f ? 89.0f : x;
    n = x * log2e + round;
    memcpy(&bits, &n, sizeof bits);
    n -= round;
    r = x - n * ln2_high;
    r -= n * ln2_low;
    p = 1.9875691500e-4f; /* minimax on |r| <= ln2 / 2, as in Cephes */
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    /* p 2^n as 2 p 2^(n-1), so that n = 128 needs no case of its own. */
    bits = (bits << 23) + (126u << 23);
    memcpy(&scale, &bits, sizeof scale);
    return 2.0f * (p * scale);
}

/* x[i] = exp(x[i]) */
static inline void exp_array(float *x, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        x[i] = exp_f32(x[i]);
}

#endif
