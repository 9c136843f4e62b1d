/* The Lua module: require "glm52" gives the table that init.lua returns; glm52.core is this C side. The Lua sources of
 * the recipe layer are part of the binary, so that one file is the whole module. */
#include <string.h>

#include "call.h"
#include "sources.h"

static const luaL_Reg by_hand[] = {{"context", new_context}, {"tensor", new_tensor},         {"native", new_native},
                                   {"sandbox", evaluate_sandboxed}, {NULL, NULL}};

static const struct {
    const char *class, *name;
    lua_CFunction function;
} methods[] = {{"context", "poll", context_poll}, {"batch", "set", batch_set}, {"model", "gradient", model_gradient}};

/* core.classes: the method tables by name, "model". */
static void push_classes(lua_State *L)
{
    lua_newtable(L);
    for (const struct class *class = classes; class->name; class++) {
        class_register(L, class);
        lua_setfield(L, -2, class->name + strlen("glm52."));
    }
    for (size_t i = 0; i < sizeof methods / sizeof *methods; i++) {
        lua_getfield(L, -1, methods[i].class);
        lua_pushcfunction(L, methods[i].function);
        lua_setfield(L, -2, methods[i].name);
        lua_pop(L, 1);
    }
}

/* Every function of the description, in its class or in the module. */
static int open_core(lua_State *L)
{
    error_register(L);
    tensor_register(L);
    native_register(L);
    luaL_newlib(L, by_hand);
    push_classes(L);
    for (const struct function *f = functions; f->name; f++) {
        if (f->class)
            lua_getfield(L, -1, f->class->name + strlen("glm52."));
        else
            lua_pushvalue(L, -2);
        push_function(L, f);
        lua_setfield(L, -2, f->name);
        lua_pop(L, 1);
    }
    lua_setfield(L, -2, "classes");
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
