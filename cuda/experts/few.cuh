/* The router of at most 32 x FEW experts, a warp a row: a lane has experts that follow one another, with all that is
 * needed of them in registers. */
#pragma once

#include "experts/route.cuh"

namespace few {

constexpr int FEW = 8, THREADS = 256, ROWS = THREADS / 32;

/* As take_best, one after the other. */
template <int EACH>
__device__ unsigned take_in_turn(unsigned (&key)[EACH], int32_t k)
{
    unsigned taken = 0;

    for (int32_t j = 0; j < k; j++) {
        unsigned best = key[0];

#pragma unroll
        for (int i = 1; i < EACH; i++) best = max(best, key[i]);
        const unsigned most = __reduce_max_sync(~0u, best);
        bool open = (int)threadIdx.x % 32 == __ffs(__ballot_sync(~0u, best == most)) - 1;
#pragma unroll
        for (int i = 0; i < EACH; i++)
            if (open && key[i] == most) {
                key[i] = 0;
                taken |= 1u << i;
                open = false;
            }
    }
    return taken;
}

/* The k with the largest keys, the lower expert of equals. The lanes' own largest tell how large a key must be at
 * least; those that are so large are few more than k, as a rule, and the smallest of them are given up. */
template <int EACH>
__device__ __forceinline__ unsigned take_few(unsigned (&key)[EACH], int32_t k)
{
    constexpr int MANY = 8; /* to give up: the longer way is shorter then */
    unsigned best = key[0], least_taken = 0, taken = 0;

#pragma unroll
    for (int i = 1; i < EACH; i++) best = max(best, key[i]);
    for (int32_t j = 0; j < k; j++) {
        least_taken = __reduce_max_sync(~0u, best);
        if (best == least_taken) best = 0;
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) taken |= key[i] >= least_taken && key[i] != 0 ? 1u << i : 0;
    int more = (int)__reduce_add_sync(~0u, __popc(taken)) - k;
    if (more > MANY) return take_in_turn<EACH>(key, k);
    for (; more > 0; more--) {
        unsigned low = ~0u, bit = 0;

#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const bool lower = (taken >> i & 1) && key[i] <= low;

            low = lower ? key[i] : low;
            bit = lower ? 1u << i : bit;
        }
        const unsigned least = __reduce_min_sync(~0u, low);
        if ((int)threadIdx.x % 32 == 31 - __clz(__ballot_sync(~0u, bit != 0 && low == least))) taken &= ~bit;
    }
    return taken;
}

/* FULL: there are 32 x EACH experts, at 16-byte addresses. */
template <int EACH, bool FULL>
__device__ __forceinline__ void load_few(const float *from, int experts, float (&x)[EACH])
{
    const int first = threadIdx.x % 32 * EACH;

    if constexpr (FULL) {
        load(from + first, x);
    } else {
#pragma unroll
        for (int i = 0; i < EACH; i++) x[i] = first + i < experts ? from[first + i] : 0;
    }
}

template <int EACH, bool FULL>
__global__ __launch_bounds__(THREADS, 8) void forward_kernel(const struct route r, const float *logits,
                                                             const float *bias, int32_t *chosen, float *weight)
{
    const int64_t t = blockIdx.x * (int64_t)ROWS + threadIdx.x / 32;
    const int lane = threadIdx.x % 32, first = lane * EACH;
    float sigma[EACH], correction[EACH], sum = 0;
    unsigned key[EACH], taken = 0;

    if (t >= r.rows) return;
    load_few<EACH, FULL>(logits + t * r.experts, r.experts, sigma);
    load_few<EACH, FULL>(bias, r.experts, correction);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        sigma[i] = sigmoid(sigma[i]);
        key[i] = FULL || first + i < r.experts ? key_of(sigma[i] + correction[i]) : 0;
    }
    if (r.given) {
        for (int j = 0; j < r.k; j++) {
            const int expert = chosen[t * r.k + j];

            taken |= expert / EACH == lane ? 1u << expert % EACH : 0;
        }
        __syncwarp(); /* all have read before any writes the same places */
    } else if (r.forced) {
        const int turn = (int)(t * r.k % r.experts);

        for (int i = 0; i < EACH && first + i < r.experts; i++)
            taken |= (first + i - turn + r.experts) % r.experts < r.k ? 1u << i : 0;
    } else {
        taken = take_few<EACH>(key, r.k);
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) sum += taken >> i & 1 ? sigma[i] : 0;
    sum = warp_reduce(sum, plus());
    const float factor = r.normalize ? r.scale / (sum + ROUTE_SUM_FLOOR) : r.scale;
    int before = __popc(taken);
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) {
        const int lower = __shfl_up_sync(~0u, before, apart);
        if (lane >= apart) before += lower;
    }
    int64_t at = t * r.k + before - __popc(taken);
#pragma unroll
    for (int i = 0; i < EACH; i++)
        if (taken >> i & 1) {
            chosen[at] = first + i;
            weight[at++] = sigma[i] * factor;
        }
}

/* For EACH <= FEW, a lane's experts. */
template <int EACH>
static void forward(cuda_device *d, const struct route *r, const float *logits, const float *bias, int32_t *chosen,
                    float *weight)
{
    const unsigned blocks = (unsigned)divided(r->rows, ROWS);

    if (r->experts == 32 * EACH && aligned16(logits) && aligned16(bias))
        forward_kernel<EACH, true><<<blocks, THREADS, 0, d->stream>>>(*r, logits, bias, chosen, weight);
    else
        forward_kernel<EACH, false><<<blocks, THREADS, 0, d->stream>>>(*r, logits, bias, chosen, weight);
}

} /* namespace few */
