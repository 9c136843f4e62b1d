/* Which part of a tile of rows x keys is worth computing, where row t sees keys start[t] .. end[t] - 1. */
#ifndef GLM52_OPS_CPU_VISIBLE_H
#define GLM52_OPS_CPU_VISIBLE_H

#include "ops/cpu/row.h"

/* Rows and keys of a tile from the first that matters to the last; rows = 0: none does. */
struct box {
    int64_t row, rows, key, keys;
};

/* The columns low .. high - 1 of a box that one row sees; low = high = 0 where it sees none. */
struct columns {
    int64_t low, high;
};

static inline int64_t most(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* The smallest box around every pair that is visible in rows row .. row + rows - 1 and keys key .. key + keys - 1. */
static inline struct box visible_box(const int32_t *start, const int32_t *end, int64_t row, int64_t rows, int64_t key,
                                     int64_t keys)
{
    int64_t first = row + rows, last = row, low = key + keys, high = key;

    for (int64_t t = row; t < row + rows; t++) {
        int64_t from = most(start[t], key), to = least(end[t], key + keys);

        if (from >= to) continue;
        first = least(first, t);
        last = t + 1;
        low = least(low, from);
        high = most(high, to);
    }
    if (first >= last) return (struct box){row, 0, key, 0};
    return (struct box){first, last - first, low, high - low};
}

static inline struct columns visible_columns(const int32_t *start, const int32_t *end, int64_t t, int64_t key,
                                             int64_t keys)
{
    int64_t low = most(start[t] - key, 0), high = least(end[t] - key, keys);

    return low < high ? (struct columns){low, high} : (struct columns){0, 0};
}

/* Zeroes what a row of a box does not see. */
static inline void blank_unseen(float *row, struct columns seen, int64_t keys)
{
    memset(row, 0, (size_t)seen.low * sizeof *row);
    memset(row + seen.high, 0, (size_t)(keys - seen.high) * sizeof *row);
}

#endif
