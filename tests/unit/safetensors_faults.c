/* Every file call and every allocation of reading and writing safetensors fails once: nothing leaks, the error is told,
 * and a directory holds the old state or the new one, whole. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "checkpoint/safetensors.h"
#include "faults.h"
#include "scratch.h"
#include "tap.h"

enum { TENSORS = 5, ELEMENTS = 33 };

static const uint64_t single = 0, two_shards = 400, four_shards = 260; /* 5 tensors of 132 bytes: 3 + 2; 1 each but 5 */

/* A state is told by its values: every element of every tensor is `value`. */
static glm52_status save(struct host *host, const char *directory, uint64_t shard_bytes, float value)
{
    struct safetensors_writer *w;
    int64_t shape[] = {ELEMENTS};
    float values[ELEMENTS];
    char name[16];
    glm52_status status;

    for (int i = 0; i < ELEMENTS; i++) values[i] = value;
    TRY(safetensors_writer_create(host, directory, "model", shard_bytes, &w));
    status = GLM52_OK;
    for (int i = 0; i < TENSORS && !status; i++) {
        snprintf(name, sizeof name, "t%d", i);
        status = safetensors_writer_declare(w, name, GLM52_DTYPE_F32, 1, shape);
    }
    for (int i = 0; i < TENSORS && !status; i++) status = safetensors_writer_write(w, values, sizeof values);
    if (!status) return safetensors_writer_finish(&w);
    safetensors_writer_abort(&w);
    return status;
}

static glm52_status load(struct host *host, const char *directory, float *value)
{
    struct safetensors s;
    float values[ELEMENTS];
    char name[16];

    TRY(safetensors_open(host, directory, &s));
    glm52_status status = GLM52_OK;
    for (int i = 0; i < TENSORS && !status; i++) {
        snprintf(name, sizeof name, "t%d", i);
        const struct safetensor *t = safetensors_find(&s, name);
        ck_assert_ptr_nonnull(t);
        status = safetensors_read_f32(&s, t, 0, ELEMENTS, values);
        for (int j = 0; j < ELEMENTS && !status; j++) ck_assert(values[j] == values[0] && (!i || values[j] == *value));
        *value = values[0];
    }
    safetensors_close(&s);
    return status;
}

static float loaded(const char *directory)
{
    struct faults f;
    float value = 0;

    faults_open(&f);
    ck_assert_msg(!load(&f.host, directory, &value), "%s", glm52_error_message(glm52_error_last()));
    return value;
}

static void put_old_state(const char *directory, uint64_t shard_bytes)
{
    struct faults f;

    faults_open(&f);
    ck_assert_int_eq(save(&f.host, directory, shard_bytes, 1), GLM52_OK);
}

static void check_released(struct faults *f)
{
    ck_assert_uint_eq(f->host.total, 0);
    ck_assert_int_eq(f->open_files, 0);
}

static const struct change {
    const uint64_t *from, *to;
    int files; /* of the new state */
} change[] = {
    {&single, &single, 1},      {&single, &two_shards, 3},     {&two_shards, &single, 1},
    {&two_shards, &two_shards, 3}, {&two_shards, &four_shards, 6}, {&four_shards, &two_shards, 3},
};

/* Saves over an older state with one fault; 1 once no call is left to fail. */
static int save_with_fault(const struct change *c, enum fault_kind kind, int64_t call, int64_t allocation)
{
    const char *directory = scratch_make();
    struct faults f;

    put_old_state(directory, *c->from);
    faults_open(&f);
    f.kind = kind;
    f.error = kind == FAULT_SHORT ? EIO : ENOSPC;
    f.fail_call = call;
    f.fail_allocation = allocation;
    glm52_status status = save(&f.host, directory, *c->to, 2);
    check_released(&f);
    ck_assert_int_eq(scratch_files(directory, ".tmp"), 0);
    ck_assert_int_eq(scratch_files(directory, ".old"), 0);
    float value = loaded(directory);
    if (status) {
        const glm52_error *e = glm52_error_last();
        ck_assert_int_eq(status, call >= 0 ? GLM52_E_IO : GLM52_E_NOMEM);
        ck_assert(call < 0 || glm52_error_detail(e, "path"));
        /* The exception of safetensors_replace(): a single file is in place once it is renamed. */
        ck_assert_msg(value == 1 || c->files == 1, "call %d: %s", (int)call, glm52_error_message(e));
    } else {
        ck_assert(value == 2);
    }
    int done = call >= 0 ? f.calls <= call : f.allocations <= allocation;
    if (done) {
        ck_assert_int_eq(status, GLM52_OK);
        ck_assert_int_eq(scratch_files(directory, ""), c->files);
    }
    scratch_remove();
    return done;
}

START_TEST(a_save_survives_every_failing_file_call)
{
    for (int kind = FAULT_ERROR; kind <= FAULT_NOTHING; kind++) {
        int64_t call = 0;
        while (!save_with_fault(&change[_i], (enum fault_kind)kind, call, -1)) call++;
        ck_assert_int_gt(call, 5);
    }
}
END_TEST

START_TEST(a_save_survives_every_failing_allocation)
{
    int64_t allocation = 0;

    while (!save_with_fault(&change[_i], FAULT_ERROR, -1, allocation)) allocation++;
    ck_assert_int_gt(allocation, 10);
}
END_TEST

START_TEST(a_load_survives_every_failing_file_call)
{
    const char *directory = scratch_make();
    struct faults f;
    float value;

    put_old_state(directory, _i ? two_shards : single);
    for (int kind = FAULT_ERROR; kind <= FAULT_NOTHING; kind++)
        for (int64_t call = 0, done = 0; !done; call++) {
            faults_open(&f);
            f.kind = (enum fault_kind)kind;
            f.fail_call = call;
            glm52_status status = load(&f.host, directory, &value);
            done = f.calls <= call;
            ck_assert(!done || !status);
            ck_assert(!status || glm52_error_detail(glm52_error_last(), "path"));
            check_released(&f);
        }
    scratch_remove();
}
END_TEST

START_TEST(a_load_survives_every_failing_allocation)
{
    const char *directory = scratch_make();
    struct faults f;
    float value;

    put_old_state(directory, _i ? two_shards : single);
    for (int64_t allocation = 0, done = 0; !done; allocation++) {
        faults_open(&f);
        f.fail_allocation = allocation;
        glm52_status status = load(&f.host, directory, &value);
        done = f.allocations <= allocation;
        ck_assert_int_eq(status, done ? GLM52_OK : GLM52_E_NOMEM);
        check_released(&f);
    }
    scratch_remove();
}
END_TEST

START_TEST(an_aborted_save_leaves_the_older_state)
{
    const char *directory = scratch_make();
    struct safetensors_writer *w;
    struct faults f;

    put_old_state(directory, two_shards);
    faults_open(&f);
    ck_assert_int_eq(safetensors_writer_create(&f.host, directory, "model", 0, &w), GLM52_OK);
    ck_assert_int_eq(safetensors_writer_declare(w, "t0", GLM52_DTYPE_U8, 0, NULL), GLM52_OK);
    ck_assert_int_eq(safetensors_writer_write(w, "x", 1), GLM52_OK);
    ck_assert_int_eq(scratch_files(directory, ".tmp"), 1);
    safetensors_writer_abort(&w);
    check_released(&f);
    ck_assert_int_eq(scratch_files(directory, ""), 3);
    ck_assert(loaded(directory) == 1);
    scratch_remove();
}
END_TEST

START_TEST(a_file_that_shrank_is_told_with_tensor_and_byte)
{
    const char *directory = scratch_make();
    struct safetensors s;
    struct faults f;
    char path[100];
    float value;

    put_old_state(directory, single);
    faults_open(&f);
    ck_assert_int_eq(safetensors_open(&f.host, directory, &s), GLM52_OK);
    snprintf(path, sizeof path, "%s/model.safetensors", directory);
    scratch_write(path, "", 0);
    ck_assert_int_eq(safetensors_read_f32(&s, safetensors_find(&s, "t3"), 0, 1, &value), GLM52_E_CORRUPT);
    ck_assert_str_eq(glm52_error_detail(glm52_error_last(), "tensor"), "t3");
    ck_assert_ptr_nonnull(glm52_error_detail(glm52_error_last(), "byte"));
    ck_assert_str_eq(glm52_error_detail(glm52_error_last(), "path"), path);
    safetensors_close(&s);
    scratch_remove();
}
END_TEST

int main(void)
{
    enum { CHANGES = sizeof change / sizeof *change };
    Suite *suite = suite_create("safetensors-faults");
    TCase *faults = tcase_create("faults");

    tcase_set_timeout(faults, 60);
    tcase_add_loop_test(faults, a_save_survives_every_failing_file_call, 0, CHANGES);
    tcase_add_loop_test(faults, a_save_survives_every_failing_allocation, 0, CHANGES);
    tcase_add_loop_test(faults, a_load_survives_every_failing_file_call, 0, 2);
    tcase_add_loop_test(faults, a_load_survives_every_failing_allocation, 0, 2);
    tcase_add_test(faults, an_aborted_save_leaves_the_older_state);
    tcase_add_test(faults, a_file_that_shrank_is_told_with_tensor_and_byte);
    suite_add_tcase(suite, faults);
    return run_tap(suite);
}
