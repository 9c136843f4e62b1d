/* Lua classes dataset, optimizer and step. */
#include <stdlib.h>

#include "binding.h"

/* ---- dataset ----------------------------------------------------------------------------------------- */

DEFINE_UNREF(dataset)

int new_dataset(lua_State *L)
{
    glm52_context *context = handle_get(L, 1, &context_class);
    glm52_config *config = handle_get(L, 2, &config_class);
    void **handle = handle_new(L, &dataset_class, 1, sizeof *handle);
    glm52_dataset *dataset = NULL;

    check(L, glm52_dataset_open(context, config, &dataset));
    *handle = dataset;
    return 1;
}

static int dataset_next(lua_State *L)
{
    check(L, glm52_dataset_next(handle_get(L, 1, &dataset_class), handle_get(L, 2, &batch_class)));
    return 0;
}

/* dataset:seek(n): packs are numbered from 0, as everywhere in the library. */
static int dataset_seek(lua_State *L)
{
    glm52_dataset *dataset = handle_get(L, 1, &dataset_class);
    lua_Integer pack = luaL_checkinteger(L, 2);

    luaL_argcheck(L, pack >= 0, 2, "packs are numbered from 0");
    check(L, glm52_dataset_seek(dataset, (uint64_t)pack));
    return 0;
}

/* dataset:held_out(n, batch): from 0. */
static int dataset_held_out(lua_State *L)
{
    glm52_dataset *dataset = handle_get(L, 1, &dataset_class);
    lua_Integer pack = luaL_checkinteger(L, 2);

    luaL_argcheck(L, pack >= 0, 2, "packs are numbered from 0");
    check(L, glm52_dataset_held_out(dataset, (uint64_t)pack, handle_get(L, 3, &batch_class)));
    return 0;
}

static int dataset_held_out_packs(lua_State *L)
{
    uint64_t packs;

    check(L, glm52_dataset_held_out_packs(handle_get(L, 1, &dataset_class), &packs));
    lua_pushinteger(L, (lua_Integer)packs);
    return 1;
}

static int dataset_describe(lua_State *L)
{
    const char *line;

    check(L, glm52_dataset_describe(handle_get(L, 1, &dataset_class), &line));
    lua_pushstring(L, line);
    return 1;
}

static const luaL_Reg dataset_methods[] = {
    {"next", dataset_next}, {"seek", dataset_seek}, {"held_out", dataset_held_out},
    {"held_out_packs", dataset_held_out_packs}, {"describe", dataset_describe}, {NULL, NULL}};

const struct class dataset_class = {"glm52.dataset", unref_dataset, dataset_methods};

/* ---- optimizer --------------------------------------------------------------------------------------- */

DEFINE_UNREF(optimizer)

/* glm52.optimizer(model [, config]) */
int new_optimizer(lua_State *L)
{
    glm52_model *model = handle_get(L, 1, &model_class);
    glm52_config *config = handle_optional(L, 2, &config_class);
    void **handle = handle_new(L, &optimizer_class, 1, sizeof *handle);
    glm52_optimizer *optimizer = NULL;

    check(L, glm52_optimizer_create(model, config, &optimizer));
    *handle = optimizer;
    return 1;
}

/* optimizer:set_lr(lr): overrides the schedule; nothing or nil returns to it. */
static int optimizer_set_lr(lua_State *L)
{
    glm52_optimizer *optimizer = handle_get(L, 1, &optimizer_class);

    check(L, glm52_optimizer_set_lr(optimizer, luaL_optnumber(L, 2, -1)));
    return 0;
}

static int optimizer_resync(lua_State *L)
{
    check(L, glm52_optimizer_resync(handle_get(L, 1, &optimizer_class)));
    return 0;
}

static const luaL_Reg optimizer_methods[] = {
    {"set_lr", optimizer_set_lr}, {"resync", optimizer_resync}, {NULL, NULL}};

const struct class optimizer_class = {"glm52.optimizer", unref_optimizer, optimizer_methods};

/* ---- step -------------------------------------------------------------------------------------------- */

DEFINE_UNREF(step)

/* glm52.step(model [, optimizer [, config]]): without an optimizer it evaluates only. */
int new_step(lua_State *L)
{
    glm52_model *model = handle_get(L, 1, &model_class);
    glm52_optimizer *optimizer = handle_optional(L, 2, &optimizer_class);
    glm52_config *config = handle_optional(L, 3, &config_class);
    void **handle = handle_new(L, &step_class, 1, sizeof *handle);
    glm52_step *step = NULL;

    check(L, glm52_step_create(model, optimizer, config, &step));
    *handle = step;
    return 1;
}

/* The batches of argument 2: one batch, or a list of them. */
static glm52_batch **get_batches(lua_State *L, uint32_t *count)
{
    int list = lua_istable(L, 2);
    lua_Integer length = list ? luaL_len(L, 2) : 1;

    luaL_argcheck(L, length >= 1 && length <= INT32_MAX, 2, "no batches");
    glm52_batch **batches = lua_newuserdatauv(L, (size_t)length * sizeof *batches, 0);
    for (lua_Integer i = 0; i < length; i++) {
        if (list)
            lua_geti(L, 2, i + 1);
        else
            lua_pushvalue(L, 2);
        batches[i] = handle_get(L, lua_gettop(L), &batch_class);
        lua_pop(L, 1); /* the list or the stack still holds it */
    }
    *count = (uint32_t)length;
    return batches;
}

static int step_run(lua_State *L)
{
    glm52_step *step = handle_get(L, 1, &step_class);
    uint32_t count;
    glm52_batch **batches = get_batches(L, &count);

    check(L, glm52_step_run(step, batches, count));
    return 0;
}

static int step_gradients(lua_State *L)
{
    glm52_step *step = handle_get(L, 1, &step_class);
    uint32_t count;
    glm52_batch **batches = get_batches(L, &count);

    check(L, glm52_step_gradients(step, batches, count));
    return 0;
}

/* step:evaluate(batches): the mean loss. */
static int step_evaluate(lua_State *L)
{
    glm52_step *step = handle_get(L, 1, &step_class);
    uint32_t count;
    glm52_batch **batches = get_batches(L, &count);
    double loss;

    check(L, glm52_step_evaluate(step, batches, count, &loss));
    lua_pushnumber(L, loss);
    return 1;
}

static int step_metric(lua_State *L)
{
    double value;

    check(L, glm52_step_metric(handle_get(L, 1, &step_class), luaL_checkstring(L, 2), &value));
    lua_pushnumber(L, value);
    return 1;
}

/* step:metrics(): all of them by name. */
static int step_metrics(lua_State *L)
{
    glm52_step *step = handle_get(L, 1, &step_class);
    const char *name;

    lua_newtable(L);
    for (uint32_t i = 0; (name = glm52_step_metric_name(step, i)); i++) {
        double value;
        check(L, glm52_step_metric(step, name, &value));
        lua_pushnumber(L, value);
        lua_setfield(L, -2, name);
    }
    return 1;
}

static void push_plan_row(lua_State *L, const glm52_plan_row *row)
{
    lua_createtable(L, 0, 5);
    lua_pushstring(L, row->section);
    lua_setfield(L, -2, "section");
    lua_pushstring(L, row->name);
    lua_setfield(L, -2, "name");
    lua_pushnumber(L, row->amount);
    lua_setfield(L, -2, "amount");
    lua_pushnumber(L, row->bytes);
    lua_setfield(L, -2, "bytes");
    lua_pushinteger(L, (lua_Integer)row->calls);
    lua_setfield(L, -2, "calls");
}

/* step:plan(): a list of {section, name, amount, bytes, calls}. */
static int step_plan(lua_State *L)
{
    glm52_step *step = handle_get(L, 1, &step_class);
    glm52_plan_row row = {.struct_size = sizeof row};

    lua_newtable(L);
    check(L, glm52_step_plan(step, 0, &row));
    for (uint32_t i = 0; glm52_step_plan(step, i, &row) == GLM52_OK; i++) {
        push_plan_row(L, &row);
        lua_rawseti(L, -2, (lua_Integer)i + 1);
    }
    return 1;
}

/* step:set_stage(config): goes on with the stage that the config describes. */
static int step_set_stage(lua_State *L)
{
    check(L, glm52_step_set_stage(handle_get(L, 1, &step_class), handle_get(L, 2, &config_class)));
    return 0;
}

static int step_save(lua_State *L)
{
    check(L, glm52_step_save(handle_get(L, 1, &step_class), luaL_checkstring(L, 2)));
    return 0;
}

/* step:resume(directory): the number of the pack to go on with. */
static int step_resume(lua_State *L)
{
    uint64_t packs;

    check(L, glm52_step_resume(handle_get(L, 1, &step_class), luaL_checkstring(L, 2), &packs));
    lua_pushinteger(L, (lua_Integer)packs);
    return 1;
}

static const luaL_Reg step_methods[] = {
    {"run", step_run}, {"gradients", step_gradients}, {"evaluate", step_evaluate}, {"metric", step_metric},
    {"metrics", step_metrics}, {"plan", step_plan}, {"set_stage", step_set_stage}, {"save", step_save},
    {"resume", step_resume}, {NULL, NULL}};

const struct class step_class = {"glm52.step", unref_step, step_methods};
