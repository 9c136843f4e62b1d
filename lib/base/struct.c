#include "base/struct.h"

#include <string.h>

static uint32_t size_of(const void *given)
{
    uint32_t size;

    memcpy(&size, given, sizeof size);
    return size;
}

glm52_status struct_check(const void *out, size_t first, const char *name)
{
    if (size_of(out) >= first) return GLM52_OK;
    fail(GLM52_E_VERSION, "%s.struct_size is %u; the first release had %zu bytes", name, size_of(out), first);
    return fail_hint("set struct_size to sizeof the struct");
}

glm52_status struct_take(void *local, size_t bytes, const void *given, size_t first, const char *name)
{
    const unsigned char *byte = given;
    size_t size = size_of(given);
    uint32_t header[2];

    TRY(struct_check(given, first, name));
    for (size_t i = bytes; i < size; i++)
        if (byte[i]) {
            fail(GLM52_E_VERSION, "%s has a member at byte %zu that this library does not know", name, i);
            return fail_hint("leave it zero, or use the library that the header belongs to");
        }
    memcpy(header, given, sizeof header);
    if (header[1]) return fail(GLM52_E_INVALID, "%s.flags is %u, must be 0", name, header[1]);
    memcpy(local, given, size < bytes ? size : bytes);
    return GLM52_OK;
}

void struct_give(void *out, const void *value, size_t bytes)
{
    uint32_t size = size_of(out);

    if (size > bytes) size = (uint32_t)bytes;
    memcpy(out, value, size);
    memcpy(out, &size, sizeof size);
}
