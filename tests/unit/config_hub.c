/* Hub config files: every golden one, what is refused, what is kept, and the way back. */
#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "config/config.h"
#include "config/schema.h"
#include "faults.h"
#include "scratch.h"
#include "tap.h"

static struct faults faults;
static struct config c;
static json_t *plain; /* a valid file to damage */
static char noticed[512];
static int notices;

static const char *golden(const char *name)
{
    static char path[512];

    snprintf(path, sizeof path, "%s/%s", getenv("GOLDEN"), name);
    return path;
}

static void notice(void *user, glm52_log_level level, const char *message)
{
    (void)user;
    ck_assert_int_eq(level, GLM52_LOG_NOTICE);
    snprintf(noticed, sizeof noticed, "%s", message);
    notices++;
}

static void make(void)
{
    faults_open(&faults);
    faults.host.log = notice;
    notices = 0;
    ck_assert(!config_init(&c, &faults.host));
    plain = json_load_file(golden("ckpt_bf16/config.json"), 0, NULL);
    ck_assert_ptr_nonnull(plain);
}

static void drop(void)
{
    json_decref(plain);
    config_free(&c);
    ck_assert_uint_eq(faults.host.total, 0);
}

static glm52_status load(const json_t *file)
{
    char *text = json_dumps(file, JSON_ENCODE_ANY);
    glm52_status status = config_load_hub_text(&c, text, strlen(text), "there");

    free(text);
    return status;
}

/* The plain file with the keys of `patch` in place of its own. */
static json_t *patched(const char *patch)
{
    json_t *file = json_deep_copy(plain), *changes = json_loads(patch, 0, NULL);

    ck_assert_ptr_nonnull(changes);
    ck_assert(!json_object_update(file, changes));
    json_decref(changes);
    return file;
}

static glm52_status load_patched(const char *patch)
{
    json_t *file = patched(patch);
    glm52_status status = load(file);

    json_decref(file);
    return status;
}

static glm52_status load_without(const char *key)
{
    json_t *file = json_deep_copy(plain);

    ck_assert(!json_object_del(file, key));
    glm52_status status = load(file);
    json_decref(file);
    return status;
}

static const char *message(void)
{
    return glm52_error_message(glm52_error_last());
}

static char *dump(int hub)
{
    char *text;

    ck_assert_msg(!config_dump(&c, hub, &text), "%s", message());
    return text;
}

static void set(const char *key, const char *value)
{
    ck_assert_msg(!config_set(&c, key, value), "%s", message());
}

/* What goes out as a hub file comes back as the same config. */
static void check_round_trip(void)
{
    char *all = dump(0), *hub = dump(1);

    config_free(&c);
    ck_assert(!config_init(&c, &faults.host));
    ck_assert_msg(!config_load_hub_text(&c, hub, strlen(hub), "dump"), "%s", message());
    char *all_again = dump(0), *hub_again = dump(1);
    ck_assert_str_eq(hub, hub_again);
    if (strstr(all, "\"preset\": \"\"") && !strstr(all, "_types\": []")) ck_assert_str_eq(all, all_again);
    struct config chosen;
    ck_assert(!config_init(&chosen, &faults.host));
    ck_assert_msg(!config_load_json(&chosen, all) && !config_validate(&chosen), "%s", message());
    config_free(&chosen);
    host_strfree(&faults.host, all);
    host_strfree(&faults.host, hub);
    host_strfree(&faults.host, all_again);
    host_strfree(&faults.host, hub_again);
}

START_TEST(every_golden_config_loads_and_comes_back)
{
    static const char *const names[] = {"ckpt_bf16", "hf_tiny/fp32", "hf_bf16_model", "mtp_model",
                                        "trajectory_model"};

    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char path[64];
        snprintf(path, sizeof path, "%s/config.json", names[i]);
        ck_assert_msg(!config_load_hub(&c, golden(path)), "%s", message());
        check_round_trip();
    }
    ck_assert_int_eq(notices, 0);
}
END_TEST

START_TEST(the_configs_of_golden_cases_load)
{
    glob_t found;
    int loaded = 0;

    ck_assert(!glob(golden("*.json"), 0, NULL, &found));
    for (size_t i = 0; i < found.gl_pathc; i++) {
        json_t *sidecar = json_load_file(found.gl_pathv[i], 0, NULL);
        json_t *config = json_object_get(sidecar, "config");
        if (json_object_get(config, "model_type")) {
            ck_assert_msg(!load(config), "%s: %s", found.gl_pathv[i], message());
            check_round_trip();
            loaded++;
        }
        json_decref(sidecar);
    }
    globfree(&found);
    ck_assert_int_ge(loaded, 10);
}
END_TEST

START_TEST(fields_arrive)
{
    ck_assert(!load_patched("{\"latent_norm_eps\": 1e-5, \"norm_topk_prob\": false, \"eos_token_id\": 7}"));
    const struct model_config *m = &c.model;
    ck_assert_int_eq(m->vocab_size, 331);
    ck_assert_int_eq(m->v_head_dim, 36);
    ck_assert_double_eq(m->rope_theta, 8e6);
    ck_assert_double_eq(m->latent_norm_eps, 1e-5);
    ck_assert_double_eq(m->index_k_norm_eps, 1e-6);
    ck_assert_int_eq(m->norm_topk_prob, 0);
    ck_assert_int_eq(m->eos_count, 1);
    ck_assert_int_eq(m->eos_token_id[0], 7);
    ck_assert_int_eq(m->mlp_layer_types[0], MLP_DENSE);
    ck_assert_int_eq(config_indexer_source(m, 5), 2);
}
END_TEST

START_TEST(the_list_of_indexers_wins_over_the_formula)
{
    ck_assert(!load_patched("{\"index_topk_freq\": 2, \"index_skip_topk_offset\": 1}"));
    ck_assert_int_eq(c.model.indexer_types[3], INDEXER_SHARED);
    ck_assert_int_eq(c.model.indexer_types[6], INDEXER_FULL);
    ck_assert(!load_patched("{\"index_topk_freq\": 2, \"index_skip_topk_offset\": 1, \"indexer_types\": null}"));
    ck_assert_int_eq(c.model.indexer_types[1], INDEXER_SHARED);
    ck_assert_int_eq(c.model.indexer_types[2], INDEXER_FULL);
    /* GLM-5 knows neither: every layer has its own. */
    json_t *file = patched("{\"indexer_types\": null}");
    json_object_del(file, "index_topk_freq");
    json_object_del(file, "index_skip_topk_offset");
    ck_assert(!load(file));
    json_decref(file);
    for (int i = 0; i < 7; i++) ck_assert_int_eq(c.model.indexer_types[i], INDEXER_FULL);
}
END_TEST

START_TEST(dense_layers_may_lie_anywhere)
{
    json_t *file = patched(
        "{\"mlp_layer_types\": [\"sparse\", \"dense\", \"sparse\", \"dense\", \"sparse\", \"sparse\", \"sparse\"]}");

    ck_assert_int_eq(load(file), GLM52_E_INVALID);
    ck_assert_str_eq(message(),
                     "there: model.first_k_dense_replace = 1 contradicts model.mlp_layer_types[0] = sparse");
    json_object_del(file, "first_k_dense_replace");
    ck_assert(!load(file));
    json_decref(file);
    ck_assert_int_eq(c.model.mlp_layer_types[3], MLP_DENSE);
    check_round_trip();
    ck_assert_int_eq(c.model.mlp_layer_types[3], MLP_DENSE);
}
END_TEST

START_TEST(rope_stands_in_two_places)
{
    json_t *file = patched("{\"rope_theta\": 50000}");

    ck_assert_int_eq(load(file), GLM52_E_INVALID);
    json_object_del(file, "rope_parameters");
    ck_assert(!load(file));
    ck_assert_double_eq(c.model.rope_theta, 50000);
    json_decref(file);
    ck_assert(!load_patched("{\"rope_parameters\": {\"rope_theta\": 1e6, \"partial_rotary_factor\": 1.0}}"));
    ck_assert_double_eq(c.model.rope_theta, 1e6);
}
END_TEST

static const struct {
    const char *patch;
    glm52_status status;
    const char *message, *key;
} refused[] = {
    {"{\"scoring_func\": \"softmax\"}", GLM52_E_UNSUPPORTED,
     "there: scoring_func = softmax is not supported; only \"sigmoid\" is", "scoring_func"},
    {"{\"n_group\": 8}", GLM52_E_UNSUPPORTED, "there: n_group = 8 is not supported; only 1 is", "n_group"},
    {"{\"topk_group\": 4}", GLM52_E_UNSUPPORTED, "there: topk_group = 4 is not supported; only 1 is", "topk_group"},
    {"{\"hidden_act\": \"gelu\"}", GLM52_E_UNSUPPORTED, NULL, "hidden_act"},
    {"{\"attention_bias\": true}", GLM52_E_UNSUPPORTED, NULL, "attention_bias"},
    {"{\"attention_dropout\": 0.1}", GLM52_E_UNSUPPORTED, NULL, "attention_dropout"},
    {"{\"tie_word_embeddings\": true}", GLM52_E_UNSUPPORTED, NULL, "tie_word_embeddings"},
    {"{\"rope_interleave\": false}", GLM52_E_UNSUPPORTED, NULL, "rope_interleave"},
    {"{\"indexer_rope_interleave\": false}", GLM52_E_UNSUPPORTED, NULL, "indexer_rope_interleave"},
    {"{\"moe_layer_freq\": 2}", GLM52_E_UNSUPPORTED, NULL, "moe_layer_freq"},
    {"{\"topk_method\": \"greedy\"}", GLM52_E_UNSUPPORTED, NULL, "topk_method"},
    {"{\"index_topk_pattern\": \"FFFSSSF\"}", GLM52_E_UNSUPPORTED,
     "there: index_topk_pattern = FFFSSSF is not supported; only null is", "index_topk_pattern"},
    {"{\"rope_parameters\": {\"rope_type\": \"yarn\", \"rope_theta\": 1}}", GLM52_E_UNSUPPORTED, NULL,
     "rope_parameters.rope_type"},
    {"{\"rope_parameters\": {\"rope_theta\": 1, \"factor\": 4}}", GLM52_E_UNSUPPORTED, NULL,
     "rope_parameters.factor"},
    {"{\"rope_parameters\": 3}", GLM52_E_INVALID, NULL, "rope_parameters"},
    {"{\"rope_parameters\": {}}", GLM52_E_INVALID, "there: model.rope_theta is not set", "model.rope_theta"},
    {"{\"rope_parameters\": {\"rope_theta\": -1}}", GLM52_E_INVALID,
     "there: rope_parameters.rope_theta = -1 is out of range above 0 .. 1e15", "rope_parameters.rope_theta"},
    {"{\"num_key_value_heads\": 2}", GLM52_E_UNSUPPORTED,
     "there: num_key_value_heads = 2 must equal num_attention_heads = 4", "num_key_value_heads"},
    {"{\"qk_head_dim\": 41}", GLM52_E_UNSUPPORTED,
     "there: qk_head_dim = 41 must equal qk_nope_head_dim + qk_rope_head_dim = 40", "qk_head_dim"},
    {"{\"layer_types\": [\"full_attention\"]}", GLM52_E_UNSUPPORTED, NULL, "layer_types"},
    {"{\"quantization_config\": {}}", GLM52_E_UNSUPPORTED, NULL, "quantization_config"},
    {"{\"model_type\": \"llama\"}", GLM52_E_UNSUPPORTED,
     "there: model_type = llama is not supported; only glm_moe_dsa is", "model_type"},
    {"{\"model_type\": 3}", GLM52_E_UNSUPPORTED, NULL, "model_type"},
    {"{\"hidden_size\": \"48\"}", GLM52_E_INVALID, "there: hidden_size = 48 is not an integer", "hidden_size"},
    {"{\"hidden_size\": null}", GLM52_E_INVALID, "there: hidden_size = null is not an integer", "hidden_size"},
    {"{\"hidden_size\": 48.5}", GLM52_E_INVALID, "there: hidden_size = 48.5 is not an integer; nearest: 48",
     "hidden_size"},
    {"{\"hidden_size\": -48}", GLM52_E_INVALID, "there: hidden_size = -48 is out of range 1 .. 131072; nearest: 1",
     "hidden_size"},
    {"{\"hidden_size\": 4e18}", GLM52_E_INVALID,
     "there: hidden_size = 4e+18 is out of range 1 .. 131072; nearest: 131072", "hidden_size"},
    {"{\"hidden_size\": {\"a\": [1, 2, 3]}}", GLM52_E_INVALID,
     "there: hidden_size = {\"a\":[1,2,3]} is not an integer", "hidden_size"},
    {"{\"rms_norm_eps\": 0}", GLM52_E_INVALID, "there: rms_norm_eps = 0 is out of range above 0 .. 1",
     "rms_norm_eps"},
    {"{\"indexer_types\": [\"full\"]}", GLM52_E_INVALID,
     "there: model.indexer_types has 1 entries, but model.num_hidden_layers = 7", "model.indexer_types"},
    {"{\"indexer_types\": [\"full\", 3]}", GLM52_E_INVALID, "there: indexer_types[1] = 3 is not one of full, shared",
     "indexer_types"},
    {"{\"indexer_types\": \"full\"}", GLM52_E_INVALID, "there: indexer_types = full is not a list", "indexer_types"},
    {"{\"mlp_layer_types\": []}", GLM52_OK, NULL, NULL},
    {"{\"num_nextn_predict_layers\": 3}", GLM52_E_INVALID, NULL, "num_nextn_predict_layers"},
    {"{\"num_hidden_layers\": 513}", GLM52_E_INVALID,
     "there: num_hidden_layers = 513 is out of range 1 .. 512; nearest: 512", "num_hidden_layers"},
    {"{\"vocab_size\": 329}", GLM52_E_INVALID, "there: model.eos_token_id = 329 is outside the vocabulary, 0 .. 328",
     "model.eos_token_id"},
    {"{\"num_experts_per_tok\": 7}", GLM52_E_INVALID, NULL, "model.num_experts_per_tok"},
};

START_TEST(what_we_cannot_train_is_refused_by_name)
{
    char *before = dump(0);

    if (!refused[_i].status) {
        ck_assert_msg(!load_patched(refused[_i].patch), "%s", message());
    } else {
        ck_assert_int_eq(load_patched(refused[_i].patch), refused[_i].status);
        if (refused[_i].message) ck_assert_str_eq(message(), refused[_i].message);
        ck_assert_str_eq(glm52_error_detail(glm52_error_last(), "key"), refused[_i].key);
        ck_assert_str_eq(glm52_error_detail(glm52_error_last(), "path"), "there");
        char *after = dump(0);
        ck_assert_str_eq(before, after);
        host_strfree(&faults.host, after);
    }
    host_strfree(&faults.host, before);
}
END_TEST

START_TEST(lists_longer_than_any_model_are_refused)
{
    json_t *file = json_deep_copy(plain), *types = json_array();

    for (int i = 0; i < 100000; i++) json_array_append_new(types, json_string("full"));
    json_object_set_new(file, "indexer_types", types);
    ck_assert_int_eq(load(file), GLM52_E_INVALID);
    ck_assert_str_eq(message(), "there: indexer_types has 100000 entries; at most 512 are possible");
    json_decref(file);
}
END_TEST

START_TEST(missing_sizes_are_named_and_missing_extras_have_defaults)
{
    ck_assert_int_eq(load_without("hidden_size"), GLM52_E_INVALID);
    ck_assert_str_eq(message(), "there: model.hidden_size is not set");
    ck_assert_int_eq(load_without("model_type"), GLM52_E_INVALID);
    ck_assert(!load_without("rms_norm_eps"));
    ck_assert(!load_without("eos_token_id"));
    ck_assert(!load_without("pad_token_id"));
    ck_assert(!load_without("mlp_layer_types"));
    check_round_trip();
}
END_TEST

START_TEST(unknown_keys_are_kept_and_logged_once)
{
    ck_assert(!load_patched("{\"swiglu_limit\": 7, \"extra\": {\"a\": [0.1, null, \"\\\"\\u0001\"]}}"));
    ck_assert_int_eq(notices, 1);
    ck_assert_str_eq(noticed, "there: unknown keys are kept as they are: swiglu_limit, extra");
    char *text = dump(1);
    json_t *out = json_loads(text, 0, NULL), *in = patched("{\"extra\": {\"a\": [0.1, null, \"\\\"\\u0001\"]}}");
    ck_assert(json_equal(json_object_get(out, "extra"), json_object_get(in, "extra")));
    ck_assert(json_equal(json_object_get(out, "transformers_version"), json_object_get(in, "transformers_version")));
    ck_assert_ptr_nonnull(strstr(text, "0.1,"));
    host_strfree(&faults.host, text);
    json_decref(out);
    json_decref(in);
    check_round_trip();
    set("model.preset", "tiny"); /* another base: the file's keys go with it */
    text = dump(1);
    ck_assert_ptr_null(strstr(text, "swiglu_limit"));
    host_strfree(&faults.host, text);
}
END_TEST

START_TEST(a_dump_is_a_whole_hub_file)
{
    static const char *const keys[] = {"head_dim", "first_k_dense_replace", "num_key_value_heads", "qk_head_dim",
                                       "moe_router_dtype", "index_topk_pattern", "mlp_layer_types", "eos_token_id"};
    char *text;

    ck_assert(!load(plain));
    ck_assert(!config_dump_hub(&c, GLM52_DTYPE_F32, &text));
    json_t *out = json_loads(text, 0, NULL);
    const char *key;
    json_t *value;
    json_object_foreach(plain, key, value) ck_assert_msg(json_object_get(out, key) != NULL, "%s is lost", key);
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        ck_assert_msg(json_equal(json_object_get(out, keys[i]), json_object_get(plain, keys[i])), "%s", keys[i]);
    ck_assert_str_eq(json_string_value(json_object_get(out, "dtype")), "float32");
    host_strfree(&faults.host, text);
    json_decref(out);
    text = dump(1);
    ck_assert_ptr_nonnull(strstr(text, "\"dtype\": \"bfloat16\""));
    host_strfree(&faults.host, text);
    set("model.num_hidden_layers", "5");
    ck_assert_int_eq(config_dump(&c, 1, &text), GLM52_E_INVALID);
}
END_TEST

START_TEST(presets_survive_the_way_through_a_hub_file)
{
    char preset[16];

    for (int i = 0; word_at(option_find("model.preset")->range, i, preset, sizeof preset); i++) {
        set("model.preset", preset);
        check_round_trip();
    }
}
END_TEST

START_TEST(chosen_values_win_over_the_file_in_any_order)
{
    set("model.latent_norm_eps", "1e-5");
    set("model.preset", "glm52");
    set("optim.lr", "1");
    ck_assert(!load(plain));
    ck_assert_double_eq(c.model.latent_norm_eps, 1e-5);
    ck_assert_int_eq(c.model.hidden_size, 48);
    ck_assert_str_eq(c.model.preset, "");
    ck_assert_double_eq(c.optim.lr, 1);
    set("model.index_topk", "3");
    ck_assert(!load_patched("{\"hidden_size\": 52}"));
    ck_assert_int_eq(c.model.index_topk, 3);
    ck_assert_int_eq(c.model.hidden_size, 52);
    set("model.num_hidden_layers", "2");
    set("model.indexer_types", "");
    ck_assert_int_eq(config_validate(&c), GLM52_E_INVALID); /* the other list is still the file's */
    set("model.mlp_layer_types", "");
    ck_assert(!config_validate(&c));
}
END_TEST

START_TEST(damaged_files_are_refused_at_every_byte)
{
    char *text = json_dumps(plain, JSON_INDENT(1));
    size_t bytes = strlen(text);
    uint32_t random = 1;

    for (size_t i = 0; i < bytes; i++) {
        ck_assert_int_eq(config_load_hub_text(&c, text, i, "there"), GLM52_E_CORRUPT);
        ck_assert_ptr_nonnull(strstr(message(), "line"));
    }
    for (int i = 0; i < 3000; i++) {
        size_t at = (random = random * 1664525u + 1013904223u) % bytes;
        char old = text[at];
        text[at] = (char)(random >> 16);
        config_load_hub_text(&c, text, bytes, "there");
        text[at] = old;
    }
    ck_assert_int_eq(config_load_hub_text(&c, "[]", 2, "there"), GLM52_E_CORRUPT);
    ck_assert_int_eq(config_load_hub_text(&c, "{\"a\":1,\"a\":2}", 13, "there"), GLM52_E_CORRUPT);
    ck_assert_int_eq(config_load_hub(&c, golden("nowhere.json")), GLM52_E_IO);
    free(text);
}
END_TEST

static glm52_status load_and_dump(struct config *x, char **text)
{
    TRY(config_set(x, "optim.lr", "1e-3"));
    TRY(config_load_hub(x, golden("hf_tiny/fp32/config.json")));
    return config_dump(x, 1, text);
}

/* One attempt in which allocation number `fail` of the host fails. */
static glm52_status attempt(int64_t fail)
{
    struct faults f;
    struct config x;
    char *text = NULL;

    faults_open(&f);
    f.fail_allocation = fail;
    glm52_status status = config_init(&x, &f.host);
    if (!status) {
        status = load_and_dump(&x, &text);
        host_strfree(&f.host, text);
        config_free(&x);
    }
    ck_assert_uint_eq(f.host.total, 0);
    ck_assert_int_eq(f.open_files, 0);
    return status;
}

START_TEST(running_out_of_memory_leaks_nothing)
{
    int64_t k = 0;
    glm52_status status;

    while ((status = attempt(k++))) ck_assert_int_eq(status, GLM52_E_NOMEM);
    ck_assert_int_gt(k, 20);
}
END_TEST

static int64_t json_blocks, json_calls, json_fail;

static void *json_allocate(size_t bytes)
{
    void *memory = json_calls++ == json_fail ? NULL : malloc(bytes);

    json_blocks += memory != NULL;
    return memory;
}

static void json_release(void *memory)
{
    json_blocks -= memory != NULL;
    free(memory);
}

START_TEST(the_json_library_may_run_out_of_memory_too)
{
    int64_t blocks = -1;

    json_set_alloc_funcs(json_allocate, json_release);
    json_object_seed(1);
    for (json_fail = 0; blocks; json_fail++) {
        json_calls = json_blocks = 0;
        glm52_status status = attempt(-1);
        ck_assert_int_eq(json_blocks, 0);
        blocks = json_calls > json_fail; /* 0 once the failure lay beyond the last call */
        ck_assert(blocks ? 1 : !status);
    }
    json_set_alloc_funcs(malloc, free);
    ck_assert_int_gt(json_fail, 100);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("config_hub");
    TCase *files = tcase_create("config_hub");

    tcase_add_checked_fixture(files, make, drop);
    tcase_set_timeout(files, 60);
    tcase_add_test(files, every_golden_config_loads_and_comes_back);
    tcase_add_test(files, the_configs_of_golden_cases_load);
    tcase_add_test(files, fields_arrive);
    tcase_add_test(files, the_list_of_indexers_wins_over_the_formula);
    tcase_add_test(files, dense_layers_may_lie_anywhere);
    tcase_add_test(files, rope_stands_in_two_places);
    tcase_add_loop_test(files, what_we_cannot_train_is_refused_by_name, 0, sizeof refused / sizeof *refused);
    tcase_add_test(files, lists_longer_than_any_model_are_refused);
    tcase_add_test(files, missing_sizes_are_named_and_missing_extras_have_defaults);
    tcase_add_test(files, unknown_keys_are_kept_and_logged_once);
    tcase_add_test(files, a_dump_is_a_whole_hub_file);
    tcase_add_test(files, presets_survive_the_way_through_a_hub_file);
    tcase_add_test(files, chosen_values_win_over_the_file_in_any_order);
    tcase_add_test(files, damaged_files_are_refused_at_every_byte);
    tcase_add_test(files, running_out_of_memory_leaks_nothing);
    tcase_add_test(files, the_json_library_may_run_out_of_memory_too);
    suite_add_tcase(suite, files);
    return run_tap(suite);
}
