#include "model/network.h"

#include <string.h>

static struct head head_shape(const struct network *n, int64_t rows)
{
    const struct model_config *c = &n->model->config.model;

    return (struct head){.rows = rows, .width = c->hidden_size, .vocabulary = c->vocab_size, .type = n->model->type,
                         .gradient = n->model->parameters.head->gradient_type};
}

static struct head_tv tv_shape(const struct network *n, int64_t rows)
{
    const struct model_config *c = &n->model->config.model;

    return (struct head_tv){.rows = rows, .width = c->hidden_size, .vocabulary = c->vocab_size, .depths = n->mtp.depths,
                            .type = n->model->type, .gradient = n->model->parameters.head->gradient_type};
}

/* ---- building ---- */

static void build_layer(struct model *m, int index, const struct layer_weights *w, int full, int sparse,
                        struct layer *l)
{
    const struct config *config = &m->config;
    const struct model_config *c = &config->model;
    int dense = config->train.attention == ATTENTION_DENSE, learns = config->indexer_loss.kind != INDEXER_LOSS_NONE;

    *l = (struct layer){.index = index, .w = w, .c = c, .type = m->type, .sparse = sparse,
                        .indexes = full && (!dense || learns), .frozen = config->train.train_only == TRAIN_INDEXER};
    l->mla = (struct mla){.w = &w->mla, .c = c, .type = m->type, .dense = dense, .fast = !config->train.deterministic};
    l->indexer = (struct indexer_part){.w = &w->indexer, .c = c, .type = m->type, .layer = index,
                                       .learns = learns && full,
                                       .dense = config->indexer_loss.kind == INDEXER_LOSS_DENSE,
                                       .guided = m->guide != NULL};
    l->mlp = (struct mlp){.w = &w->mlp, .width = c->intermediate_size, .type = m->type};
    l->moe = (struct moe){.w = &w->moe, .c = c, .config = config, .type = m->type, .passes = 1};
    l->moe.shared = (struct mlp){.w = &w->moe.shared, .width = c->moe_intermediate_size * c->n_shared_experts,
                                 .type = m->type};
}

static void build(struct network *n)
{
    struct model *m = n->model;
    const struct model_config *c = &m->config.model;
    struct layer first;

    for (int i = 0; i < n->layers; i++)
        build_layer(m, i, &m->parameters.layer[i], c->indexer_types[i] == INDEXER_FULL,
                    c->mlp_layer_types[i] == MLP_SPARSE, &n->layer[i]);
    if (!m->config.mtp.depths) return;
    build_layer(m, n->layers, &m->parameters.mtp.layer, 1, 1, &first);
    first.moe.passes = (int)m->config.mtp.depths;
    mtp_build(&n->mtp, &m->config, &m->parameters, &first);
}

/* Indices of the sums. */
static void count_sums(struct network *n)
{
    int depths = n->mtp.depths, experts = (int)n->model->config.model.n_routed_experts;
    struct sums *s = &n->sums;

    n->indexers = n->sparse_layers = 0;
    for (int i = 0; i < n->layers; i++) {
        n->indexers += n->layer[i].indexes && n->layer[i].indexer.learns;
        n->sparse_layers += n->layer[i].sparse;
    }
    for (int d = 0; d < depths; d++)
        n->indexers += n->mtp.depth[d].layer.indexes && n->mtp.depth[d].layer.indexer.learns;
    n->sparse_layers += depths > 0;
    *s = (struct sums){.ce = 0, .auxiliary = 1, .dropped = 2, .mtp = 3};
    s->accepted = s->mtp + depths;
    s->accepted_so_far = s->accepted + depths;
    s->kl = s->accepted_so_far + depths;
    s->counts = s->kl + n->indexers;
    s->running = s->counts + n->sparse_layers * experts;
    s->count = s->running + n->sparse_layers * (experts + 1);
}

/* Tells the parts where their sums are. */
static void connect_sums(struct network *n)
{
    int experts = (int)n->model->config.model.n_routed_experts;
    double *kl = n->sum + n->sums.kl, *counts = n->sum + n->sums.counts, *running = n->sum + n->sums.running;

    for (int i = 0; i < n->layers; i++) {
        struct layer *l = &n->layer[i];
        l->moe.auxiliary = n->sum + n->sums.auxiliary;
        if (l->indexes && l->indexer.learns) l->kl = kl++;
        l->moe.counts = counts;
        l->moe.running = running;
        l->moe.dropped = n->sum + n->sums.dropped;
        if (l->sparse) counts += experts, running += experts + 1;
    }
    for (int d = 0; d < n->mtp.depths; d++) {
        struct layer *l = &n->mtp.depth[d].layer;
        l->moe.auxiliary = n->sum + n->sums.auxiliary;
        if (l->indexes && l->indexer.learns) l->kl = kl++;
        l->moe.counts = counts;
        l->moe.running = running;
        l->moe.dropped = n->sum + n->sums.dropped;
    }
}

/* ---- memory ---- */

static void lay_out_stream(struct network *n, struct plan *p)
{
    const struct model_config *c = &n->model->config.model;

    for (int i = 0; i <= n->layers; i++) {
        if (n->keep == KEEP_NOTHING && i > 1)
            n->x[i] = n->x[i - 2]; /* a layer reads one and writes the other */
        else
            plan_keep(p, &n->x[i], n->model->type, p->rows, c->hidden_size);
    }
    for (int i = 0; i < n->layers; i++) {
        if (c->indexer_types[i] == INDEXER_SHARED)
            n->selected[i] = n->selected[config_indexer_source(c, i)];
        else if (n->model->config.train.attention == ATTENTION_SPARSE)
            plan_keep(p, &n->selected[i], GLM52_DTYPE_I32, p->rows, c->index_topk);
    }
}

static size_t most(size_t a, size_t b)
{
    return a > b ? a : b;
}

static int has_tv(const struct network *n)
{
    return n->mtp.depths && n->model->config.mtp.loss == MTP_LOSS_TV;
}

static size_t head_bytes(struct network *n)
{
    struct stream *s = n->model->stream;
    struct head head = head_shape(n, n->rows);
    struct head_tv tv = tv_shape(n, n->rows);
    size_t bytes = most(s->ops->head_loss_bytes(s, &head), norm_backward_bytes(s, n->rows, head.width));

    bytes = most(bytes, s->ops->sum_bytes(s, n->rows * (n->mtp.depths + 1)));
    return has_tv(n) ? most(bytes, s->ops->head_tv_bytes(s, &tv)) : bytes;
}

/* Everything a pass will use, in the order in which it runs. */
static void lay_out(struct network *n)
{
    const struct model_config *c = &n->model->config.model;
    struct stream *s = n->model->stream;
    struct plan *p = &n->plan;

    *p = (struct plan){.rows = n->rows, .keep = n->keep};
    input_layout(c, n->mtp.depths, p, &n->input);
    lay_out_stream(n, p);
    plan_keep(p, &n->final, n->model->type, p->rows, c->hidden_size);
    plan_keep(p, &n->final_rstd, GLM52_DTYPE_F32, p->rows, 1);
    plan_keep(p, &n->loss, GLM52_DTYPE_F32, p->rows, 1);
    if (n->keep != KEEP_NOTHING) plan_keep(p, &n->dx, n->model->type, p->rows, c->hidden_size);
    for (int i = 0; i < n->layers; i++) layer_plan(&n->layer[i], s, p);
    if (n->mtp.depths) {
        plan_keep(p, &n->alpha, GLM52_DTYPE_F32, p->rows, n->mtp.depths);
        plan_keep(p, &n->hit, GLM52_DTYPE_F32, p->rows, 1);
        mtp_plan(&n->mtp, s, p);
    }
    plan_temp_bytes(p, &n->head_workspace, head_bytes(n));
    n->guided = n->model->guide != NULL;
    if (n->guided && has_tv(n)) plan_temp(p, &n->side, GLM52_DTYPE_I32, p->rows, n->mtp.depths * c->vocab_size);
}

static const enum memory_class region_class[REGIONS] = {MEMORY_ACTIVATIONS, MEMORY_ACTIVATIONS, MEMORY_WORKSPACE};

/* Behind the temporary arrays come the sums: a device may have no small pieces of memory. */
static uint64_t region_bytes(const struct network *n, int region)
{
    return n->plan.peak[region] + (region == REGION_TEMPORARY ? (uint64_t)n->sums.count * sizeof *n->sum : 0);
}

static glm52_status take_memory(struct network *n)
{
    struct stream *s = n->model->stream;
    void *memory;

    TRY(input_stage_open(n->model->host, n->rows, n->mtp.depths, &n->stage));
    for (int i = 0; i < REGIONS; i++) {
        TRY(s->ops->allocate(s, region_bytes(n, i), region_class[i], &memory));
        n->base[i] = memory;
    }
    n->sum = (double *)(void *)(n->base[REGION_TEMPORARY] + n->plan.peak[REGION_TEMPORARY]);
    return GLM52_OK;
}

/* Everything but the memory. */
static glm52_status plan_network(struct model *m, int64_t rows, enum keep keep, struct network *n)
{
    memset(n, 0, sizeof *n);
    n->model = m;
    n->rows = rows;
    n->keep = keep;
    n->layers = m->parameters.layers;
    n->layer = host_alloc(m->host, (size_t)n->layers * sizeof *n->layer, MEMORY_HOST);
    n->x = host_calloc(m->host, (size_t)(n->layers + 1) * sizeof *n->x, MEMORY_HOST);
    n->selected = host_calloc(m->host, (size_t)n->layers * sizeof *n->selected, MEMORY_HOST);
    n->written = host_calloc(m->host, m->parameters.count, MEMORY_HOST);
    if (!n->layer || !n->x || !n->selected || !n->written) return GLM52_E_NOMEM;
    build(n);
    count_sums(n);
    lay_out(n);
    return GLM52_OK;
}

uint64_t network_bytes(struct model *m, int64_t rows, enum keep keep)
{
    struct network n;
    uint64_t bytes = 0;

    if (!plan_network(m, rows, keep, &n))
        for (int i = 0; i < REGIONS; i++) bytes += m->stream->ops->taken_bytes(m->stream, region_bytes(&n, i));
    network_close(&n);
    return bytes;
}

glm52_status network_open(struct model *m, int64_t rows, enum keep keep, struct network *n)
{
    glm52_status status = plan_network(m, rows, keep, n);

    if (!status) status = take_memory(n);
    if (status) {
        network_close(n);
        return status;
    }
    connect_sums(n);
    input_open(m, &n->input, n->base);
    return GLM52_OK;
}

void network_close(struct network *n)
{
    if (!n->model) return;
    struct stream *s = n->model->stream;
    struct host *host = n->model->host;

    for (int i = 0; i < REGIONS; i++)
        if (n->base[i]) s->ops->release(s, n->base[i], region_bytes(n, i), region_class[i]);
    input_stage_close(&n->stage);
    host_free(host, n->layer, (size_t)n->layers * sizeof *n->layer, MEMORY_HOST);
    host_free(host, n->x, (size_t)(n->layers + 1) * sizeof *n->x, MEMORY_HOST);
    host_free(host, n->selected, (size_t)n->layers * sizeof *n->selected, MEMORY_HOST);
    host_free(host, n->written, n->model->parameters.count, MEMORY_HOST);
    memset(n, 0, sizeof *n);
}

/* ---- running ---- */

static void forward_layers(struct network *n, const struct pass *f)
{
    const struct model_config *c = &n->model->config.model;
    struct embed e = {.rows = f->rows, .width = c->hidden_size, .vocabulary = c->vocab_size, .type = n->model->type};

    LABEL(f, "embedding");
    f->ops->embed_forward(f->stream, &e, f->in->token, n->model->parameters.embedding->value, at(f, n->x[0]));
    for (int i = 0; i < n->layers; i++)
        layer_forward(&n->layer[i], f, at(f, n->x[i]), at(f, n->selected[i]), at(f, n->x[i + 1]));
    LABEL(f, "head");
    norm_forward(f, n->model->parameters.final_norm, c->rms_norm_eps, at(f, n->x[n->layers]),
                 at(f, n->final), at(f, n->final_rstd));
    tap(f, "final_hidden", -1, n->model->type, c->hidden_size, at(f, n->final));
}

static void tap_logits(const struct network *n, const struct pass *f, const void *hidden)
{
    const struct parameter *w = n->model->parameters.head;

    if (!tapped(f, "logits", -1)) return;
    linear_forward_float(f, w, hidden, f->tap->scores);
    tap(f, "logits", -1, GLM52_DTYPE_F32, w->shape[0], f->tap->scores);
}

/* Cross-entropy of `hidden` under the view's labels: *sum += weighted losses; hit unless
 * NULL; with gradients dx, and dw unless NULL. */
static void cross_entropy(const struct network *n, const struct pass *f, const void *hidden, float *hit, void *dx,
                          void *dw, double *sum)
{
    struct head h = head_shape(n, f->rows);
    float *loss = at(f, n->loss);
    void *workspace = at(f, n->head_workspace);

    f->ops->head_loss(f->stream, &h, hidden, n->model->parameters.head->value, f->in->label, f->in->weight, loss, hit,
                      dx, dw, workspace);
    f->ops->sum(f->stream, f->rows, loss, f->in->weight, sum, workspace);
    tap(f, "ce_rows", -1, GLM52_DTYPE_F32, 1, loss);
    tap_logits(n, f, hidden);
}

/* Which drafts a greedy reader would have accepted, alone and after all before them. */
static void count_accepted(const struct network *n, const struct pass *f, int d)
{
    float *hit = at(f, n->hit), *so_far = at(f, n->alpha);
    void *workspace = at(f, n->head_workspace);

    f->ops->sum(f->stream, f->rows, hit, NULL, n->sum + n->sums.accepted + d, workspace);
    if (d)
        f->ops->multiply(f->stream, f->rows, hit, so_far);
    else
        f->ops->copy(f->stream, so_far, hit, (size_t)f->rows * sizeof *hit);
    f->ops->sum(f->stream, f->rows, so_far, NULL, n->sum + n->sums.accepted_so_far + d, workspace);
}

static void mtp_cross_entropy(struct network *n, struct pass *f, const struct input *in, int backward)
{
    const struct input *trunk = f->in;
    void *dw = backward && !n->model->config.mtp.detach_heads ? gradient_sum(f, n->model->parameters.head) : NULL;

    for (int d = 0; d < n->mtp.depths; d++) {
        f->in = &in[d];
        f->depth = d;
        LABEL(f, "head");
        cross_entropy(n, f, mtp_out(&n->mtp, f, d), at(f, n->hit), backward ? mtp_dout(&n->mtp, f, d) : NULL, dw,
                      n->sum + n->sums.mtp + d);
        count_accepted(n, f, d);
    }
    f->in = trunk;
    f->depth = -1;
}

/* Which of p and q is the smaller decides over the gradient as a selection does: a guide may have it. */
static void take_sides(struct network *n, struct pass *f, const struct head_tv *h, struct head_drafts *drafts)
{
    if (!n->guided) return;
    drafts->side = at(f, n->side);
    drafts->given = 1;
    for (f->depth = 0; f->depth < h->depths; f->depth++)
        drafts->given &= given(f, "tv_side", -1, h->vocabulary, drafts->side + f->depth * h->rows * h->vocabulary);
    f->depth = -1;
}

static void show_sides(struct network *n, struct pass *f, const struct head_tv *h, const struct head_drafts *drafts)
{
    if (!n->guided || drafts->given) return;
    for (f->depth = 0; f->depth < h->depths; f->depth++)
        made(f, "tv_side", -1, h->vocabulary, drafts->side + f->depth * h->rows * h->vocabulary);
    f->depth = -1;
}

/* The trunk's cross-entropy and the drafts' total variation. */
static void total_variation(struct network *n, struct pass *f, const struct input *in, int backward)
{
    struct head_tv h = tv_shape(n, f->rows);
    float *alpha = at(f, n->alpha), *so_far = at(f, n->hit);

    LABEL(f, "head");
    struct head_trunk trunk = {.x = at(f, n->final), .label = f->in->label, .weight = f->in->weight,
                               .loss = at(f, n->loss), .dx = backward ? at(f, n->dx) : NULL,
                               .dw = backward ? gradient_sum(f, n->model->parameters.head) : NULL};
    struct head_drafts drafts = {.x = mtp_out(&n->mtp, f, 0), .weight = in[0].weight, .alpha = alpha, .loss = so_far,
                                 .dx = backward ? mtp_dout(&n->mtp, f, 0) : NULL};
    void *workspace = at(f, n->head_workspace);

    take_sides(n, f, &h, &drafts);
    f->ops->head_tv(f->stream, &h, &trunk, &drafts, n->model->parameters.head->value, workspace);
    show_sides(n, f, &h, &drafts);
    f->ops->sum(f->stream, f->rows, trunk.loss, trunk.weight, n->sum + n->sums.ce, workspace);
    f->ops->sum(f->stream, f->rows, drafts.loss, drafts.weight, n->sum + n->sums.mtp, workspace);
    tap(f, "ce_rows", -1, GLM52_DTYPE_F32, 1, trunk.loss);
    tap_logits(n, f, trunk.x);
    tap(f, "tv_rows", -1, GLM52_DTYPE_F32, 1, drafts.loss);
    for (int d = 0; d < n->mtp.depths; d++) {
        f->depth = d;
        tap(f, "alpha", -1, GLM52_DTYPE_F32, 1, alpha + d * f->rows);
        f->ops->sum(f->stream, f->rows, alpha + d * f->rows, NULL, n->sum + n->sums.accepted + d, workspace);
        if (d)
            f->ops->multiply(f->stream, f->rows, alpha + d * f->rows, so_far);
        else
            f->ops->copy(f->stream, so_far, alpha, (size_t)f->rows * sizeof *alpha);
        f->ops->sum(f->stream, f->rows, so_far, NULL, n->sum + n->sums.accepted_so_far + d, workspace);
    }
    f->depth = -1;
}

static void run_heads(struct network *n, struct pass *f, const struct input *in, int backward)
{
    if (has_tv(n)) {
        total_variation(n, f, in + 1, backward);
        return;
    }
    LABEL(f, "head");
    void *dw = backward ? gradient_sum(f, n->model->parameters.head) : NULL;
    cross_entropy(n, f, at(f, n->final), NULL, backward ? at(f, n->dx) : NULL, dw, n->sum + n->sums.ce);
    if (n->mtp.depths) mtp_cross_entropy(n, f, in + 1, backward);
}

static void backward_layers(struct network *n, struct pass *b)
{
    const struct model_config *c = &n->model->config.model;
    struct embed e = {.rows = b->rows, .width = c->hidden_size, .vocabulary = c->vocab_size, .type = n->model->type,
                      .gradient = n->model->parameters.embedding->gradient_type};
    struct parameter *embedding = n->model->parameters.embedding;
    void *dx = at(b, n->dx);

    if (n->model->config.train.train_only == TRAIN_ALL) {
        LABEL(b, "head");
        norm_backward(b, n->model->parameters.final_norm, c->rms_norm_eps, at(b, n->x[n->layers]),
                      at(b, n->final_rstd), dx, dx, 0, at(b, n->head_workspace));
    }
    for (int i = n->layers - 1; i >= 0; i--) {
        int serves = !n->layer[i].frozen || (n->layer[i].indexes && n->layer[i].indexer.learns);
        if (!serves) continue;
        layer_restore(&n->layer[i], b, at(b, n->x[i]), at(b, n->selected[i]), at(b, n->x[i + 1]));
        layer_backward(&n->layer[i], b, at(b, n->x[i]), at(b, n->selected[i]), dx);
    }
    LABEL(b, "embedding");
    void *dembedding = gradient_sum(b, embedding);
    if (dembedding) b->ops->embed_backward(b->stream, &e, b->in->token, dx, dembedding);
}

void network_feed(struct network *n, const struct pack *pack, const struct input_scale *scale)
{
    n->microbatches = scale->packs;
    input_upload(n->model, &n->input, n->base, &n->stage, pack, scale, n->in);
}

void network_pass(struct network *n, int backward, const struct tap *tap)
{
    struct stream *s = n->model->stream;
    const struct input *in = n->in;
    struct pass pass = {.ops = s->ops, .stream = s, .model = n->model, .in = in, .rows = in->rows, .tap = tap,
                        .depth = -1, .training = backward, .microbatches = n->microbatches};
    int learns = n->model->config.train.train_only == TRAIN_ALL;

    memcpy(pass.base, n->base, sizeof pass.base);
    if (backward && n->first) {
        pass.written = n->written;
        memset(n->written, 0, n->model->parameters.count);
    }
    input_tables(n->model, &n->input, n->base, in);
    forward_layers(n, &pass);
    if (n->mtp.depths) mtp_forward(&n->mtp, &pass, in + 1, at(&pass, n->final));
    run_heads(n, &pass, in, backward && learns);
    if (!backward) return;
    if (n->mtp.depths)
        mtp_backward(&n->mtp, &pass, in + 1, at(&pass, n->final),
                     n->model->config.mtp.detach_heads || !learns ? NULL : at(&pass, n->dx));
    backward_layers(n, &pass);
    LABEL(&pass, "gradients");
    gradient_clear_rest(&pass);
}

void network_run(struct network *n, const struct pack *pack, const struct input_scale *scale, int backward,
                 const struct tap *tap)
{
    network_feed(n, pack, scale);
    network_pass(n, backward, tap);
}

int64_t network_assignments(const struct network *n)
{
    int64_t passes = n->sparse_layers;

    if (n->mtp.depths) passes += n->mtp.depths - 1; /* its layer has been counted once */
    return passes * n->model->config.model.num_experts_per_tok;
}

void network_balance(struct network *n, const float *coefficient)
{
    const struct config *c = &n->model->config;
    struct stream *s = n->model->stream;
    int32_t experts = (int32_t)c->model.n_routed_experts;

    if (c->moe.bias_update_rate <= 0 || c->train.train_only == TRAIN_INDEXER) return;
    s->label = "balance";
    for (int i = 0; i < n->layers; i++)
        if (n->layer[i].sparse)
            s->ops->balance_bias(s, experts, (float)c->moe.bias_update_rate, coefficient, n->layer[i].moe.counts,
                                 (float *)n->layer[i].w->moe.bias->value);
    if (n->mtp.depths)
        s->ops->balance_bias(s, experts, (float)c->moe.bias_update_rate, coefficient,
                             n->mtp.depth[0].layer.moe.counts, (float *)n->mtp.w->layer.moe.bias->value);
}
