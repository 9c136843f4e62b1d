/* The command glm52: a Lua interpreter with the module inside, handed to command.lua. */
#include <stdio.h>

#include <lualib.h>

#include "binding.h"

/* Runs under lua_pcall: argument 1 is argv, argument 2 argc. Leaves the exit status. */
static int run(lua_State *L)
{
    char **arguments = lua_touserdata(L, 1);
    int count = (int)lua_tointeger(L, 2);

    luaL_openlibs(L);
    luaL_requiref(L, "glm52", luaopen_glm52, 0);
    lua_getglobal(L, "require");
    lua_pushstring(L, "glm52.command");
    lua_call(L, 1, 1);
    lua_createtable(L, count, 0);
    for (int i = 0; i < count; i++) {
        lua_pushstring(L, arguments[i]);
        lua_rawseti(L, -2, i);
    }
    lua_call(L, 1, 1);
    return 1;
}

int main(int argc, char **argv)
{
    lua_State *L = luaL_newstate();
    int status = 1;

    if (!L) {
        fputs("glm52: no memory\n", stderr);
        return 1;
    }
    lua_pushcfunction(L, run);
    lua_pushlightuserdata(L, argv);
    lua_pushinteger(L, argc);
    if (lua_pcall(L, 2, 1, 0) == LUA_OK)
        status = (int)lua_tointeger(L, -1);
    else
        fprintf(stderr, "glm52: %s\n", luaL_tolstring(L, -1, NULL));
    lua_close(L);
    return status;
}
