/* The config room without hub files: the schema, setting and reading back, presets, JSON, validation. */
#include "config/config.h"

#include <locale.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "config/schema.h"
#include "faults.h"
#include "tap.h"

static struct faults faults;
static struct config c;

static void make(void)
{
    faults_open(&faults);
    ck_assert(!config_init(&c, &faults.host));
}

static void drop(void)
{
    config_free(&c);
    ck_assert_uint_eq(faults.host.total, 0);
}

/* The last failure is this status, message and key. */
static void check_failure(glm52_status status, glm52_status expected, const char *message, const char *key)
{
    const glm52_error *e = glm52_error_last();

    ck_assert_int_eq(status, expected);
    ck_assert_str_eq(glm52_error_message(e), message);
    ck_assert_ptr_nonnull(glm52_error_detail(e, "key"));
    ck_assert_str_eq(glm52_error_detail(e, "key"), key);
}

static void check_value(const char *key, const char *expected)
{
    char *value;

    ck_assert_msg(!config_get(&c, key, &value), "%s", glm52_error_message(glm52_error_last()));
    ck_assert_str_eq(value, expected);
    host_strfree(&faults.host, value);
}

static void set(const char *key, const char *value)
{
    ck_assert_msg(!config_set(&c, key, value), "%s", glm52_error_message(glm52_error_last()));
}

START_TEST(every_option_is_described)
{
    glm52_option_info info = {.struct_size = sizeof info};
    uint32_t count = 0;

    for (; !config_describe(count, &info); count++) {
        ck_assert(*info.key && *info.type && *info.summary);
        ck_assert(info.range && info.default_value);
        for (uint32_t i = 0; i < count; i++) ck_assert_str_ne(options[i].key, info.key);
    }
    ck_assert_int_eq(count, option_count);
    ck_assert_int_eq(config_describe(count, &info), GLM52_E_INVALID);
}
END_TEST

START_TEST(a_fresh_config_has_the_defaults_and_no_model)
{
    for (int i = 0; i < option_count; i++)
        if (*options[i].initial) ck_assert(!config_set(&c, options[i].key, options[i].initial));
    check_value("optim.lr", "0.0002");
    check_value("device", "cpu");
    check_failure(config_validate(&c), GLM52_E_INVALID, "model.vocab_size is not set", "model.vocab_size");
    ck_assert_ptr_nonnull(strstr(glm52_error_hint(glm52_error_last()), "model.preset"));
    ck_assert(!config_validate_training(&c));
}
END_TEST

START_TEST(values_are_read_and_shown)
{
    static const char *const good[][3] = {
        {"train.steps", "1e3", "1000"},          {"train.steps", " 7 ", "7"},
        {"train.seed", "9223372036854775807", "9223372036854775807"},
        {"optim.lr", "2e-4", "0.0002"},          {"optim.lr", "1", "1"},
        {"optim.lr", "0.1", "0.1"},              {"optim.lr", "0.30000000000000004", "0.30000000000000004"},
        {"optim.schedule", "wsd", "wsd"},        {"out", "3", "3"},
        {"out", "a \"b\" \n\t\xc3\xa9", "a \"b\" \n\t\xc3\xa9"},
        {"model.norm_topk_prob", "false", "false"},
        {"model.eos_token_id", "5", "5"},        {"model.eos_token_id", "[5, 6]", "5,6"},
        {"model.eos_token_id", "5, 6 ,7", "5,6,7"}, {"model.eos_token_id", "", ""},
        {"model.indexer_types", "full, shared", "full,shared"},
        {"model.indexer_types", "[\"full\"]", "full"}, {"model.indexer_types", "[]", ""},
        {"model.pad_token_id", "-1", "-1"},
    };

    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        set(good[i][0], good[i][1]);
        check_value(good[i][0], good[i][2]);
    }
    ck_assert_double_eq(c.optim.lr, 0.1 + 0.2);
    ck_assert_int_eq(c.optim.schedule, SCHEDULE_WSD);
}
END_TEST

START_TEST(wrong_values_name_key_value_and_remedy)
{
    static const char *const bad[][3] = {
        {"train.steps", "2.5", "train.steps = 2.5 is not an integer; nearest: 2"},
        {"train.steps", "many", "train.steps = many is not an integer"},
        {"train.steps", "", "train.steps =  is not an integer"},
        {"train.microbatches", "0", "train.microbatches = 0 is out of range 1 .. 65536; nearest: 1"},
        {"train.steps", "-3", "train.steps = -3 is out of range 0 .. 1000000000; nearest: 0"},
        {"train.steps", "99999999999999999999",
         "train.steps = 1e+20 is out of range 0 .. 1000000000; nearest: 1000000000"},
        {"train.steps", "[1, 2, 3, \"0123456789012345678901234567890123456789012345678901234567890123456789\"]",
         "train.steps = [1,2,3,\"... is not an integer"},
        {"train.steps", "true", "train.steps = true is not an integer"},
        {"train.steps", "[1]", "train.steps = [1] is not an integer"},
        {"optim.lr", "nan", "optim.lr = nan is not a number"},
        {"optim.lr", "1e999", "optim.lr = 1e999 is not a number"},
        {"optim.lr", "1e-3x", "optim.lr = 1e-3x is not a number"},
        {"optim.lr", "\xff", "optim.lr = \xff is not a number"},
        {"optim.lr", "-1", "optim.lr = -1 is out of range 0 .. 100; nearest: 0"},
        {"optim.lr", "101.5", "optim.lr = 101.5 is out of range 0 .. 100; nearest: 100"},
        {"optim.beta1", "1", "optim.beta1 = 1 is out of range 0 .. below 1"},
        {"data.held_out", "1.0", "data.held_out = 1 is out of range 0 .. below 1"},
        {"optim.epsilon", "0", "optim.epsilon = 0 is out of range above 0 .. 1"},
        {"model.norm_topk_prob", "1", "model.norm_topk_prob = 1 is neither true nor false"},
        {"optim.schedule", "cosin",
         "optim.schedule = cosin is not one of constant, cosine, linear, wsd; did you mean cosine?"},
        {"optim.schedule", "zzzzzzzz", "optim.schedule = zzzzzzzz is not one of constant, cosine, linear, wsd"},
        {"model.preset", "tinny", "model.preset = tinny is not one of tiny, bench, glm52; did you mean tiny?"},
        {"data.tokenizer", "", "data.tokenizer =  is not one of bytes"},
        {"out", "\xff", "out = \xff is not UTF-8"},
        {"model.indexer_types", "full,sharde",
         "model.indexer_types[1] = sharde is not one of full, shared; did you mean shared?"},
        {"model.eos_token_id", "1,-2", "model.eos_token_id[1] = -2 is out of range 0 .. 4194303; nearest: 0"},
        {"model.eos_token_id", "1,,2", "model.eos_token_id[1] =  is not an integer"},
        {"model.eos_token_id", "1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17",
         "model.eos_token_id has 17 entries; at most 16 are possible"},
    };

    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        check_failure(config_set(&c, bad[i][0], bad[i][1]), GLM52_E_INVALID, bad[i][2], bad[i][0]);
    check_value("train.steps", "100");
    check_value("model.eos_token_id", "");
}
END_TEST

START_TEST(a_long_value_is_cut_between_characters)
{
    char value[400];

    for (size_t i = 0; i + 2 < sizeof value; i += 2) memcpy(value + i, "\xc3\xa9", 2);
    value[sizeof value - 2] = 0;
    config_set(&c, "train.steps", value);
    json_t *message = json_string(glm52_error_message(glm52_error_last()));
    ck_assert_ptr_nonnull(message); /* still UTF-8 */
    ck_assert_ptr_nonnull(strstr(json_string_value(message), "\xc3\xa9... is not an integer"));
    json_decref(message);
}
END_TEST

START_TEST(unknown_keys_get_a_suggestion)
{
    static const char *const unknown[][2] = {
        {"optim.shedule", "optim.shedule: no such option; did you mean optim.schedule?"},
        {"opt.lr", "opt.lr: no such option; did you mean optim.lr?"},
        {"lr", "lr: no such option; did you mean optim.lr?"},
        {"shedule", "shedule: no such option; did you mean optim.schedule?"},
        {"train.lr", "train.lr: no such option; did you mean optim.lr?"},
        {"qwertyuiop", "qwertyuiop: no such option"},
        {"", ": no such option"},
    };

    for (size_t i = 0; i < sizeof unknown / sizeof *unknown; i++)
        check_failure(config_set(&c, unknown[i][0], "1"), GLM52_E_INVALID, unknown[i][1], unknown[i][0]);
    check_failure(config_set(&c, "optim", "1"), GLM52_E_INVALID, "optim is a section; name one of its options",
                  "optim");
}
END_TEST

START_TEST(presets_are_valid_and_give_way_to_chosen_values)
{
    char preset[16];

    for (int i = 0; word_at(option_find("model.preset")->range, i, preset, sizeof preset); i++) {
        set("model.preset", preset);
        ck_assert_msg(!config_validate(&c), "%s: %s", preset, glm52_error_message(glm52_error_last()));
    }
    set("model.hidden_size", "96");
    set("model.preset", "tiny");
    check_value("model.hidden_size", "96");
    check_value("model.q_lora_rank", "96");
    set("model.q_lora_rank", "40");
    set("model.preset", "bench");
    check_value("model.q_lora_rank", "40");
    check_value("model.eos_token_id", "");
    set("model.preset", "");
    check_value("model.vocab_size", "0");
    check_value("model.hidden_size", "96");
}
END_TEST

START_TEST(glm52_and_bench_have_their_layers)
{
    static const int bench[] = {0, 1, 2, 2, 2, 2, 6, 6};
    int full = 0;

    set("model.preset", "bench");
    ck_assert(!config_validate(&c));
    for (int i = 0; i < 8; i++) ck_assert_int_eq(config_indexer_source(&c.model, i), bench[i]);
    set("model.preset", "glm52");
    ck_assert(!config_validate(&c));
    for (int i = 0; i < 78; i++) {
        ck_assert_int_eq(c.model.mlp_layer_types[i], i < 3 ? MLP_DENSE : MLP_SPARSE);
        full += c.model.indexer_types[i] == INDEXER_FULL;
    }
    ck_assert_int_eq(full, 21);
    ck_assert_int_eq(config_indexer_source(&c.model, 5), 2);
    ck_assert_int_eq(config_indexer_source(&c.model, 77), 74);
}
END_TEST

START_TEST(json_is_nested_or_dotted_and_strict)
{
    static const char *const bad[][3] = {
        {"{\"optim\": {\"shedule\": 1}}", "optim.shedule: no such option; did you mean optim.schedule?",
         "optim.shedule"},
        {"{\"optm\": {\"lr\": 1}}", "optm.lr: no such option; did you mean optim.lr?", "optm.lr"},
        {"{\"optim\": 3}", "optim = 3 is no table of options", "optim"},
        {"{\"parallel\": {}}", "parallel: no such option", "parallel"},
        {"{\"optim\": {\"lr\": {\"a\": 1}}}", "optim.lr = {\"a\":1} is not a number", "optim.lr"},
        {"{\"optim\": {\"lr\": null}}", "optim.lr = null is not a number", "optim.lr"},
        {"{\"optim\": {\"lr\": \"1\"}}", "optim.lr = 1 is not a number", "optim.lr"},
        {"{\"out\": 3}", "out = 3 is not a string", "out"},
        {"{\"optim.lr\": 1, \"optim\": {\"lr\": 2}}", "optim.lr is given twice", "optim.lr"},
        {"{\"train\": {\"steps\": 5, \"seed\": -1}}",
         "train.seed = -1 is out of range 0 .. 9223372036854775807; nearest: 0", "train.seed"},
        {"[1]", "config = [1] is no JSON object of options", "config"},
    };

    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        check_failure(config_load_json(&c, bad[i][0]), GLM52_E_INVALID, bad[i][1], bad[i][2]);
    check_value("train.steps", "100");
    ck_assert(!config_load_json(&c,
                                "{\"model\": {\"hidden_size\": 64, \"preset\": \"tiny\", \"eos_token_id\": [1, 2]},"
                                " \"optim.lr\": 1, \"train\": {\"steps\": 1e3}, \"device\": \"meta\"}"));
    check_value("model.hidden_size", "64");
    check_value("model.vocab_size", "256");
    check_value("model.eos_token_id", "1,2");
    check_value("train.steps", "1000");
    check_value("device", "meta");
}
END_TEST

START_TEST(damaged_json_says_where)
{
    char *deep = malloc(200001);

    ck_assert_int_eq(config_load_json(&c, "{\"optim\":\n {\"lr\": }}"), GLM52_E_CORRUPT);
    ck_assert_ptr_nonnull(strstr(glm52_error_message(glm52_error_last()), "line 2, column 9"));
    ck_assert_int_eq(config_load_json(&c, "{\"optim\": {\"lr\": 1"), GLM52_E_CORRUPT);
    ck_assert_int_eq(config_load_json(&c, ""), GLM52_E_CORRUPT);
    ck_assert_int_eq(config_load_json(&c, "{} x"), GLM52_E_CORRUPT);
    ck_assert_int_eq(config_load_json(&c, "{\"out\": \"a\", \"out\": \"b\"}"), GLM52_E_CORRUPT);
    ck_assert_int_eq(config_load_json(&c, "{\"out\": \"\\u0000\"}"), GLM52_E_CORRUPT);
    ck_assert_int_eq(config_load_json(&c, "{\"optim\": {\"lr\": 1e999}}"), GLM52_E_CORRUPT);
    ck_assert_int_eq(config_load_json(&c, "{\"optim\": {\"lr\": NaN}}"), GLM52_E_CORRUPT);
    memset(deep, '[', 200000);
    deep[200000] = 0;
    ck_assert_int_eq(config_load_json(&c, deep), GLM52_E_CORRUPT);
    free(deep);
}
END_TEST

START_TEST(impossible_shapes_are_refused)
{
    static const char *const bad[][3] = {
        {"model.num_experts_per_tok", "9",
         "model.num_experts_per_tok = 9 is more than model.n_routed_experts = 8; nearest: 8"},
        {"model.qk_rope_head_dim", "15",
         "model.qk_rope_head_dim = 15 is odd, but rotation pairs its elements; nearest: 16"},
        {"model.index_head_dim", "8",
         "model.index_head_dim = 8 has no room for the rotary part, model.qk_rope_head_dim = 16; nearest: 16"},
        {"model.indexer_types", "shared,full,full,full,full,full",
         "model.indexer_types[0] = shared, but no earlier layer has a selection to share"},
        {"model.indexer_types", "full,full", "model.indexer_types has 2 entries, but model.num_hidden_layers = 6"},
        {"model.index_skip_topk_offset", "0",
         "model.index_skip_topk_offset = 0 leaves the first layer without an indexer; nearest: 1"},
        {"model.mlp_layer_types", "dense", "model.mlp_layer_types has 1 entries, but model.num_hidden_layers = 6"},
        {"model.first_k_dense_replace", "7",
         "model.first_k_dense_replace = 7 is more than model.num_hidden_layers = 6; nearest: 6"},
        {"model.eos_token_id", "3,256", "model.eos_token_id = 256 is outside the vocabulary, 0 .. 255"},
        {"model.pad_token_id", "256", "model.pad_token_id = 256 is outside the vocabulary; nearest: 255"},
        {"data.pack_tokens", "4096",
         "data.pack_tokens = 4096 is more than train.microbatch_tokens = 2048; nearest: 2048"},
        {"data.document_tokens", "2049",
         "data.document_tokens = 2049 is more than data.pack_tokens = 2048; nearest: 2048"},
        {"optim.warmup", "101", "optim.warmup = 101 is longer than train.steps = 100; nearest: 100"},
        {"optim.schedule", "wsd",
         "optim.wsd_decay_steps = 0 must be 1 .. train.steps = 100 with optim.schedule = wsd; nearest: 1"},
        {"optim.min_lr", "1", "optim.min_lr = 1 is more than optim.lr = 0.0002"},
        {"model.hub", "there", "model.hub = there and model.preset = tiny both give the model's shape"},
    };

    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct config tried;
        set("model.preset", "tiny");
        ck_assert(!config_copy(&tried, &c));
        ck_assert(!config_set(&tried, bad[i][0], bad[i][1]));
        ck_assert_int_eq(config_validate(&tried), GLM52_E_INVALID);
        ck_assert_str_eq(glm52_error_message(glm52_error_last()), bad[i][2]);
        ck_assert_ptr_nonnull(glm52_error_detail(glm52_error_last(), "key"));
        config_free(&tried);
    }
}
END_TEST

START_TEST(data_must_fit_the_model)
{
    set("model.preset", "tiny");
    set("data.text", "text");
    ck_assert(!config_validate(&c));
    set("model.max_position_embeddings", "1000");
    check_failure(
        config_validate(&c), GLM52_E_INVALID,
        "data.pack_tokens = 2048 lets documents grow longer than model.max_position_embeddings = 1000; nearest: 1000",
        "data.pack_tokens");
    set("data.document_tokens", "1000");
    ck_assert(!config_validate(&c));
    set("model.vocab_size", "255");
    check_failure(config_validate(&c), GLM52_E_INVALID,
                  "model.vocab_size = 255 is too small for data.tokenizer = bytes; nearest: 256", "model.vocab_size");
}
END_TEST

START_TEST(assignments_to_experts_are_counted_in_32_bits)
{
    set("model.preset", "tiny");
    set("model.n_routed_experts", "256");
    set("model.num_experts_per_tok", "256");
    set("train.microbatch_tokens", "8388607");
    ck_assert(!config_validate(&c));
    set("train.microbatch_tokens", "8388608");
    check_failure(config_validate(&c), GLM52_E_INVALID,
                  "train.microbatch_tokens = 8388608 times model.num_experts_per_tok = 256 is more than 2147483647 "
                  "assignments; nearest: 8388607",
                  "train.microbatch_tokens");
}
END_TEST

START_TEST(layer_lists_follow_the_formulas_unless_given)
{
    set("model.preset", "tiny");
    set("model.num_hidden_layers", "12");
    ck_assert(!config_validate(&c));
    ck_assert_int_eq(config_indexer_source(&c.model, 9), 6);
    set("model.num_hidden_layers", "2");
    ck_assert(!config_validate(&c));
    set("model.mlp_layer_types", "sparse,dense");
    check_failure(config_validate(&c), GLM52_E_INVALID,
                  "model.first_k_dense_replace = 1 contradicts model.mlp_layer_types[0] = sparse",
                  "model.first_k_dense_replace");
    set("model.preset", "");
    check_value("model.mlp_layer_types", "sparse,dense");
    set("model.num_hidden_layers", "1");
    set("model.indexer_types", "full");
    check_value("model.indexer_types", "full");
}
END_TEST

START_TEST(a_config_that_names_a_hub_directory_has_no_shape_yet)
{
    set("model.hub", "somewhere");
    ck_assert(!config_validate(&c));
}
END_TEST

/* A value of the option that is not its default. */
static const char *other_value(const struct option *o, char value[64])
{
    switch (o->type) {
    case OPTION_INTEGER:
        snprintf(value, 64, "%lld", (long long)(strcmp(o->key, "train.seed") ? o->most : INT64_MAX));
        break;
    case OPTION_NUMBER: snprintf(value, 64, "%.17g", o->low + (o->high - o->low) / 3); break;
    case OPTION_BOOLEAN: snprintf(value, 64, "%s", strcmp(o->initial, "true") ? "true" : "false"); break;
    case OPTION_INTEGERS: snprintf(value, 64, "3,0,4194303"); break;
    case OPTION_LAYERS:
        snprintf(value, 64, "%s", strstr(o->range, "full") ? "full,shared,full" : "sparse,dense,dense");
        break;
    case OPTION_CHOICE: word_at(o->range, 1, value, 64); break;
    case OPTION_STRING:
        if (*o->range) word_at(o->range, 0, value, 64);
        else snprintf(value, 64, "a \"q\\u\" \x01 \xe2\x82\xac");
        break;
    }
    return value;
}

START_TEST(a_dump_brings_every_option_back)
{
    char value[64], *first, *second;

    for (int i = 0; i < option_count; i++) set(options[i].key, other_value(&options[i], value));
    ck_assert(!config_dump(&c, 0, &first));
    config_free(&c);
    ck_assert(!config_init(&c, &faults.host));
    ck_assert_msg(!config_load_json(&c, first), "%s", glm52_error_message(glm52_error_last()));
    for (int i = 0; i < option_count; i++) {
        other_value(&options[i], value);
        if (options[i].type == OPTION_NUMBER) {
            char *shown;
            ck_assert(!config_get(&c, options[i].key, &shown));
            ck_assert(strtod(shown, NULL) == strtod(value, NULL));
            host_strfree(&faults.host, shown);
        } else {
            check_value(options[i].key, value);
        }
    }
    ck_assert(!config_dump(&c, 0, &second));
    ck_assert_str_eq(first, second);
    host_strfree(&faults.host, first);
    host_strfree(&faults.host, second);
}
END_TEST

START_TEST(numbers_do_not_depend_on_the_locale)
{
    char *dump, text[NUMBER_TEXT];

    if (!setlocale(LC_NUMERIC, "de_DE.UTF-8") && !setlocale(LC_NUMERIC, "fr_FR.UTF-8"))
        return; /* not on every machine */
    set("optim.lr", "0.25");
    ck_assert_double_eq(c.optim.lr, 0.25);
    check_value("optim.lr", "0.25");
    ck_assert_str_eq(number_text(1e-5, text), "1e-05");
    ck_assert(!config_dump(&c, 0, &dump));
    ck_assert(!config_load_json(&c, dump));
    host_strfree(&faults.host, dump);
    setlocale(LC_NUMERIC, "C");
}
END_TEST

/* Everything one can do, until the first failure. */
static glm52_status exercise(struct config *x, char **dump)
{
    TRY(config_set(x, "optim.schedule", "linear"));
    TRY(config_set(x, "model.preset", "tiny"));
    TRY(config_load_json(x, "{\"out\": \"b\", \"model\": {\"eos_token_id\": [1], \"preset\": \"bench\"}}"));
    TRY(config_validate(x));
    TRY(config_get(x, "model.eos_token_id", dump));
    host_strfree(x->host, *dump);
    *dump = NULL;
    return config_dump(x, 0, dump);
}

START_TEST(running_out_of_memory_leaks_nothing)
{
    glm52_status status = GLM52_E_NOMEM;
    int64_t k = 0;

    for (; status; k++) {
        struct faults f;
        struct config x;
        char *dump = NULL;
        faults_open(&f);
        f.fail_allocation = k;
        status = config_init(&x, &f.host);
        if (!status) {
            status = exercise(&x, &dump);
            host_strfree(&f.host, dump);
            config_free(&x);
        }
        ck_assert(!status || status == GLM52_E_NOMEM);
        ck_assert_uint_eq(f.host.total, 0);
        ck_assert_int_lt(k, 10000);
    }
    ck_assert_int_gt(k, 20);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("config");
    TCase *options_case = tcase_create("config");

    tcase_add_checked_fixture(options_case, make, drop);
    tcase_add_test(options_case, every_option_is_described);
    tcase_add_test(options_case, a_fresh_config_has_the_defaults_and_no_model);
    tcase_add_test(options_case, values_are_read_and_shown);
    tcase_add_test(options_case, wrong_values_name_key_value_and_remedy);
    tcase_add_test(options_case, a_long_value_is_cut_between_characters);
    tcase_add_test(options_case, unknown_keys_get_a_suggestion);
    tcase_add_test(options_case, presets_are_valid_and_give_way_to_chosen_values);
    tcase_add_test(options_case, glm52_and_bench_have_their_layers);
    tcase_add_test(options_case, json_is_nested_or_dotted_and_strict);
    tcase_add_test(options_case, damaged_json_says_where);
    tcase_add_test(options_case, impossible_shapes_are_refused);
    tcase_add_test(options_case, data_must_fit_the_model);
    tcase_add_test(options_case, assignments_to_experts_are_counted_in_32_bits);
    tcase_add_test(options_case, layer_lists_follow_the_formulas_unless_given);
    tcase_add_test(options_case, a_config_that_names_a_hub_directory_has_no_shape_yet);
    tcase_add_test(options_case, a_dump_brings_every_option_back);
    tcase_add_test(options_case, numbers_do_not_depend_on_the_locale);
    tcase_add_test(options_case, running_out_of_memory_leaks_nothing);
    suite_add_tcase(suite, options_case);
    return run_tap(suite);
}
