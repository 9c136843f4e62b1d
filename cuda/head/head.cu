/* Output head fused with cross-entropy (model.md 2.7), and with the search for the largest logit: the logits of a chunk
 * of rows exist, never those of all rows. Here they are fp32; their gradient takes their place, or a slab of its own in
 * bf16. */
#include "head/head.cuh"

namespace {

constexpr int THREADS = HEAD_THREADS;

struct chunk {
    int64_t rows;
    float *logits;  /* [rows, vocabulary] */
    void *dlogits;  /* the same in the type of the head */
};

size_t layout(const struct head *h, void *base, chunk *c)
{
    size_t used = 0;

    c->rows = head_chunk_rows(h->rows, h->vocabulary);
    c->logits = carve<float>(base, &used, c->rows * h->vocabulary);
    c->dlogits = c->logits;
    if (h->type == GLM52_DTYPE_BF16) c->dlogits = carve<bf16>(base, &used, c->rows * h->vocabulary);
    return used;
}

/* Whether the first of the row's largest logits, `most`, is the one at `mine`. */
__device__ bool is_first_largest(const float *logits, int mine, float most)
{
    bool earlier = logits[mine] != most;

    for (int j = threadIdx.x; j < mine; j += THREADS) earlier |= logits[j] == most;
    return !__syncthreads_or(earlier);
}

/* A block a row: its loss; if dlogits is not NULL, weight * (softmax - one at the label). */
template <class T>
__global__ __launch_bounds__(THREADS) void loss_kernel(int64_t vocabulary, const float *logits, const int32_t *label,
                                                       const float *weight, float *loss, float *hit, T *dlogits)
{
    const int32_t mine = label[blockIdx.x];
    const float factor = dlogits && mine >= 0 ? weight[blockIdx.x] : 0;
    float most = -INFINITY, sum = 0;

    logits += blockIdx.x * vocabulary;
    if (dlogits) dlogits += blockIdx.x * vocabulary;
    if (mine < 0) {
        for (int64_t j = threadIdx.x; dlogits && j < vocabulary; j += THREADS) dlogits[j] = to<T>(0);
        if (threadIdx.x == 0) loss[blockIdx.x] = 0;
        if (threadIdx.x == 0 && hit) hit[blockIdx.x] = 0;
        return;
    }
    for (int64_t j = threadIdx.x; j < vocabulary; j += THREADS) most = fmaxf(most, logits[j]);
    most = block_largest<THREADS>(most);
    const bool first = hit && is_first_largest(logits, mine, most);
    for (int64_t j = threadIdx.x; j < vocabulary; j += THREADS) sum += expf(logits[j] - most);
    sum = block_sum<THREADS>(sum);
    if (threadIdx.x == 0) loss[blockIdx.x] = logf(sum) + (most - logits[mine]);
    if (threadIdx.x == 0 && hit) hit[blockIdx.x] = first ? 1.0f : 0.0f;
    if (!dlogits) return;
    __syncthreads(); /* the logits may be overwritten */
    for (int64_t j = threadIdx.x; j < vocabulary; j += THREADS)
        dlogits[j] = to<T>(factor / sum * expf(logits[j] - most) - (j == mine ? factor : 0));
}

} /* namespace */

size_t head_loss_fp32_bytes(const struct head *h)
{
    chunk c;

    return layout(h, nullptr, &c);
}

void head_loss_fp32(cuda_device *d, const struct head *h, const void *x, const void *w, const int32_t *label,
                    const float *weight, float *loss, float *hit, void *dx, void *dw, void *workspace)
{
    const int64_t size = (int64_t)dtype_size(h->type);
    chunk c;

    layout(h, workspace, &c);
    for (int64_t first = 0; first < h->rows; first += c.rows) {
        const int64_t rows = std::min(c.rows, h->rows - first), at = first * h->width * size;
        const char *from = (const char *)x + at;
        const struct gemm forward = to_logits(h->type, rows, h->width, h->vocabulary, h->vocabulary, GLM52_DTYPE_F32);
        const struct gemm to_x = to_dx(h->type, rows, h->width, h->vocabulary, h->vocabulary);
        const struct gemm to_w = to_dw(h, rows, h->vocabulary);

        matmul(d, &forward, from, w, c.logits);
        with_type(h->type, [&](auto element) {
            using T = decltype(element);
            loss_kernel<T><<<(unsigned)rows, THREADS, 0, d->stream>>>(
                h->vocabulary, c.logits, label + first, dx ? weight + first : nullptr, loss + first,
                hit ? hit + first : nullptr, dx ? (T *)c.dlogits : nullptr);
        });
        if (!dx) continue;
        matmul(d, &to_x, c.dlogits, w, (char *)dx + at);
        if (dw) matmul(d, &to_w, c.dlogits, from, dw);
    }
    launched(d, "head_loss");
}

namespace {

size_t head_loss_bytes(struct stream *, const struct head *h)
{
    return head_in_bf16(h->type, h->width) ? head_loss_bf16_bytes(h) : head_loss_fp32_bytes(h);
}

void head_loss(struct stream *s, const struct head *h, const void *x, const void *w, const int32_t *label,
               const float *weight, float *loss, float *hit, void *dx, void *dw, void *workspace)
{
    const auto run = head_in_bf16(h->type, h->width) ? head_loss_bf16 : head_loss_fp32;

    count_head_loss(s, h, hit != nullptr, (dx != nullptr) + (dw != nullptr));
    run(device_of(s), h, x, w, label, weight, loss, hit, dx, dw, workspace);
}

} /* namespace */

void fill_head(struct ops *t)
{
    t->head_loss_bytes = head_loss_bytes;
    t->head_loss = head_loss;
}
