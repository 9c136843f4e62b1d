/* head_tv with logits in bf16: in the memory of one chunk of head_loss stand the trunk's logits of a few rows and of those that
 * follow, and the drafts' of all depths, which become their own gradient in place. Probabilities exist as logarithms alone,
 * ln p = (logit - most) - ln sum, which say which of two is larger, and min(p, q) takes one exponential. */
#include "head/row_bf16.cuh"

namespace {

struct chunk {
    int64_t rows, trunk_rows, pitch; /* rows: of drafts per depth; trunk_rows begin one after the drafts */
    bf16 *trunk, *draft;             /* [trunk_rows,pitch], [depths,rows,pitch] */
    float2 *trunk_sum;               /* [trunk_rows]: most, ln sum */
    float4 *draft_sum;               /* [depths,rows]: most, ln sum, alpha, q's mass where it does not exceed p */
};

size_t layout(const struct head_tv *h, void *base, chunk *c)
{
    const int64_t depths = h->depths, of_loss = head_equal_rows(h->rows, head_most_rows(h->vocabulary));
    const int64_t most = std::max<int64_t>((of_loss - (depths - 1)) / (depths + 1), 1);
    size_t used = 0;

    *c = {};
    if (h->rows == 0) return 0;
    c->pitch = head_pitch(h->vocabulary);
    c->rows = most < HEAD_TILE ? most : head_equal_rows(h->rows, most / HEAD_TILE * HEAD_TILE);
    c->trunk_rows = std::min(c->rows + depths - 1, h->rows - 1);
    c->trunk = carve<bf16>(base, &used, c->trunk_rows * c->pitch);
    c->draft = carve<bf16>(base, &used, depths * c->rows * c->pitch);
    c->trunk_sum = carve<float2>(base, &used, c->trunk_rows);
    c->draft_sum = carve<float4>(base, &used, depths * c->rows);
    return used;
}

struct arguments {
    struct head_tv h;
    chunk c;
    int64_t first, rows; /* of this round */
    const float *weight;
    float *alpha, *loss;
};

__global__ __launch_bounds__(ROW_THREADS, 1) void trunk_kernel(const chunk c, int vocabulary)
{
    const softmax_sum s = row_sum(c.trunk + blockIdx.x * c.pitch, vocabulary, -1);

    if (threadIdx.x == 0) c.trunk_sum[blockIdx.x] = make_float2(s.most, logf(s.sum));
}

/* f(ln p, ln q, and where to put the gradient) for each piece of a draft and of its trunk. */
template <bool DOWN, class F>
__device__ __forceinline__ void each_pair(const bf16 *trunk, float2 p, const bf16 *draft, float4 q, int vocabulary, F f)
{
    const bf16 *const rows[2] = {trunk, draft};

    each_piece<DOWN>(rows, vocabulary, [&](int piece, const uint4 (&raw)[2]) {
        float a[PIECE], b[PIECE];

        unpack(raw[0], a);
        unpack(raw[1], b);
#pragma unroll
        for (int i = 0; i < PIECE; i++) {
            a[i] = (a[i] - p.x) - p.y;
            b[i] = (b[i] - q.x) - q.y;
            if (piece * PIECE + i >= vocabulary) a[i] = b[i] = -INFINITY;
        }
        f(piece, a, b);
    });
}

/* Of one depth of a row: the acceptance sum min(p, q), and the sum of q over q <= p. Rounding may carry either beyond 1. */
__device__ float4 acceptance(const bf16 *trunk, float2 p, const bf16 *draft, int vocabulary)
{
    const softmax_sum s = row_sum(draft, vocabulary, -1);
    float4 q = make_float4(s.most, logf(s.sum), 0, 0);
    float overlap = 0, below = 0;

    each_pair<true>(trunk, p, draft, q, vocabulary, [&](int, const float (&a)[PIECE], const float (&b)[PIECE]) {
#pragma unroll
        for (int i = 0; i < PIECE; i++) {
            const float least = exp_of(fminf(a[i], b[i]));

            overlap += least;
            below += b[i] <= a[i] ? least : 0.0f;
        }
    });
    q.z = fminf(block_sum<ROW_THREADS>(overlap), 1.0f);
    q.w = fminf(block_sum<ROW_THREADS>(below), 1.0f);
    return q;
}

/* With alpha_d' = alpha_d (1 + alpha_d+1'), the prefixes' products sum to alpha_0'. */
__device__ void row_loss(const arguments &g, int64_t i)
{
    double prefixes = 0;

    for (int32_t d = g.h.depths - 1; d >= 0; d--) {
        const int64_t at = d * g.rows + i;
        const float4 q = acceptance(g.c.trunk + (i + d) * g.c.pitch, g.c.trunk_sum[i + d], g.c.draft + at * g.c.pitch,
                                    (int)g.h.vocabulary);

        prefixes = (double)q.z * (1 + prefixes);
        if (threadIdx.x != 0) continue;
        g.alpha[d * g.h.rows + g.first + i] = q.z;
        g.c.draft_sum[at] = q;
    }
    if (threadIdx.x == 0) g.loss[g.first + i] = (float)(1 - prefixes / g.h.depths);
    __syncthreads();
}

/* d loss / d alpha_d = -(product of those before) (1 + the products of those after) / depths: no division by alpha. And
 * d alpha / d logits = q ((q <= p) - below). */
__device__ void row_gradient(const arguments &g, int64_t i)
{
    double before = -(double)g.weight[g.first + i] / g.h.depths;

    for (int32_t d = 0; d < g.h.depths; d++) {
        const int64_t at = d * g.rows + i;
        bf16 *draft = g.c.draft + at * g.c.pitch;
        const float4 q = g.c.draft_sum[at];
        double after = 0;

        for (int32_t later = g.h.depths - 1; later > d; later--)
            after = (double)g.c.draft_sum[later * g.rows + i].z * (1 + after);
        const float factor = (float)(before * (1 + after)), under = factor * (1.0f - q.w), over = -factor * q.w;
        each_pair<false>(g.c.trunk + (i + d) * g.c.pitch, g.c.trunk_sum[i + d], draft, q, (int)g.h.vocabulary,
                         [&](int piece, const float (&a)[PIECE], const float (&b)[PIECE]) {
                             float slope[PIECE];

#pragma unroll
                             for (int j = 0; j < PIECE; j++) slope[j] = exp_of(b[j]) * (b[j] <= a[j] ? under : over);
                             ((uint4 *)draft)[piece] = pack(slope);
                         });
        before *= (double)q.z;
    }
}

/* A block a row of drafts, all depths. */
__global__ __launch_bounds__(ROW_THREADS, 1) void rows_kernel(const arguments g, bool with_gradient)
{
    const int64_t i = blockIdx.x;

    if (g.weight[g.first + i] != 0) {
        row_loss(g, i);
        if (with_gradient) row_gradient(g, i);
        return;
    }
    if (threadIdx.x == 0) g.loss[g.first + i] = 0;
    for (int32_t d = 0; d < g.h.depths; d++) {
        if (threadIdx.x == 0) g.alpha[d * g.h.rows + g.first + i] = 0;
        if (with_gradient) clear_row(g.c.draft + (d * g.rows + i) * g.c.pitch, (int)g.h.vocabulary);
    }
}

void run_chunk(cuda_device *d, const arguments &g, const bf16 *target, const bf16 *draft, const void *w, bf16 *dx)
{
    const struct head_tv &h = g.h;
    const int64_t at = g.first * h.width, trunk_rows = std::min(g.rows + h.depths - 1, h.rows - 1 - g.first);
    const struct gemm trunk = to_logits(h.type, trunk_rows, h.width, h.vocabulary, g.c.pitch, GLM52_DTYPE_BF16);
    struct gemm drafts = to_logits(h.type, g.rows, h.width, h.vocabulary, g.c.pitch, GLM52_DTYPE_BF16);
    struct gemm to_x = to_dx(h.type, g.rows, h.width, h.vocabulary, g.c.pitch);

    drafts.batch = to_x.batch = h.depths;
    drafts.stride_a = to_x.stride_c = h.rows * h.width;
    drafts.stride_c = to_x.stride_a = g.rows * g.c.pitch;
    matmul(d, &trunk, target + at + h.width, w, g.c.trunk);
    matmul(d, &drafts, draft + at, w, g.c.draft);
    if (trunk_rows > 0) trunk_kernel<<<(unsigned)trunk_rows, ROW_THREADS, 0, d->stream>>>(g.c, (int)h.vocabulary);
    rows_kernel<<<(unsigned)g.rows, ROW_THREADS, 0, d->stream>>>(g, dx != nullptr);
    if (dx) matmul(d, &to_x, g.c.draft, w, dx + at);
}

} /* namespace */

size_t head_tv_bf16_bytes(const struct head_tv *h)
{
    chunk c;

    return layout(h, nullptr, &c);
}

void head_tv_bf16(cuda_device *d, const struct head_tv *h, const void *target, const void *draft, const void *w,
                  const float *weight, float *alpha, float *loss, void *dx, void *workspace)
{
    arguments g = {*h, {}, 0, 0, weight, alpha, loss};

    layout(h, workspace, &g.c);
    for (; g.first < h->rows; g.first += g.c.rows) {
        g.rows = std::min(g.c.rows, h->rows - g.first);
        run_chunk(d, g, (const bf16 *)target, (const bf16 *)draft, w, (bf16 *)dx);
    }
    launched(d, "head_tv");
}
