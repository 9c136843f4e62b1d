-- The Lua binding below recipes: handles, errors, values, numbers as text.
-- Usage: lua5.4 binding.lua FOLDER_OF_TESTS MODULE_FOLDER TEXT; prints TAP.
package.path = arg[1] .. "/?.lua;" .. package.path
package.cpath = arg[2] .. "/?.so;" .. package.cpath
local glm52 = require "glm52"
local recipe, show, plot = require "glm52.recipe", require "glm52.show", require "glm52.plot"
local tap = require "tap"
local seconds = require("glm52.core").system.seconds
local case, equal, failure, refused = tap.case, tap.equal, tap.failure, tap.refused

local shape = [[{"model": {"preset": "tiny", "num_hidden_layers": 2, "hidden_size": 32}}]]
local function tiny_model()
  local context = glm52.context { threads = 1 }
  local config = glm52.config(context)
  config:load_json(shape)
  return glm52.model(context, config), config, context
end

case("errors are objects with status, message, hint and details", function()
  local config = glm52.config(glm52.context())
  local _, problem = pcall(config.set, config, "optim.lrr", "1")
  equal(problem.status, -2)
  equal(problem.name, "GLM52_E_INVALID")
  equal(problem.details.key, "optim.lrr")
  equal(problem.details.tensor, nil)
  equal(problem.message, "optim.lrr: no such option; did you mean optim.lr?")
  assert(problem.where:find("^.*binding.lua:%d+:$"), problem.where)
  equal(tostring(problem), problem.where .. " " .. problem.message)
end)

case("a closed handle and one of another class are refused", function()
  local model, config, context = tiny_model()
  local another = failure(glm52.model, context, context)
  assert(tostring(another):find("glm52.config expected"), another)
  model:close()
  model:close()
  equal(failure(model.describe, model).name, "GLM52_E_HANDLE")
  equal(tostring(model), "glm52.model: closed")
  equal(getmetatable(model), "glm52.model")
  do local scoped <close> = config end
  equal(failure(config.validate, config).name, "GLM52_E_HANDLE")
end)

case("handles may die in any order", function()
  for order = 1, 6 do
    local model, config, context = tiny_model()
    local optimizer = glm52.optimizer(model)
    local step = glm52.step(model, optimizer)
    local all = { context, config, model, optimizer, step }
    for i = 1, 5 do all[(i * order) % 5 + 1]:close() end
    model, config, context, optimizer, step, all = nil, nil, nil, nil, nil, nil
    collectgarbage()
  end
end)

case("a model's parameters can be read", function()
  local model = tiny_model()
  local tensors, elements = model:parameter_count()
  local sum = 0
  for i = 1, tensors do
    local parameter, size = model:parameter(i), 1
    for _, n in ipairs(parameter.shape) do size = size * n end
    sum = sum + size
  end
  equal(sum, elements)
  local norm = model:value "model.norm.weight"
  equal(#norm, 32)
  equal(norm[1], 1)
  equal(norm.shape[1], 32)
  assert(tostring(failure(model.value, model, "model.norm.weigh")):find("model.norm.weigh", 1, true))
end)

case("a batch trains a model, and its gradients can be read", function()
  local model, config, context = tiny_model()
  local batch = glm52.batch(context)
  batch:set("tokens", { ("And God said, Let there be light"):byte(1, -1) })
  batch:set("cu_seqlens", { 0, 14, 32 })
  equal(select(2, batch:tokens()), 2)
  equal(batch:get("labels")[14], -100)
  local step = glm52.step(model, glm52.optimizer(model), config)
  step:run(batch)
  local before = step:metric "loss"
  for _ = 1, 5 do step:run { batch } end
  assert(step:metrics().loss < before)
  local squares = 0
  for _, g in ipairs(model:gradient "lm_head.weight") do squares = squares + g * g end
  assert(squares > 0)
  local problem = failure(batch.set, batch, "cu_seqlens", { 0, 7, 7, 32 })
  assert(tostring(problem):find("rise", 1, true), tostring(problem))
end)

case("a dataset gives packs by number", function()
  local context = glm52.context()
  local config = glm52.config(context)
  config:load_json(shape)
  config:set("data.text", arg[3])
  config:set("data.pack_tokens", 100)
  local dataset, a, b = glm52.dataset(context, config), glm52.batch(context), glm52.batch(context)
  dataset:seek(7)
  dataset:next(a)
  dataset:next(a)
  dataset:seek(8)
  dataset:next(b)
  equal(table.concat(a:get "tokens", " "), table.concat(b:get "tokens", " "))
  assert(dataset:held_out_packs() > 0)
  failure(dataset.held_out, dataset, dataset:held_out_packs(), a)
end)

case("generation continues a prompt, the same way for a seed", function()
  local model = tiny_model()
  local one, same = model:generate({ 72, 105 }, 8, 1.0, 3), model:generate({ 72, 105 }, 8, 1.0, 3)
  equal(table.concat(one, " "), table.concat(same, " "))
  assert(#one <= 8)
end)

case("key=value arguments are taken out, the last one wins", function()
  local arguments = { "text=1", "a.txt", "optim.lr=3", "--resume", "./x=y", "optim.lr=4" }
  recipe.take_arguments(arguments)
  equal(table.concat(arguments, " "), "a.txt ./x=y")
  equal(recipe.override "optim.lr", "4")
  equal(recipe.override "resume", "true")
  equal(recipe.override "text", "1")
  recipe.overrides = {}
end)

case("the line of a key", function()
  local text = table.concat({ "-- a = 1", "f {", "  a = 'b = 2', --[[ b = ", "3 ]] b = { c = 4,",
    "[\"d\"] = { e = {} } },", "  f = x == y, g = [==[ h = 5 ", "]==], h = 6", "}", "z = { h = 7 }" }, "\n")
  for key, line in pairs { a = 3, b = 4, ["b.c"] = 4, ["b.d"] = 5, ["b.d.e"] = 5, f = 6, g = 6, h = 7 } do
    equal(recipe.line_of(text, 2, key), line)
  end
  for _, key in ipairs { "c", "x", "y", "z", "b.h", "e" } do equal(recipe.line_of(text, 2, key), nil) end
  equal(recipe.line_of(text, 8, "h"), 9)

  text = table.concat({ "f({ stages = {", "{ a = g(1, 2),", "b = { c = 3 } };", "other, {", "a = { 1, { d = 4 } } }",
    "} })" }, "\n")
  for key, line in pairs { ["stages.1"] = 2, ["stages.1.a"] = 2, ["stages.1.b.c"] = 3, ["stages.3"] = 4,
    ["stages.3.a"] = 5, ["stages.3.a.2.d"] = 5 } do
    equal(recipe.line_of(text, 1, key), line)
  end
  for _, key in ipairs { "a", "stages.2", "stages.2.a", "stages.3.d" } do equal(recipe.line_of(text, 1, key), nil) end
end)

case("numbers as people read them", function()
  equal(show.bytes(0), "0 B")
  equal(show.bytes(999), "999 B")
  equal(show.bytes(1000), "1.00 kB")
  equal(show.bytes(2.97e12), "2.97 TB")
  equal(show.bytes(999999), "1.00 MB")
  equal(show.si(1.234e15), "1.23 P")
  equal(show.count(9843), "9.84k")
  equal(show.duration(71.6), "1:12")
  equal(show.duration(3 * 3600 + 25 * 60 + 45), "3:25:45")
  equal(show.duration(0 / 0), "?")
end)

case("bytes that are no UTF-8 are shown as such", function()
  equal(show.text "", "")
  equal(show.text "na\u{EF}ve \u{1F600}", "na\u{EF}ve \u{1F600}")
  equal(show.text "\xFFa\xC3\xC3\xA9\xE2\x82", "\u{FFFD}a\u{FFFD}\u{E9}\u{FFFD}\u{FFFD}")
end)

case("a picture holds its curves, and copes with none", function()
  local picture = plot.loss("a & b", { { 1, 5 }, { 2, 0 / 0 }, { 3, 4 } }, { { 3, 4.5 } })
  assert(picture:find("a &amp; b", 1, true) and picture:find("<circle", 1, true) and not picture:find("nan", 1, true))
  assert(plot.loss("empty", {}, {}):find("</svg>", 1, true))
  local long = {}
  for i = 1, 100000 do long[i] = { i, 3 } end
  assert(#plot.loss("long", long, {}) < 200000)
end)

case("the hash is XXH3 of 128 bits", function()
  local hash = require("glm52.core").system.hash
  equal(hash "", "99aa06d3014798d86001c324468d497f")
  assert(hash "a" ~= hash "b" and #hash "a" == 32)
end)

case("arguments are converted, or refused by number", function()
  local context = glm52.context { threads = 1 }
  local config, batch = glm52.config(context), glm52.batch(context)
  config:set("optim.lr", 0.1 + 0.2)
  equal(tonumber((config:get "optim.lr")), 0.1 + 0.2)
  config:set("train.rl_safe", true)
  config:set("train.steps", 7)
  equal(config:get "train.rl_safe" .. config:get "train.steps", "true7")
  refused("bad argument #2 to '?' (a text with a zero byte in it)", config.set, config, "a\0b", 1)
  refused("bad argument #3 to '?' (string expected, got nil)", config.set, config, "optim.lr")
  config:set("model.preset", "tiny")
  assert(config:dump(true):find "architectures")
  equal(config:dump(), config:dump(false))
  local model = tiny_model()
  refused("'F31' is no glm52_dtype; it is one of F32 BF16", model.save, model, "x", "F31")
  refused("-1 is out of range 0 ..", model.generate, model, { 1 }, -1)
  refused("element 1 of the list is x, not an integer", model.generate, model, { "x" }, 1)
  refused("element 1 of the list, 4294967296, does not fit I32", model.generate, model, { 1 << 32 }, 1)
  refused("a tensor of I64, wanted is I32", model.generate, model, glm52.tensor("I64", 2), 1)
  refused("an empty list of glm52.batch", glm52.step(model).evaluate, glm52.step(model), {})
  refused("glm52.batch expected, got nil", glm52.step(model).evaluate, glm52.step(model))
  refused("0 is out of range 1 ..", model.parameter, model, 0)
  refused("thread is no option of a context", glm52.context, { thread = 1 })
  equal(glm52.feature "nothing", false)
  equal(glm52.status_name(-2), "GLM52_E_INVALID")
  batch:set("tokens", glm52.tensor("I32", { 5, 6 }))
  equal(table.concat(batch:get "tokens", " "), "5 6")
  equal(#glm52.config_describe(), #glm52.options())
  equal(glm52.config_describe(1).key, glm52.options()[1].key)
end)

case("a table is a config", function()
  local context = glm52.context { threads = 1 }
  local options = { ["optim.lr"] = 1e-3, data = { text = arg[3], pack_tokens = 1e2 },
    model = { preset = "tiny", num_hidden_layers = 2, hidden_size = 32, eos_token_id = {}, pad_token_id = -1 } }
  local config = glm52.config(context, options)
  equal(config:get "optim.lr" .. config:get "data.pack_tokens", "0.001100")
  equal(glm52.model(context, options):describe(), glm52.model(context, config):describe())
  assert(glm52.dataset(context, options):describe():find "documents")
  local model = glm52.model(context, options)
  local step = glm52.step(model, glm52.optimizer(model, { optim = { lr = 0.5, schedule = "constant" } }),
    { train = { microbatches = 2, microbatch_tokens = 100 } })
  local batch = glm52.batch(context)
  batch:set("tokens", { 1, 2, 3 })
  step:run { batch, batch }
  equal(step:metric "lr", 0.5)
  refused("3 microbatches given", step.run, step, { batch, batch, batch })
  refused("did you mean optim.lr", glm52.optimizer, model, { optim = { lrr = 1 } })
  refused("glm52.model expected, got", glm52.step, context, nil, { train = { microbatches = 2 } })
  local _, problem = pcall(function() glm52.config(context, { model = { preset = print } }) end)
  equal(problem.message, "model.preset is a function; an option is a number, a text, true, false or a list")
  assert(problem.where:find "binding.lua:%d+:$", problem.where)
  _, problem = pcall(function() glm52.model(context, { optim = { shedule = 1 } }) end)
  assert(problem.where:find "binding.lua:%d+:$" and problem.message:find "did you mean optim.schedule",
    tostring(problem))
end)

case("tensors are read and written", function()
  local model, config, context = tiny_model()
  local weight = model:value "model.norm.weight"
  weight[2] = 0.75
  equal(model:value "model.norm.weight"[2], 0.75)
  equal(tostring(weight), "glm52.tensor F32 [32]")
  equal(#weight:bytes(), 128)
  equal(weight[33], nil)
  refused("33 is no element of 1 .. 32", function() weight[33] = 1 end)
  refused("not a number", function() weight[1] = "x" end)
  local halves = glm52.tensor("BF16", { 1.5, 1 / 3, -2 })
  equal(halves[1], 1.5)
  assert(math.abs(halves[2] - 1 / 3) < 1e-3)
  equal(#halves:first(2), 2)
  refused("element 1 of the tensor, 256, does not fit U8", function() glm52.tensor("U8", 1)[1] = 256 end)
  refused("'F8' is none of", glm52.tensor, "F8", 1)
  local meta = glm52.context { device = "meta" }
  config = glm52.config(meta)
  config:set("model.preset", "tiny")
  equal(#glm52.model(meta, config):parameter() > 10, true)
end)

case("a call costs less than two microseconds", function()
  local model, config, context = tiny_model()
  local step, batch = glm52.step(model, glm52.optimizer(model), config), glm52.batch(context)
  batch:set("tokens", { ("And God said, Let there be light"):byte(1, -1) })
  step:run(batch)
  for name, call in pairs { ["context:memory()"] = function() return context:memory() end,
    ["batch:tokens()"] = function() return batch:tokens() end,
    ["step:metric \"loss\""] = function() return step:metric "loss" end,
    ["config:get \"optim.lr\""] = function() return config:get "optim.lr" end,
    ["model:parameter_count()"] = function() return model:parameter_count() end } do
    local best = math.huge
    for _ = 1, 30 do  -- the machine may be busy
      local begin = seconds()
      for _ = 1, 2000 do call() end
      best = math.min(best, (seconds() - begin) / 2000)
    end
    print(string.format("# %s: %.3f us", name, best * 1e6))
    assert(os.getenv "ASAN_OPTIONS" or best < 2e-6, name)
  end
end)

tap.done()
