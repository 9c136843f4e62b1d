/* What both ways of Muon share. */
#pragma once

#include "device/element.cuh"

struct muon_arrays {
    const float *rates, *coefficient;
    const void *gradient;
    void *momentum, *weight; /* weight: the master, or the parameter where there is none */
    void *rounded;           /* the parameter where there is a master */
};

constexpr float MUON_NORM_FLOOR = 1e-7f; /* as published code has it */

/* Moves the momentum, which is rounded as it is kept, and is what the update is made of. */
struct muon_momentum {
    float factor, beta, share, of_gradient, of_momentum;

    __device__ muon_momentum(const struct muon &m, float coefficient)
        : factor(coefficient), beta(m.momentum), share(m.classic ? 1.0f : 1.0f - beta),
          of_gradient(m.nesterov ? 1.0f : 0.0f), of_momentum(m.nesterov ? beta : 1.0f)
    {
    }
    __device__ float moved(float gradient, float momentum) const
    {
        return beta * momentum + share * (gradient * factor);
    }
    __device__ float update(float gradient, float moved) const
    {
        return of_gradient * (share * (gradient * factor)) + of_momentum * moved;
    }
};

/* The way for blocks whose parameter is BF16: products in half precision. Takes them if rows and gaps are multiples
 * of 16 bytes; else, and in fp32, muon.cu multiplies plainly. */
bool muon_takes_half(const struct muon *m);
size_t muon_half_bytes(const struct muon *m);
/* false: nothing was done, since an address is no multiple of 16 bytes. */
bool muon_half(struct cuda_device *d, const struct muon *m, const muon_arrays &a, void *workspace);
