-- What a sandboxed recipe finds: this runs first in its state, and nothing else of that state can be reached from it.
-- Left out is what reaches the system (os, io, package, debug), what makes code (load), what ignores the budget of
-- instructions (matching of patterns, string.rep, table.sort, table.move), and metatables, whose __gc would run after
-- the budget.
local arguments = ...
local getinfo = debug.getinfo
local asked, line

local function pick(from, names)
  local picked = {}
  for name in names:gmatch "%S+" do picked[name] = from[name] end
  return picked
end

local environment = pick(_G, [[assert error ipairs next pairs pcall print rawequal rawlen select tonumber tostring type
  _VERSION]])
environment.math = pick(math, [[abs acos asin atan ceil cos deg exp floor fmod huge log max maxinteger min mininteger
  modf pi rad sin sqrt tan tointeger type ult]])
environment.string = pick(string, "byte char format len lower reverse sub upper")
environment.table = pick(table, "concat insert pack remove unpack")
environment.arg = arguments
environment._G = environment
local texts = getmetatable("")
texts.__index, texts.__metatable = environment.string, false

-- A recipe goes on behind glm52.train as behind a plan: nothing has been trained yet.
local nothing = { sample = function() return "" end, metrics = function() return {} end }

local glm52 = {}
function glm52.train(options)
  if type(options) ~= "table" then error("glm52.train takes one table", 2) end
  if asked then error("a sandboxed recipe calls glm52.train once", 2) end
  local caller = getinfo(2, "l")
  asked, line = options, caller and caller.currentline or 1
  return nothing
end

function environment.require(name)
  if name ~= "glm52" then error("a sandboxed recipe can require glm52 alone", 2) end
  return glm52
end

return environment, function() return asked, line end
