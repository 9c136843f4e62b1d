/* A packed row on the device: what the parts of a pass read of it. */
#ifndef GLM52_MODEL_INPUT_H
#define GLM52_MODEL_INPUT_H

#include "data/pack.h"
#include "model/model.h"
#include "model/plan.h"

/* Host memory in which rows are put together before they travel. */
struct input_stage {
    struct host *host;
    int64_t rows;
    unsigned char *bytes;
    size_t size;
};

struct input {
    int64_t rows;
    const int32_t *token, *position;  /* [rows]; positions restart in each document */
    const int32_t *start, *end;       /* [rows] visible keys: start .. end - 1 */
    const int32_t *label;             /* [rows], negative for none */
    const float *weight;              /* [rows] share of each row's loss in the step's */
    const float *rope;                /* [rows,half,2] */
    double pairs, selected_pairs;     /* visible, and of at most index_topk keys per row */
};

struct input_plan {
    struct slot integers, weight, rope, frequency; /* integers: token, position, start, end, label in one array */
    int half;
};

glm52_status input_stage_open(struct host *host, int64_t rows, struct input_stage *stage);
void input_stage_close(struct input_stage *stage);
void input_layout(const struct model_config *c, struct plan *p, struct input_plan *layout);
/* Sends the pack to the device and builds the rotary table. scale multiplies the mask: 1 / total weight of the step. */
void input_upload(struct model *m, const struct input_plan *layout, unsigned char *const base[REGIONS],
                  struct input_stage *stage, const struct pack *pack, double scale, struct input *out);

#endif
