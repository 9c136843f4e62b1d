-- What Python sees of the description: the SWIG fragment (handles, outputs, who releases the GIL and who waits for the
-- turn of a context) and the types of the extension module. Functions with a form that SWIG cannot be told of by rule
-- (structs, memory to fill, error objects) are left out of both; bindings/python/glm52.i and module.pyi have them by
-- hand.
local python = {}

local NUMBERS = { int32_t = "int", uint32_t = "int", int64_t = "int", uint64_t = "int", double = "float" }

local function target(p) return (p.ctype:gsub("^const ", ""):gsub(" ?%*$", "")) end

-- Whether every argument and the result have a counterpart.
function python.plain(f)
  if f.returns == "void *" or f.counting then return false end
  for _, p in ipairs(f.params) do
    local fills = false
    for _, other in ipairs(f.params) do fills = fills or other.len_of == p.name and p.dir ~= "in" end
    if p.struct or p.handle == "error" or fills then return false end
  end
  return not f.returns:find("glm52_error")
end

local function each(d, want)
  local list = {}
  for _, f in ipairs(d.functions) do if not f.counting and want(f) then list[#list + 1] = f end end
  return list
end

local function outputs(f)
  local list = {}
  for _, p in ipairs(f.params) do if p.dir ~= "in" then list[#list + 1] = p end end
  return list
end

-- Who need not wait for the turn of a context, nor release the GIL for it.
local function free(f) return f.threads ~= "one" or not (f.params[1] and f.params[1].handle) end

function python.swig(d)
  local out = { "/* Written by abi/gen.lua. */\n\n" }
  local function add(text, ...) out[#out + 1] = text:format(...) end
  for _, h in ipairs(d.handles) do
    if h.ref ~= false then add("HANDLE(%s, HELD_%s)\n", h.name, h.name:upper()) end
  end
  add("\n/* Outputs are results. */\n")
  local seen = {}
  for _, f in ipairs(each(d, python.plain)) do
    for _, p in ipairs(outputs(f)) do
      local declaration = p.ctype .. p.name
      if NUMBERS[target(p)] and not seen[declaration] then
        seen[declaration] = true
        add("%%apply %s *OUTPUT { %s };\n", target(p), declaration)
      end
    end
  end
  add("\n/* Any thread may call these while another one has the turn. */\n")
  for _, f in ipairs(each(d, free)) do if not f.blocking then add("ANYTIME(%s)\n", f.name) end end
  add("\n/* These are over in a moment; releasing the GIL would cost more. Whatever is not named releases it. */\n")
  for _, f in ipairs(each(d, function(f) return not f.blocking and not free(f) end)) do
    add("%%nothread %s;\n", f.name)
  end
  add("\n/* These have another form in Python, by hand; capsules count references. */\n")
  for _, f in ipairs(d.functions) do if not python.plain(f) then add("%%ignore %s;\n", f.name) end end
  for _, s in ipairs(d.structs) do add("%%ignore %s;\n", s.name) end
  return table.concat(out)
end

-- ---- types

local function type_in(p)
  if p.handle then return p.nullable and "Optional[Handle]" or "Handle" end
  if p.ctype == "const char *" then return p.nullable and "Optional[str]" or "str" end
  return NUMBERS[p.ctype] or "int"
end

local function type_out(p)
  if p.ctype:match("^glm52_%w+ %*%*$") then return "Handle" end
  if p.ctype == "const char **" then return "str" end
  return NUMBERS[target(p)]
end

local function result(f)
  local list = {}
  for _, p in ipairs(outputs(f)) do list[#list + 1] = type_out(p) end
  if f.returns == "const char *" then return f.gives == "static" and "str" or "Optional[str]" end
  if f.returns ~= "glm52_status" then return NUMBERS[f.returns] or "None" end
  if #list == 0 then return "None" end
  if #list == 1 then return list[1] end
  for i = 2, #list do assert(list[i] == list[1], f.name .. ": results of several types") end
  return "List[" .. list[1] .. "]"
end

local function parameters(f)
  local list, skipped = {}, {}
  for _, p in ipairs(f.params) do
    if p.len_of then skipped[p.name], skipped[p.len_of] = true, p.len_of end
  end
  for _, p in ipairs(f.params) do
    if skipped[p.name] then
      if p.ctype:find("%*const %*$") then list[#list + 1] = p.name .. ": Sequence[Handle]" end
      if p.ctype == "const void *" then list[#list] = p.name .. ": Tuple[int, Any]" end  -- in place of its dtype
    elseif p.dir == "in" then
      list[#list + 1] = p.name .. ": " .. type_in(p)
    end
  end
  return table.concat(list, ", ")
end

local function short(name) return (name:gsub("^glm52_", ""):gsub("^GLM52_", "")) end

function python.types(d, own_path)
  local file = assert(io.open(own_path, "rb"))
  local out = { file:read("a"), "\n# Written by abi/gen.lua from abi/glm52.api.\n\n" }
  file:close()
  for _, e in ipairs(d.enums) do
    local names = {}
    for name in pairs(e[2]) do names[#names + 1] = name end
    table.sort(names, function(a, b) return math.abs(e[2][a]) < math.abs(e[2][b]) end)
    for _, name in ipairs(names) do out[#out + 1] = short(name) .. ": int\n" end
  end
  out[#out + 1] = "\n"
  for _, f in ipairs(each(d, python.plain)) do
    out[#out + 1] = ("def %s(%s) -> %s: ...\n"):format(short(f.name), parameters(f), result(f))
  end
  return table.concat(out)
end

return python
