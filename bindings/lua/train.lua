-- glm52.train: opens what the recipe describes, trains, evaluates, saves, and hands back a run.
--
-- With `out` set, that directory holds
--     metrics.jsonl, loss.svg     measurements
--     config.json, *.safetensors  the trained model in the hub layout, written at the end
--     state/, run.json            what it takes to go on: written every train.save_every steps, on Ctrl-C, at the end
local core = require "glm52.core"
local recipe = require "glm52.recipe"
local plot = require "glm52.plot"
local Progress = require "glm52.progress"
local Run = require "glm52.run"
local show = require "glm52.show"
local system = core.system

-- Held-out packs of an evaluation under way and of the last one; more say little more and cost time.
local packs_under_way, packs_at_end = 8, 32

local function number(config, key) return tonumber((config:get(key))) end

local function say(name, text)
  print(string.format("%-8s %s", name, text))
end

-- ---- the state on disk -----------------------------------------------------------------------------------

local function write_file(path, text)
  local file, reason = io.open(path .. ".tmp", "w")
  if file then
    local written = file:write(text)
    file = file:close() and written
  end
  local done
  if file then done, reason = os.rename(path .. ".tmp", path) end
  if not done then recipe.error("GLM52_E_IO", "cannot write " .. path .. ": " .. tostring(reason or "disk full?")) end
end

local function write_run(self, finished)
  write_file(self.out .. "/run.json", string.format('{"finished":%s,"step":%d,"config":%s}\n', finished, self.at.step,
    self.config:dump()))
end

local function save_state(self)
  self.step:save(self.out .. "/state")
  write_run(self, false)
end

-- {finished, step, config (JSON)} of the run whose state the directory holds, or nil.
local function read_state(self)
  local file = self.out ~= "" and io.open(self.out .. "/run.json", "r")
  if not file then return nil end
  local text = file:read("a")
  file:close()
  local finished, step, config = text:match('^{"finished":(%a+),"step":(%d+),"config":(.*)}%s*$')
  if not finished then
    recipe.error("GLM52_E_CORRUPT", self.out .. "/run.json is damaged", "remove it to start anew")
  end
  return { finished = finished == "true", step = math.tointeger(step), config = config }
end

-- Options that a resumed run must share with the state, for the weights and the position in the data depend on them;
-- names of things that may lie elsewhere by now are free.
local free = { ["model.preset"] = true, ["model.hub"] = true, ["data.text"] = true }

local function must_agree(key)
  return (key:find("^model%.") or key:find("^data%.") or key == "train.seed") and not free[key]
end

local function compare_with_state(self, before)
  local old <close> = core.config(self.context)
  old:load_json(before.config)
  for _, option in ipairs(core.options()) do
    local was, is = old:get(option.key), self.config:get(option.key)
    if was ~= is and must_agree(option.key) then
      recipe.error("GLM52_E_INVALID", string.format("%s = %s, but the state in %s was trained with %s", option.key, is,
        self.out, was), "restore it, or start anew with resume = false", { key = option.key })
    elseif was ~= is and option.key ~= "out" and option.key ~= "device" and is ~= "" then
      say("changed", string.format("%s = %s, was %s", option.key, is, was))
    end
  end
end

-- Decides before anything large is opened whether to go on from the state on disk. That of an unfinished run is never
-- replaced unasked.
local function look_for_state(self, resume)
  local before = read_state(self)
  if resume and before then
    compare_with_state(self, before)
    self.resumes = true
  elseif before and not before.finished and resume == nil then
    recipe.error("GLM52_E_STATE", string.format("%s holds the state of a run that stopped at step %d", self.out,
      before.step), recipe.resume_hint() .. "; resume=false starts anew and replaces it", { key = "out" })
  elseif resume then
    say("resume", "there is no state to go on from; starting anew")
  end
end

local function resume(self)
  self.dataset:seek(self.step:resume(self.out .. "/state"))
  self.at.step = math.tointeger(self.step:metric "step")
  say("resume", string.format("after step %d", self.at.step))
end

-- ---- opening ---------------------------------------------------------------------------------------------

local function open(options, own)
  local self = {}
  self.context = recipe.context(options, function(level, text)
    self.progress:note(string.format("glm52: %s: %s", level, text), true)
  end)
  self.config = recipe.config(self.context, options)
  self.out = self.config:get "out"
  self.steps = number(self.config, "train.steps")
  self.eval_every, self.save_every = number(self.config, "train.eval_every"), number(self.config, "train.save_every")
  self.history, self.at = {}, { step = 0 }
  look_for_state(self, own.resume)
  self.dataset = core.dataset(self.context, self.config)
  self.model = core.model(self.context, self.config)
  self.optimizer = core.optimizer(self.model, self.config)
  self.step = core.step(self.model, self.optimizer, self.config)
  self.batches = {}
  for i = 1, number(self.config, "train.microbatches") do self.batches[i] = core.batch(self.context) end
  return self
end

local function announce(self)
  say("glm52", core.version() .. " on " .. self.context:describe_device())
  say("model", self.model:describe())
  say("data", self.dataset:describe())
  if self.out ~= "" then say("out", self.out) end
  if self.resumes then
    resume(self)
  elseif self.out ~= "" then
    os.remove(self.out .. "/run.json")  -- from here on its state is replaced
  end
  self.progress = Progress.new(self.steps, self.at.step)
  self.context:poll()
end

-- ---- training --------------------------------------------------------------------------------------------

-- Mean loss over held-out packs, at most `most` of them, evenly spread over the text; nil if nothing is held out.
local function evaluate(self, step, most)
  local packs = self.dataset:held_out_packs()
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

local function train_step(self)
  for _, batch in ipairs(self.batches) do self.dataset:next(batch) end
  self.step:run(self.batches)
  local at = self.at
  at.step, at.loss = math.tointeger(self.step:metric "step"), self.step:metric "loss"
  at.tokens_per_second, at.memory = self.step:metric "tokens_per_second", self.step:metric "peak_memory"
  self.history[#self.history + 1] = { step = at.step, loss = at.loss }
end

local function train_loop(self)
  self.progress:header()
  while self.at.step < self.steps do
    train_step(self)
    local step = self.at.step
    local evaluates = self.eval_every > 0 and step % self.eval_every == 0 and step < self.steps
    if evaluates then self.at.held_out = evaluate(self, self.step, packs_under_way) end
    self.progress:show(self.at, evaluates)
    if self.out ~= "" and self.save_every > 0 and step % self.save_every == 0 and step < self.steps then
      save_state(self)
    end
    self.context:poll()
  end
  self.at.held_out = evaluate(self, self.step, packs_at_end)
  if self.at.loss then self.progress:show(self.at, true) end
  if self.out ~= "" then save_state(self) end
end

-- ---- the end ---------------------------------------------------------------------------------------------

local function draw(self)
  local training, held_out = {}, {}
  for _, record in ipairs(Run.read_metrics(self.out .. "/metrics.jsonl") or {}) do
    if record.loss then training[#training + 1] = { record.step, record.loss } end
    if record.held_out_loss then held_out[#held_out + 1] = { record.step, record.held_out_loss } end
  end
  write_file(self.out .. "/loss.svg", plot.loss(self.out, training, held_out))
end

-- Takes the model from the files just written, and shows that it is the one that was trained.
local function reload(self)
  self.step:close()
  self.optimizer:close()
  self.model:close()
  self.model = core.load(self.context, self.out, self.config)
  local step <close> = core.step(self.model, nil, self.config)
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
    write_run(self, true)
    say("metrics", self.out .. "/metrics.jsonl, " .. self.out .. "/loss.svg")
  end
  recipe.last_line = self.at.held_out and string.format("held-out loss %.3f", self.at.held_out)
    or self.at.loss and string.format("training loss %.3f", self.at.loss)
  return Run.new { context = self.context, config = self.config, model = self.model, out = self.out,
    held_out = self.at.held_out, history = self.history }
end

-- After Ctrl-C: saves the state and says how to go on.
local function stop(self)
  local signal = system.interrupted()
  local at = string.format("interrupted after step %d of %d", self.at.step, self.steps)
  if self.out == "" then
    recipe.error("GLM52_E_CANCELLED", at .. "; nothing is saved, for the recipe has no `out`", "", { signal = signal })
  end
  save_state(self)
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
  if done then done, result = pcall(finish, self) end
  if not done and was_cancelled(result) and not result.details.signal then done, result = pcall(stop_late, self) end
  system.release_interrupts()
  if not done then error(result, 0) end
  return result
end

return function(options, own, caller)
  return recipe.located(caller, train, options, own)
end
