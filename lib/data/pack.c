/* Packed rows in host memory: storage, default labels, checks, and the number of attention pairs they cause. */
#include "data/pack.h"

#include <math.h>

void pack_init(struct pack *p, struct host *host)
{
    *p = (struct pack){.host = host};
}

static void free_rows(struct pack *p)
{
    host_free(p->host, p->token, (size_t)p->capacity * sizeof *p->token, MEMORY_HOST);
    host_free(p->host, p->label, (size_t)p->capacity * sizeof *p->label, MEMORY_HOST);
    host_free(p->host, p->mask, (size_t)p->capacity * sizeof *p->mask, MEMORY_HOST);
    if (p->counted) host_free(p->host, p->counted, (size_t)p->rows * sizeof *p->counted, MEMORY_HOST);
    p->token = p->label = NULL;
    p->mask = p->counted = NULL;
    p->capacity = 0;
}

static void free_documents(struct pack *p)
{
    host_free(p->host, p->cu_seqlens, (size_t)(p->document_capacity + 1) * sizeof *p->cu_seqlens,
              MEMORY_HOST);
    p->cu_seqlens = NULL;
    p->document_capacity = 0;
}

void pack_free(struct pack *p)
{
    free_rows(p);
    free_documents(p);
    p->rows = p->documents = 0;
}

static int new_rows(struct pack *p, int64_t rows)
{
    size_t count = (size_t)rows;

    p->capacity = rows;
    p->token = host_alloc(p->host, count * sizeof *p->token, MEMORY_HOST);
    p->label = host_alloc(p->host, count * sizeof *p->label, MEMORY_HOST);
    p->mask = host_alloc(p->host, count * sizeof *p->mask, MEMORY_HOST);
    return p->token && p->label && p->mask;
}

static int new_documents(struct pack *p, int64_t documents)
{
    p->document_capacity = documents;
    p->cu_seqlens = host_alloc(p->host, (size_t)(documents + 1) * sizeof *p->cu_seqlens, MEMORY_HOST);
    return p->cu_seqlens != NULL;
}

/* The old contents stay valid if there is no memory for the new ones. */
glm52_status pack_reserve(struct pack *p, int64_t rows, int64_t documents)
{
    if (rows < 0 || rows > INT32_MAX || documents < 0 || documents > rows)
        return fail(GLM52_E_INVALID, "a pack of %lld tokens in %lld documents is impossible", (long long)rows,
                    (long long)documents);
    struct pack grown = {.host = p->host};
    int more_rows = !p->token || rows > p->capacity,
        more_documents = !p->cu_seqlens || documents > p->document_capacity;
    if ((more_rows && !new_rows(&grown, rows)) || (more_documents && !new_documents(&grown, documents))) {
        pack_free(&grown);
        return GLM52_E_NOMEM;
    }
    if (more_rows) {
        free_rows(p);
        p->token = grown.token;
        p->label = grown.label;
        p->mask = grown.mask;
        p->capacity = rows;
    }
    if (more_documents) {
        free_documents(p);
        p->cu_seqlens = grown.cu_seqlens;
        p->document_capacity = documents;
    }
    if (p->counted) host_free(p->host, p->counted, (size_t)p->rows * sizeof *p->counted, MEMORY_HOST);
    p->counted = NULL;
    p->rows = p->documents = 0;
    p->cu_seqlens[0] = 0;
    return GLM52_OK;
}

void pack_default_labels(struct pack *p)
{
    for (int64_t document = 0; document < p->documents; document++) {
        int64_t last = p->cu_seqlens[document + 1] - 1;

        for (int64_t row = p->cu_seqlens[document]; row < last; row++)
            p->label[row] = p->token[row + 1];
        p->label[last] = PACK_NO_LABEL;
    }
}

double pack_loss_weight(const struct pack *p)
{
    double weight = 0;

    for (int64_t row = 0; row < p->rows; row++)
        if (p->label[row] != PACK_NO_LABEL)
            weight += (double)p->mask[row];
    return weight;
}

static glm52_status validate_documents(const struct pack *p)
{
    if (p->rows < 1 || p->documents < 1)
        return fail(GLM52_E_INVALID, "the batch is empty: %lld tokens in %lld documents", (long long)p->rows,
                    (long long)p->documents);
    if (p->cu_seqlens[0] != 0)
        return fail(GLM52_E_INVALID, "cu_seqlens starts with %d, not 0", (int)p->cu_seqlens[0]);
    for (int64_t i = 1; i <= p->documents; i++)
        if (p->cu_seqlens[i] <= p->cu_seqlens[i - 1])
            return fail(GLM52_E_INVALID, "cu_seqlens does not rise: entry %lld is %d after %d", (long long)i,
                        (int)p->cu_seqlens[i], (int)p->cu_seqlens[i - 1]);
    if (p->cu_seqlens[p->documents] != p->rows)
        return fail(GLM52_E_INVALID, "cu_seqlens ends with %d, but the batch has %lld tokens",
                    (int)p->cu_seqlens[p->documents], (long long)p->rows);
    return GLM52_OK;
}

static glm52_status outside(const char *what, int64_t row, int64_t id, int64_t vocabulary)
{
    fail(GLM52_E_INVALID, "%s at position %lld is %lld, outside the vocabulary of %lld", what, (long long)row,
         (long long)id, (long long)vocabulary);
    return fail_detail("position", "%lld", (long long)row);
}

static glm52_status validate_weight(const char *field, const float *weight, int64_t row)
{
    if (isfinite(weight[row]) && weight[row] >= 0) return GLM52_OK;
    fail(GLM52_E_INVALID, "%s at position %lld is %g; a weight is finite and not negative", field, (long long)row,
         (double)weight[row]);
    return fail_detail("position", "%lld", (long long)row);
}

static glm52_status validate_lengths(const struct pack *p, int64_t longest)
{
    for (int64_t i = 0; i < p->documents; i++) {
        int64_t length = p->cu_seqlens[i + 1] - p->cu_seqlens[i];
        if (length <= longest) continue;
        fail(GLM52_E_INVALID, "document %lld has %lld tokens, model.max_position_embeddings = %lld", (long long)i,
             (long long)length, (long long)longest);
        return fail_hint("cut the document");
    }
    return GLM52_OK;
}

/* Tokens first: labels may have been made from them. */
glm52_status pack_validate(const struct pack *p, int64_t vocabulary, int64_t longest)
{
    TRY(validate_documents(p));
    TRY(validate_lengths(p, longest));
    for (int64_t row = 0; row < p->rows; row++)
        if (p->token[row] < 0 || p->token[row] >= vocabulary) return outside("token", row, p->token[row], vocabulary);
    for (int64_t row = 0; row < p->rows; row++) {
        int32_t label = p->label[row];
        if (label != PACK_NO_LABEL && (label < 0 || label >= vocabulary)) {
            outside("label", row, label, vocabulary);
            return fail_hint("a row without a label has the label %d", PACK_NO_LABEL);
        }
        TRY(validate_weight("loss_mask", p->mask, row));
        if (p->counted) TRY(validate_weight("row_mask", p->counted, row));
    }
    return GLM52_OK;
}

void pack_pairs(const struct pack *p, int64_t k, int64_t blind, double *causal, double *selected)
{
    *causal = *selected = 0;
    for (int64_t document = 0; document < p->documents; document++) {
        double length = fmax(0, (double)(p->cu_seqlens[document + 1] - p->cu_seqlens[document] - blind));
        double dense = fmin(length, (double)k); /* queries that see no more than k keys */

        *causal += length * (length + 1) / 2;
        *selected += dense * (dense + 1) / 2 + (length - dense) * (double)k;
    }
}
