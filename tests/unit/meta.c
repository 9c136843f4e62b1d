/* The meta device counts what the cpu does; the tally keeps it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ops/ops.h"
#include "tap.h"

static struct host host;
static struct stream meta, cpu;
static struct tally meta_tally, cpu_tally;

static void start(void)
{
    ck_assert(!host_open(&host, NULL));
    ck_assert(!stream_open_meta(&meta, &host));
    ck_assert(!stream_open_cpu(&cpu, &host, 2));
    memset(&meta_tally, 0, sizeof meta_tally);
    memset(&cpu_tally, 0, sizeof cpu_tally);
    meta.tally = &meta_tally;
    cpu.tally = &cpu_tally;
}

static void finish(void)
{
    stream_close(&meta);
    stream_close(&cpu);
    ck_assert_uint_eq(host.total, 0);
}

START_TEST(memory_is_counted_and_never_taken)
{
    void *first, *second, *empty;

    ck_assert(!meta.ops->allocate(&meta, (size_t)1 << 50, MEMORY_PARAMETERS, &first)); /* more than any machine has */
    ck_assert(!meta.ops->allocate(&meta, 1000, MEMORY_WORKSPACE, &second));
    ck_assert(!meta.ops->allocate(&meta, 0, MEMORY_WORKSPACE, &empty));
    ck_assert(first && second && empty && first != second && second != empty);
    ck_assert_uint_eq((uintptr_t)second % 64, 0);
    ck_assert_uint_eq((uintptr_t)second - (uintptr_t)first >= (size_t)1 << 50, 1);
    ck_assert_uint_eq(host.used[MEMORY_PARAMETERS], (uint64_t)1 << 50);
    ck_assert_uint_eq(host.used[MEMORY_WORKSPACE], 1000);
    meta.ops->release(&meta, first, (size_t)1 << 50, MEMORY_PARAMETERS);
    meta.ops->release(&meta, second, 1000, MEMORY_WORKSPACE);
    meta.ops->release(&meta, empty, 0, MEMORY_WORKSPACE);
    ck_assert_uint_eq(host.peak, ((uint64_t)1 << 50) + 1000);
}
END_TEST

START_TEST(memory_beyond_addresses_is_refused)
{
    void *memory = NULL;

    ck_assert_int_eq(meta.ops->allocate(&meta, SIZE_MAX, MEMORY_PARAMETERS, &memory), GLM52_E_NOMEM);
    ck_assert_ptr_null(memory);
}
END_TEST

START_TEST(what_comes_back_is_zero)
{
    void *memory;
    char text[] = "abc";

    ck_assert(!meta.ops->allocate(&meta, sizeof text, MEMORY_HOST, &memory));
    meta.ops->upload(&meta, memory, text, sizeof text);
    meta.ops->download(&meta, text, memory, sizeof text);
    ck_assert_str_eq(text, "");
    meta.ops->release(&meta, memory, sizeof text, MEMORY_HOST);
}
END_TEST

enum { ROWS = 3, WIDTH = 5, TOKENS = 7 };

/* The same calls on either device, on arrays of zeros of PIECE bytes each. */
enum { PIECE = 512, PIECES = 8 };

static void some_work(struct stream *s, char *zeros)
{
    struct gemm gemm = {.m = 2, .n = 3, .k = 4, .lda = 4, .ldb = 3, .ldc = 3, .batch = 5, .stride_a = 8, .stride_b = 12,
                        .stride_c = 6, .a_type = GLM52_DTYPE_BF16, .b_type = GLM52_DTYPE_F32,
                        .c_type = GLM52_DTYPE_F32};
    struct head head = {ROWS, WIDTH, TOKENS, GLM52_DTYPE_F32, GLM52_DTYPE_F32};
    struct swiglu swiglu = {ROWS, WIDTH, GLM52_DTYPE_BF16};
    void *a[PIECES];

    for (int i = 0; i < PIECES; i++) a[i] = zeros + i * PIECE;
    s->label = "first";
    s->ops->gemm(s, &gemm, a[0], a[1], a[2]);
    s->ops->gemm(s, &gemm, a[0], a[1], a[2]);
    s->label = "second";
    s->ops->gemm(s, &gemm, a[0], a[1], a[2]);
    s->ops->swiglu_forward(s, &swiglu, a[0], NULL, NULL, a[2]);
    s->ops->head_loss(s, &head, a[0], a[1], a[2], (float *)a[3], (float *)a[4], NULL, a[5], a[6], a[7]);
    s->ops->zero(s, a[0], 64);
}

static void tallies_agree(int rows)
{
    ck_assert_int_eq(meta_tally.rows, rows);
    ck_assert_int_eq(cpu_tally.rows, rows);
    for (int i = 0; i < rows; i++) {
        const struct tally_row *a = &meta_tally.row[i], *b = &cpu_tally.row[i];

        ck_assert_str_eq(a->label, b->label);
        ck_assert_str_eq(a->operation, b->operation);
        ck_assert_uint_eq(a->calls, b->calls);
        ck_assert_double_eq(a->flops, b->flops);
        ck_assert_double_eq(a->bytes, b->bytes);
        ck_assert_double_eq(a->seconds, 0);
        ck_assert_double_gt(b->seconds, 0);
    }
}

START_TEST(both_devices_count_alike)
{
    char *zeros = calloc(PIECES, PIECE);

    some_work(&meta, zeros);
    some_work(&cpu, zeros);
    tallies_agree(5);
    free(zeros);
}
END_TEST

/* Of rows that see nothing: start, end and every other input are zeros. The workspace is the cpu's. */
static void attention_work(struct stream *s, char *zeros, void *workspace)
{
    struct dense_attention dense = {.rows = ROWS, .keys = 4, .heads = 2, .qk = WIDTH, .v = 6, .scale = 1,
                                    .type = GLM52_DTYPE_BF16, .pairs = 9};
    struct indexer indexer = {.rows = ROWS, .keys = 4, .heads = 2, .width = WIDTH, .k = 1, .type = GLM52_DTYPE_F32,
                              .pairs = 3};
    struct teacher teacher = {2, 1, 6, 1};
    struct sparse_mla sparse = {.rows = ROWS, .keys = 4, .heads = 2, .kv_rank = 3, .rope = 2, .k = 1, .scale = 1,
                                .type = GLM52_DTYPE_BF16, .pairs = 2};
    const int32_t *none = (const int32_t *)zeros;
    void *a[PIECES];

    for (int i = 0; i < PIECES; i++) a[i] = zeros + i * PIECE;
    s->ops->dense_attention_forward(s, &dense, a[1], a[2], a[3], none, none, a[4], a[5], workspace);
    s->ops->dense_attention_backward(s, &dense, a[1], a[2], a[3], none, none, a[4], a[5], a[1], a[6], a[6], a[7],
                                     workspace);
    s->ops->index_kl_dense(s, &indexer, &teacher, a[1], a[2], a[3], a[1], a[2], a[3], none, none, a[3], a[4], a[5],
                           a[6], a[7], workspace);
    s->ops->index_kl_selected(s, &indexer, a[1], a[2], a[3], none, a[3], a[3], a[4], a[5], a[6], a[7], workspace);
    s->ops->sparse_mla_target(s, &sparse, a[1], a[2], none, a[3], a[4], workspace);
}

/* q, key, weight with their gradients, row_weight and kl; the teacher's queries, keys and lse; start and end. */
static double dense_loss_bytes(void)
{
    return 4.0 *
           (2 * ROWS * 2 * WIDTH + 2 * 4 * WIDTH + 2 * ROWS * 2 + 2 * ROWS + (ROWS * 2 + 4) * 6 + ROWS * 2 + 2 * ROWS);
}

START_TEST(attention_and_indexer_loss_count_alike)
{
    enum { WORKSPACE = 4 << 20 }; /* more than any of them asks for */
    char *zeros = calloc(PIECES, PIECE);
    void *workspace = aligned_alloc(64, WORKSPACE);

    attention_work(&meta, zeros, workspace);
    attention_work(&cpu, zeros, workspace);
    tallies_agree(5);
    ck_assert_double_eq(cpu_tally.row[0].flops, 2 * 9.0 * 2 * (WIDTH + 6));
    ck_assert_double_eq(cpu_tally.row[1].flops, 2 * 9.0 * 2 * (3 * WIDTH + 2 * 6));
    ck_assert_double_eq(cpu_tally.row[2].flops, 2 * 3.0 * (3 * 2 * WIDTH + 2 * 6));
    ck_assert_double_eq(cpu_tally.row[3].flops, 2 * 3.0 * 3 * 2 * WIDTH);
    ck_assert_double_eq(cpu_tally.row[2].bytes, dense_loss_bytes());
    ck_assert_double_eq(cpu_tally.row[4].flops, 2 * 2.0 * 2 * (3 + 2));
    ck_assert_double_eq(cpu_tally.row[4].bytes, 2.0 * (ROWS * 2 + 4) * (3 + 2) + 4.0 * ROWS * (2 * 1 + 2));
    free(workspace);
    free(zeros);
}
END_TEST

static void quantised_work(struct stream *s, char *zeros)
{
    struct quantised fp8 = {6, 10, 1, 4, FP8_BLOCK, 0, GLM52_DTYPE_BF16},
                     nvfp4 = {6, 32, 1, 16, NVFP4, 0, GLM52_DTYPE_F32};
    void *a[PIECES];

    for (int i = 0; i < PIECES; i++) a[i] = zeros + 2 * i * PIECE;
    s->label = "";
    s->ops->quantise(s, &fp8, NULL, a[0], a[1], a[2], a[3], a[1]);
    s->ops->dequantise(s, &nvfp4, a[0], a[0], a[0], a[1]);
}

START_TEST(quantised_bytes_are_codes_scales_and_the_other_side)
{
    char *zeros = calloc(2 * PIECES, PIECE);

    quantised_work(&meta, zeros);
    quantised_work(&cpu, zeros);
    tallies_agree(2);
    ck_assert_double_eq(cpu_tally.row[0].bytes, 60 * 2 + (60 + 6 * 3 * 4) + (60 + 10 * 2 * 4));
    ck_assert_double_eq(cpu_tally.row[1].bytes, 192 * 4 + 192 / 2 + 12);
    free(zeros);
}
END_TEST

START_TEST(flops_and_bytes_are_those_of_the_operands)
{
    static char zeros[PIECES * PIECE];

    some_work(&meta, zeros);
    ck_assert_str_eq(meta_tally.row[0].operation, "gemm");
    ck_assert_str_eq(meta_tally.row[0].label, "first");
    ck_assert_uint_eq(meta_tally.row[0].calls, 2);
    ck_assert_double_eq(meta_tally.row[0].flops, 2 * 5 * 2.0 * 2 * 3 * 4);
    ck_assert_double_eq(meta_tally.row[0].bytes, 2 * 5 * (2.0 * 4 * 2 + 4 * 3 * 4 + 2 * 3 * 4));
    ck_assert_str_eq(meta_tally.row[3].operation, "head_loss");
    ck_assert_double_eq(meta_tally.row[3].flops, 3 * 2.0 * ROWS * WIDTH * TOKENS);
    ck_assert_double_eq(tally_flops(&meta_tally), 3 * 5 * 2.0 * 2 * 3 * 4 + 3 * 2.0 * ROWS * WIDTH * TOKENS);
}
END_TEST

START_TEST(iterations_of_muon_and_drafts_are_counted_by_shape)
{
    struct muon tall = {.batch = 3, .rows = 7, .columns = 5, .steps = 2, .type = GLM52_DTYPE_F32,
                        .gradient = GLM52_DTYPE_F32, .moments = GLM52_DTYPE_F32};
    struct head_tv tv = {.rows = ROWS, .width = WIDTH, .vocabulary = TOKENS, .depths = 2, .type = GLM52_DTYPE_F32,
                         .gradient = GLM52_DTYPE_F32};
    struct head_trunk trunk = {0};
    struct head_drafts drafts = {0};

    meta.ops->muon(&meta, &tall, NULL, NULL, NULL, NULL, NULL, NULL, NULL);
    ck_assert_double_eq(tally_flops(&meta_tally), 2 * 3 * (4.0 * 5 * 5 * 7 + 2 * 5 * 5 * 5));
    ck_assert_double_eq(meta_tally.row[0].bytes, 3 * 7 * 5 * 4 * 5.0);
    meta.ops->head_tv(&meta, &tv, &trunk, &drafts, NULL, NULL);
    ck_assert_double_eq(meta_tally.row[1].flops, 3 * 2.0 * ROWS * WIDTH * TOKENS);
    drafts.dx = trunk.dx = trunk.dw = &tv;
    meta.ops->head_tv(&meta, &tv, &trunk, &drafts, NULL, NULL);
    ck_assert_double_eq(meta_tally.row[1].flops, (3 + 7) * 2.0 * ROWS * WIDTH * TOKENS);
}
END_TEST

START_TEST(workspaces_are_those_of_the_cpu)
{
    struct head head = {1000, 64, 8192, GLM52_DTYPE_F32, GLM52_DTYPE_F32};
    struct norm norm = {.rows = 1000, .width = 64, .x_stride = 64, .y_stride = 64, .type = GLM52_DTYPE_F32};
    struct dispatch dispatch = {.rows = 1000, .width = 64, .k = 4, .experts = 16, .type = GLM52_DTYPE_F32};

    ck_assert_uint_eq(meta.ops->head_loss_bytes(&meta, &head), cpu.ops->head_loss_bytes(&cpu, &head));
    ck_assert_uint_eq(meta.ops->norm_backward_bytes(&meta, &norm), cpu.ops->norm_backward_bytes(&cpu, &norm));
    ck_assert_uint_eq(meta.ops->sum_bytes(&meta, 1 << 20), cpu.ops->sum_bytes(&cpu, 1 << 20));
    meta.threads = cpu.threads;
    ck_assert_uint_eq(meta.ops->dispatch_sort_bytes(&meta, &dispatch), cpu.ops->dispatch_sort_bytes(&cpu, &dispatch));
}
END_TEST

START_TEST(both_tables_have_the_same_entries)
{
    const char *const *meta_slot = (const char *const *)meta.ops, *const *cpu_slot = (const char *const *)cpu.ops;

    /* A table is a name and function pointers, all of one size here. */
    for (size_t i = 0; i < sizeof(struct ops) / sizeof(void *); i++) {
        ck_assert_msg(meta_slot[i] || !cpu_slot[i], "meta lacks entry %zu", i);
        ck_assert_msg(cpu_slot[i] || !meta_slot[i], "cpu lacks entry %zu", i);
    }
}
END_TEST

START_TEST(a_full_tally_collects_the_rest_in_its_last_row)
{
    static char labels[TALLY_ROWS + 3][8];

    for (int i = 0; i < TALLY_ROWS + 3; i++) {
        snprintf(labels[i], sizeof labels[i], "%d", i);
        tally_row(&meta_tally, labels[i], "gemm")->flops += 1;
    }
    ck_assert_int_eq(meta_tally.rows, TALLY_ROWS);
    ck_assert_double_eq(meta_tally.row[TALLY_ROWS - 1].flops, 4);
    ck_assert_double_eq(tally_flops(&meta_tally), TALLY_ROWS + 3);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("meta");
    TCase *device = tcase_create("device"), *tally = tcase_create("tally");

    tcase_add_checked_fixture(device, start, finish);
    tcase_add_test(device, memory_is_counted_and_never_taken);
    tcase_add_test(device, memory_beyond_addresses_is_refused);
    tcase_add_test(device, what_comes_back_is_zero);
    tcase_add_test(device, workspaces_are_those_of_the_cpu);
    tcase_add_test(device, both_tables_have_the_same_entries);
    tcase_add_checked_fixture(tally, start, finish);
    tcase_add_test(tally, both_devices_count_alike);
    tcase_add_test(tally, attention_and_indexer_loss_count_alike);
    tcase_add_test(tally, quantised_bytes_are_codes_scales_and_the_other_side);
    tcase_add_test(tally, flops_and_bytes_are_those_of_the_operands);
    tcase_add_test(tally, iterations_of_muon_and_drafts_are_counted_by_shape);
    tcase_add_test(tally, a_full_tally_collects_the_rest_in_its_last_row);
    suite_add_tcase(suite, device);
    suite_add_tcase(suite, tally);
    return run_tap(suite);
}
