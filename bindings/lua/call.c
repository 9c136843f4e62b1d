/* Calls of public functions through libffi, by the table that abi/gen.lua writes. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <ffi.h>

#include "call.h"

/* A function, ready to be called; the upvalue of its closure. */
struct prepared {
    const struct function *function;
    ffi_cif cif;
    ffi_type *types[PARAMETERS];
    int each; /* the parameter of that role, or -1 */
};

union cell {
    int32_t int32;
    uint32_t uint32;
    int64_t int64;
    uint64_t uint64;
    double number;
    const char *text;
    void *pointer;
    ffi_arg narrow; /* what libffi widens small results to */
};

struct call {
    union cell argument[PARAMETERS], output[PARAMETERS], result;
    int slot[PARAMETERS], result_slot; /* stack indices of handles to come */
};

/* ---- arguments ---- */

static int64_t get_integer(lua_State *L, int index, int64_t least, int64_t most, int boolean)
{
    if (boolean && lua_isboolean(L, index)) return lua_toboolean(L, index);

    lua_Integer value = luaL_checkinteger(L, index);
    if (value < least || value > most)
        luaL_argerror(L, index, lua_pushfstring(L, "%I is out of range %I .. %I", value, (lua_Integer)least,
                                                (lua_Integer)most));
    return value;
}

/* Text as it is, true and false, and numbers with as many digits as they have. */
static const char *get_text(lua_State *L, int index)
{
    char digits[40];
    size_t length;

    if (lua_isboolean(L, index)) return lua_toboolean(L, index) ? "true" : "false";
    if (lua_type(L, index) == LUA_TNUMBER && !lua_isinteger(L, index)) {
        lua_Number value = lua_tonumber(L, index);
        for (int precision = 15; precision <= 17; precision++) {
            snprintf(digits, sizeof digits, "%.*g", precision, value);
            if (strtod(digits, NULL) == value) break;
        }
        for (char *c = digits; *c; c++)
            if (*c == ',') *c = '.'; /* of the locale */
        lua_pushstring(L, digits);
        lua_replace(L, index);
    }
    const char *text = luaL_checklstring(L, index, &length);
    if (strlen(text) != length) luaL_argerror(L, index, "a text with a zero byte in it");
    return text;
}

static int32_t get_enumerator(lua_State *L, int index, const struct enumeration *e)
{
    if (lua_isinteger(L, index)) return (int32_t)get_integer(L, index, INT32_MIN, INT32_MAX, 0);

    const char *label = luaL_checkstring(L, index);
    for (const struct enumerator *v = e->values; v->label; v++)
        if (!strcmp(v->label, label)) return v->value;
    lua_pushfstring(L, "'%s' is no %s; it is one of", label, e->name);
    for (const struct enumerator *v = e->values; v->label; v++) {
        lua_pushfstring(L, " %s", v->label);
        lua_concat(L, 2);
    }
    return luaL_argerror(L, index, lua_tostring(L, -1));
}

static void get_value(lua_State *L, int index, const struct parameter *p, union cell *to)
{
    int absent = lua_isnoneornil(L, index);

    memset(to, 0, sizeof *to);
    if (absent && p->nullable) return;
    switch (p->kind) {
    case KIND_INT32:
        to->int32 = absent && p->optional ? (int32_t)p->otherwise
                                          : (int32_t)get_integer(L, index, INT32_MIN, INT32_MAX, p->boolean);
        break;
    case KIND_UINT32:
        to->uint32 = absent && p->optional ? (uint32_t)p->otherwise : (uint32_t)get_integer(L, index, 0, UINT32_MAX, 0);
        break;
    case KIND_INT64:
        to->int64 = absent && p->optional ? (int64_t)p->otherwise : get_integer(L, index, INT64_MIN, INT64_MAX, 0);
        break;
    case KIND_UINT64:
        to->uint64 = absent && p->optional ? (uint64_t)p->otherwise : (uint64_t)get_integer(L, index, 0, INT64_MAX, 0);
        break;
    case KIND_DOUBLE: to->number = absent && p->optional ? p->otherwise : luaL_checknumber(L, index); break;
    case KIND_STRING: to->text = get_text(L, index); break;
    case KIND_ENUM:
        to->int32 = absent && p->optional ? (int32_t)p->otherwise : get_enumerator(L, index, p->of);
        break;
    default: to->pointer = handle_get(L, index, p->of);
    }
}

/* One handle, or a list of them. */
static void **get_handles(lua_State *L, int index, const struct class *class, uint64_t *count)
{
    int list = lua_istable(L, index);
    lua_Integer length = list ? luaL_len(L, index) : 1;

    luaL_argcheck(L, length >= 1 && length <= INT32_MAX, index, lua_pushfstring(L, "an empty list of %s", class->name));
    void **handles = lua_newuserdatauv(L, (size_t)length * sizeof *handles, 0);
    for (lua_Integer i = 0; i < length; i++) {
        if (list)
            lua_geti(L, index, i + 1);
        else
            lua_pushvalue(L, index);
        handles[i] = handle_get(L, lua_gettop(L), class);
        lua_pop(L, 1); /* the list or the stack still holds it */
    }
    *count = (uint64_t)length;
    return handles;
}

static glm52_dtype element_type(enum kind kind)
{
    return kind == KIND_INT32 ? GLM52_DTYPE_I32 : kind == KIND_INT64 ? GLM52_DTYPE_I64 : GLM52_DTYPE_F64;
}

static void set_count(const struct parameter *p, union cell *to, uint64_t count)
{
    if (p->kind == KIND_UINT32)
        to->uint32 = (uint32_t)count;
    else
        to->uint64 = count;
}

static void get_list(lua_State *L, int index, const struct function *f, int i, struct call *call)
{
    const struct parameter *p = &f->parameters[i];
    uint64_t count;

    call->argument[i].pointer = p->kind == KIND_HANDLE ? (void *)get_handles(L, index, p->of, &count)
                                                       : list_values(L, index, element_type(p->kind), &count);
    for (int k = 0; k < f->count; k++)
        if (f->parameters[k].role == ROLE_COUNT && f->parameters[k].other == i)
            set_count(&f->parameters[k], &call->argument[k], count);
}

/* Memory of the list that parameter i says the capacity of. */
static void get_capacity(lua_State *L, int index, const struct function *f, int i, struct call *call)
{
    const struct parameter *p = &f->parameters[i];
    int64_t capacity = get_integer(L, index, 0, INT32_MAX, 0);
    size_t bytes = (size_t)(capacity ? capacity : 1) * (f->parameters[p->other].kind == KIND_INT32 ? 4 : 8);

    set_count(p, &call->argument[i], (uint64_t)capacity);
    call->argument[p->other].pointer = lua_newuserdatauv(L, bytes, 0);
    call->output[p->other].uint64 = (uint64_t)capacity; /* unless FILLED says how many */
}

/* Handles are made before the call, so that none is lost for lack of memory after it; so is the memory of structs. */
static void prepare_output(lua_State *L, const struct function *f, int i, struct call *call)
{
    const struct parameter *p = &f->parameters[i];
    size_t bytes = p->kind == KIND_VIEW ? sizeof(glm52_view) : 0;
    int kept = 0;

    call->output[i].uint64 = 0;
    call->argument[i].pointer = &call->output[i];
    if (p->kind == KIND_STRUCT) bytes = ((const struct layout *)p->of)->bytes;
    if (bytes) {
        call->argument[i].pointer = memset(lua_newuserdatauv(L, bytes, 0), 0, bytes);
    } else if (p->kind == KIND_HANDLE) {
        handle_new(L, p->of, f->count);
        call->slot[i] = lua_gettop(L);
        for (int k = 0, index = 1; k < f->count; k++) {
            if (f->parameters[k].role > ROLE_LIST_IN && f->parameters[k].role != ROLE_CAPACITY) continue;
            if (f->parameters[k].keeps) {
                lua_pushvalue(L, index);
                lua_setiuservalue(L, -2, ++kept);
            }
            index++;
        }
    }
}

static void get_arguments(lua_State *L, const struct function *f, struct call *call)
{
    int index = 1;

    luaL_checkstack(L, 2 * PARAMETERS, NULL);
    for (int i = 0; i < f->count; i++) { /* missing ones are nil, so that what is pushed now is not taken for them */
        enum role role = f->parameters[i].role;
        index += role == ROLE_IN || role == ROLE_EACH || role == ROLE_LIST_IN || role == ROLE_CAPACITY;
    }
    lua_settop(L, index - 1);
    index = 1;
    for (int i = 0; i < f->count; i++) {
        const struct parameter *p = &f->parameters[i];
        switch (p->role) {
        case ROLE_IN: get_value(L, index++, p, &call->argument[i]); break;
        case ROLE_EACH:
            if (!lua_isnil(L, index))
                call->argument[i].uint32 = (uint32_t)(get_integer(L, index, 1, UINT32_MAX, 0) - 1);
            index++;
            break;
        case ROLE_LIST_IN: get_list(L, index++, f, i, call); break;
        case ROLE_CAPACITY: get_capacity(L, index++, f, i, call); break;
        default: break;
        }
    }
    for (int i = 0; i < f->count; i++)
        if (f->parameters[i].role == ROLE_OUT || f->parameters[i].role == ROLE_FILLED) prepare_output(L, f, i, call);
    if (f->result.kind == KIND_HANDLE) {
        handle_new(L, f->result.of, 0);
        call->result_slot = lua_gettop(L);
    }
}

/* ---- results ---- */

static void push_struct(lua_State *L, const struct layout *layout, const char *from);

static void push_value(lua_State *L, const struct parameter *p, const union cell *from)
{
    const struct enumerator *v = p->kind == KIND_ENUM ? ((const struct enumeration *)p->of)->values : NULL;

    switch (p->kind) {
    case KIND_INT32:
        if (p->boolean)
            lua_pushboolean(L, from->int32);
        else
            lua_pushinteger(L, from->int32);
        break;
    case KIND_UINT32: lua_pushinteger(L, from->uint32); break;
    case KIND_INT64:
    case KIND_UINT64: lua_pushinteger(L, from->int64); break;
    case KIND_DOUBLE: lua_pushnumber(L, from->number); break;
    case KIND_STRING: lua_pushstring(L, from->text); break;
    case KIND_ENUM:
        while (v->label && v->value != from->int32) v++;
        if (v->label)
            lua_pushstring(L, v->label);
        else
            lua_pushinteger(L, from->int32);
        break;
    default:
        if (from->pointer)
            lua_pushlightuserdata(L, from->pointer);
        else
            lua_pushnil(L);
    }
}

/* Argument 1 is the model whose parameter a lasting view is of. */
static void push_struct(lua_State *L, const struct layout *layout, const char *from)
{
    lua_newtable(L);
    for (const struct field *field = layout->fields; field->name; field++) {
        const struct parameter as = {.kind = field->kind, .boolean = field->boolean, .of = field->of};
        union cell value;

        if (field->kind == KIND_VIEW) {
            push_view(L, (const glm52_view *)(const void *)(from + field->offset), 1);
        } else {
            memset(&value, 0, sizeof value);
            memcpy(&value, from + field->offset,
                   field->kind == KIND_INT32 || field->kind == KIND_UINT32 || field->kind == KIND_ENUM ? 4 : 8);
            push_value(L, &as, &value);
        }
        lua_setfield(L, -2, field->name);
    }
}

static void push_list(lua_State *L, const struct parameter *p, const void *values, uint64_t count)
{
    lua_createtable(L, (int)count, 0);
    for (uint64_t i = 0; i < count; i++) {
        push_element(L, values, element_type(p->kind), i);
        lua_rawseti(L, -2, (lua_Integer)i + 1);
    }
}

/* The handle that was made for it becomes that of the library's object. */
static void push_handle(lua_State *L, int slot, void *object)
{
    *(void **)lua_touserdata(L, slot) = object;
    lua_pushvalue(L, slot);
}

static void push_output(lua_State *L, const struct parameter *p, int i, const struct call *call)
{
    if (p->role == ROLE_LIST_OUT) {
        push_list(L, p, call->argument[i].pointer, call->output[i].uint64);
    } else if (p->kind == KIND_HANDLE) {
        push_handle(L, call->slot[i], call->output[i].pointer);
    } else if (p->kind == KIND_STRUCT) {
        push_struct(L, p->of, call->argument[i].pointer);
    } else if (p->kind == KIND_VIEW) {
        push_view(L, call->argument[i].pointer, 0);
    } else {
        push_value(L, p, &call->output[i]);
    }
}

static int push_results(lua_State *L, const struct function *f, struct call *call)
{
    int top = lua_gettop(L);

    if (f->result.kind == KIND_HANDLE && call->result.pointer)
        push_handle(L, call->result_slot, call->result.pointer);
    else if (f->result.kind != KIND_VOID && f->result.kind != KIND_STATUS)
        push_value(L, &f->result, &call->result);
    for (int i = 0; i < f->count; i++)
        if (f->parameters[i].role == ROLE_FILLED) call->output[f->parameters[i].other].uint64 = call->output[i].uint64;
    for (int i = 0; i < f->count; i++)
        if (f->parameters[i].role == ROLE_OUT || f->parameters[i].role == ROLE_LIST_OUT)
            push_output(L, &f->parameters[i], i, call);
    return lua_gettop(L) - top;
}

/* ---- calls ---- */

static glm52_status perform(struct prepared *p, struct call *call)
{
    const struct function *f = p->function;
    void *addresses[PARAMETERS];

    for (int i = 0; i < f->count; i++) {
        const struct parameter *parameter = &f->parameters[i];
        addresses[i] = &call->argument[i];
        if (parameter->role != ROLE_OUT) continue;
        if (parameter->kind == KIND_STRUCT)
            *(uint32_t *)call->argument[i].pointer = (uint32_t)((const struct layout *)parameter->of)->bytes;
        else if (parameter->kind == KIND_VIEW)
            *(uint32_t *)call->argument[i].pointer = sizeof(glm52_view);
    }
    ffi_call(&p->cif, f->address, &call->result, addresses);
    if (f->result.kind != KIND_STATUS && f->result.kind != KIND_INT32) return GLM52_OK;
    call->result.int64 = (int32_t)call->result.narrow;
    return f->result.kind == KIND_STATUS ? call->result.int32 : GLM52_OK;
}

/* Results for the indices 0 .. as one list: what ends it is INVALID, or NULL. The first may not fail. */
static int collect(lua_State *L, struct prepared *p, struct call *call)
{
    int list;

    lua_newtable(L);
    list = lua_gettop(L);
    for (uint32_t i = 0;; i++) {
        call->argument[p->each].uint32 = i;
        glm52_status status = perform(p, call);
        if (i && status == GLM52_E_INVALID) break;
        check(L, status);
        push_results(L, p->function, call);
        lua_settop(L, list + 1);
        if (lua_isnil(L, -1)) break;
        lua_rawseti(L, list, (lua_Integer)i + 1);
    }
    lua_settop(L, list);
    return 1;
}

static int invoke(lua_State *L)
{
    struct prepared *p = lua_touserdata(L, lua_upvalueindex(1));
    struct call call;

    get_arguments(L, p->function, &call);
    if (p->each >= 0 && lua_isnil(L, p->each + 1)) return collect(L, p, &call);
    check(L, perform(p, &call));
    return push_results(L, p->function, &call);
}

static ffi_type *type_of(const struct parameter *p)
{
    if (p->role >= ROLE_LIST_OUT || p->role == ROLE_LIST_IN) return &ffi_type_pointer;
    switch (p->kind) {
    case KIND_VOID: return &ffi_type_void;
    case KIND_STATUS:
    case KIND_ENUM:
    case KIND_INT32: return &ffi_type_sint32;
    case KIND_UINT32: return &ffi_type_uint32;
    case KIND_INT64: return &ffi_type_sint64;
    case KIND_UINT64: return &ffi_type_uint64;
    case KIND_DOUBLE: return &ffi_type_double;
    default: return &ffi_type_pointer;
    }
}

void push_function(lua_State *L, const struct function *function)
{
    struct prepared *p = lua_newuserdatauv(L, sizeof *p, 0);
    struct parameter result = function->result;

    p->function = function;
    p->each = -1;
    result.role = ROLE_IN; /* by value */
    for (int i = 0; i < function->count; i++) {
        p->types[i] = type_of(&function->parameters[i]);
        if (function->parameters[i].role == ROLE_EACH) p->each = i;
    }
    if (ffi_prep_cif(&p->cif, FFI_DEFAULT_ABI, (unsigned)function->count, type_of(&result), p->types) != FFI_OK)
        throw_error(L, GLM52_E_UNSUPPORTED, lua_pushfstring(L, "libffi cannot call %s here", function->name), "");
    lua_pushcclosure(L, invoke, 1);
}
