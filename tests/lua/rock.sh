#!/bin/sh
# The rockspec: is one, and with luarocks makes a rock that trains, from a copy of the sources, offline.
# Usage: rock.sh SOURCE LUA; prints TAP.
set -u
source=$(realpath "$1") lua=$2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
spec=bindings/lua/glm52-scm-1.rockspec
count=0
verdict() {
    count=$((count + 1))
    if [ "$1" = 0 ]; then
        echo "ok $count - $2"
    else
        echo "not ok $count - $2"
        tail -n 30 "$folder/log" | sed 's/^/# /'
    fi
}
skip() { count=$((count + 1)); echo "ok $count - $1 # SKIP $2"; }

cat >"$folder/check.lua" <<'END'
local spec = {}
assert(loadfile(arg[1], "t", spec))()
assert(arg[1]:match "[^/]*$" == spec.package .. "-" .. spec.version .. ".rockspec", "package and version name the file")
assert(spec.source.url and spec.description.summary and spec.dependencies[1]:find "^lua >= 5.4")
assert(spec.build.type == "command" and spec.build.install.lib.glm52)
for option in spec.build.build_command:gmatch "%-D([%w_]+)=" do
  local file = assert(io.open(arg[2] .. "/meson_options.txt"))
  assert(file:read("a"):find("option('" .. option .. "'", 1, true), option .. " is no option of the build")
  file:close()
end
END
"$lua" "$folder/check.lua" "$source/$spec" "$source" >"$folder/log" 2>&1
verdict $? "the rockspec says what it must"

if ! command -v luarocks >/dev/null; then
    for name in lint make train; do skip "luarocks: $name" "luarocks is not installed"; done
else
    luarocks --lua-version 5.4 lint "$source/$spec" >"$folder/log" 2>&1
    verdict $? "luarocks finds nothing wrong with it"
    mkdir "$folder/copy" &&
        (cd "$source" && cp -r abi bindings cuda include lib meson.build meson_options.txt "$folder/copy")
    (cd "$folder/copy" && luarocks --lua-version 5.4 --tree "$folder/tree" make --deps-mode=none $spec) >"$folder/log" 2>&1
    verdict $? "luarocks makes a rock of it"
    cat >"$folder/train.lua" <<'END'
local glm52 = require "glm52"
local run = glm52.train { model = { preset = "tiny", num_hidden_layers = 2, hidden_size = 32 }, data = { pack_tokens = 32 },
  train = { steps = 2, microbatch_tokens = 32 }, source = function(pack) return { ("%032d"):format(pack):byte(1, -1) } end }
assert(run.history[2].loss > 0)
END
    # Not one file of the build is needed any more.
    rm -rf "$folder/copy"
    LUA_PATH="$folder/tree/share/lua/5.4/?.lua" LUA_CPATH="$folder/tree/lib/lua/5.4/?.so" "$lua" "$folder/train.lua" \
        >"$folder/log" 2>&1 && ! ldd "$folder/tree/lib/lua/5.4/glm52.so" | grep -E 'libglm52|liblua'
    verdict $? "the rock trains on its own"
fi
echo "1..$count"
