/* The data room: packs are checked; text becomes documents, a split and a stream of packs, each a pure function. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "data/dataset.h"
#include "faults.h"
#include "tap.h"

static char folder[] = "/tmp/glm52-data-XXXXXX";
static char path[64], empty[] = "", bytes_tokenizer[] = "bytes", words_tokenizer[] = "words";
static struct host host;
static struct config config;

static void start(void)
{
    ck_assert(!host_open(&host, NULL));
    config = (struct config){.host = &host};
    config.model.vocab_size = 256;
    config.data.text = path;
    config.data.tokenizer = bytes_tokenizer;
    config.data.pack_tokens = 61;
    config.data.document_tokens = 23;
    config.data.held_out = 0.1;
    config.train.seed = 5;
}

static void finish(void)
{
    ck_assert_uint_eq(host.total, 0);
    remove(path);
}

static void write_text(const char *text, size_t bytes)
{
    ck_assert(!file_write_all(&host, path, text, bytes));
}

/* Lines "0000 aaa\n" of 5 to 29 bytes; every line names itself. Returns the whole. */
static char *numbered_lines(int lines)
{
    char *text = calloc((size_t)lines, 40), *at = text;

    for (int i = 0; i < lines; i++) {
        int tail = i * 7 % 25;
        at += sprintf(at, "%04d", i);
        memset(at, 'a' + i % 26, (size_t)tail);
        at += tail;
        *at++ = '\n';
    }
    write_text(text, (size_t)(at - text));
    return text;
}

static struct dataset *open_dataset(void)
{
    struct dataset *d = NULL;

    ck_assert_msg(!dataset_open(&host, &config, &d), "%s", glm52_error_message(glm52_error_last()));
    return d;
}

static void check_pack(const struct pack *p)
{
    ck_assert(!pack_validate(p, 256, 1 << 20));
    for (int64_t document = 0; document < p->documents; document++) {
        int64_t begin = p->cu_seqlens[document], end = p->cu_seqlens[document + 1];
        ck_assert_int_le(end - begin, 23);
        for (int64_t row = begin; row < end; row++) {
            ck_assert_int_eq(p->label[row], row + 1 < end ? p->token[row + 1] : PACK_NO_LABEL);
            ck_assert(p->mask[row] == 1);
        }
    }
}

static int same(const struct pack *a, const struct pack *b)
{
    return a->rows == b->rows && a->documents == b->documents &&
           !memcmp(a->token, b->token, (size_t)a->rows * sizeof *a->token) &&
           !memcmp(a->label, b->label, (size_t)a->rows * sizeof *a->label) &&
           !memcmp(a->cu_seqlens, b->cu_seqlens, (size_t)(a->documents + 1) * sizeof *a->cu_seqlens);
}

/* The last call's failure names `word` in its message or hint, and has the detail key = `key`. */
static void check_refused(const char *word, const char *key)
{
    const glm52_error *e = glm52_error_last();
    int named = strstr(glm52_error_message(e), word) || strstr(glm52_error_hint(e), word);

    ck_assert_msg(named, "%s (%s)", glm52_error_message(e), glm52_error_hint(e));
    ck_assert_str_eq(glm52_error_detail(e, "key"), key);
}

/* ---- packs ------------------------------------------------------------------------------------------- */

static void fill_pack(struct pack *p)
{
    static const int32_t cu[] = {0, 1, 4, 9};

    ck_assert(!pack_reserve(p, 9, 3));
    for (int i = 0; i < 9; i++) {
        p->token[i] = 10 + i;
        p->mask[i] = i == 2 ? 0 : 0.5f;
    }
    memcpy(p->cu_seqlens, cu, sizeof cu);
    p->rows = 9;
    p->documents = 3;
    pack_default_labels(p);
}

START_TEST(labels_are_the_next_token_of_the_document)
{
    static const int32_t expected[] = {-100, 12, 13, -100, 15, 16, 17, 18, -100};
    struct pack p;

    pack_init(&p, &host);
    fill_pack(&p);
    ck_assert_mem_eq(p.label, expected, sizeof expected);
    ck_assert(pack_loss_weight(&p) == 2.5);
    pack_free(&p);
    pack_free(&p);
}
END_TEST

START_TEST(packs_are_validated)
{
    struct pack p;

    pack_init(&p, &host);
    ck_assert(!pack_reserve(&p, 9, 3));
    ck_assert_int_eq(pack_validate(&p, 256, 1 << 20), GLM52_E_INVALID); /* empty */
    fill_pack(&p);
    ck_assert_int_eq(pack_validate(&p, 19, 1 << 20), GLM52_OK);
    ck_assert_int_eq(pack_validate(&p, 18, 1 << 20), GLM52_E_INVALID);
    ck_assert_str_eq(glm52_error_detail(glm52_error_last(), "position"), "8");
    p.label[4] = -1;
    ck_assert_int_eq(pack_validate(&p, 256, 1 << 20), GLM52_E_INVALID);
    fill_pack(&p);
    p.token[3] = -1;
    ck_assert_int_eq(pack_validate(&p, 256, 1 << 20), GLM52_E_INVALID);
    ck_assert_str_eq(glm52_error_detail(glm52_error_last(), "position"), "3");
    for (int i = 0; i < 4; i++) {
        fill_pack(&p);
        p.cu_seqlens[i] = i == 2 ? 1 : 8 - i;
        ck_assert_int_eq(pack_validate(&p, 256, 1 << 20), GLM52_E_INVALID);
    }
    for (int i = 0; i < 3; i++) {
        fill_pack(&p);
        p.mask[5] = ((float[]){-1, NAN, INFINITY})[i];
        ck_assert_int_eq(pack_validate(&p, 256, 1 << 20), GLM52_E_INVALID);
    }
    ck_assert_int_eq(pack_reserve(&p, 2, 3), GLM52_E_INVALID);
    pack_free(&p);
}
END_TEST

START_TEST(pairs_are_counted_as_by_hand)
{
    struct pack p;
    double causal, selected;

    pack_init(&p, &host);
    fill_pack(&p);
    pack_pairs(&p, 2, 0, &causal, &selected);
    ck_assert(causal == 1 + 6 + 15 && selected == 1 + 5 + 9);
    pack_pairs(&p, 100, 0, &causal, &selected);
    ck_assert(selected == causal);
    pack_pairs(&p, 2, 2, &causal, &selected); /* documents of 1, 3 and 5 rows, of which 0, 1 and 3 see */
    ck_assert(causal == 1 + 6 && selected == 1 + 5);
    pack_free(&p);
}
END_TEST

/* ---- datasets ---------------------------------------------------------------------------------------- */

START_TEST(a_pack_is_a_pure_function_of_its_number)
{
    char *text = numbered_lines(200);
    struct dataset *one = open_dataset(), *other = open_dataset();
    struct pack forward[150], p;
    int differing = 0;

    pack_init(&p, &host);
    for (int n = 0; n < 150; n++) { /* about 3400 tokens, 55 packs an epoch */
        pack_init(&forward[n], &host);
        ck_assert(!dataset_train_pack(one, (uint64_t)n, &forward[n]));
        ck_assert_int_eq(forward[n].rows, 61);
        check_pack(&forward[n]);
    }
    for (int i = 0, n = 3; i < 150; i++, n = (n + 71) % 150) {
        ck_assert(!dataset_train_pack(i % 2 ? one : other, (uint64_t)n, &p));
        ck_assert(same(&p, &forward[n]));
    }
    dataset_close(&other);
    config.train.seed = 6;
    other = open_dataset();
    for (int n = 0; n < 150; n++) {
        ck_assert(!dataset_train_pack(other, (uint64_t)n, &p));
        differing += !same(&p, &forward[n]);
        pack_free(&forward[n]);
    }
    ck_assert_int_gt(differing, 145);
    ck_assert_int_eq(dataset_train_pack(other, UINT64_MAX / 2, &p), GLM52_E_INVALID);
    pack_free(&p);
    dataset_close(&one);
    dataset_close(&other);
    dataset_close(&other);
    free(text);
}
END_TEST

/* Counts bytes of the training stream from token `begin` to `end`, and of all held-out packs. */
static void count_stream(struct dataset *d, uint64_t begin, uint64_t end, long counts[256])
{
    struct pack p;

    pack_init(&p, &host);
    for (uint64_t n = begin / 61; n * 61 < end; n++) {
        ck_assert(!dataset_train_pack(d, n, &p));
        for (uint64_t row = 0; row < 61; row++)
            if (n * 61 + row >= begin && n * 61 + row < end) counts[p.token[row]]++;
    }
    pack_free(&p);
}

static uint64_t count_held_out(struct dataset *d, long counts[256])
{
    struct pack p;
    uint64_t tokens = 0;

    pack_init(&p, &host);
    for (uint64_t n = 0; n < dataset_held_out_packs(d); n++) {
        ck_assert(!dataset_held_out_pack(d, n, &p));
        check_pack(&p);
        ck_assert_int_le(p.rows, 61);
        for (int64_t row = 0; row < p.rows; row++) counts[p.token[row]]++;
        tokens += (uint64_t)p.rows;
    }
    ck_assert_int_eq(dataset_held_out_pack(d, dataset_held_out_packs(d), &p), GLM52_E_INVALID);
    pack_free(&p);
    return tokens;
}

START_TEST(an_epoch_and_the_held_out_text_are_the_text)
{
    char *text = numbered_lines(300);
    struct dataset *d = open_dataset();
    uint64_t held_out, epoch;

    for (uint64_t e = 0; e < 3; e++) {
        long counts[256] = {0};
        held_out = count_held_out(d, counts);
        epoch = strlen(text) - held_out;
        count_stream(d, e * epoch, (e + 1) * epoch, counts);
        for (const char *c = text; *c; c++) counts[(unsigned char)*c]--;
        for (int i = 0; i < 256; i++) ck_assert_int_eq(counts[i], 0);
    }
    double share = (double)held_out / (double)strlen(text);
    ck_assert(share > 0.07 && share < 0.13);
    dataset_close(&d);
    free(text);
}
END_TEST

/* Marks the numbers of the lines that begin in a pack: a line begins a document or follows a line end. */
static void note_lines(const struct pack *p, char *seen)
{
    for (int64_t row = 0, document = 0; row + 4 < p->rows; row++) {
        int number = 0, digits = 0;

        if (row == p->cu_seqlens[document + 1]) document++;
        if (row != p->cu_seqlens[document] && p->token[row - 1] != '\n') continue;
        while (digits < 4 && p->token[row + digits] >= '0' && p->token[row + digits] <= '9')
            number = number * 10 + p->token[row + digits++] - '0';
        if (digits == 4) seen[number] = 1;
    }
}

START_TEST(held_out_lines_are_never_trained_on)
{
    char *text = numbered_lines(500), trained[10000] = {0}, held_out[10000] = {0};
    struct dataset *d = open_dataset();
    struct pack p;
    int both = 0, neither = 0;

    pack_init(&p, &host);
    for (uint64_t n = 0; n < 600; n++) {
        ck_assert(!dataset_train_pack(d, n, &p));
        note_lines(&p, trained);
    }
    for (uint64_t n = 0; n < dataset_held_out_packs(d); n++) {
        ck_assert(!dataset_held_out_pack(d, n, &p));
        note_lines(&p, held_out);
    }
    for (int i = 0; i < 500; i++) {
        both += trained[i] && held_out[i];
        neither += !trained[i] && !held_out[i];
    }
    ck_assert_int_eq(both, 0);
    ck_assert_int_eq(neither, 0);
    pack_free(&p);
    dataset_close(&d);
    free(text);
}
END_TEST

START_TEST(the_split_does_not_depend_on_the_seed)
{
    char *text = numbered_lines(100);
    struct dataset *one = open_dataset();
    struct pack a, b;

    config.train.seed = 99;
    struct dataset *other = open_dataset();
    pack_init(&a, &host);
    pack_init(&b, &host);
    ck_assert(dataset_held_out_packs(one) == dataset_held_out_packs(other));
    for (uint64_t n = 0; n < dataset_held_out_packs(one); n++) {
        ck_assert(!dataset_held_out_pack(one, n, &a) && !dataset_held_out_pack(other, n, &b));
        ck_assert(same(&a, &b));
    }
    pack_free(&a);
    pack_free(&b);
    dataset_close(&one);
    dataset_close(&other);
    free(text);
}
END_TEST

START_TEST(documents_keep_lines_whole_and_cut_long_ones)
{
    const char *text = "ab\ncd\nefghijk\nlmnopqrstuvwxyz\n\n1234";
    const char *documents[] = {"ab\ncd\n", "efghijk\n", "lmnopqrs", "tuvwxyz\n", "\n1234"};
    struct pack p;

    write_text(text, strlen(text));
    config.data.document_tokens = 8;
    config.data.pack_tokens = (int64_t)strlen(text);
    config.data.held_out = 0;
    struct dataset *d = open_dataset();
    pack_init(&p, &host);
    ck_assert(!dataset_train_pack(d, 0, &p));
    ck_assert_int_eq(p.documents, 5);
    ck_assert_uint_eq(dataset_held_out_packs(d), 0);
    for (int i = 0; i < 5; i++) {
        int found = 0;
        for (int64_t document = 0; document < 5; document++) {
            int64_t begin = p.cu_seqlens[document], length = p.cu_seqlens[document + 1] - begin;
            int equal = length == (int64_t)strlen(documents[i]);
            for (int64_t j = 0; equal && j < length; j++) equal = p.token[begin + j] == documents[i][j];
            found += equal;
        }
        ck_assert_int_eq(found, 1);
    }
    pack_free(&p);
    dataset_close(&d);
}
END_TEST

START_TEST(a_text_without_line_ends_or_with_zero_bytes_works)
{
    char text[700];
    struct pack p;

    for (int i = 0; i < 700; i++) text[i] = (char)(i * 37);
    write_text(text, sizeof text);
    config.data.document_tokens = 0; /* as long as a pack */
    struct dataset *d = open_dataset();
    pack_init(&p, &host);
    for (uint64_t n = 0; n < 40; n++) {
        ck_assert(!dataset_train_pack(d, n, &p));
        ck_assert(!pack_validate(&p, 256, 1 << 20));
    }
    pack_free(&p);
    dataset_close(&d);
}
END_TEST

START_TEST(bad_texts_are_refused_with_a_remedy)
{
    struct dataset *d = NULL;

    remove(path);
    ck_assert_int_eq(dataset_open(&host, &config, &d), GLM52_E_IO);
    check_refused(path, "data.text");
    write_text("", 0);
    ck_assert_int_eq(dataset_open(&host, &config, &d), GLM52_E_INVALID);
    check_refused("empty", "data.text");
    write_text("one line\n", 9);
    ck_assert_int_eq(dataset_open(&host, &config, &d), GLM52_E_INVALID);
    check_refused("less than one document", "data.held_out");
    config.data.held_out = 0;
    ck_assert_int_eq(dataset_open(&host, &config, &d), GLM52_E_INVALID);
    check_refused("at most 9", "data.text");
    config.data.text = folder;
    ck_assert_int_eq(dataset_open(&host, &config, &d), GLM52_E_IO);
    config.data.text = empty;
    ck_assert_int_eq(dataset_open(&host, &config, &d), GLM52_E_INVALID);
    check_refused("data.text", "data.text");
    ck_assert_ptr_null(d);
}
END_TEST

START_TEST(bad_options_are_refused)
{
    struct dataset *d = NULL;

    config.data.tokenizer = words_tokenizer;
    ck_assert_int_eq(dataset_open(&host, &config, &d), GLM52_E_UNSUPPORTED);
    check_refused("words", "data.tokenizer");
    start();
    config.model.vocab_size = 255;
    ck_assert_int_eq(dataset_open(&host, &config, &d), GLM52_E_INVALID);
    check_refused("255", "model.vocab_size");
    start();
    config.data.document_tokens = 62;
    ck_assert_int_eq(dataset_open(&host, &config, &d), GLM52_E_INVALID);
    check_refused("62", "data.document_tokens");
    start();
    config.data.pack_tokens = 0;
    ck_assert_int_eq(dataset_open(&host, &config, &d), GLM52_E_INVALID);
    check_refused("0", "data.pack_tokens");
    start();
    config.data.held_out = 1;
    ck_assert_int_eq(dataset_open(&host, &config, &d), GLM52_E_INVALID);
    check_refused("1", "data.held_out");
}
END_TEST

START_TEST(every_allocation_and_every_file_call_may_fail)
{
    char *text = numbered_lines(50);
    struct faults f;

    for (int fault = 0; fault < 2; fault++) {
        glm52_status status = GLM52_E_NOMEM;
        for (int k = 0; status; k++) {
            struct dataset *d = NULL;
            struct pack p;
            faults_open(&f);
            *(fault ? &f.fail_call : &f.fail_allocation) = k;
            f.error = EIO;
            pack_init(&p, &f.host);
            status = dataset_open(&f.host, &config, &d);
            if (!status) status = dataset_train_pack(d, 0, &p);
            ck_assert(status == GLM52_OK || status == (fault ? GLM52_E_IO : GLM52_E_NOMEM));
            pack_free(&p);
            dataset_close(&d);
            ck_assert_uint_eq(f.host.total, 0);
            ck_assert_int_eq(f.open_files, 0);
            ck_assert_int_lt(k, 40);
        }
    }
    free(text);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("data");
    TCase *packs = tcase_create("packs"), *datasets = tcase_create("datasets");

    if (!mkdtemp(folder)) return 1;
    snprintf(path, sizeof path, "%s/text.txt", folder);
    tcase_add_checked_fixture(packs, start, finish);
    tcase_add_test(packs, labels_are_the_next_token_of_the_document);
    tcase_add_test(packs, packs_are_validated);
    tcase_add_test(packs, pairs_are_counted_as_by_hand);
    suite_add_tcase(suite, packs);
    tcase_add_checked_fixture(datasets, start, finish);
    tcase_add_test(datasets, a_pack_is_a_pure_function_of_its_number);
    tcase_add_test(datasets, an_epoch_and_the_held_out_text_are_the_text);
    tcase_add_test(datasets, held_out_lines_are_never_trained_on);
    tcase_add_test(datasets, the_split_does_not_depend_on_the_seed);
    tcase_add_test(datasets, documents_keep_lines_whole_and_cut_long_ones);
    tcase_add_test(datasets, a_text_without_line_ends_or_with_zero_bytes_works);
    tcase_add_test(datasets, bad_texts_are_refused_with_a_remedy);
    tcase_add_test(datasets, bad_options_are_refused);
    tcase_add_test(datasets, every_allocation_and_every_file_call_may_fail);
    suite_add_tcase(suite, datasets);

    int status = run_tap(suite);
    rmdir(folder);
    return status;
}
