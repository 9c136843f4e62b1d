/* The Lua binding: handles of the library as full userdata, statuses as error objects. Uses the public header alone.
 *
 * Every function here that fails leaves by lua_error(), and only functions called by Lua do so: no error ever flies
 * through frames of the library. */
#ifndef GLM52_LUA_BINDING_H
#define GLM52_LUA_BINDING_H

#include <lauxlib.h>
#include <lua.h>

#include "glm52.h"

/* ---- handles (object.c) ---- */

struct class {
    const char *name;        /* of the metatable, "glm52.model" */
    void (*unref)(void);     /* takes the address of a handle */
};

extern const struct class classes[]; /* by abi/gen.lua; ends with a NULL name */

/* Makes metatable and method table, and pushes the latter. */
void class_register(lua_State *L, const struct class *class);
/* Pushes an empty handle with `kept` user values. The caller stores the library's handle through the returned
 * pointer. */
void **handle_new(lua_State *L, const struct class *class, int kept);
/* The library's handle of argument `index`; an error if it is of another class or closed. */
void *handle_get(lua_State *L, int index, const struct class *class);
/* The handle of any class, or NULL if the value is none. */
void *handle_any(lua_State *L, int index);
const struct class *class_named(const char *name); /* "model" */

/* ---- errors (error.c) ---- */

void error_register(lua_State *L);
/* Returns on success, and raises the thread's last error otherwise. */
void check(lua_State *L, glm52_status status);
/* Raises an error object made here. */
int throw_error(lua_State *L, glm52_status status, const char *message, const char *hint);

/* ---- tensors (tensor.c) ---- */

struct tensor {
    void *data;
    glm52_dtype dtype;
    int dimensions, on_device;
    int64_t shape[4];
    uint64_t count;     /* elements */
    glm52_model *owner; /* kept alive for its memory; NULL: the memory is the tensor's own */
};

void tensor_register(lua_State *L);
/* Pushes a tensor over a view: of the memory of the model at that stack index, or of a copy if it is 0. */
void push_view(lua_State *L, const glm52_view *view, int model);
struct tensor *tensor_test(lua_State *L, int index); /* NULL if the value is none */
/* Elements of a list or tensor at `index` as memory of that type, alive as long as what is on the stack. */
void *list_values(lua_State *L, int index, glm52_dtype dtype, uint64_t *count);
void push_element(lua_State *L, const void *data, glm52_dtype dtype, uint64_t i);
const char *dtype_label(glm52_dtype type); /* NULL for one that Lua cannot read */
int new_tensor(lua_State *L);
int batch_set(lua_State *L);
int model_gradient(lua_State *L);

/* ---- the rest ---- */

int new_context(lua_State *L); /* context.c: with the log's callback */
int context_poll(lua_State *L);
int new_native(lua_State *L);  /* native.c: functions of the user's shared objects */
void native_register(lua_State *L);
/* Address of the native function at `index` if it has that signature, else NULL. */
void (*native_address(lua_State *L, int index, const char *signature))(void);
int evaluate_sandboxed(lua_State *L); /* sandbox.c */

/* What the terminal, the clock and the signals say; the table glm52.core.system. */
void push_system(lua_State *L);

__attribute__((visibility("default"))) int luaopen_glm52(lua_State *L);

#endif
