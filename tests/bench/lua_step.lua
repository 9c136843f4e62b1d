-- What a training loop in Lua does for one step, as glm52.train does it. Arguments: the text, and the tokens of a
-- step. Returns the step as a function.
local glm52 = require "glm52"

local text, tokens = ...
local context = glm52.context {}
local config = glm52.config(context)
for key, value in pairs { ["model.preset"] = "tiny", ["data.text"] = text, ["data.pack_tokens"] = tokens,
  ["data.document_tokens"] = 256, ["train.microbatch_tokens"] = tokens } do
  config:set(key, value)
end
local dataset = glm52.dataset(context, config)
local model = glm52.model(context, config)
local step = glm52.step(model, glm52.optimizer(model), config)
local batches, history = { glm52.batch(context) }, {}

return function()
  for _, batch in ipairs(batches) do dataset:next(batch) end
  step:run(batches)
  history[#history + 1] = { step = math.tointeger(step:metric "step"), loss = step:metric "loss",
    tokens_per_second = step:metric "tokens_per_second", memory = step:metric "peak_memory" }
  context:poll()
  return history[#history].loss
end
