/* What abi/gen.lua writes about the public functions, and how a call of one is made from it: arguments are converted
 * as the description says, libffi makes the call, a failing status is raised, outputs become results. A function that
 * is added to the description is thus one that Lua can call. */
#ifndef GLM52_LUA_CALL_H
#define GLM52_LUA_CALL_H

#include <stddef.h>

#include "binding.h"

enum kind {
    KIND_VOID, KIND_STATUS, KIND_INT32, KIND_UINT32, KIND_INT64, KIND_UINT64, KIND_DOUBLE, KIND_STRING, KIND_POINTER,
    KIND_ENUM, KIND_HANDLE, KIND_STRUCT, KIND_VIEW
};

/* What becomes of a parameter. Lua gives the arguments IN, EACH, LIST_IN and CAPACITY, and gets OUT and LIST_OUT. */
enum role {
    ROLE_IN,
    ROLE_EACH,     /* an index from 0; Lua counts from 1, and without it gets the list of all */
    ROLE_LIST_IN,  /* a Lua list (or a tensor; one handle is a list of one) */
    ROLE_COUNT,    /* elements of the list `other` */
    ROLE_CAPACITY, /* how many elements the list `other` may get */
    ROLE_LIST_OUT,
    ROLE_FILLED,   /* how many elements of the list `other` were written */
    ROLE_OUT
};

struct enumerator {
    const char *label;
    int value;
};

struct enumeration {
    const char *name;
    const struct enumerator *values; /* ends with a NULL label */
};

struct field {
    const char *name;
    size_t offset;
    enum kind kind;
    int boolean, lasts;
    const void *of;
};

struct layout {
    const char *name;
    size_t bytes;
    const struct field *fields; /* ends with a NULL name */
};

struct parameter {
    const char *name;
    enum role role;
    enum kind kind;
    int nullable, boolean, keeps, optional, owned, lasts;
    double otherwise; /* value of an optional one that is not given */
    const void *of;   /* struct class, enumeration or layout, by kind */
    int other;
};

enum { PARAMETERS = 12 };

struct function {
    const char *name;
    void (*address)(void);
    const struct class *class; /* whose method it is, or NULL */
    struct parameter result;
    int count;
    struct parameter parameters[PARAMETERS];
};

extern const struct function functions[]; /* ends with a NULL name */
extern const struct enumeration enum_glm52_dtype;

#define FUNCTION(name) ((void (*)(void))(name))

/* Pushes a closure that calls the function. */
void push_function(lua_State *L, const struct function *function);

#endif
