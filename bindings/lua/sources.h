/* The Lua sources inside the binary; written by embed.sh. */
#ifndef GLM52_LUA_SOURCES_H
#define GLM52_LUA_SOURCES_H

#include <stddef.h>

struct source {
    const char *module; /* "glm52.recipe" */
    const char *chunk;  /* name in messages, "@glm52/recipe.lua" */
    const char *text;
    size_t bytes;
};

extern const struct source sources[]; /* ends with a NULL module */

#endif
