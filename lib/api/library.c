/* Functions without a handle. */
#include <dlfcn.h>
#include <string.h>

#include "base/error.h"

#if GLM52_CUDA
#define DEVICES_BUILT " cuda"
#else
#define DEVICES_BUILT ""
#endif

const char *glm52_version(void)
{
    return GLM52_VERSION;
}

int32_t glm52_abi_version(void)
{
    return GLM52_ABI_VERSION;
}

const char *glm52_build_info(void)
{
    return "glm52 " GLM52_VERSION ", compiler " __VERSION__ ", devices cpu meta" DEVICES_BUILT;
}

int32_t glm52_feature(const char *name)
{
    static const struct {
        const char *name;
        int32_t present;
    } features[] = {{"cuda", GLM52_CUDA}, {"failpoints", GLM52_FAILPOINTS}, {"checked", GLM52_CHECKED}};

    for (size_t i = 0; name && i < sizeof features / sizeof *features; i++)
        if (!strcmp(name, features[i].name)) return features[i].present;
    return 0;
}

const char *glm52_status_name(glm52_status status)
{
    static const char *const names[] = {"GLM52_OK",        "GLM52_E_NOMEM",   "GLM52_E_INVALID",
                                        "GLM52_E_STATE",   "GLM52_E_HANDLE",  "GLM52_E_IO",
                                        "GLM52_E_CORRUPT", "GLM52_E_VERSION", "GLM52_E_UNSUPPORTED",
                                        "GLM52_E_DEVICE",  "GLM52_E_COMM",    "GLM52_E_CANCELLED",
                                        "GLM52_E_TIMEOUT", "GLM52_E_NUMERIC", "GLM52_E_CALLBACK",
                                        "GLM52_E_AGAIN",   "GLM52_E_INTERNAL"};

    return status <= 0 && status > -(int)(sizeof names / sizeof *names) ? names[-status] : "unknown";
}

/* The module this code is in, whichever way it was loaded. */
void *glm52_get_proc(const char *name)
{
    Dl_info here;

    if (!name || strncmp(name, "glm52_", 6) || !dladdr((void *)(uintptr_t)glm52_version, &here)) return NULL;
    void *self = dlopen(here.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    if (!self) self = dlopen(NULL, RTLD_LAZY); /* linked into the program itself */
    void *found = self ? dlsym(self, name) : NULL;
    if (self) dlclose(self);
    return found;
}
