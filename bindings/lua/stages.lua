-- The stages of a recipe: each is the recipe's options with the stage's own laid over them, and a name.
local core = require "glm52.classes"
local recipe = require "glm52.recipe"

local stages = {}

-- What all stages share: one model learns from the same data, on the same device, into the same directory.
function stages.is_shared(key)
  return key:find("^model%.") or key:find("^data%.") or key == "train.seed" or not key:find(".", 1, true)
end

-- Options of a stage as it is written.
local function options_of(given)
  local options = {}
  for key, value in pairs(given) do
    local option = type(key) == "string" and recipe.long(key) or key
    if options[option] ~= nil then
      recipe.error("GLM52_E_INVALID", string.format("%s is given twice", option), "", { key = option })
    end
    if key ~= "name" then options[option] = value end
  end
  return options
end

local function check_name(stage, earlier)
  if type(stage.name) ~= "string" or stage.name == "" then
    stage.name = tostring(stage.index)
    recipe.error("GLM52_E_INVALID", "its name is not a text", "", { key = "name" })
  end
  for _, other in ipairs(earlier) do
    if other.name == stage.name then
      recipe.error("GLM52_E_INVALID", string.format("stage %d has that name too", other.index),
        "give each stage a name of its own", { key = "name" })
    end
  end
end

local function check_shared(config, base)
  for _, option in ipairs(core.options()) do
    local own, common = config:get(option.key), base:get(option.key)
    if own ~= common and stages.is_shared(option.key) then
      recipe.error("GLM52_E_INVALID", string.format("%s = %s in one stage, %s in the recipe: all stages share it",
        option.key, own, common), "write it beside `stages`", { key = option.key })
    end
  end
end

local function configure(context, options, base, stage)
  local config = recipe.config(context, options, stage)
  check_shared(config, base)
  if config:get "train.stage" ~= "" then
    recipe.error("GLM52_E_INVALID", "train.stage is the stage's name in a recipe with stages", 'write name = "..."',
      { key = "train.stage" })
  end
  config:set("train.stage", stage.name)
  config:validate()
  return config
end

-- An argument stages.STAGE.KEY=value must mean one of them.
local function check_arguments(list)
  for _, override in ipairs(recipe.overrides) do
    local whose, known = recipe.stage_argument(override), false
    for _, stage in ipairs(list) do known = known or whose == stage.name or whose == tostring(stage.index) end
    if whose and not known then
      recipe.error("GLM52_E_INVALID", "the recipe has no stage " .. whose, "", { key = override.key })
    end
  end
end

local function read_list(given)
  local list = {}
  for index, own in ipairs(given) do
    if type(own) ~= "table" then
      recipe.error("GLM52_E_INVALID", string.format("stages[%d] is no table", index), "", { key = "stages" })
    end
    local stage = { index = index, name = own.name == nil and "stage " .. index or own.name }
    recipe.in_stage(stage, check_name, stage, list)
    stage.options = recipe.in_stage(stage, options_of, own)
    list[index] = stage
  end
  local entries = 0
  for _ in pairs(given) do entries = entries + 1 end
  if #list == 0 or #list < entries then
    recipe.error("GLM52_E_INVALID", "stages is not a list of stages", "write stages = { {...}, {...} }",
      { key = "stages" })
  end
  return list
end

-- List of {index, name, config, steps}, validated; `named` is true for the stages of a recipe, and a recipe without any
-- is one stage.
function stages.read(context, options, own)
  local base, list = recipe.config(context, options), nil
  if own.stages then
    list = read_list(own.stages)
    list.named = true
    for _, stage in ipairs(list) do stage.config = recipe.in_stage(stage, configure, context, options, base, stage) end
  else
    base:validate()
    list = { { index = 1, name = base:get "train.stage", config = base } }
  end
  check_arguments(list)
  for _, stage in ipairs(list) do
    stage.steps = math.tointeger(tonumber((stage.config:get "train.steps")))
  end
  return list
end

local function open_and_close(context, stage)
  local model <close> = core.model(context, stage.config)
  local optimizer <close> = core.optimizer(model, stage.config)
  local step <close> = core.step(model, optimizer, stage.config)
end

-- What only opening shows, such as rules that name no parameter, must not come up after the stages before: opens each
-- stage on the device that takes no memory.
function stages.rehearse(options, own)
  local context <close> = core.context { device = "meta" }
  for _, stage in ipairs(stages.read(context, options, own)) do
    recipe.in_stage(stage, open_and_close, context, stage)
  end
end

return stages
