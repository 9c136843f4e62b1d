-- Four layers of GLM-5.2 at full width on one GPU: 1 dense and 3 MoE layers of 32 experts, indexers full, full, full,
-- shared; random weights and tokens. Prints for each pack size the time of a step, tokens/s, memory and model
-- TFLOP/s, and up to 8192 tokens what each part of a step takes. GEMM=TFLOP/s of a large product in the same run adds
-- the share of it; STEPS=N times N steps.
--
--   glm52 train examples/h200_proxy.lua alike 4096 8192 16384    what PyTorch trains by default: AdamW, all in bf16,
--                                                                fast operations; beside it the deterministic ones
--   glm52 train examples/h200_proxy.lua trained 4096 8192        as GLM-5.2 is trained: Muon per head and AdamW with
--                                                                fp32 masters, sparse indexer loss, one MTP depth of TV
--   DEVICE=meta glm52 train examples/h200_proxy.lua alike 4096   the memory of it, without a GPU
local glm52 = require "glm52"

local device, steps, gemm = os.getenv "DEVICE" or "cuda", tonumber(os.getenv "STEPS" or 12), tonumber(os.getenv "GEMM")
local directory = "out/h200_proxy"
io.stdout:setvbuf "line"

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
  local scale = step:metric "seconds" / time
  local published, exact = step:metric "tflops_megatron_6753" * scale, step:metric "tflops_exact" * scale
  local line = "%-15s %6d tokens  %8.1f ms [%.1f..%.1f]  %6.0f tokens/s  %5.1f GB  " ..
    "%4.0f TFLOP/s published, %4.0f exact%s  loss %.3f"
  print(line:format(label, tokens, time * 1e3, seconds[1] * 1e3, seconds[#seconds] * 1e3, tokens / time, memory / 1e9,
    published, exact,
    gemm and string.format(" (%.2f, %.2f of gemm)", published / gemm, exact / gemm) or "", step:metric "loss"))
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

-- What a row of the profile counts for: the first name whose pattern its part and operation have.
local names = {
  { "clearing", " zero$" },
  { "MTP layer", "^mtp%.[^h]" },
  { "MTP head", "^mtp%." },
  { "sparse attention", "^mla%.attention " },
  { "attention's projections", "^mla%..* gemm$" },
  { "indexer, projections", "^indexer%.project " },
  { "indexer, selection", "^indexer%.select " },
  { "indexer, loss", "^indexer%." },
  { "router and dispatch", "^moe%.router " },
  { "router and dispatch", " dispatch_" },
  { "experts", "^moe%.experts " },
  { "shared experts", "^moe%.shared " },
  { "dense MLP", "^mlp " },
  { "head and losses", "^head head_" },
  { "Muon", "^optimizer%.muon " },
  { "AdamW", "^optimizer%.adamw " },
  { "gradient norms", "^clip " },
  { "norms, rotation, embedding, sums", "" },
}

local function name_of(row)
  local text = row.label .. " " .. row.operation
  for _, entry in ipairs(names) do
    if text:find(entry[2]) then return entry[1] end
  end
end

local function rows_of(path)
  local rows = {}
  for line in io.lines(path) do
    local row = { label = line:match '"label":"([^"]*)"', operation = line:match '"operation":"([^"]*)"' }
    for key, value in line:gmatch '"([%w_]+)":([%d.eE+-]+)' do row[key] = tonumber(value) end
    rows[#rows + 1] = row
  end
  return table.remove(rows, 1), rows -- the first is of the whole step
end

local function show_parts(label, tokens)
  local whole, rows = rows_of(directory .. "/profile.jsonl")
  local sums, order = {}, {}
  for _, row in ipairs(rows) do
    local name = name_of(row)
    if not sums[name] then
      sums[name] = { ms = 0, gflop = 0, gbyte = 0 }
      order[#order + 1] = name
    end
    for key, value in pairs(sums[name]) do sums[name][key] = value + row[key] end
  end
  table.sort(order, function(a, b) return sums[a].ms > sums[b].ms end)
  print(string.format("%s, %d tokens: %.1f ms a step with times taken, operations %.1f ms", label, tokens, whole.ms,
    whole.timed_ms))
  for _, name in ipairs(order) do
    local sum = sums[name]
    print(string.format("  %-34s %8.2f ms %5.1f%%  %8.1f GFLOP %6.0f TFLOP/s  %7.2f GB %6.2f TB/s", name, sum.ms,
      100 * sum.ms / whole.timed_ms, sum.gflop, sum.gflop / sum.ms, sum.gbyte, sum.gbyte / sum.ms))
  end
end

-- A step of its own: whoever takes times replays nothing.
local function measure_parts(kind, context, model, optimizer, options, tokens, batches)
  local config <close> = configured(context, options, tokens)
  config:set("report.profile", "true")
  config:set("out", directory)
  do
    local step <close> = glm52.step(model, optimizer, config)
    for i = 1, 4 do step:run(batches[i]) end
  end
  show_parts(kind, tokens)
end

local function show_memory(label, step, tokens)
  for _, row in ipairs(step:plan()) do
    if row.section == "memory" then
      print(string.format("%-18s %6d tokens  %-12s %8.2f GB", label, tokens, row.name, row.amount / 1e9))
    end
  end
end

local function measure_step(kind, context, model, optimizer, config, tokens, batches)
  local step <close> = glm52.step(model, optimizer, config)
  if device == "meta" then return show_memory(kind, step, tokens) end
  time_steps(kind, context, step, batches, tokens)
  if kind == "trained" or tokens > 16384 then return end
  config:set("train.deterministic", "true")
  step:set_stage(config)
  time_steps("  deterministic", context, step, batches, tokens)
  config:set("train.deterministic", "false")
  step:set_stage(config) -- as what follows wants the model
end

-- The weights are the model's; a size has an optimizer and a step of its own.
local function measure(kind, context, model, options, tokens)
  local config <close> = configured(context, options, tokens)
  local optimizer <close> = glm52.optimizer(model, config)
  local batches = {}
  for i = 1, 4 do batches[i] = random_batch(context, device == "meta" and 2 or tokens, 154880) end
  measure_step(kind, context, model, optimizer, config, tokens, batches)
  if tokens <= 8192 and device ~= "meta" then
    measure_parts(kind, context, model, optimizer, options, tokens, batches)
  end
  for _, batch in ipairs(batches) do batch:close() end
end

local kind = arg[1] or "alike"
local options = kinds[kind] or error("first argument: alike or trained", 0)
local sizes = { table.unpack(arg, 2) }
if #sizes == 0 then sizes = { "4096" } end
os.execute("mkdir -p " .. directory)
math.randomseed(1)

local context <close> = glm52.context { device = device }
local config <close> = configured(context, options, 4096)
local model <close> = glm52.model(context, config)
for _, size in ipairs(sizes) do measure(kind, context, model, options, math.tointeger(size)) end
