/* Rows of a tally, found by label and operation. */
#include "ops/tally.h"

#include <string.h>

static int same(const char *a, const char *b)
{
    return a == b || strcmp(a, b) == 0;
}

struct tally_row *tally_row(struct tally *tally, const char *label, const char *operation)
{
    struct tally_row *row;

    for (int i = 0; i < tally->rows; i++) {
        row = &tally->row[i];
        if (same(row->operation, operation) && same(row->label, label)) return row;
    }
    if (tally->rows == TALLY_ROWS) return &tally->row[TALLY_ROWS - 1];
    row = &tally->row[tally->rows++];
    memset(row, 0, sizeof *row);
    row->label = label;
    row->operation = operation;
    return row;
}

double tally_flops(const struct tally *tally)
{
    double flops = 0;

    for (int i = 0; i < tally->rows; i++) flops += tally->row[i].flops;
    return flops;
}
