-- Flags of a command line, and what they were meant to be where they are mistyped.
local failure = require "glm52.failure"

-- As key=value.
local flags = { meaning = { ["--resume"] = "resume=true", ["--resume=changed"] = "resume=changed" } }

-- How many letters one must insert, drop, replace or swap with the next to make one word the other.
local function distance(one, other)
  local rows = { [0] = {} }
  for j = 0, #other do rows[0][j] = j end
  for i = 1, #one do
    rows[i] = { [0] = i }
    for j = 1, #other do
      local same = one:byte(i) == other:byte(j)
      local least = math.min(rows[i - 1][j] + 1, rows[i][j - 1] + 1, rows[i - 1][j - 1] + (same and 0 or 1))
      if i > 1 and j > 1 and one:byte(i) == other:byte(j - 1) and one:byte(i - 1) == other:byte(j) then
        least = math.min(least, rows[i - 2][j - 2] + 1)
      end
      rows[i][j] = least
    end
  end
  return rows[#one][#other]
end

-- A flag that is none of ours but close to one is a mistake; `strict` refuses every other one too.
function flags.check(argument, strict)
  if not argument:find("^%-%-?%a") then return end
  local word, nearest, least = argument:match("^[^=]*"), nil, 3
  for _, flag in ipairs { "--resume", "--sandbox" } do
    local far = distance(word, flag)
    if far < least then nearest, least = flag, far end
  end
  if nearest or strict then
    local meant = nearest and "; did you mean " .. nearest .. "?" or ""
    failure.raise("GLM52_E_INVALID", argument .. ": no such flag" .. meant,
      nearest and "" or "flags of the recipe's own stand behind --", { flag = argument })
  end
end

return flags
