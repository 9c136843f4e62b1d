-- From dense to sparse attention in the stages of GLM-5: a model is trained with dense attention, its indexers are
-- taught what that attends to, then both learn together while each row attends to the 128 keys its indexer selects,
-- of up to 512. Held-out loss must come within 1 % of dense attention; the exit status says whether it has.
-- Coefficients and learning rates are for this small model and few steps: GLM-5.2 adapts with coeff = 1e-3 and
-- lr = 1e-5 for far longer.
--
--   glm52 train examples/dsa_adaptation.lua                      on the text that ./run train makes
--   glm52 train examples/dsa_adaptation.lua my.txt               on a text of yours
--   glm52 train examples/dsa_adaptation.lua train.steps=2 optim.warmup=0     to see it run
local glm52 = require "glm52"

local sparse_loss = { kind = "sparse", coeff = 0.3 }

local run = glm52.train {
  model = { preset = "tiny", index_topk = 128 },
  data  = {
    text = arg[1] or glm52.sample_text(),
    pack_tokens = 2048,
    document_tokens = 512,                             -- four times the top-k
    held_out = 0.02,
  },
  optim = { policy = "adamw", lr = 3e-3, schedule = "cosine", min_lr = 3e-4, warmup = 20 },
  train = { microbatch_tokens = 2048, clip = 1.0, seed = 1 },
  out   = "out/dsa_adaptation",

  stages = {
    { name = "dense",    attention = "dense",  steps = 400 },
    { name = "switched", attention = "sparse", steps = 0 },    -- what the untrained indexers cost
    { name = "warmup",   attention = "dense",  train_only = "indexer", indexer_loss = { kind = "dense", coeff = 1.0 },
      steps = 100, lr = 5e-3, warmup = 5, schedule = "constant" },
    { name = "warmed",   attention = "sparse", indexer_loss = sparse_loss, steps = 0 },
    { name = "sparse",   attention = "sparse", indexer_loss = sparse_loss, steps = 150, lr = 3e-4, min_lr = 3e-5,
      warmup = 5 },
    { name = "dense again", attention = "dense", steps = 0 },  -- the adapted weights, with all keys
  },
}
if not run.held_out then return end                    -- asked for its plan

local loss = {}
for _, stage in ipairs(run.stages) do loss[stage.name] = stage.held_out_loss end
local function row(what, name)
  print(string.format("%-40s %8.4f  %+7.2f %%", what, loss[name], 100 * (loss[name] / loss.dense - 1)))
end

print(string.format("\n%-40s %8s  %9s", "", "held-out", "to dense"))
row("dense attention", "dense")
row("sparse attention, indexers untrained", "switched")
row("sparse attention, indexers warmed up", "warmed")
row("sparse attention, adapted", "sparse")
row("dense attention on the adapted weights", "dense again")
print()

-- The adaptation is training too: its result must also stand beside dense attention on its own weights.
local gap = 100 * (loss.sparse / math.min(loss.dense, loss["dense again"]) - 1)
if run.stages[1].steps < 400 then
  print "too few steps to judge"
elseif gap <= 1 then
  print(string.format("PASS: sparse attention is within 1 %% of dense: %+.2f %%", gap))
else
  error(string.format("FAIL: sparse attention is more than 1 %% worse than dense: %+.2f %%", gap), 0)
end
