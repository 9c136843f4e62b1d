/* Text as training data, one token a byte.
 *
 * Documents  The text is cut at line ends into documents of at most data.document_tokens bytes: as many whole lines as
 *            fit; a line longer than that is cut.
 * Split      Every run of about 1 / data.held_out documents gives one, drawn by its number, to the held-out side:
 *            floor(documents * data.held_out) in all. The seed has no part in it, so that runs with different seeds
 *            are judged on the same text.
 * Training   Epoch e lays the training documents one after another in an order that is a function of (train.seed, e).
 *            The epochs one after another are the stream; pack n is its tokens n * pack_tokens and following. A
 *            document across the border of two packs becomes two documents: every token is seen once an epoch, and
 *            all that is lost is the label of the last token before the border.
 * Held out   Whole documents in the order of the text, as many as fit a pack: the held-out loss does not depend on
 *            data.pack_tokens. These packs may be shorter than pack_tokens. */
#include "data/dataset.h"

#include <stdio.h>
#include <string.h>

#include "base/random.h"

/* Larger files would need more than 2^32 documents of the usual size, and memory to hold them. */
#define TEXT_LIMIT (UINT64_C(1) << 40)

struct dataset {
    struct host *host;
    char *path, *text;
    size_t bytes;
    uint64_t seed;
    int64_t pack_tokens;

    uint32_t documents, training, held_out; /* training + held_out = documents */
    uint64_t *start;      /* [documents + 1] where a document begins in the text; last: bytes */
    uint32_t *member;     /* [documents] training documents, then the held-out ones, in text order */
    uint32_t *pack_begin; /* [held_out + 1] first entry of a held-out pack in the held-out part of member */
    uint32_t held_out_packs;

    uint64_t epoch_tokens, held_out_tokens;
    uint64_t epoch;         /* whose order the next two hold */
    uint32_t *order;        /* [training] documents in the order of the epoch */
    uint64_t *order_start;  /* [training + 1] where a document begins in the stream of the epoch */
};

/* ---- cutting the text -------------------------------------------------------------------------------- */

/* End of the document that begins at `begin`. */
static size_t document_end(const char *text, size_t bytes, size_t begin, size_t limit)
{
    size_t end = begin + limit;

    if (bytes - begin <= limit) return bytes;
    while (end > begin && text[end - 1] != '\n')
        end--;
    return end > begin ? end : begin + limit;
}

static uint64_t count_documents(const char *text, size_t bytes, size_t limit)
{
    uint64_t count = 0;

    for (size_t at = 0; at < bytes; at = document_end(text, bytes, at, limit))
        count++;
    return count;
}

static void cut_documents(struct dataset *d, size_t limit)
{
    uint32_t document = 0;

    for (size_t at = 0; at < d->bytes; at = document_end(d->text, d->bytes, at, limit))
        d->start[document++] = at;
    d->start[document] = d->bytes;
}

static uint64_t document_tokens(const struct dataset *d, uint32_t document)
{
    return d->start[document + 1] - d->start[document];
}

/* ---- the split --------------------------------------------------------------------------------------- */

/* Run number k ends with the last document i for which (i + 1) * share >= k + 1 first holds; one document of each full
 * run is held out. Fills member and the counts; held-out documents are gathered from the back. */
static void split(struct dataset *d, double share)
{
    struct random_key key = random_key(0, "data.held_out");
    uint32_t begin = 0, drawn = 0;

    for (uint32_t i = 0; i < d->documents; i++) {
        if (((double)i + 1) * share < (double)drawn + 1) continue;
        uint32_t pick = begin + (uint32_t)random_below(key, drawn, i + 1 - begin);

        for (uint32_t j = begin; j <= i; j++)
            if (j != pick)
                d->member[d->training++] = j;
        d->member[d->documents - ++drawn] = pick;
        begin = i + 1;
    }
    for (uint32_t j = begin; j < d->documents; j++)
        d->member[d->training++] = j;
    d->held_out = drawn;

    uint32_t *held_out = d->member + d->training;
    for (uint32_t i = 0; i < drawn / 2; i++) {
        uint32_t swap = held_out[i];

        held_out[i] = held_out[drawn - 1 - i];
        held_out[drawn - 1 - i] = swap;
    }
}

static void lay_held_out_packs(struct dataset *d)
{
    const uint32_t *held_out = d->member + d->training;
    int64_t tokens = 0;

    for (uint32_t i = 0; i < d->held_out; i++) {
        int64_t length = (int64_t)document_tokens(d, held_out[i]);

        if (i == 0 || tokens + length > d->pack_tokens) {
            d->pack_begin[d->held_out_packs++] = i;
            tokens = 0;
        }
        tokens += length;
        d->held_out_tokens += (uint64_t)length;
    }
    d->pack_begin[d->held_out_packs] = d->held_out;
}

/* ---- the order of an epoch --------------------------------------------------------------------------- */

static void lay_epoch(struct dataset *d, uint64_t epoch)
{
    char name[48];
    uint64_t at = 0;

    snprintf(name, sizeof name, "data.epoch.%llu", (unsigned long long)epoch);
    struct random_key key = random_key(d->seed, name);

    memcpy(d->order, d->member, d->training * sizeof *d->order);
    for (uint32_t i = d->training; i-- > 1;) {
        uint32_t j = (uint32_t)random_below(key, i, (uint64_t)i + 1), swap = d->order[i];

        d->order[i] = d->order[j];
        d->order[j] = swap;
    }
    for (uint32_t i = 0; i < d->training; i++) {
        d->order_start[i] = at;
        at += document_tokens(d, d->order[i]);
    }
    d->order_start[d->training] = at;
    d->epoch = epoch;
}

/* Place in the order of the current epoch that holds token `offset` of its stream. */
static uint32_t find_place(const struct dataset *d, uint64_t offset)
{
    uint32_t low = 0, high = d->training;

    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;

        if (d->order_start[middle] <= offset)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* ---- packs ------------------------------------------------------------------------------------------- */

static void add_document(struct pack *p, const char *text, int64_t length)
{
    for (int64_t i = 0; i < length; i++)
        p->token[p->rows + i] = (unsigned char)text[i];
    p->rows += length;
    p->cu_seqlens[++p->documents] = (int32_t)p->rows;
}

static void finish_pack(struct pack *p)
{
    for (int64_t row = 0; row < p->rows; row++)
        p->mask[row] = 1;
    pack_default_labels(p);
}

/* Adds the training documents of the current epoch from token `offset` on until the pack or the epoch ends. */
static void fill_from_epoch(const struct dataset *d, uint64_t offset, struct pack *out)
{
    for (uint32_t place = find_place(d, offset); place < d->training && out->rows < d->pack_tokens; place++) {
        uint64_t skip = offset > d->order_start[place] ? offset - d->order_start[place] : 0;
        int64_t length = (int64_t)(document_tokens(d, d->order[place]) - skip);
        int64_t room = d->pack_tokens - out->rows;

        add_document(out, d->text + d->start[d->order[place]] + skip, length < room ? length : room);
    }
}

glm52_status dataset_train_pack(struct dataset *d, uint64_t number, struct pack *out)
{
    if (number > UINT64_MAX / (uint64_t)d->pack_tokens - 1)
        return fail(GLM52_E_INVALID, "pack %llu is past the end of what can be counted",
                    (unsigned long long)number);
    TRY(pack_reserve(out, d->pack_tokens, d->pack_tokens));

    uint64_t at = number * (uint64_t)d->pack_tokens;
    while (out->rows < d->pack_tokens) {
        uint64_t token = at + (uint64_t)out->rows;

        if (token / d->epoch_tokens != d->epoch)
            lay_epoch(d, token / d->epoch_tokens);
        fill_from_epoch(d, token % d->epoch_tokens, out);
    }
    finish_pack(out);
    return GLM52_OK;
}

uint64_t dataset_held_out_packs(const struct dataset *d)
{
    return d->held_out_packs;
}

glm52_status dataset_held_out_pack(struct dataset *d, uint64_t number, struct pack *out)
{
    if (number >= d->held_out_packs)
        return fail(GLM52_E_INVALID, "there is no held-out pack %llu: the held-out text has %lu packs",
                    (unsigned long long)number, (unsigned long)d->held_out_packs);
    TRY(pack_reserve(out, d->pack_tokens, d->pack_tokens));
    for (uint32_t i = d->pack_begin[number]; i < d->pack_begin[number + 1]; i++) {
        uint32_t document = d->member[d->training + i];

        add_document(out, d->text + d->start[document], (int64_t)document_tokens(d, document));
    }
    finish_pack(out);
    return GLM52_OK;
}

/* ---- opening ----------------------------------------------------------------------------------------- */

static glm52_status check_options(const struct config *c)
{
    if (!c->data.text || !*c->data.text) {
        fail(GLM52_E_INVALID, "data.text is not set: there is no text to train on");
        fail_hint("set data.text to the path of a text file");
        return fail_detail("key", "data.text");
    }
    if (strcmp(c->data.tokenizer, "bytes") != 0) {
        fail(GLM52_E_UNSUPPORTED, "data.tokenizer = %s is not available; \"bytes\" is", c->data.tokenizer);
        return fail_detail("key", "data.tokenizer");
    }
    if (c->model.vocab_size < 256) {
        fail(GLM52_E_INVALID, "model.vocab_size = %lld is too small for data.tokenizer = bytes, which has 256 tokens",
             (long long)c->model.vocab_size);
        return fail_detail("key", "model.vocab_size");
    }
    if (c->data.pack_tokens < 1 || c->data.pack_tokens > INT32_MAX) {
        fail(GLM52_E_INVALID, "data.pack_tokens = %lld is not in 1 .. %d", (long long)c->data.pack_tokens,
             (int)INT32_MAX);
        return fail_detail("key", "data.pack_tokens");
    }
    if (c->data.document_tokens < 0 || c->data.document_tokens > c->data.pack_tokens) {
        fail(GLM52_E_INVALID, "data.document_tokens = %lld is not in 0 .. data.pack_tokens = %lld",
             (long long)c->data.document_tokens, (long long)c->data.pack_tokens);
        return fail_detail("key", "data.document_tokens");
    }
    if (!(c->data.held_out >= 0 && c->data.held_out < 1)) {
        fail(GLM52_E_INVALID, "data.held_out = %g is not a share in [0, 1)", c->data.held_out);
        return fail_detail("key", "data.held_out");
    }
    return GLM52_OK;
}

static glm52_status read_text(struct dataset *d, const struct config *c)
{
    if (file_read_all(d->host, c->data.text, TEXT_LIMIT, &d->text, &d->bytes)) {
        fail_prefix("data.text");
        if (glm52_error_status(glm52_error_last()) == GLM52_E_IO)
            fail_hint("set data.text to a text file that exists and can be read");
        return fail_detail("key", "data.text");
    }
    if (d->bytes > 0) return GLM52_OK;
    fail(GLM52_E_INVALID, "data.text = %s is an empty file", c->data.text);
    fail_hint("name a file with at least data.pack_tokens = %lld bytes of text", (long long)c->data.pack_tokens);
    fail_detail("path", "%s", c->data.text);
    return fail_detail("key", "data.text");
}

static glm52_status take_tables(struct dataset *d, size_t limit)
{
    uint64_t documents = count_documents(d->text, d->bytes, limit);

    if (documents >= UINT32_MAX) {
        fail(GLM52_E_UNSUPPORTED, "data.text = %s has %llu documents; %lu is the most", d->path,
             (unsigned long long)documents, (unsigned long)UINT32_MAX - 1);
        fail_hint("raise data.document_tokens, or cut the file");
        return fail_detail("key", "data.document_tokens");
    }
    d->documents = (uint32_t)documents;

    size_t count = d->documents;
    d->start = host_alloc(d->host, (count + 1) * sizeof *d->start, MEMORY_HOST);
    d->member = host_alloc(d->host, count * sizeof *d->member, MEMORY_HOST);
    d->pack_begin = host_alloc(d->host, (count + 1) * sizeof *d->pack_begin, MEMORY_HOST);
    d->order = host_alloc(d->host, count * sizeof *d->order, MEMORY_HOST);
    d->order_start = host_alloc(d->host, (count + 1) * sizeof *d->order_start, MEMORY_HOST);
    if (!d->start || !d->member || !d->pack_begin || !d->order || !d->order_start)
        return GLM52_E_NOMEM;
    return GLM52_OK;
}

static glm52_status check_split(const struct dataset *d, const struct config *c)
{
    if (c->data.held_out > 0 && d->held_out == 0) {
        fail(GLM52_E_INVALID, "data.held_out = %g of the %lu documents in %s is less than one document",
             c->data.held_out, (unsigned long)d->documents, d->path);
        if (d->documents > 1)
            fail_hint("set data.held_out to at least %.3g, or to 0 for no held-out text",
                      1.001 / (double)d->documents);
        else
            fail_hint("set data.held_out to 0, or name a longer text");
        return fail_detail("key", "data.held_out");
    }
    if (d->epoch_tokens < (uint64_t)d->pack_tokens) {
        fail(GLM52_E_INVALID, "data.text = %s leaves %llu tokens to train on, less than one pack of %lld", d->path,
             (unsigned long long)d->epoch_tokens, (long long)d->pack_tokens);
        if (d->epoch_tokens > 0)
            fail_hint("name a longer text, or set data.pack_tokens to at most %llu",
                      (unsigned long long)d->epoch_tokens);
        else
            fail_hint("name a longer text, or lower data.held_out = %g", c->data.held_out);
        return fail_detail("key", "data.text");
    }
    return GLM52_OK;
}

static glm52_status fill(struct dataset *d, const struct config *c)
{
    size_t limit = (size_t)(c->data.document_tokens ? c->data.document_tokens : c->data.pack_tokens);

    d->seed = (uint64_t)c->train.seed;
    d->pack_tokens = c->data.pack_tokens;
    d->path = host_strdup(d->host, c->data.text);
    if (!d->path) return GLM52_E_NOMEM;
    TRY(read_text(d, c));
    TRY(take_tables(d, limit));
    cut_documents(d, limit);
    split(d, c->data.held_out);
    lay_held_out_packs(d);
    d->epoch_tokens = d->bytes - d->held_out_tokens;
    TRY(check_split(d, c));
    lay_epoch(d, 0);
    return GLM52_OK;
}

glm52_status dataset_open(struct host *host, const struct config *config, struct dataset **out)
{
    TRY(check_options(config));

    struct dataset *d = host_calloc(host, sizeof *d, MEMORY_HOST);
    if (!d) return GLM52_E_NOMEM;
    d->host = host;

    glm52_status status = fill(d, config);
    if (status) {
        dataset_close(&d);
        return status;
    }
    *out = d;
    return GLM52_OK;
}

void dataset_close(struct dataset **dataset)
{
    struct dataset *d = *dataset;
    size_t count;

    if (!d) return;
    count = d->documents;
    host_free(d->host, d->order_start, (count + 1) * sizeof *d->order_start, MEMORY_HOST);
    host_free(d->host, d->order, count * sizeof *d->order, MEMORY_HOST);
    host_free(d->host, d->pack_begin, (count + 1) * sizeof *d->pack_begin, MEMORY_HOST);
    host_free(d->host, d->member, count * sizeof *d->member, MEMORY_HOST);
    host_free(d->host, d->start, (count + 1) * sizeof *d->start, MEMORY_HOST);
    host_free(d->host, d->text, d->bytes + 1, MEMORY_HOST);
    host_strfree(d->host, d->path);
    host_free(d->host, d, sizeof *d, MEMORY_HOST);
    *dataset = NULL;
}

void dataset_describe(const struct dataset *d, char *line, size_t bytes)
{
    const char *name = strrchr(d->path, '/');

    snprintf(line, bytes, "%s: %lu documents, %llu tokens to train on, %llu held out in %lu packs",
             name ? name + 1 : d->path, (unsigned long)d->documents, (unsigned long long)d->epoch_tokens,
             (unsigned long long)d->held_out_tokens, (unsigned long)d->held_out_packs);
}
