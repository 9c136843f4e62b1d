/* Codes of narrow floats, and NVFP4 matrices, against the golden tables of `nvfp4`. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/narrow.h"
#include "checkpoint/safetensors.h"
#include "ops/ops.h"
#include "tap.h"

static struct host host;
static struct safetensors golden;
static struct stream cpu;

static void start(void)
{
    char path[512];

    snprintf(path, sizeof path, "%s/nvfp4.safetensors", getenv("GOLDEN"));
    ck_assert(!host_open(&host, NULL));
    ck_assert(!safetensors_open(&host, path, &golden));
    ck_assert(!stream_open_cpu(&cpu, &host, 2));
}

static void finish(void)
{
    stream_close(&cpu);
    safetensors_close(&golden);
    ck_assert_uint_eq(host.total, 0);
}

/* The bytes of a tensor, and how many elements they are; free() them. NULL if it is absent. */
static void *tensor(const char *prefix, const char *name, uint64_t *count)
{
    char full[128];
    const struct safetensor *t;
    void *bytes;

    snprintf(full, sizeof full, "%s.%s", prefix, name);
    if (!(t = safetensors_find(&golden, full))) return NULL;
    *count = safetensors_elements(t);
    bytes = malloc((size_t)t->bytes + 1);
    ck_assert(bytes && !safetensors_read(&golden, t, 0, *count, bytes));
    return bytes;
}

static void check_decode(const char *format, const char *name, float (*decode)(uint8_t code))
{
    uint64_t count;
    float *value = tensor(format, name, &count);

    for (uint64_t i = 0; i < count; i++) {
        const float got = decode((uint8_t)i);

        ck_assert_msg(isnan(got) ? isnan(value[i]) : got == value[i], "%s %d: %g, not %g", format, (int)i, (double)got,
                      (double)value[i]);
    }
    free(value);
}

static void check_encode(const char *format, const char *name, uint8_t (*encode)(float value))
{
    uint64_t count;
    float *x = tensor(format, "encode_x", &count);
    uint8_t *code = tensor(format, name, &count);

    for (uint64_t i = 0; i < count; i++)
        ck_assert_msg(isnan(x[i]) ? (encode(x[i]) & 0x7f) == 0x7f : encode(x[i]) == code[i],
                      "%s of %.9g: 0x%02x, not 0x%02x", format, (double)x[i], encode(x[i]), code[i]);
    free(x);
    free(code);
}

START_TEST(codes_decode)
{
    check_decode("e4m3", "decode", e4m3_to_f32);
    check_decode("e5m2", "decode", e5m2_to_f32);
    check_decode("e2m1", "decode", e2m1_to_f32);
    check_decode("e8m0", "decode_f32", e8m0_to_f32);
}
END_TEST

START_TEST(numbers_encode_to_the_nearest_code)
{
    check_encode("e4m3", "encode_sat", f32_to_e4m3);
    check_encode("e5m2", "encode_sat", f32_to_e5m2);
    check_encode("e2m1", "encode_code", f32_to_e2m1);
    ck_assert_uint_eq(f32_to_e4m3(NAN), 0x7f);
    ck_assert_uint_eq(f32_to_e5m2(-NAN), 0x7f);
    ck_assert_uint_eq(f32_to_e2m1(NAN), 7);
    ck_assert_uint_eq(f32_to_e2m1(-NAN), 7);
}
END_TEST

/* The case {prefix} by one order: codes and scales to the byte, and what they decode to. */
static int check_matrix(const char *prefix, int format, const char *order)
{
    char name[64];
    uint64_t count, blocks, one;
    float *x = tensor(prefix, "x", &count), *global, *decoded;
    uint8_t *codes, *scales, *got = calloc(count, 1), *got_scales = calloc(count, 1);
    float *back = calloc(count, sizeof *back);

    snprintf(name, sizeof name, format == NVFP4 ? "%s_amax" : "%s_scale_2", order);
    global = tensor(prefix, name, &one);
    snprintf(name, sizeof name, "%s_codes", order);
    codes = tensor(prefix, name, &blocks);
    snprintf(name, sizeof name, "%s_scales", order);
    scales = tensor(prefix, name, &blocks);
    snprintf(name, sizeof name, "%s_decoded", order);
    decoded = tensor(prefix, name, &count);
    const int has = global && codes && one == 1;
    if (has) {
        struct quantised q = {1, (int64_t)blocks * 16, 1, 16, format, 0, GLM52_DTYPE_F32}; /* rows are whole blocks */

        cpu.ops->quantise(&cpu, &q, global, x, got, got_scales, NULL, NULL);
        ck_assert_msg(!memcmp(got_scales, scales, blocks), "scales of %s, %s", prefix, order);
        ck_assert_msg(!memcmp(got, codes, 8 * blocks), "codes of %s, %s", prefix, order);
        cpu.ops->dequantise(&cpu, &q, global, codes, scales, back);
        for (uint64_t i = 0; decoded && i < 16 * blocks; i++)
            ck_assert_msg(back[i] == decoded[i], "%s, %s: element %d is %.9g, not %.9g", prefix, order, (int)i,
                          (double)back[i], (double)decoded[i]);
    }
    free(x);
    free(global);
    free(codes);
    free(scales);
    free(decoded);
    free(got);
    free(got_scales);
    free(back);
    return has;
}

START_TEST(nvfp4_matrices_have_the_golden_bytes)
{
    static const char *const cases[] = {"normal", "heavy", "bf16", "bf16_tie0", "bf16_tie1", "bf16_tie2", "bf16_tie3",
        "golden_row", "zero_blocks", "all_zero", "underflow", "tiny_normal", "tiny_clamped", "tiny_subnormal", "huge",
        "huge_overflow", "with_inf", "neg_zero", "act_static", "shared_scale2_gate", "shared_scale2_up"};
    int compared = 0;

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        compared += check_matrix(cases[i], NVFP4, "te") + check_matrix(cases[i], NVFP4_MODELOPT, "mo");
    ck_assert_int_eq(compared, 18 + 19); /* three have no bytes in the first order, two none in the second */
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("narrow");
    TCase *tests = tcase_create("narrow");

    tcase_add_checked_fixture(tests, start, finish);
    tcase_add_test(tests, codes_decode);
    tcase_add_test(tests, numbers_encode_to_the_nearest_code);
    tcase_add_test(tests, nvfp4_matrices_have_the_golden_bytes);
    suite_add_tcase(suite, tests);
    return run_tap(suite);
}
