/* What a device was asked to do: calls, FLOPs and bytes per (label, operation). The meta device fills it and does
 * nothing else; other devices fill it when a profile is wanted. */
#ifndef GLM52_OPS_TALLY_H
#define GLM52_OPS_TALLY_H

#include <stdint.h>

enum { TALLY_ROWS = 512 };

struct tally_row {
    const char *label, *operation;  /* static strings; label: the part of the model that asked, "mla.q_b" */
    uint64_t calls;
    double flops;                   /* 2 per fused multiply-add of matrix work; elementwise work counts 0 */
    double bytes;                   /* read and written, each operand once */
    double seconds;                 /* 0 where time was not taken */
};

struct tally {
    struct tally_row row[TALLY_ROWS];
    int rows;
    /* Of a device whose operations run later than they are called: told of each before it begins. NULL: nobody asks. */
    void (*begins)(void *user, struct tally_row *row);
    void *user;
};

/* Finds or adds the row; the last row collects what does not fit. */
struct tally_row *tally_row(struct tally *tally, const char *label, const char *operation);
double tally_flops(const struct tally *tally);

#endif
