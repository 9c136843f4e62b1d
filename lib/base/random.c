/* Philox 4x32-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
 *
 * Normal numbers are the bulk of a new model's values, so they are made LANES pairs at a time, in loops that compilers
 * turn into vector instructions; logarithm, sine and cosine are series that such loops can hold. No multiplication is
 * fused with an addition: values are the same on every machine. */
#include "base/random.h"

#include <math.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif

enum { ROUNDS = 10, LANES = 16 };

struct random_key random_key(uint64_t seed, const char *name)
{
    uint64_t hash = XXH3_64bits(name, strlen(name));
    struct random_key key = {{(uint32_t)seed, (uint32_t)(seed >> 32)}, {(uint32_t)hash, (uint32_t)(hash >> 32)}};

    return key;
}

/* Four words for each of the counters `index` .. `index + lanes - 1`. */
static inline __attribute__((always_inline)) void blocks(struct random_key key, uint64_t index, uint32_t x[4][LANES],
                                                          int lanes)
{
    for (int i = 0; i < lanes; i++) {
        uint64_t counter = index + (uint64_t)i;
        uint32_t x0 = (uint32_t)counter, x1 = (uint32_t)(counter >> 32), x2 = key.stream[0], x3 = key.stream[1];

#pragma GCC unroll 10
        for (int round = 0; round < ROUNDS; round++) {
            uint64_t left = (uint64_t)0xD2511F53u * x0, right = (uint64_t)0xCD9E8D57u * x2;

            x0 = (uint32_t)(right >> 32) ^ x1 ^ (key.key[0] + (uint32_t)round * 0x9E3779B9u);
            x1 = (uint32_t)right;
            x2 = (uint32_t)(left >> 32) ^ x3 ^ (key.key[1] + (uint32_t)round * 0xBB67AE85u);
            x3 = (uint32_t)left;
        }
        x[0][i] = x0, x[1][i] = x1, x[2][i] = x2, x[3][i] = x3;
    }
}

uint64_t random_u64(struct random_key key, uint64_t index)
{
    uint32_t x[4][LANES];

    blocks(key, index, x, 1);
    return (uint64_t)x[1][0] << 32 | x[0][0];
}

double random_uniform(struct random_key key, uint64_t index)
{
    return (double)(random_u64(key, index) >> 11) * 0x1p-53;
}

uint64_t random_below(struct random_key key, uint64_t index, uint64_t n)
{
    return (uint64_t)(((unsigned __int128)random_u64(key, index) * n) >> 64);
}

/* ---- normal numbers ---- */

static inline uint64_t bits_of(double x)
{
    uint64_t bits;

    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline double double_of(uint64_t bits)
{
    double x;

    memcpy(&x, &bits, sizeof x);
    return x;
}

/* The upper 53 of 64 bits as a whole number: exact, by way of signed words, which vector units convert. */
static inline double upper_bits(uint32_t high, uint32_t low)
{
    uint32_t bottom = low >> 11 | high << 21;

    return (double)(int32_t)(high >> 11) * 0x1p32 + ((double)(int32_t)(bottom ^ 0x80000000u) + 0x1p31);
}

/* 0 < x <= 1: x = 2^e m with m in [sqrt(1/2), sqrt(2)), log m = 2 artanh s, s = (m - 1) / (m + 1), |s| < 0.172. */
static inline double log_of(double x)
{
    const uint64_t root = UINT64_C(0x3FE6A09E667F3BCD), shift = 64, whole = UINT64_C(0x4330000000000000); /* 2^52 */
    uint64_t e = (bits_of(x) - root + (shift << 52)) >> 52;
    double m = double_of(bits_of(x) - ((e - shift) << 52)), exponent = double_of(e | whole) - (0x1p52 + (double)shift);
    double s = (m - 1) / (m + 1), z = s * s, sum = 1.0 / 23;

    sum = sum * z + 1.0 / 21;
    sum = sum * z + 1.0 / 19;
    sum = sum * z + 1.0 / 17;
    sum = sum * z + 1.0 / 15;
    sum = sum * z + 1.0 / 13;
    sum = sum * z + 1.0 / 11;
    sum = sum * z + 1.0 / 9;
    sum = sum * z + 1.0 / 7;
    sum = sum * z + 1.0 / 5;
    sum = sum * z + 1.0 / 3;
    /* log 2 in two */
    return exponent * 0x1.62e42fefa2p-1 + (2 * s + (2 * s * z * sum + exponent * 0x1.9ef35793c7673p-41));
}

/* |x| <= pi / 4, z = x^2: the series of sine and cosine, which end below 1e-17. */
static inline double sine_of(double x, double z)
{
    double sum = 1.0 / 355687428096000;

    sum = sum * z - 1.0 / 1307674368000;
    sum = sum * z + 1.0 / 6227020800;
    sum = sum * z - 1.0 / 39916800;
    sum = sum * z + 1.0 / 362880;
    sum = sum * z - 1.0 / 5040;
    sum = sum * z + 1.0 / 120;
    sum = sum * z - 1.0 / 6;
    return x + x * z * sum;
}

static inline double cosine_of(double z)
{
    double sum = -1.0 / 6402373705728000;

    sum = sum * z + 1.0 / 20922789888000;
    sum = sum * z - 1.0 / 87178291200;
    sum = sum * z + 1.0 / 479001600;
    sum = sum * z - 1.0 / 3628800;
    sum = sum * z + 1.0 / 40320;
    sum = sum * z - 1.0 / 720;
    sum = sum * z + 1.0 / 24;
    return 1 + z * (z * sum - 0.5);
}

/* Box-Muller: one block gives the numbers 2 pair and 2 pair + 1. */
static inline __attribute__((always_inline)) void normal_pairs(struct random_key key, uint64_t pair, float *out,
                                                               int lanes)
{
    uint32_t x[4][LANES];

    blocks(key, pair, x, lanes);
    for (int i = 0; i < lanes; i++) {
        double length = sqrt(-2 * log_of((upper_bits(x[1][i], x[0][i]) + 1) * 0x1p-53));
        double angle = upper_bits(x[3][i], x[2][i]) * 0x1p-53 * 6.283185307179586;
        /* The nearest whole number of quarters, and what is left of the angle; pi / 2 in two. */
        double shifted = angle * 0x1.45f306dc9c883p-1 + 0x1.8p52, quarter = shifted - 0x1.8p52;
        double rest = (angle - quarter * 0x1.921fb54442d18p+0) - quarter * 0x1.1a62633145c07p-54;
        double sine = sine_of(rest, rest * rest), cosine = cosine_of(rest * rest);
        uint64_t q = bits_of(shifted), odd = 0 - (q & 1);
        uint64_t first = (bits_of(cosine) & ~odd) | (bits_of(sine) & odd);
        uint64_t second = (bits_of(sine) & ~odd) | (bits_of(cosine) & odd);

        out[2 * i] = (float)(length * double_of(first ^ ((q + 1) & 2) << 62));
        out[2 * i + 1] = (float)(length * double_of(second ^ (q & 2) << 62));
    }
}

float random_normal(struct random_key key, uint64_t index)
{
    float two[2];

    normal_pairs(key, index >> 1, two, 1);
    return two[index & 1];
}

void random_normals(struct random_key key, uint64_t first, uint64_t count, float *out)
{
    uint64_t done = 0;

    if (first & 1 && count) out[done++] = random_normal(key, first);
    for (; count - done >= 2 * LANES; done += 2 * LANES) normal_pairs(key, (first + done) >> 1, out + done, LANES);
    for (; done < count; done++) out[done] = random_normal(key, first + done);
}
