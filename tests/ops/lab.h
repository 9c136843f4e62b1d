/* Between check_ops.c and case.c: the surroundings of one case. */
#ifndef GLM52_TESTS_OPS_LAB_H
#define GLM52_TESTS_OPS_LAB_H

#include "case.h"

void lab_enter(const struct case_entry *entry, struct stream *stream, uint64_t seed);
void lab_leave(void); /* releases the arrays */

#endif
