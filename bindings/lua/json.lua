-- JSON out of tables, for the library to read. `key` is how messages call a value, "optim.lr".
local failure = require "glm52.failure"

local json = {}

function json.quote(text)
  return '"' .. text:gsub('[%c"\\]', function(c) return string.format("\\u%04x", c:byte()) end) .. '"'
end

local function json_number(value, key)
  if value ~= value or value == math.huge or value == -math.huge then
    failure.raise("GLM52_E_INVALID", string.format("%s = %s is not a number", key, value), "", { key = key })
  end
  local whole = math.tointeger(value)  -- 1e9 is a float in Lua, and means an integer
  return whole and string.format("%d", whole) or (string.format("%.17g", value):gsub(",", "."))
end

-- The text of a JSON string, without its quotes.
function json.unquote(text)
  return (text:gsub("\\(.)(%x?%x?%x?%x?)", function(kind, code)
    if kind == "u" then return utf8.char(tonumber(code, 16)) end
    return (({ n = "\n", t = "\t", r = "\r", b = "\b", f = "\f" })[kind] or kind) .. code
  end))
end

local encode

local function json_list(list, key)
  local items = {}
  for i, item in ipairs(list) do items[i] = encode(item, key) end
  return "[" .. table.concat(items, ",") .. "]"
end

local function json_object(object, key)
  local names, items = {}, {}
  for name in pairs(object) do
    if type(name) ~= "string" then
      failure.raise("GLM52_E_INVALID",
        string.format("%s has an entry without a name: %s", key or "the table", tostring(object[name])),
        "write name = value", { key = key })
    end
    names[#names + 1] = name
  end
  table.sort(names)
  for i, name in ipairs(names) do
    local path = key and key .. "." .. name or name
    items[i] = json.quote(name) .. ":" .. encode(object[name], path)
  end
  return "{" .. table.concat(items, ",") .. "}"
end

function encode(value, key)
  local kind = math.type(value) and "number" or type(value)
  if kind == "table" then
    local list = #value > 0 or (next(value) == nil and key and key:find(".", 1, true))
    return list and json_list(value, key) or json_object(value, key)
  elseif kind == "string" then
    return json.quote(value)
  elseif kind == "number" then
    return json_number(value, key)
  elseif kind == "boolean" then
    return tostring(value)
  end
  failure.raise("GLM52_E_INVALID", string.format("%s is a %s; an option is a number, a text, true, false or a list",
    key, kind), "", { key = key })
end

json.encode = encode

return json
