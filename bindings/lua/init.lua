-- The module glm52: the classes of the library, and recipes on top of them.
local core = require "glm52.core"
local recipe = require "glm52.recipe"
local plan = require "glm52.plan"
local train = require "glm52.train"

local glm52 = {}
for _, name in ipairs { "context", "config", "model", "load", "batch", "dataset", "optimizer", "step", "version",
  "abi_version", "build_info", "feature", "device_count", "options" } do
  glm52[name] = core[name]
end

-- A recipe run by lua5.4 takes key=value arguments as one run by the command does.
if type(arg) == "table" then recipe.take_arguments(arg) end

-- Trains what the table describes and returns the run; with plan = true it prints the plan instead.
function glm52.train(given)
  local caller = recipe.caller(2)
  if type(given) ~= "table" then error("glm52.train takes one table", 2) end
  local own, options = recipe.located(caller, recipe.split, given)
  if own.plan then
    local found = plan(options, own, caller)
    print(found)
    return found
  end
  return train(options, own, caller)
end

-- The plan of the same table: memory, FLOPs and time, without training.
function glm52.plan(given)
  local caller = recipe.caller(2)
  if type(given) ~= "table" then error("glm52.plan takes one table", 2) end
  local own, options = recipe.located(caller, recipe.split, given)
  return plan(options, own, caller)
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
