/* JSON in and out: reading with an error that helps, writing numbers as short as they round-trip. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "config/schema.h"

glm52_status json_nomem(void)
{
    return fail(GLM52_E_NOMEM, "no memory for a JSON value");
}

glm52_status json_read(const char *text, size_t bytes, json_t **out)
{
    json_error_t error = {0};
    size_t flags = JSON_REJECT_DUPLICATES | JSON_DECODE_ANY;
    json_t *value = json_loadb(text, bytes, flags, &error);

    /* An integer beyond 64 bits is no damage: read it as a number, and let its option say what is too big. */
    if (!value && json_error_code(&error) == json_error_numeric_overflow)
        value = json_loadb(text, bytes, flags | JSON_DECODE_INT_AS_REAL, &error);
    if (value) {
        *out = value;
        return GLM52_OK;
    }
    if (!*error.text || json_error_code(&error) == json_error_out_of_memory) return json_nomem();
    return fail(GLM52_E_CORRUPT, "not valid JSON at line %d, column %d: %s", error.line, error.column, error.text);
}

const char *number_text(double value, char text[NUMBER_TEXT])
{
    char local[NUMBER_TEXT], *to = text;

    for (int digits = 15; digits <= 17; digits++) {
        snprintf(local, sizeof local, "%.*g", digits, value);
        if (strtod(local, NULL) == value) break;
    }
    /* Whatever the locale's decimal point is, and however many bytes it takes, ours is one dot. */
    for (const char *from = local; *from; from++) {
        if (strchr("0123456789+-einfa", *from)) *to++ = *from;
        else if (to == text || to[-1] != '.') *to++ = '.';
    }
    *to = 0;
    return text;
}

static void write_string(struct text *text, const char *string)
{
    text_add(text, "\"");
    for (; *string; string++) {
        unsigned char c = (unsigned char)*string;
        if (c == '"' || c == '\\') text_add(text, "\\%c", c);
        else if (c < 0x20) text_add(text, "\\u%04x", c);
        else text_add_bytes(text, string, 1);
    }
    text_add(text, "\"");
}

static void write_real(struct text *text, double value)
{
    char shortest[NUMBER_TEXT];

    number_text(value, shortest);
    text_add(text, strpbrk(shortest, ".e") ? "%s" : "%s.0", shortest);
}

static void write_object(struct text *text, const json_t *object, int depth)
{
    const char *key, *separator = "\n";
    json_t *value;

    text_add(text, "{");
    json_object_foreach((json_t *)object, key, value) {
        text_add(text, "%s%*s", separator, 2 * (depth + 1), "");
        write_string(text, key);
        text_add(text, ": ");
        json_write(text, value, depth + 1);
        separator = ",\n";
    }
    if (json_object_size(object)) text_add(text, "\n%*s", 2 * depth, "");
    text_add(text, "}");
}

void json_write(struct text *text, const json_t *value, int depth)
{
    switch (json_typeof(value)) {
    case JSON_OBJECT: write_object(text, value, depth); break;
    case JSON_STRING: write_string(text, json_string_value(value)); break;
    case JSON_REAL: write_real(text, json_real_value(value)); break;
    case JSON_INTEGER: text_add(text, "%" JSON_INTEGER_FORMAT, json_integer_value(value)); break;
    case JSON_TRUE: text_add(text, "true"); break;
    case JSON_FALSE: text_add(text, "false"); break;
    case JSON_NULL: text_add(text, "null"); break;
    case JSON_ARRAY:
        text_add(text, "[");
        for (size_t i = 0; i < json_array_size(value); i++) {
            if (i) text_add(text, ", ");
            json_write(text, json_array_get(value, i), depth);
        }
        text_add(text, "]");
    }
}
