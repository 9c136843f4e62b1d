-- Tests of wrong arguments: every function with NULL, and with a handle of another class, for each of its pointers; the
-- others are right. tests/api/null_arguments.c says what must happen and runs them.

-- A right argument for parameter p, as a C expression.
local function right(p)
  if p.dir ~= "in" then return "&" .. p.name end
  if p.handle then return "o->" .. p.handle end
  if p.ctype == "glm52_batch *const *" then return "&o->batch" end
  if p.ctype == "const char *" then return '"x"' end
  if p.struct then return "&o->" .. p.struct.name:gsub("^glm52_", "") end
  if p.pointer then return "o->integers" end
  return "1"
end

local function call(f, wrong, expression)
  local list = {}
  for i, p in ipairs(f.params) do list[i] = p == wrong and expression or right(p) end
  return ("%s(%s)"):format(f.name, table.concat(list, ", "))
end

-- Every wrong argument of a parameter: expression, status, what the message must name.
local function mistakes(p)
  local list = {}
  if p.handle then
    local other = p.handle == "batch" and "config" or "batch"
    local wrong = ("(%s)(uintptr_t)o->%s"):format(p.ctype:gsub(" %*$", " *"), other)
    list[#list + 1] = { wrong, "GLM52_E_HANDLE", "glm52_" .. p.handle }
    if not p.nullable then list[#list + 1] = { "NULL", "GLM52_E_HANDLE", "glm52_" .. p.handle } end
  elseif p.ctype == "glm52_batch *const *" then
    list[#list + 1] = { "NULL", "GLM52_E_INVALID", p.name }
    list[#list + 1] = { "&(glm52_batch *){NULL}", "GLM52_E_HANDLE", "glm52_batch" }
    list[#list + 1] = { "&(glm52_batch *){(glm52_batch *)(uintptr_t)o->config}", "GLM52_E_HANDLE", "glm52_batch" }
  elseif p.pointer and not p.nullable then
    list[#list + 1] = { "NULL", "GLM52_E_INVALID", p.name }
  end
  if p.struct then
    local small = ("&(%s){.struct_size = %d}"):format(p.struct.name, p.struct.fields[3].offset)
    list[#list + 1] = { small, "GLM52_E_VERSION", "struct_size" }
  end
  return list
end

-- What drops references takes the address of a handle.
local function unref(f, handle)
  local other = handle == "batch" and "config" or "batch"
  return ("    glm52_%s *none = NULL, *wrong = (glm52_%s *)(uintptr_t)o->%s;\n\n"
    .. "    %s(NULL);\n    %s(&none);\n    %s(&wrong);\n"):format(handle, handle, other, f.name, f.name, f.name)
end

local function body(f)
  local handle = f.name:match("^glm52_(%l+)_unref$")
  if handle then return unref(f, handle), true end
  local out, outputs, any = {}, {}, false
  for _, p in ipairs(f.params) do
    if p.dir ~= "in" then
      out[#out + 1] = ("    %s%s;\n"):format(p.ctype:gsub("%*$", ""), p.name)
      out[#out + 1] = ("    prepare(&%s, sizeof %s, %d);\n"):format(p.name, p.name, p.struct and 1 or 0)
      outputs[#outputs + 1] = p
    end
  end
  for _, p in ipairs(f.params) do
    for _, mistake in ipairs(mistakes(p)) do
      any = true
      local text = call(f, p, mistake[1])
      if f.returns == "glm52_status" then
        out[#out + 1] = ('    refused(%s, %s, "%s", "%s");\n')
          :format(text, mistake[2], mistake[3], f.name .. ", " .. p.name)
      elseif f.returns:sub(-1) == "*" and not (f.comment or ""):find("Never NULL") then
        out[#out + 1] = ("    ck_assert_ptr_null(%s);\n"):format(text)
      elseif f.returns:sub(-1) == "*" then
        out[#out + 1] = ('    ck_assert_str_eq(%s, "");\n'):format(text)
      else
        out[#out + 1] = ("    %s%s;\n"):format(f.returns == "void" and "" or "(void)", text)
      end
      for _, output in ipairs(outputs) do
        if output ~= p then
          out[#out + 1] = ('    untouched(&%s, sizeof %s, %d, "%s");\n'):format(output.name, output.name,
            output.struct and 1 or 0, f.name .. ", " .. output.name)
        end
      end
    end
  end
  return table.concat(out), any
end

return function(d)
  local out, cases = { '/* Written by abi/gen.lua. */\n#include "null_arguments.h"\n' }, {}
  for _, f in ipairs(d.functions) do
    local text, any = body(f)
    if any then
      local unused = text:find("o->", 1, true) and "" or "    (void)o;\n"
      out[#out + 1] = ("\nstatic void wrong_%s(const struct objects *o)\n{\n%s%s}\n"):format(f.name, unused, text)
      cases[#cases + 1] = ('    {"%s", wrong_%s},\n'):format(f.name, f.name)
    end
  end
  out[#out + 1] = "\nconst struct null_case null_cases[] = {\n" .. table.concat(cases) .. "};\n"
  out[#out + 1] = "const int null_case_count = sizeof null_cases / sizeof *null_cases;\n"
  return table.concat(out)
end
