/* The turn of a context: who calls, who waits, how a call is interrupted, and the log that arrives meanwhile. */
#include "handle.h"

#include <stdlib.h>
#include <string.h>

struct message {
    struct message *next;
    glm52_log_level level;
    char text[];
};

static const PY_TIMEOUT_T look_every = 50000; /* microseconds between looks at `interrupted` */

struct turn *turn_create(void)
{
    struct turn *turn = calloc(1, sizeof *turn);

    if (turn) turn->lock = PyThread_allocate_lock();
    if (turn && turn->lock) {
        turn->references = 1;
        return turn;
    }
    free(turn);
    PyErr_NoMemory();
    return NULL;
}

/* All waiting messages, oldest first. */
static struct message *take_messages(struct turn *turn)
{
    struct message *newest = atomic_exchange(&turn->newest, NULL), *oldest = NULL;

    while (newest) {
        struct message *next = newest->next;
        newest->next = oldest;
        oldest = newest;
        newest = next;
    }
    return oldest;
}

static void free_messages(struct message *message)
{
    while (message) {
        struct message *next = message->next;
        free(message);
        message = next;
    }
}

void turn_drop(struct turn *turn)
{
    if (--turn->references) return;
    free_messages(take_messages(turn));
    PyThread_free_lock(turn->lock);
    free(turn);
}

/* Raises glm52.Cancelled in the thread that must not begin. */
static int may_begin(struct turn *turn, unsigned long thread)
{
    if (turn->interrupted != thread) return 1;
    turn->interrupted = 0;
    raise_error("cancelled", "interrupted before it began");
    return 0;
}

int turn_take(const struct held *held)
{
    if (!held) return 1;
    struct turn *turn = held->turn;
    unsigned long self = PyThread_get_thread_ident();
    int taken = PyThread_acquire_lock(turn->lock, NOWAIT_LOCK);
    while (!taken) {
        Py_BEGIN_ALLOW_THREADS
        taken = PyThread_acquire_lock_timed(turn->lock, look_every, 1) == PY_LOCK_ACQUIRED;
        Py_END_ALLOW_THREADS
        if (!taken && (PyErr_CheckSignals() || !may_begin(turn, self))) return 0;
    }
    if (!may_begin(turn, self)) {
        PyThread_release_lock(turn->lock);
        return 0;
    }
    turn->holder = self;
    return 1;
}

void turn_give(const struct held *held)
{
    if (!held) return;
    struct turn *turn = held->turn;
    /* What came too late for this call was not meant for the next. */
    if (turn->cancelled) glm52_context_withdraw_cancel(turn->cancelled);
    turn->cancelled = NULL;
    turn->holder = 0;
    PyThread_release_lock(turn->lock);
}

void turn_log(void *user, glm52_log_level level, const char *text)
{
    struct turn *turn = user;
    size_t bytes = strlen(text) + 1;
    struct message *message = malloc(sizeof *message + bytes);

    if (!message) return;
    message->level = level;
    memcpy(message->text, text, bytes);
    message->next = atomic_load(&turn->newest);
    while (!atomic_compare_exchange_weak(&turn->newest, &message->next, message)) continue;
}

static void interrupt(struct turn *turn, glm52_context *context, unsigned long thread)
{
    if (turn->holder == thread && context) {
        turn->cancelled = context;
        glm52_context_cancel(context);
    } else {
        turn->interrupted = thread;
    }
}

/* Whether lock.acquire(True, timeout) got it. Signal handlers run meanwhile; what they raise is dropped, for one
 * exception is on its way already. */
static int acquire(PyObject *lock, int blocking, double timeout)
{
    PyObject *got = PyObject_CallMethod(lock, "acquire", "id", blocking, timeout);
    int taken = got == Py_True;

    if (!got) PyErr_Clear();
    Py_XDECREF(got);
    return taken;
}

static PyObject *abandon(struct held *held, PyObject *claim, PyObject *done, PyObject *job)
{
    if (acquire(claim, 0, -1)) Py_RETURN_NONE; /* nobody has begun it, and now nobody will */
    PyObject *thread = PyObject_GetAttrString(job, "thread"), *finished = PyObject_GetAttrString(job, "finished");
    if (thread && finished == Py_False) {
        interrupt(held->turn, held->handle, PyLong_AsUnsignedLong(thread));
        while (!acquire(done, 1, 60)) continue;
        held->turn->interrupted = 0; /* it may have been over before it was told */
    }
    Py_XDECREF(thread);
    Py_XDECREF(finished);
    if (!thread || !finished) return NULL;
    Py_RETURN_NONE;
}

PyObject *turn_abandon(PyObject *context, PyObject *job)
{
    struct held *held = held_of(context, class_name[HELD_CONTEXT]);
    PyObject *claim = PyObject_GetAttrString(job, "claim"), *done = PyObject_GetAttrString(job, "done");
    PyObject *result = held && claim && done ? abandon(held, claim, done, job) : NULL;

    Py_XDECREF(claim);
    Py_XDECREF(done);
    return result;
}

PyObject *turn_messages(PyObject *object)
{
    struct held *held = held_of(object, NULL);

    if (!held) return NULL;
    if (!atomic_load(&held->turn->newest)) Py_RETURN_NONE;
    PyObject *list = PyList_New(0);
    struct message *first = take_messages(held->turn);
    for (struct message *m = first; m && list; m = m->next) {
        PyObject *pair = Py_BuildValue("(iN)", m->level, text_of(m->text));
        if (!pair || PyList_Append(list, pair)) Py_CLEAR(list);
        Py_XDECREF(pair);
    }
    free_messages(first);
    return list;
}
