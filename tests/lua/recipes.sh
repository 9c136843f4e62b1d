#!/bin/sh
# Recipes as a user runs them: mistakes and where they point, plans, a short run with all it leaves, Ctrl-C, going on.
# Usage: recipes.sh GLM52 MODULE_FOLDER EXAMPLES; prints TAP.
set -u
here=$(realpath "$(dirname "$0")")
glm52=$(realpath "$1") modules=$(realpath "$2") examples=$(realpath "$3")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder" || exit 1

. "$here/tap.sh"

# The smallest model there is, so that a step takes no time. Line numbers below count from here.
cat >small.lua <<'END'
local glm52 = require "glm52"
local run = glm52.train {
  model = { preset = "tiny", num_hidden_layers = 2, hidden_size = 32, vocab_size = 256, eos_token_id = {},
            pad_token_id = -1 },
  data = { text = "text", pack_tokens = 256, document_tokens = 128, held_out = 0.05 },
  optim = { lr = 1e-2, warmup = 2 },
  train = { steps = 6, microbatch_tokens = 256, microbatches = 2, eval_every = 3 },
  out = "small",
}
print("sample: " .. run:sample("And the", { tokens = 5, temperature = 0 }))
END
replaced() { sed "$1" small.lua >recipe.lua; }

# ---- mistakes

replaced 's/warmup/warm_up/'
answers "a wrong key" 1 "glm52: recipe.lua:6: optim.warm_up: no such option; did you mean optim.warmup?" \
    "$glm52" train recipe.lua
answers "a wrong key under lua5.4" 1 "lua5.4: recipe.lua:6: optim.warm_up: no such option; did you mean optim.warmup?" \
    env LUA_CPATH="$modules/?.so" lua5.4 recipe.lua
replaced 's/steps = 6/steps = -6/'
answers "a wrong value" 1 "glm52: recipe.lua:7: train.steps = -6 is out of range 0 .. 1000000000; nearest: 0" \
    "$glm52" train recipe.lua
replaced 's/document_tokens = 128/document_tokens = 512/'
answers "values that contradict each other" 1 \
    "glm52: recipe.lua:5: data.document_tokens = 512 is more than data.pack_tokens = 256; nearest: 256" \
    "$glm52" train recipe.lua
replaced 's/text = "text"/text = print/'
answers "a value of no use" 1 \
    "glm52: recipe.lua:5: data.text is a function; an option is a number, a text, true, false or a list" \
    "$glm52" train recipe.lua
cat >recipe.lua <<'END'
-- optim = { lr = 1 } in a comment, and [[ optim = { lr = 2 } ]] in a text, are no place of a key
local note = "optim = { lr = 3 }"
local settings = {
  model = { preset = "tiny" },
  ["optim"] = {
    lr = -1 },
}
return require "glm52".train(settings)
END
answers "a table made before the call" 1 "glm52: recipe.lua:6: optim.lr = -1 is out of range 0 .. 100; nearest: 0" \
    "$glm52" train recipe.lua
answers "a wrong argument" 1 \
    "glm52: argument train.step=3: train.step: no such option; did you mean train.steps?" \
    "$glm52" train small.lua train.step=3
answers "a missing text" 1 "glm52: argument data.text=none: data.text: cannot open none: No such file or directory
  set data.text to a text file that exists and can be read" "$glm52" train small.lua data.text=none
echo file >file
answers "a directory that cannot be made" 1 "glm52: argument out=file/x: out = file/x cannot be written: Not a directory" \
    "$glm52" train small.lua out=file/x
echo 'local x; x.y = 1' >recipe.lua
answers "a mistake in Lua" 1 "glm52: recipe.lua:1: attempt to index a nil value (local 'x')" "$glm52" train recipe.lua
answers "a recipe that is not there" 1 "glm52: cannot open none.lua: No such file or directory" \
    "$glm52" train none.lua
answers "a mistyped flag" 2 "glm52: --resum: no such flag; did you mean --resume?" "$glm52" train small.lua --resum
answers "an unknown flag" 2 "glm52: --fast: no such flag
  flags of the recipe's own stand behind --" "$glm52" train small.lua --fast
answers "a mistyped flag under lua5.4" 1 "lua5.4: --reusme: no such flag; did you mean --resume?" \
    env LUA_CPATH="$modules/?.so" lua5.4 small.lua --reusme
echo 'print(arg[1], arg[2], arg[3], ...)' >recipe.lua
"$glm52" train recipe.lua one -- --fast a=1 >out 2>err
holds "arguments of the recipe's own" grep -q '^one	--fast	a=1	one	--fast	a=1$' out
answers "an unknown option in glm52 config" 1 "glm52: optim.lrr: no such option; did you mean optim.lr?" \
    "$glm52" config optim.lrr
holds "nothing was written by runs that failed" test ! -e small

# ---- plans and options

"$glm52" plan small.lua >out 2>err
holds "a plan shows memory, FLOPs and time" \
    awk '/^  optimizer .*moments/ { m = 1 } /^  total/ { f = 1 } /FLOP\/s sustained/ { t = 1 }
        END { exit !(m && f && t) }' out
holds "a plan trains nothing" test ! -e small
"$glm52" plan small.lua device=cuda >out 2>err
holds "a plan for a GPU has its workspaces, or says that it has not" sh -c "grep -q '^  workspace' out &&
    { grep -q 'plan counts the workspaces of the cpu, not of cuda' err || test -e '$modules/../../lib/libglm52-cuda.so'; }"
"$glm52" plan "$examples/glm52.lua" >out 2>err
holds "the plan of the full model" grep -q '^model .*78 layers (3 dense + 75 MoE), 743' out
"$glm52" config optim >out 2>err
holds "options of a section" awk '/^optim\.lr .*number .*2e-4/ { found = 1 } END { exit !found }' out
"$glm52" config >out 2>err
holds "all options" awk '/^train\.steps/ || /^model\.hidden_size/ { n++ } END { exit n != 2 }' out

# ---- a run

"$glm52" train small.lua >out 2>err
holds "a run ends well" test $? = 0
holds "its last line is the held-out loss" last_line out "held-out loss N"
holds "its sample comes before" grep -q '^sample: And the' out
holds "it shows that the saved model loads again" grep -q 'small loads again to the same held-out loss' out
holds "it leaves model, measurements and picture" \
    test -s small/config.json -a -s small/model.safetensors -a -s small/metrics.jsonl -a -s small/loss.svg
holds "a line of metrics per step and evaluation" \
    awk '/"loss":/ { steps++ } /"held_out_loss":/ { evaluations++ }
        END { exit !(steps == 6 && evaluations == 2) }' small/metrics.jsonl
cp small/model.safetensors uninterrupted

env LUA_CPATH="$modules/?.so" lua5.4 small.lua train.steps=2 out=other >out 2>err
holds "lua5.4 takes the same arguments" last_line out "held-out loss N"
holds "nobody asked for a profile" sh -c "! grep -q '^part ' out && test ! -e small/profile.jsonl"
"$glm52" train small.lua train.steps=3 out=timed report.profile=true >out 2>err
holds "a profile is printed and kept" sh -c "grep -q '^optimizer.adamw .*adamw .*TB/s' out &&
    grep -q '^a step: [0-9.]* ms, of which operations [0-9.]* ms (mean of 2)' out && test -s timed/profile.jsonl"
holds "and trains as many steps" awk 'END { exit !/"step":2,/ }' other/metrics.jsonl
replaced '/pad_token_id/d; s/{ preset.*/{ hub = "other" },/'
answers "a hub directory is a model to start from" 0 "" "$glm52" train recipe.lua train.steps=2 out=third
replaced '/pad_token_id/d; s/{ preset.*/{ hub = "nowhere" },/'
answers "a hub directory that is not there" 1 \
    "glm52: recipe.lua:3: cannot open nowhere/config.json: No such file or directory" "$glm52" train recipe.lua

# ---- interruption

# Stops a long run by a signal once it is under way.
interrupt() { # SIGNAL
    "$glm52" train small.lua train.steps=100000 optim.decay_steps=6 >out 2>err &
    run=$!
    tries=0
    until [ -s small/metrics.jsonl ] || [ $tries = 300 ]; do sleep 0.1; tries=$((tries + 1)); done
    kill "-$1" $run
    wait $run
}

rm -r small
interrupt INT
holds "Ctrl-C ends with status 130" test $? = 130
holds "and says where the state is" grep -q '^glm52: interrupted after step [0-9]* of 100000; its state is in small' err
holds "and how to go on" grep -q '^  go on with: .* train small.lua .*--resume$' err
"$glm52" train small.lua >out 2>err
holds "an interrupted run is not replaced unasked" grep -q '^glm52: small.lua:8: small holds the state of a run' err
"$glm52" train small.lua --resume optim.lr=0.02 data.pack_tokens=255 >out 2>err
holds "a resumed run must read the same data" grep -q 'data.pack_tokens = 255, but the state' err
step=$(sed -n 's/.*"step":\([0-9]*\),"stage_begin.*/\1/p' small/run.json)
answers "a resumed run must be the same recipe" 1 "glm52: small.lua:6: optim.decay_steps = 0, but the state in small was \
trained with 6
  restore it; to go on with the change, give it as an argument, optim.decay_steps=0, or resume = \"changed\" (--resume=changed)" \
    "$glm52" train small.lua --resume "train.steps=$((step + 2))"
replaced 's/lr = 1e-2/lr = 2e-2/'
"$glm52" train recipe.lua --resume=changed "train.steps=$((step + 1))" optim.decay_steps=6 >out 2>err
holds "or changes are agreed to, and named" grep -q '^changed  optim.lr = 0.02, was 0.01' out
"$glm52" train small.lua --resume optim.decay_steps=6 optim.lr=0.01 "train.steps=$((step + 2))" >out 2>err
holds "it goes on" last_line out "held-out loss N"
holds "with every step measured once" \
    awk -v last=$((step + 2)) -F '[:,]' '/"loss":/ { n++; if (n != $2) exit }
        END { exit n != last }' small/metrics.jsonl
"$glm52" train small.lua train.steps=2 out=two optim.decay_steps=6 >out 2>err
"$glm52" train small.lua out=two optim.decay_steps=6 train.steps=6 --resume >out 2>err
holds "a resumed run ends with the weights of an uninterrupted one" cmp uninterrupted two/model.safetensors

# ---- what the state is of

mv two/run.json kept
missing="glm52: small.lua:8: two/state holds a state of step 6, but two/run.json, which says of what run, is missing
  restore it; resume=false starts anew and replaces the state"
sed 's/out = "small"/out = "two"/' small.lua >two.lua
missing=$(echo "$missing" | sed 's/small.lua/two.lua/')
answers "a state without its run is not gone on from" 1 "$missing" "$glm52" train two.lua --resume
answers "nor replaced unasked" 1 "$missing" "$glm52" train two.lua
sed 's/"optim.lr":"0.01"/"optim.lr":"0.02"/' kept >two/run.json
answers "a run.json that was edited" 1 "glm52: two/run.json is damaged: the recipe in it has another hash than it says
  restore it, or start anew with resume = false" "$glm52" train two.lua --resume
echo '{"finished":true,"step":1}' >two/run.json
"$glm52" train two.lua train.steps=0 out=two >out 2>err
holds "what a finished run left is replaced, whatever wrote it" test $? = 0
rm -r two kept
"$glm52" train two.lua optim.decay_steps=6 >out 2>err
cp two/state/step-000006/config.json kept
sed 's/"rope_theta": [0-9.]*/"rope_theta": 77.0/' kept >two/state/step-000006/config.json
answers "a state of another model" 1 "glm52: two.lua:3: model.rope_theta = 10000.0, but the state in two was trained with 77.0
  two/state/step-000006/config.json says so: is it the state of another run?" \
    "$glm52" train two.lua --resume optim.decay_steps=6
mv kept two/state/step-000006/config.json
rm -r two/state
"$glm52" train two.lua --resume >out 2>err
holds "without a state a run starts anew" grep -q '^resume   there is no state to go on from' out

# ---- a recipe that is not trusted

cat >recipe.lua <<'END'
local glm52 = require "glm52"
local run = glm52.train { model = { preset = "tiny", num_hidden_layers = 2, hidden_size = 32, vocab_size = 256 },
  data = { text = arg[1], pack_tokens = 256, document_tokens = 128 }, train = { steps = 2, microbatch_tokens = 256 },
  out = "fenced" }
print("sample:" .. run:sample "And")
END
"$glm52" train recipe.lua --sandbox text >out 2>err
holds "a sandboxed recipe trains what it describes" last_line out "held-out loss N"
holds "after it was evaluated" test "$(head -n 1 out)" = "sample:" -a -s fenced/model.safetensors
"$glm52" plan --sandbox recipe.lua text >out 2>err
holds "and has a plan" grep -q 'FLOP/s sustained' out
answers "its mistakes are placed" 1 "glm52: recipe.lua:3: data.text = /etc/passwd leaves the current directory, which a \
sandboxed recipe may not
  give it as an argument: data.text=PATH" "$glm52" train recipe.lua --sandbox /etc/passwd
answers "arguments may name any path" 1 "glm52: argument data.text=/none: data.text: cannot open /none: No such file or directory
  set data.text to a text file that exists and can be read" "$glm52" train --sandbox recipe.lua text data.text=/none
echo 'os.remove "text"' >recipe.lua
answers "nothing else is there" 1 "glm52: recipe.lua:1: attempt to index a nil value (global 'os')" \
    "$glm52" train recipe.lua --sandbox
echo 'while true do end' >recipe.lua
answers "and no end of time" 1 "glm52: the sandbox's budget of instructions is spent" "$glm52" train recipe.lua --sandbox

rm -r small
interrupt TERM
holds "SIGTERM ends with status 143" test $? = 143
"$glm52" train small.lua resume=false >out 2>err
holds "resume=false starts anew" awk 'NR == 1 { exit !/"step":1,/ }' small/metrics.jsonl

echo "1..$count"
