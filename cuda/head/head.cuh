/* What the operations of the head share. */
#pragma once

#include "dense/matmul.cuh"
#include "device/element.cuh"

constexpr int HEAD_THREADS = 512;

/* Rows whose logits exist at a time: 256 MB of them in fp32, but no fewer than products need to run well, and no more than
 * they profit from. */
static inline int64_t head_chunk_rows(int64_t rows, int64_t vocabulary)
{
    constexpr int64_t LOGITS = 1 << 26, FEWEST = 128, MOST = 1024;

    return std::min(std::min(std::max(LOGITS / vocabulary, FEWEST), MOST), rows);
}

/* logits [rows,vocabulary] fp32 = x W^T */
static inline struct gemm to_logits(glm52_dtype type, int64_t rows, int64_t width, int64_t vocabulary)
{
    struct gemm g = {};

    g.m = rows;
    g.n = vocabulary;
    g.k = g.lda = g.ldb = width;
    g.ldc = vocabulary;
    g.batch = 1;
    g.transpose_b = 1;
    g.a_type = g.b_type = type;
    g.c_type = GLM52_DTYPE_F32;
    return g;
}

/* dx [rows,width] = dlogits W, both of the type */
static inline struct gemm to_dx(glm52_dtype type, int64_t rows, int64_t width, int64_t vocabulary)
{
    struct gemm g = {};

    g.m = rows;
    g.n = g.ldb = g.ldc = width;
    g.k = g.lda = vocabulary;
    g.batch = 1;
    g.a_type = g.b_type = g.c_type = type;
    return g;
}
