/* glm52.context: the one constructor that takes callbacks. Messages of the log may come from any thread, and a
 * lua_State serves one: they wait in a queue until context:poll(). */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "binding.h"

enum { OPTIONS = 1, LOG = 2, QUEUE = 3, KEPT = 3 }; /* user values of a context; its children keep it, and so them */

struct message {
    struct message *next;
    glm52_log_level level;
    char text[];
};

struct queue {
    struct message *_Atomic newest;
};

static void receive(void *user, glm52_log_level level, const char *text)
{
    struct queue *queue = user;
    size_t bytes = strlen(text) + 1;
    struct message *message = malloc(sizeof *message + bytes);

    if (!message) return;
    message->level = level;
    memcpy(message->text, text, bytes);
    message->next = atomic_load(&queue->newest);
    while (!atomic_compare_exchange_weak(&queue->newest, &message->next, message)) continue;
}

/* All waiting messages, oldest first. */
static struct message *take_messages(struct queue *queue)
{
    struct message *newest = atomic_exchange(&queue->newest, NULL), *oldest = NULL;

    while (newest) {
        struct message *next = newest->next;
        newest->next = oldest;
        oldest = newest;
        newest = next;
    }
    return oldest;
}

static int release_queue(lua_State *L)
{
    for (struct message *message = take_messages(lua_touserdata(L, 1)), *next; message; message = next) {
        next = message->next;
        free(message);
    }
    return 0;
}

static struct queue *new_queue(lua_State *L)
{
    struct queue *queue = lua_newuserdatauv(L, sizeof *queue, 0);

    atomic_init(&queue->newest, NULL);
    if (luaL_newmetatable(L, "glm52.queue")) {
        lua_pushcfunction(L, release_queue);
        lua_setfield(L, -2, "__gc");
    }
    lua_setmetatable(L, -2);
    return queue;
}

/* context:poll(): gives waiting messages to the function `log(level, text)` of the context's options. */
int context_poll(lua_State *L)
{
    static const char *const levels[] = {"", "error", "warning", "notice", "debug"};

    handle_get(L, 1, class_named("context"));
    lua_settop(L, 1);
    if (lua_getiuservalue(L, 1, QUEUE) != LUA_TUSERDATA) return 0;
    lua_newtable(L);
    struct message *message = take_messages(lua_touserdata(L, 2));
    for (lua_Integer i = 1; message; i += 2) {
        struct message *next = message->next;
        lua_pushstring(L, levels[message->level >= 1 && message->level <= 4 ? message->level : 0]);
        lua_rawseti(L, 3, i);
        lua_pushstring(L, message->text);
        lua_rawseti(L, 3, i + 1);
        free(message);
        message = next;
    }
    lua_getiuservalue(L, 1, LOG);
    for (lua_Integer i = 1, n = (lua_Integer)lua_rawlen(L, 3); i < n; i += 2) {
        lua_pushvalue(L, 4);
        lua_rawgeti(L, 3, i);
        lua_rawgeti(L, 3, i + 1);
        lua_call(L, 2, 0);
    }
    return 0;
}

/* Options are few: a key that is none of them is a mistake. */
static void check_options(lua_State *L)
{
    lua_pushnil(L);
    while (lua_next(L, 1)) {
        const char *key = lua_type(L, -2) == LUA_TSTRING ? lua_tostring(L, -2) : "";
        if (strcmp(key, "device") && strcmp(key, "threads") && strcmp(key, "log"))
            luaL_argerror(L, 1, lua_pushfstring(L, "%s is no option of a context: device, threads, log",
                                                luaL_tolstring(L, -2, NULL)));
        lua_pop(L, 1);
    }
}

/* glm52.context{device = "cpu", threads = 2, log = function(level, text) end}. A native function of the signature
 * void(ptr, i32, str) is the log callback itself: it is called at once, from whichever thread the message comes. */
int new_context(lua_State *L)
{
    glm52_context_options options = {.struct_size = sizeof options};
    glm52_context *context = NULL;
    void (*native)(void);

    if (lua_isnoneornil(L, 1)) {
        lua_settop(L, 0);
        lua_newtable(L);
    }
    luaL_checktype(L, 1, LUA_TTABLE);
    lua_settop(L, 1);
    check_options(L);
    lua_getfield(L, 1, "device");
    options.device = luaL_optstring(L, 2, NULL);
    lua_getfield(L, 1, "threads");
    options.threads = (int32_t)luaL_optinteger(L, 3, 0);
    lua_getfield(L, 1, "log");
    struct queue *queue = new_queue(L);

    void **handle = handle_new(L, class_named("context"), KEPT);
    lua_pushvalue(L, 1);
    lua_setiuservalue(L, 6, OPTIONS);
    lua_pushvalue(L, 4);
    lua_setiuservalue(L, 6, LOG);
    if ((native = native_address(L, 4, "void(ptr,i32,str)"))) {
        options.log = (glm52_log_function)native;
    } else if (!lua_isnil(L, 4)) {
        luaL_argcheck(L, lua_isfunction(L, 4), 1,
                      "log is neither a function nor a native function of the signature void(ptr, i32, str)");
        options.log = receive;
        options.log_user = queue;
        lua_pushvalue(L, 5);
        lua_setiuservalue(L, 6, QUEUE);
    }
    check(L, glm52_context_create(&options, &context));
    *handle = context;
    return 1;
}
