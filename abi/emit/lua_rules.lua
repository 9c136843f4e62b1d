-- What becomes of a function of the library in Lua: the kinds of its values, what part each parameter plays, whose
-- method it is, and how a call of it reads.
local rules = {}

local KINDS = { int32_t = "INT32", uint32_t = "UINT32", int64_t = "INT64", uint64_t = "UINT64", double = "DOUBLE",
  ["const char *"] = "STRING", ["void *"] = "POINTER", void = "VOID" }

-- Kind, and what it is of: class, struct or enumeration. nil for a type that Lua has no counterpart for.
function rules.kind_of(ctype, d)
  if ctype == "glm52_status" then return "STATUS" end
  for _, e in ipairs(d.enums) do
    if ctype == e[1] then return "ENUM", "&enum_" .. e[1] end
  end
  local handle = ctype:match("^glm52_(%w+) %*$") or ctype:match("^const glm52_(%w+) %*$")
  if handle and d.handle[handle] then return "HANDLE", "&classes[CLASS_" .. handle:upper() .. "]" end
  if ctype == "glm52_view" then return "VIEW" end
  if d.struct[ctype] then return "STRUCT", "&struct_" .. ctype end
  return KINDS[ctype]
end

-- Role, kind and what it is of, and the parameter that it is counted or filled by.
function rules.convert(p, f, d)
  local target = p.ctype:match("^(.*%S) ?%*$")
  if p.len_of then
    return f.params[p.len_of].dir == "out" and "CAPACITY" or "COUNT", (rules.kind_of(p.ctype, d)), nil, p.len_of
  elseif p.fills then
    return "FILLED", (rules.kind_of(target, d)), nil, p.fills
  end
  for _, other in ipairs(f.params) do
    if other.len_of == p.name and p.dir == "in" then
      local element = p.ctype:match("^const (.-) ?%*$") or p.ctype:match("^(.- %*)const %*$")
      return "LIST_IN", rules.kind_of(element, d)
    elseif other.len_of == p.name then
      return "LIST_OUT", rules.kind_of(target, d)
    end
  end
  if p.dir == "in" then
    return p.each and "EACH" or "IN", rules.kind_of(p.ctype == "glm52_status" and "int32_t" or p.ctype, d)
  end
  return "OUT", rules.kind_of(target, d)
end

-- Class (nil: a function of the module) and name.
function rules.place(f, d)
  local class, verb = f.name:match("^glm52_(%l+)_(.*)$")
  if not d.handle[class] then return nil, f.name:match("^glm52_(.*)$") end
  if f.params[1] and f.params[1].handle == class then return class, verb end
  return nil, (verb == "create" or verb == "open") and class or class .. "_" .. verb
end

local GIVEN = { IN = true, EACH = true, LIST_IN = true, CAPACITY = true }

local function name_of(p, f, d)
  local handle = p.ctype:match "^glm52_(%w+) %*%*$"
  if handle or p.name ~= "out" then return handle or p.name end
  return p.ctype:find "char" and "text" or p.struct and p.struct.name:match "_(%l+)$" or f.name:match "_(%l+)$"
end

-- "tokens = model:generate(prompt, limit [, temperature [, seed]])"; nil for what Lua has not.
function rules.signature(f, d)
  if f.lua ~= nil then return f.lua or nil end
  local class, name = rules.place(f, d)
  local arguments, results, open = {}, {}, 0
  local kind = rules.kind_of(f.returns, d)
  if kind ~= "STATUS" and kind ~= "VOID" or class == "error" then
    results[1] = f.returns:match "^glm52_(%w+) %*$" or f.name:match "_(%l+)$"
  end
  for i, p in ipairs(f.params) do
    local role = rules.convert(p, f, d)
    if GIVEN[role] and not (class and i == 1) then
      local optional = p.each or p.default or p.nullable
      for k = i + 1, #f.params do  -- one before another that must be given is nil, and not left out
        local after = f.params[k]
        if GIVEN[rules.convert(after, f, d)] and not (after.each or after.default or after.nullable) then
          optional = false
        end
      end
      local before = #arguments > 0 and (optional and " [, " or ", ") or optional and "[" or ""
      open = open + (optional and 1 or 0)
      arguments[#arguments + 1] = before .. p.name
    elseif role == "OUT" or role == "LIST_OUT" then
      results[#results + 1] = name_of(p, f, d)
    end
  end
  return (results[1] and table.concat(results, ", ") .. " = " or "")
    .. (class and class .. ":" or "glm52.") .. name .. "(" ..
    table.concat(arguments) .. ("]"):rep(open) .. ")"
end

return rules
