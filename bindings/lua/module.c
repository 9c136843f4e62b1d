/* The Lua module: require "glm52" gives the table that init.lua returns; glm52.core is this C side. The Lua sources of
 * the recipe layer are part of the binary, so that one file is the whole module. */
#include <string.h>

#include "binding.h"
#include "sources.h"

static int version(lua_State *L)
{
    lua_pushstring(L, glm52_version());
    return 1;
}

static int abi_version(lua_State *L)
{
    lua_pushinteger(L, glm52_abi_version());
    return 1;
}

static int build_info(lua_State *L)
{
    lua_pushstring(L, glm52_build_info());
    return 1;
}

static int feature(lua_State *L)
{
    lua_pushboolean(L, glm52_feature(luaL_checkstring(L, 1)));
    return 1;
}

static int device_count(lua_State *L)
{
    lua_pushinteger(L, glm52_context_device_count(luaL_checkstring(L, 1)));
    return 1;
}

static void set_text(lua_State *L, const char *field, const char *text)
{
    lua_pushstring(L, text);
    lua_setfield(L, -2, field);
}

/* core.options(): the schema, a list of {key, type, range, default, summary}. */
static int options(lua_State *L)
{
    glm52_option_info info = {.struct_size = sizeof info};

    lua_newtable(L);
    for (uint32_t i = 0; glm52_config_describe(i, &info) == GLM52_OK; i++) {
        lua_createtable(L, 0, 5);
        set_text(L, "key", info.key);
        set_text(L, "type", info.type);
        set_text(L, "range", info.range);
        set_text(L, "default", info.default_value);
        set_text(L, "summary", info.summary);
        lua_rawseti(L, -2, (lua_Integer)i + 1);
    }
    return 1;
}

static const luaL_Reg functions[] = {
    {"context", new_context}, {"config", new_config}, {"model", new_model}, {"load", load_model},
    {"batch", new_batch}, {"dataset", new_dataset}, {"optimizer", new_optimizer}, {"step", new_step},
    {"version", version}, {"abi_version", abi_version}, {"build_info", build_info}, {"feature", feature},
    {"device_count", device_count}, {"options", options}, {NULL, NULL}};

static int open_core(lua_State *L)
{
    static const struct class *const classes[] = {&context_class, &config_class, &model_class, &batch_class,
                                                  &dataset_class, &optimizer_class, &step_class};

    error_register(L);
    for (size_t i = 0; i < sizeof classes / sizeof *classes; i++) class_register(L, classes[i]);
    luaL_newlib(L, functions);
    push_system(L);
    lua_setfield(L, -2, "system");
    return 1;
}

/* Loader of an embedded source: its chunk, called with the module's name. */
static int open_source(lua_State *L)
{
    const struct source *source = lua_touserdata(L, lua_upvalueindex(1));

    if (luaL_loadbufferx(L, source->text, source->bytes, source->chunk, "t")) return lua_error(L);
    lua_pushvalue(L, 1);
    lua_call(L, 1, 1);
    return 1;
}

static void preload(lua_State *L, const char *name)
{
    lua_setfield(L, -2, name); /* package.preload is below the function */
}

int luaopen_glm52(lua_State *L)
{
    luaL_getsubtable(L, LUA_REGISTRYINDEX, LUA_PRELOAD_TABLE);
    lua_pushcfunction(L, open_core);
    preload(L, "glm52.core");
    for (const struct source *source = sources; source->module; source++) {
        lua_pushlightuserdata(L, (void *)source);
        lua_pushcclosure(L, open_source, 1);
        preload(L, source->module);
    }
    lua_getglobal(L, "require");
    lua_pushstring(L, "glm52.init");
    lua_call(L, 1, 1);
    return 1;
}
