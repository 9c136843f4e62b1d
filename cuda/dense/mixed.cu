/* Products of fp32 with bf16 that are worth tensor cores: the fp32 operand enters as one or two bf16 numbers, hi =
 * bf16(x) and lo = bf16(x - hi), which leave 2^-18 of it out; one where the result is bf16, whose own rounding is as
 * large. */
#include "dense/matmul.cuh"
#include "device/element.cuh"

namespace {

constexpr int THREADS = 256, GAP = 8; /* lines of a copy begin at multiples of 16 bytes */
constexpr double WORTH = 1 << 26;     /* multiply-adds below which two more launches cost more than they save */

__global__ __launch_bounds__(THREADS) void split_kernel(int64_t lines, int64_t length, int64_t ld, int64_t pitch,
                                                        const float *from, bf16 *high, bf16 *low)
{
    for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < lines * length;
         i += (int64_t)gridDim.x * THREADS) {
        const int64_t line = i / length, at = line * pitch + i % length;
        const float x = from[line * ld + i % length];
        const bf16 most = to<bf16>(x);

        high[at] = most;
        if (low) low[at] = to<bf16>(x - get(most));
    }
}

} /* namespace */

bool mixed_serves(const struct gemm *g)
{
    return g->a_type == GLM52_DTYPE_F32 && g->b_type == GLM52_DTYPE_BF16 && g->batch == 1 &&
           (double)g->m * (double)g->n * (double)g->k >= WORTH;
}

/* Lines of a, which are rows of c or steps of its depth, in rounds that fit the scratch. */
void matmul_mixed(cuda_device *d, const struct gemm *g, const void *a, const void *b, float alpha, float beta,
                  const void *from, void *c)
{
    const bool along = g->transpose_a, twice = g->c_type == GLM52_DTYPE_F32;
    const int64_t lines = along ? g->k : g->m, length = along ? g->m : g->k, pitch = divided(length, GAP) * GAP;
    const int64_t c_size = (int64_t)dtype_size(g->c_type) * g->ldc;
    const int64_t fit = (int64_t)(MIXED_BYTES / sizeof(bf16)) / (pitch * (twice ? 2 : 1)) / GAP * GAP;
    bf16 *high = (bf16 *)((char *)d->scratch + PRODUCT_BYTES), *low = twice ? high + fit * pitch : nullptr;

    if (fit == 0) {
        matmul_plain(d, g, a, b, alpha, beta, from, c);
        return;
    }
    for (int64_t first = 0; first < lines; first += fit) {
        const int64_t count = std::min(fit, lines - first), row = along ? 0 : first;
        const int64_t step = g->transpose_b ? 1 : g->ldb;
        const bf16 *right = (const bf16 *)b + (along ? first * step : 0);
        const char *begin = (const char *)from + row * c_size;
        char *to = (char *)c + row * c_size;
        struct gemm part = *g;

        split_kernel<<<blocks_for(d, count * length, THREADS), THREADS, 0, d->stream>>>(
            count, length, g->lda, pitch, (const float *)a + first * g->lda, high, low);
        (along ? part.k : part.m) = count;
        part.lda = pitch;
        part.a_type = GLM52_DTYPE_BF16;
        matmul(d, &part, high, right, alpha, along && first ? 1.0f : beta, along && first ? to : begin, to);
        if (low) matmul(d, &part, low, right, alpha, 1.0f, to, to);
    }
}
