/* One option's value: from JSON and from text into its field, and back. */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "config/schema.h"

static void *field(const struct config *c, const struct option *o)
{
    return (char *)c + o->offset;
}

static int *count_field(const struct config *c, const struct option *o)
{
    return (int *)(void *)((char *)c + o->count_offset);
}

/* ---- messages ---------------------------------------------------------------------------------------- */

enum { SHOWN = 72 };

/* A value as a message shows it: a string without quotes, cut between characters, anything else as JSON. */
static const char *show(const json_t *value, char shown[SHOWN])
{
    memset(shown, 0, SHOWN);
    if (json_is_string(value)) {
        size_t length = strnlen(json_string_value(value), SHOWN - 4), cut = length;
        memcpy(shown, json_string_value(value), length);
        for (size_t i = 0; i < length; i++)
            if ((unsigned char)shown[i] < 0x20) shown[i] = '?';
        if (json_string_length(value) > length) {
            while (cut > 0 && ((unsigned char)shown[cut - 1] & 0xc0) == 0x80) cut--;
            strcpy(shown + (cut > 0 ? cut - 1 : 0), "...");
        }
    } else if (json_is_real(value)) {
        number_text(json_real_value(value), shown);
    } else if (json_dumpb(value, shown, SHOWN - 4, JSON_ENCODE_ANY | JSON_COMPACT | JSON_ENSURE_ASCII) > SHOWN - 4) {
        strcat(shown, "...");
    }
    return shown;
}

glm52_status refuse(glm52_status status, const char *label, const json_t *value, const char *format, ...)
{
    char what[512], shown[SHOWN];
    va_list args;

    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    fail(status, "%s = %s %s", label, show(value, shown), what);
    return fail_detail("key", "%s", label);
}

/* "a, b, c" of "a|b|c" */
static const char *list_words(const char *words, char *list, size_t bytes)
{
    char word[64];
    size_t used = 0;

    *list = 0;
    for (int i = 0; word_at(words, i, word, sizeof word) && used < bytes; i++)
        used += (size_t)snprintf(list + used, bytes - used, "%s%s", i ? ", " : "", word);
    return list;
}

static glm52_status refuse_word(const struct option *o, const char *label, const json_t *value)
{
    char list[256], word[64], nearest[64] = "";
    const char *given = json_string_value(value);
    unsigned least = given ? (unsigned)strnlen(given, 64) / 2 + 1 : 0;

    for (int i = 0; given && word_at(o->range, i, word, sizeof word); i++) {
        unsigned distance = text_distance(given, word);
        if (distance >= least) continue;
        least = distance;
        memcpy(nearest, word, sizeof word);
    }
    list_words(o->range, list, sizeof list);
    if (!*nearest) return refuse(GLM52_E_INVALID, label, value, "is not one of %s", list);
    return refuse(GLM52_E_INVALID, label, value, "is not one of %s; did you mean %s?", list, nearest);
}

static glm52_status refuse_range(const struct option *o, const char *label, const json_t *value, int too_small)
{
    char nearest[NUMBER_TEXT];

    if (o->type == OPTION_NUMBER) {
        if (o->flags & (too_small ? OPTION_ABOVE : OPTION_BELOW))
            return refuse(GLM52_E_INVALID, label, value, "is out of range %s", o->range);
        number_text(too_small ? o->low : o->high, nearest);
    } else {
        snprintf(nearest, sizeof nearest, "%lld", (long long)(too_small ? o->least : o->most));
    }
    return refuse(GLM52_E_INVALID, label, value, "is out of range %s; nearest: %s", o->range, nearest);
}

/* ---- scalars ----------------------------------------------------------------------------------------- */

/* 1e9 is an integer, 2.5 is not. */
static glm52_status read_integer(const struct option *o, const char *label, const json_t *value, int64_t *out)
{
    double number = json_number_value(value);

    if (!json_is_number(value)) return refuse(GLM52_E_INVALID, label, value, "is not an integer");
    if (json_is_integer(value)) {
        *out = json_integer_value(value);
    } else {
        if (number < -9e18 || number > 9e18) return refuse_range(o, label, value, number < 0);
        if (number != floor(number))
            return refuse(GLM52_E_INVALID, label, value, "is not an integer; nearest: %.0f", nearbyint(number));
        *out = (int64_t)number;
    }
    if (*out < o->least || *out > o->most) return refuse_range(o, label, value, *out < o->least);
    return GLM52_OK;
}

static int below_range(const struct option *o, double number)
{
    return o->flags & OPTION_ABOVE ? !(number > o->low) : !(number >= o->low);
}

static int above_range(const struct option *o, double number)
{
    return o->flags & OPTION_BELOW ? !(number < o->high) : !(number <= o->high);
}

static glm52_status read_number(const struct option *o, const char *label, const json_t *value, double *out)
{
    double number = json_number_value(value);

    if (!json_is_number(value)) return refuse(GLM52_E_INVALID, label, value, "is not a number");
    if (below_range(o, number) || above_range(o, number))
        return refuse_range(o, label, value, below_range(o, number));
    *out = number;
    return GLM52_OK;
}

static glm52_status read_word(const struct option *o, const char *label, const json_t *value, int *out)
{
    int index = json_is_string(value) ? word_index(o->range, json_string_value(value)) : -1;

    if (index < 0) return refuse_word(o, label, value);
    *out = index;
    return GLM52_OK;
}

/* Every string a file brings is UTF-8; one that came through config_set() may not be. */
static int is_utf8(const json_t *string)
{
    char one[8];

    return json_dumpb(string, one, sizeof one, JSON_ENCODE_ANY) > 0;
}

static glm52_status read_string(struct config *c, const struct option *o, const char *label, const json_t *value)
{
    char **at = field(c, o);
    int word;

    if (!json_is_string(value)) return refuse(GLM52_E_INVALID, label, value, "is not a string");
    if (!is_utf8(value)) return refuse(GLM52_E_INVALID, label, value, "is not UTF-8");
    if (*o->range && (*json_string_value(value) || *o->initial)) TRY(read_word(o, label, value, &word));
    char *copy = host_strdup(c->host, json_string_value(value));
    if (!copy) return GLM52_E_NOMEM;
    host_strfree(c->host, *at);
    *at = copy;
    return GLM52_OK;
}

glm52_status option_check(const struct config *c, const struct option *o)
{
    double number = o->type == OPTION_NUMBER ? *(double *)field(c, o) : 0;
    int64_t integer = o->type == OPTION_INTEGER ? *(int64_t *)field(c, o) : 0;

    if (o->flags & OPTION_REQUIRED && integer == 0 && number == 0) {
        fail(GLM52_E_INVALID, "%s is not set", o->key);
        fail_hint(
            "start from a shape: model.preset = tiny, bench or glm52, or model.hub = a directory with config.json");
        return fail_detail("key", "%s", o->key);
    }
    if (o->type == OPTION_INTEGER && (integer < o->least || integer > o->most)) {
        fail(GLM52_E_INVALID, "%s = %lld is out of range %s", o->key, (long long)integer, o->range);
        return fail_detail("key", "%s", o->key);
    }
    if (o->type == OPTION_NUMBER && (below_range(o, number) || above_range(o, number))) {
        fail(GLM52_E_INVALID, "%s = %g is out of range %s", o->key, number, o->range);
        return fail_detail("key", "%s", o->key);
    }
    return GLM52_OK;
}

/* ---- lists ------------------------------------------------------------------------------------------- */

/* A list's elements, on the side until all are known to be good. */
struct elements {
    int64_t integer[CONFIG_MAX_EOS];
    uint8_t word[CONFIG_MAX_LAYERS];
};

static glm52_status read_element(const struct option *o, const char *label, size_t i, const json_t *value,
                                 struct elements *e)
{
    char element[96];
    int word = 0;

    snprintf(element, sizeof element, "%s[%zu]", label, i);
    glm52_status status = o->type == OPTION_INTEGERS ? read_integer(o, element, value, &e->integer[i])
                                                     : read_word(o, element, value, &word);
    if (status) return fail_detail("key", "%s", label);
    if (o->type == OPTION_LAYERS) e->word[i] = (uint8_t)word;
    return GLM52_OK;
}

static glm52_status read_list(struct config *c, const struct option *o, const char *label, const json_t *value)
{
    size_t most = o->type == OPTION_INTEGERS ? CONFIG_MAX_EOS : CONFIG_MAX_LAYERS, count = json_array_size(value);
    struct elements e;

    if (json_is_integer(value) && o->type == OPTION_INTEGERS) { /* hub files may give a single id */
        TRY(read_element(o, label, 0, value, &e));
        count = 1;
    } else if (!json_is_array(value)) {
        return refuse(GLM52_E_INVALID, label, value, "is not a list");
    }
    if (count > most) {
        fail(GLM52_E_INVALID, "%s has %zu entries; at most %zu are possible", label, count, most);
        return fail_detail("key", "%s", label);
    }
    for (size_t i = 0; i < json_array_size(value); i++) TRY(read_element(o, label, i, json_array_get(value, i), &e));
    if (o->type == OPTION_INTEGERS) memcpy(field(c, o), e.integer, count * sizeof *e.integer);
    else memcpy(field(c, o), e.word, count);
    *count_field(c, o) = (int)count;
    return GLM52_OK;
}

/* ---- in and out -------------------------------------------------------------------------------------- */

glm52_status option_from_json(struct config *c, const struct option *o, const char *label, const json_t *value)
{
    switch (o->type) {
    case OPTION_INTEGER: return read_integer(o, label, value, field(c, o));
    case OPTION_NUMBER: return read_number(o, label, value, field(c, o));
    case OPTION_STRING: return read_string(c, o, label, value);
    case OPTION_CHOICE: return read_word(o, label, value, field(c, o));
    case OPTION_BOOLEAN:
        if (!json_is_boolean(value)) return refuse(GLM52_E_INVALID, label, value, "is neither true nor false");
        *(int *)field(c, o) = json_is_true(value);
        return GLM52_OK;
    case OPTION_INTEGERS:
    case OPTION_LAYERS: break;
    }
    return read_list(c, o, label, value);
}

/* "full, full,shared" as a JSON list of strings, "5,7" as one of numbers; NULL: no memory. */
static json_t *split(const struct option *o, const char *text)
{
    json_t *list = json_array();

    while (list && text[strspn(text, " ")]) {
        text += strspn(text, " ");
        size_t length = strcspn(text, ","), bare = length;
        while (bare > 0 && text[bare - 1] == ' ') bare--;
        json_t *one = o->type == OPTION_INTEGERS ? json_loadb(text, bare, JSON_DECODE_ANY, NULL) : NULL;
        if (!one) one = json_stringn_nocheck(text, bare);
        if (json_array_append_new(list, one)) {
            json_decref(list);
            return NULL;
        }
        text += length + (text[length] == ',');
    }
    return list;
}

static int text_is_json(const struct option *o, const char *text)
{
    if (o->type == OPTION_STRING || o->type == OPTION_CHOICE) return 0;
    return (o->type != OPTION_INTEGERS && o->type != OPTION_LAYERS) || *text == '[';
}

glm52_status option_from_text(struct config *c, const struct option *o, const char *label, const char *text)
{
    json_t *value = NULL;
    glm52_status status = GLM52_OK;

    if (text_is_json(o, text)) {
        status = json_read(text, strlen(text), &value);
        if (status == GLM52_E_NOMEM) return status;
        if (status) value = json_string_nocheck(text); /* which the option's type will refuse */
    } else if (o->type == OPTION_INTEGERS || o->type == OPTION_LAYERS) {
        value = split(o, text);
    } else {
        value = json_string_nocheck(text);
    }
    if (!value) return json_nomem();
    status = option_from_json(c, o, label, value);
    json_decref(value);
    return status;
}

glm52_status option_reset(struct config *c, const struct option *o)
{
    c->chosen[o - options] = FROM_DEFAULT;
    if (*o->initial || o->type == OPTION_STRING) return option_from_text(c, o, o->key, o->initial);
    if (o->type == OPTION_INTEGER) *(int64_t *)field(c, o) = 0;
    else if (o->type == OPTION_NUMBER) *(double *)field(c, o) = 0;
    else *count_field(c, o) = 0;
    return GLM52_OK;
}

static json_t *list_to_json(const struct config *c, const struct option *o)
{
    json_t *list = json_array();
    char word[64];

    for (int i = 0; list && i < *count_field(c, o); i++) {
        json_t *one;
        if (o->type == OPTION_INTEGERS) one = json_integer(((const int64_t *)field(c, o))[i]);
        else one = word_at(o->range, ((const uint8_t *)field(c, o))[i], word, sizeof word) ? json_string(word) : NULL;
        if (json_array_append_new(list, one)) {
            json_decref(list);
            return NULL;
        }
    }
    return list;
}

json_t *option_to_json(const struct config *c, const struct option *o)
{
    char word[64];

    switch (o->type) {
    case OPTION_INTEGER: return json_integer(*(int64_t *)field(c, o));
    case OPTION_NUMBER: return json_real(*(double *)field(c, o));
    case OPTION_BOOLEAN: return json_boolean(*(int *)field(c, o));
    case OPTION_STRING: return json_string(*(char **)field(c, o));
    case OPTION_CHOICE: return word_at(o->range, *(int *)field(c, o), word, sizeof word) ? json_string(word) : NULL;
    case OPTION_INTEGERS:
    case OPTION_LAYERS: break;
    }
    return list_to_json(c, o);
}
