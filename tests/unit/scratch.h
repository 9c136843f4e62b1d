/* A directory of a test's own, gone at the end. */
#ifndef GLM52_TESTS_SCRATCH_H
#define GLM52_TESTS_SCRATCH_H

#include <stddef.h>

const char *scratch_make(void);              /* the path of a new, empty directory */
void scratch_remove(void);                   /* with what is in it, two levels deep */
void scratch_write(const char *path, const void *bytes, size_t count);
int scratch_files(const char *directory, const char *part); /* number of names that contain `part` */

#endif
