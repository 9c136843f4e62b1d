#include "base/dtype.h"

static const struct {
    glm52_dtype type;
    size_t bytes;
    const char *name;
} dtypes[] = {
    {GLM52_DTYPE_F32, 4, "F32"}, {GLM52_DTYPE_BF16, 2, "BF16"}, {GLM52_DTYPE_F64, 8, "F64"},
    {GLM52_DTYPE_I32, 4, "I32"}, {GLM52_DTYPE_I64, 8, "I64"},   {GLM52_DTYPE_U8, 1, "U8"},
    {GLM52_DTYPE_F8_E4M3, 1, "F8_E4M3"}, {GLM52_DTYPE_F16, 2, "F16"},
};

enum { DTYPES = sizeof dtypes / sizeof *dtypes };

size_t dtype_size(glm52_dtype type)
{
    for (int i = 0; i < DTYPES; i++)
        if (dtypes[i].type == type) return dtypes[i].bytes;
    return 0;
}

const char *dtype_name(glm52_dtype type)
{
    for (int i = 0; i < DTYPES; i++)
        if (dtypes[i].type == type) return dtypes[i].name;
    return "?";
}

glm52_dtype dtype_from_name(const char *name)
{
    for (int i = 0; i < DTYPES; i++)
        if (!strcmp(dtypes[i].name, name)) return dtypes[i].type;
    return 0;
}
