/* silu(gate) * up, weighted per row for routed experts (model.md 2.5, 2.6), and its backward. */
#include "ops/count.h"
#include "ops/cpu/cpu.h"
#include "ops/cpu/expf.h"
#include "ops/cpu/row.h"

static int team_of(const struct stream *s, const struct swiglu *g)
{
    return cpu_team(s, (double)g->rows * (double)g->width * 8);
}

void cpu_swiglu_forward(struct stream *s, const struct swiglu *g, const void *gate_up, const float *weight,
                        const int32_t *source, void *act)
{
    struct counted call = count_swiglu_forward(s, g, weight != NULL);

#pragma omp parallel for schedule(static) num_threads(team_of(s, g))
    for (int64_t row = 0; row < g->rows; row++) {
        float gate_chunk[CHUNK], up_chunk[CHUNK], out[CHUNK], p = weight ? weight[source[row]] : 1.0f;

        for (int64_t j = 0; j < g->width; j += CHUNK) {
            int64_t count = least(CHUNK, g->width - j), at = row * 2 * g->width + j;
            const float *gate = load(g->type, gate_up, at, count, gate_chunk);
            const float *up = load(g->type, gate_up, at + g->width, count, up_chunk);

            for (int64_t i = 0; i < count; i++) out[i] = gate[i] * (1.0f / (1.0f + exp_f32(-gate[i]))) * up[i] * p;
            store(g->type, act, row * g->width + j, count, out, 0);
        }
    }
    count_end(call);
}

/* Writes dgate, dup and, if it is wanted, act of one row; returns the gradient of its weight. */
static float backward_row(const struct swiglu *g, const void *gate_up, float p, const void *dact, void *dgate_up,
                          void *act, int64_t row)
{
    float gate_chunk[CHUNK], up_chunk[CHUNK], dact_chunk[CHUNK], dgate[CHUNK], dup[CHUNK], dweight = 0;

    for (int64_t j = 0; j < g->width; j += CHUNK) {
        int64_t count = least(CHUNK, g->width - j), at = row * 2 * g->width + j;
        const float *gate = load(g->type, gate_up, at, count, gate_chunk);
        const float *up = load(g->type, gate_up, at + g->width, count, up_chunk);
        const float *d = load(g->type, dact, row * g->width + j, count, dact_chunk);
        float part[CHUNK];

        for (int64_t i = 0; i < count; i++) {
            float sigmoid = 1.0f / (1.0f + exp_f32(-gate[i])), silu = gate[i] * sigmoid, slope = d[i] * p;

            part[i] = silu * up[i];
            dup[i] = slope * silu;
            dgate[i] = slope * up[i] * (sigmoid + silu * (1.0f - sigmoid));
        }
        dweight += dot(part, d, count);
        store(g->type, dgate_up, at, count, dgate, 0);
        store(g->type, dgate_up, at + g->width, count, dup, 0);
        if (!act) continue;
        for (int64_t i = 0; i < count; i++) part[i] *= p;
        store(g->type, act, row * g->width + j, count, part, 0);
    }
    return dweight;
}

void cpu_swiglu_backward(struct stream *s, const struct swiglu *g, const void *gate_up, const float *weight,
                         const int32_t *source, const void *dact, void *dgate_up, float *dweight, void *act)
{
    struct counted call = count_swiglu_backward(s, g, weight != NULL, act != NULL);

#pragma omp parallel for schedule(static) num_threads(team_of(s, g))
    for (int64_t row = 0; row < g->rows; row++) {
        float d = backward_row(g, gate_up, weight ? weight[source[row]] : 1.0f, dact, dgate_up, act, row);

        if (weight) dweight[source[row]] = d;
    }
    count_end(call);
}
