-- Every public function with an empty body: a library that has the types and symbols of the public API and no others.
-- The abidiff baseline is made from it, so that private types stay out of a committed file, and so are the mutants.
local description = require "description"

return function(d)
  local out = { "/* Written by abi/gen.lua. */\n#include \"glm52.h\"\n\n" }
  for _, f in ipairs(d.functions) do
    local body = {}
    for _, p in ipairs(f.params) do body[#body + 1] = ("(void)%s;"):format(p.name) end
    if f.returns ~= "void" then body[#body + 1] = "return 0;" end
    out[#out + 1] = ("%s\n{\n    %s\n}\n"):format(description.prototype(f), table.concat(body, "\n    "))
  end
  return table.concat(out)
end
