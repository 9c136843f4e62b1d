/* The selection rule alone: scores and windows in, indices and their number out. */
#include <stdlib.h>

#include "case.h"
#include "ops/ops.h"

void run_topk_select(struct golden_case *c)
{
    struct array scores, start, end;
    struct stream stream;
    int64_t k = json_integer_value(json_object_get(c->sidecar, "k"));

    if (k <= 0) {
        case_fail(c, "k is missing in the sidecar");
        return;
    }
    int given = case_array(c, "scores", &scores) & case_array(c, "start", &start) & case_array(c, "end", &end);
    if (given && (scores.dimensions != 2 || start.count != scores.shape[0] || end.count != scores.shape[0])) {
        case_fail(c, "scores must be [rows, keys], start and end [rows]");
    } else if (given && case_stream(c, &stream)) {
        int64_t rows = scores.shape[0];
        float *score = array_floats(&scores);
        int32_t *from = array_int32s(&start), *to = array_int32s(&end);
        int32_t *selected = must_allocate((size_t)(rows * k), sizeof *selected);
        int32_t *length = must_allocate((size_t)rows, sizeof *length);
        int64_t *wide = must_allocate((size_t)(rows * k), sizeof *wide);

        struct mirror m = {.s = &stream};

        stream.ops->select_topk(&stream, rows, scores.shape[1], (int32_t)k,
                                on_device(&m, score, (size_t)scores.count * sizeof *score),
                                on_device(&m, from, (size_t)rows * sizeof *from),
                                on_device(&m, to, (size_t)rows * sizeof *to),
                                on_device(&m, selected, (size_t)(rows * k) * sizeof *selected),
                                on_device(&m, length, (size_t)rows * sizeof *length));
        back_from_device(&m);
        for (int64_t i = 0; i < rows * k; i++) wide[i] = selected[i];
        compare_integers(c, "indices", "indices", wide, rows * k);
        for (int64_t i = 0; i < rows; i++) wide[i] = length[i];
        compare_integers(c, "length", "length", wide, rows);
        stream_close(&stream);
        free(score);
        free(from);
        free(to);
        free(selected);
        free(length);
        free(wide);
    }
    array_free(&scores);
    array_free(&start);
    array_free(&end);
    if (given) case_check_used(c, 1);
}
