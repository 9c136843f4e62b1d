/* What recipes need of the system and standard Lua lacks: terminal, clock, own path, directories, and Ctrl-C as a
 * cancellation. */
#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <xxhash.h>

#include "binding.h"

/* ---- interruption ------------------------------------------------------------------------------------ *
 * While a recipe trains, the first SIGINT or SIGTERM asks the library to stop, so that the run can save its state; a
 * second one ends the process at once. The signals belong to the host again when training is over. */

static const int signals[] = {SIGINT, SIGTERM};

enum { SIGNALS = sizeof signals / sizeof *signals };

static struct sigaction host_action[SIGNALS];
static glm52_context *_Atomic interruptible;
static volatile sig_atomic_t received;

static void on_signal(int number)
{
    glm52_context *context = atomic_load(&interruptible);

    if (received || !context) {
        signal(number, SIG_DFL);
        kill(getpid(), number);
        return;
    }
    received = number;
    glm52_context_cancel(context);
}

/* system.catch_interrupts(context) */
static int catch_interrupts(lua_State *L)
{
    glm52_context *context = handle_get(L, 1, class_named("context"));
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART};

    if (atomic_load(&interruptible)) return throw_error(L, GLM52_E_STATE, "another run trains in this process", "");
    received = 0;
    lua_settop(L, 1); /* the context's log may need what its userdata keeps */
    lua_setfield(L, LUA_REGISTRYINDEX, "glm52.interruptible");
    atomic_store(&interruptible, glm52_context_ref(context));
    sigemptyset(&action.sa_mask);
    for (int i = 0; i < SIGNALS; i++) sigaction(signals[i], &action, &host_action[i]);
    return 0;
}

static int release_interrupts(lua_State *L)
{
    glm52_context *context = atomic_load(&interruptible);

    if (!context) return 0;
    for (int i = 0; i < SIGNALS; i++) sigaction(signals[i], &host_action[i], NULL);
    atomic_store(&interruptible, NULL);
    glm52_context_unref(&context);
    lua_pushnil(L);
    lua_setfield(L, LUA_REGISTRYINDEX, "glm52.interruptible");
    return 0;
}

/* system.interrupted(): the number of the signal caught since catch_interrupts(), or nil. */
static int interrupted(lua_State *L)
{
    if (!received) return 0;
    lua_pushinteger(L, received);
    return 1;
}

/* ---- terminal, clock, paths -------------------------------------------------------------------------- */

/* system.terminal(): columns of the terminal behind standard output, or nil. */
static int terminal(lua_State *L)
{
    struct winsize size;

    if (!isatty(STDOUT_FILENO)) return 0;
    lua_pushinteger(L, !ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) && size.ws_col ? size.ws_col : 80);
    return 1;
}

/* system.seconds(): of a clock that never jumps. */
static int seconds(lua_State *L)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    lua_pushnumber(L, (lua_Number)now.tv_sec + (lua_Number)now.tv_nsec * 1e-9);
    return 1;
}

/* system.executable(): path of the running program, or nil. */
static int executable(lua_State *L)
{
    char path[4096];
    ssize_t length = readlink("/proc/self/exe", path, sizeof path);

    if (length <= 0 || length == (ssize_t)sizeof path) return 0;
    lua_pushlstring(L, path, (size_t)length);
    return 1;
}

/* system.make_directory(path): true if it is there now, else nil and the reason. Its parent must exist. */
static int make_directory(lua_State *L)
{
    const char *path = luaL_checkstring(L, 1);
    struct stat found;

    if ((mkdir(path, 0777) && errno != EEXIST) || stat(path, &found)) return luaL_fileresult(L, 0, NULL);
    errno = ENOTDIR;
    return luaL_fileresult(L, S_ISDIR(found.st_mode), NULL);
}

/* system.hash(text): XXH3 of 128 bits, in hexadecimal digits. */
static int hash(lua_State *L)
{
    size_t bytes;
    const char *text = luaL_checklstring(L, 1, &bytes);
    XXH128_hash_t sum = XXH3_128bits(text, bytes);
    char digits[40];

    snprintf(digits, sizeof digits, "%016llx%016llx", (unsigned long long)sum.high64, (unsigned long long)sum.low64);
    lua_pushstring(L, digits);
    return 1;
}

static const luaL_Reg functions[] = {
    {"catch_interrupts", catch_interrupts}, {"release_interrupts", release_interrupts}, {"interrupted", interrupted},
    {"terminal", terminal}, {"seconds", seconds}, {"executable", executable},
    {"make_directory", make_directory}, {"hash", hash}, {NULL, NULL}};

void push_system(lua_State *L)
{
    luaL_newlib(L, functions);
}
