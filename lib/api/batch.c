#include <stdlib.h>
#include <string.h>

#include "api/object.h"
#include "base/dtype.h"

glm52_status glm52_batch_create(glm52_context *context, glm52_batch **out)
{
    CHECK(context, CLASS_CONTEXT);
    CHECK_POINTER(out);
    glm52_batch *b = object_create(context, CLASS_BATCH, sizeof *b);
    if (!b) return GLM52_E_NOMEM;
    pack_init(&b->pack, &context->host);
    *out = b;
    return GLM52_OK;
}

glm52_batch *glm52_batch_ref(glm52_batch *self)
{
    return object_ref(self, CLASS_BATCH);
}

void batch_clear_outputs(glm52_batch *batch)
{
    struct host *host = &batch->object.context->host;

    while (batch->outputs) {
        struct output *o = batch->outputs;
        batch->outputs = o->next;
        host_free(host, o->view.data, o->view.bytes, MEMORY_HOST);
        host_free(host, o, sizeof *o, MEMORY_HOST);
    }
}

void glm52_batch_unref(glm52_batch **self)
{
    glm52_batch *b;

    if (!object_unref(self, CLASS_BATCH, &b)) return;
    batch_clear_outputs(b);
    pack_free(&b->pack);
    object_destroy(&b->object);
}

/* Element i of an integer field; ids beyond 32 bits become one that every check refuses. */
static int32_t integer_at(glm52_dtype dtype, const void *values, uint64_t i)
{
    if (dtype == GLM52_DTYPE_I32) return ((const int32_t *)values)[i];
    int64_t value = ((const int64_t *)values)[i];
    return value < INT32_MIN || value > INT32_MAX ? INT32_MIN : (int32_t)value;
}

static glm52_status wrong_dtype(const char *field, glm52_dtype dtype, const char *wanted)
{
    return fail(GLM52_E_INVALID, "field %s cannot be %s; it must be %s", field, dtype_name(dtype), wanted);
}

static glm52_status wrong_count(const char *field, uint64_t count, uint64_t wanted)
{
    fail(GLM52_E_INVALID, "field %s has %llu values, the batch has %llu tokens", field, (unsigned long long)count,
         (unsigned long long)wanted);
    return fail_hint("set tokens first, then fields of the same length");
}

static glm52_status set_tokens(glm52_batch *self, glm52_dtype dtype, const void *values, uint64_t count)
{
    struct pack *p = &self->pack;

    if (!count || count > INT32_MAX)
        return fail(GLM52_E_INVALID, "field tokens has %llu values, must have 1 .. %d", (unsigned long long)count,
                    INT32_MAX);
    TRY(pack_reserve(p, (int64_t)count, 1));
    for (uint64_t i = 0; i < count; i++) {
        p->token[i] = integer_at(dtype, values, i);
        p->mask[i] = 1;
    }
    p->rows = (int64_t)count;
    p->documents = 1;
    p->cu_seqlens[0] = 0;
    p->cu_seqlens[1] = (int32_t)count;
    self->has_labels = 0;
    return GLM52_OK;
}

/* Room for more documents is taken in a pack of its own, so that a failure changes nothing. */
static glm52_status set_documents(glm52_batch *self, glm52_dtype dtype, const void *values, uint64_t count)
{
    struct pack *old = &self->pack, grown;

    if (count < 2 || count > (uint64_t)old->rows + 1)
        return fail(GLM52_E_INVALID, "field cu_seqlens has %llu values, must have 2 .. tokens + 1 = %lld",
                    (unsigned long long)count, (long long)old->rows + 1);
    for (uint64_t i = 0; i < count; i++) {
        int32_t value = integer_at(dtype, values, i), before = i ? integer_at(dtype, values, i - 1) : -1;
        if (value > before && (i || !value) && (i + 1 < count || value == old->rows)) continue;
        fail(GLM52_E_INVALID, "cu_seqlens[%llu] = %d: it must rise strictly from 0 to the number of tokens, %lld",
             (unsigned long long)i, value, (long long)old->rows);
        return fail_hint("give the first row of each document, and the number of tokens at the end");
    }
    pack_init(&grown, old->host);
    TRY(pack_reserve(&grown, old->rows, (int64_t)count - 1));
    grown.rows = old->rows;
    grown.documents = (int64_t)count - 1;
    memcpy(grown.token, old->token, (size_t)old->rows * sizeof *old->token);
    memcpy(grown.mask, old->mask, (size_t)old->rows * sizeof *old->mask);
    memcpy(grown.label, old->label, (size_t)old->rows * sizeof *old->label);
    grown.counted = old->counted;
    old->counted = NULL;
    for (uint64_t i = 0; i < count; i++) grown.cu_seqlens[i] = integer_at(dtype, values, i);
    pack_free(old);
    *old = grown;
    return GLM52_OK;
}

static void set_mask(const struct pack *p, glm52_dtype dtype, const void *values, float *mask)
{
    for (int64_t i = 0; i < p->rows; i++)
        mask[i] = dtype == GLM52_DTYPE_F32 ? ((const float *)values)[i] : (float)((const uint8_t *)values)[i];
}

static glm52_status set_field(glm52_batch *self, const char *field, glm52_dtype dtype, const void *values,
                              uint64_t count)
{
    int integers = dtype == GLM52_DTYPE_I32 || dtype == GLM52_DTYPE_I64, tokens = !strcmp(field, "tokens");
    struct pack *p = &self->pack;

    if (tokens || !strcmp(field, "cu_seqlens") || !strcmp(field, "labels")) {
        if (!integers) return wrong_dtype(field, dtype, "I32 or I64");
    } else if (!strcmp(field, "loss_mask") || !strcmp(field, "row_mask")) {
        if (dtype != GLM52_DTYPE_F32 && dtype != GLM52_DTYPE_U8) return wrong_dtype(field, dtype, "F32 or U8");
    } else {
        fail(GLM52_E_INVALID, "a batch has no field %.64s", field);
        return fail_hint("fields are tokens, cu_seqlens, labels, loss_mask and row_mask");
    }
    if (!tokens && strcmp(field, "cu_seqlens") && count != (uint64_t)p->rows)
        return wrong_count(field, count, (uint64_t)p->rows);
    if (!tokens && !p->rows) return fail(GLM52_E_STATE, "set tokens before %s", field);
    if (tokens) return set_tokens(self, dtype, values, count);
    if (!strcmp(field, "cu_seqlens")) return set_documents(self, dtype, values, count);
    if (!strcmp(field, "loss_mask")) {
        set_mask(p, dtype, values, p->mask);
        return GLM52_OK;
    }
    if (!strcmp(field, "row_mask")) {
        if (!p->counted && !(p->counted = host_alloc(p->host, (size_t)p->rows * sizeof *p->counted, MEMORY_HOST)))
            return GLM52_E_NOMEM;
        set_mask(p, dtype, values, p->counted);
        return GLM52_OK;
    }
    for (uint64_t i = 0; i < count; i++) p->label[i] = integer_at(dtype, values, i);
    self->has_labels = 1;
    return GLM52_OK;
}

glm52_status glm52_batch_set(glm52_batch *self, const char *field, glm52_dtype dtype, const void *values,
                             uint64_t count)
{
    CHECK(self, CLASS_BATCH);
    CHECK_POINTER(field);
    CHECK_POINTER(values);
    TRY(set_field(self, field, dtype, values, count));
    batch_clear_outputs(self);
    return GLM52_OK;
}

glm52_status glm52_batch_tokens(glm52_batch *self, uint64_t *tokens, uint64_t *documents)
{
    CHECK(self, CLASS_BATCH);
    if (tokens) *tokens = (uint64_t)self->pack.rows;
    if (documents) *documents = (uint64_t)self->pack.documents;
    return GLM52_OK;
}

static void ready(glm52_batch *batch)
{
    if (!batch->has_labels && batch->pack.rows) pack_default_labels(&batch->pack);
}

glm52_status glm52_batch_get(glm52_batch *self, const char *name, glm52_view *out)
{
    CHECK(self, CLASS_BATCH);
    CHECK_POINTER(name);
    CHECK_STRUCT(out, glm52_view, bytes);
    struct pack *p = &self->pack;
    glm52_view view = {.struct_size = sizeof view, .dtype = GLM52_DTYPE_I32, .dimensions = 1, .shape = {p->rows}};

    ready(self);
    for (struct output *o = self->outputs; o; o = o->next)
        if (!strcmp(name, o->name)) {
            struct_give(out, &o->view, sizeof o->view);
            return GLM52_OK;
        }
    if (!strcmp(name, "tokens")) {
        view.data = p->token;
    } else if (!strcmp(name, "labels")) {
        view.data = p->label;
    } else if (!strcmp(name, "loss_mask")) {
        view.data = p->mask;
        view.dtype = GLM52_DTYPE_F32;
    } else if (!strcmp(name, "cu_seqlens")) {
        view.data = p->cu_seqlens;
        view.shape[0] = p->documents + 1;
    } else {
        fail(GLM52_E_INVALID, "the batch has no value %.64s", name);
        return fail_hint("name it in glm52_model_forward(), or ask for tokens, cu_seqlens, labels or loss_mask");
    }
    view.bytes = (uint64_t)view.shape[0] * dtype_size(view.dtype);
    struct_give(out, &view, sizeof view);
    return GLM52_OK;
}

glm52_status batch_packs(glm52_batch *const *batches, uint32_t count, const struct pack ***out, struct host *host)
{
    if (!count) return fail(GLM52_E_INVALID, "no batch given");
    CHECK_POINTER(batches);
    for (uint32_t i = 0; i < count; i++) CHECK(batches[i], CLASS_BATCH);
    const struct pack **packs = host_alloc(host, count * sizeof *packs, MEMORY_HOST);
    if (!packs) return GLM52_E_NOMEM;
    for (uint32_t i = 0; i < count; i++) {
        ready(batches[i]);
        packs[i] = &batches[i]->pack;
    }
    *out = packs;
    return GLM52_OK;
}
