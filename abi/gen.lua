-- gen.lua KIND DESCRIPTION HEADER [FILE]: writes one product of the description to standard output. KIND is the name of
-- a file in emit/ without its ending; `types` copies FILE before its own.
-- Fails, saying what to do, if header and description differ.

local kind, description_path, header_path, file = ...
local here = arg[0]:match("^(.*/)") or "./"
package.path = here .. "?.lua;" .. package.path

assert(_VERSION >= "Lua 5.4", "Lua 5.4 is needed")
local description = require "description"
io.stdout:write(require("emit." .. kind)(description.load(description_path, header_path), file))
