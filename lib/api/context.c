#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "api/object.h"

static glm52_status take_options(const glm52_context_options *given, glm52_context_options *o)
{
    memset(o, 0, sizeof *o);
    o->struct_size = sizeof *o;
    if (!given) return GLM52_OK;
    TRY(struct_take(o, sizeof *o, given, SIZE_UP_TO(glm52_context_options, log_user), "glm52_context_options"));
    if (o->reserved0) return fail(GLM52_E_INVALID, "glm52_context_options.reserved0 is %u, must be 0", o->reserved0);
    if (o->threads < 0 || o->threads > 4096)
        return fail(GLM52_E_INVALID, "glm52_context_options.threads is %d, must be 0 .. 4096", o->threads);
    return GLM52_OK;
}

/* Number of the GPU in "cuda" or "cuda:N"; -1: neither. */
static int cuda_index(const char *device)
{
    char *end;
    long index;

    if (!strcmp(device, "cuda")) return 0;
    if (strncmp(device, "cuda:", 5) || device[5] < '0' || device[5] > '9') return -1;
    index = strtol(device + 5, &end, 10);
    return *end || index > 4096 ? -1 : (int)index;
}

static glm52_status open_cuda(glm52_context *c, int index)
{
    TRY(stream_open_cuda(&c->stream, &c->host, index));
    cuda_describe(index, c->device, sizeof c->device);
    return GLM52_OK;
}

static glm52_status open_device(glm52_context *c, const char *device, int threads)
{
    int index;

    if (!strcmp(device, "auto")) {
        if (!open_cuda(c, 0)) return GLM52_OK;
        host_log(&c->host, GLM52_LOG_NOTICE, "device \"auto\": cpu, since %s", glm52_error_message(glm52_error_last()));
        device = "cpu";
    }
    if (!strcmp(device, "cpu")) {
        TRY(stream_open_cpu(&c->stream, &c->host, threads));
        snprintf(c->device, sizeof c->device, "cpu, %d threads", c->stream.threads);
        return GLM52_OK;
    }
    if (!strcmp(device, "meta")) {
        TRY(stream_open_meta(&c->stream, &c->host));
        c->stream.threads = threads ? threads : omp_get_max_threads();
        snprintf(c->device, sizeof c->device, "meta: counts memory and FLOPs, computes nothing");
        return GLM52_OK;
    }
    if ((index = cuda_index(device)) >= 0)
        return open_cuda(c, index) ? fail_prefix("device \"%.32s\"", device) : GLM52_OK;
    fail(GLM52_E_INVALID, "device \"%.32s\" is unknown", device);
    return fail_hint("use \"cpu\", \"meta\", \"cuda\", \"cuda:1\" or \"auto\"");
}

glm52_status glm52_context_create(const glm52_context_options *options, glm52_context **out)
{
    glm52_context_options o;
    struct host host;

    CHECK_POINTER(out);
    TRY(take_options(options, &o));
    TRY(host_open(&host, &o));
    glm52_context *c = object_memory(&host, sizeof *c);
    if (!c) return GLM52_E_NOMEM;
    memcpy(&c->host, &host, sizeof host);
    c->object.magic = MAGIC;
    c->object.class = CLASS_CONTEXT;
    c->object.references = 1;
    c->object.bytes = sizeof *c;
    glm52_status status = open_device(c, o.device ? o.device : "cpu", o.threads);
    if (status)
        object_bury(&c->host, &c->object);
    else
        *out = c;
    return status;
}

glm52_context *glm52_context_ref(glm52_context *self)
{
    return object_ref(self, CLASS_CONTEXT);
}

void glm52_context_unref(glm52_context **self)
{
    glm52_context *c;

    if (!object_unref(self, CLASS_CONTEXT, &c)) return;
    stream_close(&c->stream);
    object_bury(&c->host, &c->object);
}

void glm52_context_cancel(glm52_context *self)
{
    if (object_is(self, CLASS_CONTEXT)) atomic_store(&self->host.cancelled, 1);
}

int32_t glm52_context_withdraw_cancel(glm52_context *self)
{
    return object_is(self, CLASS_CONTEXT) && atomic_exchange(&self->host.cancelled, 0);
}

glm52_status glm52_context_describe_device(glm52_context *self, const char **out)
{
    CHECK(self, CLASS_CONTEXT);
    CHECK_POINTER(out);
    *out = self->device;
    return GLM52_OK;
}

glm52_status glm52_context_memory(glm52_context *self, uint64_t *now, uint64_t *peak)
{
    CHECK(self, CLASS_CONTEXT);
    if (now) *now = self->host.total;
    if (peak) *peak = self->host.peak;
    return GLM52_OK;
}

int32_t glm52_context_device_count(const char *kind)
{
    if (kind && !strcmp(kind, "cuda")) return cuda_device_count();
    return kind && (!strcmp(kind, "cpu") || !strcmp(kind, "meta"));
}
