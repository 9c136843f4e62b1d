/* The library's error detail and accounting, which live on its side; see ops/cuda.h. */
#include "device/entry.cuh"

#include <cstdarg>
#include <cstdio>

static const struct cuda_services *library;

void use_services(const struct cuda_services *services)
{
    library = services;
}

extern "C" glm52_status fail(glm52_status status, const char *format, ...)
{
    char message[1024];
    va_list args;

    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
    return library->fail(status, message);
}

extern "C" glm52_status fail_hint(const char *format, ...)
{
    char hint[512];
    va_list args;

    va_start(args, format);
    vsnprintf(hint, sizeof hint, format, args);
    va_end(args);
    return library->fail_hint(hint);
}

extern "C" void host_account(struct host *host, enum memory_class of, int64_t bytes)
{
    library->account(host, of, bytes);
}
