/* Between check_ops.c, case.c and bench.c: the surroundings of one case. */
#ifndef GLM52_TESTS_OPS_LAB_H
#define GLM52_TESTS_OPS_LAB_H

#include "case.h"

void lab_enter(const struct case_entry *entry, struct stream *stream, uint64_t seed);
void lab_leave(void); /* releases the arrays */
const struct case_entry *lab_entry(void);

size_t array_bytes(const struct array *a);

/* Also time full benches back to back for 0.8 s, the second half counted: what a training step sees. */
void bench_sustained(void);
/* And each call after 25 ms without work, calls of 3 ms or more. */
void bench_idle(void);
void bench_end(void); /* of all benches of the device: the references go */

#endif
