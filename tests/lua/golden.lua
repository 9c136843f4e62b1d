-- Golden training runs, driven from Lua: every loss, norm and the final weights within the case's own tolerances,
-- which are those that the C test holds.
-- Usage: lua5.4 golden.lua FOLDER_OF_TESTS MODULE_FOLDER GOLDEN_FOLDER; prints TAP.
package.path = arg[1] .. "/?.lua;" .. package.path
package.cpath = arg[2] .. "/?.so;" .. package.cpath
local folder = arg[3]
local glm52 = require "glm52"
local tap = require "tap"

-- ---- reading

local function read(path)
  local file = assert(io.open(path, "rb"))
  local text = file:read("a")
  file:close()
  return text
end

-- JSON by making it Lua: lists and objects become tables, keys keyed, null false. The files are our own.
local function json(text)
  local texts = {}
  text = text:gsub('"(.-[^\\])"', function(content)
    texts[#texts + 1] = content:gsub("\\u(%x%x%x%x)", function(code) return utf8.char(tonumber(code, 16)) end)
      :gsub("\\(.)", "%1")
    return "@" .. #texts .. "@"
  end):gsub('""', "@0@"):gsub("%[", "{"):gsub("%]", "}"):gsub("null", "false")
  texts[0] = ""
  text = text:gsub("@(%d+)@%s*:", function(n) return string.format("[%q]=", texts[tonumber(n)]) end)
  text = text:gsub("@(%d+)@", function(n) return string.format("%q", texts[tonumber(n)]) end)
  return assert(load("return " .. text, "json", "t", {}))()
end

local formats = { F64 = "<d", F32 = "<f", I64 = "<i8", I32 = "<i4" }

-- {NAME = {shape, values}} of a safetensors file; values by string.unpack on demand.
local function safetensors(path)
  local bytes = read(path)
  local length = string.unpack("<i8", bytes)
  local entries = json(bytes:sub(9, 8 + length))
  return function(name)
    local entry = assert(entries[name], name)
    local values, position = {}, 9 + length + entry.data_offsets[1]
    while position <= 8 + length + entry.data_offsets[2] do
      values[#values + 1], position = string.unpack(formats[entry.dtype], bytes, position)
    end
    return values, entry.shape
  end, entries
end

-- Row n (from 1) of a tensor of two dimensions.
local function row(values, shape, n)
  return table.move(values, (n - 1) * shape[2] + 1, n * shape[2], 1, {})
end

-- ---- the run

local function configure(context, about)
  local options, muon, adamw = about.options, about.options.muon, about.options.adamw
  local config = glm52.config(context)
  for key, value in pairs {
    ["train.microbatch_tokens"] = 24, ["data.pack_tokens"] = 24, ["mtp.depths"] = options.depths,
    ["mtp.factor"] = options.mtp_loss_scaling_factor, ["mtp.detach_heads"] = options.mtp_detach_heads,
    ["mtp.share"] = options.share_index_and_kv and "index_kv" or "none", ["indexer_loss.kind"] = options.indexer_kl,
    ["indexer_loss.coeff"] = options.indexer_kl_coeff, ["optim.policy"] = "glm5",
    ["optim.muon_momentum"] = muon.momentum, ["optim.muon_convention"] = muon.momentum_convention,
    ["optim.muon_nesterov"] = muon.nesterov, ["optim.muon_coefficients"] = muon.coefficient_type,
    ["optim.muon_steps"] = muon.ns_steps, ["optim.muon_scale"] = muon.extra_scale, ["optim.muon_rope"] = muon.q_b_rope,
    ["optim.weight_decay"] = muon.weight_decay, ["optim.beta1"] = adamw.beta1, ["optim.beta2"] = adamw.beta2,
    ["optim.epsilon"] = adamw.eps, ["train.clip"] = options.clip_global_norm,
    ["moe.bias_update_rate"] = options.expert_bias_update_rate,
    ["model.latent_norm_eps"] = about.config.latent_norm_eps,
    ["model.index_k_norm_eps"] = about.config.index_k_norm_eps,
  } do config:set(key, value) end
  return config
end

local function near(got, expected, about, tensor, what)
  local tolerance = about.tensors[tensor].atol
  if not (math.abs(got - expected) <= tolerance) then
    error(string.format("%s: got %.17g, expected %.17g within %g", what, got, expected, tolerance), 2)
  end
end

local function trajectory(name)
  local about = json(read(folder .. "/" .. name .. ".json"))
  local tensor, entries = safetensors(folder .. "/" .. name .. ".safetensors")
  local context <close> = glm52.context { threads = 1 }
  local model = glm52.load(context, folder .. "/" .. about.weights, configure(context, about))
  local optimizer = glm52.optimizer(model)
  local step = glm52.step(model, optimizer)
  local ids, ids_shape = tensor "input_ids"
  local cu, cu_shape = tensor "cu_seqlens"
  local lr, mtp, kl, kl_shape = tensor "lr", tensor "mtp_ce", tensor "kl"
  local batch = glm52.batch(context)
  for n = 1, #lr do
    batch:set("tokens", row(ids, ids_shape, n))
    batch:set("cu_seqlens", row(cu, cu_shape, n))
    optimizer:set_lr(lr[n])
    step:run(batch)
    for _, metric in ipairs { "loss", "ce", "grad_norm" } do
      near(step:metric(metric), tensor(metric)[n], about, metric, metric .. " of step " .. n)
    end
    for d = 1, about.options.depths do
      near(step:metric(string.format("mtp.%d.loss", d - 1)), mtp[(n - 1) * about.options.depths + d], about, "mtp_ce",
        string.format("mtp_ce %d of step %d", d, n))
    end
    local indexers, column = step:metrics(), 0
    for layer = 0, 64 do
      local value = indexers["indexer_loss." .. layer]
      if value then
        column = column + 1
        near(value, kl[(n - 1) * kl_shape[2] + column], about, "kl", "kl of layer " .. layer)
      end
    end
    tap.equal(column, kl_shape[2])
  end
  local compared = 0
  for name in pairs(entries) do
    local parameter = name:match "^final%.(.*)"
    if parameter then
      local value = model:value(parameter)
      local expected = tensor(name)
      tap.equal(#value, #expected)
      for i = 1, #expected do near(value[i], expected[i], about, name, name) end
      compared = compared + 1
    end
  end
  assert(compared > 0, "no final weights")
  print(string.format("# %s: %d steps, %d final tensors", name, #lr, compared))
end

for _, name in ipairs { "trajectory", "trajectory_alt" } do
  tap.case(name .. " from Lua is the reference's", function() trajectory(name) end)
end
tap.done()
