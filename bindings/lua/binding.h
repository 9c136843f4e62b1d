/* The Lua binding: handles of the library as full userdata, statuses as error objects. Uses the public header alone.
 *
 * Every function here that fails leaves by lua_error(), and only functions called by Lua do so: no error ever flies
 * through frames of the library. */
#ifndef GLM52_LUA_BINDING_H
#define GLM52_LUA_BINDING_H

#include <lauxlib.h>
#include <lua.h>

#include "glm52.h"

struct class {
    const char *name;             /* of the metatable, "glm52.model" */
    void (*unref)(void **handle); /* nulls the handle */
    const luaL_Reg *methods;
};

extern const struct class context_class, config_class, model_class, batch_class, dataset_class, optimizer_class,
    step_class;

/* Defines what struct class needs of a handle type: unref_<type>(). */
#define DEFINE_UNREF(type)                   \
    static void unref_##type(void **handle)  \
    {                                        \
        glm52_##type *typed = *handle;       \
        glm52_##type##_unref(&typed);        \
        *handle = NULL;                      \
    }

void class_register(lua_State *L, const struct class *class);
/* Pushes an empty handle (of `bytes`, at least a pointer; user value 1 is the parent, kept alive by it). The caller
 * stores the library's handle through the returned pointer. */
void **handle_new(lua_State *L, const struct class *class, int parent, size_t bytes);
/* The library's handle of argument `index`; an error if it is of another class or closed. */
void *handle_get(lua_State *L, int index, const struct class *class);
void *handle_optional(lua_State *L, int index, const struct class *class); /* NULL for none or nil */

void error_register(lua_State *L);
/* Returns on success, and raises the thread's last error otherwise. */
void check(lua_State *L, glm52_status status);
/* Raises an error object made here. */
int throw_error(lua_State *L, glm52_status status, const char *message, const char *hint);

/* Elements of a view as a table of numbers, with its shape and dtype. */
void push_view(lua_State *L, const glm52_view *view);
const char *dtype_label(glm52_dtype type);

/* Constructors, as functions of the module. */
int new_context(lua_State *L);
int new_config(lua_State *L);
int new_model(lua_State *L);
int load_model(lua_State *L);
int new_batch(lua_State *L);
int new_dataset(lua_State *L);
int new_optimizer(lua_State *L);
int new_step(lua_State *L);

/* What the terminal, the clock and the signals say; the table glm52.core.system. */
void push_system(lua_State *L);

__attribute__((visibility("default"))) int luaopen_glm52(lua_State *L);

#endif
