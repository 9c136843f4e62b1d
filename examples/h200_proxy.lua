-- Four layers of GLM-5.2 at full width on one GPU: 1 dense and 3 MoE layers of 32 experts, indexers full, full, full,
-- shared; random weights and tokens. Prints for each pack size the time of a step, tokens/s, memory and model TFLOP/s.
--
--   glm52 train examples/h200_proxy.lua alike 4096 8192 16384    what PyTorch trains by default: AdamW, all in bf16, fast
--                                                                operations; beside it the deterministic ones
--   glm52 train examples/h200_proxy.lua trained 4096 8192        as GLM-5.2 is trained: Muon per head and AdamW with fp32
--                                                                masters, sparse indexer loss, one MTP depth with TV
--   glm52 train examples/h200_proxy.lua parts 4096               where the time of the second goes
--   DEVICE=meta glm52 train examples/h200_proxy.lua alike 4096   the memory of it, without a GPU
local glm52 = require "glm52"

local device, steps = os.getenv "DEVICE" or "cuda", tonumber(os.getenv "STEPS" or 12)

local shape = {
  ["device"] = "cuda",  -- whose workspaces a plan counts
  ["model.preset"] = "glm52",
  ["model.num_hidden_layers"] = 4,
  ["model.first_k_dense_replace"] = 1,
  ["model.n_routed_experts"] = 32,
  ["model.indexer_types"] = "full,full,full,shared",
  ["model.rope_theta"] = 1000000,
  ["precision.params"] = "bf16",
  ["optim.lr"] = 1e-5,
  ["optim.schedule"] = "constant",
}

local kinds = {
  alike = {
    ["model.num_nextn_predict_layers"] = 0,
    ["optim.policy"] = "adamw",
    ["precision.gradients"] = "bf16",
    ["precision.moments"] = "bf16",
    ["precision.masters"] = "false",
    ["train.clip"] = 0,
    ["train.recompute"] = "light",
    ["train.deterministic"] = "false",
  },
  trained = {
    ["optim.policy"] = "glm5",
    ["indexer_loss.kind"] = "sparse",
    ["mtp.depths"] = 1,
    ["mtp.loss"] = "tv",
    ["mtp.detach_heads"] = "true",
  },
}

kinds.parts = { ["report.profile"] = "true", out = "out/h200_proxy" }
for key, value in pairs(kinds.trained) do kinds.parts[key] = value end

local function median(values)
  table.sort(values)
  return values[#values // 2 + 1]
end

local function random_batch(context, tokens, vocabulary)
  local batch, list = glm52.batch(context), {}
  for i = 1, tokens do list[i] = math.random(0, vocabulary - 1) end
  batch:set("tokens", list)
  return batch
end

local function report(label, tokens, step, seconds, memory)
  local time = median(seconds)
  print(string.format("%-18s %6d tokens  %8.1f ms [%.1f..%.1f]  %6.0f tokens/s  %5.1f GB  %4.0f TFLOP/s published, %4.0f executed  loss %.3f",
    label, tokens, time * 1e3, seconds[1] * 1e3, seconds[#seconds] * 1e3, tokens / time, memory / 1e9,
    step:metric "tflops_megatron_6753" * step:metric "seconds" / time, step:metric "tflops_exact" * step:metric "seconds" / time,
    step:metric "loss"))
end

local function configured(context, options, tokens)
  local config = glm52.config(context)
  for key, value in pairs(shape) do config:set(key, tostring(value)) end
  for key, value in pairs(options) do config:set(key, tostring(value)) end
  for _, key in ipairs { "train.microbatch_tokens", "data.pack_tokens" } do config:set(key, tostring(tokens)) end
  return config
end

local function time_steps(label, context, step, batches, tokens)
  local seconds = {}
  for i = 1, steps + 2 do -- the first goes as it comes, the second is recorded
    step:run(batches[i % 4 + 1])
    if i > 2 then seconds[#seconds + 1] = step:metric "seconds" end
  end
  report(label, tokens, step, seconds, (context:memory()))
end

-- Milliseconds of a step by part, the largest first.
local function show_parts(path)
  local parts, order = {}, {}
  for line in io.lines(path) do
    local label, ms = line:match '"label":"([^"]*)".*"ms":([%d.e+-]+)'
    if label and not parts[label] then order[#order + 1] = label end
    if label then parts[label] = (parts[label] or 0) + tonumber(ms) end
  end
  table.sort(order, function(a, b) return parts[a] > parts[b] end)
  for _, label in ipairs(order) do print(string.format("  %-22s %8.2f ms", label, parts[label])) end
end

local function show_memory(label, step, tokens)
  for _, row in ipairs(step:plan()) do
    if row.section == "memory" then print(string.format("%-18s %6d tokens  %-12s %8.2f GB", label, tokens, row.name, row.amount / 1e9)) end
  end
end

-- The weights are the model's; a size has an optimizer and a step of its own.
local function measure(kind, context, model, options, tokens)
  local config <close> = configured(context, options, tokens)
  local optimizer <close> = glm52.optimizer(model, config)
  local step <close> = glm52.step(model, optimizer, config)
  if device == "meta" then return show_memory(kind, step, tokens) end
  local batches = {}
  for i = 1, 4 do batches[i] = random_batch(context, tokens, 154880) end
  time_steps(kind, context, step, batches, tokens)
  if kind == "parts" then show_parts(options.out .. "/profile.jsonl") end
  if kind == "alike" and tokens <= 16384 then
    config:set("train.deterministic", "true")
    step:set_stage(config)
    time_steps("  deterministic", context, step, batches, tokens)
    config:set("train.deterministic", "false")
    step:set_stage(config) -- as the next size wants the model
  end
  for _, batch in ipairs(batches) do batch:close() end
end

local kind = arg[1] or "alike"
local options = kinds[kind] or error("first argument: alike, trained or parts", 0)
local sizes = { table.unpack(arg, 2) }
if #sizes == 0 then sizes = { "4096" } end
if options.out then os.execute("mkdir -p " .. options.out) end
math.randomseed(1)

local context <close> = glm52.context { device = device }
local config <close> = configured(context, options, 4096)
local model <close> = glm52.model(context, config)
for _, size in ipairs(sizes) do measure(kind, context, model, options, math.tointeger(size)) end
