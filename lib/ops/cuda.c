/* Finds and opens libglm52-cuda.so: beside the file this code is in, else wherever the
 * loader looks. Once open, it stays. */
#include "ops/cuda.h"
#include "ops/cpu/cpu.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static const char LIBRARY[] = "libglm52-cuda.so";

static glm52_status say(glm52_status status, const char *message)
{
    return fail(status, "%s", message);
}

static glm52_status say_hint(const char *hint)
{
    return fail_hint("%s", hint);
}

static const struct cuda_services services = {say, say_hint, host_account};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const struct cuda_backend *backend;

/* The file beside this code, if there is one; what keeps it from opening goes to `why`. */
static void *open_library(char *why, size_t size)
{
    char path[4096] = "";
    const char *slash = NULL;
    Dl_info here;
    void *library;

    if (dladdr((void *)(uintptr_t)stream_open_cuda, &here)) slash = strrchr(here.dli_fname, '/');
    if (slash && slash - here.dli_fname < (ptrdiff_t)(sizeof path - sizeof LIBRARY))
        snprintf(path, sizeof path, "%.*s/%s", (int)(slash - here.dli_fname), here.dli_fname, LIBRARY);
    library = dlopen(*path && !access(path, F_OK) ? path : LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (!library) snprintf(why, size, "%s", dlerror());
    return library;
}

static glm52_status find_backend(void)
{
    char why[512];
    void *library = open_library(why, sizeof why);
    cuda_backend_function *enter = NULL;
    const struct cuda_backend *found;

    if (!library) {
        fail(GLM52_E_UNSUPPORTED, "the CUDA back end cannot be opened: %s", why);
        return fail_hint("install %s beside libglm52, and the CUDA libraries it needs; or use device \"cpu\"", LIBRARY);
    }
    *(void **)&enter = dlsym(library, CUDA_BACKEND_SYMBOL);
    found = enter ? enter(&services) : NULL;
    if (found && found->table_bytes == sizeof(struct ops) && !strcmp(found->version, GLM52_VERSION)) {
        backend = found;
        return GLM52_OK;
    }
    fail(GLM52_E_VERSION, "%s is of version %s, the library of version " GLM52_VERSION, LIBRARY,
         found ? found->version : "unknown");
    dlclose(library);
    return fail_hint("install both from one build");
}

static glm52_status need_backend(void)
{
    glm52_status status = GLM52_OK;

    pthread_mutex_lock(&lock);
    if (!backend) status = find_backend();
    pthread_mutex_unlock(&lock);
    return status;
}

glm52_status stream_open_cuda(struct stream *s, struct host *host, int index)
{
    TRY(need_backend());
    TRY(backend->open(s, host, index));
    s->threads = cpu_threads(0);
    return GLM52_OK;
}

glm52_status stream_plan_cuda(struct stream *s, size_t *workspace)
{
    TRY(need_backend());
    backend->plan(s, workspace);
    return GLM52_OK;
}

int cuda_device_count(void)
{
    return need_backend() ? 0 : backend->device_count();
}

void cuda_describe(int index, char *text, size_t bytes)
{
    if (need_backend())
        snprintf(text, bytes, "cuda:%d", index);
    else
        backend->describe(index, text, bytes);
}
