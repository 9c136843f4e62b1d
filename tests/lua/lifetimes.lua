-- Lifetimes of handles from Lua: every order of their end, by close() and by the collector, and 10,000 lives without
-- a leak.
-- Usage: lua5.4 lifetimes.lua FOLDER_OF_TESTS MODULE_FOLDER, or by the command glm52, which brings the module; prints
-- TAP.
package.path = arg[1] .. "/?.lua;" .. package.path
if arg[2] then package.cpath = arg[2] .. "/?.so;" .. package.cpath end
local glm52 = require "glm52"
local small, tap = require "small", require "tap"
local case, equal = tap.case, tap.equal

local names = { "context", "config", "model", "optimizer", "step", "batch" }
local methods = { context = "memory", config = "validate", model = "describe", optimizer = "resync",
  step = "metric_name", batch = "tokens" }
local orders = 720

-- Calls f for every order of the names.
local function each_order(f)
  for number = 0, orders - 1 do
    local left, order = table.pack(table.unpack(names)), {}
    for n = #names, 1, -1 do
      local pick = number % n + 1
      number = number // n
      order[#order + 1] = left[pick]
      left[pick] = left[n]
    end
    f(order)
  end
end

-- Whatever is left still works: who has a step and a batch can evaluate.
local function use(s)
  if s.step and s.batch then assert(s.step:evaluate(s.batch) > 0) end
  if s.model then s.model:describe() end
  if s.optimizer then s.optimizer:resync() end
  if s.config then equal(s.config:get "train.seed", "3") end
end

case("handles are closed in any order", function()
  each_order(function(order)
    local s = small.open()
    for _, name in ipairs(order) do
      s[name]:close()
      s[name]:close()
      equal(tap.failure(s[name][methods[name]], s[name]).name, "GLM52_E_HANDLE")
      s[name] = nil
      use(s)
    end
  end)
end)

case("handles are collected in any order", function()
  local number = 0
  each_order(function(order)
    number = number + 1
    if number % 8 ~= 0 then return end  -- collecting everything six times takes long
    local s = small.open()
    for _, name in ipairs(order) do
      s[name] = nil
      collectgarbage()
      use(s)
    end
  end)
end)

case("handles that refer to each other are collected together", function()
  for _ = 1, 50 do
    local s = small.open(function() end)
    s.round = s
    local self = setmetatable({ s }, { __gc = function(t) t[1].step:metric "step" end })  -- a finaliser that uses them
    self = nil
  end
  collectgarbage()
  collectgarbage()
end)

case("views of a parameter keep its memory", function()
  local s = small.open()
  local view = s.model:value "model.norm.weight"
  s.step:run(s.batch)
  local gradient = s.model:gradient "model.norm.weight"
  local value, slope = view[3], gradient[3]
  for _, name in ipairs(names) do s[name]:close() end
  s = nil
  collectgarbage()
  equal(view[3], value)
  equal(gradient[3], slope)
end)

case("<close> ends a handle with its block, also by an error", function()
  local kept
  local problem = tap.failure(function()
    local s = small.open()
    local model <close> = s.model
    kept = s.model
    s.config:set("optim.lrr", 1)
  end)
  equal(problem.name, "GLM52_E_INVALID")
  equal(tostring(kept), "glm52.model: closed")
end)

-- ---- leaks

local function resident()
  local file = assert(io.open "/proc/self/statm")
  local pages = file:read("a"):match "^%d+ (%d+)"
  file:close()
  return tonumber(pages) * 4096
end

local sanitized = os.getenv "ASAN_OPTIONS"  -- it keeps what is released for a while: LeakSanitizer looks instead

-- Many lives need no more memory than a tenth of them: neither of Lua, nor of the process.
local function lives(count, one)
  local lua, process
  for i = 1, count do
    one()
    if i == count // 10 then
      collectgarbage()
      collectgarbage()
      lua, process = collectgarbage "count", resident()
    end
  end
  collectgarbage()
  collectgarbage()
  assert(collectgarbage "count" <= lua + 16, "Lua holds more: " .. collectgarbage "count" .. " kB, was " .. lua)
  assert(sanitized or resident() <= process + (1 << 20),
    "the process holds more: " .. resident() .. ", was " .. process)
end

case("10,000 lives of contexts, configs, batches and errors", function()
  lives(10000, function()
    local context = glm52.context { threads = 1, log = function() end }
    local config, batch = glm52.config(context), glm52.batch(context)
    batch:set("tokens", { 1, 2, 3 })
    assert(batch:get "tokens"[3] == 3)
    config:set("model.preset", "tiny")
    config:dump()
    assert(tap.failure(config.set, config, "no.such", 1).details.key)
    tap.failure(glm52.model, context, batch)
    context:close()
  end)
end)

case("10,000 getters, steps' metrics, views and generated tokens", function()
  local s = small.open()
  s.step:run(s.batch)
  local now = s.context:memory()
  lives(10000, function()
    s.step:metrics()
    s.model:parameter "model.norm.weight"
    s.model:gradient "model.norm.weight"
    s.model:generate({ 1, 2 }, 1)
    glm52.tensor("I32", 100)
    tap.failure(s.model.parameter, s.model, "nothing")
  end)
  assert(s.context:memory() - now < 65536)
end)

case("300 lives of a model that trains", function()
  lives(300, function()
    local s = small.open()
    s.step:run(s.batch)
    s = nil
    collectgarbage()  -- of itself it comes late: Lua knows nothing of the size of what handles hold
  end)
end)

tap.done()
