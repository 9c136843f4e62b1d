/* One golden case: a JSON sidecar, the tensors beside it, and what became of comparing with them. */
#ifndef GLM52_TESTS_GOLDENCHECK_CASE_H
#define GLM52_TESTS_GOLDENCHECK_CASE_H

#include <jansson.h>

#include "base/host.h"
#include "checkpoint/safetensors.h"
#include "model/model.h"
#include "model/tap.h"

struct golden_case {
    struct host host;
    char directory[1024], name[256];
    json_t *sidecar;
    struct safetensors file;
    unsigned char *used;    /* per tensor of the file: fed, compared, or left out on purpose */
    int compared, failures;
    int bf16;               /* this run computes in bf16: tolerances are 2^17 times those of fp32, or show too little */
    int unjudged;           /* errors are shown alone */
    int own_sides;          /* sides of kinks are this run's own: what is beyond the band is shown and counted */
    int beyond;
};

/* A tensor of the case as numbers: `value` always, `integer` for integer types only. */
struct array {
    int64_t count, shape[SAFETENSORS_DIMENSIONS];
    int dimensions;
    double *value;
    int64_t *integer;
};

/* 1, or 0 with the failure reported. The sidecar is handed over. One that lists no tensors needs no file of them. */
int case_open(struct golden_case *c, const char *path, json_t *sidecar);
void case_close(struct golden_case *c);

/* Something is wrong beyond a number: counts as a failure of the case. */
void case_fail(struct golden_case *c, const char *format, ...) PRINTF(2, 3);
void case_fail_last(struct golden_case *c, const char *what); /* with the library's last error */

int case_has(const struct golden_case *c, const char *name);
/* Loads a tensor; 1, or 0 with the failure reported and *out empty. array_free() takes both. */
int case_array(struct golden_case *c, const char *name, struct array *out);
void array_free(struct array *a);
float *array_floats(const struct array *a);     /* free() it */
int32_t *array_int32s(const struct array *a);   /* free() it */

/* The device that cases run on: "cpu", or what golden_check --device says. */
extern const char *golden_device;
/* 1, or 0 with the failure reported. */
int case_stream(struct golden_case *c, struct stream *s);
glm52_status case_context(glm52_context **out);
/* What a view shows, on the host; free() it. */
void *view_on_host(glm52_context *context, const glm52_view *v);

/* Arrays of the host as one operation sees them on the device. on_device() copies an array over, back_from_device()
 * copies all of them back and gives the device's memory back. */
struct mirror {
    struct stream *s;
    int count;
    struct {
        void *host, *device;
        size_t bytes;
    } at[8];
};
void *on_device(struct mirror *m, const void *host, size_t bytes);
void back_from_device(struct mirror *m);

/* Compares with the tensor of that name: integers exactly, floats within its atol, or 2e-4 of its largest magnitude
 * where it has none. Prints a line that begins with label. */
void compare_floats(struct golden_case *c, const char *label, const char *name, const double *got, int64_t count);
void compare_integers(struct golden_case *c, const char *label, const char *name, const int64_t *got, int64_t count);
/* Floats within a tolerance that the kind itself states. */
void compare_within(struct golden_case *c, const char *name, const double *got, int64_t count, double tolerance);
/* The same with a tolerance for each element: errors are shown as multiples of it. */
void compare_bounded(struct golden_case *c, const char *name, const double *got, const double *bound, int64_t count);
/* The first `count` of a tensor alone. */
void compare_first(struct golden_case *c, const char *name, const double *got, int64_t count);
/* A quantity without a tensor must be zero. */
void compare_zero(struct golden_case *c, const char *label, const double *got, int64_t count);

/* The tensor is not compared, on purpose. */
void case_leave_out(struct golden_case *c, const char *name);
/* Tensors of the file nobody used: a failure if the kind says that it compares all, else a remark. */
void case_check_used(struct golden_case *c, int all);

/* A model that notes its decisions ("topk", "router_idx", and at a kink of a loss "tv_side" or "relu_side"), and after
 * guide_give() takes them in the same order; but those whose name ends with `but` (NULL: none) it then makes itself. */
void guide_model(struct stream *s, struct model *m);
void guide_give(const char *but);
int guide_followed(void); /* 0: the second run asked for others than the first made */
int guide_has(const char *kind);
/* Of the decisions that the second run made itself: the numbers that fell otherwise, and all. */
void guide_otherwise(int64_t *numbers, int64_t *of_all);
void guide_forget(void);

/* The seed of golden_check --grid; -1: none. A model in fp32 then does as if in bf16, on a shifted grid unless it is
 * 0. */
extern int golden_grid;
void grid_model(struct stream *s, int seed);

void *must_allocate(size_t count, size_t size); /* zeroed; exits when there is none */

/* The kinds. Each feeds the case to the library and compares. */
void run_topk_select(struct golden_case *c);
void run_rope(struct golden_case *c);
void run_adamw_clip_lr(struct golden_case *c);
void run_muon(struct golden_case *c);
void run_muon_split(struct golden_case *c);
void run_router_aux(struct golden_case *c);
void run_flops(struct golden_case *c);
void run_fp8_block(struct golden_case *c);
void run_mxfp8(struct golden_case *c);
void run_hf_forward(struct golden_case *c);
void run_ref_model(struct golden_case *c);
void run_hf_bf16(struct golden_case *c);
void run_indexer_kl(struct golden_case *c);
void run_mtp_base(struct golden_case *c);
void run_mtp_ce(struct golden_case *c);
void run_mtp_tv(struct golden_case *c);
void run_trajectory(struct golden_case *c);

#endif
