/* Inside the config room: rows of the schema, and a row's value as JSON and as text. */
#ifndef GLM52_CONFIG_SCHEMA_H
#define GLM52_CONFIG_SCHEMA_H

#include "config/config.h"

enum option_type {
    OPTION_INTEGER,  /* int64_t */
    OPTION_NUMBER,   /* double */
    OPTION_BOOLEAN,  /* int */
    OPTION_STRING,   /* char *, never NULL; with a range: one of its words, or empty if the default is */
    OPTION_CHOICE,   /* int: which word of the range */
    OPTION_INTEGERS, /* int64_t [CONFIG_MAX_EOS] and an int count */
    OPTION_LAYERS    /* uint8_t [CONFIG_MAX_LAYERS], which word of the range per layer, and an int count */
};

enum {
    OPTION_REQUIRED = 1,  /* has no default: zero means not set */
    OPTION_NOT_HUB = 2,   /* in the model section, but no key of a hub config.json */
    OPTION_ABOVE = 4,     /* low itself is outside the range */
    OPTION_BELOW = 8      /* high itself is outside the range */
};

/* Who set a value. A base is a preset or a hub file: it gives way to what the user chose, in any order. */
enum { FROM_DEFAULT, FROM_BASE, FROM_USER };

struct option {
    const char *key, *summary;
    enum option_type type;
    unsigned flags;
    size_t offset, count_offset; /* in struct config */
    int64_t least, most;         /* of integers */
    double low, high;            /* of numbers */
    const char *range;           /* as described; the words of a choice are separated by | */
    const char *initial;         /* the default as text; "" for none */
};

extern const struct option options[];
extern const int option_count;

const struct option *option_find(const char *key);             /* NULL if there is none */
const char *option_nearest(const char *key); /* key of the most similar option; NULL if none is similar */
int option_is_section(const char *name);
int option_in_section(const struct option *o, const char *section);
glm52_status option_unknown(const char *key);                  /* fails with a suggestion */

/* Which word of "a|b|c" this is; -1 for none. */
int word_index(const char *words, const char *word);
/* Copies word number `index`; 0 if there is none. */
int word_at(const char *words, int index, char *word, size_t bytes);

/* Checks and stores. `label` is how the caller's user calls the option. A failure changes nothing. */
glm52_status option_from_json(struct config *c, const struct option *o, const char *label, const json_t *value);
glm52_status option_from_text(struct config *c, const struct option *o, const char *label, const char *text);
glm52_status option_reset(struct config *c, const struct option *o);
/* Is the stored scalar in its range? For fields that other rooms filled without the schema. */
glm52_status option_check(const struct config *c, const struct option *o);
json_t *option_to_json(const struct config *c, const struct option *o); /* NULL: no memory */

/* Fails with "label = value ..." and the detail "key". */
glm52_status refuse(glm52_status status, const char *label, const json_t *value, const char *format, ...)
    PRINTF(4, 5);
glm52_status json_nomem(void);
/* A whole JSON text, of any type. Where it is damaged the message says line and column. */
glm52_status json_read(const char *text, size_t bytes, json_t **out);
/* Appends JSON: objects over several lines, numbers as short as they round-trip, in any locale. */
void json_write(struct text *text, const json_t *value, int depth);
glm52_status json_finish(struct host *host, json_t *tree, char **out); /* the whole text; host_strfree */
enum { NUMBER_TEXT = 40 };
const char *number_text(double value, char text[NUMBER_TEXT]);

/* Makes a preset the base of the model section, "" for none. */
glm52_status preset_apply(struct config *c, const char *name);
/* Model options set by nobody or by an earlier base go back to their defaults. */
glm52_status base_clear(struct config *c);

glm52_status config_validate_model(struct config *c);

#endif
