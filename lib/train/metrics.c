/* What a run measured, by name. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "report/flops.h"
#include "train/step.h"

const char *const metric_name[METRICS] = {"step", "loss", "ce", "indexer_loss", "mtp_loss", "auxiliary_loss",
                                          "grad_norm", "lr", "tokens", "tokens_per_second", "seconds",
                                          "tflops_megatron_6753", "tflops_exact", "held_out_loss", "peak_memory",
                                          "skipped", "dropped", "forced_balance", "mfu_megatron_6753", "mfu_exact"};

const char *const group_name[GROUPS] = {"embedding", "head", "norms",   "attention", "router",
                                        "experts",   "mlp",  "indexer", "mtp"};

/* One of several values of a kind: `number` counts within the kind. */
struct many {
    const char *format; /* of the name, with one %d, or none where there is one value */
    int count;
    double (*value)(const struct step *, int number);
    int (*label)(const struct step *, int number); /* which number the name shows; NULL: the same */
};

static double mtp_loss(const struct step *s, int d)
{
    return s->sum[s->network.sums.mtp + d];
}

static double acceptance(const struct step *s, int d)
{
    return s->sum[s->network.sums.accepted + d];
}

static double cumulative_acceptance(const struct step *s, int d)
{
    return s->sum[s->network.sums.accepted_so_far + d];
}

static double indexer_loss(const struct step *s, int i)
{
    return s->sum[s->network.sums.kl + i];
}

/* Layer of the i-th learning indexer; MTP depths follow the layers. */
static int indexer_layer(const struct step *s, int i)
{
    for (int l = 0; l < s->network.layers; l++)
        if (s->network.layer[l].indexes && s->network.layer[l].indexer.learns && !i--) return l;
    return s->network.layers + i;
}

static double router_load(const struct step *s, int i)
{
    int experts = (int)s->model->config.model.n_routed_experts;
    const double *counts = s->sum + s->network.sums.counts + i * experts;
    double most = 0, all = 0;

    for (int e = 0; e < experts; e++) {
        if (counts[e] > most) most = counts[e];
        all += counts[e];
    }
    return all > 0 ? most * experts / all : 0;
}

static int sparse_layer(const struct step *s, int i)
{
    for (int l = 0; l < s->network.layers; l++)
        if (s->network.layer[l].sparse && !i--) return l;
    return s->network.layers;
}

static double graph_captures(const struct step *s, int i)
{
    (void)i;
    return (double)s->graphs.captures;
}

static double graph_replays(const struct step *s, int i)
{
    (void)i;
    return (double)s->graphs.replays;
}

enum { KINDS = 7 };

static int kinds(const struct step *s, struct many kind[KINDS])
{
    int n = 0, depths = s->network.mtp.depths, tv = s->model->config.mtp.loss == MTP_LOSS_TV;

    if (depths && !tv) kind[n++] = (struct many){"mtp.%d.loss", depths, mtp_loss, NULL};
    if (depths) {
        kind[n++] = (struct many){"mtp.%d.acceptance", depths, acceptance, NULL};
        kind[n++] = (struct many){"mtp.%d.cumulative_acceptance", depths, cumulative_acceptance, NULL};
    }
    kind[n++] = (struct many){"indexer_loss.%d", s->network.indexers, indexer_loss, indexer_layer};
    kind[n++] = (struct many){"router_load.%d", s->network.sparse_layers, router_load, sparse_layer};
    if (!s->graphs.entry) return n;
    kind[n++] = (struct many){"graph_captures", 1, graph_captures, NULL};
    kind[n++] = (struct many){"graph_replays", 1, graph_replays, NULL};
    return n;
}

void step_measure_flops(struct step *s, const struct pack *const *packs, uint32_t count, double seconds)
{
    struct flop_work work = {.config = &s->model->config};
    double *metric = s->metric, tera_seconds = 1e12 * seconds;

    for (uint32_t i = 0; i < count; i++)
        for (int64_t n = 0; n < packs[i]->documents; n++)
            flop_work_add(&work, (uint64_t)(packs[i]->cu_seqlens[n + 1] - packs[i]->cu_seqlens[n]));
    metric[METRIC_TFLOPS_MEGATRON_6753] = flops_megatron_6753(&work, NULL) / tera_seconds;
    metric[METRIC_TFLOPS_EXACT] = flops_exact_total(&work) / tera_seconds;
    metric[METRIC_MFU_MEGATRON_6753] = metric[METRIC_TFLOPS_MEGATRON_6753] / s->peak_tflops;
    metric[METRIC_MFU_EXACT] = metric[METRIC_TFLOPS_EXACT] / s->peak_tflops;
}

int step_metric_at(const struct step *s, uint32_t index, char name[64], double *value)
{
    struct many kind[KINDS];
    int n = kinds(s, kind), i = (int)index, fixed = s->peak_tflops > 0 ? METRICS : METRIC_MFU_MEGATRON_6753;

    if (i < fixed) {
        snprintf(name, 64, "%s", metric_name[i]);
        *value = s->metric[i];
        return 1;
    }
    i -= fixed;
    if (i < GROUPS) {
        snprintf(name, 64, "grad_norm.%s", group_name[i]);
        *value = s->group_norm[i];
        return 1;
    }
    i -= GROUPS;
    for (int k = 0; k < n; i -= kind[k++].count) {
        if (i >= kind[k].count) continue;
        snprintf(name, 64, kind[k].format, kind[k].label ? kind[k].label(s, i) : i);
        *value = kind[k].value(s, i);
        return 1;
    }
    return 0;
}

glm52_status step_metric(const struct step *s, const char *name, double *value)
{
    char candidate[64];

    for (uint32_t i = 0; step_metric_at(s, i, candidate, value); i++)
        if (!strcmp(candidate, name)) return GLM52_OK;
    fail(GLM52_E_INVALID, "no metric is called %.64s", name);
    return fail_hint("glm52_step_metric_name() lists them");
}
