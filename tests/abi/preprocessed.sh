#!/bin/sh
# preprocessed.sh CC HEADERS MAP: the names that the compiler sees marked as exported are those of the version script, and
# the other way round, whatever conditions surround them in the header.
set -eu
export LC_ALL=C
declared=$(mktemp) exported=$(mktemp)
trap 'rm -f "$declared" "$exported"' EXIT
echo '#include <glm52.h>' | $1 -E -P -I"$2" - | tr '\n' ' ' | grep -oE 'visibility\("default"\)[^;]*;' |
    sed -E 's/^[^;]*[^a-z0-9_](glm52_[a-z0-9_]+)\(.*/\1/; s/^.*\)\)\).*[ *](glm52_[a-z0-9_]+)\(.*$/\1/' | sort >"$declared"
sed -nE 's/^ *(glm52_[a-z0-9_]+);$/\1/p' "$3" | sort >"$exported"
diff -u "$exported" "$declared" && [ -s "$declared" ]
