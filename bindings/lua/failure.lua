-- Errors made in Lua, like those of the library: {name, message, hint, details, where}; `where` is the place of the
-- call if the one that raises it knows no better one.
local failure = {}

local metatable = {}
function metatable.__tostring(e)
  local text = e.where and e.where ~= "" and e.where .. " " .. e.message or e.message
  return e.hint ~= "" and text .. "\n  " .. e.hint or text
end

-- "file:line:" of the nearest function that is not one of the binding's own.
function failure.where()
  local level = 2
  while true do
    local caller = debug.getinfo(level, "Sl")
    if not caller then return "" end
    if caller.currentline > 0 and not caller.source:find "^@glm52/" then
      return caller.short_src .. ":" .. caller.currentline .. ":"
    end
    level = level + 1
  end
end

function failure.new(fields) return setmetatable(fields, metatable) end

function failure.raise(name, message, hint, details, where)
  error(failure.new { name = name, message = message, hint = hint or "", details = details or {}, where = where }, 0)
end

function failure.is(value)
  return type(value) == "table" and type(value.message) == "string" and type(value.name) == "string"
end

return failure
