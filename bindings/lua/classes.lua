-- What the classes have in Lua beyond the functions of the library, which come from their description: parameters by
-- name, all metrics at once, tables for configs. Packs are numbered from 0, as everywhere; parameters and rows of
-- lists from 1.
local core = require "glm52.core"
local failure = require "glm52.failure"
local json = require "glm52.json"
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

-- ---- tables for configs

local new_config, new_model, new_dataset = core.config, core.model, core.dataset
local new_optimizer, new_step = core.optimizer, core.step

local function lay_over(config, options)
  local done, text = pcall(json.encode, options)
  if not done then
    if failure.is(text) then text.where = failure.where() end
    error(text, 0)
  end
  config:load_json(text)
  return config
end

-- glm52.config(context [, {model = {...}, ["optim.lr"] = 1e-3}])
function core.config(context, options)
  local config = new_config(context)
  return options == nil and config or lay_over(config, options)
end

local function configured(context, config)
  return type(config) == "table" and core.config(context, config) or config
end

-- What a model was made of, {context, options (JSON), hub}: a table for its optimizer or step is laid over that.
local origins = setmetatable({}, { __mode = "k" })

local function over_model(made, config)
  if type(config) ~= "table" then return config end
  local origin = origins[made]
  if not origin then return config end  -- no model: it is refused as such
  local base = new_config(origin.context)
  base:load_json(origin.options)
  if origin.hub then base:load_hub(origin.hub .. "/config.json") end
  return lay_over(base, config)
end

function core.model(context, config)
  config = configured(context, config)
  local made = new_model(context, config)
  origins[made] = { context = context, options = config:dump() }
  return made
end

function core.load(context, directory, config)
  config = configured(context, config)
  local made = core.model_load(context, config, directory)
  origins[made] = { context = context, options = config and config:dump() or "{}", hub = directory }
  return made
end

function core.dataset(context, config) return new_dataset(context, configured(context, config)) end

function core.optimizer(made, config) return new_optimizer(made, over_model(made, config)) end

function core.step(made, optimizer, config) return new_step(made, optimizer, over_model(made, config)) end

-- ---- functions of the module

core.device_count = core.context_device_count

-- The schema, a list of {key, type, range, default, summary}.
function core.options()
  local options = core.config_describe()
  for _, option in ipairs(options) do option.default = option.default_value end
  return options
end

return core
