-- glm52.train: opens what the recipe describes, trains stage after stage, evaluates, saves, and hands back a run.
--
-- With `out` set, that directory holds
--     metrics.jsonl, loss.svg     measurements
--     config.json, *.safetensors  the trained model in the hub layout, written at the end
--     state/, run.json            what it takes to go on: state.lua
local core = require "glm52.classes"
local recipe = require "glm52.recipe"
local plot = require "glm52.plot"
local profile = require "glm52.profile"
local Progress = require "glm52.progress"
local Run = require "glm52.run"
local show = require "glm52.show"
local stages = require "glm52.stages"
local state = require "glm52.state"
local system = core.system

-- Held-out packs of an evaluation under way and of the last one of a stage; more say little more and cost time.
local packs_under_way, packs_at_end = 8, 32

local function number(config, key) return tonumber((config:get(key))) end

local say = show.say

-- ---- opening ---------------------------------------------------------------------------------------------

local function open(options, own)
  local self = {}
  self.context = recipe.context(options, function(level, text)
    self.progress:note(string.format("glm52: %s: %s", level, text), true)
  end)
  self.stages = stages.read(self.context, options, own)
  self.out = self.stages[1].config:get "out"
  self.on_step, self.source = own.on_step, own.source
  self.history, self.at, self.begin, self.pack = {}, { step = 0 }, 1, 0
  self.stages[1].first = 0
  state.look(self, own.resume)
  if self.stages.named then stages.rehearse(options, own) end
  self.stage = self.stages[self.begin]
  local config = self.stage.config
  if not self.source or config:get "data.text" ~= "" then self.dataset = core.dataset(self.context, config) end
  if self.out ~= "" then state.make_directory(self.out) end
  self.model = core.model(self.context, config)
  self.optimizer = core.optimizer(self.model, config)
  self.step = core.step(self.model, self.optimizer, config)
  return self
end

-- What earlier stages measured, from the file that a resumed run goes on with.
local function recall_stages(self)
  local by_name = {}
  for i = 1, self.begin - 1 do by_name[self.stages[i].name] = self.stages[i] end
  for _, record in ipairs(Run.read_metrics(self.out .. "/metrics.jsonl") or {}) do
    local stage = by_name[record.stage]
    if stage and record.loss then
      stage.first, stage.last, stage.loss = stage.first or record.step - 1, record.step, record.loss
    elseif stage then
      stage.held_out_loss = record.held_out_loss
    end
  end
end

-- The last step of all stages from number `index` on, the first of which is under way.
local function last_step(self, index)
  local last = self.stages[index].first
  for i = index, #self.stages do last = last + self.stages[i].steps end
  return last
end

local function announce(self)
  say("glm52", core.version() .. " on " .. self.context:describe_device())
  say("model", self.model:describe())
  say("data", self.source and "from the recipe's source" or self.dataset:describe())
  if self.out ~= "" then say("out", self.out) end
  if self.resumes then
    recall_stages(self)
    self.pack = state.resume(self)
  elseif self.out ~= "" then
    state.begin(self)
  end
  if not self.source then self.dataset:seek(self.pack) end
  self.steps = last_step(self, self.begin)
  self.progress = Progress.new(self.steps, self.at.step, self.stages.named and self.stages)
  self.context:poll()
end

-- ---- training --------------------------------------------------------------------------------------------

-- Mean loss over held-out packs, at most `most` of them, evenly spread over the text; nil if nothing is held out.
local function evaluate(self, step, most)
  local packs = self.dataset and self.dataset:held_out_packs() or 0
  local count, batches = math.min(packs, most), {}
  if count == 0 then return nil end
  for i = 1, count do
    batches[i] = core.batch(self.context)
    self.dataset:held_out((i - 1) * packs // count, batches[i])
  end
  local done, loss = pcall(step.evaluate, step, batches)
  for _, batch in ipairs(batches) do batch:close() end  -- Lua knows nothing of the size of what they hold
  if not done then error(loss, 0) end
  return loss
end

local function source_failed(self, what)
  recipe.error("GLM52_E_CALLBACK", string.format("source gave %s for pack %d", what, self.pack),
    "it gives a list of tokens, or a table of the fields of a batch: tokens, cu_seqlens, labels, loss_mask, row_mask",
    { key = "source" })
end

-- A native source writes tokens to memory of ours, i64(i64 pack, ptr i32 tokens, i64 capacity), and says how many.
local function call_native_source(self)
  self.room = self.room or core.tensor("I32", number(self.stage.config, "train.microbatch_tokens"))
  local count = self.source(self.pack, self.room, #self.room)
  if math.type(count) ~= "integer" or count <= 0 or count > #self.room then
    source_failed(self, tostring(count) .. " tokens")
  end
  return self.room:first(count)
end

-- The next pack, from the recipe's source or the dataset.
local function fill(self, batch)
  if not self.source then return self.dataset:next(batch) end
  local given
  if type(self.source) == "function" then given = self.source(self.pack) else given = call_native_source(self) end
  if type(given) ~= "table" and type(given) ~= "userdata" then source_failed(self, tostring(given)) end
  local fields = type(given) == "table" and given.tokens and given or { tokens = given }
  batch:set("tokens", fields.tokens)  -- clears the others
  for field, values in pairs(fields) do
    if field ~= "tokens" then batch:set(field, values) end
  end
  self.pack = self.pack + 1
end

-- What on_step says: a function gets all metrics, a native one i32(i64 step, f64 loss); true (not 0) ends the training.
local function ask_to_stop(self)
  if type(self.on_step) == "function" then return self.on_step(self.step:metrics()) end
  local answer = self.on_step(self.at.step, self.at.loss)
  return answer and answer ~= 0
end

local function train_step(self)
  for _, batch in ipairs(self.batches) do fill(self, batch) end
  self.step:run(self.batches)
  local at = self.at
  at.step, at.loss = math.tointeger(self.step:metric "step"), self.step:metric "loss"
  at.tokens_per_second, at.memory = self.step:metric "tokens_per_second", self.step:metric "peak_memory"
  self.stage.loss = at.loss
  self.history[#self.history + 1] = { step = at.step, loss = at.loss, stage = at.stage or nil }
end

local function begin_stage(self, index)
  local stage, before = self.stages[index], self.stage
  if stage ~= before then
    stage.first = self.at.step
    self.stage = stage
    self.step:set_stage(stage.config)
  end
  stage.last = stage.first + stage.steps
  self.at.stage = self.stages.named and stage.name
  self.batches = {}
  for i = 1, number(stage.config, "train.microbatches") do self.batches[i] = core.batch(self.context) end
  if self.at.stage then
    self.progress:note(show.said("stage", string.format("%s (%d of %d), %s: %s", stage.name, index, #self.stages,
      stage.steps == 0 and "evaluated only" or string.format("%d steps", stage.steps), self.model:describe())))
  end
end

local function train_stage(self, stage)
  local eval_every, save_every = number(stage.config, "train.eval_every"), number(stage.config, "train.save_every")
  while self.at.step < stage.last do
    train_step(self)
    local step = self.at.step
    local evaluates = eval_every > 0 and step % eval_every == 0 and step < stage.last
    if evaluates then self.at.held_out = evaluate(self, self.step, packs_under_way) end
    self.progress:show(self.at, evaluates)
    if self.on_step and ask_to_stop(self) then self.stopped, stage.last = true, step end
    if save_every > 0 and step % save_every == 0 and step < stage.last then state.save(self) end
    self.context:poll()
  end
  stage.held_out_loss = evaluate(self, self.step, packs_at_end)
  self.at.held_out = stage.held_out_loss
  if self.at.loss or self.at.stage then self.progress:show(self.at, true) end
  if stage.steps > 0 or not self.saved then state.save(self) end
end

-- Stages of no steps at the end only look: what the run leaves is the last stage that trained.
local function return_to_trained(self)
  local index = #self.stages
  while index > self.begin and self.stages[index].steps == 0 do index = index - 1 end
  local stage = self.stages[index]
  if stage == self.stage or stage.steps == 0 then return end
  self.stage, self.at.held_out = stage, stage.held_out_loss
  self.step:set_stage(stage.config)
end

local function train_loop(self)
  self.progress:header()
  for index = self.begin, #self.stages do
    begin_stage(self, index)
    train_stage(self, self.stage)
    if self.stopped then return end
  end
  return_to_trained(self)
end

-- ---- the end ---------------------------------------------------------------------------------------------

-- Stages that train the indexer alone have a loss of another kind: it is not drawn.
local function draw(self)
  local training, held_out, marks, other = {}, {}, {}, {}
  for _, stage in ipairs(self.stages) do
    if stage.first and self.stages.named then marks[#marks + 1] = { stage.first, stage.name } end
    if stage.config:get "train.train_only" == "indexer" then other[stage.name] = true end
  end
  for _, record in ipairs(Run.read_metrics(self.out .. "/metrics.jsonl") or {}) do
    if record.loss and not other[record.stage] then training[#training + 1] = { record.step, record.loss } end
    if record.held_out_loss then held_out[#held_out + 1] = { record.step, record.held_out_loss } end
  end
  state.write_file(self.out .. "/loss.svg", plot.loss(self.out, training, held_out, marks))
end

-- Takes the model from the files just written, and shows that it is the one that was trained.
local function reload(self)
  self.step:close()
  self.optimizer:close()
  self.model:close()
  self.model = core.load(self.context, self.out, self.stage.config)
  local step <close> = core.step(self.model, nil, self.stage.config)
  local loss = evaluate(self, step, packs_at_end)
  if not loss then return say("saved", self.out) end
  if loss ~= self.at.held_out then
    recipe.error("GLM52_E_INTERNAL", string.format("the model saved in %s has held-out loss %.17g, trained was %.17g",
      self.out, loss, self.at.held_out))
  end
  say("saved", string.format("%s loads again to the same held-out loss, %.4f", self.out, loss))
end

local function finish(self)
  local trained = #self.history
  if trained > 0 then
    say("trained", string.format("%d steps in %s", trained, show.duration(system.seconds() - self.progress.begin)))
  end
  if self.out ~= "" then
    self.model:save(self.out)
    draw(self)
    reload(self)
    state.write_run(self, true)
    say("metrics", self.out .. "/metrics.jsonl, " .. self.out .. "/loss.svg")
    local table = self.stage.config:get "report.profile" == "true" and profile(self.out .. "/profile.jsonl")
    if table then print(table) end
  end
  recipe.last_line = self.at.held_out and string.format("held-out loss %.3f", self.at.held_out)
    or self.at.loss and string.format("training loss %.3f", self.at.loss)
  return Run.new { context = self.context, config = self.stage.config, model = self.model, out = self.out,
    held_out = self.at.held_out, history = self.history, stages = self.stages }
end

-- After Ctrl-C: saves the state and says how to go on.
local function stop(self)
  local signal = system.interrupted()
  local at = string.format("interrupted after step %d of %d%s", self.at.step, self.steps,
    self.at.stage and ", in " .. recipe.stage_title(self.at.stage) or "")
  if self.out == "" then
    recipe.error("GLM52_E_CANCELLED", at .. "; nothing is saved, for the recipe has no `out`", "", { signal = signal })
  end
  state.save(self)
  recipe.error("GLM52_E_CANCELLED", at .. "; its state is in " .. self.out, recipe.resume_hint(), { signal = signal })
end

-- After Ctrl-C when training is over and its state saved.
local function stop_late(self)
  recipe.error("GLM52_E_CANCELLED", "interrupted while the trained model was saved and checked; its state is in " ..
    self.out, recipe.resume_hint(), { signal = system.interrupted() })
end

local function was_cancelled(failure)
  return recipe.is_error(failure) and failure.name == "GLM52_E_CANCELLED"
end

local function train(options, own)
  local self = open(options, own)
  announce(self)
  system.catch_interrupts(self.context)
  local done, result = pcall(train_loop, self)
  self.progress:finish()
  if not done and was_cancelled(result) then done, result = pcall(stop, self) end
  if done then
    done, result = pcall(finish, self)
  elseif self.on_step or self.source then  -- one of them may have failed: what was trained before that is kept
    pcall(state.save, self)
  end
  if not done and was_cancelled(result) and not result.details.signal then done, result = pcall(stop_late, self) end
  system.release_interrupts()
  if not done then error(result, 0) end
  return result
end

return function(options, own, caller)
  return recipe.located(caller, train, options, own)
end
