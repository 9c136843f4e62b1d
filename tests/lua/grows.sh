#!/bin/sh
# A function that is added to header and description is one that Lua can call, without a line of C in the binding: a copy of
# both gets new functions, the call table is written anew, and the same objects of the binding are linked with it.
# Usage: grows.sh CC LUA GENERATOR DESCRIPTION HEADER BINDING_ARCHIVE BINDING_SOURCES LIBRARY; prints TAP.
set -u
cc=$1 lua=$2 generator=$3 description=$4 header=$5 archive=$(realpath "$6") sources=$7 library=$(realpath "$8")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
count=0
verdict() {
    count=$((count + 1))
    if [ "$1" = 0 ]; then
        echo "ok $count - $2"
    else
        echo "not ok $count - $2"
        sed 's/^/# /' "$folder/log"
    fi
}

# ---- the API of tomorrow

cat >"$folder/rows" <<'END'
  { "glm52_batch_scaled", "glm52_status", params = { { "self", "glm52_batch *" }, { "factor", "double", default = 2 },
    { "out", "double *", dir = "out" }, { "dtype", "glm52_dtype *", dir = "out" } } },
  { "glm52_batch_above", "glm52_status", errors = "STATE", params = { { "self", "glm52_batch *" },
    { "values", "const double *" }, { "count", "uint64_t", len_of = "values" }, { "least", "double" },
    { "limit", "uint64_t", len_of = "kept" }, { "kept", "double *", dir = "out" },
    { "found", "uint64_t *", dir = "out", fills = "kept" } } },
  { "glm52_tomorrow", "int32_t", threads = "any", params = { { "day", "int64_t" }, { "word", "const char *" } } },
END
cat >"$folder/units" <<'END'
  glm52_batch_scaled = { factor = "a factor", out = "tokens" },
  glm52_batch_above = { values = "[count] numbers", count = "numbers", least = "a number", limit = "numbers",
    kept = "[limit] numbers", found = "numbers" },
  glm52_tomorrow = { result = truth, day = "days" },
END
cat >"$folder/declarations" <<'END'

/* Tokens of the batch times factor. */
GLM52_API glm52_status glm52_batch_scaled(glm52_batch *self, double factor, double *out, glm52_dtype *dtype);
/* Those values that are `least` or more. Errors: STATE (a batch without tokens). */
GLM52_API glm52_status glm52_batch_above(glm52_batch *self, const double *values, uint64_t count, double least,
                                         uint64_t limit, double *kept, uint64_t *found);
/* Whether the word fits the day. */
GLM52_API int32_t glm52_tomorrow(int64_t day, const char *word);
END
cat >"$folder/new.c" <<'END'
#include <string.h>
#include "glm52.h"
glm52_status glm52_batch_scaled(glm52_batch *self, double factor, double *out, glm52_dtype *dtype)
{
    uint64_t tokens;
    glm52_status status = glm52_batch_tokens(self, &tokens, NULL);
    *out = (double)tokens * factor;
    *dtype = GLM52_DTYPE_F64;
    return status;
}
glm52_status glm52_batch_above(glm52_batch *self, const double *values, uint64_t count, double least, uint64_t limit,
                               double *kept, uint64_t *found)
{
    uint64_t tokens = 0;
    *found = 0;
    if (glm52_batch_tokens(self, &tokens, NULL) || !tokens) return GLM52_E_STATE;
    for (uint64_t i = 0; i < count && *found < limit; i++)
        if (values[i] >= least) kept[(*found)++] = values[i];
    return GLM52_OK;
}
int32_t glm52_tomorrow(int64_t day, const char *word)
{
    return day == (int64_t)strlen(word);
}
END
sed "/^local functions = {/r $folder/rows
/^local units = {/r $folder/units" "$description" >"$folder/glm52.api"
sed "/^\/\* ---- dataset /{
r $folder/declarations
}" "$header" >"$folder/glm52.h"

"$lua" "$generator" lua "$folder/glm52.api" "$folder/glm52.h" >"$folder/calls.c" 2>"$folder/log"
verdict $? "the call table is written"
flags=$(pkg-config --cflags lua5.4 2>/dev/null || pkg-config --cflags lua-5.4)
# The table comes first, so that the one in the archive is not taken.
{
    env -u LD_PRELOAD "$cc" -std=gnu11 -fPIC -shared -o "$folder/glm52.so" -I"$folder" -I"$sources" $flags "$folder/calls.c" "$folder/new.c" \
        -Wl,-u,luaopen_glm52 "$archive" "$library" -Wl,-rpath,"$(dirname "$library")" -lffi -lxxhash -ldl -Wl,-z,nodelete
} >"$folder/log" 2>&1
verdict $? "and linked with the binding as it is"

cat >"$folder/new.lua" <<'END'
package.cpath = arg[1] .. "/?.so"
local glm52 = require "glm52"
local batch = glm52.batch(glm52.context { threads = 1 })
assert(not pcall(batch.above, batch, { 1 }, 0, 1))
batch:set("tokens", { 1, 2, 3 })
local scaled, dtype = batch:scaled(1.5)
assert(scaled == 4.5 and dtype == "F64")
assert(batch:scaled() == 6)
assert(table.concat(batch:above({ 1.5, 0.5, 2, 3 }, 1, 2), " ") == "1.5 2.0")
assert(#batch:above(glm52.tensor("F64", 4), 1, 2) == 0)
assert(glm52.tomorrow(5, "lucky") == true and glm52.tomorrow(4, "lucky") == false)
local closed, problem = pcall(function() batch:close() batch:scaled() end)
assert(problem.name == "GLM52_E_HANDLE" and problem.where:find "new.lua:12:$", problem.where)
END
"$lua" "$folder/new.lua" "$folder" >"$folder/log" 2>&1
verdict $? "Lua calls the new functions"

# ---- what has no counterpart in Lua

sed 's/{ "day", "int64_t" }/{ "day", "const void *" }/; s/day = "days"/day = "a day"/' "$folder/glm52.api" >"$folder/other.api"
sed 's/glm52_tomorrow(int64_t day/glm52_tomorrow(const void *day/' "$folder/glm52.h" >"$folder/other.h"
! "$lua" "$generator" lua "$folder/other.api" "$folder/other.h" >"$folder/calls.c" 2>"$folder/log" &&
    grep -q '^glm52_tomorrow: Lua has no counterpart for day, const void \*' "$folder/log"
verdict $? "a type that Lua cannot give is refused, with what to do"
sed 's/"int32_t", threads = "any", params = { { "day"/"int32_t", lua = false, params = { { "day"/' \
    "$folder/other.api" >"$folder/hand.api"
"$lua" "$generator" lua "$folder/hand.api" "$folder/other.h" >"$folder/calls.c" 2>"$folder/log" &&
    ! grep -q glm52_tomorrow "$folder/calls.c"
verdict $? "unless it is called by hand"

echo "1..$count"
