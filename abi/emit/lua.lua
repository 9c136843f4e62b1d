-- The call table of the Lua binding: for every function what libffi and a conversion of arguments need to know, as
-- constants of C (bindings/lua/call.h declares them). A function that Lua cannot call by this table is refused, unless
-- the description says that it is called by hand.
local rules = require "emit.lua_rules"
local kind_of, convert = rules.kind_of, rules.convert

local function label(enum, name) return (name:gsub("^" .. enum:upper():gsub("_LOG_LEVEL$", "_LOG") .. "_", "")) end

local USABLE = {
  IN = "INT32 UINT32 INT64 UINT64 DOUBLE STRING ENUM HANDLE", EACH = "UINT32", COUNT = "UINT32 UINT64",
  CAPACITY = "UINT32 UINT64", FILLED = "UINT64", LIST_IN = "INT32 INT64 DOUBLE HANDLE", LIST_OUT = "INT32 INT64 DOUBLE",
  OUT = "INT32 UINT32 INT64 UINT64 DOUBLE STRING ENUM HANDLE STRUCT VIEW",
  RETURN = "VOID STATUS INT32 INT64 UINT64 DOUBLE STRING POINTER HANDLE",
}

local function require_usable(role, kind, f, what)
  if kind and (" " .. USABLE[role] .. " "):find(" " .. kind .. " ", 1, true) then return end
  io.stderr:write(("%s: Lua has no counterpart for %s: extend abi/emit/lua.lua and bindings/lua/call.c, or write it "
    .. "by hand and say so with lua = false in abi/glm52.api\n"):format(f.name, what))
  os.exit(1)
end

local function flags_of(p)
  local flags = {}
  for _, name in ipairs { "nullable", "boolean", "keeps", "lasts" } do
    if p[name] then flags[#flags + 1] = "." .. name .. " = 1" end
  end
  if p.default then flags[#flags + 1] = (".optional = 1, .otherwise = %g"):format(p.default) end
  if p.gives == "owned" then flags[#flags + 1] = ".owned = 1" end
  return flags
end

local function parameter(p, f, d)
  local role, kind, of, other = convert(p, f, d)
  require_usable(role, kind, f, p.name .. ", " .. p.ctype)
  local list = { ('.name = "%s", .role = ROLE_%s, .kind = KIND_%s'):format(p.name, role, kind),
    table.unpack(flags_of(p)) }
  if of then list[#list + 1] = ".of = " .. of end
  if other then list[#list + 1] = (".other = %d"):format(f.params[other].index - 1) end
  return "        {" .. table.concat(list, ", ") .. "},\n"
end

local function row(f, d)
  local class, name = rules.place(f, d)
  local kind, of = kind_of(f.returns, d)
  if kind == "STATUS" and class == "error" then kind = "INT32" end  -- what it is asked for, not how it went
  require_usable("RETURN", kind, f, "its result, " .. f.returns)
  local result = { ".kind = KIND_" .. kind, table.unpack(flags_of(f)) }
  if of then result[#result + 1] = ".of = " .. of end
  local parameters = {}
  for i, p in ipairs(f.params) do parameters[i] = parameter(p, f, d) end
  return ('    {.name = "%s", .address = FUNCTION(%s), .class = %s, .result = {%s}%s},\n'):format(name, f.name,
    class and "&classes[CLASS_" .. class:upper() .. "]" or "NULL", table.concat(result, ", "), #parameters > 0
    and (", .count = %d,\n     .parameters = {\n%s    }"):format(#parameters, table.concat(parameters)) or "")
end

local function enumeration(e)
  local names, out = {}, { ("static const struct enumerator values_%s[] = {\n"):format(e[1]) }
  for name in pairs(e[2]) do names[#names + 1] = name end
  table.sort(names, function(a, b) return e[2][a] < e[2][b] end)
  for _, name in ipairs(names) do out[#out + 1] = ('    {"%s", %d},\n'):format(label(e[1], name), e[2][name]) end
  out[#out + 1] = ('    {NULL, 0},\n};\nconst struct enumeration enum_%s = {"%s", values_%s};\n')
    :format(e[1], e[1], e[1])
  return table.concat(out)
end

-- Members that hold a value for Lua; a view that does not last is asked for by a call of its own.
local function structure(s, d)
  local out = { ("static const struct field fields_%s[] = {\n"):format(s.name) }
  for i = 3, #s.fields do
    local field = s.fields[i]
    local kind, of = kind_of(field.ctype, d)
    if not field.name:find("^reserved") and kind and kind ~= "POINTER" and (kind ~= "VIEW" or field.lasts) then
      local list = { ('.name = "%s", .offset = offsetof(%s, %s), .kind = KIND_%s')
        :format(field.name, s.name, field.name, kind), table.unpack(flags_of(field)) }
      if of then list[#list + 1] = ".of = " .. of end
      out[#out + 1] = "    {" .. table.concat(list, ", ") .. "},\n"
    end
  end
  out[#out + 1] = ('    {.name = NULL},\n};\nstatic const struct layout struct_%s = {"%s", sizeof(%s), fields_%s};\n')
    :format(s.name, s.name, s.name, s.name)
  return table.concat(out)
end

return function(d)
  local out = { "/* Written by abi/gen.lua. */\n#include <stddef.h>\n\n#include \"call.h\"\n\n" }
  local classes, numbers, handles = {}, {}, {}
  for _, h in ipairs(d.handles) do handles[#handles + 1] = h.name end
  for i, name in ipairs(handles) do
    numbers[i] = "CLASS_" .. name:upper()
    classes[i] = ('    {"glm52.%s", FUNCTION(glm52_%s_unref)},\n'):format(name, name)
  end
  out[#out + 1] = "enum { " .. table.concat(numbers, ", ") .. " };\n"
  out[#out + 1] = "const struct class classes[] = {\n" .. table.concat(classes) .. "    {NULL, NULL},\n};\n"
  for _, e in ipairs(d.enums) do out[#out + 1] = e[1] ~= "glm52_status" and enumeration(e) or "" end
  for _, s in ipairs(d.structs) do
    if s.dir == "out" and s.name ~= "glm52_view" then out[#out + 1] = structure(s, d) end
  end
  out[#out + 1] = "const struct function functions[] = {\n"
  for _, f in ipairs(d.functions) do
    if f.lua == nil and not f.counting then out[#out + 1] = row(f, d) end
  end
  out[#out + 1] = "    {.name = NULL},\n};\n"
  return table.concat(out)
end
