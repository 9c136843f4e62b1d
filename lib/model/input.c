#include "model/input.h"

#include <string.h>

#include "model/rope.h"

enum { INTEGERS = 5, MAX_HALF = 512 };

glm52_status input_stage_open(struct host *host, int64_t rows, struct input_stage *stage)
{
    stage->host = host;
    stage->rows = rows;
    stage->size = (size_t)rows * (INTEGERS * sizeof(int32_t) + sizeof(float));
    stage->bytes = host_alloc(host, stage->size, MEMORY_HOST);
    return stage->bytes ? GLM52_OK : GLM52_E_NOMEM;
}

void input_stage_close(struct input_stage *stage)
{
    if (stage->bytes) host_free(stage->host, stage->bytes, stage->size, MEMORY_HOST);
    stage->bytes = NULL;
}

void input_layout(const struct model_config *c, struct plan *p, struct input_plan *layout)
{
    layout->half = (int)c->qk_rope_head_dim / 2;
    plan_keep(p, &layout->integers, GLM52_DTYPE_I32, p->rows, INTEGERS);
    plan_keep(p, &layout->weight, GLM52_DTYPE_F32, p->rows, 1);
    plan_keep(p, &layout->rope, GLM52_DTYPE_F32, p->rows, 2 * layout->half);
    plan_keep(p, &layout->frequency, GLM52_DTYPE_F32, 1, layout->half);
}

/* Fills token, position, start, end, label, one array after another, and the loss weights. */
static void fill_stage(const struct pack *pack, double scale, int32_t *integers, float *weight)
{
    int64_t rows = pack->rows;
    int32_t *position = integers + rows, *start = position + rows, *end = start + rows, *label = end + rows;

    memcpy(integers, pack->token, (size_t)rows * sizeof *integers);
    memcpy(label, pack->label, (size_t)rows * sizeof *label);
    for (int64_t d = 0; d < pack->documents; d++)
        for (int32_t t = pack->cu_seqlens[d]; t < pack->cu_seqlens[d + 1]; t++) {
            position[t] = t - pack->cu_seqlens[d];
            start[t] = pack->cu_seqlens[d];
            end[t] = t + 1;
            weight[t] = pack->label[t] < 0 ? 0 : (float)((double)pack->mask[t] * scale);
        }
}

void input_upload(struct model *m, const struct input_plan *layout, unsigned char *const base[REGIONS],
                  struct input_stage *stage, const struct pack *pack, double scale, struct input *out)
{
    const struct ops *ops = m->stream->ops;
    int64_t rows = pack->rows;
    int32_t *staged = (int32_t *)stage->bytes, *integers = (int32_t *)(base[layout->integers.region] + layout->integers.offset);
    float *staged_weight = (float *)(staged + INTEGERS * rows);
    float *weight = (float *)(base[layout->weight.region] + layout->weight.offset);
    float *table = (float *)(base[layout->rope.region] + layout->rope.offset);
    float *frequency = (float *)(base[layout->frequency.region] + layout->frequency.offset), frequencies[MAX_HALF];

    fill_stage(pack, scale, staged, staged_weight);
    model_inverse_frequency(m->config.model.rope_theta, layout->half, frequencies);
    ops->upload(m->stream, integers, staged, (size_t)(INTEGERS * rows) * sizeof *staged);
    ops->upload(m->stream, weight, staged_weight, (size_t)rows * sizeof *weight);
    ops->upload(m->stream, frequency, frequencies, (size_t)layout->half * sizeof *frequency);
    *out = (struct input){.rows = rows, .token = integers, .position = integers + rows, .start = integers + 2 * rows,
                          .end = integers + 3 * rows, .label = integers + 4 * rows, .weight = weight, .rope = table};
    pack_pairs(pack, m->config.model.index_topk, &out->pairs, &out->selected_pairs);
    m->stream->label = "rope";
    ops->rope_table(m->stream, rows, layout->half, out->position, frequency, table);
}
