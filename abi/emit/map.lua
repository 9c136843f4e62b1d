-- The linker's version script: one node per release, each name spelled out.
return function(d)
  local out = {}
  for i, release in ipairs(d.releases) do
    out[#out + 1] = ("GLM52_%s {\n  global:\n"):format(release)
    for _, f in ipairs(d.functions) do
      if f.since == release then out[#out + 1] = ("    %s;\n"):format(f.name) end
    end
    out[#out + 1] = i == 1 and "  local: *;\n};\n" or ("} GLM52_%s;\n"):format(d.releases[i - 1])
  end
  return table.concat(out)
end
