/* End-to-end total variation of drafts against the trunk (training.md 3.4), fused with the head, after the
 * trunk's own loss, for which its logits are made once more: in the memory of one chunk of head_loss stand the
 * trunk's logits of a few rows and of those that follow, and the drafts' of all depths, which become
 * probabilities and then their own gradient in place. */
#include "ops/count.h"
#include "ops/cpu/cpu.h"
#include "ops/cpu/expf.h"
#include "ops/cpu/head.h"
#include "ops/cpu/row.h"

struct chunk {
    int64_t rows, trunk_rows; /* of drafts per depth; of the trunk, beginning one after the drafts */
    float *trunk, *draft;     /* [trunk_rows,vocabulary], [depths,rows,vocabulary] */
    float *below;             /* [depths,rows]: q's mass where it does not exceed p */
    void *state;              /* [depths,rows,width]: the drafts' states side by side, then their gradients */
    size_t bytes;
};

static struct head of_trunk(const struct head_tv *h)
{
    return (struct head){h->rows, h->width, h->vocabulary, h->type, h->gradient};
}

static struct chunk chunk_of(const struct head_tv *h, void *workspace)
{
    struct head plain = of_trunk(h);
    int64_t logits = h->vocabulary * (int64_t)sizeof(float), state = h->width * (int64_t)dtype_size(h->type);
    int64_t rows = (head_chunk_rows(&plain) - (h->depths - 1)) * logits /
                   ((h->depths + 1) * logits + h->depths * state);
    struct chunk c = {.rows = least(rows > 1 ? rows : 1, h->rows)};

    if (h->rows == 0) return c;
    c.trunk_rows = least(c.rows + h->depths - 1, h->rows - 1);
    c.trunk = carve_floats(workspace, &c.bytes, c.trunk_rows * h->vocabulary);
    c.draft = carve_floats(workspace, &c.bytes, h->depths * c.rows * h->vocabulary);
    c.below = carve_floats(workspace, &c.bytes, h->depths * c.rows);
    c.state = carve(workspace, &c.bytes, (size_t)(h->depths * c.rows * state));
    return c;
}

size_t cpu_head_tv_bytes(struct stream *s, const struct head_tv *h)
{
    struct head plain = of_trunk(h);
    size_t loss = cpu_head_loss_bytes(s, &plain), drafts = chunk_of(h, NULL).bytes;

    return loss > drafts ? loss : drafts;
}

static void softmax(float *x, int64_t count)
{
    float most = largest(x, count), scale;
    double sum = 0;

    for (int64_t j = 0; j < count; j += CHUNK) {
        int64_t n = least(CHUNK, count - j);

        for (int64_t i = j; i < j + n; i++) x[i] = exp_f32(x[i] - most);
        sum += (double)total(x + j, n);
    }
    scale = (float)(1 / sum);
    for (int64_t j = 0; j < count; j++) x[j] *= scale;
}

/* Where q counts as no larger than p. */
static void decide(const float *p, const float *q, int64_t count, int32_t *side)
{
    for (int64_t j = 0; j < count; j++) side[j] = q[j] <= p[j];
}

/* The acceptance sum min(p, q); *below gets the sum of q over q <= p, or over `side`. Rounding may carry either beyond
 * 1. */
static float acceptance(const float *p, const float *q, int64_t count, const int32_t *side, float *below)
{
    double overlap = 0, under = 0;

    for (int64_t j = 0; j < count; j += CHUNK) {
        float low[CHUNK], kept[CHUNK];
        int64_t n = least(CHUNK, count - j);

        for (int64_t i = 0; i < n; i++) {
            low[i] = q[j + i] <= p[j + i] ? q[j + i] : p[j + i];
            kept[i] = q[j + i] <= p[j + i] ? q[j + i] : 0.0f;
        }
        for (int64_t i = 0; side && i < n; i++) kept[i] = side[j + i] ? q[j + i] : 0.0f;
        overlap += (double)total(low, n);
        under += (double)total(kept, n);
    }
    *below = under < 1 ? (float)under : 1.0f;
    return overlap < 1 ? (float)overlap : 1.0f;
}

/* q becomes slope * d acceptance / d logits = slope * q ((q <= p) - below). */
static void to_gradient(const float *restrict p, float *restrict q, int64_t count, const int32_t *restrict side,
                        float below, float slope)
{
    float under = slope * (1.0f - below), over = -slope * below;

    if (side)
        for (int64_t j = 0; j < count; j++) q[j] *= side[j] ? under : over;
    else
        for (int64_t j = 0; j < count; j++) q[j] *= q[j] <= p[j] ? under : over;
}

/* Of row t; NULL: not wanted. */
static int32_t *side_of(const struct head_tv *h, const struct head_drafts *drafts, int32_t d, int64_t t)
{
    return drafts->side ? drafts->side + (d * h->rows + t) * h->vocabulary : NULL;
}

/* Of one row: alpha and below of each depth, and the loss. With alpha_d' = alpha_d (1 + alpha_d+1'), the prefixes'
 * products sum to alpha_0'. */
static float row_loss(const struct head_tv *h, const struct head_drafts *drafts, int64_t t, const float *trunk,
                      float *draft, int64_t draft_stride, float *below, int64_t below_stride)
{
    double prefixes = 0;

    for (int32_t d = h->depths - 1; d >= 0; d--) {
        const float *p = trunk + d * h->vocabulary;
        float *q = draft + d * draft_stride, *alpha = drafts->alpha + d * h->rows + t;
        int32_t *side = side_of(h, drafts, d, t);

        softmax(q, h->vocabulary);
        if (side && !drafts->given) decide(p, q, h->vocabulary, side);
        *alpha = acceptance(p, q, h->vocabulary, side, &below[d * below_stride]);
        prefixes = (double)*alpha * (1 + prefixes);
    }
    return (float)(1 - prefixes / h->depths);
}

/* d loss / d alpha_d = -(product of those before) (1 + the products of those after) / depths: no division by alpha. */
static void row_gradient(const struct head_tv *h, const struct head_drafts *drafts, int64_t t, const float *trunk,
                         float *draft, int64_t draft_stride, const float *below, int64_t below_stride)
{
    double before = -(double)drafts->weight[t] / h->depths;
    const float *alpha = drafts->alpha + t;

    for (int32_t d = 0; d < h->depths; d++) {
        double after = 0;

        for (int32_t later = h->depths - 1; later > d; later--) after = (double)alpha[later * h->rows] * (1 + after);
        to_gradient(trunk + d * h->vocabulary, draft + d * draft_stride, h->vocabulary, side_of(h, drafts, d, t),
                    below[d * below_stride], (float)(before * (1 + after)));
        before *= (double)alpha[d * h->rows];
    }
}

static void chunk_losses(struct stream *s, const struct head_tv *h, const struct chunk *c, int64_t first, int64_t rows,
                         const struct head_drafts *drafts)
{
    int64_t stride = rows * h->vocabulary;

#pragma omp parallel for schedule(static) num_threads(cpu_team(s, (double)rows * h->depths * (double)h->vocabulary * 8))
    for (int64_t i = 0; i < rows; i++) {
        const float *trunk = c->trunk + i * h->vocabulary;
        float *draft = c->draft + i * h->vocabulary, *below = c->below + i;
        int64_t t = first + i;

        if (drafts->weight[t] == 0) {
            drafts->loss[t] = 0;
            for (int32_t d = 0; d < h->depths; d++) {
                int32_t *side = drafts->given ? NULL : side_of(h, drafts, d, t);

                drafts->alpha[d * h->rows + t] = 0;
                memset(draft + d * stride, 0, (size_t)h->vocabulary * sizeof *draft);
                if (side) memset(side, 0, (size_t)h->vocabulary * sizeof *side);
            }
            continue;
        }
        drafts->loss[t] = row_loss(h, drafts, t, trunk, draft, stride, below, c->rows);
        if (drafts->dx) row_gradient(h, drafts, t, trunk, draft, stride, below, c->rows);
    }
}

/* Rows first .. first + rows of every depth side by side: one product then reads the weights for all of them. */
static void copy_states(const struct head_tv *h, int64_t first, int64_t rows, const void *draft, void *state)
{
    int64_t row = h->width * (int64_t)dtype_size(h->type);

    for (int32_t d = 0; d < h->depths; d++)
        memcpy((char *)state + d * rows * row, (const char *)draft + (d * h->rows + first) * row, (size_t)(rows * row));
}

static void return_states(const struct head_tv *h, int64_t first, int64_t rows, const void *state, void *dx)
{
    int64_t row = h->width * (int64_t)dtype_size(h->type);

    for (int32_t d = 0; d < h->depths; d++)
        memcpy((char *)dx + (d * h->rows + first) * row, (const char *)state + d * rows * row, (size_t)(rows * row));
}

static void draft_losses(struct stream *s, const struct head_tv *h, const void *target,
                         const struct head_drafts *drafts, const void *w, void *workspace)
{
    struct chunk c = chunk_of(h, workspace);
    int64_t size = (int64_t)dtype_size(h->type), width = h->width, vocabulary = h->vocabulary;

    for (int64_t first = 0; first < h->rows; first += c.rows) {
        int64_t rows = least(c.rows, h->rows - first), trunk_rows = least(rows + h->depths - 1, h->rows - 1 - first);
        struct gemm trunk = {.m = trunk_rows, .n = vocabulary, .k = width, .lda = width, .ldb = width,
                             .ldc = vocabulary, .batch = 1, .transpose_b = 1, .a_type = h->type, .b_type = h->type,
                             .c_type = GLM52_DTYPE_F32};
        struct gemm states = trunk;
        struct gemm to_x = {.m = h->depths * rows, .n = width, .k = vocabulary, .lda = vocabulary, .ldb = width,
                            .ldc = width, .batch = 1, .a_type = GLM52_DTYPE_F32, .b_type = h->type, .c_type = h->type};

        states.m = h->depths * rows;
        copy_states(h, first, rows, drafts->x, c.state);
        gemm_run(s, &trunk, (const char *)target + (first + 1) * width * size, w, c.trunk);
        gemm_run(s, &states, c.state, w, c.draft);
#pragma omp parallel for schedule(static) num_threads(cpu_team(s, (double)trunk_rows * (double)vocabulary * 8))
        for (int64_t row = 0; row < trunk_rows; row++) softmax(c.trunk + row * vocabulary, vocabulary);
        chunk_losses(s, h, &c, first, rows, drafts);
        if (drafts->dx) {
            gemm_run(s, &to_x, c.draft, w, c.state);
            return_states(h, first, rows, c.state, drafts->dx);
        }
    }
}

void cpu_head_tv(struct stream *s, const struct head_tv *h, const struct head_trunk *trunk,
                 const struct head_drafts *drafts, const void *w, void *workspace)
{
    struct counted call = count_head_tv(s, h, (trunk->dx != NULL) + (trunk->dw != NULL), drafts->dx != NULL);
    struct head plain = of_trunk(h);

    head_loss_run(s, &plain, trunk->x, w, trunk->label, trunk->weight, trunk->loss, NULL, trunk->dx, trunk->dw,
                  workspace);
    draft_losses(s, h, trunk->x, drafts, w, workspace);
    count_end(call);
}
