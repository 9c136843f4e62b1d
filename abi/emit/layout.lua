-- What must never change, one fact a line: prototypes, fields with their offsets, sizes per release, enumerators. The
-- committed copy, abi/libglm52.layout, is the frozen record.
local description = require "description"

return function(d)
  local out = {}
  local function add(text, ...) out[#out + 1] = text:format(...) .. "\n" end

  for _, f in ipairs(d.functions) do add("function %s: %s", f.since, description.normal(description.prototype(f))) end
  for _, c in ipairs(d.callbacks) do add("callback %s: %s", c[1], description.normal(c[2])) end
  for _, s in ipairs(d.structs) do
    for release, size in pairs(s.sizes) do add("struct %s: %d bytes in %s", s.name, size, release) end
    for _, field in ipairs(s.fields) do
      add("struct %s: byte %d %s", s.name, field.offset,
        description.normal(description.declare(field.ctype, field.name)))
    end
  end
  for _, e in ipairs(d.enums) do
    for name, value in pairs(e[2]) do add("enum %s: %s = %d", e[1], name, value) end
  end
  table.sort(out)
  return table.concat(out)
end
