-- The progress of a run: on a terminal one line that is rewritten and kept at each evaluation, elsewhere plain lines.
local system = require("glm52.core").system
local show = require "glm52.show"

local Progress = {}
Progress.__index = Progress

local plain_every, redraw_every = 10, 0.1  -- seconds

function Progress.new(steps, first)
  return setmetatable({
    steps = steps, first = first, columns = system.terminal(), begin = system.seconds(), last = -math.huge,
    drawn = false, rate = nil,
  }, Progress)
end

local function line_of(self, at)
  local done = at.step - self.first
  local remaining = done > 0 and (system.seconds() - self.begin) / done * (self.steps - at.step)
  return string.format("  %11s  %7.4f  %8s  %8s  %8s  %8s", string.format("%d/%d", at.step, self.steps), at.loss,
    at.held_out and string.format("%.4f", at.held_out) or "", self.rate and show.count(self.rate) or "",
    at.memory and show.bytes(at.memory) or "", remaining and show.duration(remaining) or "")
end

function Progress:header()
  print(string.format("  %11s  %7s  %8s  %8s  %8s  %8s", "step", "loss", "held-out", "tokens/s", "memory", "eta"))
end

local function clear(self)
  if self.drawn then io.write("\r\27[K") end
  self.drawn = false
end

-- at: {step, loss, held_out, memory, tokens_per_second}; `keep` for a line that stays.
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
