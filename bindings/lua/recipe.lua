-- From a recipe's table and the command line to a config. Lua knows only the line of the call that got the table; a
-- mistake in it is traced to the line of its key by reading the recipe's text from there.
local core = require "glm52.classes"
local failure = require "glm52.failure"
local flags = require "glm52.flags"
local json = require "glm52.json"

local recipe = {
  error = failure.raise,
  is_error = failure.is,
  overrides = {},      -- list of {key, value}: key=value arguments, stronger than the recipe
  command_line = nil,  -- as typed, where the command runs the recipe
  last_line = nil,     -- what to print when the recipe has ended
}

-- Keys of a recipe that are no options of the library: how to run, not what. A value has one of the types or is one of
-- the texts.
local own_keys = { plan = "boolean", resume = "boolean changed", stages = "table", source = "function native",
  on_step = "function native" }

-- ---- names of options ------------------------------------------------------------------------------------

local known  -- set of all keys

-- The option that a key of a stage means: lr is optim.lr, attention is train.attention.
function recipe.long(key)
  if not known then
    known = {}
    for _, option in ipairs(core.options()) do known[option.key] = true end
  end
  for _, section in ipairs { "train.", "optim." } do
    if known[section .. key] then return section .. key end
  end
  return key
end

-- How a stage may write it.
function recipe.short(option)
  local name = option:match("^train%.(.*)") or option:match("^optim%.(.*)")
  return name and recipe.long(name) == option and name or option
end

-- ---- where a key stands ----------------------------------------------------------------------------------

-- Lexical elements of Lua text from `position`: calls visit(kind, text, line) with kind "name", "string" or the symbol
-- itself, until it returns true.
local function scan(text, position, line, visit)
  while position <= #text do
    local from, to, content = position, nil, nil
    local kind
    if text:find("^\n", from) then
      to = from
    elseif text:find("^%s", from) then
      to = select(2, text:find("^[^%S\n]+", from))
    elseif text:find("^%-%-", from) and not text:find("^%-%-%[=*%[", from) then
      to = (text:find("\n", from, true) or #text + 1) - 1
    elseif text:find("^%-?%-?%[=*%[", from) then
      local level = text:match("^%-?%-?%[(=*)%[", from)
      to = select(2, text:find("]" .. level .. "]", from, true)) or #text
    elseif text:find("^[\"']", from) then
      local quote = text:sub(from, from)
      to = from + 1
      while to < #text and text:sub(to, to) ~= quote do
        to = to + (text:sub(to, to) == "\\" and 2 or 1)
      end
      kind, content = "string", text:sub(from + 1, to - 1)
    elseif text:find("^[%a_]", from) then
      to = select(2, text:find("^[%w_]+", from))
      kind, content = "name", text:sub(from, to)
    elseif text:find("^[%w.]", from) then
      to = select(2, text:find("^[%w.]+", from))
    else
      to = text:find("^[=~<>]=", from) and from + 1 or from
      kind, content = text:sub(from, to), text:sub(from, to)
    end
    if kind and visit(kind, content, line) then return end
    line = line + select(2, text:sub(from, to):gsub("\n", ""))
    position = to + 1
  end
end

-- Open tables and parentheses of a text that is scanned; entries without a key count from 1.
local Nest = {}
Nest.__index = Nest

-- Where a key or an entry of the innermost table stands, "stages.2.lr", seen from the outermost one.
function Nest:path(name)
  local names = {}
  for _, open in ipairs(self) do names[#names + 1] = open.label end
  names[#names + 1] = name
  return table.concat(names, ".", 2)
end

-- Label of a value that begins now.
function Nest:entry()
  local top = self[#self]
  return top and (top.key or tostring(top.index)) or ""
end

function Nest:separate()
  local top = self[#self]
  if not top then return end
  if not top.key then top.index = top.index + 1 end
  top.key = nil
end

-- Closes the innermost table (and parentheses in it that are open), or parenthesis.
function Nest:close(symbol)
  if symbol == ")" and #self > 0 and not self[#self].label then
    self[#self] = nil
  elseif symbol == "}" and self.tables > 0 then
    while not self[#self].label do self[#self] = nil end
    self[#self], self.tables = nil, self.tables - 1
  end
end

-- Line of `key` ("optim.lr", "stages.2.lr"; "stages.2" is a table) in the table constructors of `text` from `line` on,
-- or nil: in the first one, or in all that begin up to line `last`.
function recipe.line_of(text, line, key, last)
  local position = 1
  for _ = 2, line do position = (text:find("\n", position, true) or #text) + 1 end

  local nest, name, name_line, found = setmetatable({ tables = 0 }, Nest), nil, nil, nil
  scan(text, position, line, function(kind, content, at)
    local top = nest[#nest]
    if last and at > last and nest.tables == 0 then
      return true
    elseif kind == "{" then
      local label = nest:entry()
      if nest.tables > 0 and not top.key and nest:path(label) == key then found = at end
      nest[#nest + 1], nest.tables = { label = label, index = 1 }, nest.tables + 1
    elseif kind == "(" then
      nest[#nest + 1] = { index = 1 }
    elseif kind == "}" or kind == ")" then
      local tables = nest.tables
      nest:close(kind)
      if tables > 0 and nest.tables == 0 and not last then return true end
    elseif kind == "," or kind == ";" then
      nest:separate()
    elseif kind == "=" and name and top and top.label then
      top.key = name
      if nest:path(name) == key then found = name_line end
    elseif kind == "name" or kind == "string" then
      name, name_line = content, at
    end
    if kind ~= "name" and kind ~= "string" and kind ~= "]" and kind ~= "[" then name = nil end
    return found ~= nil
  end)
  return found
end

local function read_file(path)
  local file = io.open(path, "r")
  if not file then return nil end
  local text = file:read("a")
  file:close()
  return text
end

-- Where the table came from: {file, line} of the call `level` functions up, as seen by the caller.
function recipe.caller(level)
  local where = debug.getinfo(level + 1, "Sl")
  if not where or where.currentline < 1 then  -- a tail call left no trace
    local script = type(arg) == "table" and arg[0]
    return { name = script, file = script, line = 1 }
  end
  return { name = where.short_src, file = where.source:match("^@(.*)"), line = where.currentline }
end

-- Where a key may stand, the best place first.
local function places(key, stage)
  local section = key:match("^[^.]+")
  if not stage then return { key, section } end
  local at = "stages." .. stage.index
  return { at .. "." .. key, at .. "." .. recipe.short(key), at .. "." .. section, key, at, "stages" }
end

local function place_of(caller, key, stage)
  if not caller.name then return "" end
  local text, line = caller.file and read_file(caller.file), nil
  for _, place in ipairs(text and places(key, stage) or {}) do
    line = line or recipe.line_of(text, caller.line, place) or recipe.line_of(text, 1, place, caller.line)
  end
  return string.format("%s:%d: ", caller.name, line or caller.line)
end

-- The argument key=value that decided an option, or nil.
function recipe.overridden(key, stage)
  for _, override in ipairs(recipe.overrides) do
    if override.key == key or stage and recipe.option_for(override, stage) == key then return override end
  end
end

-- The same failure with the place of its key in front.
local function locate(problem, caller)
  if not recipe.is_error(problem) then return problem end
  local key, stage = problem.details.key, problem.details.stage
  local from_command = key and recipe.overridden(key, stage)
  local place = ""
  if from_command then
    place = string.format("argument %s=%s: ", from_command.key, from_command.value)
  elseif key then
    place = place_of(caller, key, stage)
  end
  return failure.new { status = problem.status, name = problem.name, message = place .. problem.message,
    hint = problem.hint, details = problem.details }
end

-- Calls f(...); its failure names the place of its key in the recipe.
function recipe.located(caller, f, ...)
  local results = table.pack(pcall(f, ...))
  if not results[1] then error(locate(results[2], caller), 0) end
  return table.unpack(results, 2, results.n)
end

-- How messages speak of a stage, which by default is called "stage N".
function recipe.stage_title(name)
  return name:find("^stage ") and name or "stage " .. name
end

-- Calls f(...); its failure is one of that stage, {index, name}.
function recipe.in_stage(stage, f, ...)
  local results = table.pack(pcall(f, ...))
  if results[1] then return table.unpack(results, 2, results.n) end
  local problem = results[2]
  if not recipe.is_error(problem) then error(problem, 0) end
  local key, message = problem.details.key, problem.message
  if key and not key:find(".", 1, true) then
    message = message:gsub("did you mean ([%w_.]+)%?", function(option)
      return "did you mean " .. recipe.short(option) .. "?"
    end)
  end
  recipe.error(problem.name, recipe.stage_title(stage.name) .. ": " .. message, problem.hint,
    { key = key, stage = stage })
end

-- ---- key=value arguments ---------------------------------------------------------------------------------

-- Takes key=value arguments and flags out of a list of arguments and makes them overrides; what stands behind -- is the
-- recipe's own.
function recipe.take_arguments(arguments, strict)
  local kept, own = {}, false
  for i, argument in ipairs(arguments) do
    local key, value = (flags.meaning[argument] or argument):match("^([%l][%l%d_]*[%l%d_.]*)=(.*)$")
    if own or not key then
      if not own and argument ~= "--" then flags.check(argument, strict) end
      if own or not (strict and argument == "--") then kept[#kept + 1] = argument end
      own = own or argument == "--"
    else
      table.insert(recipe.overrides, 1, { key = key, value = value })  -- the last one wins
    end
  end
  for i = 1, math.max(#arguments, #kept) do arguments[i] = kept[i] end
end

-- Stage (name or number) and key of an argument stages.STAGE.KEY=value, or nil.
function recipe.stage_argument(override)
  return override.key:match("^stages%.([^.]+)%.(.+)$")
end

-- The option that an argument sets in that stage (nil: in a recipe without stages), or nil.
function recipe.option_for(override, stage)
  local whose, key = recipe.stage_argument(override)
  if not whose then return not own_keys[override.key] and override.key or nil end
  return stage and (whose == stage.name or whose == tostring(stage.index)) and recipe.long(key) or nil
end

-- What to do to go on with an interrupted run.
function recipe.resume_hint()
  return recipe.command_line and "go on with: " .. recipe.command_line .. " --resume"
    or "go on with resume = true in the recipe"
end

-- Value of an override as text, or nil.
function recipe.override(key)
  local override = recipe.overridden(key)
  return override and override.value
end

-- ---- the table -------------------------------------------------------------------------------------------

local function is_own_value(value, kinds)
  local kind = type(value) == "userdata" and tostring(getmetatable(value)):match("^glm52%.(native)$") or type(value)
  for word in kinds:gmatch "%S+" do
    if kind == word or value == word then return true end
  end
end

-- Splits a recipe's table into its own keys and the options of the library; overrides of own keys are applied.
function recipe.split(given)
  local own, options = {}, {}
  for key, value in pairs(given) do
    (own_keys[key] and own or options)[key] = value
  end
  for key, kinds in pairs(own_keys) do
    local text = recipe.override(key)
    if text == "true" or text == "false" then own[key] = text == "true" elseif text then own[key] = text end
    if own[key] ~= nil and not is_own_value(own[key], kinds) then
      recipe.error("GLM52_E_INVALID", string.format("%s = %s is not a %s", key, tostring(own[key]), kinds:match "%S+"),
        key == "resume" and 'it is true, false or "changed"' or kinds == "boolean" and "it is true or false" or "",
        { key = key })
    end
  end
  return own, options
end

-- f(...), whose failure is that of the option `key`.
local function blaming(key, f, ...)
  local done, result = pcall(f, ...)
  if not done and recipe.is_error(result) then recipe.error(result.name, result.message, result.hint, { key = key }) end
  if not done then error(result, 0) end
  return result
end

-- The config that options, those of a stage ({index, name, options}, or nil) and overrides describe; it is not
-- validated. The shape of a model from the hub is read right away, so that everything can be checked against it.
function recipe.config(context, options, stage)
  local config = core.config(context)
  config:load_json(json.encode(options))
  if stage then config:load_json(json.encode(stage.options)) end
  for i = #recipe.overrides, 1, -1 do
    local override = recipe.overrides[i]
    local key = recipe.option_for(override, stage)
    -- A stage that is only evaluated stays one.
    local stays = override.key == "train.steps" and stage and config:get(key) == "0"
    if key and not stays then config:set(key, override.value) end
  end
  local hub = config:get "model.hub"
  if hub ~= "" then blaming("model.hub", config.load_hub, config, hub .. "/config.json") end
  return config
end

-- A context on the device that the recipe names: it comes before the config.
function recipe.context(options, log)
  local device = recipe.override("device") or options.device or "cpu"
  if type(device) ~= "string" then
    recipe.error("GLM52_E_INVALID", "device = " .. tostring(device) .. " is not a text", 'write device = "cpu"',
      { key = "device" })
  elseif device == "meta" then
    recipe.error("GLM52_E_INVALID", "device = meta counts and computes nothing: it cannot train",
      "ask for the plan: plan = true, or `glm52 plan RECIPE`", { key = "device" })
  end
  return blaming("device", core.context, { device = device, log = log })
end

return recipe
