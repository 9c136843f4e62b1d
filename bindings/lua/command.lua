-- The command glm52: a function of the list of arguments that returns the exit status.
local core = require "glm52.classes"
local recipe = require "glm52.recipe"
local show = require "glm52.show"

local usage = [[
Trains GLM-5.2 as a recipe says.

  glm52 train RECIPE.lua [key=value ...]   train; --resume goes on with an interrupted run (--resume=changed:
                                           also under changed options), --sandbox fences in a recipe that
                                           is not trusted
  glm52 plan RECIPE.lua [key=value ...]    memory, FLOPs and time of the same, without training
  glm52 config [key ...]                   every option, or those named or of a section: glm52 config optim
  glm52 version                            version and build
  glm52 help

key=value sets an option of the library over what the recipe says, e.g. train.steps=1000 optim.lr=1e-3.
Other arguments, and all behind --, reach the recipe as arg[1], arg[2], ...]]

local success, failure, misuse = 0, 1, 2

local function complain(text)
  io.stdout:flush()
  io.stderr:write("glm52: ", text, "\n")
end

-- ---- train and plan --------------------------------------------------------------------------------------

-- A mistake of the recipe needs no traceback; one of this program does.
local function explain(problem)
  if recipe.is_error(problem) then return problem end
  problem = tostring(problem)
  return problem:find("^%[?glm52/") and debug.traceback(problem, 2) or problem
end

local function report(problem)
  complain(tostring(problem))
  local signal = recipe.is_error(problem) and problem.details.signal
  return signal and 128 + signal or failure
end

local function quote(word)
  return word:find("^[%w%-_./=,:+@%%]+$") and word or "'" .. word:gsub("'", "'\\''") .. "'"
end

local function command_line(arguments)
  local words = {}
  for i = 0, #arguments do
    local resumes = arguments[i]:find "^%-%-resume" or arguments[i]:find "^resume="
    if not resumes then words[#words + 1] = quote(arguments[i]) end
  end
  return table.concat(words, " ")
end

-- Takes a flag of the command out of the arguments; true if it was there.
local function take_flag(arguments, flag)
  for i, argument in ipairs(arguments) do
    if argument == "--" then return false end
    if argument == flag then return table.remove(arguments, i) ~= nil end
  end
end

local function take_arguments(rest)
  local done, problem = pcall(recipe.take_arguments, rest, true)
  if not done then
    complain(tostring(problem))
  elseif not rest[1] then
    complain("no recipe given; see `glm52 help`")
  else
    return true
  end
end

local function run_file(path, rest)
  arg = table.move(rest, 1, #rest, 1, { [0] = path })  -- as lua5.4 sets it
  local chunk, problem = loadfile(path, "t")
  if not chunk then return false, problem end
  return xpcall(chunk, explain, table.unpack(rest))
end

local function run_recipe(arguments, forced)
  recipe.command_line = command_line(arguments)
  local rest = table.move(arguments, 2, #arguments, 1, {})
  local sandboxed = take_flag(rest, "--sandbox")
  if not take_arguments(rest) then return misuse end
  if forced then table.insert(recipe.overrides, 1, forced) end
  local path = table.remove(rest, 1)
  local done, problem
  if sandboxed then
    done, problem = xpcall(require("glm52").train_sandboxed, explain, path, {}, rest)
  else
    done, problem = run_file(path, rest)
  end
  local last_line = recipe.last_line
  recipe.last_line = nil
  if not done then return report(problem) end
  if last_line then print(last_line) end
  return success
end

-- ---- config and version ----------------------------------------------------------------------------------

local function option_rows(keys)
  local rows, section = {}, nil
  for _, option in ipairs(core.options()) do
    local wanted = #keys == 0
    for _, key in ipairs(keys) do
      wanted = wanted or option.key == key or option.key:sub(1, #key + 1) == key .. "."
    end
    if wanted then
      local its_section = option.key:match("^(.*)%.") or ""
      if section and section ~= its_section then rows[#rows + 1] = {} end
      section = its_section
      local default = option.default == "" and "-" or option.default
      rows[#rows + 1] = { option.key, option.type, option.range ~= "" and option.range or "-", default, option.summary }
    end
  end
  return rows
end

local function list_options(arguments)
  local keys = table.move(arguments, 2, #arguments, 1, {})
  for _, key in ipairs(keys) do
    if #option_rows { key } == 0 then
      local context <close> = core.context()
      local config <close> = core.config(context)
      local _, problem = pcall(config.get, config, key)
      return report(problem)
    end
  end
  local rows = option_rows(keys)
  table.insert(rows, 1, { "key", "type", "range", "default", "" })
  print(table.concat(show.columns(rows, {}), "\n"))
  return success
end

local function version()
  print("glm52 " .. core.version() .. ", ABI " .. core.abi_version())
  print(core.build_info())
  return success
end

local function help()
  print(usage)
  return success
end

local commands = {
  train = function(arguments) return run_recipe(arguments) end,
  plan = function(arguments) return run_recipe(arguments, { key = "plan", value = "true" }) end,
  config = list_options,
  version = version, ["--version"] = version,
  help = help, ["--help"] = help, ["-h"] = help,
}

return function(arguments)
  io.stdout:setvbuf("line")
  local name = arguments[1]
  if not name then
    complain("what is there to do?\n\n" .. usage)
    return misuse
  elseif not commands[name] then
    complain(name .. ": no such command\n\n" .. usage)
    return misuse
  end
  return commands[name](arguments)
end
