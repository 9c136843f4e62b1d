/* What the generated cases need: right arguments, and what must happen to wrong ones. */
#ifndef GLM52_TESTS_NULL_ARGUMENTS_H
#define GLM52_TESTS_NULL_ARGUMENTS_H

#include "small/small.h"

struct objects {
    glm52_context *context;
    glm52_config *config;
    glm52_model *model;
    glm52_batch *batch;
    glm52_dataset *dataset;
    glm52_optimizer *optimizer;
    glm52_step *step;
    glm52_error *error;
    const int32_t *integers;
    glm52_context_options context_options;
};

struct null_case {
    const char *name;
    void (*run)(const struct objects *o);
};

extern const struct null_case null_cases[];
extern const int null_case_count;

/* The status, and a last error that names the class, argument or member. */
void refused(glm52_status status, glm52_status wanted, const char *named, const char *what);
/* Fills an output with a pattern (a struct: past its struct_size, which is set), and finds it unchanged. */
void prepare(void *out, size_t bytes, int is_struct);
void untouched(const void *out, size_t bytes, int is_struct, const char *what);

#endif
