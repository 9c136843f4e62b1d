-- What a sandbox stops, and what it lets through.
-- Usage: lua5.4 sandbox.lua FOLDER_OF_TESTS MODULE_FOLDER; prints TAP.
package.path = arg[1] .. "/?.lua;" .. package.path
package.cpath = arg[2] .. "/?.so;" .. package.cpath
arg = { [0] = arg[0] }
local glm52 = require "glm52"
local system = require("glm52.core").system
local tap = require "tap"
local case, equal, refused = tap.case, tap.equal, tap.refused

local path = os.tmpname()

local function evaluate(text, limits)
  local file = assert(io.open(path, "w"))
  file:write(text)
  file:close()
  return glm52.sandbox(path, limits)
end

local preamble = 'local glm52 = require "glm52"\n'

case("a recipe's table comes out", function()
  local table = evaluate("#!/usr/bin/lua\n" .. preamble .. [[
    local lr = 1
    for i = 1, 3 do lr = lr / 10 end
    local run = glm52.train { model = { preset = "tiny" }, optim = { lr = lr, policy = ("GLM5"):lower() },
      train = { steps = math.floor(10.5) }, stages = { { name = "a", steps = 3 }, { steps = 1e1 } } }
    print("# " .. run:sample "x", #run:metrics())]])
  equal(table.model.preset, "tiny")
  equal(table.optim.policy, "glm5")
  equal(table.train.steps, 10)
  assert(math.abs(table.optim.lr - 1e-3) < 1e-9)
  equal(table.stages[2].steps, 10.0)
end)

case("nothing leads to the system", function()
  for _, expression in ipairs { "os", "io", "package", "debug", "load", "loadstring", "loadfile", "dofile",
    "collectgarbage", "setmetatable", "getmetatable", "rawset", "coroutine", "string.dump", "string.rep",
    "string.find", "string.gsub", "string.match", "string.gmatch", "table.sort", "table.move", "_G.os", "_G._G.io",
    "(''):dump()", "(''):rep(9)", "('').find.x", "require 'io'", "require 'os'", "require 'glm52.core'",
    "glm52.native", "glm52.context", "glm52.core" } do
    local got = evaluate(preamble .. "local done, value = pcall(function() return " .. expression ..
      " end)\nglm52.train { got = done and value ~= nil }").got
    equal(got, false)
  end
end)

case("bytecode is refused", function()
  refused("attempt to load a binary chunk", evaluate, string.dump(function() end))
end)

case("loops meet the limit, whatever catches the error", function()
  for _, text in ipairs { "while true do end", "while true do pcall(function() while true do end end) end",
    "local function f() return f() end f()", "local function f() pcall(f) f() end pcall(f) while true do end",
    "while true do pcall(error) end", "for i = 1, 1e300 do end", "local t = {} while true do t = { t } end" } do
    refused("the sandbox's budget of ", evaluate, text, { instructions = 1e6, seconds = 2 })
  end
end)

case("memory meets the limit", function()
  for _, text in ipairs { "local s = 'x' while true do s = s .. s end", "local t = {} while true do t[#t + 1] = {} end",
    "local s = 'x' for i = 1, 20 do s = s .. s end while true do local t = s .. 'x' end",
    "local s = 'x' while true do pcall(function() s = s .. s end) end" } do
    refused("the sandbox's budget of ", evaluate, text, { memory = 4 << 20, instructions = 1e7 })
  end
end)

case("time meets the limit where one instruction is much work", function()
  local begin = system.seconds()
  refused("the sandbox's budget of seconds is spent", evaluate, [[
    local s = "x"
    for i = 1, 22 do s = s .. s end
    local t = s .. "y"
    local u = s .. "y"
    while true do local same = t == u end]], { seconds = 0.2, instructions = 1e12 })
  assert(system.seconds() - begin < 60)
end)

case("the host goes on after each of them", function()
  equal(evaluate(preamble .. "glm52.train { x = 1 }").x, 1)
end)

case("only plain data comes out", function()
  refused("gives a function", evaluate, preamble .. "glm52.train { on_step = function() end }")
  refused("without end", evaluate, preamble .. "local t = {} t.t = t glm52.train(t)")
  refused("more than 100000 entries", evaluate,
    preamble .. "local t = { 1 } for i = 1, 25 do t = { t, t } end glm52.train(t)")
  refused("trains nothing", evaluate, "local x = 1")
  refused("calls glm52.train once", evaluate, preamble .. "glm52.train {}\nglm52.train {}")
end)

case("mistakes name file and line", function()
  refused(path .. ":2: attempt to", evaluate, "local x\nx.y = 1")
  refused(path .. ":1:", evaluate, "x = = 1")
  refused(path .. ":4: data.text = ../secret leaves the current directory", evaluate, preamble ..
    "glm52.train {\n  model = {},\n  data = { text = '../secret' } }")
  for _, key in ipairs { "out", "data.text", "model.hub" } do
    refused("leaves the current directory", evaluate, preamble .. "glm52.train { ['" .. key .. "'] = '/etc' }")
  end
  local wrong = [[glm52.train {
    optim = { shedule = "x" } }]]
  evaluate(preamble .. wrong)
  refused(path .. ":3: optim.shedule: no such option; did you mean optim.schedule?", glm52.train_sandboxed, path)
end)

case("limits are numbers above 0", function()
  refused("limits are numbers above 0", evaluate, "", { memory = -1 })
  refused("no memory for a sandbox", evaluate, "", { memory = 100 })
end)

os.remove(path)
tap.done()
