-- What report.profile measured, as a table: parts of the model and their operations, by falling time of a step.
local most = 24

local function read(path)
  local file = io.open(path, "r")
  if not file then return nil end
  local rows = {}
  for line in file:lines() do
    local row = { label = line:match '"label":"([^"]*)"', operation = line:match '"operation":"([^"]*)"' }
    for name, value in line:gmatch '"([%w_]+)":([%d.eE+-]+)' do row[name] = tonumber(value) end
    rows[#rows + 1] = row
  end
  file:close()
  return table.remove(rows, 1), rows
end

local function line_of(row)
  local rate = row.gflop > 0 and string.format("%8.1f TFLOP/s", row.tflops or 0)
    or row.gbyte > 0 and string.format("%8.3f TB/s", row.tbytes_per_second or 0) or ""
  return string.format("%-20s %-28s %7.0f %10.3f %6.1f%% %s", row.label, row.operation, row.calls, row.ms,
    100 * row.share, rate)
end

-- The table of out/profile.jsonl; nil if no step was measured.
return function(path)
  local whole, rows = read(path)
  if not whole then return nil end
  local lines = { string.format("%-20s %-28s %7s %10s %7s", "part", "operation", "calls", "ms", "share") }
  for i = 1, math.min(#rows, most) do lines[#lines + 1] = line_of(rows[i]) end
  lines[#lines + 1] = string.format("a step: %.3f ms, of which operations %.3f ms (mean of %d)", whole.ms,
    whole.timed_ms, whole.steps)
  return table.concat(lines, "\n")
end
