/* The trunk's loss, and the end-to-end total variation of drafts against it (training.md 3.4). Here logits are fp32,
 * and the trunk's are made once more for the drafts: in the memory of one chunk of head_loss then stand the trunk's of
 * a few rows and of those that follow, and the drafts' of all depths, which become probabilities and then their own
 * gradient. */
#include "head/head.cuh"

namespace {

constexpr int THREADS = HEAD_THREADS;

struct chunk {
    int64_t rows, trunk_rows; /* of drafts per depth; of the trunk, beginning one after the drafts */
    float *trunk, *draft;     /* [trunk_rows,vocabulary], [depths,rows,vocabulary] */
    float *below;             /* [depths,rows]: q's mass where it does not exceed p */
    void *slope;              /* [depths,rows,vocabulary] of the type: the gradient; the drafts' own place in fp32 */
};

struct head of_trunk(const struct head_tv *h) { return {h->rows, h->width, h->vocabulary, h->type, h->gradient}; }

size_t layout(const struct head_tv *h, void *base, chunk *c)
{
    const int64_t rows = (head_chunk_rows(h->rows, h->vocabulary) - (h->depths - 1)) / (h->depths + 1);
    size_t used = 0;

    *c = {};
    if (h->rows == 0) return 0;
    c->rows = std::min(std::max<int64_t>(rows, 1), h->rows);
    c->trunk_rows = std::min(c->rows + h->depths - 1, h->rows - 1);
    c->trunk = carve<float>(base, &used, c->trunk_rows * h->vocabulary);
    c->draft = carve<float>(base, &used, h->depths * c->rows * h->vocabulary);
    c->below = carve<float>(base, &used, h->depths * c->rows);
    c->slope = c->draft;
    if (h->type == GLM52_DTYPE_BF16) c->slope = carve<bf16>(base, &used, h->depths * c->rows * h->vocabulary);
    return used;
}

/* x becomes its softmax, by a block. */
__device__ void soften(float *x, int64_t count)
{
    float most = -INFINITY;
    double sum = 0;

    for (int64_t j = threadIdx.x; j < count; j += THREADS) most = fmaxf(most, x[j]);
    most = block_largest<THREADS>(most);
    for (int64_t j = threadIdx.x; j < count; j += THREADS) {
        const float e = expf(x[j] - most);

        x[j] = e;
        sum += (double)e;
    }
    const float scale = (float)(1 / block_sum<THREADS>(sum));
    for (int64_t j = threadIdx.x; j < count; j += THREADS) x[j] *= scale;
}

__global__ __launch_bounds__(THREADS) void softmax_kernel(int64_t vocabulary, float *logits)
{
    soften(logits + blockIdx.x * vocabulary, vocabulary);
}

/* The acceptance sum min(p, q); *below gets the sum of q where it counts (takes_draft). Rounding may carry either
 * beyond 1. */
__device__ float acceptance(const float *p, const float *q, int64_t count, int32_t *side, bool given, float *below)
{
    double overlap = 0, under = 0;

    for (int64_t j = threadIdx.x; j < count; j += THREADS) {
        overlap += (double)fminf(p[j], q[j]);
        under += takes_draft(side, given, j, p[j], q[j]) ? (double)q[j] : 0.0;
    }
    overlap = block_sum<THREADS>(overlap);
    under = block_sum<THREADS>(under);
    *below = under < 1 ? (float)under : 1.0f;
    return overlap < 1 ? (float)overlap : 1.0f;
}

struct arguments {
    struct head_tv h;
    chunk c;
    int64_t first, rows; /* of this round */
    const float *weight;
    float *alpha, *loss;
    int32_t *side;
    bool given;
};

__device__ int32_t *side_of(const arguments &x, int64_t i, int32_t d)
{
    return x.side == nullptr ? nullptr : x.side + (d * x.h.rows + x.first + i) * x.h.vocabulary;
}

/* Of one row: alpha and below of each depth, and the loss. With alpha_d' = alpha_d (1 + alpha_d+1'), the prefixes'
 * products sum to alpha_0'. */
__device__ void row_loss(const arguments &x, int64_t i)
{
    const int64_t vocabulary = x.h.vocabulary;
    const float *trunk = x.c.trunk + i * vocabulary;
    double prefixes = 0;

    for (int32_t d = x.h.depths - 1; d >= 0; d--) {
        float *q = x.c.draft + (d * x.rows + i) * vocabulary, below;

        soften(q, vocabulary);
        const float alpha = acceptance(trunk + d * vocabulary, q, vocabulary, side_of(x, i, d), x.given, &below);
        prefixes = (double)alpha * (1 + prefixes);
        if (threadIdx.x != 0) continue;
        x.alpha[d * x.h.rows + x.first + i] = alpha;
        x.c.below[d * x.rows + i] = below;
    }
    if (threadIdx.x == 0) x.loss[x.first + i] = (float)(1 - prefixes / x.h.depths);
    __syncthreads();
}

/* d loss / d alpha_d = -(product of those before) (1 + the products of those after) / depths: no division by alpha. And
 * d alpha / d logits = q (takes_draft - below). */
template <class T>
__device__ void row_gradient(const arguments &x, int64_t i)
{
    const int64_t vocabulary = x.h.vocabulary;
    double before = -(double)x.weight[x.first + i] / x.h.depths;

    for (int32_t d = 0; d < x.h.depths; d++) {
        const float *p = x.c.trunk + (i + d) * vocabulary, *q = x.c.draft + (d * x.rows + i) * vocabulary;
        T *slope = (T *)x.c.slope + (d * x.rows + i) * vocabulary;
        int32_t *side = side_of(x, i, d);
        double after = 0;

        for (int32_t later = x.h.depths - 1; later > d; later--)
            after = (double)x.alpha[later * x.h.rows + x.first + i] * (1 + after);
        const float factor = (float)(before * (1 + after)), below = x.c.below[d * x.rows + i];
        const float under = factor * (1.0f - below), over = -factor * below;
        for (int64_t j = threadIdx.x; j < vocabulary; j += THREADS)
            slope[j] = to<T>(q[j] * (takes_draft(side, x.given, j, p[j], q[j]) ? under : over));
        before *= (double)x.alpha[d * x.h.rows + x.first + i];
    }
}

template <class T>
__global__ __launch_bounds__(THREADS) void rows_kernel(const arguments x, bool with_gradient)
{
    const int64_t i = blockIdx.x;

    if (x.weight[x.first + i] != 0) {
        row_loss(x, i);
        if (with_gradient) row_gradient<T>(x, i);
        return;
    }
    if (threadIdx.x == 0) x.loss[x.first + i] = 0;
    for (int32_t d = 0; d < x.h.depths; d++) {
        T *slope = (T *)x.c.slope + (d * x.rows + i) * x.h.vocabulary;
        int32_t *side = x.given ? nullptr : side_of(x, i, d);

        if (threadIdx.x == 0) x.alpha[d * x.h.rows + x.first + i] = 0;
        for (int64_t j = threadIdx.x; with_gradient && j < x.h.vocabulary; j += THREADS) slope[j] = to<T>(0);
        for (int64_t j = threadIdx.x; side != nullptr && j < x.h.vocabulary; j += THREADS) side[j] = 0;
    }
}

void run_chunk(cuda_device *d, const arguments &x, const void *target, const void *draft, const void *w, void *dx)
{
    const struct head_tv &h = x.h;
    const int64_t size = (int64_t)dtype_size(h.type), at = x.first * h.width * size;
    const int64_t trunk_rows = std::min(x.rows + h.depths - 1, h.rows - 1 - x.first);
    const struct gemm trunk = to_logits(h.type, trunk_rows, h.width, h.vocabulary, h.vocabulary, GLM52_DTYPE_F32);
    struct gemm drafts = to_logits(h.type, x.rows, h.width, h.vocabulary, h.vocabulary, GLM52_DTYPE_F32);
    struct gemm to_x = to_dx(h.type, x.rows, h.width, h.vocabulary, h.vocabulary);

    drafts.batch = to_x.batch = h.depths;
    drafts.stride_a = to_x.stride_c = h.rows * h.width;
    drafts.stride_c = to_x.stride_a = x.rows * h.vocabulary;
    matmul(d, &trunk, (const char *)target + at + h.width * size, w, x.c.trunk);
    matmul(d, &drafts, (const char *)draft + at, w, x.c.draft);
    if (trunk_rows > 0) softmax_kernel<<<(unsigned)trunk_rows, THREADS, 0, d->stream>>>(h.vocabulary, x.c.trunk);
    with_type(h.type, [&](auto element) {
        rows_kernel<decltype(element)><<<(unsigned)x.rows, THREADS, 0, d->stream>>>(x, dx != nullptr);
    });
    if (dx) matmul(d, &to_x, x.c.slope, w, (char *)dx + at);
}

void head_tv_fp32(cuda_device *d, const struct head_tv *h, const struct head_trunk *trunk,
                  const struct head_drafts *drafts, const void *w, void *workspace)
{
    const struct head plain = of_trunk(h);
    arguments x = {*h, {}, 0, 0, drafts->weight, drafts->alpha, drafts->loss, drafts->side, drafts->given != 0};

    head_loss_fp32(d, &plain, trunk->x, w, trunk->label, trunk->weight, trunk->loss, nullptr, trunk->dx, trunk->dw,
                   workspace);
    layout(h, workspace, &x.c);
    for (; x.first < h->rows; x.first += x.c.rows) {
        x.rows = std::min(x.c.rows, h->rows - x.first);
        run_chunk(d, x, trunk->x, drafts->x, w, drafts->dx);
    }
    launched(d, "head_tv");
}

size_t head_tv_bytes(struct stream *, const struct head_tv *h)
{
    const struct head plain = of_trunk(h);
    chunk c;

    if (head_in_bf16(h->type, h->width)) return head_tv_bf16_bytes(h);
    return std::max(layout(h, nullptr, &c), head_loss_fp32_bytes(&plain));
}

void run_head_tv(struct stream *s, const struct head_tv *h, const struct head_trunk *trunk,
                 const struct head_drafts *drafts, const void *w, void *workspace)
{
    const auto run = head_in_bf16(h->type, h->width) ? head_tv_bf16 : head_tv_fp32;

    count_head_tv(s, h, (trunk->dx != nullptr) + (trunk->dw != nullptr), drafts->dx != nullptr);
    run(device_of(s), h, trunk, drafts, w, workspace);
}

} /* namespace */

void fill_head_tv(struct ops *t)
{
    t->head_tv_bytes = head_tv_bytes;
    t->head_tv = run_head_tv;
}
