-- A rock from a checkout: luarocks --lua-version 5.4 make bindings/lua/glm52-scm-1.rockspec, in its top folder. Meson and the
-- libraries of docs/design.md must be there (./run build installs them). libglm52 becomes part of the module.
rockspec_format = "3.0"
package = "glm52"
version = "scm-1"
source = { url = "git+file://." }
description = {
  license = "not stated",
  summary = "Trains GLM-5.2",
  detailed = "Recipes, and the classes of libglm52: contexts, configs, models, batches, datasets, optimizers, steps.",
}
supported_platforms = { "linux" }
dependencies = { "lua >= 5.4, < 5.5" }
build = {
  type = "command",
  build_command = "{ test -e build-rock/build.ninja || meson setup build-rock -Dlua=enabled -Dlua_rock=true -Dtests=disabled"
    .. " -Dpython=disabled -Dcuda=disabled; } && ninja -C build-rock bindings/lua/glm52.so",
  install = { lib = { glm52 = "build-rock/bindings/lua/glm52.so" } },
}
