-- The module glm52: the classes of the library, and recipes on top of them.
local core = require "glm52.classes"
local recipe = require "glm52.recipe"
local plan = require "glm52.plan"
local sandbox = require "glm52.sandbox"
local train = require "glm52.train"

local glm52 = {}
for name, value in pairs(core) do
  if type(value) == "function" then glm52[name] = value end
end

-- A recipe run by lua5.4 takes key=value arguments as one run by the command does.
if type(arg) == "table" then recipe.take_arguments(arg) end

-- f(options, own keys, caller) of a recipe's table.
local function split(f, given, caller)
  local own, options = recipe.located(caller, recipe.split, given)
  return f(options, own, caller)
end

local function train_or_plan(options, own, caller)
  if not own.plan then return train(options, own, caller) end
  local found = plan(options, own, caller)
  print(found)
  return found
end

-- Trains what the table describes and returns the run; with plan = true it prints the plan instead.
function glm52.train(given)
  if type(given) ~= "table" then error("glm52.train takes one table", 2) end
  return (split(train_or_plan, given, recipe.caller(2)))
end

-- The plan of the same table: memory, FLOPs and time, without training.
function glm52.plan(given)
  if type(given) ~= "table" then error("glm52.plan takes one table", 2) end
  return (split(plan, given, recipe.caller(2)))
end

-- The table that the recipe in a file trains, evaluated in a sandbox; limits: {memory, instructions, seconds}.
function glm52.sandbox(path, limits)
  return (sandbox(path, limits))
end

-- The same, trained.
function glm52.train_sandboxed(path, limits, arguments)
  local options, caller = sandbox(path, limits, arguments)
  return (split(train_or_plan, options, caller))
end

local function is_file(path)
  local file = path and io.open(path, "r")
  return file and file:close() and path
end

-- Path of a text to try things on: GLM52_TEXT, or the corpus that ./run train leaves in the build directory.
function glm52.sample_text()
  local chosen = recipe.override "data.text" or os.getenv "GLM52_TEXT"
  if chosen then return chosen end
  local program = core.system.executable() or ""
  local found = is_file(program:match("^(.*)/bindings/lua/[^/]*$") and
    program:match("^(.*)/bindings/lua/[^/]*$") .. "/corpus/kjv.txt") or is_file "build/corpus/kjv.txt"
  if found or recipe.override "plan" == "true" then return found end
  recipe.error("GLM52_E_IO", "there is no sample text: build/corpus/kjv.txt does not exist",
    "`./run train` makes it; or name a text of yours: data.text=FILE, or GLM52_TEXT=FILE in the environment")
end

-- The loss of the last run is the last line of all, after what the recipe prints: the command prints it, and elsewhere
-- the end of the Lua state does.
local at_end = setmetatable({}, { __gc = function()
  if recipe.last_line then print(recipe.last_line) end
end })
package.loaded["glm52.at_end"] = at_end

return glm52
