/* head_tv with logits in bf16: in the memory of one chunk of head_loss stand the trunk's logits of a few rows, made
 * once for its own loss and for the drafts, and the drafts' of all depths; both become their own gradient in place.
 * Chunks go from the last to the first, so that the rows that follow a chunk are there already.
 *
 * * Probabilities exist as logarithms alone, ln p = (logit - most) - ln sum, which say which of two is larger, and
 * min(p, q) takes one exponential. Drafts sum like the trunk, the label's logit last, so that equal logits are equal
 * probabilities. */
#include "head/row_bf16.cuh"

namespace {

struct chunk {
    int64_t rows, pitch;
    bf16 *trunk, *draft;    /* [rows + depths,pitch], [depths,rows,pitch] */
    float2 *trunk_sum;      /* [rows + depths]: most, ln sum */
    float4 *draft_sum;      /* [depths,rows]: most, ln sum, alpha, q's mass where it does not exceed p */
    row_slope *trunk_slope; /* [rows] */
};

size_t layout(const struct head_tv *h, void *base, chunk *c)
{
    const int64_t depths = h->depths, of_loss = head_equal_rows(h->rows, head_most_rows(h->vocabulary));
    const int64_t most = std::max(of_loss / (depths + 1), depths);
    size_t used = 0;

    *c = {};
    if (h->rows == 0) return 0;
    c->pitch = head_pitch(h->vocabulary);
    c->rows = most < HEAD_TILE ? std::min(most, h->rows) : head_equal_rows(h->rows, most / HEAD_TILE * HEAD_TILE);
    c->trunk = carve<bf16>(base, &used, (c->rows + depths) * c->pitch);
    c->draft = carve<bf16>(base, &used, depths * c->rows * c->pitch);
    c->trunk_sum = carve<float2>(base, &used, c->rows + depths);
    c->draft_sum = carve<float4>(base, &used, depths * c->rows);
    c->trunk_slope = carve<row_slope>(base, &used, c->rows);
    return used;
}

struct arguments {
    struct head_tv h;
    struct head_trunk trunk;
    struct head_drafts drafts;
    const bf16 *w;
    chunk c;
    int64_t first, rows; /* of this round */
};

/* Of all logits of a row, that at `label` last (-1: none). */
__device__ __forceinline__ softmax_sum whole_sum(softmax_sum others, const bf16 *row, int label)
{
    return label < 0 ? others : joined(others, get(row[label]));
}

/* A block a row: the trunk's own loss, and what its gradient and the drafts will take. */
__global__ __launch_bounds__(ROW_THREADS, 1) void trunk_kernel(const arguments g)
{
    const int64_t i = blockIdx.x, t = g.first + i, width = g.h.width;
    const int mine = g.trunk.label[t], vocabulary = (int)g.h.vocabulary;
    const bf16 *row = g.c.trunk + i * g.c.pitch;
    row_slope slope = {0, 0, 0, -1};
    softmax_sum all;
    float loss = 0;

    if (mine < 0) {
        all = row_sum(row, vocabulary, -1);
    } else {
        const bf16 *x = (const bf16 *)g.trunk.x + t * width;
        const row_loss r = loss_of(row, vocabulary, mine, x, g.w + mine * width, width);

        all = whole_sum(r.others, row, mine);
        loss = loss_value(r);
        if (g.trunk.dx) slope = slope_of(r, g.trunk.weight[t], mine);
    }
    if (threadIdx.x != 0) return;
    g.trunk.loss[t] = loss;
    g.c.trunk_sum[i] = make_float2(all.most, logf(all.sum));
    g.c.trunk_slope[i] = slope;
}

__global__ __launch_bounds__(ROW_THREADS, 1) void trunk_gradient_kernel(const chunk c, int vocabulary)
{
    to_gradient(c.trunk + blockIdx.x * c.pitch, vocabulary, c.trunk_slope[blockIdx.x]);
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

/* Where the sides of one depth of a row stand; SIDES false: nowhere. */
template <bool SIDES>
__device__ __forceinline__ int32_t *side_of(const arguments &g, int64_t i, int32_t d)
{
    return SIDES ? g.drafts.side + (d * g.h.rows + g.first + i) * g.h.vocabulary : nullptr;
}

/* Of one depth of a row: the acceptance sum min(p, q), and the sum of q where it counts (takes_draft). Rounding
 * may carry either beyond 1. */
template <bool SIDES>
__device__ float4 acceptance(const arguments &g, int64_t i, int32_t d)
{
    const int64_t at = d * g.rows + i, next = i + d + 1;
    const int vocabulary = (int)g.h.vocabulary, label = g.trunk.label[g.first + next];
    const bf16 *trunk = g.c.trunk + next * g.c.pitch, *draft = g.c.draft + at * g.c.pitch;
    const float2 p = g.c.trunk_sum[next];
    int32_t *side = side_of<SIDES>(g, i, d);
    const softmax_sum s = whole_sum(row_sum(draft, vocabulary, label), draft, label);
    float4 q = make_float4(s.most, logf(s.sum), 0, 0);
    float overlap = 0, below = 0;

    each_pair<true>(trunk, p, draft, q, vocabulary, [&](int piece, const float (&a)[PIECE], const float (&b)[PIECE]) {
#pragma unroll
        for (int j = 0; j < PIECE; j++) {
            const int v = piece * PIECE + j;
            const float least = exp_of(fminf(a[j], b[j]));

            overlap += least;
            if (SIDES && v >= vocabulary) continue;
            below += takes_draft(side, g.drafts.given, v, a[j], b[j]) ? (SIDES ? exp_of(b[j]) : least) : 0.0f;
        }
    });
    q.z = fminf(block_sum<ROW_THREADS>(overlap), 1.0f);
    q.w = fminf(block_sum<ROW_THREADS>(below), 1.0f);
    return q;
}

/* With alpha_d' = alpha_d (1 + alpha_d+1'), the prefixes' products sum to alpha_0'. */
template <bool SIDES>
__device__ void chain_loss(const arguments &g, int64_t i)
{
    const int64_t t = g.first + i;
    double prefixes = 0;

    for (int32_t d = g.h.depths - 1; d >= 0; d--) {
        const float4 q = acceptance<SIDES>(g, i, d);

        prefixes = (double)q.z * (1 + prefixes);
        if (threadIdx.x != 0) continue;
        g.drafts.alpha[d * g.h.rows + t] = q.z;
        g.c.draft_sum[d * g.rows + i] = q;
    }
    if (threadIdx.x == 0) g.drafts.loss[t] = (float)(1 - prefixes / g.h.depths);
    __syncthreads();
}

/* d loss / d alpha_d = -(product of those before) (1 + the products of those after) / depths: no division by alpha. And
 * d alpha / d logits = q (takes_draft - below). */
template <bool SIDES>
__device__ void chain_gradient(const arguments &g, int64_t i)
{
    double before = -(double)g.drafts.weight[g.first + i] / g.h.depths;

    for (int32_t d = 0; d < g.h.depths; d++) {
        const int64_t at = d * g.rows + i, next = i + d + 1;
        bf16 *draft = g.c.draft + at * g.c.pitch;
        const float4 q = g.c.draft_sum[at];
        int32_t *side = side_of<SIDES>(g, i, d);
        double after = 0;

        for (int32_t later = g.h.depths - 1; later > d; later--)
            after = (double)g.c.draft_sum[later * g.rows + i].z * (1 + after);
        const float factor = (float)(before * (1 + after)), under = factor * (1.0f - q.w), over = -factor * q.w;
        each_pair<false>(g.c.trunk + next * g.c.pitch, g.c.trunk_sum[next], draft, q, (int)g.h.vocabulary,
                         [&](int piece, const float (&a)[PIECE], const float (&b)[PIECE]) {
                             float slope[PIECE];

#pragma unroll
                             for (int j = 0; j < PIECE; j++) {
                                 const int v = piece * PIECE + j;
                                 const bool takes = (SIDES && v >= (int)g.h.vocabulary) ||
                                                    takes_draft(side, g.drafts.given, v, a[j], b[j]);

                                 slope[j] = exp_of(b[j]) * (takes ? under : over);
                             }
                             ((uint4 *)draft)[piece] = pack(slope);
                         });
        before *= (double)q.z;
    }
}

/* A block a row of drafts, all depths. SIDES: somebody keeps or gives which of p and q is the smaller. */
template <bool SIDES>
__global__ __launch_bounds__(ROW_THREADS, 1) void chain_kernel(const arguments g)
{
    const int64_t i = blockIdx.x, t = g.first + i;

    if (g.drafts.weight[t] != 0) {
        chain_loss<SIDES>(g, i);
        if (g.drafts.dx) chain_gradient<SIDES>(g, i);
        return;
    }
    if (threadIdx.x == 0) g.drafts.loss[t] = 0;
    for (int32_t d = 0; d < g.h.depths; d++) {
        if (threadIdx.x == 0) g.drafts.alpha[d * g.h.rows + t] = 0;
        if (g.drafts.dx) clear_row(g.c.draft + (d * g.rows + i) * g.c.pitch, (int)g.h.vocabulary);
        for (int64_t v = threadIdx.x; SIDES && !g.drafts.given && v < g.h.vocabulary; v += ROW_THREADS)
            side_of<SIDES>(g, i, d)[v] = 0;
    }
}

void run_drafts(cuda_device *d, const arguments &g)
{
    const struct head_tv &h = g.h;
    struct gemm forward = to_logits(h.type, g.rows, h.width, h.vocabulary, g.c.pitch, GLM52_DTYPE_BF16);
    struct gemm to_x = to_dx(h.type, g.rows, h.width, h.vocabulary, g.c.pitch);

    forward.batch = to_x.batch = h.depths;
    forward.stride_a = to_x.stride_c = h.rows * h.width;
    forward.stride_c = to_x.stride_a = g.rows * g.c.pitch;
    matmul(d, &forward, (const bf16 *)g.drafts.x + g.first * h.width, g.w, g.c.draft);
    (g.drafts.side ? chain_kernel<true> : chain_kernel<false>)<<<(unsigned)g.rows, ROW_THREADS, 0, d->stream>>>(g);
    if (g.drafts.dx) matmul(d, &to_x, g.c.draft, g.w, (bf16 *)g.drafts.dx + g.first * h.width);
}

/* The chunk before this one looks at its first rows. */
void keep_first(cuda_device *d, const arguments &g)
{
    const chunk &c = g.c;
    const size_t depths = (size_t)g.h.depths, logits = depths * (size_t)c.pitch * sizeof *c.trunk;
    const size_t sums = depths * sizeof *c.trunk_sum;

    cudaMemcpyAsync(c.trunk + c.rows * c.pitch, c.trunk, logits, cudaMemcpyDeviceToDevice, d->stream);
    cudaMemcpyAsync(c.trunk_sum + c.rows, c.trunk_sum, sums, cudaMemcpyDeviceToDevice, d->stream);
}

void run_chunk(cuda_device *d, const arguments &g)
{
    const struct head_tv &h = g.h;
    const struct head plain = {h.rows, h.width, h.vocabulary, h.type, h.gradient};
    const bf16 *x = (const bf16 *)g.trunk.x + g.first * h.width;
    const struct gemm forward = to_logits(h.type, g.rows, h.width, h.vocabulary, g.c.pitch, GLM52_DTYPE_BF16);
    const struct gemm to_x = to_dx(h.type, g.rows, h.width, h.vocabulary, g.c.pitch);
    const struct gemm to_w = to_dw(&plain, g.rows, g.c.pitch);

    matmul(d, &forward, x, g.w, g.c.trunk);
    trunk_kernel<<<(unsigned)g.rows, ROW_THREADS, 0, d->stream>>>(g);
    run_drafts(d, g);
    if (g.first > 0) keep_first(d, g);
    if (!g.trunk.dx) return;
    trunk_gradient_kernel<<<(unsigned)g.rows, ROW_THREADS, 0, d->stream>>>(g.c, (int)h.vocabulary);
    matmul(d, &to_x, g.c.trunk, g.w, (bf16 *)g.trunk.dx + g.first * h.width);
    if (g.trunk.dw) matmul(d, &to_w, g.c.trunk, x, g.trunk.dw);
}

} /* namespace */

size_t head_tv_bf16_bytes(const struct head_tv *h)
{
    chunk c;

    return layout(h, nullptr, &c);
}

void head_tv_bf16(cuda_device *d, const struct head_tv *h, const struct head_trunk *trunk,
                  const struct head_drafts *drafts, const void *w, void *workspace)
{
    arguments g = {*h, *trunk, *drafts, (const bf16 *)w, {}, 0, 0};

    layout(h, workspace, &g.c);
    for (int64_t left = h->rows; left > 0; left = g.first) {
        g.first = (left - 1) / g.c.rows * g.c.rows;
        g.rows = left - g.first;
        run_chunk(d, g);
    }
    launched(d, "head_tv");
}
