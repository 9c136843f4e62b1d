#include "model/input.h"

#include <string.h>

#include "model/rope.h"

enum { INTEGERS = 5, FLOATS = 3, MAX_HALF = 2048 };

glm52_status input_stage_open(struct host *host, int64_t rows, int depths, struct input_stage *stage)
{
    size_t views = (size_t)depths + 1;

    stage->host = host;
    stage->rows = rows;
    stage->size = (size_t)rows * views * (INTEGERS * sizeof(int32_t) + FLOATS * sizeof(float)) +
                  ((size_t)rows + 1) * sizeof(int32_t);
    stage->bytes = host_alloc(host, stage->size, MEMORY_HOST);
    return stage->bytes ? GLM52_OK : GLM52_E_NOMEM;
}

void input_stage_close(struct input_stage *stage)
{
    if (stage->bytes) host_free(stage->host, stage->bytes, stage->size, MEMORY_HOST);
    stage->bytes = NULL;
}

void input_layout(const struct model_config *c, int depths, struct plan *p, struct input_plan *layout)
{
    layout->half = (int)c->qk_rope_head_dim / 2;
    layout->depths = depths;
    plan_keep(p, &layout->integers, GLM52_DTYPE_I32, p->rows * (depths + 1) * INTEGERS + p->rows + 1, 1);
    plan_keep(p, &layout->floats, GLM52_DTYPE_F32, p->rows * (depths + 1), FLOATS);
    plan_keep(p, &layout->rope, GLM52_DTYPE_F32, p->rows * (depths + 1), 2 * layout->half);
    plan_keep(p, &layout->frequency, GLM52_DTYPE_F32, 1, layout->half);
}

/* Is the label that row t predicts at depth d (-1: the trunk) inside its document and not masked? The label of the
 * trunk at row t + 1 + d is the same token. */
static int has_label(const struct pack *p, int64_t t, int64_t end, int d)
{
    return t + 1 + d < end && p->label[t + 1 + d] >= 0 && p->mask[t + 1 + d] > 0;
}

/* All depths have a label: training.md 3.4. */
static int has_chain(const struct pack *p, int64_t t, int64_t end, int depths)
{
    for (int d = 0; d < depths; d++)
        if (!has_label(p, t, end, d)) return 0;
    return 1;
}

static int counts(const struct pack *p, int64_t t)
{
    return !p->counted || p->counted[t] > 0;
}

void input_count(const struct pack *pack, int depths, struct input_count *sum)
{
    sum->tokens += (double)pack->rows;
    for (int64_t n = 0; n < pack->documents; n++)
        for (int64_t t = pack->cu_seqlens[n], end = pack->cu_seqlens[n + 1]; t < end; t++) {
            if (pack->label[t] >= 0) sum->loss += (double)pack->mask[t];
            sum->rows += counts(pack, t);
            for (int d = 0; d < depths; d++) {
                if (has_label(pack, t, end, d)) sum->mtp[d] += (double)pack->mask[t + 1 + d];
                sum->mtp_rows[d] += counts(pack, t) && t + 1 + d < end;
            }
            if (depths) sum->chain += has_chain(pack, t, end, depths);
        }
}

/* Host arrays of one view. */
struct view {
    int32_t *token, *position, *start, *end, *label;
    float *weight, *kl_weight, *counted;
};

static struct view view_of(int32_t *integers, float *floats, int64_t rows, int view)
{
    int32_t *i = integers + view * INTEGERS * rows;
    float *f = floats + view * FLOATS * rows;

    return (struct view){i, i + rows, i + 2 * rows, i + 3 * rows, i + 4 * rows, f, f + rows, f + 2 * rows};
}

static void fill_trunk_row(const struct pack *p, int64_t t, int32_t begin, const struct input_scale *scale,
                           struct view *v)
{
    v->token[t] = p->token[t];
    v->position[t] = (int32_t)t - begin;
    v->start[t] = begin;
    v->end[t] = (int32_t)t + 1;
    v->label[t] = p->label[t];
    v->weight[t] = p->label[t] < 0 ? 0 : (float)((double)p->mask[t] * scale->loss);
    v->kl_weight[t] = counts(p, t) ? (float)scale->kl : 0;
    v->counted[t] = (float)counts(p, t);
}

static void fill_depth_row(const struct pack *p, int64_t t, int32_t begin, int32_t end, int d, int offset, int tv,
                           int depths, const struct input_scale *scale, struct view *v)
{
    int inside = t + 1 + d < end, labelled = has_label(p, t, end, d);

    v->token[t] = inside ? p->token[t + 1 + d] : -1;
    v->position[t] = (int32_t)t - begin + (offset ? d : 0);
    v->start[t] = begin;
    v->end[t] = inside ? (int32_t)t + 1 : begin; /* no key: nothing is selected */
    v->label[t] = labelled ? p->label[t + 1 + d] : PACK_NO_LABEL;
    if (tv)
        v->weight[t] = has_chain(p, t, end, depths) ? (float)scale->mtp[d] : 0;
    else
        v->weight[t] = labelled ? (float)((double)p->mask[t + 1 + d] * scale->mtp[d]) : 0;
    v->kl_weight[t] = inside && counts(p, t) ? (float)scale->mtp_kl[d] : 0;
    v->counted[t] = (float)(inside && counts(p, t));
}

/* Rows of the sequences of the balance loss; their number. Documents are filled up with empty ones to a power of two:
 * launches depend on the number, and so packs that differ in documents can mostly share a graph. */
static int32_t fill_sequences(const struct config *c, const struct pack *p, int32_t *sequence)
{
    int32_t n = 0, all = 1;

    sequence[0] = 0;
    sequence[1] = (int32_t)p->rows;
    if (c->moe.auxiliary_loss != AUXILIARY_DOCUMENT) return 1;
    while (all < p->documents) all *= 2;
    if (all > p->rows) all = (int32_t)p->rows;
    for (; n <= p->documents; n++) sequence[n] = p->cu_seqlens[n];
    for (; n <= all; n++) sequence[n] = (int32_t)p->rows;
    return all;
}

void input_open(struct model *m, const struct input_plan *layout, unsigned char *const base[REGIONS])
{
    float frequencies[MAX_HALF];

    model_inverse_frequency(m->config.model.rope_theta, layout->half, frequencies);
    m->stream->ops->upload(m->stream, base[layout->frequency.region] + layout->frequency.offset, frequencies,
                           (size_t)layout->half * sizeof *frequencies);
}

static int rotates_queries(const struct config *c)
{
    return c->mtp.query_offset == QUERY_OFFSET_DEPTH && c->mtp.share == MTP_SHARE_INDEX_KV;
}

void input_upload(struct model *m, const struct input_plan *layout, unsigned char *const base[REGIONS],
                  struct input_stage *stage, const struct pack *pack, const struct input_scale *scale,
                  struct input *out)
{
    const struct ops *ops = m->stream->ops;
    const struct config *c = &m->config;
    int64_t rows = pack->rows;
    int views = layout->depths + 1, tv = c->mtp.loss == MTP_LOSS_TV, offset = rotates_queries(c);
    int32_t *staged = (int32_t *)stage->bytes, *sequence = staged + views * INTEGERS * rows;
    float *staged_floats = (float *)(sequence + rows + 1);
    int32_t *integers = (int32_t *)(base[layout->integers.region] + layout->integers.offset);
    float *floats = (float *)(base[layout->floats.region] + layout->floats.offset);
    float *table = (float *)(base[layout->rope.region] + layout->rope.offset);

    for (int v = 0; v < views; v++) {
        struct view view = view_of(staged, staged_floats, rows, v);
        for (int64_t n = 0; n < pack->documents; n++)
            for (int64_t t = pack->cu_seqlens[n]; t < pack->cu_seqlens[n + 1]; t++)
                if (!v)
                    fill_trunk_row(pack, t, pack->cu_seqlens[n], scale, &view);
                else
                    fill_depth_row(pack, t, pack->cu_seqlens[n], pack->cu_seqlens[n + 1], v - 1, offset, tv,
                                   layout->depths, scale, &view);
    }
    int32_t sequences = fill_sequences(c, pack, sequence);
    ops->upload(m->stream, integers, staged, (size_t)(views * INTEGERS * rows + rows + 1) * sizeof *staged);
    ops->upload(m->stream, floats, staged_floats, (size_t)(views * FLOATS * rows) * sizeof *floats);
    for (int v = 0; v < views; v++) {
        struct view view = view_of(integers, floats, rows, v);
        float *query = v && offset ? table + v * rows * 2 * layout->half : table;
        out[v] = (struct input){.rows = rows, .token = view.token, .position = view.position, .start = view.start,
                                .end = view.end, .label = view.label, .weight = view.weight,
                                .kl_weight = view.kl_weight, .counted = view.counted, .rope = table,
                                .rope_query = query, .sequence = integers + views * INTEGERS * rows,
                                .sequences = sequences};
        /* Rows without an input token. */
        pack_pairs(pack, c->model.index_topk, v, &out[v].pairs, &out[v].selected_pairs);
    }
}

void input_tables(struct model *m, const struct input_plan *layout, unsigned char *const base[REGIONS],
                  const struct input *in)
{
    const float *frequency = (const float *)(base[layout->frequency.region] + layout->frequency.offset);

    m->stream->label = "rope";
    for (int v = 0; v <= (rotates_queries(&m->config) ? layout->depths : 0); v++)
        m->stream->ops->rope_table(m->stream, in[v].rows, layout->half, in[v].position, frequency, in[v].rope_query);
}
