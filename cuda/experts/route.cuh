/* What the router and its auxiliary losses share. */
#pragma once

#include "device/element.cuh"

constexpr float ROUTE_SUM_FLOOR = 1e-20f; /* as published code has it */

__device__ __forceinline__ float sigmoid(float x)
{
    return 1.0f / (1.0f + expf(-x));
}

/* sigmoid'(x), without the cancellation of 1 - sigmoid. */
__device__ __forceinline__ float sigmoid_slope(float x)
{
    const float e = expf(-fabsf(x));

    return e / ((1.0f + e) * (1.0f + e));
}

/* What the choice sees as a whole number of the same order; what is not a number comes last, and 0 after it, which
 * stands for none. */
__device__ __forceinline__ unsigned key_of(float x)
{
    const int bits = __float_as_int(isnan(x) ? -INFINITY : x);

    return (unsigned)bits ^ ((unsigned)(bits >> 31) | 0x80000000u);
}

__device__ __forceinline__ unsigned choice_key(float logit, float bias)
{
    return key_of(sigmoid(logit) + bias);
}

/* A warp has the experts of a row: expert 32 i + lane is number i of a lane. Takes the k with the largest keys, the
 * lower one of equals; bit i % 32 of taken[i / 32] says that number i was. Keys of the taken become 0. */
template <int EACH>
__device__ __forceinline__ void take_best(unsigned (&key)[EACH], int32_t k, unsigned (&taken)[(EACH + 31) / 32])
{
    const int lane = threadIdx.x % 32;

    for (int32_t j = 0; j < k; j++) {
        unsigned best = 0;
        int number = EACH;

#pragma unroll
        for (int i = EACH - 1; i >= 0; i--)
            if (key[i] >= best) {
                best = key[i];
                number = i;
            }
        const unsigned most = __reduce_max_sync(~0u, best);
        const unsigned expert = __reduce_min_sync(~0u, best == most ? number * 32 + lane : ~0u);
#pragma unroll
        for (int i = 0; i < EACH; i++)
            if (expert == (unsigned)(i * 32 + lane)) {
                key[i] = 0;
                taken[i / 32] |= 1u << i % 32;
            }
    }
}

/* Calls f with std::integral_constant of how many experts a lane has. */
template <class F>
static inline void with_each(int32_t experts, F f)
{
    if (experts <= 32)
        f(std::integral_constant<int, 1>());
    else if (experts <= 128)
        f(std::integral_constant<int, 4>());
    else if (experts <= 256)
        f(std::integral_constant<int, 8>());
    else if (experts <= 1024)
        f(std::integral_constant<int, 32>());
    else
        f(std::integral_constant<int, 128>());
}

void route_auxiliary_losses(struct stream *s, const struct route_auxiliary *a, const float *logits,
                            const int32_t *sequence, float *dlogits, double *loss, double *running);
