/* The grouped products of GLM-5.2's experts at full width. Arrays exist on the device alone. Torch's
 * figures are of other runs; its gradients are bf16 and written, as those of a step's first
 * microbatch are; later ones are added to. */
#include "case.h"

static const glm52_dtype F32 = GLM52_DTYPE_F32, BF16 = GLM52_DTYPE_BF16;

enum pass { FORWARD, TO_ROWS, TO_WEIGHT, TO_WEIGHT_ADDED, TO_WEIGHT_BF16, TO_WEIGHT_BF16_ADDED };

/* Experts of ragged numbers of rows, half to one and a half times the average. */
static void bench_experts(enum pass pass, int32_t experts, int64_t average, int64_t n, int64_t k)
{
    const int add = pass == TO_WEIGHT_ADDED || pass == TO_WEIGHT_BF16_ADDED;
    struct grouped_gemm g = {.n = n, .k = k, .stride = n * k, .groups = experts, .add = add, .type = BF16,
                             .gradient = pass >= TO_WEIGHT_BF16 ? BF16 : F32};
    struct array *offsets = array_zero(GLM52_DTYPE_I32, experts + 1), *x, *y, *w;

    for (int e = 0; e < experts; e++)
        offsets->value[e + 1] = offsets->value[e] + (double)draw_between(average / 2, average + average / 2);
    array_push(offsets);
    g.rows = (int64_t)offsets->value[experts];
    x = array_random(BF16, g.rows * k);
    y = array_random(BF16, g.rows * n);
    w = array_random(pass >= TO_WEIGHT ? g.gradient : BF16, experts * n * k);
    BENCH_LOOP {
        if (pass == FORWARD)
            ops->grouped_gemm_forward(device, &g, offsets->at, x->at, w->at, y->at);
        else if (pass == TO_ROWS)
            ops->grouped_gemm_backward_rows(device, &g, offsets->at, y->at, w->at, x->at);
        else
            ops->grouped_gemm_backward_weight(device, &g, offsets->at, y->at, x->at, w->at);
    }
    bench_counted();
}

BENCH_FULL(grouped_gemm_forward, "256 experts of ~256, 4096 from 6144", "torch 508 A, 525 B, 447 C")
{
    bench_experts(FORWARD, 256, 256, 4096, 6144);
}

BENCH_FULL(grouped_gemm_backward_rows, "256 experts of ~256, 4096 from 6144", "torch 467 A, 516 B, 431 C")
{
    bench_experts(TO_ROWS, 256, 256, 4096, 6144);
}

BENCH_FULL(grouped_gemm_backward_weight, "256 experts of ~256, 4096 from 6144, fp32", "torch 404 A, 446 B, 385 C")
{
    bench_experts(TO_WEIGHT, 256, 256, 4096, 6144);
}

BENCH_FULL(grouped_gemm_backward_weight, "256 experts of ~256, 4096 from 6144, fp32, added to", "")
{
    bench_experts(TO_WEIGHT_ADDED, 256, 256, 4096, 6144);
}

BENCH_FULL(grouped_gemm_backward_weight, "256 experts of ~256, 4096 from 6144, bf16", "torch 404 A, 446 B, 385 C")
{
    bench_experts(TO_WEIGHT_BF16, 256, 256, 4096, 6144);
}

BENCH_FULL(grouped_gemm_backward_weight, "256 experts of ~256, 4096 from 6144, bf16, added to", "")
{
    bench_experts(TO_WEIGHT_BF16_ADDED, 256, 256, 4096, 6144);
}

BENCH_FULL(grouped_gemm_forward, "256 experts of ~512, 4096 from 6144", "torch 560 A, 596 B, 498 C")
{
    bench_experts(FORWARD, 256, 512, 4096, 6144);
}

BENCH_FULL(grouped_gemm_backward_rows, "256 experts of ~512, 4096 from 6144", "torch 542 A, 588 B, 495 C")
{
    bench_experts(TO_ROWS, 256, 512, 4096, 6144);
}

BENCH_FULL(grouped_gemm_backward_weight, "256 experts of ~512, 4096 from 6144, fp32", "torch 523 A, 575 B, 500 C")
{
    bench_experts(TO_WEIGHT, 256, 512, 4096, 6144);
}

BENCH_FULL(grouped_gemm_backward_weight, "256 experts of ~512, 4096 from 6144, fp32, added to", "")
{
    bench_experts(TO_WEIGHT_ADDED, 256, 512, 4096, 6144);
}

BENCH_FULL(grouped_gemm_backward_weight, "256 experts of ~512, 4096 from 6144, bf16", "torch 523 A, 575 B, 500 C")
{
    bench_experts(TO_WEIGHT_BF16, 256, 512, 4096, 6144);
}

BENCH_FULL(grouped_gemm_backward_weight, "256 experts of ~512, 4096 from 6144, bf16, added to", "")
{
    bench_experts(TO_WEIGHT_BF16_ADDED, 256, 512, 4096, 6144);
}

BENCH_FULL(grouped_gemm_forward, "32 experts of ~2048, 6144 from 2048", "torch 751, equal groups")
{
    bench_experts(FORWARD, 32, 2048, 6144, 2048);
}

BENCH_FULL(grouped_gemm_backward_rows, "32 experts of ~2048, 6144 from 2048", "")
{
    bench_experts(TO_ROWS, 32, 2048, 6144, 2048);
}

BENCH_FULL(grouped_gemm_backward_weight, "32 experts of ~2048, 6144 from 2048, fp32", "")
{
    bench_experts(TO_WEIGHT, 32, 2048, 6144, 2048);
}

BENCH_FULL(grouped_gemm_backward_weight, "32 experts of ~2048, 6144 from 2048, fp32, added to", "")
{
    bench_experts(TO_WEIGHT_ADDED, 32, 2048, 6144, 2048);
}

BENCH_FULL(grouped_gemm_backward_weight, "32 experts of ~2048, 6144 from 2048, bf16", "torch 732, equal groups")
{
    bench_experts(TO_WEIGHT_BF16, 32, 2048, 6144, 2048);
}

BENCH_FULL(grouped_gemm_backward_weight, "32 experts of ~2048, 6144 from 2048, bf16, added to", "")
{
    bench_experts(TO_WEIGHT_BF16_ADDED, 32, 2048, 6144, 2048);
}
