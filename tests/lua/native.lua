-- Functions of the user's shared objects, and callbacks of recipes: Lua functions and native ones.
-- Usage: lua5.4 native.lua FOLDER_OF_TESTS MODULE_FOLDER SHARED_OBJECT; prints TAP. Runs in a folder of its own.
package.path = arg[1] .. "/?.lua;" .. package.path
package.cpath = arg[2] .. "/?.so;" .. package.cpath
local object, folder = arg[3], os.tmpname()
os.remove(folder)
arg = { [0] = arg[0] }
local glm52 = require "glm52"
local system = require("glm52.core").system
local small, tap = require "small", require "tap"
local case, equal, refused = tap.case, tap.equal, tap.refused
local function native(...) return glm52.native(object, ...) end

-- ---- calls

case("a score of tokens: lists, tensors, texts", function()
  local score = native("score", "double(ptr i32, i64)")
  equal(score({ 1, 2, 6 }, 3), 3.0)
  equal(score(glm52.tensor("I32", { 4, 5 }), 2), 4.5)
  equal(score(nil, 0), -1.0)
  equal(tostring(score), "glm52.native score, f64(ptr i32,i64)")
  equal(getmetatable(score), "glm52.native")
end)

case("every type, there and back", function()
  equal(native("mix", "f32( i32,u32 ,i64, u64,float,f64)")(-1, 2, -3, 4, 0.5, 0.25), 2.75)
  equal(native("echo", "str(str)")("na\u{EF}ve"), "na\u{EF}ve")
  equal(native("echo", "str(str)")(nil), nil)
  local values = glm52.tensor("F32", { 1, 3 })
  native("halve", "void(ptr f32, i64)")(values, #values)
  equal(values[2], 1.5)
  equal(native("itself", "ptr(ptr)")(nil), nil)
  equal(type(native("itself", "ptr(ptr)")(values)), "userdata")
end)

case("a native function works on the library's objects", function()
  local s = small.open()
  equal(native("documents", "i32(ptr)")(s.batch), 1)
  s.batch:close()
  equal(tap.failure(native("documents", "i32(ptr)"), s.batch).name, "GLM52_E_HANDLE")
end)

case("mistakes are named", function()
  refused("cannot open ./nothing.so", glm52.native, "./nothing.so", "score", "double(ptr i32, i64)")
  refused("has no function scroe", native, "scroe", "double(ptr i32, i64)")
  for signature, reason in pairs { ["double(ptr i32 i64)"] = "argument 1, ptr i32 i64, is none of",
    ["double"] = "not of the form result(argument, ...)", ["long(i32)"] = "its result, long, is none of",
    ["void(void)"] = "argument 1, void", ["f64(i32,)"] = "argument 2, , is none of", ["f64(i32) "] = false,
    ["f64(i32)x"] = "not of the form", ["ptr i32(i32)"] = "its result, ptr i32",
    ["f64(i32,i32,i32,i32,i32,i32,i32,i32,i32,i32,i32,i32,i32)"] = "more than 12 arguments" } do
    if reason then refused(reason, native, "score", signature) else native("score", signature) end
  end
  local score = native("score", "double(ptr i32, i64)")
  refused("score takes 2 arguments, and got 1\n  its signature is f64(ptr i32,i64)", score, { 1 })
  refused("argument 1 of score is a string; a list or tensor of I32 is wanted", score, "x", 1)
  refused("of F32, and not of I32", score, glm52.tensor("F32", 3), 3)
  refused("argument 2 of score is a number; an integer is wanted", score, { 1 }, 1.5)
  refused("element 2 of the list is x, not an integer", score, { 1, "x" }, 2)
  refused("element 1 of the list, 2147483648, does not fit I32", score, { 1 << 31 }, 1)
  refused("argument 1 of mix, 2147483648, does not fit i32", native("mix", "f32(i32)"), 1 << 31)
  refused("a text or nil is wanted", native("echo", "str(str)"), 5)
  refused("a tensor, a handle of glm52 or nil is wanted", native("itself", "ptr(ptr)"), {})
  local _, problem = pcall(function() score() end)
  assert(problem.where:find "native.lua:%d+:")
  equal(problem.name, "GLM52_E_INVALID")
end)

case("a native function is the log's callback itself", function()
  local context = glm52.context { threads = 1, log = native("keep_log", "void(ptr, i32, str)") }
  local config = small.config(context)
  local path = os.tmpname()
  local file = io.open(path, "w")
  file:write((config:dump(true):gsub("{", '{"something_new": 1, ', 1)))
  file:close()
  config:load_hub(path)
  os.remove(path)
  assert(native("kept_log", "str()")():find "something_new")
  refused("neither a function nor a native function of the signature void(ptr, i32, str)", glm52.context,
    { log = native("echo", "str(str)") })
end)

-- ---- callbacks of recipes

local shape = { vocab_size = 37, hidden_size = 20, num_hidden_layers = 2, first_k_dense_replace = 1,
  intermediate_size = 28, moe_intermediate_size = 12, n_routed_experts = 5, num_experts_per_tok = 2,
  num_attention_heads = 3, q_lora_rank = 14, kv_lora_rank = 10, qk_nope_head_dim = 6, qk_rope_head_dim = 4,
  v_head_dim = 7, index_n_heads = 2, index_head_dim = 8, index_topk = 5, rope_theta = 100, initializer_range = 0.3,
  max_position_embeddings = 4096 }

-- Trains in silence; `more` is laid over the recipe.
local function train(more)
  local given = { model = shape, data = { pack_tokens = 32 }, optim = { lr = 1e-2, schedule = "constant" },
    train = { steps = 4, microbatch_tokens = 32, seed = 3 } }
  for key, value in pairs(more) do given[key] = value end
  local said = {}
  local loud = print
  print = function(text) said[#said + 1] = tostring(text) end
  local done, run = pcall(glm52.train, given)
  print = loud
  if not done then error(run, 0) end
  return run, table.concat(said, "\n")
end

local function tokens(pack)
  local list = {}
  for i = 1, 32 do list[i] = (pack + i - 1) % 30 end
  return list
end

case("a closure is the source of data, another sees each step", function()
  local packs, steps = {}, {}
  local run = train {
    source = function(pack)
      packs[#packs + 1] = pack
      if pack == 1 then
        return { tokens = tokens(1), cu_seqlens = { 0, 5, 32 }, loss_mask = glm52.tensor("F32", tokens(2)) }
      end
      return tokens(pack)
    end,
    on_step = function(metrics) steps[metrics.step] = metrics.loss end,
  }
  equal(table.concat(packs, " "), "0 1 2 3")
  equal(#steps, 4)
  equal(run.history[4].loss, steps[4])
  equal(run.held_out, nil)
end)

case("a callback ends the training", function()
  equal(#train { source = tokens, on_step = function(metrics) return metrics.step == 2 end }.history, 2)
  equal(#train { source = tokens, on_step = native("stop_at_three", "i32(i64, f64)") }.history, 3)
end)

case("a native source gives the same packs as one in Lua", function()
  local one = train { source = native("counting", "i64(i64, ptr i32, i64)") }
  local other = train { source = function(pack) return table.move(tokens(pack), 1, 32 - pack % 2, 1, {}) end }
  equal(one.history[4].loss, other.history[4].loss)
  assert(one.history[4].loss ~= one.history[3].loss)
end)

case("errors of a callback reach the caller, and what was trained is kept", function()
  local problem = refused("native.lua:", train, { out = folder, source = tokens,
    on_step = function(metrics) if metrics.step == 3 then error "enough" end end })
  equal(problem, "native.lua:" .. problem:match "native.lua:(%d+)" .. ": enough" and problem)
  assert(problem:find "enough$")
  local own = setmetatable({}, { __tostring = function() return "my own error" end })
  equal(tap.failure(train, { source = function() error(own) end }), own)
  local packs = {}
  local run, said = train { out = folder, resume = true,
    source = function(pack) packs[#packs + 1] = pack return tokens(pack) end }
  assert(said:find "after step 3", said)
  equal(table.concat(packs, " "), "3")
  equal(run.history[1].loss, train { source = tokens }.history[4].loss)
end)

case("mistakes of a source", function()
  refused("source gave nil for pack 0", train, { source = function() end })
  refused("source gave -7 tokens for pack 2", train, { source = native("failing", "i64(i64, ptr i32, i64)") })
  refused("element 2 of the list is x, not an integer", train, { source = function() return { 1, "x" } end })
  refused("source = 3 is not a function", train, { source = 3 })
  refused("source = glm52.native counting, i64(i64,ptr i32,i64), but the state in " .. folder
    .. " was trained with function", train,
    { out = folder, resume = true, source = native("counting", "i64(i64, ptr i32, i64)") })
end)

os.execute("rm -rf " .. folder)
require("glm52.recipe").last_line = nil
tap.done()
