/* Functions of the user's shared objects, by a signature in words:
 * glm52.native("libreward.so", "score", "double(ptr i32, i64)"). What it gives is called like a Lua function.
 *
 * Types: void (result only), i32, u32, i64, u64, f32, f64 (int, float, double), str (const char *, nil is NULL), ptr T
 * with T one of u8, i32, i64, f32, f64 (a tensor, shared; a list, copied; nil), ptr (a tensor, handle, nil or
 * pointer). */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include <ffi.h>

#include "binding.h"

enum type { VOID, I32, U32, I64, U64, F32, F64, STR, PTR, PTR_U8, PTR_I32, PTR_I64, PTR_F32, PTR_F64, TYPES };

static const struct {
    const char *name, *alias;
    ffi_type *ffi;
    glm52_dtype element;
} types[TYPES] = {
    [VOID] = {"void", "void", &ffi_type_void, 0},      [I32] = {"i32", "int", &ffi_type_sint32, 0},
    [U32] = {"u32", "u32", &ffi_type_uint32, 0},       [I64] = {"i64", "i64", &ffi_type_sint64, 0},
    [U64] = {"u64", "u64", &ffi_type_uint64, 0},       [F32] = {"f32", "float", &ffi_type_float, 0},
    [F64] = {"f64", "double", &ffi_type_double, 0},    [STR] = {"str", "str", &ffi_type_pointer, 0},
    [PTR] = {"ptr", "ptr", &ffi_type_pointer, 0},
    [PTR_U8] = {"ptr u8", "ptr u8", &ffi_type_pointer, GLM52_DTYPE_U8},
    [PTR_I32] = {"ptr i32", "ptr int", &ffi_type_pointer, GLM52_DTYPE_I32},
    [PTR_I64] = {"ptr i64", "ptr i64", &ffi_type_pointer, GLM52_DTYPE_I64},
    [PTR_F32] = {"ptr f32", "ptr float", &ffi_type_pointer, GLM52_DTYPE_F32},
    [PTR_F64] = {"ptr f64", "ptr double", &ffi_type_pointer, GLM52_DTYPE_F64},
};

enum { ARGUMENTS = 12, WORDS = 160 };

struct signature {
    enum type result, argument[ARGUMENTS];
    int count;
    char text[WORDS]; /* in one spelling: "f64(ptr i32,i64)" */
};

struct native {
    void *library;
    void (*address)(void);
    struct signature signature;
    ffi_cif cif;
    ffi_type *types[ARGUMENTS];
    char name[64];
};

/* ---- signatures ---- */

/* The type spelled by `length` characters (blanks around and doubled within do not count), or TYPES. */
static enum type find_type(const char *text, size_t length)
{
    char word[24];
    size_t n = 0;

    for (size_t i = 0; i < length; i++) {
        if (text[i] == ' ' && (!n || word[n - 1] == ' ')) continue;
        if (n + 1 == sizeof word) return TYPES;
        word[n++] = text[i];
    }
    while (n && word[n - 1] == ' ') n--;
    word[n] = 0;
    for (enum type type = 0; type < TYPES; type++)
        if (!strcmp(word, types[type].name) || !strcmp(word, types[type].alias)) return type;
    return TYPES;
}

/* NULL, or what is wrong (pushed). */
static const char *parse(lua_State *L, const char *text, struct signature *s)
{
    const char *open = strchr(text, '('), *close = strrchr(text, ')'), *at;

    s->count = 0;
    if (!open || !close || close < open || close[1 + strspn(close + 1, " ")])
        return "it is not of the form result(argument, ...)";
    if ((s->result = find_type(text, (size_t)(open - text))) == TYPES || s->result > PTR)
        return lua_pushfstring(L, "its result, %s, is none of void i32 u32 i64 u64 f32 f64 str ptr",
                               lua_pushlstring(L, text, (size_t)(open - text)));
    for (at = open + 1; at + strspn(at, " ") < close || s->count; s->count++) {
        size_t length = strcspn(at, ",)");
        enum type type = find_type(at, length);
        if (s->count == ARGUMENTS) return lua_pushfstring(L, "it has more than %d arguments", ARGUMENTS);
        if (type == TYPES || type == VOID)
            return lua_pushfstring(L, "argument %d, %s, is none of i32 u32 i64 u64 f32 f64 str ptr, and ptr to u8 i32 "
                                      "i64 f32 f64", s->count + 1, lua_pushlstring(L, at, length));
        s->argument[s->count] = type;
        at += length + 1;
        if (at > close) {
            s->count++;
            break;
        }
    }

    int n = snprintf(s->text, WORDS, "%s(", types[s->result].name);
    for (int i = 0; i < s->count; i++)
        n += snprintf(s->text + n, WORDS - (size_t)n, "%s%s", i ? "," : "", types[s->argument[i]].name);
    snprintf(s->text + n, WORDS - (size_t)n, ")");
    return NULL;
}

/* ---- calls ---- */

union cell {
    int32_t i32;
    uint32_t u32;
    int64_t i64;
    uint64_t u64;
    float f32;
    double f64;
    const void *pointer;
    ffi_arg narrow;
};

static int refuse(lua_State *L, const struct native *native, int index, const char *wanted)
{
    const char *message = lua_pushfstring(L, "argument %d of %s is a %s; %s", index - 1, native->name,
                                          luaL_typename(L, index), wanted);

    return throw_error(L, GLM52_E_INVALID, message, lua_pushfstring(L, "its signature is %s", native->signature.text));
}

static int64_t get_integer(lua_State *L, const struct native *native, int index, int64_t least, int64_t most)
{
    int is_integer;
    lua_Integer value = lua_tointegerx(L, index, &is_integer);

    if (!is_integer || lua_type(L, index) != LUA_TNUMBER) refuse(L, native, index, "an integer is wanted");
    if (value < least || value > most)
        throw_error(L, GLM52_E_INVALID,
                    lua_pushfstring(L, "argument %d of %s, %I, does not fit %s", index - 1, native->name, value,
                                    types[native->signature.argument[index - 2]].name), "");
    return value;
}

static const void *get_pointer(lua_State *L, const struct native *native, int index, enum type type)
{
    const struct tensor *tensor = tensor_test(L, index);
    glm52_dtype element = types[type].element;
    uint64_t count;

    if (lua_isnil(L, index)) return NULL;
    if (tensor && (!element || tensor->dtype == element)) return tensor->data;
    if (tensor)
        refuse(L, native, index,
               lua_pushfstring(L, "of %s, and not of %s", dtype_label(tensor->dtype), dtype_label(element)));
    if (element == GLM52_DTYPE_U8 && lua_type(L, index) == LUA_TSTRING) return lua_tostring(L, index);
    if (element && lua_istable(L, index)) return list_values(L, index, element, &count);
    if (element) refuse(L, native, index, lua_pushfstring(L, "a list or tensor of %s is wanted", dtype_label(element)));
    if (lua_islightuserdata(L, index)) return lua_touserdata(L, index);
    const void *handle = handle_any(L, index);
    if (!handle) refuse(L, native, index, "a tensor, a handle of glm52 or nil is wanted");
    return handle;
}

static void get_argument(lua_State *L, const struct native *native, int index, union cell *to)
{
    enum type type = native->signature.argument[index - 2];

    switch (type) {
    case I32: to->i32 = (int32_t)get_integer(L, native, index, INT32_MIN, INT32_MAX); break;
    case U32: to->u32 = (uint32_t)get_integer(L, native, index, 0, UINT32_MAX); break;
    case I64: to->i64 = get_integer(L, native, index, INT64_MIN, INT64_MAX); break;
    case U64: to->u64 = (uint64_t)get_integer(L, native, index, 0, INT64_MAX); break;
    case F32:
    case F64:
        if (lua_type(L, index) != LUA_TNUMBER) refuse(L, native, index, "a number is wanted");
        if (type == F32)
            to->f32 = (float)lua_tonumber(L, index);
        else
            to->f64 = lua_tonumber(L, index);
        break;
    case STR:
        if (!lua_isnil(L, index) && lua_type(L, index) != LUA_TSTRING)
            refuse(L, native, index, "a text or nil is wanted");
        to->pointer = lua_tostring(L, index);
        break;
    default: to->pointer = get_pointer(L, native, index, type);
    }
}

static int push_result(lua_State *L, enum type type, const union cell *result)
{
    switch (type) {
    case VOID: return 0;
    case I32: lua_pushinteger(L, (int32_t)result->narrow); break;
    case U32: lua_pushinteger(L, (uint32_t)result->narrow); break;
    case I64:
    case U64: lua_pushinteger(L, result->i64); break;
    case F32: lua_pushnumber(L, (lua_Number)result->f32); break;
    case F64: lua_pushnumber(L, result->f64); break;
    case STR: lua_pushstring(L, result->pointer); break;
    default:
        if (result->pointer)
            lua_pushlightuserdata(L, (void *)(uintptr_t)result->pointer);
        else
            lua_pushnil(L);
    }
    return 1;
}

/* native(...): argument 1 is the function itself. */
static int call_native(lua_State *L)
{
    struct native *native = luaL_checkudata(L, 1, "glm52.native");
    union cell argument[ARGUMENTS], result = {0};
    void *addresses[ARGUMENTS];
    int given = lua_gettop(L) - 1, count = native->signature.count;

    if (given != count)
        throw_error(L, GLM52_E_INVALID,
                    lua_pushfstring(L, "%s takes %d arguments, and got %d", native->name, count, given),
                    lua_pushfstring(L, "its signature is %s", native->signature.text));
    luaL_checkstack(L, 2 * ARGUMENTS, NULL);
    for (int i = 0; i < count; i++) {
        get_argument(L, native, i + 2, &argument[i]);
        addresses[i] = &argument[i];
    }
    ffi_call(&native->cif, native->address, &result, addresses);
    return push_result(L, native->signature.result, &result);
}

/* ---- life ---- */

static int release_native(lua_State *L)
{
    struct native *native = luaL_checkudata(L, 1, "glm52.native");

    if (native->library) dlclose(native->library);
    native->library = NULL;
    return 0;
}

static int describe_native(lua_State *L)
{
    const struct native *native = luaL_checkudata(L, 1, "glm52.native");

    lua_pushfstring(L, "glm52.native %s, %s", native->name, native->signature.text);
    return 1;
}

void native_register(lua_State *L)
{
    static const luaL_Reg methods[] = {
        {"__call", call_native}, {"__gc", release_native}, {"__tostring", describe_native}, {NULL, NULL}};

    luaL_newmetatable(L, "glm52.native");
    luaL_setfuncs(L, methods, 0);
    lua_pushliteral(L, "glm52.native");
    lua_setfield(L, -2, "__metatable");
    lua_pop(L, 1);
}

void (*native_address(lua_State *L, int index, const char *signature))(void)
{
    const struct native *native = luaL_testudata(L, index, "glm52.native");

    return native && !strcmp(native->signature.text, signature) ? native->address : NULL;
}

/* A name without a slash is one for the loader, and then one in the current directory. */
static void *open_library(const char *path)
{
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    char here[4096];

    if (library || strchr(path, '/') || snprintf(here, sizeof here, "./%s", path) >= (int)sizeof here) return library;
    return dlopen(here, RTLD_NOW | RTLD_LOCAL);
}

/* glm52.native(path, symbol, signature) */
int new_native(lua_State *L)
{
    const char *path = luaL_checkstring(L, 1), *symbol = luaL_checkstring(L, 2), *text = luaL_checkstring(L, 3);
    struct native *native = lua_newuserdatauv(L, sizeof *native, 0);
    void *address;

    memset(native, 0, sizeof *native);
    luaL_setmetatable(L, "glm52.native");
    snprintf(native->name, sizeof native->name, "%s", symbol);
    const char *mistake = parse(L, text, &native->signature);
    if (mistake)
        throw_error(L, GLM52_E_INVALID, lua_pushfstring(L, "the signature of %s, \"%s\": %s", symbol, text, mistake),
                    "write one like \"double(ptr i32, i64)\"");
    if (!(native->library = open_library(path)))
        throw_error(L, GLM52_E_IO, lua_pushfstring(L, "cannot open %s: %s", path, dlerror()),
                    "name a shared object that the loader finds, or its path");
    if (!(address = dlsym(native->library, symbol)))
        throw_error(L, GLM52_E_INVALID, lua_pushfstring(L, "%s has no function %s", path, symbol),
                    "is it static, or a C++ function without extern \"C\"?");
    memcpy(&native->address, &address, sizeof address);
    for (int i = 0; i < native->signature.count; i++) native->types[i] = types[native->signature.argument[i]].ffi;
    if (ffi_prep_cif(&native->cif, FFI_DEFAULT_ABI, (unsigned)native->signature.count,
                     types[native->signature.result].ffi, native->types) != FFI_OK)
        throw_error(L, GLM52_E_UNSUPPORTED, lua_pushfstring(L, "libffi cannot call %s here", symbol), "");
    lua_pushvalue(L, 4); /* messages of parse() are above */
    return 1;
}
