/* What forward and backward of dense attention share: the call, and operands of one head. */
#pragma once

#include "attention/visible.cuh"
#include "dense/tile.cuh"

constexpr int TILE = 64; /* rows and keys */

struct dense_call {
    struct dense_attention a;
    const void *q, *k, *v;
    const int32_t *start, *end;
    bool wide; /* see dense/tile.cuh */
};

static inline dense_call dense_call_of(const struct dense_attention *a, const void *q, const void *k, const void *v,
                                       const int32_t *start, const int32_t *end)
{
    const bool wide = a->qk % WIDE == 0 && a->v % WIDE == 0 && aligned16(q) && aligned16(k) && aligned16(v);

    return {*a, q, k, v, start, end, wide};
}

/* Rows from `row` on, along the depth, of an array [rows, heads, width]. */
template <class T>
__device__ __forceinline__ operand<T> of_head(const dense_call &x, const void *array, int64_t width, int64_t row,
                                              int64_t head, int rows)
{
    return {(const T *)array + (row * x.a.heads + head) * width, x.a.heads * width, rows, x.wide};
}

/* The same across it: TILE columns from `column` on. */
template <class T>
__device__ __forceinline__ operand<T> across_head(const dense_call &x, const void *array, int64_t width, int64_t row,
                                                  int64_t head, int64_t column)
{
    return {(const T *)array + (row * x.a.heads + head) * width + column, x.a.heads * width,
            (int)min((int64_t)TILE, width - column), x.wide};
}

/* What each row of a tile sees, on chip. */
struct dense_bounds {
    int start[TILE], end[TILE];
};

__device__ __forceinline__ void read_bounds(const dense_call &x, int64_t row, int rows, dense_bounds *to)
{
    __syncthreads();
    if (threadIdx.x < TILE) {
        const bool here = (int)threadIdx.x < rows;

        to->start[threadIdx.x] = here ? x.start[row + threadIdx.x] : 0;
        to->end[threadIdx.x] = here ? x.end[row + threadIdx.x] : 0;
    }
    __syncthreads();
}

__device__ __forceinline__ bool seen(const dense_bounds &b, int row, int64_t key)
{
    return key >= b.start[row] && key < b.end[row];
}

struct dense_gradients {
    const void *out, *dout;
    const float *lse;
    float *delta;   /* [rows, heads]: D */
    range *seen;    /* [tiles of rows]: the range around what its rows see */
    void *space;    /* hopper_bytes */
    void *dq, *dk, *dv;
};

/* By Hopper's kernels. false: nothing is done, the call is not of their kind. */
bool hopper_forward(cuda_device *d, const dense_call &x, void *out, float *lse);
bool hopper_backward(cuda_device *d, const dense_call &x, const dense_gradients &g);
size_t hopper_bytes(const struct dense_attention *a); /* of backward, beside delta and seen */

void fill_dense_attention_backward(struct ops *t);
