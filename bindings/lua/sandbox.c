/* Untrusted recipes: evaluated in a Lua state of their own that has few functions (guest.lua says which), limited
 * memory, instructions and time; what they ask to train comes out as plain data. docs/recipes.md says what this does
 * not stop.
 *
 * Lua counts instructions, and one of them may copy or compare a long text. So memory that is asked for counts as
 * work too, and the processor time is looked at every HOOK instructions. Once a budget is spent every instruction
 * fails, or a loop of pcall() would go on for ever. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <lualib.h>

#include "binding.h"
#include "sources.h"

enum { HOOK = 100, BYTES_PER_INSTRUCTION = 64, DEPTH = 32, ENTRIES = 100000 };

struct guest {
    size_t held, memory;  /* bytes, and their limit */
    int64_t instructions; /* left */
    double end;           /* of processor time */
    const char *spent;    /* the budget that is, or NULL */
};

static double processor_seconds(void)
{
    struct timespec now;

    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void *allocate(void *user, void *old, size_t old_bytes, size_t bytes)
{
    struct guest *guest = user;
    size_t before = old ? old_bytes : 0; /* without a block it is a kind of object */

    if (!bytes) {
        free(old);
        guest->held -= before;
        return NULL;
    }
    if (bytes > before) {
        guest->instructions -= (int64_t)((bytes - before) / BYTES_PER_INSTRUCTION);
        if (guest->held - before + bytes > guest->memory) return NULL;
        if (guest->instructions < 0) guest->spent = "instructions";
        if (guest->spent) return NULL;
    }
    void *block = realloc(old, bytes);
    if (block) guest->held += bytes - before;
    return block;
}

static void on_count(lua_State *S, lua_Debug *where)
{
    struct guest *guest = *(struct guest **)lua_getextraspace(S);

    (void)where;
    guest->instructions -= guest->spent ? 0 : HOOK;
    if (guest->instructions < 0) guest->spent = "instructions";
    if (processor_seconds() > guest->end) guest->spent = "seconds";
    if (!guest->spent) return;
    lua_sethook(S, on_count, LUA_MASKCOUNT, 1);
    luaL_error(S, "the sandbox's budget of %s is spent", guest->spent);
}

static const struct source *find_source(const char *module)
{
    const struct source *source = sources;

    while (strcmp(source->module, module)) source++;
    return source;
}

/* Runs under lua_pcall in the guest: text, chunk name, list of arguments as light userdata of C strings. Leaves the
 * table and the line of the call. */
struct request {
    const char *text, *chunk, **arguments;
    size_t bytes;
    int count;
};

static int run_guest(lua_State *S)
{
    const struct request *request = lua_touserdata(S, 1);
    const struct source *guest = find_source("glm52.guest");

    luaL_openlibs(S); /* guest.lua hands on some functions of them; the rest is out of reach */
    if (luaL_loadbufferx(S, guest->text, guest->bytes, guest->chunk, "t")) return lua_error(S);
    lua_createtable(S, request->count, 0);
    for (int i = 0; i < request->count; i++) {
        lua_pushstring(S, request->arguments[i]);
        lua_rawseti(S, -2, i + 1);
    }
    lua_call(S, 1, 2); /* environment, and a function that gives what was asked for */
    if (luaL_loadbufferx(S, request->text, request->bytes, request->chunk, "t")) return lua_error(S);
    lua_pushvalue(S, 2);
    if (!lua_setupvalue(S, -2, 1)) lua_pop(S, 1); /* a chunk that names nothing global */
    lua_sethook(S, on_count, LUA_MASKCOUNT, HOOK);
    lua_call(S, 0, 0);
    lua_sethook(S, NULL, 0, 0);
    lua_settop(S, 3);
    lua_call(S, 0, 2);
    return 2;
}

/* ---- plain data from one state to the other ---- */

struct copying {
    lua_State *from;
    int depth, entries;
};

static void copy_value(lua_State *L, struct copying *copying, int index);

static void copy_table(lua_State *L, struct copying *copying, int index)
{
    lua_State *S = copying->from;

    if (++copying->depth > DEPTH)
        luaL_error(L, "the sandboxed recipe gives tables within tables, more than %d deep or without end", DEPTH);
    luaL_checkstack(L, 4, NULL);
    if (!lua_checkstack(S, 4)) luaL_error(L, "no memory");
    lua_newtable(L);
    lua_pushnil(S);
    while (lua_next(S, index)) { /* a table that is met twice counts twice */
        if (++copying->entries > ENTRIES) luaL_error(L, "the sandboxed recipe gives more than %d entries", ENTRIES);
        copy_value(L, copying, lua_gettop(S) - 1);
        copy_value(L, copying, lua_gettop(S));
        lua_rawset(L, -3);
        lua_pop(S, 1);
    }
    copying->depth--;
}

static void copy_value(lua_State *L, struct copying *copying, int index)
{
    lua_State *S = copying->from;
    size_t bytes;
    const char *text;

    switch (lua_type(S, index)) {
    case LUA_TBOOLEAN: lua_pushboolean(L, lua_toboolean(S, index)); break;
    case LUA_TNUMBER:
        if (lua_isinteger(S, index))
            lua_pushinteger(L, lua_tointeger(S, index));
        else
            lua_pushnumber(L, lua_tonumber(S, index));
        break;
    case LUA_TSTRING:
        text = lua_tolstring(S, index, &bytes);
        lua_pushlstring(L, text, bytes);
        break;
    case LUA_TTABLE: copy_table(L, copying, index); break;
    default:
        throw_error(L, GLM52_E_INVALID, lua_pushfstring(L, "the sandboxed recipe gives a %s", luaL_typename(S, index)),
                    "from a sandbox only numbers, texts, true, false and tables of them come out");
    }
}

/* ---- from the host ---- */

struct owner {
    lua_State *state;
};

static int release_guest(lua_State *L)
{
    struct owner *owner = lua_touserdata(L, 1);

    if (owner->state) lua_close(owner->state);
    owner->state = NULL;
    return 0;
}

static lua_Number limit(lua_State *L, const char *name, lua_Number usual)
{
    lua_getfield(L, 3, name);
    lua_Number value = luaL_optnumber(L, -1, usual);
    lua_pop(L, 1);
    luaL_argcheck(L, value > 0 && value <= 1e15, 3, "limits are numbers above 0");
    return value;
}

static struct guest *open_guest(lua_State *L, struct owner **owner)
{
    struct guest *guest = lua_newuserdatauv(L, sizeof *guest, 0);

    *owner = lua_newuserdatauv(L, sizeof **owner, 1);
    (*owner)->state = NULL;
    lua_pushvalue(L, -2);
    lua_setiuservalue(L, -2, 1); /* the guest closes before its allocator's memory goes */
    if (luaL_newmetatable(L, "glm52.guest")) {
        lua_pushcfunction(L, release_guest);
        lua_setfield(L, -2, "__gc");
        lua_pushcfunction(L, release_guest);
        lua_setfield(L, -2, "__close");
    }
    lua_setmetatable(L, -2);
    *guest = (struct guest){.memory = (size_t)limit(L, "memory", 64 << 20),
                            .instructions = (int64_t)limit(L, "instructions", 1e8),
                            .end = processor_seconds() + limit(L, "seconds", 10)};
    (*owner)->state = lua_newstate(allocate, guest);
    if (!(*owner)->state) throw_error(L, GLM52_E_NOMEM, "no memory for a sandbox", "allow it more");
    *(struct guest **)lua_getextraspace((*owner)->state) = guest;
    return guest;
}

/* Raises what went wrong in the guest, as a text of the host's. */
static int explain_failure(lua_State *L, lua_State *S, const struct guest *guest, int failed)
{
    if (guest->spent || failed == LUA_ERRMEM)
        lua_pushfstring(L, "the sandbox's budget of %s is spent", guest->spent ? guest->spent : "memory");
    else if (lua_type(S, -1) == LUA_TSTRING)
        lua_pushstring(L, lua_tostring(S, -1));
    else
        lua_pushfstring(L, "the sandboxed recipe failed with a %s", luaL_typename(S, -1));
    return lua_error(L);
}

/* sandbox(text, chunk name, {memory =, instructions =, seconds =}, {arguments}): the table that the recipe gives to
 * glm52.train, and the line where. */
int evaluate_sandboxed(lua_State *L)
{
    struct request request = {.chunk = luaL_checkstring(L, 2)};
    struct owner *owner;

    request.text = luaL_checklstring(L, 1, &request.bytes);
    luaL_checktype(L, 3, LUA_TTABLE);
    luaL_checktype(L, 4, LUA_TTABLE);
    lua_settop(L, 4);
    request.count = (int)luaL_len(L, 4);
    luaL_checkstack(L, request.count + 20, NULL);
    request.arguments = lua_newuserdatauv(L, (size_t)(request.count + 1) * sizeof *request.arguments, 0);
    for (int i = 0; i < request.count; i++) {
        lua_rawgeti(L, 4, i + 1);
        request.arguments[i] = luaL_checkstring(L, -1);
    }
    const struct guest *guest = open_guest(L, &owner);
    lua_toclose(L, -1);
    lua_State *S = owner->state;

    lua_pushcfunction(S, run_guest);
    lua_pushlightuserdata(S, &request);
    int failed = lua_pcall(S, 1, 2, 0);
    lua_sethook(S, NULL, 0, 0);
    if (failed || guest->spent) return explain_failure(L, S, guest, failed);
    struct copying copying = {S, 0, 0};
    lua_Integer line = lua_tointeger(S, -1);
    if (lua_isnil(S, -2))
        lua_pushnil(L);
    else
        copy_value(L, &copying, lua_gettop(S) - 1);
    lua_pushinteger(L, line);
    return 2;
}
