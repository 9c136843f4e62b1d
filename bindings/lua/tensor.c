/* Tensors: views of a parameter without a copy, copies of what would not last, and memory of the host's own. Elements
 * are read and written as numbers, t[1] .. t[#t]; t.shape, t.dtype; t:bytes() is their memory as a Lua string. */
#include <math.h>
#include <string.h>

#include "binding.h"

static const struct {
    const char *label;
    glm52_dtype type;
    size_t size;
    int whole; /* integers */
} dtypes[] = {{"F32", GLM52_DTYPE_F32, 4, 0}, {"BF16", GLM52_DTYPE_BF16, 2, 0}, {"F64", GLM52_DTYPE_F64, 8, 0},
              {"I32", GLM52_DTYPE_I32, 4, 1}, {"I64", GLM52_DTYPE_I64, 8, 1},   {"U8", GLM52_DTYPE_U8, 1, 1}};

enum { DTYPES = sizeof dtypes / sizeof *dtypes };

static int find_type(glm52_dtype type)
{
    for (int i = 0; i < DTYPES; i++)
        if (dtypes[i].type == type) return i;
    return -1;
}

const char *dtype_label(glm52_dtype type)
{
    int i = find_type(type);

    return i < 0 ? NULL : dtypes[i].label;
}

static glm52_dtype check_dtype(lua_State *L, int index)
{
    const char *label = luaL_checkstring(L, index);

    for (int i = 0; i < DTYPES; i++)
        if (!strcmp(dtypes[i].label, label)) return dtypes[i].type;
    return luaL_argerror(L, index, lua_pushfstring(L, "'%s' is none of F32, BF16, F64, I32, I64, U8", label));
}

/* ---- elements ---- */

static float widen(uint16_t bf16)
{
    uint32_t bits = (uint32_t)bf16 << 16;
    float value;

    memcpy(&value, &bits, sizeof value);
    return value;
}

/* To nearest, ties to even; a NaN stays one. */
static uint16_t narrow(float value)
{
    uint32_t bits;

    memcpy(&bits, &value, sizeof bits);
    if (isnan(value)) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

void push_element(lua_State *L, const void *data, glm52_dtype dtype, uint64_t i)
{
    switch (dtype) {
    case GLM52_DTYPE_F32: lua_pushnumber(L, ((const float *)data)[i]); break;
    case GLM52_DTYPE_BF16: lua_pushnumber(L, widen(((const uint16_t *)data)[i])); break;
    case GLM52_DTYPE_F64: lua_pushnumber(L, ((const double *)data)[i]); break;
    case GLM52_DTYPE_I32: lua_pushinteger(L, ((const int32_t *)data)[i]); break;
    case GLM52_DTYPE_I64: lua_pushinteger(L, ((const int64_t *)data)[i]); break;
    default: lua_pushinteger(L, ((const uint8_t *)data)[i]);
    }
}

/* The number on top of the stack, element number i; `where` is how messages call it. */
static void store_element(lua_State *L, void *data, glm52_dtype dtype, uint64_t i, const char *where)
{
    int whole = dtypes[find_type(dtype)].whole, is_number;
    lua_Integer integer = whole ? lua_tointegerx(L, -1, &is_number) : 0;
    lua_Number number = whole ? 0 : lua_tonumberx(L, -1, &is_number);

    if (!is_number)
        luaL_error(L, "element %I of %s is %s, not %s", (lua_Integer)i + 1, where, luaL_tolstring(L, -1, NULL),
                   whole ? "an integer" : "a number");
    if ((dtype == GLM52_DTYPE_I32 && integer != (int32_t)integer) ||
        (dtype == GLM52_DTYPE_U8 && integer != (uint8_t)integer))
        luaL_error(L, "element %I of %s, %I, does not fit %s", (lua_Integer)i + 1, where, integer, dtype_label(dtype));
    switch (dtype) {
    case GLM52_DTYPE_F32: ((float *)data)[i] = (float)number; break;
    case GLM52_DTYPE_BF16: ((uint16_t *)data)[i] = narrow((float)number); break;
    case GLM52_DTYPE_F64: ((double *)data)[i] = number; break;
    case GLM52_DTYPE_I32: ((int32_t *)data)[i] = (int32_t)integer; break;
    case GLM52_DTYPE_I64: ((int64_t *)data)[i] = integer; break;
    default: ((uint8_t *)data)[i] = (uint8_t)integer;
    }
}

/* ---- tensors ---- */

static struct tensor *tensor_at(lua_State *L, int index)
{
    return luaL_checkudata(L, index, "glm52.tensor");
}

/* Elements of a tensor on the device are out of reach; dtype and shape are not. */
static struct tensor *readable(lua_State *L, int index)
{
    struct tensor *t = tensor_at(L, index);

    if (t->on_device)
        throw_error(L, GLM52_E_UNSUPPORTED, "these values are on the device; Lua reads host memory", "");
    return t;
}

struct tensor *tensor_test(lua_State *L, int index)
{
    return luaL_testudata(L, index, "glm52.tensor") ? readable(L, index) : NULL;
}

/* Pushes a tensor, with memory of its own behind it if `bytes` is not 0. */
static struct tensor *push_tensor(lua_State *L, glm52_dtype dtype, size_t bytes)
{
    struct tensor *t = lua_newuserdatauv(L, sizeof *t + bytes, 1);

    memset(t, 0, sizeof *t);
    t->dtype = dtype;
    t->data = t + 1;
    luaL_setmetatable(L, "glm52.tensor");
    return t;
}

void push_view(lua_State *L, const glm52_view *view, int model)
{
    glm52_model *owner = model ? handle_get(L, model, class_named("model")) : NULL;
    uint64_t count = view->data ? 1 : 0;
    int type = find_type(view->dtype);

    if (view->on_device && !owner)
        throw_error(L, GLM52_E_UNSUPPORTED, "these values are on the device; Lua reads host memory", "");
    if (type < 0) throw_error(L, GLM52_E_UNSUPPORTED, "Lua cannot read elements of this type", "");
    for (int i = 0; i < view->dimensions; i++) count *= (uint64_t)view->shape[i];

    struct tensor *t = push_tensor(L, view->dtype, owner ? 0 : (size_t)count * dtypes[type].size);
    t->dimensions = view->dimensions;
    memcpy(t->shape, view->shape, sizeof t->shape);
    t->count = count;
    if (owner) {
        t->data = view->data;
        t->on_device = view->on_device;
        t->owner = glm52_model_ref(owner);
        lua_pushvalue(L, model); /* keeps the context's userdata, whose log may be called while the model lives */
        lua_setiuservalue(L, -2, 1);
    } else if (count) {
        memcpy(t->data, view->data, (size_t)count * dtypes[type].size);
    }
}

/* glm52.tensor(dtype, how many zeros, or a list) */
int new_tensor(lua_State *L)
{
    glm52_dtype dtype = check_dtype(L, 1);
    int list = lua_istable(L, 2);
    lua_Integer count = list ? luaL_len(L, 2) : luaL_checkinteger(L, 2);

    luaL_argcheck(L, count >= 0 && count <= INT64_C(1) << 40, 2, "not a number of elements");
    size_t bytes = (size_t)count * dtypes[find_type(dtype)].size;
    struct tensor *t = push_tensor(L, dtype, bytes);
    t->dimensions = 1;
    t->shape[0] = count;
    t->count = (uint64_t)count;
    memset(t->data, 0, bytes);
    for (lua_Integer i = 0; list && i < count; i++) {
        lua_geti(L, 2, i + 1);
        store_element(L, t->data, dtype, (uint64_t)i, "the list");
        lua_settop(L, 3);
    }
    return 1;
}

/* t:first(n): a copy of the first n elements. */
static int tensor_first(lua_State *L)
{
    const struct tensor *t = readable(L, 1);
    lua_Integer count = luaL_checkinteger(L, 2);

    luaL_argcheck(L, count >= 0 && (uint64_t)count <= t->count, 2, "more elements than there are");
    size_t bytes = (size_t)count * dtypes[find_type(t->dtype)].size;
    struct tensor *first = push_tensor(L, t->dtype, bytes);
    first->dimensions = 1;
    first->shape[0] = count;
    first->count = (uint64_t)count;
    memcpy(first->data, t->data, bytes);
    return 1;
}

static int tensor_bytes(lua_State *L)
{
    const struct tensor *t = readable(L, 1);

    lua_pushlstring(L, t->data, (size_t)t->count * dtypes[find_type(t->dtype)].size);
    return 1;
}

/* t[i], nil past the end; t.shape, t.dtype, t.bytes */
static int tensor_index(lua_State *L)
{
    const struct tensor *t = tensor_at(L, 1);
    const char *field = lua_type(L, 2) == LUA_TSTRING ? lua_tostring(L, 2) : "";

    if (lua_isinteger(L, 2)) {
        lua_Integer i = lua_tointeger(L, 2);
        if (i < 1 || (uint64_t)i > t->count) return 0;
        push_element(L, readable(L, 1)->data, t->dtype, (uint64_t)i - 1);
    } else if (!strcmp(field, "dtype")) {
        lua_pushstring(L, dtype_label(t->dtype));
    } else if (!strcmp(field, "shape")) {
        lua_createtable(L, t->dimensions, 0);
        for (int i = 0; i < t->dimensions; i++) {
            lua_pushinteger(L, t->shape[i]);
            lua_rawseti(L, -2, i + 1);
        }
    } else if (!strcmp(field, "bytes")) {
        lua_pushcfunction(L, tensor_bytes);
    } else if (!strcmp(field, "first")) {
        lua_pushcfunction(L, tensor_first);
    } else {
        return 0;
    }
    return 1;
}

static int tensor_store(lua_State *L)
{
    const struct tensor *t = readable(L, 1);
    lua_Integer i = luaL_checkinteger(L, 2);

    if (i < 1 || (uint64_t)i > t->count)
        return luaL_argerror(L, 2, lua_pushfstring(L, "%I is no element of 1 .. %I", i, (lua_Integer)t->count));
    lua_settop(L, 3);
    store_element(L, t->data, t->dtype, (uint64_t)i - 1, "the tensor");
    return 0;
}

static int tensor_length(lua_State *L)
{
    lua_pushinteger(L, (lua_Integer)tensor_at(L, 1)->count);
    return 1;
}

static int tensor_text(lua_State *L)
{
    const struct tensor *t = tensor_at(L, 1);

    lua_pushfstring(L, "glm52.tensor %s [", dtype_label(t->dtype));
    for (int i = 0; i < t->dimensions; i++) {
        lua_pushfstring(L, "%s%I", i ? ", " : "", (lua_Integer)t->shape[i]);
        lua_concat(L, 2);
    }
    lua_pushliteral(L, "]");
    lua_concat(L, 2);
    return 1;
}

static int tensor_release(lua_State *L)
{
    glm52_model_unref(&tensor_at(L, 1)->owner);
    return 0;
}

void tensor_register(lua_State *L)
{
    static const luaL_Reg methods[] = {{"__index", tensor_index}, {"__newindex", tensor_store},
                                       {"__len", tensor_length},  {"__tostring", tensor_text},
                                       {"__gc", tensor_release},  {NULL, NULL}};

    luaL_newmetatable(L, "glm52.tensor");
    luaL_setfuncs(L, methods, 0);
    lua_pushliteral(L, "glm52.tensor");
    lua_setfield(L, -2, "__metatable");
    lua_pop(L, 1);
}

/* ---- lists and fields ---- */

void *list_values(lua_State *L, int index, glm52_dtype dtype, uint64_t *count)
{
    const struct tensor *t = tensor_test(L, index);

    if (t && t->dtype == dtype) {
        *count = t->count;
        return t->data;
    } else if (t) {
        luaL_argerror(L, index, lua_pushfstring(L, "a tensor of %s, wanted is %s", dtype_label(t->dtype),
                                                dtype_label(dtype)));
    }
    luaL_checktype(L, index, LUA_TTABLE);
    lua_Integer length = luaL_len(L, index);
    void *values = lua_newuserdatauv(L, (size_t)(length > 0 ? length : 1) * dtypes[find_type(dtype)].size, 0);
    for (lua_Integer i = 0; i < length; i++) {
        int top = lua_gettop(L);
        lua_geti(L, index, i + 1);
        store_element(L, values, dtype, (uint64_t)i, "the list");
        lua_settop(L, top);
    }
    *count = (uint64_t)(length > 0 ? length : 0);
    return values;
}

/* batch:set(field, list or tensor [, dtype]): without a dtype masks are F32, the rest I64, and a tensor is what it
 * is. */
int batch_set(lua_State *L)
{
    glm52_batch *batch = handle_get(L, 1, class_named("batch"));
    const char *field = luaL_checkstring(L, 2);
    const struct tensor *t = tensor_test(L, 3);
    glm52_dtype dtype = strstr(field, "mask") ? GLM52_DTYPE_F32 : GLM52_DTYPE_I64;
    uint64_t count;

    if (!lua_isnoneornil(L, 4))
        dtype = check_dtype(L, 4);
    else if (t)
        dtype = t->dtype;
    const void *values = list_values(L, 3, dtype, &count);
    check(L, glm52_batch_set(batch, field, dtype, values, count));
    return 0;
}

/* model:gradient(number from 1): a copy, for the memory goes with the model's last step. */
int model_gradient(lua_State *L)
{
    glm52_model *model = handle_get(L, 1, class_named("model"));
    glm52_parameter_info info = {.struct_size = sizeof info};
    lua_Integer number = luaL_checkinteger(L, 2);

    luaL_argcheck(L, number >= 1 && number <= UINT32_MAX, 2, "parameters are numbered from 1");
    check(L, glm52_model_parameter(model, (uint32_t)(number - 1), &info));
    push_view(L, &info.gradient, 0);
    return 1;
}
