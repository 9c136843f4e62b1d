-- Reads abi/glm52.api and include/glm52.h, and refuses to go on unless they say the same: every public function in
-- both, with one prototype, its contract in prose beside it, and its errors listed alike.

local description = {}

local problems = {}

local function problem(text, ...)
  problems[#problems + 1] = select("#", ...) > 0 and text:format(...) or text
end

local function read(path)
  local file = assert(io.open(path, "rb"))
  local text = file:read("a")
  file:close()
  return text
end

-- One spelling for one declaration.
function description.normal(text)
  return (text:gsub("%s+", " "):gsub("%s*([(),*])%s*", "%1"):gsub("^ ", ""):gsub(" $", ""))
end

-- "void (*)(int)" and "int64_t[4]" want their name inside.
function description.declare(ctype, name)
  local before, after = ctype:match("^(.*%(%*)(%).*)$")
  if before then return before .. name .. after end
  before, after = ctype:match("^([^%[]*)(%[.*)$")
  if before then return before .. " " .. name .. after end
  return ctype:sub(-1) == "*" and ctype .. name or ctype .. " " .. name
end

function description.prototype(f)
  local list = {}
  for i, p in ipairs(f.params) do list[i] = description.declare(p.ctype, p.name) end
  return description.declare(f.returns, f.name) .. "(" .. (list[1] and table.concat(list, ", ") or "void") .. ")"
end

-- ---- the description

local function set(words)
  local result = {}
  for word in (words or ""):gmatch("%S+") do result[word] = true end
  return result
end

-- ref and unref of every handle, which the description leaves out.
local function counting(handle)
  local name, ctype = handle.name, "glm52_" .. handle.name
  local unref = { ctype .. "_unref", "void", threads = "any", counting = true,
    params = { { "self", ctype .. " **", dir = "inout", nullable = true, gives = "owned" } } }
  if handle.ref == false then return { unref } end
  return { { ctype .. "_ref", ctype .. " *", gives = "owned", threads = "any", counting = true,
    params = { { "self", ctype .. " *" } } }, unref }
end

local function finish_function(f, d)
  f.name, f.returns, f.params, f.errors = f[1], f[2], f.params or {}, set(f.errors)
  f.since = f.since or d.releases[1]
  for i, p in ipairs(f.params) do
    p.name, p.ctype, p.dir = p[1], p[2], p.dir or "in"
    p.handle = p.ctype:match("^const glm52_(%w+) %*$") or p.ctype:match("^glm52_(%w+) %*$")
    if p.handle and not d.handle[p.handle] then p.struct, p.handle = d.struct["glm52_" .. p.handle], nil end
    p.struct = p.struct or d.struct[p.ctype:match("^const (glm52_%w+) %*$") or p.ctype:match("^(glm52_[%w_]+) %*$")]
    p.struct = p.struct or d.struct[p.ctype:match("^const (glm52_[%w_]+) %*$")]
    p.pointer = p.ctype:sub(-1) == "*"
    f.params[p.name] = p
    p.index = i
  end
  f.threads = f.threads or "one"
end

local function finish_struct(s, d)
  s.name = s[1]
  for i = 2, #s do
    local field = s[i]
    s.fields[#s.fields + 1] = { name = field[1], ctype = field[2], since = field.since or d.releases[1],
      lasts = field.lasts }
  end
end

local function load_description(path)
  local d = assert(load(read(path), "@" .. path, "t", {}))()
  d.handle, d.struct, d.by_name = {}, {}, {}
  for _, s in ipairs(d.structs) do
    s.fields = {}
    finish_struct(s, d)
    d.struct[s.name] = s
  end
  local all = {}
  for _, h in ipairs(d.handles) do
    h.name = h[1]
    d.handle[h.name] = h
    for _, f in ipairs(counting(h)) do all[#all + 1] = f end
  end
  for _, f in ipairs(d.functions) do all[#all + 1] = f end
  d.functions = all
  for _, f in ipairs(all) do
    finish_function(f, d)
    if d.by_name[f.name] then problem("%s describes %s twice", path, f.name) end
    d.by_name[f.name] = f
  end
  table.sort(d.functions, function(a, b) return a.name < b.name end)
  return d
end

local THREADS = { one = true, any = true, signal = true }

local function check_function(f, d)
  local known = set "dir gives nullable keeps len_of default each fills"
  local released = false
  for _, release in ipairs(d.releases) do released = released or release == f.since end
  if not released then problem("%s: since = %q is no release of the list at the top", f.name, f.since) end
  if not THREADS[f.threads] then problem("%s: threads must be one, any or signal", f.name) end
  if f.returns:sub(-1) == "*" and not f.gives then
    problem("%s returns a pointer: say who owns it, gives = \"owned\", \"borrowed\" or \"static\"", f.name)
  end
  for _, p in ipairs(f.params) do
    if p.ctype:match("%*%*$") and not p.gives then
      problem("%s: say who owns what comes out of %s, gives = \"owned\" or \"borrowed\"", f.name, p.name)
    end
    if p.pointer and p.dir == "in" and not p.ctype:match("const") and not p.handle then
      problem("%s: %s is not const; say dir = \"out\" or \"inout\"", f.name, p.name)
    end
    for _, array in ipairs { p.len_of or false, p.fills or false } do
      if array and not f.params[array] then
        problem("%s: %s counts %s, which is no parameter", f.name, p.name, array)
      end
    end
    for key in pairs(p) do
      if type(key) == "string" and not known[key] and not set("name ctype handle struct pointer index")[key] then
        problem("%s: %s has the unknown property %s", f.name, p.name, key)
      end
    end
  end
end

-- ---- layouts, by the rules of 64-bit machines

local SIZE = { uint32_t = 4, int32_t = 4, uint64_t = 8, int64_t = 8, double = 8, size_t = 8 }

local function size_of(ctype, d)
  local element, count = ctype:match("^(.-)%[(%d+)%]$")
  if element then
    local size, alignment = size_of(element, d)
    return size * count, alignment
  end
  for _, e in ipairs(d.enums) do if ctype == e[1] then return 4, 4 end end
  for _, c in ipairs(d.callbacks) do if ctype == c[1] then return 8, 8 end end
  if d.struct[ctype] then return d.struct[ctype].sizes[d.releases[1]], 8 end
  if ctype:find("*", 1, true) then return 8, 8 end
  return SIZE[ctype] or error("size of " .. ctype .. " is unknown"), SIZE[ctype]
end

local function check_struct(s, d)
  local at, seen = 0, {}
  if s.fields[1].name ~= "struct_size" or s.fields[2].name ~= "flags" then
    problem("%s must begin with uint32_t struct_size, flags", s.name)
  end
  for i, field in ipairs(s.fields) do
    local size, alignment = size_of(field.ctype, d)
    if at % alignment ~= 0 then
      problem("%s.%s would stand behind padding: put a reserved member before it", s.name, field.name)
      at = at + alignment - at % alignment
    end
    field.offset, at = at, at + size
    seen[field.since] = at
    local inner = d.struct[field.ctype]
    if inner and not inner.frozen then problem("%s lies inside %s: mark it frozen", inner.name, s.name) end
    if i > 1 and s.fields[i - 1].since > field.since then problem("%s.%s is not at the end", s.name, field.name) end
  end
  for _, release in ipairs(d.releases) do
    if seen[release] ~= s.sizes[release] then
      problem("%s has %s bytes in release %s, and sizes says %s", s.name, seen[release], release, s.sizes[release])
    elseif seen[release] and seen[release] % 8 ~= 0 then
      problem("%s has %d bytes in release %s: not a multiple of 8, add a reserved member", s.name, seen[release],
        release)
    end
  end
  if s.frozen and next(s.sizes, next(s.sizes)) then problem("%s is frozen and grew", s.name) end
  s.size = at
end

-- ---- units

local NUMBER = set "int32_t uint32_t int64_t uint64_t double"

-- Whether a value of this type is a number, or points at numbers or other elements, whose unit or shape must be told.
local function wants_unit(ctype)
  local target = ctype:gsub("^const ", ""):gsub(" ?%*$", ""):gsub("%[%d+%]$", "")
  return NUMBER[target] or target == "void" and ctype:find("^const") or ctype:find("%*const %*$") ~= nil
end

local function check_units(owner, key, ctype, d)
  local unit = (d.units[owner.name] or {})[key]
  if wants_unit(ctype) and not unit then problem("%s: units does not tell what %s means", owner.name, key) end
  if unit and not wants_unit(ctype) then problem("%s: units tells of %s, which is %s", owner.name, key, ctype) end
  return unit, unit == d.truth
end

local function take_units(d)
  local known = {}
  for _, f in ipairs(d.functions) do
    known[f.name], known[f.name .. ".result"] = true, true
    f.unit, f.boolean = check_units(f, "result", f.returns:find("%*") and "char" or f.returns, d)
    for _, p in ipairs(f.params) do
      known[f.name .. "." .. p.name] = true
      p.unit, p.boolean = check_units(f, p.name, p.ctype, d)
      local shaped = p.unit and p.unit:match("^%[(%w+)%]")
      if shaped and not (f.params[shaped] and f.params[shaped].len_of) then
        problem("%s: %s has the shape [%s], which counts nothing", f.name, p.name, shaped)
      end
    end
    for _, p in ipairs(f.params) do
      if p.len_of and not ((f.params[p.len_of] or {}).unit or ""):find("^%[") then
        problem("%s: units must begin with the shape of %s", f.name, p.len_of)
      end
    end
  end
  for _, s in ipairs(d.structs) do
    known[s.name] = true
    for i, field in ipairs(s.fields) do
      known[s.name .. "." .. field.name] = true
      if i > 2 and not field.name:find("^reserved") then
        field.unit, field.boolean = check_units(s, field.name, field.ctype, d)
      end
    end
  end
  for owner, list in pairs(d.units) do
    if not known[owner] then problem("units tells of %s, which is not described", owner) end
    for key in pairs(list) do
      if known[owner] and not known[owner .. "." .. key] then
        problem("units tells of %s.%s, which is not described", owner, key)
      end
    end
  end
end

-- ---- the header

-- Comment, declaration and place of every GLM52_API function; section titles.
local function load_header(path)
  local text, functions, line = read(path), {}, 1
  local comment, counted
  local at = 1
  counted = 1
  while true do
    local first, last, kind = text:find("\n(GLM52_API )", at)
    local c1, c2 = text:find("/%*.-%*/", at)
    if c1 and (not first or c1 < first) then
      local body = text:sub(c1 + 2, c2 - 2)
      comment = { text = body:gsub("\n%s*%* ?", "\n"):gsub("^ +", ""):gsub("%s+$", ""), last = c2 }
      at = c2 + 1
    elseif first then
      local stop = text:find(";", last, true)
      for _ in text:sub(counted, first):gmatch("\n") do line = line + 1 end
      counted = first + 1
      local declaration = text:sub(last + 1, stop - 1)
      local own = comment and text:sub(comment.last + 1, first):match("^%s*$") and comment.text
      local name = declaration:match("(glm52_[%w_]+)%s*%(")
      functions[#functions + 1] = { name = name, declaration = declaration, comment = own or nil, line = line }
      functions[name] = functions[#functions]
      at, comment = stop, nil
    else
      return functions
    end
  end
end

-- Comments of structs, members and enumerators, and the text at the top, for the reference.
local function load_prose(path)
  local text = read(path)
  local prose = { of = {},
    conventions = text:match("Conventions\n(.-)\n %*/"):gsub("\n %* ?", "\n"):gsub("^ %* ?", "") }
  local function note(owner, body)
    for line in body:gmatch("[^\n]+") do
      local declaration, comment = line:match("^%s*(.-)%s*/%*%s*(.-)%s*%*/")
      if comment then
        local name = declaration:match("%(%*([%w_]+)%)") or declaration:match("^(GLM52_[%w_]+) =") or
          declaration:match("([%w_]+)[%[%d%]]*;$")
        if name then prose.of[owner .. name] = comment end
      end
    end
  end
  for body, name in text:gmatch("typedef struct glm52_[%w_]+ (%b{}) (glm52_[%w_]+);") do note(name .. ".", body) end
  for body in text:gmatch("enum (%b{});") do note("", body) end
  for comment, name in text:gmatch("/%*([^/]-)%*/\ntypedef struct (glm52_[%w_]+) {") do
    prose.of[name] = comment:gsub("\n%s*%* ?", "\n"):gsub("^%s+", ""):gsub("%s+$", "")
  end
  for comment, name in text:gmatch("/%*([^/]-)%*/\ntypedef [^;\n]-%(%*(glm52_[%w_]+)%)") do
    prose.of[name] = comment:gsub("\n%s*%* ?", "\n"):gsub("^%s+", ""):gsub("%s+$", "")
  end
  return prose
end

local UNIVERSAL = set "HANDLE INVALID NOMEM"
local KNOWN = set("NOMEM INVALID STATE HANDLE IO CORRUPT VERSION UNSUPPORTED DEVICE COMM CANCELLED TIMEOUT NUMERIC "
  .. "CALLBACK AGAIN INTERNAL")

-- Names in capitals that follow "Errors:" up to the end of the comment.
local function errors_of(comment)
  local list = {}
  for name in (comment:match("Errors:(.*)$") or ""):gmatch("%f[%w]%u%u+%f[%W]") do
    if KNOWN[name] then list[name] = true end
  end
  return list
end

local function words(list)
  local result = {}
  for word in pairs(list) do result[#result + 1] = word end
  table.sort(result)
  return table.concat(result, ", ")
end

local function check_contract(f, h, where)
  if not h.comment then
    if not f.counting then problem("%s: %s has no contract: write a comment right above it", where, f.name) end
    return
  end
  local prose = errors_of(h.comment)
  for name in pairs(UNIVERSAL) do prose[name] = nil end
  if words(prose) ~= words(f.errors) then
    problem("%s: the contract of %s ends with Errors: %s; abi/glm52.api says %s", where, f.name,
      words(prose) == "" and "(none)" or words(prose), words(f.errors) == "" and "none" or words(f.errors))
  end
  local from_any = h.comment:find("any thread", 1, true) or h.comment:find("signal handlers", 1, true)
  local has_handle = f.params[1] and f.params[1].handle
  if f.threads ~= "one" and has_handle and not f.counting and not from_any then
    problem("%s: the contract of %s must say that it may be called from any thread", where, f.name)
  end
  if f.since ~= "0.1" and not h.comment:find("Since " .. f.since, 1, true) then
    problem("%s: the contract of %s must say \"Since %s.\"", where, f.name, f.since)
  end
  local gives = f.gives
  for _, p in ipairs(f.params) do gives = p.gives == "borrowed" and p.gives or gives end
  if gives == "borrowed" and not h.comment:find("[Bb]orrowed") then
    if not f.name:match("^glm52_error_") then
      problem("%s: the contract of %s must say how long the borrowed result lives", where, f.name)
    end
  end
end

local function check_header(d, header, path)
  for _, h in ipairs(header) do
    local f, where = d.by_name[h.name], path .. ":" .. h.line
    if not f then
      problem("%s declares %s, which abi/glm52.api does not describe: add a row there, then run ninja abi-baseline",
        where, h.name)
    else
      local ours, theirs = description.normal(description.prototype(f)), description.normal(h.declaration)
      if ours ~= theirs then
        problem("%s declares\n    %s\n  and abi/glm52.api describes\n    %s", where, theirs, ours)
      end
      check_contract(f, h, where)
    end
  end
  for _, f in ipairs(d.functions) do
    if not header[f.name] then
      problem("abi/glm52.api describes %s, which %s does not declare. A published function stays", f.name, path)
    end
  end
end

-- The checked description; each function has .comment, its contract.
function description.load(description_path, header_path)
  local d = load_description(description_path)
  local header = load_header(header_path)
  for _, f in ipairs(d.functions) do check_function(f, d) end
  for _, s in ipairs(d.structs) do check_struct(s, d) end
  take_units(d)
  check_header(d, header, "include/glm52.h")
  if #problems > 0 then
    io.stderr:write("the public API and its description differ (docs/abi.md tells how to add to the API):\n")
    for _, text in ipairs(problems) do io.stderr:write("  ", text, "\n") end
    os.exit(1)
  end
  for _, f in ipairs(d.functions) do f.comment, f.line = header[f.name].comment, header[f.name].line end
  d.prose = load_prose(header_path)
  return d
end

return description
