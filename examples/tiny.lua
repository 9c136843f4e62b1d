-- A small but complete GLM-5.2 learns English from the bytes of a text, on two cores in less than three minutes.
--
--   glm52 train examples/tiny.lua                                on the text that ./run train makes
--   glm52 train examples/tiny.lua my.txt train.steps=1000        on a text of yours, for longer
--   glm52 plan examples/tiny.lua                                 memory and FLOPs of it
local glm52 = require "glm52"

local run = glm52.train {
  model = { preset = "tiny" },                       -- or { hub = "path/to/GLM-5.2" }
  data  = {
    text = arg[1] or glm52.sample_text(),
    tokenizer = "bytes",
    pack_tokens = 2048,
    document_tokens = 256,                           -- twice the top-k: the indexer is not trained yet
    held_out = 0.02,
  },
  optim = { policy = "adamw", lr = 3e-3, warmup = 20, schedule = "cosine" },
  train = { steps = 400, microbatch_tokens = 2048, eval_every = 50, clip = 1.0, seed = 1 },
  out   = "out/tiny",
}

print()
print(run:sample("In the beginning", { tokens = 120, temperature = 0.8 }))
print()
