/* Structs that cross the ABI: an older caller's is shorter than ours, a newer one's longer (docs/abi.md).
 * All begin with uint32_t struct_size, flags. */
#ifndef GLM52_BASE_STRUCT_H
#define GLM52_BASE_STRUCT_H

#include <stddef.h>

#include "base/error.h"

/* Bytes up to and including a member: the size that a struct had when this member was its last. */
#define SIZE_UP_TO(type, member) (offsetof(type, member) + sizeof(((type *)0)->member))

/* Copies the caller's struct over `local`, which holds the defaults of members that the caller may
 * not know. `first`: size in the first release. VERSION if it is shorter, or says something in
 * bytes that we do not know; INVALID for flags. */
glm52_status struct_take(void *local, size_t bytes, const void *given, size_t first, const char *name);

/* Refuses an output struct that is shorter than in the first release; to be called before any work. */
glm52_status struct_check(const void *out, size_t first, const char *name);
/* Fills it, as far as it goes, and says in struct_size how far that is. */
void struct_give(void *out, const void *value, size_t bytes);

#endif
