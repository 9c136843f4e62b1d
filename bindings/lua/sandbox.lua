-- Untrusted recipes: evaluated apart, by the C side's sandbox, to the table that they would train. Its paths must
-- stay below the current directory.
local core = require "glm52.core"
local recipe = require "glm52.recipe"

local most_text = 1 << 20

local function read(path)
  local file, reason = io.open(path, "r")
  if not file then recipe.error("GLM52_E_IO", "cannot open " .. reason) end
  local text = file:read(most_text + 1) or ""
  file:close()
  if #text > most_text then
    recipe.error("GLM52_E_INVALID",
      string.format("%s has more than %d bytes, which a sandbox does not take", path, most_text))
  end
  return (text:gsub("^#[^\n]*", ""))
end

local is_path = { out = true, text = true, hub = true }

local function check_paths(options, prefix)
  for key, value in pairs(options) do
    local name = prefix .. tostring(key)
    if type(value) == "table" then
      check_paths(value, name .. ".")
    elseif is_path[name:match("[^.]*$")] and type(value) == "string" and
      (value:find("^/") or ("/" .. value .. "/"):find("/../", 1, true) or value:find("\0", 1, true)) then
      recipe.error("GLM52_E_INVALID",
        string.format("%s = %s leaves the current directory, which a sandboxed recipe may not", name, value),
        "give it as an argument: " .. name .. "=PATH", { key = name })
    end
  end
end

-- limits: {memory (bytes), instructions, seconds}. Returns the table that the recipe trains and where it asked for it.
return function(path, limits, arguments)
  local text = read(path)
  local done, options, line = pcall(core.sandbox, text, "@" .. path, limits or {}, arguments or {})
  if not done then
    if recipe.is_error(options) then error(options, 0) end
    recipe.error("GLM52_E_INVALID", tostring(options), "", { sandbox = true })
  elseif not options then
    recipe.error("GLM52_E_INVALID", path .. " trains nothing: it does not call glm52.train")
  end
  local caller = { name = path, file = path, line = line }
  recipe.located(caller, check_paths, options, "")
  return options, caller
end
