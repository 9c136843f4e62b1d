/* Memory of a Lua state runs out at every place once: the binding's own code must then raise Lua's "not enough
 * memory", lose no handle (LeakSanitizer sees them) and stay usable. Usage: lua-memory; prints TAP. */
#include <stdio.h>
#include <stdlib.h>

#include <lauxlib.h>
#include <lua.h>
#include <lualib.h>

int luaopen_glm52(lua_State *L);

/* Everything that the C side does with memory of Lua; what a failure leaves open the collector closes. */
static const char work[] =
    "local glm52 = require 'glm52'\n"
    "local context = glm52.context { threads = 1, log = function() end }\n"
    "local config = glm52.config(context)\n"
    "config:load_json([[{\"model\": {\"preset\": \"tiny\", \"num_hidden_layers\": 1, \"hidden_size\": 16,"
    " \"vocab_size\": 256,  \"first_k_dense_replace\": 1, \"eos_token_id\": [], \"pad_token_id\": -1},"
    "  \"data.pack_tokens\": 16, \"train.microbatch_tokens\": 16}]])\n"
    "local model = glm52.model(context, config)\n"
    "local step = glm52.step(model, glm52.optimizer(model), config)\n"
    "local batch = glm52.batch(context)\n"
    "batch:set('tokens', { 1, 2, 3, 4 })\n"
    "step:run { batch }\n"
    "local loss = step:metrics().loss\n"
    "local view, copy = model:value 'model.norm.weight', model:gradient 'model.norm.weight'\n"
    "local tokens = model:generate({ 1, 2 }, 2)\n"
    "local tensor = glm52.tensor('I32', { 1, 2 }):first(1)\n"
    "local done, problem = pcall(config.set, config, 'optim.lrr', 1)\n"
    "assert(not done and tostring(problem))\n"
    "local rows, options = #step:plan(), #glm52.options()\n"
    "assert(tostring(view) and view:bytes() and copy.shape and glm52.load)\n"
    "context:poll()\n"
    "return loss\n";

static struct {
    long count, fail_at; /* growing allocations so far, and the one that fails */
} memory;

static void *allocate(void *user, void *old, size_t old_bytes, size_t bytes)
{
    (void)user;
    if (!bytes) {
        free(old);
        return NULL;
    }
    /* A full collection would rescue a single failure: from there on all fail, until the error has come. */
    if (bytes > (old ? old_bytes : 0) && memory.fail_at && ++memory.count >= memory.fail_at) return NULL;
    return realloc(old, bytes);
}

static int begin(lua_State *L)
{
    luaL_openlibs(L);
    luaL_requiref(L, "glm52", luaopen_glm52, 0);
    if (luaL_loadstring(L, work)) return lua_error(L);
    return 1;
}

static int run(lua_State *L)
{
    lua_pushvalue(L, lua_upvalueindex(1));
    lua_call(L, 0, 1);
    return 1;
}

/* Runs the work with failures from allocation number fail_at on; 1 if it failed for lack of memory, 0 if it got
 * through. */
static int attempt(lua_State *L, long fail_at)
{
    memory.count = 0;
    lua_pushvalue(L, 1);
    lua_pushcclosure(L, run, 1);
    memory.fail_at = fail_at;
    int status = lua_pcall(L, 0, 1, 0);
    long count = memory.count;
    memory.fail_at = 0;
    if (status == LUA_OK ? fail_at && count >= fail_at : status != LUA_ERRMEM) {
        printf("# allocation %ld: %s\n", fail_at, status ? luaL_tolstring(L, -1, NULL) : "lost its failure");
        exit(1);
    }
    lua_settop(L, 1);
    lua_gc(L, LUA_GCCOLLECT);
    return status != LUA_OK;
}

int main(void)
{
    long places = 0;
    lua_State *L = lua_newstate(allocate, NULL);

    lua_pushcfunction(L, begin);
    if (lua_pcall(L, 0, 1, 0)) {
        printf("not ok 1 - %s\n1..1\n", lua_tostring(L, -1));
        return 0;
    }
    attempt(L, 0);
    lua_gc(L, LUA_GCSTOP); /* so that the allocations are the same each time */
    while (attempt(L, places + 1)) places++;
    lua_gc(L, LUA_GCRESTART);
    printf("%sok 1 - memory ran out at %ld places, one after another\n", places > 300 ? "" : "not ", places);
    printf("%sok 2 - and then there was enough\n1..2\n", attempt(L, 0) ? "not " : "");
    lua_close(L);
    return 0;
}
