/* A training step with a tap on its passes: what the kinds of training semantics share. */
#ifndef GLM52_TESTS_GOLDENCHECK_TRAINING_H
#define GLM52_TESTS_GOLDENCHECK_TRAINING_H

#include "api/object.h"
#include "case.h"

enum { KEPT = 256 };

/* A value that the tap saw. */
struct kept {
    char name[48];
    int64_t count;
    double *value;
};

struct training {
    struct golden_case *c;
    glm52_context *context;
    glm52_config *config;
    glm52_model *model;
    glm52_optimizer *optimizer;
    glm52_step *step;
    glm52_batch *batch;
    struct kept kept[KEPT];
    int keeps;
    float *scores; /* on the device, `score_bytes` of them */
    size_t score_bytes;
    struct tap tap;
};

/* The value called `format` with the number; NULL with the failure reported. */
const struct kept *training_find(struct training *t, const char *format, int number);
void training_forget(struct training *t);
/* Options of the sidecar, and the library's made of them. */
const json_t *training_option(const struct golden_case *c, const char *key);
glm52_status set_number(struct training *t, const char *key, const json_t *value);
glm52_status set_word(struct training *t, const char *key, const json_t *value);
glm52_status set_mtp(struct training *t);
glm52_status set_optimizer(struct training *t);
/* The model of the case under the options that `configure` sets, for packs of `rows`. */
glm52_status open_training(struct training *t, glm52_status (*configure)(struct training *, const void *),
                           const void *with, int64_t rows);
void close_training(struct training *t);
glm52_status training_feed(struct training *t, const int64_t *tokens, int64_t rows, const int64_t *bounds,
                           int64_t count);
/* Against the tensor of the case, if it has it. Rows outside `inside`, if given, count as `absent`. */
void compare_value(struct training *t, const char *tensor, double value);
void compare_metric(struct training *t, const char *tensor, const char *metric, double factor);
void compare_kept(struct training *t, const char *tensor, const char *format, int number, const int *inside,
                  double absent);
/* PREFIX.NAME of every parameter; the others must have gradient zero, if `rest_is_zero`. */
void compare_parameters(struct training *t, const char *prefix, int gradients, int rest_is_zero);
/* [rows]: whether the input token t + 1 + d lies inside the document; free() it. */
int *rows_inside(const struct pack *p, int d);
/* input_ids and cu_seqlens of the case, and one forward and backward of them. */
glm52_status load_pack(struct golden_case *c, struct array *tokens, struct array *bounds);
glm52_status training_run_once(struct training *t, const struct array *tokens, const struct array *bounds);

#endif
