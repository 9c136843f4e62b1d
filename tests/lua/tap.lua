-- Cases in TAP, for the Lua tests.
local tap = { count = 0 }

function tap.case(name, f)
  tap.count = tap.count + 1
  local done, reason = xpcall(f, function(problem)
    return type(problem) == "string" and debug.traceback(problem, 2) or tostring(problem)
  end)
  print(string.format("%sok %d - %s", done and "" or "not ", tap.count, name))
  if not done then print((tostring(reason):gsub("[^\n]+", "# %0"))) end
end

function tap.equal(got, expected)
  if got ~= expected then error(string.format("got %s, expected %s", tostring(got), tostring(expected)), 2) end
end

-- The failure of a call that must fail, as it was raised.
function tap.failure(f, ...)
  local done, problem = pcall(f, ...)
  if done then error("should have failed", 2) end
  return problem
end

-- The same, whose text must hold `expected`.
function tap.refused(expected, f, ...)
  local done, problem = pcall(f, ...)
  if done then error("should have failed: " .. expected, 2) end
  if not tostring(problem):find(expected, 1, true) then
    error(string.format("got %s\nexpected %s", tostring(problem), expected), 2)
  end
  return problem
end

function tap.done() print("1.." .. tap.count) end

return tap
