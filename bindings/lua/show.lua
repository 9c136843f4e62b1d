-- Numbers and texts as people read them.
local show = {}

local function scaled(value, steps, base)
  local i = 1
  while i < #steps and math.abs(value) >= base * 0.9995 do
    value, i = value / base, i + 1
  end
  return value, steps[i]
end

-- Three significant digits: 9.87, 98.7, 987.
function show.digits(value)
  local size = math.abs(value)
  local decimals = (size >= 99.95 or size == 0) and 0 or size >= 9.995 and 1 or 2
  return string.format("%." .. decimals .. "f", value)
end

-- "12.3 kB"; powers of 1000, as disks and GPUs are sold.
function show.bytes(value)
  local scale, unit = scaled(value, { "B", "kB", "MB", "GB", "TB", "PB" }, 1000)
  return (unit == "B" and string.format("%d", math.floor(scale)) or show.digits(scale)) .. " " .. unit
end

-- "12.3 G": with a unit behind it, "12.3 GFLOP".
function show.si(value)
  local scale, prefix = scaled(value, { "", "k", "M", "G", "T", "P", "E", "Z", "Y" }, 1000)
  return show.digits(scale) .. " " .. prefix
end

-- "9.8k": short, for counts and rates.
function show.count(value)
  local scale, prefix = scaled(value, { "", "k", "M", "G", "T" }, 1000)
  return (prefix == "" and string.format("%.0f", scale) or show.digits(scale)) .. prefix
end

-- "0:07", "12:34", "3:25:45", "12 days".
function show.duration(seconds)
  if seconds ~= seconds or seconds >= 1e9 then return "?" end
  local whole = math.floor(seconds + 0.5)
  if whole >= 10 * 86400 then return string.format("%d days", whole // 86400) end
  if whole >= 3600 then return string.format("%d:%02d:%02d", whole // 3600, whole // 60 % 60, whole % 60) end
  return string.format("%d:%02d", whole // 60, whole % 60)
end

-- A line "name    text" about a run.
function show.said(name, text)
  return string.format("%-8s %s", name, text)
end

function show.say(name, text)
  print(show.said(name, text))
end

-- Text whose bytes may be no UTF-8: those that are none become U+FFFD.
function show.text(bytes)
  local parts, from = {}, 1
  while true do
    local good, bad = utf8.len(bytes, from)
    if good then return table.concat(parts) .. bytes:sub(from) end
    parts[#parts + 1] = bytes:sub(from, bad - 1) .. "\u{FFFD}"
    from = bad + 1
  end
end

-- Rows of texts as lines with aligned columns; align[i] is "right" for numbers. Empty rows are empty lines.
function show.columns(rows, align)
  local width, lines = {}, {}
  for _, row in ipairs(rows) do
    for i, cell in ipairs(row) do width[i] = math.max(width[i] or 0, utf8.len(cell) or #cell) end
  end
  for _, row in ipairs(rows) do
    local cells = {}
    for i, cell in ipairs(row) do
      local padding = (" "):rep(width[i] - (utf8.len(cell) or #cell))
      cells[i] = align[i] == "right" and padding .. cell or cell .. padding
    end
    lines[#lines + 1] = (table.concat(cells, "  "):gsub("%s+$", ""))
  end
  return lines
end

return show
