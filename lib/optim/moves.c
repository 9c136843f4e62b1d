/* Policy "adamw" gives every parameter to AdamW. Policy "glm5" gives matrices to Muon and embedding, head, norms and
 * biases to AdamW (GLM-4.5 report section 2, GLM-5 report 2.1; router, indexer and eh_proj are matrices like others).
 * optim.rules overrides either by name. */
#include "optim/moves.h"

#include <fnmatch.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/dtype.h"

/* Newton-Schulz polynomials a, b, c: training.md 4.1. */
static const float quintic[][3] = {{4.0848f, -6.8946f, 2.9270f}, {3.9505f, -6.3029f, 2.6377f},
                                   {3.7418f, -5.5913f, 2.3037f}, {2.8769f, -3.1427f, 1.2046f},
                                   {2.8366f, -3.0525f, 1.2012f}};
static const float simple[][3] = {{3.4445f, -4.7750f, 2.0315f}};
static const float polar_express[][3] = {{8.2051f, -22.9019f, 16.4607f}, {4.0664f, -2.8612f, 0.5184f},
                                         {3.9096f, -2.8234f, 0.5250f},   {3.2856f, -2.4153f, 0.4853f},
                                         {2.2779f, -1.6198f, 0.3985f},   {1.8726f, -1.2307f, 0.3585f},
                                         {1.8564f, -1.2132f, 0.3568f},   {1.8750f, -1.2500f, 0.3750f}};

static const float *polynomial(int family, int step)
{
    if (family == MUON_SIMPLE) return simple[0];
    if (family == MUON_POLAR_EXPRESS) return polar_express[step < 7 ? step : 7];
    return quintic[step % 5];
}

/* ---- rules ---- */

static enum rule rule_by_name(const char *name, size_t length)
{
    if (length == 5 && !strncmp(name, "adamw", 5)) return RULE_ADAMW;
    if (length == 4 && !strncmp(name, "muon", 4)) return RULE_MUON;
    return RULE_NONE;
}

/* The last entry of optim.rules whose pattern matches; 0 if none does. */
static int overridden(const char *rules, const char *name, enum rule *rule)
{
    int found = 0;

    for (const char *at = rules; *at;) {
        size_t length = strcspn(at, ",");
        const char *equals = memchr(at, '=', length);
        char pattern[160];
        if (equals && (size_t)snprintf(pattern, sizeof pattern, "%.*s", (int)(equals - at), at) < sizeof pattern &&
            !fnmatch(pattern, name, 0)) {
            *rule = rule_by_name(equals + 1, length - (size_t)(equals + 1 - at));
            found = 1;
        }
        at += length + (at[length] == ',');
    }
    return found;
}

glm52_status optimizer_rule(const struct config *config, const struct parameter *p, enum rule *rule)
{
    *rule = config->optim.policy == POLICY_GLM5 && p->kind == KIND_MATRIX ? RULE_MUON : RULE_ADAMW;
    overridden(config->optim.rules, p->name, rule);
    if (*rule == RULE_MUON && p->dimensions != 2) {
        fail(GLM52_E_INVALID, "optim.rules gives %s to muon, but it is no matrix", p->name);
        fail_hint("make the pattern match matrices only");
        return fail_detail("key", "optim.rules");
    }
    return GLM52_OK;
}

/* Every entry has the form pattern=rule and matches something. */
static glm52_status check_rules(const struct config *c, const struct parameters *t)
{
    for (const char *at = c->optim.rules; *at;) {
        size_t length = strcspn(at, ",");
        const char *equals = memchr(at, '=', length), *name = equals ? equals + 1 : NULL;
        size_t rest = equals ? length - (size_t)(name - at) : 0;
        char pattern[160];
        int matches = 0;
        int known = equals && (rule_by_name(name, rest) || (rest == 4 && !strncmp(name, "none", 4)));
        if (known && (size_t)snprintf(pattern, sizeof pattern, "%.*s", (int)(equals - at), at) < sizeof pattern)
            for (uint32_t i = 0; i < t->count && !matches; i++) matches = !fnmatch(pattern, t->at[i].name, 0);
        if (!matches) {
            fail(GLM52_E_INVALID, "optim.rules: \"%.*s\" %s", (int)length, at,
                 known ? "matches no parameter" : "is not of the form pattern=adamw, pattern=muon or pattern=none");
            fail_hint("patterns match whole parameter names, as in *.mlp.gate.weight=adamw");
            return fail_detail("key", "optim.rules");
        }
        at += length + (at[length] == ',');
    }
    return GLM52_OK;
}

/* ---- moves ---- */

static struct move *add(struct optimizer *o, enum rule rule, const struct placed *at, uint64_t from)
{
    struct move *move = o->move ? &o->move[o->moves] : NULL;

    o->moves++;
    if (move)
        *move = (struct move){.rule = rule, .first = at->parameter, .from = from, .state = at->state + from,
                              .second = at->second + from};
    return move;
}

static void add_adamw(struct optimizer *o, const struct placed *at, uint64_t from, uint64_t count)
{
    struct move *move = add(o, RULE_ADAMW, at, from);
    const struct parameter *p = at->parameter;

    if (move)
        move->adamw = (struct adamw){.count = (int64_t)count, .beta1 = (float)o->config.beta1,
                                     .beta2 = (float)o->config.beta2, .epsilon = (float)o->config.epsilon,
                                     .decay = parameter_decays(p) ? (float)o->config.weight_decay : 0, .type = p->type,
                                     .gradient = p->gradient_type, .moments = o->moment_type};
}

static double block_scale(int rule, int64_t rows, int64_t columns)
{
    double ratio = (double)rows / (double)columns;

    if (rule == MUON_SCALE_UNIT_RMS_NORM) return sqrt(ratio);
    if (rule == MUON_SCALE_SHAPE) return sqrt(ratio > 1 ? ratio : 1);
    return sqrt((double)(rows > columns ? rows : columns));
}

/* `batch` blocks of rows x columns, `stride` elements apart, each of row groups (see struct muon). */
static void add_muon(struct optimizer *o, const struct placed *at, uint64_t from, int64_t batch, int64_t stride,
                     int64_t rows, int64_t group_rows, int64_t group_stride)
{
    struct move *move = add(o, RULE_MUON, at, from);
    const struct parameter *p = at->parameter;
    int64_t columns = p->shape[1];

    if (!move) return;
    move->muon = (struct muon){.batch = batch, .stride = stride, .rows = rows, .columns = columns,
                               .group_rows = group_rows, .group_stride = group_stride,
                               .momentum = (float)o->config.muon_momentum, .decay = (float)o->config.weight_decay,
                               .scale = (float)(o->config.muon_scale *
                                                block_scale(o->config.muon_scale_rule, rows, columns)),
                               .nesterov = o->config.muon_nesterov,
                               .classic = o->config.muon_convention == MUON_CLASSIC,
                               .steps = (int32_t)o->config.muon_steps, .type = p->type, .gradient = p->gradient_type,
                               .moments = o->moment_type};
    for (int i = 0; i < move->muon.steps; i++)
        memcpy(move->muon.coefficient[i], polynomial(o->config.muon_coefficients, i), sizeof move->muon.coefficient[i]);
}

/* A parameter of per-head blocks: first the leading rows of each head, then the rest. The rest of q_b_proj is
 * rotary. */
static int is_rotary(const struct parameter *p)
{
    return strstr(p->name, "q_b_proj") != NULL;
}

static void add_heads(struct optimizer *o, const struct placed *at)
{
    const struct parameter *p = at->parameter;
    int64_t heads = p->blocks.heads, per_head = p->shape[0] / heads, first = p->blocks.split, rest = per_head - first;
    int64_t columns = p->shape[1], stride = per_head * columns;
    int how = is_rotary(p) ? o->config.muon_rope : MUON_ROPE_PER_HEAD;

    add_muon(o, at, 0, heads, stride, first, first, 0);
    if (how == MUON_ROPE_PER_HEAD)
        add_muon(o, at, (uint64_t)(first * columns), heads, stride, rest, rest, 0);
    else if (how == MUON_ROPE_JOINT)
        add_muon(o, at, (uint64_t)(first * columns), 1, 0, heads * rest, rest, stride);
    else
        for (int64_t h = 0; h < heads; h++)
            add_adamw(o, at, (uint64_t)((h * per_head + first) * columns), (uint64_t)(rest * columns));
}

/* Like parameters at equal distances from `p` on: the experts of a layer. Takes at most `most`. */
static uint32_t repeats(const struct optimizer *o, uint32_t i, uint32_t period)
{
    const struct placed *first = &o->placed[i];
    uint32_t n = 1;

    if (!strstr(first->parameter->name, "mlp.experts.")) return 1;
    while (i + n * period < o->count) {
        const struct placed *next = &o->placed[i + n * period];
        if (next->parameter->layer != first->parameter->layer || next->rule != first->rule ||
            next->parameter->shape[0] != first->parameter->shape[0] || !strstr(next->parameter->name, "mlp.experts.") ||
            next->parameter != first->parameter + n * period)
            break;
        n++;
    }
    return n;
}

/* Is this the gate, up or down of an expert that a move of an earlier expert already takes along? */
static int taken_along(const struct optimizer *o, uint32_t i)
{
    const struct placed *p = &o->placed[i];

    return p->rule == RULE_MUON && i >= 3 && o->placed[i - 3].rule == RULE_MUON &&
           o->placed[i - 3].parameter == p->parameter - 3 && p->parameter->layer == o->placed[i - 3].parameter->layer &&
           strstr(p->parameter->name, "mlp.experts.") &&
           strstr(o->placed[i - 3].parameter->name, "mlp.experts.") != NULL;
}

/* A gate whose up follows and goes with it as one block; optim.muon_gate_up. */
static int is_joint_gate(const struct optimizer *o, uint32_t i)
{
    return o->config.muon_gate_up == MUON_JOINT && i + 1 < o->count && o->placed[i + 1].rule == RULE_MUON &&
           o->placed[i + 1].parameter == o->placed[i].parameter + 1 &&
           strstr(o->placed[i].parameter->name, "gate_proj.") && strstr(o->placed[i + 1].parameter->name, "up_proj.");
}

static void add_matrix(struct optimizer *o, uint32_t i)
{
    struct parameter *p = o->placed[i].parameter;
    int64_t rows = p->shape[0], rank = o->model->config.model.kv_lora_rank;

    if (taken_along(o, i) || (i && is_joint_gate(o, i - 1))) return;
    if (p->blocks.heads && o->config.muon_split == MUON_SPLIT_PER_HEAD) {
        add_heads(o, &o->placed[i]);
        return;
    }
    if (o->config.muon_kv_a == MUON_KV_A_SEPARATE && strstr(p->name, "kv_a_proj")) {
        add_muon(o, &o->placed[i], 0, 1, 0, rank, rank, 0);
        add_muon(o, &o->placed[i], (uint64_t)(rank * p->shape[1]), 1, 0, rows - rank, rows - rank, 0);
        return;
    }
    uint32_t batch = repeats(o, i, 3);
    int64_t stride = batch > 1 ? (int64_t)(o->placed[i + 3].state - o->placed[i].state) : 0;
    if (is_joint_gate(o, i)) rows *= 2;
    add_muon(o, &o->placed[i], 0, batch, stride, rows, rows, 0);
}

/* Neighbours in memory and in the state that AdamW treats alike. */
static uint32_t adamw_run(const struct optimizer *o, uint32_t i, uint64_t *elements)
{
    const struct placed *first = &o->placed[i];
    uint32_t n = 1;

    *elements = first->parameter->count;
    for (; i + n < o->count; n++) {
        const struct placed *next = &o->placed[i + n];
        const struct parameter *p = next->parameter;
        if (next->rule != RULE_ADAMW || p->type != first->parameter->type || p->part != first->parameter->part ||
            parameter_decays(p) != parameter_decays(first->parameter) || next->state != first->state + *elements ||
            next->second != first->second + *elements ||
            p->offset != first->parameter->offset + *elements * dtype_size(p->type) ||
            p->gradient_type != first->parameter->gradient_type ||
            p->gradient_offset != first->parameter->gradient_offset + *elements * dtype_size(p->gradient_type))
            break;
        *elements += p->count;
    }
    return n;
}

static void add_moves(struct optimizer *o)
{
    o->moves = 0;
    for (uint32_t i = 0; i < o->count;) {
        uint64_t elements;
        if (o->placed[i].rule == RULE_MUON) {
            add_matrix(o, i++);
            continue;
        }
        uint32_t n = adamw_run(o, i, &elements);
        add_adamw(o, &o->placed[i], 0, elements);
        i += n;
    }
}

/* Muon moves it, but for its rotary rows. */
static int has_adamw_rows(const struct optimizer *o, const struct parameter *p)
{
    return p->blocks.heads && o->config.muon_split == MUON_SPLIT_PER_HEAD && is_rotary(p) &&
           o->config.muon_rope == MUON_ROPE_ADAMW;
}

static glm52_status place(struct optimizer *o, const struct config *config)
{
    struct parameters *t = &o->model->parameters;
    enum rule rule;

    for (uint32_t i = 0; i < t->count; i++) {
        if (!t->at[i].trained) continue;
        TRY(optimizer_rule(config, &t->at[i], &rule));
        if (rule == RULE_NONE) continue;
        int second = rule == RULE_ADAMW || has_adamw_rows(o, &t->at[i]);
        if (o->placed)
            o->placed[o->count] = (struct placed){&t->at[i], rule, second, o->state_elements, o->second_elements};
        o->count++;
        o->state_elements += t->at[i].count;
        if (second) o->second_elements += t->at[i].count;
    }
    return GLM52_OK;
}

glm52_status plan_moves(struct optimizer *o, const struct config *config)
{
    struct host *host = o->model->host;

    TRY(check_rules(config, &o->model->parameters));
    TRY(place(o, config));
    uint32_t count = o->count;
    struct placed *placed = host_alloc(host, count * sizeof *placed, MEMORY_HOST);
    if (!placed) {
        o->count = 0;
        return GLM52_E_NOMEM;
    }
    o->placed = placed;
    o->count = 0;
    o->state_elements = o->second_elements = 0;
    TRY(place(o, config));
    add_moves(o); /* counts */
    struct move *move = host_alloc(host, o->moves * sizeof *move, MEMORY_HOST);
    if (!move) {
        o->moves = 0;
        return GLM52_E_NOMEM;
    }
    o->move = move;
    add_moves(o);
    return GLM52_OK;
}
