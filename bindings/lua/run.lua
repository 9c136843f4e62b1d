-- What glm52.train returns: the trained model with its measurements.
local json = require "glm52.json"
local show = require "glm52.show"

local Run = {}
Run.__index = Run

-- fields: context, config, model, out ("" for none), held_out (loss or nil), history (list of {step, loss, stage}),
-- stages (list of what was trained one after another)
function Run.new(fields)
  local stages = {}
  for i, stage in ipairs(fields.stages) do
    stages[i] = { name = stage.name, steps = stage.steps, first = stage.first, last = stage.last, loss = stage.loss,
      held_out_loss = stage.held_out_loss, config = stage.config }
  end
  fields.stages = stages
  return setmetatable(fields, Run)
end

-- Lines of a metrics file as tables of numbers, and the stage's name; null becomes NaN.
function Run.read_metrics(path)
  local file = io.open(path, "r")
  if not file then return nil end
  local records = {}
  for line in file:lines() do
    local record, stage = {}, line:match('"stage":"(.-[^\\])"')
    for name, value in line:gmatch('"([%w_.]+)":([^,}"]+)') do record[name] = tonumber(value) or 0 / 0 end
    record.stage = stage and json.unquote(stage)
    records[#records + 1] = record
  end
  file:close()
  return records
end

-- All measurements: a list of {step = 1, loss = 5.4, ...} and {step = 50, held_out_loss = 2.1}; in a recipe with stages
-- also `stage`, the name.
function Run:metrics()
  return self.out ~= "" and Run.read_metrics(self.out .. "/metrics.jsonl") or self.history
end

-- The text `prompt`, continued by up to options.tokens (100) tokens; options.temperature (0.8; 0 takes the likeliest)
-- and options.seed (0). Bytes that are no UTF-8 are shown as U+FFFD.
function Run:sample(prompt, options)
  options = options or {}
  if type(prompt) ~= "string" or prompt == "" then error("run:sample takes a text to continue", 2) end
  local continued = self.model:generate({ prompt:byte(1, -1) }, options.tokens or 100, options.temperature or 0.8,
    options.seed or 0)
  local text = { prompt }
  for _, token in ipairs(continued) do
    if token < 256 then text[#text + 1] = string.char(token) end  -- the rest are marks such as the end of a text
  end
  return show.text(table.concat(text))
end

function Run:__tostring()
  return string.format("glm52 run: %s%s", self.model:describe(),
    self.held_out and string.format(", held-out loss %.3f", self.held_out) or "")
end

return Run
