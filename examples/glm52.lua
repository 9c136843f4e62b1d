-- The released GLM-5.2, 744B parameters, as one rank would have to hold it to train on one pack of 4096 tokens: what
-- that takes, found without taking it.
--
--   glm52 plan examples/glm52.lua
local glm52 = require "glm52"

print(glm52.plan {
  model = { preset = "glm52", num_nextn_predict_layers = 0 },   -- no MTP
  data  = { pack_tokens = 4096 },
  optim = { policy = "adamw" },
  train = { microbatches = 1, microbatch_tokens = 4096 },
})
