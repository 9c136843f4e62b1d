-- The state of a run on disk: what it takes to go on. In the directory `out`,
--     state/    model, optimizer and counters, as the library's step saves them
--     run.json  the recipe as it was understood, its hash, and whether the run has finished
-- run.json is there from the first step on, state/ every train.save_every steps, at the end of each stage and on
-- Ctrl-C. The state itself says which step and stage it is of, so that the two cannot contradict each other.
local core = require "glm52.classes"
local json = require "glm52.json"
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

-- ---- the recipe, normalised ------------------------------------------------------------------------------

-- Names of things that may lie elsewhere by now, and of what they resolve to: no part of what a recipe means.
local free = { out = true, device = true, ["model.preset"] = true, ["model.hub"] = true, ["data.text"] = true }

-- One line a stage: a JSON object of every option as text, in the order of the schema. What the recipe, the arguments
-- and the defaults come to is written alike whichever of them said it.
local function normalised(run)
  local lines = {}
  for i, stage in ipairs(run.stages) do
    local source = run.source and (tostring(run.source):match "^glm52.*" or "function")
    local items = { source and '"source":' .. json.quote(source) }
    for _, option in ipairs(core.options()) do
      if not free[option.key] then
        items[#items + 1] = json.quote(option.key) .. ":" .. json.quote(stage.config:get(option.key))
      end
    end
    lines[i] = "{" .. table.concat(items, ",") .. "}"
  end
  return lines
end

local function hash_of(lines) return "xxh3-128:" .. system.hash(table.concat(lines, "\n")) end

local function options_of(line)
  local options = {}
  for key, value in line:gmatch('"([%w_.]+)":"(.-)"%f[,}]') do options[key] = json.unquote(value) end
  return options
end

-- ---- files -----------------------------------------------------------------------------------------------

-- run: {out, at = {step}, stage (with first), stages, source, saved (step of the state on disk)}

function state.write_run(run, finished)
  local lines = normalised(run)
  state.write_file(run.out .. "/run.json", string.format(
    '{"finished":%s,"step":%d,"stage_begin":%d,"recipe_hash":"%s","recipe":[\n%s\n]}\n', finished, run.at.step,
    run.stage.first, hash_of(lines), table.concat(lines, ",\n")))
end

-- Saves, unless no step was taken since.
function state.save(run)
  if run.out == "" or run.saved == run.at.step then return end
  run.step:save(run.out .. "/state")
  run.saved = run.at.step
  state.write_run(run, false)
end

local function read_file(path)
  local file = io.open(path, "r")
  if not file then return nil end
  local text = file:read("a")
  file:close()
  return text
end

local function damaged(path, reason)
  recipe.error("GLM52_E_CORRUPT", path .. " is damaged" .. (reason or ""),
    "restore it, or start anew with resume = false", { path = path })
end

-- {finished, recipe (list of lines), hash} of the run that the directory holds, or nil. Of a finished one that is not
-- gone on with no more needs to be read.
local function read_run(out, resume)
  local path = out .. "/run.json"
  local text = read_file(path)
  if not text then return nil end
  if not resume and text:find '^{"finished":true,' then return { finished = true } end
  local finished, hash, rest =
    text:match('^{"finished":(%a+),"step":%d+,"stage_begin":%d+,"recipe_hash":"([%w:-]+)","recipe":%[\n(.*)\n%]}\n$')
  if not hash then damaged(path, ", or of another version") end
  local lines = {}
  for line in (rest .. ",\n"):gmatch("(.-),\n") do lines[#lines + 1] = line end
  if hash_of(lines) ~= hash then damaged(path, ": the recipe in it has another hash than it says") end
  return { finished = finished == "true", recipe = lines, hash = hash }
end

-- {directory, step, stage (its name), begin (step at which that began)} of the state that the directory holds, or nil.
local function read_state(out)
  local name = read_file(out .. "/state/latest")
  if not name then return nil end
  local directory = out .. "/state/" .. name:match("^[^\n]*")
  local text = read_file(directory .. "/state.json") or ""
  local step, begin = text:match('"step":%s*(%d+)'), text:match('"schedule_begin":%s*(%d+)')
  local stage = text:match('"stage":%s*""') and "" or text:match('"stage":%s*"(.-[^\\])"')
  if not (step and begin and stage) then damaged(directory .. "/state.json") end
  return { directory = directory, step = math.tointeger(step), begin = math.tointeger(begin),
    stage = json.unquote(stage) }
end

-- Before the first step of a new run: no state of an earlier one is left that could be taken for its own.
function state.begin(run)
  local name = read_file(run.out .. "/state/latest")
  os.remove(run.out .. "/state/latest")
  local directory = name and name:find "^step%-" and run.out .. "/state/" .. name:match("^[%w-]*")
  for _, file in ipairs { "config.json", "model.safetensors", "optimizer.safetensors", "state.json" } do
    if directory then os.remove(directory .. "/" .. file) end
  end
  if directory then os.remove(directory) end
  state.write_run(run, false)
end

-- ---- going on --------------------------------------------------------------------------------------------

-- Options on which the weights and the position in the data depend: no word lets a state go on under others.
local function must_agree(key)
  return key:find("^model%.") or key:find("^data%.") or key == "train.seed" or key == "source"
end

local function refuse(run, key, is, was, stage, hint)
  recipe.error("GLM52_E_INVALID",
    string.format("%s = %s, but the state in %s was trained with %s", key, is, run.out, was), hint,
    { key = key, stage = stage })
end

-- The options of one stage, as they were and as they are. `changes` lets the others differ.
local function compare(run, was, is, stage, changes)
  local keys, defaults = { "source" }, {}
  for _, option in ipairs(core.options()) do
    keys[#keys + 1], defaults[option.key] = option.key, option.default
  end
  for _, key in ipairs(keys) do
    local old, new = was[key] or defaults[key] or "none", is[key] or "none"
    if old ~= new and not free[key] then
      if must_agree(key) then
        refuse(run, key, new, old, nil, "restore it, or start anew with resume = false")
      elseif not changes and not recipe.overridden(key, run.stages.named and stage or nil) then
        refuse(run, key, new, old, run.stages.named and stage or nil, string.format('restore it; to go on with the '
          .. 'change, give it as an argument, %s=%s, or resume = "changed" (--resume=changed)', key, new))
      end
      show.say("changed", string.format("%s = %s, was %s", key, new, old))
    end
  end
  for key in pairs(was) do
    if not defaults[key] and key ~= "source" then
      refuse(run, key, "nothing", was[key], nil,
        "this version of glm52 has no such option; go on with the one that has")
    end
  end
end

-- Number of the stage in which the state was saved, and the step at which that began. A recipe without stages goes on
-- from any state: under another train.stage as a new stage.
local function find_stage(run, saved)
  for index, stage in ipairs(run.stages) do
    if stage.name == saved.stage then return index, saved.begin end
  end
  if not run.stages.named then return 1, saved.step end
  recipe.error("GLM52_E_STATE", string.format("%s holds the state of %s, which the recipe does not have", run.out,
    saved.stage == "" and "a run without stages" or recipe.stage_title(saved.stage)),
    "restore it, or start anew with resume = false", { key = "stages" })
end

-- What was trained must be what the recipe says now; later stages are free, for nothing of them has been done.
local function compare_recipes(run, before, index, changes)
  local is = normalised(run)
  for i = 1, math.min(index, #before.recipe) do
    local was, now = options_of(before.recipe[i]), options_of(is[i])
    local another = not run.stages.named and was["train.stage"] ~= now["train.stage"]
    if before.recipe[i] ~= is[i] then compare(run, was, now, run.stages[i], changes or another) end
  end
end

-- Key and value of each line of a hub config.json as the library writes one, with what other options imply spelled out.
local function hub_options(config)
  local options = {}
  for key, value in config:dump(true):gmatch('"([%w_]+)": ([^\n]*[^\n,{])') do options[key] = value end
  return options
end

-- The state's own config.json: it may have been put where it lies by hand.
local function check_config(run, saved, config)
  local held <close> = core.config(run.context)
  held:load_hub(saved.directory .. "/config.json")
  local was, is = hub_options(held), hub_options(config)
  for _, option in ipairs(core.options()) do
    local key = option.key:match "^model%.(.*)"
    if key and was[key] ~= is[key] then
      refuse(run, option.key, tostring(is[key]), tostring(was[key]), nil,
        saved.directory .. "/config.json says so: is it the state of another run?")
    end
  end
end

-- Decides before anything large is opened whether to go on from the state on disk, and in which stage. That of an
-- unfinished run is never replaced unasked.
function state.look(run, resume)
  if run.out == "" or resume == false then return end
  local before, saved = read_run(run.out, resume), read_state(run.out)
  if saved and not before then
    recipe.error("GLM52_E_STATE", string.format("%s/state holds a state of step %d, but %s/run.json, which says of "
      .. "what run, is missing", run.out, saved.step, run.out),
      "restore it; resume=false starts anew and replaces the state", { key = "out" })
  elseif resume and saved then
    local index, first = find_stage(run, saved)
    compare_recipes(run, before, index, resume == "changed")
    check_config(run, saved, run.stages[index].config)
    run.resumes, run.begin = true, index
    run.stages[index].first = first
  elseif resume then
    show.say("resume", "there is no state to go on from; starting anew")
  elseif saved and not before.finished then
    recipe.error("GLM52_E_STATE", string.format("%s holds the state of a run that stopped at step %d", run.out,
      saved.step), recipe.resume_hint() .. "; resume=false starts anew and replaces it", { key = "out" })
  end
end

-- Takes the state over; the number of the pack to go on with.
function state.resume(run)
  local pack = run.step:resume(run.out .. "/state")
  run.at.step = math.tointeger(run.step:metric "step")
  run.saved = run.at.step
  show.say("resume", string.format("after step %d%s", run.at.step,
    run.stages.named and ", in " .. recipe.stage_title(run.stage.name) or ""))
  return pack
end

return state
