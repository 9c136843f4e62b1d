/* The indexer's loss over all visible keys. */
#include "index_kl.h"

/* Documents of the given lengths, ended by 0; causal within each. Every `empty`-th row sees nothing (0: none). */
static struct kl_problem dense_problem(struct indexer shape, struct teacher teacher, const int *lengths, int empty,
                                       int masked)
{
    struct kl_problem p;
    int64_t t = 0;

    for (int d = 0; lengths[d]; d++) shape.rows += lengths[d];
    shape.keys = shape.rows;
    p = kl_student(shape, masked);
    p.teacher = teacher;
    p.teacher_q = array_normal(shape.type, shape.rows * teacher.heads * teacher.width, 1);
    p.teacher_key = array_normal(shape.type, shape.keys * teacher.key_heads * teacher.width, 1);
    p.start = array_zero(GLM52_DTYPE_I32, shape.rows);
    p.end = array_zero(GLM52_DTYPE_I32, shape.rows);
    for (int d = 0; lengths[d]; d++)
        for (int64_t first = t; t < first + lengths[d]; t++) {
            p.start->value[t] = (double)first;
            p.end->value[t] = (double)(empty && t % empty == empty - 1 ? first : t + 1);
            p.shape.pairs += p.end->value[t] - p.start->value[t];
        }
    array_push(p.start);
    array_push(p.end);
    return p;
}

/* With an lse that is made here, with that of the attention, and with a wrong one, whose
 * probabilities sum to a half: it is taken as it is. */
static void check_dense(struct kl_problem p)
{
    struct kl_results r;
    struct kl_wanted w;

    kl_check(p);
    for (int wrong = 0; wrong < 2; wrong++) {
        kl_attend(&p, wrong ? log(2) : 0);
        r = kl_run(&p);
        w = kl_plain(&p);
        kl_check_results(&p, &r, &w);
    }
}

CASE(index_kl_dense, "several documents, rows that see one key or none, absorbed teacher, odd dimensions")
{
    check_dense(dense_problem((struct indexer){.heads = 3, .width = 13, .type = GLM52_DTYPE_F32},
                              (struct teacher){5, 1, 11, 0.4f}, (const int[]){1, 12, 2, 21, 1, 0}, 8, 5));
}

CASE(index_kl_dense, "a teacher with keys of every head")
{
    check_dense(dense_problem((struct indexer){.heads = 4, .width = 9, .type = GLM52_DTYPE_F32},
                              (struct teacher){3, 3, 7, 0.7f}, (const int[]){19, 15, 0}, 0, 0));
}

CASE(index_kl_dense, "bf16")
{
    check_dense(dense_problem((struct indexer){.heads = 3, .width = 10, .type = GLM52_DTYPE_BF16},
                              (struct teacher){2, 1, 17, 0.3f}, (const int[]){6, 23, 0}, 9, 4));
}

CASE(index_kl_dense, "32 bf16 heads of 128, teachers of the widths of GLM-5.2")
{
    struct indexer shape = {.heads = 32, .width = 128, .type = GLM52_DTYPE_BF16};

    check_dense(dense_problem(shape, (struct teacher){3, 3, 256, 0.06f}, (const int[]){6, 133, 1, 290, 0}, 9, 4));
    check_dense(dense_problem(shape, (struct teacher){5, 1, 576, 0.04f}, (const int[]){301, 0}, 0, 3));
}

/* Small enough for tools that watch every access. */
CASE(index_kl_dense, "32 bf16 heads of 128, few rows")
{
    struct indexer shape = {.heads = 32, .width = 128, .type = GLM52_DTYPE_BF16};

    check_dense(dense_problem(shape, (struct teacher){2, 2, 24, 0.2f}, (const int[]){3, 66, 0}, 0, 0));
    check_dense(dense_problem(shape, (struct teacher){2, 2, 256, 0.06f}, (const int[]){65, 0}, 0, 7));
    check_dense(dense_problem(shape, (struct teacher){3, 1, 576, 0.04f}, (const int[]){66, 2, 0}, 0, 0));
}

CASE(index_kl_dense, "few bf16 heads, a teacher of the widths of GLM-5.2; and the other way round, in fp32")
{
    check_dense(dense_problem((struct indexer){.heads = 3, .width = 10, .type = GLM52_DTYPE_BF16},
                              (struct teacher){3, 3, 256, 0.06f}, (const int[]){6, 133, 1, 190, 0}, 9, 4));
    check_dense(dense_problem((struct indexer){.heads = 32, .width = 128, .type = GLM52_DTYPE_F32},
                              (struct teacher){2, 1, 24, 0.2f}, (const int[]){5, 64, 0}, 4, 0));
}

CASE(index_kl_dense, "rows of weight 0 have a loss and no gradient; nothing is visible; no rows")
{
    struct indexer shape = {.heads = 3, .width = 5, .type = GLM52_DTYPE_F32};
    struct teacher teacher = {2, 1, 7, 0.5f};

    check_dense(dense_problem(shape, teacher, (const int[]){18, 0}, 0, 1));
    check_dense(dense_problem(shape, teacher, (const int[]){11, 0}, 1, 0));
    check_dense(dense_problem(shape, teacher, (const int[]){0}, 0, 0));
}

CASE(index_kl_dense, "several tiles of rows and of keys, tiles that nobody sees")
{
    check_dense(dense_problem((struct indexer){.heads = 3, .width = 7, .type = GLM52_DTYPE_F32},
                              (struct teacher){2, 1, 9, 0.4f}, (const int[]){281, 3, 67, 1, 317, 0}, 23, 7));
    check_dense(dense_problem((struct indexer){.heads = 2, .width = 11, .type = GLM52_DTYPE_BF16},
                              (struct teacher){3, 3, 5, 0.6f}, (const int[]){70, 300, 0}, 0, 3));
}

/* The attention itself hands over what the loss takes. */
CASE(index_kl_dense, "the lse of dense_attention_forward")
{
    struct kl_problem p = dense_problem((struct indexer){.heads = 3, .width = 7, .type = GLM52_DTYPE_BF16},
                                        (struct teacher){5, 5, 9, 0.4f}, (const int[]){81, 3, 150, 0}, 23, 7);
    struct dense_attention shape = {.rows = p.shape.rows, .keys = p.shape.keys, .heads = p.teacher.heads,
                                    .qk = p.teacher.width, .v = p.teacher.width, .scale = p.teacher.scale,
                                    .type = p.shape.type, .pairs = p.shape.pairs};
    struct array *workspace = array_workspace(ops->dense_attention_forward_bytes(device, &shape));
    struct kl_wanted w = kl_plain(&p);
    struct kl_results r;

    p.teacher_lse = array_output(GLM52_DTYPE_F32, shape.rows * shape.heads);
    ops->dense_attention_forward(device, &shape, p.teacher_q->at, p.teacher_key->at, p.teacher_key->at, p.start->at,
                                 p.end->at, array_output(shape.type, shape.rows * shape.heads * shape.v)->at,
                                 p.teacher_lse->at, workspace->at);
    r = kl_run(&p);
    kl_check_results(&p, &r, &w);
}

/* ---- benches ---- */

static void bench_dense(struct indexer shape, struct teacher teacher, int with_lse)
{
    struct kl_problem p = dense_problem(shape, teacher, (const int[]){4096, 0}, 0, 0);

    if (with_lse) {
        p.teacher_lse = array_zero(GLM52_DTYPE_F32, p.shape.rows * teacher.heads);
        for (int64_t i = 0; i < p.teacher_lse->count; i++)
            p.teacher_lse->value[i] = log((double)(i / teacher.heads + 1));
        array_push(p.teacher_lse);
    }
    kl_bench(&p);
}

BENCH(index_kl_dense, "4096 causal, 8 heads of 64, teacher 8 x 144")
{
    bench_dense((struct indexer){.heads = 8, .width = 64, .type = GLM52_DTYPE_F32}, (struct teacher){8, 1, 144, 0.1f},
                0);
}

BENCH(index_kl_dense, "the same, given the attention's lse")
{
    bench_dense((struct indexer){.heads = 8, .width = 64, .type = GLM52_DTYPE_F32}, (struct teacher){8, 1, 144, 0.1f},
                1);
}

/* 32 heads of 128, a teacher of 64 heads, in full (key_heads = 64, width 256) or absorbed (1, 576), bf16, causal. */
static void bench_widths(int64_t rows, int32_t key_heads, int32_t width, int with_lse)
{
    struct kl_problem p = {.shape = {.rows = rows, .keys = rows, .heads = 32, .width = 128, .type = GLM52_DTYPE_BF16},
                           .teacher = {64, key_heads, width, 0.0625f}};
    struct kl_results r = {array_random(GLM52_DTYPE_F32, rows), array_random(p.shape.type, rows * 32 * 128),
                           array_random(GLM52_DTYPE_F32, rows * 128), array_random(GLM52_DTYPE_F32, rows * 32)};
    struct array *workspace;

    p.q = array_random(p.shape.type, rows * 32 * 128);
    p.key = array_random(p.shape.type, rows * 128);
    p.weight = array_random(GLM52_DTYPE_F32, rows * 32);
    p.row_weight = array_random(GLM52_DTYPE_F32, rows);
    p.teacher_q = array_random(p.shape.type, rows * 64 * width);
    p.teacher_key = array_random(p.shape.type, rows * key_heads * width);
    p.teacher_lse = with_lse ? array_random(GLM52_DTYPE_F32, rows * 64) : NULL;
    p.start = array_zero(GLM52_DTYPE_I32, rows);
    p.end = array_zero(GLM52_DTYPE_I32, rows);
    for (int64_t t = 0; t < rows; t++) p.end->value[t] = (double)(t + 1);
    p.shape.pairs = (double)rows * ((double)rows + 1) / 2;
    array_push(p.start);
    array_push(p.end);
    workspace = kl_workspace(&p);
    BENCH_LOOP
        kl_learn(&p, &r, workspace->at);
    bench_counted();
}

BENCH_FULL(index_kl_dense, "2048 causal, dense attention", "")
{
    bench_widths(2048, 64, 256, 1);
}

BENCH_FULL(index_kl_dense, "4096 causal, dense attention", "")
{
    bench_widths(4096, 64, 256, 1);
}

BENCH_FULL(index_kl_dense, "8192 causal, dense attention", "")
{
    bench_widths(8192, 64, 256, 1);
}

BENCH_FULL(index_kl_dense, "4096 causal, sparse attention", "")
{
    bench_widths(4096, 1, 576, 0);
}
