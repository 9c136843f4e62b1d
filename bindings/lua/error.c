/* Statuses as error objects: a table with status, name, message, hint, details and where, whose metatable is
 * glm52.failure. `details` is the library's error itself, asked for keys on demand: err.details.key,
 * err.details.path. `where` is the line of the host's Lua code that made the call, "recipe.lua:12:". */
#include <string.h>

#include "binding.h"

static int error_detail(lua_State *L)
{
    glm52_error **error = luaL_checkudata(L, 1, "glm52.details");

    lua_pushstring(L, glm52_error_detail(*error, luaL_checkstring(L, 2)));
    return 1;
}

static int error_release(lua_State *L)
{
    glm52_error_unref(luaL_checkudata(L, 1, "glm52.details"));
    return 0;
}

static int error_text(lua_State *L)
{
    lua_settop(L, 1);
    lua_getfield(L, 1, "where");
    lua_getfield(L, 1, "message");
    lua_getfield(L, 1, "hint");
    const char *where = lua_tostring(L, 2), *message = lua_tostring(L, 3), *hint = lua_tostring(L, 4);

    lua_pushfstring(L, "%s%s%s%s%s", where ? where : "", where && *where ? " " : "", message ? message : "",
                    hint && *hint ? "\n  " : "", hint ? hint : "");
    return 1;
}

void error_register(lua_State *L)
{
    luaL_newmetatable(L, "glm52.failure");
    lua_pushcfunction(L, error_text);
    lua_setfield(L, -2, "__tostring");
    luaL_newmetatable(L, "glm52.details");
    lua_pushcfunction(L, error_detail);
    lua_setfield(L, -2, "__index");
    lua_pushcfunction(L, error_release);
    lua_setfield(L, -2, "__gc");
    lua_pop(L, 2);
}

static void set_text(lua_State *L, const char *field, const char *text)
{
    lua_pushstring(L, text);
    lua_setfield(L, -2, field);
}

/* Pushes "file:line:" of the nearest Lua function that is not one of the binding's own; "" if there is none. */
static void push_where(lua_State *L)
{
    lua_Debug caller;

    for (int level = 1; lua_getstack(L, level, &caller); level++) {
        lua_getinfo(L, "Sl", &caller);
        if (caller.currentline <= 0 || !strncmp(caller.source, "@glm52/", 7)) continue;
        lua_pushfstring(L, "%s:%d:", caller.short_src, caller.currentline);
        return;
    }
    lua_pushliteral(L, "");
}

static void push_failure(lua_State *L, glm52_status status, const char *message, const char *hint)
{
    lua_createtable(L, 0, 6);
    lua_pushinteger(L, status);
    lua_setfield(L, -2, "status");
    set_text(L, "name", glm52_status_name(status));
    set_text(L, "message", message);
    set_text(L, "hint", hint);
    push_where(L);
    lua_setfield(L, -2, "where");
    luaL_setmetatable(L, "glm52.failure");
}

int throw_error(lua_State *L, glm52_status status, const char *message, const char *hint)
{
    push_failure(L, status, message, hint);
    lua_newtable(L);
    lua_setfield(L, -2, "details");
    return lua_error(L);
}

void check(lua_State *L, glm52_status status)
{
    if (!status) return;

    glm52_error **details = lua_newuserdatauv(L, sizeof *details, 0);
    *details = NULL;
    luaL_setmetatable(L, "glm52.details");
    *details = glm52_error_take();
    if (!*details) throw_error(L, status, glm52_status_name(status), "");
    push_failure(L, status, glm52_error_message(*details), glm52_error_hint(*details));
    lua_insert(L, -2);
    lua_setfield(L, -2, "details");
    lua_error(L);
}
