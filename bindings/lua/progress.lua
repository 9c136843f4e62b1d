-- The progress of a run: on a terminal one line that is rewritten and kept at each evaluation, elsewhere plain lines.
local system = require("glm52.core").system
local show = require "glm52.show"

local Progress = {}
Progress.__index = Progress

local plain_every, redraw_every = 10, 0.1  -- seconds

-- stages: list of {name}, where the lines name one; else false.
function Progress.new(steps, first, stages)
  local width = stages and #"stage"
  for _, stage in ipairs(stages or {}) do width = math.max(width, utf8.len(stage.name) or #stage.name) end
  return setmetatable({
    steps = steps, first = first, width = width and math.min(width, 16), columns = system.terminal(),
    begin = system.seconds(), last = -math.huge, drawn = false, rate = nil,
  }, Progress)
end

local function columns(self, stage, step, ...)
  local line = string.format("  %11s  %7s  %8s  %8s  %8s  %8s", step, ...)
  if not self.width then return line end
  local cut = utf8.offset(stage, self.width + 1)
  stage = cut and stage:sub(1, cut - 1) or stage
  return "  " .. stage .. (" "):rep(self.width - (utf8.len(stage) or #stage)) .. line
end

local function line_of(self, at)
  local done = at.step - self.first
  local remaining = done > 0 and (system.seconds() - self.begin) / done * (self.steps - at.step)
  return columns(self, at.stage, string.format("%d/%d", at.step, self.steps),
    at.loss and string.format("%.4f", at.loss) or "", at.held_out and string.format("%.4f", at.held_out) or "",
    self.rate and show.count(self.rate) or "", at.memory and show.bytes(at.memory) or "",
    remaining and show.duration(remaining) or "")
end

function Progress:header()
  print(columns(self, "stage", "step", "loss", "held-out", "tokens/s", "memory", "eta"))
end

local function clear(self)
  if self.drawn then io.write("\r\27[K") end
  self.drawn = false
end

-- at: {step, loss, held_out, memory, tokens_per_second, stage}; `keep` for a line that stays.
function Progress:show(at, keep)
  local now = system.seconds()
  self.rate = at.tokens_per_second and (self.rate and 0.9 * self.rate + 0.1 * at.tokens_per_second
    or at.tokens_per_second) or self.rate
  if keep then
    clear(self)
    print(line_of(self, at))
  elseif self.columns and now - self.last >= redraw_every then
    io.write("\r", line_of(self, at):sub(1, self.columns - 1), "\27[K")
    self.drawn = true
  elseif self.columns or now - self.last < plain_every or at.step == self.steps then
    return  -- too soon, or the last line comes with the last evaluation
  else
    print(line_of(self, at))
  end
  io.flush()
  self.last = now
end

-- A line between the others; on standard error if it is a warning.
function Progress:note(text, is_warning)
  clear(self)
  local file = is_warning and io.stderr or io.stdout
  file:write(text, "\n")
  file:flush()
end

function Progress:finish()
  clear(self)
  io.flush()
end

return Progress
