-- A C file that compiles only if the header declares what the description says: prototypes, field types, offsets, sizes
-- of every release, values of enumerators.
local description = require "description"

return function(d)
  local out = { "/* Written by abi/gen.lua. */\n#include <stddef.h>\n#include <stdint.h>\n\n#include \"glm52.h\"\n\n" }
  local function add(text, ...) out[#out + 1] = text:format(...) end

  for _, f in ipairs(d.functions) do add("%s;\n", description.prototype(f)) end
  for _, c in ipairs(d.callbacks) do
    add('_Static_assert(__builtin_types_compatible_p(%s, %s), "%s");\n', c[1], c[2], c[1])
  end
  for _, e in ipairs(d.enums) do
    add('_Static_assert(__builtin_types_compatible_p(%s, int32_t), "%s");\n', e[1], e[1])
    for name, value in pairs(e[2]) do add('_Static_assert(%s == %d, "%s");\n', name, value, name) end
  end
  for _, s in ipairs(d.structs) do
    for _, field in ipairs(s.fields) do
      add('_Static_assert(__builtin_types_compatible_p(__typeof__(((%s *)0)->%s), %s), "type of %s.%s");\n', s.name,
        field.name, field.ctype, s.name, field.name)
    end
  end
  add("#if UINTPTR_MAX > 0xffffffffu\n")
  for _, s in ipairs(d.structs) do
    add('_Static_assert(sizeof(%s) == %d, "size of %s");\n', s.name, s.size, s.name)
    for _, field in ipairs(s.fields) do
      add('_Static_assert(offsetof(%s, %s) == %d, "%s.%s");\n', s.name, field.name, field.offset, s.name, field.name)
    end
  end
  add("#endif\n")
  return table.concat(out)
end
