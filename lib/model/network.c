#include "model/network.h"

#include <string.h>

static struct head head_shape(const struct network *n, int64_t rows)
{
    const struct model_config *c = &n->model->config.model;

    return (struct head){.rows = rows, .width = c->hidden_size, .vocabulary = c->vocab_size, .type = n->model->type};
}

static void build_layer(struct model *m, int index, struct layer *l)
{
    const struct model_config *c = &m->config.model;
    const struct layer_weights *w = &m->parameters.layer[index];

    *l = (struct layer){.index = index, .w = w, .c = c, .type = m->type, .sparse = c->mlp_layer_types[index] == MLP_SPARSE,
                        .full = c->indexer_types[index] == INDEXER_FULL};
    l->mla = (struct mla){.w = &w->mla, .c = c, .type = m->type};
    l->indexer = (struct indexer_part){.w = &w->indexer, .c = c, .type = m->type};
    l->mlp = (struct mlp){.w = &w->mlp, .width = c->intermediate_size, .type = m->type};
    l->moe = (struct moe){.w = &w->moe, .c = c, .type = m->type};
    l->moe.shared = (struct mlp){.w = &w->moe.shared, .width = c->moe_intermediate_size * c->n_shared_experts,
                                 .type = m->type};
}

/* Everything a pass will use, in the order in which it runs. */
static void lay_out(struct network *n)
{
    const struct model_config *c = &n->model->config.model;
    struct stream *s = n->model->stream;
    struct plan *p = &n->plan;
    struct head head = head_shape(n, n->rows);

    *p = (struct plan){.rows = n->rows, .keep = n->keep};
    input_layout(c, p, &n->input);
    for (int i = 0; i <= n->layers; i++) {
        if (n->keep == KEEP_NOTHING && i > 1)
            n->x[i] = n->x[i - 2]; /* a layer reads one and writes the other */
        else
            plan_keep(p, &n->x[i], n->model->type, p->rows, c->hidden_size);
    }
    for (int i = 0; i < n->layers; i++) {
        if (c->indexer_types[i] == INDEXER_SHARED)
            n->selected[i] = n->selected[config_indexer_source(c, i)];
        else
            plan_keep(p, &n->selected[i], GLM52_DTYPE_I32, p->rows, c->index_topk);
    }
    plan_keep(p, &n->final, n->model->type, p->rows, c->hidden_size);
    plan_keep(p, &n->final_rstd, GLM52_DTYPE_F32, p->rows, 1);
    plan_keep(p, &n->loss, GLM52_DTYPE_F32, p->rows, 1);
    if (n->keep != KEEP_NOTHING) plan_keep(p, &n->dx, n->model->type, p->rows, c->hidden_size);
    for (int i = 0; i < n->layers; i++) layer_plan(&n->layer[i], s, p);
    size_t norm = norm_backward_bytes(s, p->rows, c->hidden_size), loss = s->ops->head_loss_bytes(s, &head);
    size_t sum = s->ops->sum_bytes(s, p->rows);
    loss = loss > norm ? loss : norm;
    plan_temp_bytes(p, &n->head_workspace, loss > sum ? loss : sum);
}

static const enum memory_class region_class[REGIONS] = {MEMORY_ACTIVATIONS, MEMORY_ACTIVATIONS, MEMORY_WORKSPACE};

glm52_status network_open(struct model *m, int64_t rows, enum keep keep, struct network *n)
{
    struct stream *s = m->stream;
    glm52_status status = GLM52_OK;

    memset(n, 0, sizeof *n);
    n->model = m;
    n->rows = rows;
    n->keep = keep;
    n->layers = m->parameters.layers;
    n->layer = host_alloc(m->host, (size_t)n->layers * sizeof *n->layer, MEMORY_HOST);
    n->x = host_alloc(m->host, (size_t)(n->layers + 1) * sizeof *n->x, MEMORY_HOST);
    n->selected = host_alloc(m->host, (size_t)n->layers * sizeof *n->selected, MEMORY_HOST);
    if (!n->layer || !n->x || !n->selected) status = GLM52_E_NOMEM;
    if (!status) {
        for (int i = 0; i < n->layers; i++) build_layer(m, i, &n->layer[i]);
        lay_out(n);
        status = input_stage_open(m->host, rows, &n->stage);
    }
    for (int i = 0; i < REGIONS && !status; i++) {
        void *memory;
        status = s->ops->allocate(s, n->plan.peak[i], region_class[i], &memory);
        if (!status) n->base[i] = memory;
    }
    if (status) network_close(n);
    return status;
}

void network_close(struct network *n)
{
    if (!n->model) return;
    struct stream *s = n->model->stream;
    struct host *host = n->model->host;

    for (int i = 0; i < REGIONS; i++)
        if (n->base[i]) s->ops->release(s, n->base[i], n->plan.peak[i], region_class[i]);
    input_stage_close(&n->stage);
    if (n->layer) host_free(host, n->layer, (size_t)n->layers * sizeof *n->layer, MEMORY_HOST);
    if (n->x) host_free(host, n->x, (size_t)(n->layers + 1) * sizeof *n->x, MEMORY_HOST);
    if (n->selected) host_free(host, n->selected, (size_t)n->layers * sizeof *n->selected, MEMORY_HOST);
    memset(n, 0, sizeof *n);
}

static void forward_layers(struct network *n, const struct pass *f)
{
    const struct model_config *c = &n->model->config.model;
    struct embed e = {.rows = f->rows, .width = c->hidden_size, .vocabulary = c->vocab_size, .type = n->model->type};

    label(f, "embedding");
    f->ops->embed_forward(f->stream, &e, f->in->token, n->model->parameters.embedding->value, at(f, n->x[0]));
    for (int i = 0; i < n->layers; i++)
        layer_forward(&n->layer[i], f, at(f, n->x[i]), at(f, n->selected[i]), at(f, n->x[i + 1]));
    label(f, "head");
    norm_forward(f, n->model->parameters.final_norm, c->rms_norm_eps, c->hidden_size, at(f, n->x[n->layers]),
                 at(f, n->final), at(f, n->final_rstd));
    tap(f, "final_hidden", -1, n->model->type, c->hidden_size, at(f, n->final));
}

/* Loss of each row, and with gradients that of the final hidden states in dx. */
static void run_head(struct network *n, const struct pass *f, int backward, double *total)
{
    struct head h = head_shape(n, f->rows);
    struct parameter *w = n->model->parameters.head;
    float *loss = at(f, n->loss);
    void *workspace = at(f, n->head_workspace);

    f->ops->head_loss(f->stream, &h, at(f, n->final), w->value, f->in->label, f->in->weight, loss,
                      backward ? at(f, n->dx) : NULL, backward ? w->gradient : NULL, workspace);
    f->ops->sum(f->stream, f->rows, loss, f->in->weight, total, workspace);
    tap(f, "ce_rows", -1, GLM52_DTYPE_F32, 1, loss);
    if (f->tap && f->tap->wants(f->tap->user, "logits", -1)) {
        struct gemm g = {.m = f->rows, .n = h.vocabulary, .k = h.width, .lda = h.width, .ldb = h.width,
                         .ldc = h.vocabulary, .batch = 1, .transpose_b = 1, .a_type = h.type, .b_type = w->type,
                         .c_type = GLM52_DTYPE_F32};
        f->ops->gemm(f->stream, &g, at(f, n->final), w->value, f->tap->scores);
        tap(f, "logits", -1, GLM52_DTYPE_F32, h.vocabulary, f->tap->scores);
    }
}

static void backward_layers(struct network *n, struct pass *b)
{
    const struct model_config *c = &n->model->config.model;
    struct embed e = {.rows = b->rows, .width = c->hidden_size, .vocabulary = c->vocab_size, .type = n->model->type};
    struct parameter *embedding = n->model->parameters.embedding;
    void *dx = at(b, n->dx);

    label(b, "head");
    norm_backward(b, n->model->parameters.final_norm, c->rms_norm_eps, c->hidden_size, at(b, n->x[n->layers]),
                  at(b, n->final_rstd), dx, dx, 0, at(b, n->head_workspace));
    for (int i = n->layers - 1; i >= 0; i--) {
        if (n->keep == KEEP_INPUTS) {
            b->replay = 1;
            layer_forward(&n->layer[i], b, at(b, n->x[i]), at(b, n->selected[i]), at(b, n->x[i + 1]));
            b->replay = 0;
        }
        layer_backward(&n->layer[i], b, at(b, n->x[i]), at(b, n->selected[i]), dx);
    }
    label(b, "embedding");
    if (embedding->gradient) b->ops->embed_backward(b->stream, &e, b->in->token, dx, embedding->gradient);
}

void network_run(struct network *n, const struct pack *pack, double scale, int backward, const struct tap *tap,
                 double *total)
{
    struct stream *s = n->model->stream;
    struct input in;
    struct pass pass = {.ops = s->ops, .stream = s, .model = n->model, .in = &in, .rows = pack->rows, .tap = tap};

    memcpy(pass.base, n->base, sizeof pass.base);
    input_upload(n->model, &n->input, pass.base, &n->stage, pack, scale, &in);
    forward_layers(n, &pass);
    run_head(n, &pass, backward, total);
    if (backward) backward_layers(n, &pass);
}
