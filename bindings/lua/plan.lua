-- The plan of a recipe: what a training step takes in memory and executes in FLOPs, found by running it on the meta
-- device, which counts and computes nothing.
local core = require "glm52.classes"
local recipe = require "glm52.recipe"
local show = require "glm52.show"
local stages = require "glm52.stages"

local Plan = {}
Plan.__index = Plan

local memory_meaning = {
  parameters = "weights",
  gradients = "one per trained weight, in precision.gradients",
  optimizer = "moments and masters",
  activations = "kept from forward to backward",
  workspace = "scratch of the operations",
  comm = "buffers of messages",
  host = "text, batches and tables",
}

local function memory_rows(self)
  local rows, total = {}, 0
  for _, row in ipairs(self.rows) do
    if row.section == "memory" and row.name ~= "peak" and row.amount > 0 then
      total = total + row.amount
      rows[#rows + 1] = { "  " .. row.name, show.bytes(row.amount), memory_meaning[row.name] or "" }
    end
  end
  local peak = self.peak or total
  rows[#rows + 1] = { "  peak", show.bytes(peak), "the most held at once" }
  return rows
end

-- FLOPs and calls summed over the places in the model that ask for the same operation.
local function flop_rows(self)
  local rows = { { "  operation", "FLOP", "share", "calls", "read and written" } }
  local sorted = {}
  for _, row in ipairs(self.rows) do
    if row.section == "flops" and row.amount > 0 then sorted[#sorted + 1] = row end
  end
  table.sort(sorted, function(a, b)
    if a.amount ~= b.amount then return a.amount > b.amount end
    return a.name < b.name
  end)
  for _, row in ipairs(sorted) do
    rows[#rows + 1] = { "  " .. row.name, show.si(row.amount), string.format("%.1f %%", 100 * row.amount / self.flops),
      string.format("%d", row.calls), show.bytes(row.bytes) }
  end
  rows[#rows + 1] = { "  total", show.si(self.flops), "100 %" }
  return rows
end

local function time_line(self)
  local rate = 1e11
  while self.flops / rate > 60 and rate < 1e18 do rate = rate * 10 end
  return string.format("  at %sFLOP/s sustained: %.3g s a step, %s for %d steps", show.si(rate), self.flops / rate,
    show.duration(self.steps * self.flops / rate), self.steps)
end

function Plan:__tostring()
  local lines = { "model   " .. self.model }
  local function add(...)
    for _, line in ipairs { ... } do lines[#lines + 1] = line end
  end
  if self.data then add("data    " .. self.data) end
  add(string.format("step    %d x %d tokens", self.microbatches, self.tokens), "", "memory of one rank")
  add(table.unpack(show.columns(memory_rows(self), { "left", "right", "left" })))
  add("", "FLOP of one step")
  add(table.unpack(show.columns(flop_rows(self), { "left", "right", "right", "right", "right" })))
  add("", string.format("  %sFLOP per token", show.si(self.flops / (self.microbatches * self.tokens))))
  add(time_line(self))
  return table.concat(lines, "\n")
end

-- A plan has trained nothing: these let a recipe that was asked for its plan run to its end.
function Plan:sample() return "" end
function Plan:metrics() return {} end

local function total_flops(rows)
  local flops = 0
  for _, row in ipairs(rows) do
    if row.section == "flops" then flops = flops + row.amount end
  end
  return flops
end

local function plan_of(context, config, data)
  local model <close> = core.model(context, config)
  local optimizer <close> = core.optimizer(model, config)
  local step <close> = core.step(model, optimizer, config)
  local rows = step:plan()
  local peak
  for _, row in ipairs(rows) do
    if row.section == "memory" and row.name == "peak" then peak = row.amount end
  end
  return setmetatable({
    rows = rows, flops = total_flops(rows), peak = peak, data = data, model = model:describe(),
    microbatches = tonumber(config:get "train.microbatches"), tokens = tonumber(config:get "train.microbatch_tokens"),
    steps = tonumber(config:get "train.steps"),
  }, Plan)
end

-- The plans of several stages.
local Plans = setmetatable({}, { __index = Plan })
Plans.__index = Plans

function Plans:__tostring()
  local lines, steps, flops, peak = {}, 0, 0, 0
  for i, plan in ipairs(self.stages) do
    lines[#lines + 1] = string.format("stage %d of %d: %s, %s\n", i, #self.stages, plan.name, plan.steps == 0
      and "evaluated only" or plan.steps .. " steps\n" .. tostring(plan))
    steps, flops, peak = steps + plan.steps, flops + plan.steps * plan.flops, math.max(peak, plan.peak)
  end
  lines[#lines + 1] = string.format("all stages: %d steps, %sFLOP, peak %s", steps, show.si(flops), show.bytes(peak))
  return table.concat(lines, "\n")
end

local function make(options, own)
  local function log(level, text) io.stderr:write("glm52: ", level, ": ", text, "\n") end
  local context <close> = core.context { device = "meta", log = log }
  local list, data = stages.read(context, options, own), nil
  if list[1].config:get("data.text") ~= "" then
    local dataset <close> = core.dataset(context, list[1].config)
    data = dataset:describe()
  end
  local plans = {}
  for i, stage in ipairs(list.named and list or {}) do
    plans[i] = recipe.in_stage(stage, plan_of, context, stage.config, i == 1 and data)
    plans[i].name = stage.name
  end
  local plan = list.named and setmetatable({ stages = plans }, Plans) or plan_of(context, list[1].config, data)
  context:poll()  -- hands over what the log was told
  return plan
end

-- The plan of a recipe's options (with `own` keys of the recipe); print() shows it as tables.
return function(options, own, caller)
  return recipe.located(caller, make, options, own)
end
