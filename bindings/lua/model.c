/* Lua classes model and batch. */
#include <stdlib.h>
#include <string.h>

#include "binding.h"

/* ---- model ------------------------------------------------------------------------------------------- */

DEFINE_UNREF(model)

/* glm52.model(context, config) */
int new_model(lua_State *L)
{
    glm52_context *context = handle_get(L, 1, &context_class);
    glm52_config *config = handle_get(L, 2, &config_class);
    void **handle = handle_new(L, &model_class, 1, sizeof *handle);
    glm52_model *model = NULL;

    check(L, glm52_model_create(context, config, &model));
    *handle = model;
    return 1;
}

/* glm52.load(context, directory [, config]) */
int load_model(lua_State *L)
{
    glm52_context *context = handle_get(L, 1, &context_class);
    const char *directory = luaL_checkstring(L, 2);
    glm52_config *config = handle_optional(L, 3, &config_class);
    void **handle = handle_new(L, &model_class, 1, sizeof *handle);
    glm52_model *model = NULL;

    check(L, glm52_model_load(context, config, directory, &model));
    *handle = model;
    return 1;
}

/* model:save(directory [, "F32" or "BF16"]) */
static int model_save(lua_State *L)
{
    static const char *const names[] = {"held", "F32", "BF16", NULL};
    static const glm52_dtype types[] = {0, GLM52_DTYPE_F32, GLM52_DTYPE_BF16};
    glm52_model *model = handle_get(L, 1, &model_class);
    const char *directory = luaL_checkstring(L, 2);

    check(L, glm52_model_save(model, directory, types[luaL_checkoption(L, 3, "held", names)]));
    return 0;
}

static int model_describe(lua_State *L)
{
    const char *line;

    check(L, glm52_model_describe(handle_get(L, 1, &model_class), &line));
    lua_pushstring(L, line);
    return 1;
}

/* model:parameter_count(): tensors, elements. */
static int model_parameter_count(lua_State *L)
{
    uint32_t tensors;
    uint64_t elements;

    check(L, glm52_model_parameter_count(handle_get(L, 1, &model_class), &tensors, &elements));
    lua_pushinteger(L, tensors);
    lua_pushinteger(L, (lua_Integer)elements);
    return 2;
}

/* A parameter by name, or by number from 1. */
static glm52_parameter_info find_parameter(lua_State *L)
{
    glm52_model *model = handle_get(L, 1, &model_class);
    glm52_parameter_info info = {.struct_size = sizeof info};
    uint32_t index;

    if (lua_isinteger(L, 2)) {
        lua_Integer number = lua_tointeger(L, 2);
        luaL_argcheck(L, number >= 1 && number <= UINT32_MAX, 2, "parameters are numbered from 1");
        index = (uint32_t)(number - 1);
    } else {
        check(L, glm52_model_parameter_find(model, luaL_checkstring(L, 2), &index));
    }
    check(L, glm52_model_parameter(model, index, &info));
    return info;
}

/* model:parameter(name or number): {name, policy, dtype, shape}. */
static int model_parameter(lua_State *L)
{
    glm52_parameter_info info = find_parameter(L);

    lua_createtable(L, 0, 4);
    lua_pushstring(L, info.name);
    lua_setfield(L, -2, "name");
    lua_pushstring(L, info.policy);
    lua_setfield(L, -2, "policy");
    lua_pushstring(L, dtype_label(info.value.dtype));
    lua_setfield(L, -2, "dtype");
    lua_createtable(L, info.value.dimensions, 0);
    for (int i = 0; i < info.value.dimensions; i++) {
        lua_pushinteger(L, info.value.shape[i]);
        lua_rawseti(L, -2, i + 1);
    }
    lua_setfield(L, -2, "shape");
    return 1;
}

static int model_value(lua_State *L)
{
    glm52_parameter_info info = find_parameter(L);

    push_view(L, &info.value);
    return 1;
}

static int model_gradient(lua_State *L)
{
    glm52_parameter_info info = find_parameter(L);

    push_view(L, &info.gradient);
    return 1;
}

/* model:forward(batch, "logits ce_rows"): batch:get() reads what was kept. */
static int model_forward(lua_State *L)
{
    glm52_model *model = handle_get(L, 1, &model_class);
    glm52_batch *batch = handle_get(L, 2, &batch_class);

    check(L, glm52_model_forward(model, batch, luaL_checkstring(L, 3)));
    return 0;
}

/* model:generate(tokens, limit [, temperature [, seed]]): the tokens that continue the list `tokens`. */
static int model_generate(lua_State *L)
{
    glm52_model *model = handle_get(L, 1, &model_class);
    luaL_checktype(L, 2, LUA_TTABLE);
    lua_Integer count = luaL_len(L, 2), limit = luaL_checkinteger(L, 3);
    double temperature = luaL_optnumber(L, 4, 0);
    uint64_t seed = (uint64_t)luaL_optinteger(L, 5, 0), produced = 0;

    luaL_argcheck(L, limit >= 0 && limit <= INT32_MAX, 3, "not a number of tokens");
    int32_t *prompt = lua_newuserdatauv(L, (size_t)(count ? count : 1) * sizeof *prompt, 0);
    int32_t *tokens = lua_newuserdatauv(L, (size_t)(limit ? limit : 1) * sizeof *tokens, 0);
    for (lua_Integer i = 0; i < count; i++) {
        lua_geti(L, 2, i + 1);
        prompt[i] = (int32_t)luaL_checkinteger(L, -1);
        lua_pop(L, 1);
    }
    check(L, glm52_model_generate(model, prompt, (uint64_t)count, (uint64_t)limit, temperature, seed, tokens,
                                  &produced));
    lua_createtable(L, (int)produced, 0);
    for (uint64_t i = 0; i < produced; i++) {
        lua_pushinteger(L, tokens[i]);
        lua_rawseti(L, -2, (lua_Integer)i + 1);
    }
    return 1;
}

static const luaL_Reg model_methods[] = {
    {"save", model_save}, {"describe", model_describe}, {"parameter_count", model_parameter_count},
    {"parameter", model_parameter}, {"value", model_value}, {"gradient", model_gradient},
    {"forward", model_forward}, {"generate", model_generate}, {NULL, NULL}};

const struct class model_class = {"glm52.model", unref_model, model_methods};

/* ---- batch ------------------------------------------------------------------------------------------- */

DEFINE_UNREF(batch)

int new_batch(lua_State *L)
{
    glm52_context *context = handle_get(L, 1, &context_class);
    void **handle = handle_new(L, &batch_class, 1, sizeof *handle);
    glm52_batch *batch = NULL;

    check(L, glm52_batch_create(context, &batch));
    *handle = batch;
    return 1;
}

/* batch:set(field, list): "tokens", "cu_seqlens" and "labels" take integers, "loss_mask" numbers. */
static int batch_set(lua_State *L)
{
    glm52_batch *batch = handle_get(L, 1, &batch_class);
    const char *field = luaL_checkstring(L, 2);
    int weights = !strcmp(field, "loss_mask");

    luaL_checktype(L, 3, LUA_TTABLE);
    lua_Integer count = luaL_len(L, 3);
    void *values = lua_newuserdatauv(L, (size_t)(count ? count : 1) * sizeof(int64_t), 0);
    for (lua_Integer i = 0; i < count; i++) {
        lua_geti(L, 3, i + 1);
        if (weights)
            ((float *)values)[i] = (float)luaL_checknumber(L, -1);
        else
            ((int64_t *)values)[i] = luaL_checkinteger(L, -1);
        lua_pop(L, 1);
    }
    check(L, glm52_batch_set(batch, field, weights ? GLM52_DTYPE_F32 : GLM52_DTYPE_I64, values, (uint64_t)count));
    return 0;
}

/* batch:tokens(): tokens, documents. */
static int batch_tokens(lua_State *L)
{
    uint64_t tokens, documents;

    check(L, glm52_batch_tokens(handle_get(L, 1, &batch_class), &tokens, &documents));
    lua_pushinteger(L, (lua_Integer)tokens);
    lua_pushinteger(L, (lua_Integer)documents);
    return 2;
}

static int batch_get(lua_State *L)
{
    glm52_view view = {.struct_size = sizeof view};

    check(L, glm52_batch_get(handle_get(L, 1, &batch_class), luaL_checkstring(L, 2), &view));
    push_view(L, &view);
    return 1;
}

static const luaL_Reg batch_methods[] = {
    {"set", batch_set}, {"tokens", batch_tokens}, {"get", batch_get}, {NULL, NULL}};

const struct class batch_class = {"glm52.batch", unref_batch, batch_methods};
