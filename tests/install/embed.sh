#!/bin/sh
# Installs into a scratch directory, builds examples/orchestrator.c there with nothing but the installed header and
# pkg-config, against the shared and the static library, and runs both. Prints TAP. Usage: embed.sh BUILD SOURCE CC
set -u
build=$1 source=$2 cc=$3
scratch=$(mktemp -d) || exit 1
trap 'rm -rf "$scratch"' EXIT
number=0

check() { # description, command...
    number=$((number + 1)) what=$1
    shift
    if "$@" >"$scratch/log" 2>&1; then
        echo "ok $number - $what"
    else
        echo "not ok $number - $what"
        sed 's/^/# /' "$scratch/log" | tail -n 20
    fi
}

echo 1..14
DESTDIR=$scratch/root meson install -C "$build" --no-rebuild >"$scratch/log" 2>&1
pc=$(find "$scratch/root" -name glm52.pc)
check 'installs a pkg-config file' test -n "$pc"
export PKG_CONFIG_SYSROOT_DIR="$scratch/root" PKG_CONFIG_PATH="${pc%/*}"
libdir=$scratch/root$(PKG_CONFIG_SYSROOT_DIR='' pkg-config --variable=libdir glm52)
cflags="-std=c99 -D_POSIX_C_SOURCE=200809L -Wall -Wextra -Werror -O1"

in_the_beginning() { i=0; while [ $i -lt 400 ]; do echo "$i In the beginning God created the heaven and the earth."; i=$((i + 1)); done; }
in_the_beginning >"$scratch/text"

# Words in these variables are meant to split.
# shellcheck disable=SC2046,SC2086
check 'builds against the shared library' $cc $cflags "$source/examples/orchestrator.c" -o "$scratch/shared" \
    $(pkg-config --cflags --libs glm52) -Wl,-rpath,"$libdir"
# shellcheck disable=SC2046,SC2086
check 'builds against the static library' $cc $cflags "$source/examples/orchestrator.c" -o "$scratch/static" \
    $(pkg-config --cflags glm52) "$libdir/libglm52.a" $(PKG_CONFIG_SYSROOT_DIR='' pkg-config --static --libs-only-l glm52 | sed 's/-lglm52//')
needs_no_library() { ! ldd "$scratch/static" | grep -q libglm52; }
check 'the static program does not need the shared library' needs_no_library
only_ours() { ! nm -g --defined-only "$libdir/libglm52.a" | grep ' [A-Z] ' | grep -v ' glm52_'; }
check 'the static library defines no global symbol but glm52_*' only_ours
only_ours_shared() { ! nm -D --defined-only "$libdir/libglm52.so" | grep -v -e ' glm52_' -e ' GLM52_'; }
check 'the shared library exports no symbol but glm52_*' only_ours_shared

for kind in shared static; do
    check "the $kind program trains two models" "$scratch/$kind" "$scratch/text" "$scratch/out-$kind" 20
    goes_on() { "$scratch/$kind" "$scratch/text" "$scratch/out-$kind" 30 | tee "$scratch/said" && grep -q 'goes on at step' "$scratch/said"; }
    check "the $kind program goes on where it was" goes_on
    # Cancelled by a signal handler: it saves, leaves nothing in memory, and the next start goes on.
    interrupted() {
        : >"$scratch/said"
        "$scratch/$kind" "$scratch/text" "$scratch/cut-$kind" 1000000 >"$scratch/said" 2>&1 &
        until grep -q 'loss' "$scratch/said" || ! kill -0 $! 2>/dev/null; do sleep 0.1; done
        kill -INT $!
        wait $! && cat "$scratch/said" && grep -q 'interrupted; saving' "$scratch/said" && grep -q ' 0 bytes left' "$scratch/said"
    }
    check "the $kind program saves when it is interrupted" interrupted
    after() { "$scratch/$kind" "$scratch/text" "$scratch/cut-$kind" 1 | tee "$scratch/said" && grep -q 'goes on at step' "$scratch/said"; }
    check "the $kind program goes on after that" after
done
