-- columns.lua SOURCE: no line of code is wider than 120 columns (docs/design.md). Names file, line and width of each
-- that is, and fails. Looks at folders, not at version control: it works in a tarball too. Exits
-- 77 where there is no code.
local WIDEST = 120

local function quoted(text) return "'" .. text:gsub("'", "'\\''") .. "'" end

local names, patterns = {}, {}
for ending in ("c h cu cuh lua py i"):gmatch "%a+" do patterns[#patterns + 1] = "-name '*." .. ending .. "'" end
local list <close> = assert(io.popen("cd " .. quoted(arg[1])
  .. " && find abi bindings cuda docs examples include lib tests "
  .. "-type f '(' " .. table.concat(patterns, " -o ") .. " ')' -print 2>/dev/null"))
for name in list:lines() do names[#names + 1] = name end
table.sort(names)

local wide = 0
for _, name in ipairs(names) do
  local number = 0
  for line in io.lines(arg[1] .. "/" .. name) do
    number = number + 1
    local width = utf8.len(line) or #line
    if width > WIDEST then
      wide = wide + 1
      print(("%s:%d: %d columns"):format(name, number, width))
    end
  end
end
print(("%d files, %d lines wider than %d columns"):format(#names, wide, WIDEST))
os.exit(#names == 0 and 77 or wide == 0)
