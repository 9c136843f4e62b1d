/* Handles as userdata, and statuses as error objects. */
#include <string.h>

#include "binding.h"

/* ---- handles ----------------------------------------------------------------------------------------- */

struct handle {
    void *pointer; /* NULL once closed */
};

static const struct class *class_of(lua_State *L)
{
    return lua_touserdata(L, lua_upvalueindex(1));
}

static int close_handle(lua_State *L)
{
    const struct class *class = class_of(L);
    struct handle *handle = luaL_checkudata(L, 1, class->name);

    class->unref(&handle->pointer);
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
    lua_newtable(L);
    luaL_setfuncs(L, class->methods, 0);
    set_closure(L, "close", close_handle, class);
    lua_setfield(L, -2, "__index");
    set_closure(L, "__gc", close_handle, class);
    set_closure(L, "__close", close_handle, class);
    set_closure(L, "__tostring", describe_handle, class);
    lua_pushstring(L, class->name); /* what getmetatable() gives to scripts */
    lua_setfield(L, -2, "__metatable");
    lua_pop(L, 1);
}

void **handle_new(lua_State *L, const struct class *class, int parent, size_t bytes)
{
    parent = lua_absindex(L, parent);

    struct handle *handle = lua_newuserdatauv(L, bytes, 2);
    memset(handle, 0, bytes);
    lua_pushvalue(L, parent);
    lua_setiuservalue(L, -2, 1);
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

void *handle_optional(lua_State *L, int index, const struct class *class)
{
    return lua_isnoneornil(L, index) ? NULL : handle_get(L, index, class);
}

/* ---- errors ------------------------------------------------------------------------------------------ *
 * A table with status, name, message, hint and details; its metatable is glm52.error. `details` is the library's error
 * itself, asked for keys on demand: err.details.key, err.details.path. */

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
    lua_getfield(L, 1, "message");
    lua_getfield(L, 1, "hint");
    const char *message = lua_tostring(L, -2), *hint = lua_tostring(L, -1);

    if (hint && *hint)
        lua_pushfstring(L, "%s\n  %s", message ? message : "", hint);
    else
        lua_pushstring(L, message ? message : "");
    return 1;
}

void error_register(lua_State *L)
{
    luaL_newmetatable(L, "glm52.error");
    lua_pushcfunction(L, error_text);
    lua_setfield(L, -2, "__tostring");
    luaL_newmetatable(L, "glm52.details");
    lua_pushcfunction(L, error_detail);
    lua_setfield(L, -2, "__index");
    lua_pushcfunction(L, error_release);
    lua_setfield(L, -2, "__gc");
    lua_pop(L, 2);
}

static void push_error(lua_State *L, glm52_status status, const char *message, const char *hint)
{
    lua_createtable(L, 0, 5);
    lua_pushinteger(L, status);
    lua_setfield(L, -2, "status");
    lua_pushstring(L, glm52_status_name(status));
    lua_setfield(L, -2, "name");
    lua_pushstring(L, message);
    lua_setfield(L, -2, "message");
    lua_pushstring(L, hint);
    lua_setfield(L, -2, "hint");
    luaL_setmetatable(L, "glm52.error");
}

int throw_error(lua_State *L, glm52_status status, const char *message, const char *hint)
{
    push_error(L, status, message, hint);
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
    push_error(L, status, glm52_error_message(*details), glm52_error_hint(*details));
    lua_insert(L, -2);
    lua_setfield(L, -2, "details");
    lua_error(L);
}

/* ---- views ------------------------------------------------------------------------------------------- */

static const struct {
    const char *label;
    glm52_dtype type;
} dtypes[] = {{"F32", GLM52_DTYPE_F32}, {"BF16", GLM52_DTYPE_BF16}, {"F64", GLM52_DTYPE_F64},
              {"I32", GLM52_DTYPE_I32}, {"I64", GLM52_DTYPE_I64},   {"U8", GLM52_DTYPE_U8}};

const char *dtype_label(glm52_dtype type)
{
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++)
        if (dtypes[i].type == type) return dtypes[i].label;
    return "?";
}

static float widen(uint16_t bf16)
{
    uint32_t bits = (uint32_t)bf16 << 16;
    float value;

    memcpy(&value, &bits, sizeof value);
    return value;
}

static void push_element(lua_State *L, const glm52_view *view, size_t i)
{
    switch (view->dtype) {
    case GLM52_DTYPE_F32: lua_pushnumber(L, ((const float *)view->data)[i]); break;
    case GLM52_DTYPE_BF16: lua_pushnumber(L, widen(((const uint16_t *)view->data)[i])); break;
    case GLM52_DTYPE_F64: lua_pushnumber(L, ((const double *)view->data)[i]); break;
    case GLM52_DTYPE_I32: lua_pushinteger(L, ((const int32_t *)view->data)[i]); break;
    case GLM52_DTYPE_I64: lua_pushinteger(L, ((const int64_t *)view->data)[i]); break;
    default: lua_pushinteger(L, ((const uint8_t *)view->data)[i]);
    }
}

static void push_shape(lua_State *L, const glm52_view *view)
{
    lua_createtable(L, view->dimensions, 0);
    for (int i = 0; i < view->dimensions; i++) {
        lua_pushinteger(L, view->shape[i]);
        lua_rawseti(L, -2, i + 1);
    }
}

void push_view(lua_State *L, const glm52_view *view)
{
    size_t count = 1;

    if (view->on_device)
        throw_error(L, GLM52_E_UNSUPPORTED, "these values are on the device; Lua reads host memory", "");
    if (!strcmp(dtype_label(view->dtype), "?"))
        throw_error(L, GLM52_E_UNSUPPORTED, "Lua cannot read elements of this type", "");
    for (int i = 0; i < view->dimensions; i++) count *= (size_t)view->shape[i];
    if (!view->data) count = 0;
    if (count > INT32_MAX) throw_error(L, GLM52_E_UNSUPPORTED, "too many elements for a Lua table", "");

    lua_createtable(L, (int)count, 2);
    for (size_t i = 0; i < count; i++) {
        push_element(L, view, i);
        lua_rawseti(L, -2, (lua_Integer)i + 1);
    }
    push_shape(L, view);
    lua_setfield(L, -2, "shape");
    lua_pushstring(L, dtype_label(view->dtype));
    lua_setfield(L, -2, "dtype");
}
