#!/bin/sh
# check.sh GOLDEN_CHECK GOLDEN: the checker must see what is wrong, on copies of the rope case; and emulate bf16.
set -u
program=$1 golden=$2
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
failures=0

# expect LAST_LINE STATUS PATH...
expect() {
    last=$1 status=$2; shift 2
    output=$("$program" "$@"); got=$?
    [ "$got" = "$status" ] && [ "$(printf '%s\n' "$output" | tail -n 1)" = "$last" ] && return
    printf '%s\n' "$output"
    echo "golden_check $*: status $got; expected $status and: $last"
    failures=$((failures + 1))
}

fresh() {
    rm -rf "$work"/* && cp "$golden/rope.safetensors" "$work/other.safetensors" && cp "$golden/rope.json" "$work/other.json"
}

fresh   # a copy under another name is the same case
expect "1 passed, 0 failed, 0 skipped" 0 "$work/other.json"
echo '{"model_type": "glm_moe_dsa"}' >"$work/config.json"
echo '{"weight_map": {}}' >"$work/model.safetensors.index.json"
expect "1 passed, 0 failed, 0 skipped" 0 "$work"
expect "2 passed, 0 failed, 0 skipped" 0 "$work" "$work/other.json"

# A kind that nobody knows, given or taken from the file's name.
echo '{"format": 1, "kind": "weather", "tensors": {}}' >"$work/a.json"
echo '{"cases": []}' >"$work/climate.json"
expect "1 passed, 0 failed, 2 skipped" 0 "$work"
expect "0 passed, 1 failed, 0 skipped" 1 "$work/a.json"
expect "0 passed, 2 failed, 0 skipped" 1 "$work/climate.json" "$work/config.json"
cp "$work/other.json" "$work/rope.json" && cp "$work/other.safetensors" "$work/rope.safetensors"
sed 's/"kind": "rope",//' "$work/other.json" >"$work/rope.json"
expect "1 passed, 0 failed, 0 skipped" 0 "$work/rope.json"

# Numbers, lists and files that are off.
fresh
size=$(wc -c <"$work/other.safetensors")
printf '\200' | dd of="$work/other.safetensors" bs=1 seek=$((size - 1)) conv=notrunc 2>/dev/null
expect "0 passed, 1 failed, 0 skipped" 1 "$work"
fresh
sed 's/"positions": {"dtype"/"absent": {"dtype"/' "$golden/rope.json" >"$work/other.json"
expect "0 passed, 1 failed, 0 skipped" 1 "$work"
fresh
sed 's/"format": 1/"format": 2/' "$golden/rope.json" >"$work/other.json"
expect "0 passed, 1 failed, 0 skipped" 1 "$work"
echo '{"kind": ' >"$work/other.json"
expect "0 passed, 1 failed, 0 skipped" 1 "$work"
fresh
rm "$work/other.safetensors"
expect "0 passed, 1 failed, 0 skipped" 1 "$work"
expect "0 passed, 1 failed, 0 skipped" 1 "$work/nothing"

# bf16 emulated in fp32 leaves the same bits.
"$program" --bf16 "$golden/hf_forward.json" >"$work/bf16"
"$program" --grid 0 "$golden/hf_forward.json" >"$work/grid"
cmp "$work/bf16" "$work/grid" || failures=$((failures + 1))
[ "$(grep -c '^  bf16 .* ok$' "$work/grid")" -gt 300 ] || { echo "few numbers in bf16"; failures=$((failures + 1)); }

echo "$failures failures"
[ "$failures" = 0 ]
