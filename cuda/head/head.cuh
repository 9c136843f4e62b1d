/* What the operations of the head share. With fp32 states, or a width that tensor cores cannot take, logits are fp32;
 * else they are bf16, and their gradient takes their place. */
#pragma once

#include "dense/matmul.cuh"
#include "device/element.cuh"

constexpr int HEAD_THREADS = 512;

/* Rows whose fp32 logits exist at a time: 256 MB of them, but no fewer than products need to run well, and no more than
 * they profit from. */
static inline int64_t head_chunk_rows(int64_t rows, int64_t vocabulary)
{
    constexpr int64_t LOGITS = 1 << 26, FEWEST = 128, MOST = 1024;

    return std::min(std::min(std::max(LOGITS / vocabulary, FEWEST), MOST), rows);
}

static inline bool head_in_bf16(glm52_dtype type, int64_t width)
{
    return type == GLM52_DTYPE_BF16 && width % 8 == 0;
}

/* From one row of bf16 logits to the next: rows begin at multiples of 128 bytes, whatever the vocabulary. */
static inline int64_t head_pitch(int64_t vocabulary) { return divided(vocabulary, 64) * 64; }

constexpr int64_t HEAD_TILE = 128; /* rows of a product's tile */

/* Rows whose bf16 logits may exist at a time: each chunk reads and writes the gradient of the weights once, so as many
 * as fit 640 MiB. */
static inline int64_t head_most_rows(int64_t vocabulary)
{
    constexpr int64_t LOGITS = 640 << 19, MOST = 2048;
    const int64_t rows = LOGITS / head_pitch(vocabulary) / HEAD_TILE * HEAD_TILE;

    return std::min(std::max(rows, HEAD_TILE), MOST);
}

/* As few chunks as `most` allows, of equal rows. */
static inline int64_t head_equal_rows(int64_t rows, int64_t most)
{
    const int64_t chunks = std::max<int64_t>(divided(rows, most), 1);

    return std::min(divided(divided(rows, chunks), HEAD_TILE) * HEAD_TILE, std::min(most, rows));
}

/* Which of p and q token v's min(p, q) counts as: q, where it is no larger than p. side (nullptr: nobody looks) gets
 * it, or has it already if `given`. */
__device__ __forceinline__ bool takes_draft(int32_t *side, bool given, int64_t v, float p, float q)
{
    if (side == nullptr) return q <= p;
    if (!given) side[v] = q <= p;
    return side[v] != 0;
}

/* logits [rows,vocabulary] = x W^T, their rows `pitch` apart */
static inline struct gemm to_logits(glm52_dtype type, int64_t rows, int64_t width, int64_t vocabulary, int64_t pitch,
                                    glm52_dtype logits)
{
    struct gemm g = {};

    g.m = rows;
    g.n = vocabulary;
    g.k = g.lda = g.ldb = width;
    g.ldc = pitch;
    g.batch = 1;
    g.transpose_b = 1;
    g.a_type = g.b_type = type;
    g.c_type = logits;
    return g;
}

/* dx [rows,width] = dlogits W, both of the type */
static inline struct gemm to_dx(glm52_dtype type, int64_t rows, int64_t width, int64_t vocabulary, int64_t pitch)
{
    struct gemm g = {};

    g.m = rows;
    g.n = g.ldb = g.ldc = width;
    g.k = vocabulary;
    g.lda = pitch;
    g.batch = 1;
    g.a_type = g.b_type = g.c_type = type;
    return g;
}

/* dw [vocabulary,width] += dlogits^T x, dw of a type of its own */
static inline struct gemm to_dw(const struct head *h, int64_t rows, int64_t pitch)
{
    struct gemm g = {};

    g.m = h->vocabulary;
    g.lda = pitch;
    g.n = g.ldb = g.ldc = h->width;
    g.k = rows;
    g.batch = g.transpose_a = g.add = 1;
    g.a_type = g.b_type = h->type;
    g.c_type = h->gradient;
    return g;
}

/* head_loss with logits in fp32, and either operation with logits in bf16. */
size_t head_loss_fp32_bytes(const struct head *h);
void head_loss_fp32(cuda_device *d, const struct head *h, const void *x, const void *w, const int32_t *label,
                    const float *weight, float *loss, float *hit, void *dx, void *dw, void *workspace);
size_t head_loss_bf16_bytes(const struct head *h);
void head_loss_bf16(cuda_device *d, const struct head *h, const void *x, const void *w, const int32_t *label,
                    const float *weight, float *loss, float *hit, void *dx, void *dw, void *workspace);
size_t head_tv_bf16_bytes(const struct head_tv *h);
void head_tv_bf16(cuda_device *d, const struct head_tv *h, const struct head_trunk *trunk,
                  const struct head_drafts *drafts, const void *w, void *workspace);
