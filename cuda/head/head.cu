/* Output head fused with cross-entropy (model.md 2.7), and with the search for its largest logit: the logits of a chunk of
 * rows exist, never those of all rows. Their gradient takes their place in fp32, and a slab of its own in bf16. */
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

size_t head_loss_bytes(struct stream *, const struct head *h)
{
    chunk c;

    return layout(h, nullptr, &c);
}

/* A block a row: its loss; if dlogits is not NULL, weight * (softmax - one at the label). */
template <class T>
__global__ __launch_bounds__(THREADS) void loss_kernel(int64_t vocabulary, const float *logits, const int32_t *label,
                                                       const float *weight, float *loss, T *dlogits)
{
    const int32_t mine = label[blockIdx.x];
    const float factor = dlogits && mine >= 0 ? weight[blockIdx.x] : 0;
    float most = -INFINITY, sum = 0;

    logits += blockIdx.x * vocabulary;
    if (dlogits) dlogits += blockIdx.x * vocabulary;
    if (mine < 0) {
        for (int64_t j = threadIdx.x; dlogits && j < vocabulary; j += THREADS) dlogits[j] = to<T>(0);
        if (threadIdx.x == 0) loss[blockIdx.x] = 0;
        return;
    }
    for (int64_t j = threadIdx.x; j < vocabulary; j += THREADS) most = fmaxf(most, logits[j]);
    most = block_largest<THREADS>(most);
    for (int64_t j = threadIdx.x; j < vocabulary; j += THREADS) sum += expf(logits[j] - most);
    sum = block_sum<THREADS>(sum);
    if (threadIdx.x == 0) loss[blockIdx.x] = logf(sum) + (most - logits[mine]);
    if (!dlogits) return;
    __syncthreads(); /* the logits may be overwritten */
    for (int64_t j = threadIdx.x; j < vocabulary; j += THREADS)
        dlogits[j] = to<T>(factor / sum * expf(logits[j] - most) - (j == mine ? factor : 0));
}

void gradients(cuda_device *d, const struct head *h, const chunk &c, int64_t rows, const void *x, const void *w, void *dx,
               float *dw)
{
    const struct gemm to_x = to_dx(h->type, rows, h->width, h->vocabulary);
    struct gemm to_w = {};

    to_w.m = to_w.lda = h->vocabulary;
    to_w.n = to_w.ldb = to_w.ldc = h->width;
    to_w.k = rows;
    to_w.batch = to_w.transpose_a = to_w.add = 1;
    to_w.a_type = to_w.b_type = h->type;
    to_w.c_type = GLM52_DTYPE_F32;
    matmul(d, &to_x, c.dlogits, w, dx);
    if (dw) matmul(d, &to_w, c.dlogits, x, dw);
}

void head_loss(struct stream *s, const struct head *h, const void *x, const void *w, const int32_t *label,
               const float *weight, float *loss, void *dx, float *dw, void *workspace)
{
    cuda_device *d = device_of(s);
    const int64_t size = (int64_t)dtype_size(h->type);
    chunk c;

    count_head_loss(s, h, (dx != nullptr) + (dw != nullptr));
    layout(h, workspace, &c);
    for (int64_t first = 0; first < h->rows; first += c.rows) {
        const int64_t rows = std::min(c.rows, h->rows - first);
        const char *from = (const char *)x + first * h->width * size;
        const struct gemm forward = to_logits(h->type, rows, h->width, h->vocabulary);

        matmul(d, &forward, from, w, c.logits);
        with_type(h->type, [&](auto element) {
            using T = decltype(element);
            loss_kernel<T><<<(unsigned)rows, THREADS, 0, d->stream>>>(h->vocabulary, c.logits, label + first,
                                                                      dx ? weight + first : nullptr, loss + first,
                                                                      dx ? (T *)c.dlogits : nullptr);
        });
        if (dx) gradients(d, h, c, rows, from, w, (char *)dx + first * h->width * size, dw);
    }
    launched(d, "head_loss");
}

/* Whether the first of the largest logits is the label's. */
__global__ __launch_bounds__(THREADS) void hit_kernel(int64_t vocabulary, const float *logits, const int32_t *label, float *hit)
{
    float most = -INFINITY;
    int first = INT32_MAX;

    logits += blockIdx.x * vocabulary;
    for (int64_t j = threadIdx.x; j < vocabulary; j += THREADS) most = fmaxf(most, logits[j]);
    most = block_largest<THREADS>(most);
    for (int64_t j = vocabulary - 1 - threadIdx.x; j >= 0; j -= THREADS)
        if (logits[j] == most) first = (int)j;
    first = -block_largest<THREADS>(-first);
    if (threadIdx.x == 0) hit[blockIdx.x] = first == label[blockIdx.x] ? 1.0f : 0.0f;
}

void head_hit(struct stream *s, const struct head *h, const void *x, const void *w, const int32_t *label, float *hit,
              void *workspace)
{
    cuda_device *d = device_of(s);
    const int64_t size = (int64_t)dtype_size(h->type);
    chunk c;

    count_head_hit(s, h);
    layout(h, workspace, &c);
    for (int64_t first = 0; first < h->rows; first += c.rows) {
        const int64_t rows = std::min(c.rows, h->rows - first);
        const struct gemm forward = to_logits(h->type, rows, h->width, h->vocabulary);

        matmul(d, &forward, (const char *)x + first * h->width * size, w, c.logits);
        hit_kernel<<<(unsigned)rows, THREADS, 0, d->stream>>>(h->vocabulary, c.logits, label + first, hit + first);
    }
    launched(d, "head_hit");
}

} /* namespace */

void fill_head(struct ops *t)
{
    t->head_loss_bytes = head_loss_bytes;
    t->head_loss = head_loss;
    t->head_hit = head_hit;
}
