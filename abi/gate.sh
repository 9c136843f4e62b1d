#!/bin/sh
# The gate of the ABI: compares a build with the committed records. Exits 0 (the same), 1 (refused), 77 (cannot tell).
#   gate.sh symbols LIBRARY RECORD           exported names and their versions
#   gate.sh layout LAYOUT RECORD             prototypes, offsets, sizes, enumerators of the description
#   gate.sh abidiff LIBRARY HEADERS RECORD   types and symbols, by libabigail
#   gate.sh imports LIBRARY                  nothing that exits, aborts or prints
#   gate.sh objects OBJECT...                the same of compiled kernels, before NVIDIA's run time is linked to them
#   gate.sh record INTERFACE HEADERS LIBRARY LAYOUT DIRECTORY   writes the records anew
# docs/abi.md says why it is made like this.
set -eu
export LC_ALL=C

refuse() { printf 'refused: %s\n' "$@" >&2; exit 1; }
skip() { echo "skipped: $*" >&2; exit 77; }

symbols() { nm -D --defined-only --with-symbol-versions "$1" | awk '$2 != "A" { print $3 }' | sort; }

# Lines that went and lines that came are different mistakes.
compare() {
    gone=$(comm -23 "$2" "$1") new=$(comm -13 "$2" "$1")
    [ -z "$gone" ] || refuse "removed or changed, which breaks every program built before (docs/abi.md):" "$gone"
    [ -z "$new" ] || refuse "new, and not yet in $(basename "$2"): run ninja abi-baseline in the build folder and commit abi/" "$new"
}

has_debug() { readelf -S --wide "$1" | grep -q '\.debug_info'; }

# Only the header's own types count as public, and only if the record tells where each type stands: without locations, or
# with bare file names, abidiff 2.2 takes every change of a struct for a private one and says nothing.
check_types() {
    command -v abidiff >/dev/null || skip "abidiff is not installed (package abigail-tools)"
    grep -q "architecture='elf-amd-x86_64'" "$3" || refuse "$3 is no record of x86-64"
    [ "$(uname -m)" = x86_64 ] || skip "the record is of x86-64"
    has_debug "$1" || refuse "$1 has no debug information: abidiff would find no difference"
    grep -q "filepath='include/glm52.h'" "$3" || refuse "$3 lacks locations: abidiff would find no difference"
    # Any exit but 0: an added parameter is not even marked as incompatible.
    if ! difference=$(abidiff --no-added-syms --headers-dir1 "$2" --headers-dir2 "$2" "$3" "$1" 2>&1); then
        refuse "$difference" "an intended addition: run ninja abi-baseline in the build folder and commit abi/"
    fi
}

printers='v?f?d?printf|f?puts|puts|f?putc|putchar|fwrite|perror|psignal|v?(err|warn)x?|v?syslog|std(in|out|err)'
enders='_?exit|_Exit|quick_exit|abort|__assert_fail|__assert|raise|kill|signal|sigaction|system|longjmp'

check_imports() {
    found=$(nm -D --undefined-only "$1" | awk '{ print $2 }' | sed 's/@.*//' |
        grep -E "^(_IO_)?(__)?($printers|$enders)(_chk|_unlocked)?\$") || return 0
    refuse "the library must not exit, abort, print or catch signals, and imports:" "$found"
}

# nvcc gives every device function that it does not inline a stand-in for the host, which calls exit() and which nothing
# can call.
check_objects() {
    found=$(nm -A --undefined-only "$@" | grep -E " U (_IO_)?(__)?($printers|$enders)(_chk|_unlocked)?\$" |
        grep -v ' U exit$') || return 0
    refuse "the kernels' host code must not abort, print or catch signals, and refers to:" "$found"
}

write_records() {
    command -v abidw >/dev/null || refuse "abidw is needed (package abigail-tools)"
    symbols "$3" >"$5/libglm52.symbols"
    cp "$4" "$5/libglm52.layout"
    abidw --headers-dir "$2" --no-corpus-path --no-comp-dir-path "$1" |
        sed -E "s|filepath='[^']*/stub.c'|filepath='stub.c'|; s|path='[^']*/stub.c'|path='stub.c'|
                s|filepath='[^']*include/glm52.h'|filepath='include/glm52.h'|" >"$5/libglm52.abi"
    echo "written: libglm52.symbols, libglm52.layout, libglm52.abi in $5; commit them with the change of the header"
}

what=$1
shift
case $what in
symbols)
    got=$(mktemp)
    trap 'rm -f "$got"' EXIT
    symbols "$1" >"$got"
    compare "$got" "$2" ;;
layout) compare "$1" "$2" ;;
abidiff) check_types "$@" ;;
imports) check_imports "$1" ;;
objects) check_objects "$@" ;;
record) write_records "$@" ;;
*) refuse "unknown: $what" ;;
esac
