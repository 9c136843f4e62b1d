/* Lua classes context and config. */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "binding.h"

/* ---- the log ----------------------------------------------------------------------------------------- *
 * Messages may come from any thread, and a lua_State serves one: they wait in a list until context:poll(). */

struct message {
    struct message *next;
    glm52_log_level level;
    char text[];
};

struct context {
    void *handle;
    struct message *_Atomic newest;
};

static void receive(void *user, glm52_log_level level, const char *text)
{
    struct context *context = user;
    size_t bytes = strlen(text) + 1;
    struct message *message = malloc(sizeof *message + bytes);

    if (!message) return;
    message->level = level;
    memcpy(message->text, text, bytes);
    message->next = atomic_load(&context->newest);
    while (!atomic_compare_exchange_weak(&context->newest, &message->next, message)) continue;
}

/* All waiting messages, oldest first. */
static struct message *take_messages(struct context *context)
{
    struct message *newest = atomic_exchange(&context->newest, NULL), *oldest = NULL;

    while (newest) {
        struct message *next = newest->next;
        newest->next = oldest;
        oldest = newest;
        newest = next;
    }
    return oldest;
}

/* context:poll(): gives waiting messages to the function `log(level, text)` of the context's options. */
static int context_poll(lua_State *L)
{
    static const char *const levels[] = {"", "error", "warning", "notice", "debug"};
    struct message *message;

    handle_get(L, 1, &context_class);
    lua_settop(L, 1);
    lua_newtable(L);
    message = take_messages(lua_touserdata(L, 1));
    for (lua_Integer i = 1; message; i += 2) {
        struct message *next = message->next;
        lua_pushstring(L, levels[message->level >= 1 && message->level <= 4 ? message->level : 0]);
        lua_rawseti(L, 2, i);
        lua_pushstring(L, message->text);
        lua_rawseti(L, 2, i + 1);
        free(message);
        message = next;
    }
    if (lua_getiuservalue(L, 1, 2) != LUA_TFUNCTION) return 0;
    for (lua_Integer i = 1, n = (lua_Integer)lua_rawlen(L, 2); i < n; i += 2) {
        lua_pushvalue(L, 3);
        lua_rawgeti(L, 2, i);
        lua_rawgeti(L, 2, i + 1);
        lua_call(L, 2, 0);
    }
    return 0;
}

/* ---- context ----------------------------------------------------------------------------------------- */

/* The children of a context keep its userdata, and with it the list of messages, until they are collected. */
static void unref_context(void **handle)
{
    glm52_context *context = *handle;
    struct context *self = (struct context *)(void *)handle;

    glm52_context_unref(&context);
    *handle = NULL;
    for (struct message *message = take_messages(self), *next; message; message = next) {
        next = message->next;
        free(message);
    }
}

/* glm52.context{device = "cpu", threads = 2, log = function(level, text) end} */
int new_context(lua_State *L)
{
    glm52_context_options options = {.struct_size = sizeof options};
    glm52_context *context = NULL;

    if (lua_isnoneornil(L, 1)) {
        lua_settop(L, 0);
        lua_newtable(L);
    }
    luaL_checktype(L, 1, LUA_TTABLE);
    lua_settop(L, 1);
    lua_getfield(L, 1, "device");
    options.device = luaL_optstring(L, 2, NULL);
    lua_getfield(L, 1, "threads");
    options.threads = (int32_t)luaL_optinteger(L, 3, 0);

    void **handle = handle_new(L, &context_class, 1, sizeof(struct context));
    if (lua_getfield(L, 1, "log") == LUA_TFUNCTION) {
        lua_setiuservalue(L, 4, 2);
        options.log = receive;
        options.log_user = handle;
    } else {
        lua_pop(L, 1);
    }
    check(L, glm52_context_create(&options, &context));
    *handle = context;
    return 1;
}

static int context_describe_device(lua_State *L)
{
    const char *line;

    check(L, glm52_context_describe_device(handle_get(L, 1, &context_class), &line));
    lua_pushstring(L, line);
    return 1;
}

/* context:memory(): bytes held now, and at most so far. */
static int context_memory(lua_State *L)
{
    uint64_t now, peak;

    check(L, glm52_context_memory(handle_get(L, 1, &context_class), &now, &peak));
    lua_pushinteger(L, (lua_Integer)now);
    lua_pushinteger(L, (lua_Integer)peak);
    return 2;
}

static int context_cancel(lua_State *L)
{
    glm52_context_cancel(handle_get(L, 1, &context_class));
    return 0;
}

static const luaL_Reg context_methods[] = {
    {"describe_device", context_describe_device}, {"memory", context_memory}, {"cancel", context_cancel},
    {"poll", context_poll}, {NULL, NULL}};

const struct class context_class = {"glm52.context", unref_context, context_methods};

/* ---- config ------------------------------------------------------------------------------------------ */

DEFINE_UNREF(config)

int new_config(lua_State *L)
{
    glm52_context *context = handle_get(L, 1, &context_class);
    void **handle = handle_new(L, &config_class, 1, sizeof *handle);
    glm52_config *config = NULL;

    check(L, glm52_config_create(context, &config));
    *handle = config;
    return 1;
}

static int config_set(lua_State *L)
{
    glm52_config *config = handle_get(L, 1, &config_class);
    const char *key = luaL_checkstring(L, 2);

    check(L, glm52_config_set(config, key, luaL_tolstring(L, 3, NULL)));
    return 0;
}

static int config_get(lua_State *L)
{
    const char *value;

    check(L, glm52_config_get(handle_get(L, 1, &config_class), luaL_checkstring(L, 2), &value));
    lua_pushstring(L, value);
    return 1;
}

static int config_load_hub(lua_State *L)
{
    check(L, glm52_config_load_hub(handle_get(L, 1, &config_class), luaL_checkstring(L, 2)));
    return 0;
}

static int config_load_json(lua_State *L)
{
    check(L, glm52_config_load_json(handle_get(L, 1, &config_class), luaL_checkstring(L, 2)));
    return 0;
}

static int config_validate(lua_State *L)
{
    check(L, glm52_config_validate(handle_get(L, 1, &config_class)));
    return 0;
}

/* config:dump([hub]): all options as JSON, or the model section as a hub config.json. */
static int config_dump(lua_State *L)
{
    const char *json;

    check(L, glm52_config_dump(handle_get(L, 1, &config_class), lua_toboolean(L, 2), &json));
    lua_pushstring(L, json);
    return 1;
}

static const luaL_Reg config_methods[] = {
    {"set", config_set}, {"get", config_get}, {"load_hub", config_load_hub}, {"load_json", config_load_json},
    {"validate", config_validate}, {"dump", config_dump}, {NULL, NULL}};

const struct class config_class = {"glm52.config", unref_config, config_methods};
