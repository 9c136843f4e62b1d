/* The operation gemm, and products for which cuBLASLt has no form: operands of two types, no depth. */
#include "dense/matmul.cuh"
#include "dense/tile.cuh"

namespace {

constexpr int TILE = 64;

struct plain {
    struct gemm g;
    const void *a, *b, *from;
    void *c;
    float alpha, beta;
};

/* Everything passes through fp32. blockIdx.z: batch. */
template <class A, class B, class C, order OA, order OB>
__global__ __launch_bounds__(TILE_THREADS) void plain_kernel(const plain p)
{
    using product = tile<float, TILE, TILE, OA, OB>;
    __shared__ typename product::shared shared;
    const struct gemm &g = p.g;
    const int64_t i = (int64_t)blockIdx.x * TILE, j = (int64_t)blockIdx.y * TILE, batch = blockIdx.z;
    const A *a = (const A *)p.a + batch * g.stride_a + (OA == ALONG ? i * g.lda : i);
    const B *b = (const B *)p.b + batch * g.stride_b + (OB == ALONG ? j * g.ldb : j);
    const C *from = (const C *)p.from + batch * g.stride_c;
    C *c = (C *)p.c + batch * g.stride_c;
    product t;

    t.clear();
    t.multiply(shared, operand<A>{a, g.lda, (int)min((int64_t)TILE, g.m - i), false},
               operand<B>{b, g.ldb, (int)min((int64_t)TILE, g.n - j), false}, g.k);
    t.each([&](int row, int column, float sum) {
        if (i + row >= g.m || j + column >= g.n) return;
        const int64_t at = (i + row) * g.ldc + j + column;
        c[at] = to<C>(p.alpha * sum + (p.beta == 0 ? 0 : p.beta * get(from[at])));
    });
}

template <class A, class B, class C>
void launch(cuda_device *d, const plain &p)
{
    const dim3 grid((unsigned)divided(p.g.m, TILE), (unsigned)divided(p.g.n, TILE), (unsigned)p.g.batch);

    if (p.g.transpose_a && p.g.transpose_b)
        plain_kernel<A, B, C, ACROSS, ALONG><<<grid, TILE_THREADS, 0, d->stream>>>(p);
    else if (p.g.transpose_a)
        plain_kernel<A, B, C, ACROSS, ACROSS><<<grid, TILE_THREADS, 0, d->stream>>>(p);
    else if (p.g.transpose_b)
        plain_kernel<A, B, C, ALONG, ALONG><<<grid, TILE_THREADS, 0, d->stream>>>(p);
    else
        plain_kernel<A, B, C, ALONG, ACROSS><<<grid, TILE_THREADS, 0, d->stream>>>(p);
}

void run_gemm(struct stream *s, const struct gemm *g, const void *a, const void *b, void *c)
{
    count_gemm(s, g);
    matmul(device_of(s), g, a, b, c);
}

} /* namespace */

void matmul_plain(cuda_device *d, const struct gemm *g, const void *a, const void *b, float alpha, float beta,
                  const void *from, void *c)
{
    const plain p = {*g, a, b, from, c, alpha, beta};

    with_type(g->a_type, [&](auto x) {
        with_type(g->b_type, [&](auto y) {
            with_type(g->c_type, [&](auto z) { launch<decltype(x), decltype(y), decltype(z)>(d, p); });
        });
    });
    launched(d, "gemm");
}

void fill_dense(struct ops *t)
{
    t->gemm = run_gemm;
}
