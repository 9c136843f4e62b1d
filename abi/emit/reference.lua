-- The reference page: the header's contracts, and with each what the description adds: a row per parameter, then
-- threads, errors and release.
local description = require "description"
local rules = require "emit.lua_rules"

local TITLES = { library = "The library", error = "Errors" }
local ORDER = { "library", "error", "context", "config", "model", "batch", "dataset", "optimizer", "step" }
local THREADS = {
  one = "one at a time per context",
  any = "any, also while another one works on the context",
  signal = "any, and signal handlers",
}

local function class_of(f, d)
  local class = f.name:match("^glm52_(%l+)_")
  return d.handle[class] and class or "library"
end

-- Words of prose: public names are code, functions links, and nothing else is markup.
local function words(text, d)
  text = text:gsub("[<%[%]*|]", "\\%0")
  text = text:gsub("%f[%w_]glm52_[%w_]+%(%)", function(name)
    local plain = name:gsub("%(%)", "")
    return d.by_name[plain] and ("[`%s()`](#%s)"):format(plain, plain) or "`" .. name .. "`"
  end)
  return (text:gsub("%f[%w_`]GLM52_[%u%d_]+", "`%0`"))
end

-- Prose of a C comment as Markdown; `code` in it stays, and indented lines become a list.
local function markdown(text, d)
  text = text:gsub("([^\n]*)\n(  +)", "%1\n\1"):gsub("\1([^\n]*)", "* %1")
  local out, listed = {}, false
  for line in (text .. "\n"):gmatch("(.-)\n") do
    local item = line:find("^%* ") ~= nil
    if #out > 0 and item ~= listed then out[#out + 1] = "" end
    listed = item
    local pieces, prefix = {}, item and "* " or ""
    for plain, code in ((item and line:sub(3) or line) .. "``"):gmatch("([^`]*)(`[^`]*`)") do
      pieces[#pieces + 1] = words(plain, d) .. (code == "``" and "" or code)
    end
    out[#out + 1] = prefix .. table.concat(pieces)
  end
  return table.concat(out, "\n")
end

local function escape(text) return (text:gsub("|", "\\|")) end

local function row(...) return "| " .. table.concat({ ... }, " | ") .. " |\n" end

local function code(text) return "`" .. escape(text) .. "`" end

local function meaning(p, d)
  local list = {}
  if p.dir ~= "in" then list[#list + 1] = p.dir end
  if p.unit then list[#list + 1] = escape(p.unit):gsub("%[", "\\[") end
  if p.len_of then list[#list + 1] = ("length of `%s`"):format(p.len_of) end
  if p.gives == "owned" then list[#list + 1] = p.dir == "inout" and "given back" or "owned by the caller" end
  if p.gives == "borrowed" then list[#list + 1] = "borrowed" end
  if p.keeps then list[#list + 1] = "kept alive by what is made" end
  if p.nullable then list[#list + 1] = "may be NULL" end
  return table.concat(list, "; ")
end

local function sorted(set)
  local list = {}
  for word in pairs(set) do list[#list + 1] = word end
  table.sort(list)
  return list
end

local RESULT = {
  owned = "owned by the caller", borrowed = "borrowed", static = "lives as long as the library",
}

local function result(f)
  if f.returns == "void" then return nil end
  local what = f.returns == "glm52_status" and "`GLM52_OK` or one of the errors below" or
    f.gives and RESULT[f.gives] or f.unit
  if f.name == "glm52_error_status" then what = "the status of the failure" end
  return ("* Result: %s, %s"):format(code(f.returns), what)
end

local function errors(f)
  if f.returns ~= "glm52_status" then return nil end
  local list = { "INVALID", "NOMEM", table.unpack(sorted(f.errors)) }
  for _, p in ipairs(f.params) do
    if p.handle then table.insert(list, 1, "HANDLE") break end
  end
  for _, p in ipairs(f.params) do
    if p.struct then list[#list + 1] = "VERSION" break end
  end
  return "* Errors: " .. table.concat(list, ", ")
end

local function counting_text(f)
  return f.name:match("_ref$") and "Adds a reference and returns its argument; NULL for what is no such handle." or
    "Drops a reference and nulls the pointer; nothing for NULL."
end

local function facts(f, d)
  local list = {}
  local lua = not f.counting and rules.signature(f, d)
  list[#list + 1] = result(f)
  list[#list + 1] = errors(f)
  list[#list + 1] = "* Threads: " .. THREADS[f.threads] .. (f.blocking and "; may take long" or "")
  list[#list + 1] = "* Since: " .. f.since
  if lua then list[#list + 1] = "* In Lua: " .. code(lua) end
  return table.concat(list, "\n") .. "\n"
end

local function function_text(f, d)
  local out = { ("\n### %s\n\n```c\n%s;\n```\n\n%s\n\n"):format(f.name, description.prototype(f),
    f.comment and markdown(f.comment, d) or counting_text(f)) }
  if #f.params > 0 then
    out[#out + 1] = row("parameter", "type", "meaning") .. row("---", "---", "---")
    for _, p in ipairs(f.params) do out[#out + 1] = row(code(p.name), code(p.ctype), meaning(p, d)) end
    out[#out + 1] = "\n"
  end
  out[#out + 1] = facts(f, d)
  return table.concat(out)
end

local function struct_text(s, d)
  local out = { ("\n### %s\n\n%s\n\n"):format(s.name, markdown(d.prose.of[s.name] or "", d)) }
  out[#out + 1] = ("%d bytes, filled by the %s. Offsets are those of 64-bit machines.\n\n"):format(s.size,
    s.dir == "in" and "caller" or "library")
  out[#out + 1] = row("byte", "member", "since", "meaning") .. row("---:", "---", "---", "---")
  for _, field in ipairs(s.fields) do
    local words = { field.unit and escape(field.unit):gsub("%[", "\\[") or nil }
    words[#words + 1] = d.prose.of[s.name .. "." .. field.name]
      and markdown(d.prose.of[s.name .. "." .. field.name], d) or nil
    out[#out + 1] = row(field.offset, code(description.declare(field.ctype, field.name)), field.since,
      table.concat(words, "; "))
  end
  return table.concat(out)
end

local function enum_text(e, d)
  local names, out = {}, { ("\n### %s\n\n"):format(e[1]) }
  for name in pairs(e[2]) do names[#names + 1] = name end
  table.sort(names, function(a, b) return math.abs(e[2][a]) < math.abs(e[2][b]) end)
  out[#out + 1] = row("value", "name", "meaning") .. row("---:", "---", "---")
  for _, name in ipairs(names) do out[#out + 1] = row(e[2][name], code(name), markdown(d.prose.of[name] or "", d)) end
  return table.concat(out)
end

-- "Handles   Opaque and ..." with its further lines indented becomes an item that begins with the word in bold.
local function conventions(d)
  local out = {}
  for line in (d.prose.conventions .. "\n"):gmatch("(.-)\n") do
    local word, rest = line:match("^%s*(%u%l+)%s%s+(.*)")
    if word then
      out[#out + 1] = ("* **%s.** %s"):format(word, markdown(rest, d))
    elseif line:find("^%s%s%s%s") then
      out[#out] = out[#out] .. " " .. markdown(line:gsub("^%s+", ""), d)
    elseif line:find("%S") then
      out[#out + 1] = "* " .. markdown(line:gsub("^%s+", ""), d)
    end
  end
  return table.concat(out, "\n") .. "\n"
end

return function(d)
  local out = { "# Reference of the C API\n\n",
    "Written by `abi/gen.lua` from `include/glm52.h` and `abi/glm52.api` at every build.\n\n",
    "## Conventions\n\n", conventions(d), "\n" }
  for _, class in ipairs(ORDER) do
    out[#out + 1] = ("\n## %s\n"):format(TITLES[class] or "glm52_" .. class)
    local list = {}
    for _, f in ipairs(d.functions) do if class_of(f, d) == class then list[#list + 1] = f end end
    table.sort(list, function(a, b) return a.line < b.line end)
    for _, f in ipairs(list) do out[#out + 1] = function_text(f, d) end
  end
  out[#out + 1] = "\n## Structs\n"
  for _, s in ipairs(d.structs) do out[#out + 1] = struct_text(s, d) end
  out[#out + 1] = "\n## Callbacks\n"
  for _, c in ipairs(d.callbacks) do
    out[#out + 1] = ("\n### %s\n\n```c\n%s;\n```\n\n%s\n"):format(c[1], "typedef " .. description.declare(c[2], c[1]),
      markdown(d.prose.of[c[1]] or "", d))
  end
  out[#out + 1] = "\n## Values\n"
  for _, e in ipairs(d.enums) do out[#out + 1] = enum_text(e, d) end
  return table.concat(out)
end
