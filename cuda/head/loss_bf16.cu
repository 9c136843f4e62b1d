/* head_loss with logits in bf16: of a chunk of rows they exist once, and become their own gradient in place. */
#include "head/row_bf16.cuh"

namespace {

struct arguments {
    int64_t width, pitch;
    int vocabulary;
    const bf16 *x, *w;
    bf16 *logits; /* become the gradient if weight is not NULL */
    const int32_t *label;
    const float *weight;
    float *loss, *hit;
};

/* Whether the first of the row's largest logits is the one at `mine`; `most` is the largest of the others. */
__device__ bool is_first_largest(const bf16 *row, int mine, float most)
{
    const float own = get(row[mine]);
    bool earlier = false;

    if (own != most) return own > most;
    for (int j = threadIdx.x; j < mine; j += ROW_THREADS) earlier |= get(row[j]) == most;
    return !__syncthreads_or(earlier);
}

/* A block a row. */
__global__ __launch_bounds__(ROW_THREADS, 1) void loss_kernel(const arguments g)
{
    const int64_t i = blockIdx.x;
    const int mine = g.label[i];
    bf16 *row = g.logits + i * g.pitch;

    if (mine < 0) {
        if (threadIdx.x == 0) g.loss[i] = 0;
        if (threadIdx.x == 0 && g.hit) g.hit[i] = 0;
        if (g.weight) clear_row(row, g.vocabulary);
        return;
    }
    const row_loss r = loss_of(row, g.vocabulary, mine, g.x + i * g.width, g.w + mine * g.width, g.width);
    const bool first = g.hit && is_first_largest(row, mine, r.others.most);

    if (threadIdx.x == 0) {
        g.loss[i] = loss_value(r);
        if (g.hit) g.hit[i] = first ? 1.0f : 0.0f;
    }
    if (!g.weight) return;
    __syncthreads(); /* the logits may be overwritten */
    to_gradient(row, g.vocabulary, slope_of(r, g.weight[i], mine));
}

struct chunk {
    int64_t rows, pitch;
    bf16 *logits;
};

size_t layout(const struct head *h, void *base, chunk *c)
{
    size_t used = 0;

    c->pitch = head_pitch(h->vocabulary);
    c->rows = head_equal_rows(h->rows, head_most_rows(h->vocabulary));
    c->logits = carve<bf16>(base, &used, c->rows * c->pitch);
    return used;
}

} /* namespace */

size_t head_loss_bf16_bytes(const struct head *h)
{
    chunk c;

    return layout(h, nullptr, &c);
}

void head_loss_bf16(cuda_device *d, const struct head *h, const void *x, const void *w, const int32_t *label,
                    const float *weight, float *loss, float *hit, void *dx, void *dw, void *workspace)
{
    chunk c;

    layout(h, workspace, &c);
    for (int64_t first = 0; first < h->rows; first += c.rows) {
        const int64_t rows = std::min(c.rows, h->rows - first);
        const bf16 *from = (const bf16 *)x + first * h->width;
        const struct gemm forward = to_logits(h->type, rows, h->width, h->vocabulary, c.pitch, GLM52_DTYPE_BF16);
        const struct gemm to_x = to_dx(h->type, rows, h->width, h->vocabulary, c.pitch), to_w = to_dw(h, rows, c.pitch);
        const arguments g = {h->width, c.pitch, (int)h->vocabulary, from, (const bf16 *)w, c.logits, label + first,
                             dx ? weight + first : nullptr, loss + first, hit ? hit + first : nullptr};

        matmul(d, &forward, from, w, c.logits);
        loss_kernel<<<(unsigned)rows, ROW_THREADS, 0, d->stream>>>(g);
        if (!dx) continue;
        matmul(d, &to_x, c.logits, w, (bf16 *)dx + first * h->width);
        if (dw) matmul(d, &to_w, c.logits, from, dw);
    }
    launched(d, "head_loss");
}
