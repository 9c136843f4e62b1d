-- The curve of the loss as an SVG picture: training loss (raw and smoothed) and held-out loss over steps.
local plot = {}

local width, height = 760, 440
local left, right, top, bottom = 64, 24, 56, 52
local most_points = 1500  -- more than pixels are no use to anybody

local raw_colour, smooth_colour, held_out_colour = "#b8cfe5", "#2a6aa8", "#c8501e"
local text_colour, grid_colour, axis_colour = "#333333", "#e6e6e6", "#888888"

-- Round numbers that cut [low, high] into about `count` parts.
local function ticks(low, high, count)
  local rough = (high - low) / count
  local unit = 10 ^ math.floor(math.log(rough, 10))
  local step = unit * 10
  for _, factor in ipairs { 1, 2, 5 } do
    if unit * factor >= rough then step = unit * factor break end
  end
  local list = {}
  for i = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) do list[#list + 1] = i * step end
  return list, step
end

-- Means of neighbours, so that at most most_points are left.
local function thin(points)
  local group = math.ceil(#points / most_points)
  if group <= 1 then return points end
  local thinned = {}
  for i = 1, #points, group do
    local last = math.min(i + group - 1, #points)
    local x, y = 0, 0
    for j = i, last do x, y = x + points[j][1], y + points[j][2] end
    thinned[#thinned + 1] = { x / (last - i + 1), y / (last - i + 1) }
  end
  return thinned
end

-- Mean over a window of about a thirtieth of the points, centred, so that the curve does not lag; it widens from the
-- first point on, where losses fall, and loses its later half at the last, where they do not.
local function smooth(points)
  local reach, sums, smoothed = #points // 60, { [0] = 0 }, {}
  for i, point in ipairs(points) do sums[i] = sums[i - 1] + point[2] end
  for i, point in ipairs(points) do
    local first = i - math.min(reach, i - 1)
    local last = math.min(2 * i - first, #points)
    smoothed[i] = { point[1], (sums[last] - sums[first - 1]) / (last - first + 1) }
  end
  return smoothed
end

local function finite(points)
  local list = {}
  for _, point in ipairs(points) do
    local y = point[2]
    if y == y and math.abs(y) < math.huge then list[#list + 1] = point end
  end
  return list
end

-- Range of both series; the first steps of training are cut off where they dwarf the rest.
local function ranges(training, held_out)
  local most_x, low, high, values = 1, math.huge, -math.huge, {}
  for _, points in ipairs { training, held_out } do
    for _, point in ipairs(points) do
      most_x, low, high = math.max(most_x, point[1]), math.min(low, point[2]), math.max(high, point[2])
      values[#values + 1] = point[2]
    end
  end
  if low > high then return most_x, 0, 1 end
  table.sort(values)
  high = math.min(high, low + 4 * math.max(values[math.ceil(0.9 * #values)] - low, 1e-3))
  local margin = math.max((high - low) * 0.05, 1e-3)
  return most_x, low - margin, high + margin
end

local function escape(text)
  return (text:gsub("[&<>]", { ["&"] = "&amp;", ["<"] = "&lt;", [">"] = "&gt;" }))
end

local function label(value, step)
  local decimals = math.max(0, math.ceil(-math.log(step, 10) - 1e-9))
  return string.format("%." .. decimals .. "f", value)
end

local function axes(add, x, y, most_x, low, high)
  local values, step = ticks(low, high, 6)
  for _, value in ipairs(values) do
    add('<line x1="%d" y1="%.1f" x2="%d" y2="%.1f" stroke="%s"/>', left, y(value), width - right, y(value), grid_colour)
    add('<text x="%d" y="%.1f" text-anchor="end">%s</text>', left - 8, y(value) + 4, label(value, step))
  end
  values = ticks(0, most_x, 8)
  for _, value in ipairs(values) do
    if value == math.floor(value) then
      add('<line x1="%.1f" y1="%d" x2="%.1f" y2="%d" stroke="%s"/>', x(value), height - bottom, x(value),
        height - bottom + 5, axis_colour)
      add('<text x="%.1f" y="%d" text-anchor="middle">%d</text>', x(value), height - bottom + 20, math.floor(value))
    end
  end
  add('<path d="M%d %d V%d H%d" fill="none" stroke="%s"/>', left, top, height - bottom, width - right, axis_colour)
  add('<text x="%d" y="%d" text-anchor="middle">step</text>', (left + width - right) // 2, height - 12)
  add('<text transform="translate(18 %d) rotate(-90)" text-anchor="middle">nats per token</text>',
    (top + height - bottom) // 2)
end

local function curve(add, points, x, y, style)
  if #points == 0 then return end
  local path = {}
  for i, point in ipairs(points) do path[i] = string.format("%.1f %.1f", x(point[1]), y(point[2])) end
  add('<path d="M%s" fill="none" stroke-linejoin="round" clip-path="url(#frame)" %s/>', table.concat(path, "L"), style)
end

local function legend(add, entries)
  local at = width - right
  for i = #entries, 1, -1 do
    local entry = entries[i]
    at = at - 7 * #entry.name - 44
    add('<line x1="%d" y1="%d" x2="%d" y2="%d" stroke="%s" stroke-width="2.5"/>', at, 30, at + 24, 30, entry.colour)
    add('<text x="%d" y="34">%s</text>', at + 31, entry.name)
  end
end

-- Where stages begin.
local function stage_marks(add, marks, x)
  for _, mark in ipairs(marks) do
    add('<line x1="%.1f" y1="%d" x2="%.1f" y2="%d" stroke="%s" stroke-dasharray="4 4"/>', x(mark[1]), top, x(mark[1]),
      height - bottom, axis_colour)
    add('<text transform="translate(%.1f %d) rotate(90)">%s</text>', x(mark[1]) + 4, top + 4, escape(mark[2]))
  end
end

-- SVG text. training, held_out: lists of {step, loss}; values that are not finite are left out. marks: list of {step,
-- name} of stages that begin, or nil.
function plot.loss(title, training, held_out, marks)
  training, held_out = finite(training), finite(held_out)
  local most_x, low, high = ranges(training, held_out)
  local function x(step) return left + (width - left - right) * step / most_x end
  local function y(loss) return top + (height - top - bottom) * (high - loss) / (high - low) end

  local lines = {}
  local function add(format, ...) lines[#lines + 1] = string.format(format, ...) end
  add('<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %d %d" ' ..
    'font-family="Helvetica, Arial, sans-serif" font-size="12" fill="%s">', width, height, width, height, text_colour)
  add('<rect width="%d" height="%d" fill="#ffffff"/>', width, height)
  add('<clipPath id="frame"><rect x="%d" y="%d" width="%d" height="%d"/></clipPath>', left, top, width - left - right,
    height - top - bottom)
  add('<text x="%d" y="34" font-size="15" font-weight="bold">%s</text>', left, escape(title))
  axes(add, x, y, most_x, low, high)
  stage_marks(add, marks or {}, x)
  curve(add, thin(training), x, y, string.format('stroke="%s" stroke-width="1"', raw_colour))
  curve(add, thin(smooth(training)), x, y, string.format('stroke="%s" stroke-width="2"', smooth_colour))
  curve(add, held_out, x, y, string.format('stroke="%s" stroke-width="2"', held_out_colour))
  for _, point in ipairs(held_out) do
    if point[2] <= high then
      add('<circle cx="%.1f" cy="%.1f" r="3.5" fill="%s" stroke="#ffffff"/>', x(point[1]), y(point[2]), held_out_colour)
    end
  end
  local entries = { { name = "training", colour = smooth_colour } }
  if #held_out > 0 then entries[2] = { name = "held out", colour = held_out_colour } end
  legend(add, entries)
  add("</svg>")
  return table.concat(lines, "\n") .. "\n"
end

return plot
