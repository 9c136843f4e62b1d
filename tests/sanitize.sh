#!/bin/sh
# Builds everything with AddressSanitizer and UndefinedBehaviorSanitizer into build-sanitize/ and runs the tests, and those of threads
# with ThreadSanitizer in build-sanitize-threads/:
#
#     sh tests/sanitize.sh [ARGUMENT...]      arguments go to meson test, e.g. --suite model
#     sh tests/sanitize.sh hosts              only what hosts see: the C API, Lua's lifetimes, the Python package, as CI does
#
# Any report fails its test: bad accesses, undefined behaviour, and memory that is still held at the end. Left out are the
# suites that look at how the shared library is linked (abi, install, docs), which the sanitizers change.
set -eu
cd "$(dirname "$0")/.."
build=${BUILD:-build-sanitize}

[ -e "$build"/build.ninja ] ||
    meson setup "$build" --buildtype=debugoptimized -Dcuda=disabled -Dc_args=-O1 -Db_sanitize=address,undefined -Db_lundef=false
if [ "${1:-}" = hosts ]; then
    # Words of this are meant to split.
    # shellcheck disable=SC2046
    ninja -C "$build" $(ninja -C "$build" -t targets all |
        sed -nE 's,^((tests/api/api-[a-z_-]+|bindings/lua/glm52|bindings/python/glm52/[^:]+)): .*,\1,p')
else
    ninja -C "$build"
fi

# CK_FORK=no: a test in a process of its own would end before its leaks are looked for.
export CK_FORK=no
export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
options=abort_on_error=1:detect_stack_use_after_return=1:strict_string_checks=1
status=0

# sanitized NAME LEAKS ARGUMENT...: meson's log is meson-logs/NAME.json
sanitized() {
    name=$1 leaks=$2
    shift 2
    ASAN_OPTIONS=$options:detect_leaks=$leaks \
        meson test -C "$build" --no-rebuild --print-errorlogs --timeout-multiplier 10 --logbase "$name" "$@" || status=$?
}

# Types, notebook, speed and wheel have nothing to do with memory. First of all a leak must be noticed.
python() {
    [ -e "$build"/bindings/python/glm52/_glm52.pyi ] || return 0
    ! ASAN_OPTIONS=$options sh tests/python/leaks.sh "${PYTHON:-/usr/bin/python3}" tests/python/leaking.py "$build"/lib/libglm52.so.0 \
        >/dev/null || { echo "not ok - a leak that nobody notices"; status=1; }
    sanitized sanitized-python 1 python-arrays python-objects python-threads python-training --wrap "sh $PWD/tests/python/leaks.sh"
}

# What Lua leaves behind, by programs whose interpreter ends in order. First of all a leak must be noticed.
lua_lifetimes() {
    [ -x "$build"/bindings/lua/glm52 ] || return 0
    export ASAN_OPTIONS=$options:detect_leaks=1 OMP_NUM_THREADS=1
    ! "$build"/bindings/lua/glm52 train tests/lua/leaking.lua >/dev/null 2>&1 ||
        { echo "not ok - a leak that nobody notices"; status=1; }
    "$build"/bindings/lua/glm52 train tests/lua/lifetimes.lua tests/lua || status=$?
    [ ! -x "$build"/tests/lua/lua-memory ] || "$build"/tests/lua/lua-memory || status=$?
    unset ASAN_OPTIONS OMP_NUM_THREADS
}

# What several threads do at once, by ThreadSanitizer, which wants a build of its own. One thread computes: OpenMP's own
# synchronisation is unknown to it.
threads() {
    [ -e "$build"-threads/build.ninja ] || meson setup "$build"-threads --buildtype=debugoptimized -Dcuda=disabled -Dlua=disabled \
        -Dpython=disabled -Dc_args=-O1 -Db_sanitize=thread -Db_lundef=false
    ninja -C "$build"-threads tests/api/api-threads tests/api/api-refusals
    TSAN_OPTIONS=exitcode=66 meson test -C "$build"-threads --no-rebuild --print-errorlogs --timeout-multiplier 10 \
        --logbase sanitized-threads api-threads api-refusals || status=$?
    cp "$build"-threads/meson-logs/sanitized-threads.json "$build"/meson-logs/
}

case ${1:-} in
hosts)
    threads
    sanitized sanitized 1 --suite api
    lua_lifetimes
    python ;;
'')
    sanitized sanitized 1 --no-suite abi --no-suite install --no-suite docs --no-suite lua --no-suite python
    # The interpreter of these was built without the sanitizer, and what it holds at the end is its own affair; mawk, which they
    # use, compares beyond the end of its buffers.
    sanitized sanitized-lua 0:strict_memcmp=0 --suite lua --no-suite slow \
        --wrap "env LD_PRELOAD=$(${CC:-cc} -print-file-name=libasan.so)"
    lua_lifetimes
    python
    threads ;;
*)
    sanitized sanitized 1 "$@" ;;
esac
exit $status
