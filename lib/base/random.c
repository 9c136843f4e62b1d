/* Philox 4x32-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). */
#include "base/random.h"

#include <math.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

enum { ROUNDS = 10 };

static void philox(const uint32_t key[2], uint32_t x[4])
{
    uint32_t k0 = key[0], k1 = key[1];

    for (int round = 0; round < ROUNDS; round++) {
        uint64_t left = (uint64_t)0xD2511F53u * x[0], right = (uint64_t)0xCD9E8D57u * x[2];
        uint32_t y[4] = {(uint32_t)(right >> 32) ^ x[1] ^ k0, (uint32_t)right, (uint32_t)(left >> 32) ^ x[3] ^ k1,
                         (uint32_t)left};
        memcpy(x, y, sizeof y);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
}

struct random_key random_key(uint64_t seed, const char *name)
{
    uint64_t hash = XXH3_64bits(name, strlen(name));
    struct random_key key = {{(uint32_t)seed, (uint32_t)(seed >> 32)}, {(uint32_t)hash, (uint32_t)(hash >> 32)}};

    return key;
}

static void block(struct random_key key, uint64_t index, uint32_t x[4])
{
    x[0] = (uint32_t)index;
    x[1] = (uint32_t)(index >> 32);
    x[2] = key.stream[0];
    x[3] = key.stream[1];
    philox(key.key, x);
}

uint64_t random_u64(struct random_key key, uint64_t index)
{
    uint32_t x[4];

    block(key, index, x);
    return (uint64_t)x[1] << 32 | x[0];
}

double random_uniform(struct random_key key, uint64_t index)
{
    return (double)(random_u64(key, index) >> 11) * 0x1p-53;
}

uint64_t random_below(struct random_key key, uint64_t index, uint64_t n)
{
    return (uint64_t)(((unsigned __int128)random_u64(key, index) * n) >> 64);
}

/* Box-Muller on the block of the pair (index & ~1, index | 1): two indices share one block. */
float random_normal(struct random_key key, uint64_t index)
{
    uint32_t x[4];

    block(key, index >> 1, x);
    double radius = ((double)(((uint64_t)x[1] << 32 | x[0]) >> 11) + 1) * 0x1p-53;
    double angle = (double)(((uint64_t)x[3] << 32 | x[2]) >> 11) * 0x1p-53 * 6.283185307179586;
    double length = sqrt(-2 * log(radius));
    return (float)(length * (index & 1 ? sin(angle) : cos(angle)));
}
