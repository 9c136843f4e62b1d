-- What the classes have in Lua beyond the functions of the library, which come from their description: parameters by name,
-- all metrics at once. Packs are numbered from 0, as everywhere; parameters and rows of lists from 1.
local core = require "glm52.core"
local model, step = core.classes.model, core.classes.step

local parameter, gradient = model.parameter, model.gradient

local function number_of(self, key)
  return type(key) == "string" and self:parameter_find(key) + 1 or key
end

-- {name, policy, dtype, shape, value} of a parameter by name or number, or a list of all.
function model:parameter(key)
  local found = parameter(self, number_of(self, key))
  for _, info in ipairs(key == nil and found or { found }) do
    info.dtype, info.shape = info.value.dtype, info.value.shape
  end
  return found
end

-- Its elements: the model's own memory. After writing there, call optimizer:resync().
function model:value(key) return self:parameter(key).value end

-- A copy of its gradient.
function model:gradient(key) return gradient(self, number_of(self, key)) end

-- All numbers of the last run by name.
function step:metrics()
  local metrics = {}
  for _, name in ipairs(self:metric_name()) do metrics[name] = self:metric(name) end
  return metrics
end

function core.load(context, directory, config) return core.model_load(context, config, directory) end

core.device_count = core.context_device_count

-- The schema, a list of {key, type, range, default, summary}.
function core.options()
  local options = core.config_describe()
  for _, option in ipairs(options) do option.default = option.default_value end
  return options
end

return core
