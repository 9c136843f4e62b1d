/* What stands between the library's handles and Python: capsules that hold them, the turn of a context, its log, and
 * errors. Everything here is called with the GIL. */
#ifndef GLM52_PYTHON_HANDLE_H
#define GLM52_PYTHON_HANDLE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdatomic.h>
#include <glm52.h>

enum held_class { HELD_CONTEXT, HELD_CONFIG, HELD_MODEL, HELD_BATCH, HELD_DATASET, HELD_OPTIMIZER, HELD_STEP };

extern const char *const class_name[]; /* by enum held_class, and the names of the capsules */

struct message;

/* A context and its children serve one thread at a time: who calls takes the turn, others wait. It lives as long as a
 * handle of the context, and so do the messages of the log. All but `newest` is guarded by the GIL. */
struct turn {
    PyThread_type_lock lock;
    int references;
    int kept_gradients;
    unsigned long holder;      /* thread whose turn it is, 0: nobody's */
    unsigned long interrupted; /* thread that must not begin its turn */
    glm52_context *cancelled;  /* the context, if the holder's call was cancelled by turn_abandon() */
    struct message *_Atomic newest;
};

/* One reference to a handle. A handle that is closed while another thread uses it is let go when that one is done. */
struct held {
    void *handle;
    enum held_class class;
    struct turn *turn;
    int users;
    int closed;
    int keeps_gradients;
};

struct turn *turn_create(void);
void turn_drop(struct turn *turn);
/* 0 with an exception if a signal handler raised one while waiting, or if turn_abandon() said so. NULL is taken at
 * once. */
int turn_take(const struct held *held);
void turn_give(const struct held *held);
/* Ends a job of glm52._work and no other call, and waits for it: before it begins, while it waits for the turn of its
 * context, or by cancelling. In one piece, so that a second signal cannot leave the job behind. */
PyObject *turn_abandon(PyObject *context, PyObject *job);
/* Receives the log of a context whose log_user is its turn. Any thread, without the GIL. */
void turn_log(void *turn, glm52_log_level level, const char *message);
/* List of (level, text) that arrived since the last call, or None. */
PyObject *turn_messages(PyObject *object);

/* A capsule that owns the reference `handle`. On failure the reference is dropped. */
PyObject *held_new(void *handle, enum held_class class, struct turn *turn);
/* Borrows for a call, until held_done(). 0 with an exception; None gives NULL, which the library refuses or knows. */
int held_in(PyObject *object, enum held_class class, struct held **held, void *handle);
void held_done(struct held *held);
/* The same for every item of a sequence. held_list_done() also after a failure. */
struct held_list {
    Py_ssize_t count;
    void **handles;
    struct held **held;
};
int held_list_in(PyObject *sequence, enum held_class class, struct held_list *list);
void held_list_done(struct held_list *list);
/* Drops the reference, now or when its last user is done. Closing twice is fine. */
PyObject *held_close(PyObject *object);
PyObject *held_is_closed(PyObject *object);

/* A further reference in a capsule of its own; that of a step keeps the gradients where they are. */
PyObject *held_keep(PyObject *object);
/* How many such capsules of steps there are in this context. */
PyObject *turn_kept_gradients(PyObject *object);

/* The struct behind a capsule of ours, of any class if `wanted` is NULL; NULL with a TypeError. */
struct held *held_of(PyObject *object, const char *wanted);
PyObject *text_of(const char *text);
/* Raises what glm52._errors.`maker`(text) returns. */
void raise_error(const char *maker, const char *text);
/* Raises the thread's last error as glm52.Error or its subclass. */
void raise_last(void);

/* DLPack capsule over memory that `keeper` keeps. shape: a tuple. */
PyObject *dlpack_new(PyObject *keeper, unsigned long long address, int dtype, int on_device, PyObject *shape,
                     int versioned, int read_only);

#endif
