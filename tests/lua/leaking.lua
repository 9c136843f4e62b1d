-- A leak on purpose, by the command glm52: a reference that nobody drops.
-- LeakSanitizer must see it (tests/sanitize.sh).
local glm52 = require "glm52"
glm52.native("libglm52.so.0", "glm52_config_ref", "ptr(ptr)")(glm52.config(glm52.context { threads = 1 }))
