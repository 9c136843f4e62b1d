/* Output head fused with cross-entropy (model.md 2.7), and with the search for the largest logit: the logits of a chunk
 * of rows exist, never those of all rows, and become their own gradient in place. */
#include <math.h>

#include "ops/count.h"
#include "ops/cpu/expf.h"
#include "ops/cpu/head.h"
#include "ops/cpu/row.h"

size_t cpu_head_loss_bytes(struct stream *s, const struct head *h)
{
    (void)s;
    return (size_t)head_chunk_rows(h) * (size_t)h->vocabulary * sizeof(float);
}

/* The loss of one row. If weight is not NULL, its logits become weight * (softmax - one at the label). */
static float row_loss(float *logits, int64_t vocabulary, int32_t label, const float *weight)
{
    float most, sum = 0, chosen, e[CHUNK];

    if (label < 0) {
        if (weight) memset(logits, 0, (size_t)vocabulary * sizeof *logits);
        return 0;
    }
    most = largest(logits, vocabulary);
    chosen = logits[label];
    for (int64_t j = 0; j < vocabulary; j += CHUNK) {
        int64_t count = least(CHUNK, vocabulary - j);

        for (int64_t i = 0; i < count; i++) e[i] = exp_f32(logits[j + i] - most);
        sum += total(e, count);
        if (weight) memcpy(logits + j, e, (size_t)count * sizeof *e);
    }
    if (weight) {
        float scale = *weight / sum;

        for (int64_t j = 0; j < vocabulary; j++) logits[j] *= scale;
        logits[label] -= *weight;
    }
    return logf(sum) + (most - chosen);
}

/* Whether the first of the largest logits is the label's. */
static float row_hit(const float *logits, int64_t vocabulary, int32_t label)
{
    float most;
    int64_t first = 0;

    if (label < 0) return 0;
    most = largest(logits, vocabulary);
    while (first < label && logits[first] != most) first++;
    return first == label && logits[first] == most;
}

/* Of `rows` rows of x. */
static struct gemm to_logits(const struct head *h, int64_t rows)
{
    return (struct gemm){.m = rows, .n = h->vocabulary, .k = h->width, .lda = h->width, .ldb = h->width,
                         .ldc = h->vocabulary, .batch = 1, .transpose_b = 1, .a_type = h->type, .b_type = h->type,
                         .c_type = GLM52_DTYPE_F32};
}

void head_loss_run(struct stream *s, const struct head *h, const void *x, const void *w, const int32_t *label,
                   const float *weight, float *loss, float *hit, void *dx, void *dw, void *workspace)
{
    int64_t step = head_chunk_rows(h), size = (int64_t)dtype_size(h->type), width = h->width,
            vocabulary = h->vocabulary;
    float *logits = workspace;

    for (int64_t first = 0; first < h->rows; first += step) {
        int64_t rows = least(step, h->rows - first);
        const void *x_rows = (const char *)x + first * width * size;
        struct gemm forward = to_logits(h, rows);
        struct gemm to_x = {.m = rows, .n = width, .k = vocabulary, .lda = vocabulary, .ldb = width, .ldc = width,
                            .batch = 1, .a_type = GLM52_DTYPE_F32, .b_type = h->type, .c_type = h->type};
        struct gemm to_w = {.m = vocabulary, .n = width, .k = rows, .lda = vocabulary, .ldb = width, .ldc = width,
                            .batch = 1, .transpose_a = 1, .add = 1, .a_type = GLM52_DTYPE_F32, .b_type = h->type,
                            .c_type = h->gradient};

        gemm_run(s, &forward, x_rows, w, logits);
#pragma omp parallel for schedule(static) num_threads(cpu_team(s, (double)rows * (double)vocabulary * 8))
        for (int64_t row = 0; row < rows; row++) {
            float *logit = logits + row * vocabulary;
            int32_t mine = label[first + row];

            if (hit) hit[first + row] = row_hit(logit, vocabulary, mine);
            loss[first + row] = row_loss(logit, vocabulary, mine, dx ? &weight[first + row] : NULL);
        }
        if (dx) {
            gemm_run(s, &to_x, logits, w, (char *)dx + first * width * size);
            if (dw) gemm_run(s, &to_w, logits, x_rows, dw);
        }
    }
}

void cpu_head_loss(struct stream *s, const struct head *h, const void *x, const void *w, const int32_t *label,
                   const float *weight, float *loss, float *hit, void *dx, void *dw, void *workspace)
{
    struct counted call = count_head_loss(s, h, hit != NULL, (dx != NULL) + (dw != NULL));

    head_loss_run(s, h, x, w, label, weight, loss, hit, dx, dw, workspace);
    count_end(call);
}
