#!/bin/sh
# Builds everything with AddressSanitizer and UndefinedBehaviorSanitizer into build-sanitize/ and runs the tests:
#
#     sh tests/sanitize.sh [ARGUMENT...]      arguments go to meson test, e.g. --suite model
#
# Any report fails its test: bad accesses, undefined behaviour, and memory that is still held at the end. Left out are the
# suites that look at how the shared library is linked (abi, install), which the sanitizers change.
set -eu
cd "$(dirname "$0")/.."
build=${BUILD:-build-sanitize}

[ -e $build/build.ninja ] ||
    meson setup $build --buildtype=debugoptimized -Dcuda=disabled -Dc_args=-O1 -Db_sanitize=address,undefined -Db_lundef=false
ninja -C $build

# CK_FORK=no: a test in a process of its own would end before its leaks are looked for.
export CK_FORK=no
export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
options=abort_on_error=1:detect_stack_use_after_return=1:strict_string_checks=1
status=0
ASAN_OPTIONS=$options:detect_leaks=1 \
    meson test -C $build --print-errorlogs --timeout-multiplier 10 --no-suite abi --no-suite install --no-suite docs --no-suite lua "$@" ||
    status=$?

# The interpreter of these was built without the sanitizer, and what it holds at the end is its own affair; mawk, which they
# use, compares beyond the end of its buffers.
[ $# != 0 ] || meson test -C $build --print-errorlogs --timeout-multiplier 10 --suite lua --no-suite slow --wrap \
    "env LD_PRELOAD=$(${CC:-cc} -print-file-name=libasan.so) ASAN_OPTIONS=$options:detect_leaks=0:strict_memcmp=0" || status=$?
# What Lua leaves behind, by the command, whose interpreter ends in order.
[ $# != 0 ] || [ ! -x $build/bindings/lua/glm52 ] || ASAN_OPTIONS=$options:detect_leaks=1 OMP_NUM_THREADS=1 \
    $build/bindings/lua/glm52 train tests/lua/lifetimes.lua tests/lua || status=$?
exit $status
