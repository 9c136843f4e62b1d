/* Counter-based random numbers (Philox 4x32, 10 rounds): a value is a pure function of seed, name and index,
 * so that results do not depend on order, thread count or parallel layout. */
#ifndef GLM52_BASE_RANDOM_H
#define GLM52_BASE_RANDOM_H

#include <stdint.h>

struct random_key {
    uint32_t key[2], stream[2];
};

/* One stream of numbers per (seed, name). */
struct random_key random_key(uint64_t seed, const char *name);
uint64_t random_u64(struct random_key key, uint64_t index);
double random_uniform(struct random_key key, uint64_t index);              /* [0, 1) with 53 bits */
uint64_t random_below(struct random_key key, uint64_t index, uint64_t n);  /* 0 .. n - 1 */
float random_normal(struct random_key key, uint64_t index);                /* mean 0, deviation 1 */
/* random_normal() of `count` indices from `first` on. */
void random_normals(struct random_key key, uint64_t first, uint64_t count, float *out);

#endif
