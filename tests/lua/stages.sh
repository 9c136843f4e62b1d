#!/bin/sh
# Recipes in stages: mistakes and where they point, plans, a run with all it leaves, Ctrl-C within a stage, going on.
# Usage: stages.sh GLM52 EXAMPLES; prints TAP.
set -u
here=$(realpath "$(dirname "$0")")
glm52=$(realpath "$1") examples=$(realpath "$2")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder" || exit 1
. "$here/tap.sh"

# Line numbers below count from here.
cat >small.lua <<'END_OF_RECIPE'
local glm52 = require "glm52"
local run = glm52.train {
  model = { preset = "tiny", num_hidden_layers = 2, hidden_size = 32, index_topk = 16, num_nextn_predict_layers = 1 },
  data = { text = "text", pack_tokens = 256, document_tokens = 128, held_out = 0.05 },
  optim = { lr = 1e-2, warmup = 1 },
  train = { steps = 6, microbatch_tokens = 256, eval_every = 3 },
  out = "small",
  stages = {
    { name = "dense", attention = "dense", steps = 4, mtp = { depths = 2 } },
    { name = "only look", attention = "sparse", steps = 0 },
    {
      name = "two", attention = "dense", train_only = "indexer",
      indexer_loss = { kind = "dense", coeff = 1.0 },
      optim = { schedule = "constant" }, steps = 5, lr = 5e-3,
    },
    { attention = "sparse", indexer_loss = { kind = "sparse", coeff = 1e-1 }, microbatches = 2, lr = 1e-3 },
    { name = "look back", attention = "dense", steps = 0 },
  },
}
if not run.held_out then return end
for i, stage in ipairs(run.stages) do
  print(i, stage.name, stage.steps, stage.first, stage.last, stage.held_out_loss)
end
END_OF_RECIPE
replaced() { sed "$1" small.lua >recipe.lua; }

# mistake NAME LINE TEXT EDIT: the edited recipe is refused, at that line of it.
mistake() {
    replaced "$4"
    answers "$1" 1 "glm52: recipe.lua:$2: $3" "$glm52" train recipe.lua
}

# ---- mistakes

mistake "a wrong key of a stage" 12 "stage two: train_onyl: no such option; did you mean train_only?" 's/train_only/train_onyl/'
mistake "a wrong key of its section" 14 "stage two: optim.shedule: no such option; did you mean optim.schedule?" 's/schedule/shedule/'
mistake "a wrong value" 14 "stage two: optim.lr = -1 is out of range 0 .. 100; nearest: 0" 's/lr = 5e-3/lr = -1/'
mistake "a wrong value in a stage without a name" 16 \
    "stage 4: train.microbatches = 0 is out of range 1 .. 65536; nearest: 1" 's/microbatches = 2/microbatches = 0/'
mistake "a contradiction" 9 "stage dense: indexer_loss.kind = sparse needs the selected keys of train.attention = sparse
  set indexer_loss.kind = dense, or train.attention = sparse" 's/mtp = { depths = 2 }/indexer_loss = { kind = "sparse" }/'
mistake "a contradiction with the recipe" 5 "stage dense: optim.warmup = 5 is longer than train.steps = 4; nearest: 4" \
    's/warmup = 1/warmup = 5/'
mistake "two stages of one name" 12 "stage dense: stage 1 has that name too
  give each stage a name of its own" 's/"two"/"dense"/'
mistake "another model in a stage" 9 \
    "stage dense: model.hidden_size = 64 in one stage, 32 in the recipe: all stages share it
  write it beside \`stages\`" 's/mtp = { depths = 2 }/model = { hidden_size = 64 }/'
mistake "a stage that is none" 8 'stages[1] is no table' 's/^    { name = "dense".*/    "dense",/'
mistake "no list" 8 'stages is not a list of stages
  write stages = { {...}, {...} }' 's/^    { name = "dense".*/    dense = {},/'
mistake "what only opening a later stage shows" 16 \
    "stage 4: optim.rules: \"*.nowhere=muon\" matches no parameter
  patterns match whole parameter names, as in *.mlp.gate.weight=adamw" 's/microbatches = 2/rules = "*.nowhere=muon"/'
answers "a wrong argument for a stage" 1 \
    "glm52: argument stages.two.lrr=1: stage two: lrr: no such option
  \`glm52 config\` lists all options" \
    "$glm52" train small.lua stages.two.lrr=1
answers "an argument for a stage that is not there" 1 "glm52: argument stages.6.lr=1: the recipe has no stage 6" \
    "$glm52" train small.lua stages.6.lr=1
holds "nothing was written by runs that failed" test ! -e small

# ---- plans

"$glm52" plan small.lua >out 2>err
holds "a plan shows each stage" awk '/^stage 1 of 5: dense, 4 steps/ { n++ } /^stage 2 of 5: only look, evaluated only/ { n++ }
    /^stage 3 of 5: two, 5 steps/ { n++ } /^model .*stage warmup/ { n++ }
    /^all stages: 15 steps, / { n++ } END { exit n != 5 }' out

# ---- a run

"$glm52" train small.lua >out 2>err
holds "stages run to their end" test $? = 0
holds "the run tells what they did" awk -F '\t' '/^[1-5]\t/ { print $2, $3, $4, $5 > "table"; n += $6 > 0 } END { exit n != 5 }' out
holds "in steps that are counted on" test "$(cat table)" = "dense 4 0 4
only look 0 4 4
two 5 4 9
stage 4 6 9 15
look back 0 15 15"
holds "and it ends as the last that trained" test "$(awk -F '\t' '/^4\t/ { printf "held-out loss %.3f", $6 }' out)" = \
    "$(tail -n 1 out)"
holds "the progress says which" grep -q '^  two  *9/15 .*0:0' out
holds "measurements name their stage" \
    awk '/"step":4,"stage":"dense","loss"/ { n++ } /"step":4,"stage":"only look","held_out_loss"/ { n++ }
        /"step":9,"stage":"two","loss"/ { n++ } /"step":9,"stage":"two","held_out_loss"/ { n++ }
        /"step":10,"stage":"stage 4","loss"/ { n++ } /"loss":/ { steps++ } END { exit !(n == 5 && steps == 15) }' small/metrics.jsonl
holds "the picture too" grep -q '>only look</text>' small/loss.svg
cp small/model.safetensors uninterrupted

"$glm52" train small.lua train.steps=2 stages.two.steps=3 out=other >out 2>err
holds "arguments are for all stages or for one" \
    awk -F '\t' '/^[1-5]\t/ { steps = steps $3 " " } END { exit steps != "2 0 3 2 0 " }' out

# ---- interruption

"$glm52" train small.lua stages.two.steps=100000 out=cut >out 2>err &
run=$!
tries=0
until grep -qs '"stage":"two"' cut/metrics.jsonl || [ $tries = 600 ]; do sleep 0.1; tries=$((tries + 1)); done
kill -INT $run
wait $run
holds "Ctrl-C ends with status 130" test $? = 130
holds "and says in which stage" grep -q '^glm52: interrupted after step [0-9]* of 100010, in stage two; its state is in cut' err
step=$(sed -n 's/.*"step":\([0-9]*\),"stage_begin":4,.*/\1/p' cut/run.json)
steps=$((step - 4 + 2))
"$glm52" train small.lua stages.two.steps=$steps out=cut --resume >out 2>err
holds "a resumed run goes on in that stage" grep -q "^resume *after step $step, in stage two" out
holds "with the stages before as they were" \
    awk -F '\t' '/^1\tdense\t4\t0\t4\t[1-9]/ || /^2\tonly look\t0\t.*\t[1-9]/ { n++ } END { exit n != 2 }' out
"$glm52" train small.lua stages.two.steps=$steps out=whole >out 2>err
holds "and ends with the weights of an uninterrupted one" cmp whole/model.safetensors cut/model.safetensors

awk '/^  stages/ { inside = 1 } !inside || /stages|name = "dense"/ { print } /^  },/ && inside { print; inside = 0 }' small.lua >first.lua
"$glm52" train first.lua out=parts >out 2>err
"$glm52" train small.lua out=parts --resume >out 2>err
holds "stages that are written later go on from the end" cmp uninterrupted parts/model.safetensors
"$glm52" train first.lua out=small --resume >out 2>err
holds "a stage that has gone is missed" \
    grep -q '^glm52: first.lua:8: small holds the state of stage 4, which the recipe does not have' err

# ---- the example

"$glm52" train "$examples/dsa_adaptation.lua" text out=example train.steps=2 optim.warmup=0 data.document_tokens=128 \
    data.pack_tokens=256 train.microbatch_tokens=256 >out 2>err
holds "the example runs" test $? = 0
holds "and compares sparse with dense attention" awk '/^sparse attention, adapted +[0-9.]+ +[-+][0-9.]+ %/ { n++ }
    /^too few steps to judge/ { n++ } END { exit n != 2 }' out

echo "1..$count"
