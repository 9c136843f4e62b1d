/* The frame of a unit test program: a suite, run by Check, reported as TAP. */
#ifndef GLM52_TESTS_TAP_H
#define GLM52_TESTS_TAP_H

#include <check.h>
#undef fail /* Check's old name for ck_abort_msg; ours means something else */

/* Runs the suite and prints TAP; the exit status is 0 even if a case failed, so that the runner counts cases. */
int run_tap(Suite *suite);

#endif
