#!/bin/sh
# mutants.sh CC GATE STUB MAP HEADERS RECORDS LUA GENERATOR DESCRIPTION: breaks the ABI in every way that we know to be easy to
# miss, and expects the gate to refuse each. TAP.
set -u
export LC_ALL=C
cc=$1 gate=$2 stub=$3 map=$4 headers=$5 records=$6 lua=$7 generator=$8 description=$9
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
count=0

# expect WORD NAME COMMAND...: COMMAND refuses, and names WORD.
expect() {
    word=$1 name=$2
    shift 2
    count=$((count + 1))
    "$@" >"$work/log" 2>&1
    status=$?
    if [ $status = 77 ]; then
        echo "ok $count - $name # SKIP $(head -n 1 "$work/log")"
    elif [ $status = 1 ] && grep -q -e "$word" "$work/log"; then
        echo "ok $count - $name"
    else
        echo "not ok $count - $name (status $status)"
        sed 's/^/# /' "$work/log"
    fi
}

passes() {
    name=$1
    shift
    count=$((count + 1))
    "$@" >"$work/log" 2>&1
    case $? in
    0) echo "ok $count - $name" ;;
    77) echo "ok $count - $name # SKIP $(head -n 1 "$work/log")" ;;
    *) echo "not ok $count - $name"; sed 's/^/# /' "$work/log" ;;
    esac
}

# mutant HEADER-EDIT STUB-EDIT MAP-EDIT [FLAGS]: a library of the edited interface in $work/include and $work/lib.so.
mutant() {
    rm -rf "$work/include"
    mkdir "$work/include"
    sed "$1" "$headers/glm52.h" >"$work/include/glm52.h"
    sed "$2" "$stub" >"$work/stub.c"
    sed "$3" "$map" >"$work/map"
    shift 3
    $cc -g -fPIC -shared -fvisibility=hidden "$@" -I"$work/include" -Wl,-soname,libglm52.so.0 \
        -Wl,--version-script="$work/map" "$work/stub.c" -o "$work/lib.so" || echo "Bail out! the mutant does not compile"
}

types() { sh "$gate" abidiff "$work/lib.so" "$work/include" "${1:-$records/libglm52.abi}"; }
exports() { sh "$gate" symbols "$work/lib.so" "$records/libglm52.symbols"; }
layout() {
    $lua "$generator" layout "$work/api" "$work/include/glm52.h" >"$work/layout" || return
    sh "$gate" layout "$work/layout" "$records/libglm52.layout"
}
described() { sed "$1" "$description" >"$work/api"; }

mutant '' '' ''
passes "an unchanged interface: types" types
passes "an unchanged interface: symbols" exports

remove='/glm52_feature/d'
mutant "$remove" '/glm52_feature/,/^}/d' "$remove"
expect glm52_feature "a removed function: types" types
expect glm52_feature "a removed function: symbols" exports
described "$remove"
expect glm52_feature "a removed function: layout" layout

edit='s/glm52_dataset_seek(\(.*\))/glm52_dataset_seek(\1, int32_t more)/'
mutant "$edit" "$edit" ''
expect glm52_dataset_seek "an added parameter: types" types
described '/glm52_dataset_seek/s/ } } },/ }, { "more", "int32_t" } } },/'
expect glm52_dataset_seek "an added parameter: layout" layout

mutant '/const char \*policy;/i\    uint64_t inserted;' '' ''
expect inserted "an inserted field: types" types

mutant 's/int32_t on_device;/uint32_t on_device;/' '' ''
expect glm52_view "a changed member type: types" types
described '/"on_device"/s/"on_device", "int32_t"/"on_device", "uint32_t"/'
expect on_device "a changed member type: layout" layout

mutant 's/uint64_t calls;/uint64_t calls, more;/' '' ''
expect glm52_plan_row "an appended field, not recorded: types" types

mutant 's/GLM52_E_INTERNAL = -16/GLM52_E_INTERNAL = -17/' '' ''
described 's/GLM52_E_INTERNAL = -16/GLM52_E_INTERNAL = -17/'
expect GLM52_E_INTERNAL "a changed enumerator: layout" layout

mutant '' '' 's/GLM52_0.1/GLM52_0.9/'
expect glm52_version "another symbol version: symbols" exports

mutant '' '' '' -s
expect "no debug information" "a stripped library" types

mutant 's/int32_t on_device;/uint32_t on_device;/' '' ''
sed "s/ filepath='[^']*'//" "$records/libglm52.abi" >"$work/no-locations.abi"
expect "lacks locations" "a record without locations" types "$work/no-locations.abi"

# New things are refused until they are described and recorded, and the message says what to do.
mutant '/glm52_feature(const/a\/* New. */\nGLM52_API int32_t glm52_new(void);' '$a int32_t glm52_new(void) { return 0; }' \
    's/  global:/&\n    glm52_new;/'
described ''
expect "ninja abi-baseline" "a new function without a description" layout
expect "ninja abi-baseline" "a new function without a record: symbols" exports
described '/{ "glm52_feature"/i\  { "glm52_new", "int32_t", threads = "any" },
/^  glm52_feature = {/i\  glm52_new = { result = "a number" },'
expect "ninja abi-baseline" "a new function without a record: layout" layout
mutant '/glm52_feature(const/a\GLM52_API int32_t glm52_new(void);' '' ''
expect "no contract" "a new function without a contract" layout

mutant '' '' ''
described '/glm52_dataset_seek = { pack/d'
expect "glm52_dataset_seek: units does not tell what pack means" "a number without a unit" layout
described 's/tokens = "\[limit\] token ids"/tokens = "token ids"/'
expect "glm52_model_generate: units must begin with the shape of tokens" "an array without a shape" layout

mutant '' '$a #include <stdio.h>\n#include <stdlib.h>\nvoid stop(void);\nvoid __attribute__((used)) stop(void) { puts(""); abort(); }' ''
expect abort "a library that ends its host" sh "$gate" imports "$work/lib.so"
$cc -c "$work/stub.c" -I"$work/include" -o "$work/kernel.o"
expect puts "kernels that print" sh "$gate" objects "$work/kernel.o"

echo "1..$count"
