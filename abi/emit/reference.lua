-- The reference page: the header's contracts, and below each what the description adds, as one line.
local description = require "description"

local TITLES = { library = "The library", error = "Errors" }
local ORDER = { "library", "error", "context", "config", "model", "batch", "dataset", "optimizer", "step" }
local THREADS = { one = "one thread at a time", any = "any thread", signal = "any thread, signal handlers" }

local function class_of(f, d)
  local class = f.name:match("^glm52_(%l+)_")
  return d.handle[class] and class or "library"
end

local function sorted(set)
  local list = {}
  for word in pairs(set) do list[#list + 1] = word end
  table.sort(list)
  return list
end

local function facts(f)
  local list = { THREADS[f.threads] }
  if f.blocking then list[#list + 1] = "may take long" end
  for _, p in ipairs(f.params) do
    if p.nullable then list[#list + 1] = ("`%s` may be NULL"):format(p.name) end
    if p.gives then list[#list + 1] = ("`%s` is %s"):format(p.name, p.gives) end
    if p.keeps then list[#list + 1] = ("keeps `%s` alive"):format(p.name) end
    if p.len_of then list[#list + 1] = ("`%s` counts `%s`"):format(p.name, p.len_of) end
  end
  if f.gives then list[#list + 1] = "the result is " .. f.gives end
  if next(f.errors) then list[#list + 1] = "errors " .. table.concat(sorted(f.errors), ", ") end
  list[#list + 1] = "since " .. f.since
  return table.concat(list, "; ")
end

local function counting_text(f)
  return f.name:match("_ref$") and "Adds a reference and returns its argument; NULL for what is no such handle." or
    "Drops a reference and nulls the pointer; nothing for NULL."
end

return function(d)
  local out = { "# Reference of the C API\n\nWritten by `abi/gen.lua` from `include/glm52.h` and `abi/glm52.api`; the conventions ",
    "at the top of the header hold throughout.\n" }
  for _, class in ipairs(ORDER) do
    out[#out + 1] = ("\n## %s\n"):format(TITLES[class] or "glm52_" .. class)
    local list = {}
    for _, f in ipairs(d.functions) do if class_of(f, d) == class then list[#list + 1] = f end end
    table.sort(list, function(a, b) return a.line < b.line end)
    for _, f in ipairs(list) do
      out[#out + 1] = ("\n### %s\n\n    %s\n\n%s\n\n*%s.*\n"):format(f.name, description.prototype(f),
        f.comment or counting_text(f), facts(f))
    end
  end
  out[#out + 1] = "\n## Structs\n\nOffsets in bytes on 64-bit machines.\n"
  for _, s in ipairs(d.structs) do
    out[#out + 1] = ("\n### %s\n\n%d bytes, filled by the %s.\n\n"):format(s.name, s.size, s.dir == "in" and "caller" or "library")
    for _, field in ipairs(s.fields) do
      out[#out + 1] = ("* %d: `%s`\n"):format(field.offset, description.declare(field.ctype, field.name))
    end
  end
  return table.concat(out)
end
