/* Small models of odd shapes, made through the public header alone, for tests that run a whole model. */
#ifndef GLM52_TESTS_SMALL_H
#define GLM52_TESTS_SMALL_H

#include <check.h>
#undef fail

#include "glm52.h"

/* Fails the test with the library's message unless the call succeeds. */
#define OK(call)                                                                                        \
    do {                                                                                                \
        glm52_status ok_ = (call);                                                                      \
        ck_assert_msg(!ok_, "%s: %s", glm52_status_name(ok_), glm52_error_message(glm52_error_last())); \
    } while (0)
#define REFUSED(call, status)                                                                                     \
    do {                                                                                                          \
        glm52_status refused_ = (call);                                                                           \
        ck_assert_msg(refused_ == (status), "%s, not " #status ": %s", glm52_status_name(refused_),               \
                      refused_ ? glm52_error_message(glm52_error_last()) : "");                                   \
    } while (0)

/* The chain from context to step. Members are NULL where a test stopped earlier or dropped them. */
struct small {
    glm52_context *context;
    glm52_config *config;
    glm52_model *model;
    glm52_optimizer *optimizer;
    glm52_step *step;
};

/* 4 layers (1 dense, 3 MoE; indexers full, full, shared, full), 7k parameters, no two dimensions alike. `settings`:
 * further options, "key=value key=value". */
void small_configure(struct small *s, const glm52_context_options *options, const char *settings);
void small_open(struct small *s, const glm52_context_options *options, const char *settings); /* up to the step */
void small_threads(struct small *s, int threads, const char *settings);
void small_close(struct small *s); /* and checks that nothing is held but the context */
void small_set(glm52_config *config, const char *settings);
void small_shape(glm52_config *config); /* the settings that all small models begin with */

/* Documents of the given lengths (ended by 0) with tokens that are a function of seed, document's seed and place. */
struct document {
    int length;
    unsigned seed;
};
glm52_batch *small_batch(struct small *s, int documents, const struct document *document);
/* One document. */
glm52_batch *small_text(struct small *s, int length, unsigned seed);
int32_t small_token(unsigned seed, int place);

/* Gradients, or values, of all parameters in table order; free() them. */
enum small_what { GRADIENTS, VALUES };
struct snapshot {
    uint32_t parameters;
    uint64_t *offset; /* [parameters + 1] in floats */
    float *at;
};
struct snapshot small_snapshot(struct small *s, enum small_what what);
void snapshot_free(struct snapshot *snapshot);
/* Bit for bit. */
void check_same(struct small *s, const struct snapshot *a, const struct snapshot *b);
/* Within `tolerance` of the largest magnitude in each parameter, plus of 1e-3 of the largest anywhere. */
void check_close(struct small *s, const struct snapshot *a, const struct snapshot *b, double tolerance);

double small_gradients(struct small *s, glm52_batch *const *batches, uint32_t count); /* the loss */
double small_loss(struct small *s, glm52_batch *batch);                                /* by evaluate */
double small_train(struct small *s, glm52_batch *const *batches, uint32_t count);     /* loss of one update */
glm52_parameter_info small_parameter(struct small *s, const char *name);
glm52_view small_output(glm52_batch *batch, const char *name);

#endif
