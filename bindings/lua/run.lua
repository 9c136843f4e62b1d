-- What glm52.train returns: the trained model with its measurements.
local Run = {}
Run.__index = Run

-- fields: context, config, model, out ("" for none), held_out (loss or nil), history (list of {step, loss})
function Run.new(fields)
  return setmetatable(fields, Run)
end

-- Lines of a metrics file as tables of numbers; null becomes NaN.
function Run.read_metrics(path)
  local file = io.open(path, "r")
  if not file then return nil end
  local records = {}
  for line in file:lines() do
    local record = {}
    for name, value in line:gmatch('"([%w_.]+)":([^,}]+)') do record[name] = tonumber(value) or 0 / 0 end
    records[#records + 1] = record
  end
  file:close()
  return records
end

-- All measurements: a list of {step = 1, loss = 5.4, ...} and {step = 50, held_out_loss = 2.1}.
function Run:metrics()
  return self.out ~= "" and Run.read_metrics(self.out .. "/metrics.jsonl") or self.history
end

-- The text `prompt`, continued by up to options.tokens (100) tokens; options.temperature (0.8; 0 takes the likeliest)
-- and options.seed (0).
function Run:sample(prompt, options)
  options = options or {}
  if type(prompt) ~= "string" or prompt == "" then error("run:sample takes a text to continue", 2) end
  local continued = self.model:generate({ prompt:byte(1, -1) }, options.tokens or 100, options.temperature or 0.8,
    options.seed or 0)
  local text = { prompt }
  for _, token in ipairs(continued) do
    if token < 256 then text[#text + 1] = string.char(token) end  -- the rest are marks such as the end of a text
  end
  return table.concat(text)
end

function Run:__tostring()
  return string.format("glm52 run: %s%s", self.model:describe(),
    self.held_out and string.format(", held-out loss %.3f", self.held_out) or "")
end

return Run
