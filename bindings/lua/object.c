/* Handles as userdata. */
#include <string.h>

#include <ffi.h>

#include "binding.h"

struct handle {
    void *pointer; /* NULL once closed */
};

static void unref(const struct class *class, void **pointer)
{
    ffi_type *argument_types[] = {&ffi_type_pointer};
    void *arguments[] = {&pointer};
    ffi_cif cif;

    if (!*pointer) return;
    ffi_prep_cif(&cif, FFI_DEFAULT_ABI, 1, &ffi_type_void, argument_types);
    ffi_call(&cif, class->unref, NULL, arguments);
    *pointer = NULL;
}

static const struct class *class_of(lua_State *L)
{
    return lua_touserdata(L, lua_upvalueindex(1));
}

static int close_handle(lua_State *L)
{
    struct handle *handle = luaL_checkudata(L, 1, class_of(L)->name);

    unref(class_of(L), &handle->pointer);
    return 0;
}

static int describe_handle(lua_State *L)
{
    const struct class *class = class_of(L);
    struct handle *handle = luaL_checkudata(L, 1, class->name);

    if (handle->pointer)
        lua_pushfstring(L, "%s: %p", class->name, handle->pointer);
    else
        lua_pushfstring(L, "%s: closed", class->name);
    return 1;
}

static void set_closure(lua_State *L, const char *name, lua_CFunction function, const struct class *class)
{
    lua_pushlightuserdata(L, (void *)class);
    lua_pushcclosure(L, function, 1);
    lua_setfield(L, -2, name);
}

void class_register(lua_State *L, const struct class *class)
{
    luaL_newmetatable(L, class->name);
    set_closure(L, "__gc", close_handle, class);
    set_closure(L, "__close", close_handle, class);
    set_closure(L, "__tostring", describe_handle, class);
    lua_pushstring(L, class->name); /* what getmetatable() gives to scripts */
    lua_setfield(L, -2, "__metatable");
    lua_newtable(L);
    set_closure(L, "close", close_handle, class);
    lua_pushvalue(L, -1);
    lua_setfield(L, -3, "__index");
    lua_remove(L, -2);
}

void **handle_new(lua_State *L, const struct class *class, int kept)
{
    struct handle *handle = lua_newuserdatauv(L, sizeof *handle, kept);

    handle->pointer = NULL;
    luaL_setmetatable(L, class->name);
    return &handle->pointer;
}

void *handle_get(lua_State *L, int index, const struct class *class)
{
    struct handle *handle = luaL_checkudata(L, index, class->name);

    if (!handle->pointer) {
        lua_pushfstring(L, "argument %d is a %s that was closed", index, class->name);
        throw_error(L, GLM52_E_HANDLE, lua_tostring(L, -1), "");
    }
    return handle->pointer;
}

const struct class *class_named(const char *name)
{
    for (const struct class *class = classes; class->name; class++)
        if (!strcmp(class->name + strlen("glm52."), name)) return class;
    return NULL;
}

void *handle_any(lua_State *L, int index)
{
    for (const struct class *class = classes; class->name; class++)
        if (luaL_testudata(L, index, class->name)) return handle_get(L, index, class);
    return NULL;
}
