/* CASE and BENCH: two small macros over Check for the operations table. A case runs on every device that is linked in,
 * and its results are held to a plain loop in double precision that stands in the same file.
 *
 *     CASE(gemm, "odd shapes, gaps between rows")
 *     {
 *         struct array *a = array_normal(GLM52_DTYPE_F32, 37 * 19, 1), *c = array_output(GLM52_DTYPE_F32, 37 * 5);
 *         ...
 *         ops->gemm(device, &shape, a->at, b->at, c->at);
 *         check_close(c, want, tolerance(c->type, 19));
 *     }
 *     BENCH(gemm, "4096 x 512 x 512")
 *     {
 *         ...
 *         BENCH_LOOP
 *             ops->gemm(device, &shape, a->at, b->at, c->at);
 *         bench_rate(flops, bytes);
 *     }
 *
 * Arrays live until the case ends. Use odd dimensions, all different. */
#ifndef GLM52_TESTS_OPS_CASE_H
#define GLM52_TESTS_OPS_CASE_H

#include <check.h>
#undef fail /* Check's old name for ck_abort; ours is in base/error.h */
#include <math.h>

#include "base/dtype.h"
#include "ops/ops.h"

/* The device under test and its table. */
extern struct stream *device;
extern const struct ops *ops;

/* ---- registration ---- */

enum { IS_CASE, IS_BENCH, IS_BENCH_FULL };

struct case_entry {
    const char *op, *text, *peer, *file;
    int line, kind;
    void (*body)(void);
    struct case_entry *next;
};
void case_register(struct case_entry *entry);

struct device_entry {
    const char *name;
    glm52_status (*open)(struct stream *s, struct host *host, int threads);
    struct device_entry *next;
};
void device_register(struct device_entry *entry);

#define CASE_JOIN_(a, b) a##b
#define CASE_JOIN(a, b) CASE_JOIN_(a, b)
#define CASE_ENTRY(op_, text_, peer_, kind_)                                                                           \
    static void CASE_JOIN(case_body_, __LINE__)(void);                                                                 \
    __attribute__((constructor)) static void CASE_JOIN(case_enter_, __LINE__)(void)                                    \
    {                                                                                                                  \
        static struct case_entry entry = {#op_, text_, peer_, __FILE__, __LINE__, kind_,                               \
                                          CASE_JOIN(case_body_, __LINE__), 0};                                         \
        case_register(&entry);                                                                                         \
    }                                                                                                                  \
    static void CASE_JOIN(case_body_, __LINE__)(void)

#define CASE(op, text) CASE_ENTRY(op, text, "", IS_CASE)
#define BENCH(op, text) CASE_ENTRY(op, text, "", IS_BENCH)
/* A bench at the full width of GLM-5.2, for GPUs: each call is timed by the device's own clock after 512 MiB of other
 * data have passed through its caches. peer: what others reach, or "". Ends with bench_counted or bench_rate. */
#define BENCH_FULL(op, text, peer) CASE_ENTRY(op, text, peer, IS_BENCH_FULL)

/* Adds a device to the list by linking the file that says so. */
#define DEVICE(name_, open_)                                                        \
    __attribute__((constructor)) static void CASE_JOIN(device_enter_, __LINE__)(void) \
    {                                                                               \
        static struct device_entry entry = {name_, open_, 0};                       \
        device_register(&entry);                                                    \
    }

/* ---- random numbers: a function of --seed, the case and the number of draws so far ---- */

double draw_normal(void);
double draw_uniform(void);        /* [0, 1) */
int64_t draw_below(int64_t n);    /* 0 .. n - 1 */
int64_t draw_between(int64_t low, int64_t high); /* both included */

/* ---- arrays ---- */

/* An array on the device between guard bytes, and its elements on the host. */
struct array {
    glm52_dtype type;  /* F32, BF16, F64, I32, F8_E4M3 (codes of any kind, as whole numbers) or U8 (workspace) */
    int64_t count;
    void *at;          /* on the device; 64-byte aligned */
    double *value;     /* what was pushed, or fetched last; exactly what the device sees */
    void *block;       /* at with its guards */
    void *kept;        /* bits remembered by check_same */
    struct array *next;
};

struct array *array_normal(glm52_dtype type, int64_t count, double deviation);
struct array *array_zero(glm52_dtype type, int64_t count);
struct array *array_from(glm52_dtype type, int64_t count, const double *value);
/* [count, 2] fp32: cosine and sine of random angles, as rope_table makes them of positions. */
struct array *array_rotations(int64_t count);
/* NaN in every element (-1 for integers), so that what an operation leaves out shows. */
struct array *array_output(glm52_dtype type, int64_t count);
/* Poisoned bytes; at least one, so that `at` is valid. */
struct array *array_workspace(size_t bytes);

/* Random numbers of any size at once, for benches: nothing of it is kept on the host. */
struct array *array_random(glm52_dtype type, int64_t count);

void array_push(struct array *a);   /* rounds value to the type, sends it */
void array_poison(struct array *a); /* NaN again */
void array_fetch(struct array *a);  /* device -> value; fails if a guard byte changed */

double *doubles(int64_t count);     /* zeroed, lives as long as arrays do */

/* ---- checks ---- */

/* Relative to the largest magnitude: the rounding of the result and of a sum of `terms` products in fp32. */
double tolerance(glm52_dtype type, int64_t terms);

/* Fetches a and compares with `want` within `tolerance` times the largest finite |want|. Where
 * want is NaN, a must still hold its poison. */
#define check_close(a, want, tolerance) check_close_at(__FILE__, __LINE__, #a, a, want, tolerance)
/* Fetches a and compares exactly (integers, copies). */
#define check_exact(a, want) check_close_at(__FILE__, __LINE__, #a, a, want, 0.0)
/* Fetches a; the first call remembers its bits, later ones compare with them. */
#define check_same(a) check_same_at(__FILE__, __LINE__, #a, a)
void check_close_at(const char *file, int line, const char *name, struct array *a, const double *want,
                    double tolerance);
void check_same_at(const char *file, int line, const char *name, struct array *a);

/* Sets how many threads the device uses; a device without threads ignores it. */
void device_threads(int threads);
/* Waits for the device; fails the case if it reports an error. */
void device_wait(void);

/* Central differences of objective(problem) with respect to x[0 .. count), in double. */
void differences(double (*objective)(void *problem), void *problem, double *x, int64_t count, double *gradient);

/* ---- benches ---- */

/* Repeats the next statement for about half a second and keeps the fastest round; a full
 * bench some rounds, and keeps the median. */
#define BENCH_LOOP for (bench_begin(); bench_again();)
void bench_begin(void);
int bench_again(void);
/* Prints one line: the rate in FLOPs and the share of the device's own matrix product (OpenBLAS's sgemm
 * 2048^3 on the cpu, bf16 8192^3 for a full bench), or, if flops is 0, in bytes and the share of its copy;
 * of a full bench also the bytes, the time that the host takes to launch it, what a copy that reads and
 * writes as many bytes takes, and the peer. */
void bench_rate(double flops, double bytes);
/* The same with the FLOPs and bytes that ops/count.h states for what ran. */
void bench_counted(void);

#endif
