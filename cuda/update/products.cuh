/* Products of matrices in half precision on Hopper's tensor cores, sums in fp32: c = alpha a b + beta d + gamma I,
 * for a batch of matrices that follow one another. Rows and columns of every matrix are multiples of 8. */
#pragma once

#include <cuda_fp16.h>

#include "device/device.cuh"

/* What a product is for: W = (1 - lr decay) W - lr scale c, nothing where *coefficient is negative. Row i of matrix b
 * of W lies at b stride + i / group_rows group_stride + i % group_rows n. */
struct half_update {
    const float *rates, *coefficient;
    float decay, scale;
    void *weight;  /* bf16, or fp32 where there is a copy */
    void *rounded; /* bf16, or NULL */
    int64_t stride, group_rows, group_stride;
};

struct half_products {
    int64_t batch, m, n, k;
    bool a_across, b_across; /* a is stored [k,m], not [m,k]; b is stored [k,n], not [n,k] */
    bool symmetric;          /* c is, and half of it mirrors what is computed: m = n, and a is stored as b is */
    float alpha, beta, gamma; /* alpha = 1, beta = gamma = 0 unless c is symmetric; beta = 0: d is not read */
    const __half *a, *b, *d;
    __half *c;                        /* none of the others */
    const struct half_update *update; /* instead of c, which is NULL then and not symmetric */
};

void half_products_run(cuda_device *device, const struct half_products *p);
