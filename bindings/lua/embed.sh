#!/bin/sh
# Prints C source that holds the given Lua files: module glm52.NAME for each NAME.lua (see sources.h).
set -eu

echo '#include "sources.h"'
for file do
    name=$(basename "$file" .lua)
    echo "static const char text_$name[] = {"
    od -An -v -tx1 "$file" | sed 's/ \(..\)/0x\1,/g'
    echo '};'
done
echo 'const struct source sources[] = {'
for file do
    name=$(basename "$file" .lua)
    echo "    {\"glm52.$name\", \"@glm52/$name.lua\", text_$name, sizeof text_$name},"
done
echo '    {NULL, NULL, NULL, 0},'
echo '};'
