-- The state of a run on disk: what it takes to go on. In the directory `out`,
--     state/    model, optimizer and counters, as the library's step saves them
--     run.json  whether the run has finished, its step, the step at which its stage began, and the stage's config
-- Both are written every train.save_every steps, at the end of each stage and on Ctrl-C.
local core = require "glm52.core"
local recipe = require "glm52.recipe"
local show = require "glm52.show"
local system = core.system

local state = {}

function state.write_file(path, text)
  local file, reason = io.open(path .. ".tmp", "w")
  if file then
    local written = file:write(text)
    file = file:close() and written
  end
  local done
  if file then done, reason = os.rename(path .. ".tmp", path) end
  if not done then recipe.error("GLM52_E_IO", "cannot write " .. path .. ": " .. tostring(reason or "disk full?")) end
end

local function probe(path)
  local file, reason = io.open(path, "w")
  if not file then return nil, reason:sub(#path + 3) end  -- behind "path: "
  local written, why = file:write("{}\n")
  local closed, trouble = file:close()
  os.remove(path)
  return written and closed, why or trouble
end

-- Makes the directory `out` and those above it, and shows that files can be written there, before hours have gone into
-- what they would hold.
function state.make_directory(out)
  local made, reason = true, nil
  for slash in (out .. "/"):gmatch("()/") do
    if slash > 1 and made then made, reason = system.make_directory(out:sub(1, slash - 1)) end
  end
  if made then made, reason = probe(out .. "/run.json.tmp") end
  if not made then
    recipe.error("GLM52_E_IO", string.format("out = %s cannot be written: %s", out, reason), "", { key = "out" })
  end
end

-- run: {out, step, at = {step}, stage (with config and first), saved (step of the state on disk)}

function state.write_run(run, finished)
  state.write_file(run.out .. "/run.json", string.format('{"finished":%s,"step":%d,"stage_begin":%d,"config":%s}\n',
    finished, run.at.step, run.stage.first, run.stage.config:dump()))
end

-- Saves, unless no step was taken since.
function state.save(run)
  if run.out == "" or run.saved == run.at.step then return end
  run.step:save(run.out .. "/state")
  run.saved = run.at.step
  state.write_run(run, false)
end

-- {finished, step, stage_begin, config (JSON)} of the run whose state the directory holds, or nil.
local function read(out)
  local file = out ~= "" and io.open(out .. "/run.json", "r")
  if not file then return nil end
  local text = file:read("a")
  file:close()
  local finished, step, rest = text:match('^{"finished":(%a+),"step":(%d+),(.*)}%s*$')
  local begin, config = (rest or ""):match('^"stage_begin":(%d+),"config":(.*)$')
  if not begin then
    recipe.error("GLM52_E_CORRUPT", out .. "/run.json is damaged", "remove it to start anew")
  end
  return { finished = finished == "true", step = math.tointeger(step), stage_begin = math.tointeger(begin),
    config = config }
end

-- Options that a resumed run must share with the state, for the weights and the position in the data depend on them;
-- names of things that may lie elsewhere by now are free.
local free = { ["model.preset"] = true, ["model.hub"] = true, ["data.text"] = true }

local function must_agree(key)
  return (key:find("^model%.") or key:find("^data%.") or key == "train.seed") and not free[key]
end

local function compare(run, old, config)
  for _, option in ipairs(core.options()) do
    local was, is = old:get(option.key), config:get(option.key)
    if was ~= is and must_agree(option.key) then
      recipe.error("GLM52_E_INVALID", string.format("%s = %s, but the state in %s was trained with %s", option.key, is,
        run.out, was), "restore it, or start anew with resume = false", { key = option.key })
    elseif was ~= is and option.key ~= "out" and option.key ~= "device" and is ~= "" then
      show.say("changed", string.format("%s = %s, was %s", option.key, is, was))
    end
  end
end

-- Number of the stage in which the state was saved, and the step at which that began. A recipe without stages goes on
-- from any state: under another train.stage as a new stage.
local function find_stage(run, before, name)
  for index, stage in ipairs(run.stages) do
    if stage.name == name then return index, before.stage_begin end
  end
  if not run.stages.named then return 1, before.step end
  recipe.error("GLM52_E_STATE", string.format("%s holds the state of %s, which the recipe does not have", run.out,
    name == "" and "a run without stages" or recipe.stage_title(name)),
    "restore it, or start anew with resume = false", { key = "stages" })
end

-- Decides before anything large is opened whether to go on from the state on disk, and in which stage. That of an
-- unfinished run is never replaced unasked.
function state.look(run, resume)
  local before = read(run.out)
  if resume and before then
    local old <close> = core.config(run.context)
    old:load_json(before.config)
    local index, first = find_stage(run, before, old:get "train.stage")
    compare(run, old, run.stages[index].config)
    run.resumes, run.begin = true, index
    run.stages[index].first = first
  elseif before and not before.finished and resume == nil then
    recipe.error("GLM52_E_STATE", string.format("%s holds the state of a run that stopped at step %d", run.out,
      before.step), recipe.resume_hint() .. "; resume=false starts anew and replaces it", { key = "out" })
  elseif resume then
    show.say("resume", "there is no state to go on from; starting anew")
  end
end

-- Takes the state over.
function state.resume(run)
  run.dataset:seek(run.step:resume(run.out .. "/state"))
  run.at.step = math.tointeger(run.step:metric "step")
  run.saved = run.at.step
  show.say("resume", string.format("after step %d%s", run.at.step,
    run.stages.named and ", in " .. recipe.stage_title(run.stage.name) or ""))
end

return state
