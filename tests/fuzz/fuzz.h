/* What a fuzz target offers, in libFuzzer's names, so that `clang -fsanitize=fuzzer` takes the same file without
 * replay.c. */
#ifndef GLM52_TESTS_FUZZ_H
#define GLM52_TESTS_FUZZ_H

#include <stddef.h>
#include <stdint.h>

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);
/* Changes the input in place, at most to `limit` bytes; gives the new size. A pure function of bytes and seed. */
size_t LLVMFuzzerCustomMutator(uint8_t *bytes, size_t size, size_t limit, unsigned seed);

#endif
