/* The teacher's probabilities of the dense loss on Hopper's tensor cores. */
#pragma once

#include "device/element.cuh"

constexpr int TEACHER_PARTS = 2; /* of an lse that is made here */

/* Rows first .. first + rows - 1. */
struct teaching {
    struct teacher t;
    int64_t all_rows, keys, first, rows, stride;
    glm52_dtype type;
    const void *q, *key;
    const int32_t *start, *end;
    const float *lse; /* [rows, heads] of the chunk; NULL: to be made */
    float *own_lse;   /* where: [TEACHER_PARTS, rows, heads] */
    float *p;         /* [rows, stride]; only what a row sees is written */
};

/* false: nothing is done, the shape is not of the kernel's kind. */
bool teach_hopper(cuda_device *d, const teaching &x);
