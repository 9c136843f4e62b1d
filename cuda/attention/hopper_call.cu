/* The way to the Hopper kernels. */
#include "attention/hopper.cuh"
#include "grouped_gemm/grouped_gemm.h"
#include "grouped_gemm/shape.cuh"

constexpr size_t SLOPES_MOST = (size_t)512 << 20; /* dS of 4 heads of 8192 rows and keys, of one of 16384 */

static bool map_of(CUtensorMap *map, const void *array, int64_t rows, int64_t heads)
{
    const int64_t size[3] = {hopper::COLUMNS, rows, heads};

    return encode_map(map, GROUPED_GEMM_BF16, array, 3, size, heads * hopper::COLUMNS, hopper::COLUMNS, hopper::BLOCK,
                      TILE);
}

static bool of_hopper(const struct dense_attention &a)
{
    return a.type == GLM52_DTYPE_BF16 && a.qk == hopper::COLUMNS && a.v == hopper::COLUMNS && a.scale > 0 &&
           a.rows > 0 && a.keys > 0 && a.keys <= INT32_MAX;
}

/* Of how many heads dS is kept at a time; 0: not even of one. */
static int heads_at_once(const struct dense_attention &a)
{
    const size_t one = (size_t)divided(a.rows, TILE) * (size_t)divided(a.keys, TILE) * hopper::SLOPE_BYTES;

    return (int)std::min((size_t)a.heads, SLOPES_MOST / one);
}

/* What lies in `base`, or with NULL how much it takes. */
static size_t layout(const struct dense_attention &a, void *base, hopper::attention_call *c)
{
    const int64_t rows = divided(a.rows, TILE), keys = divided(a.keys, TILE);
    size_t used = 0;

    c->of_tile = carve<hopper::tile_facts>(base, &used, rows);
    c->of_head = carve<hopper::head_facts>(base, &used, rows * a.heads);
    if (heads_at_once(a) > 0)
        c->slopes = carve<unsigned char>(base, &used, heads_at_once(a) * rows * keys * hopper::SLOPE_BYTES);
    return used;
}

size_t hopper_bytes(const struct dense_attention *a)
{
    hopper::attention_call c;

    return of_hopper(*a) ? layout(*a, nullptr, &c) : 0;
}

static bool maps_of_inputs(const dense_call &x, hopper::attention_maps *m)
{
    const struct dense_attention &a = x.a;

    return map_of(&m->q, x.q, a.rows, a.heads) && map_of(&m->k, x.k, a.keys, a.heads) &&
           map_of(&m->v, x.v, a.keys, a.heads);
}

bool hopper_forward(cuda_device *d, const dense_call &x, void *out, float *lse)
{
    const struct dense_attention &a = x.a;
    const hopper::attention_call call = {a.rows, a.keys, a.heads, a.scale, x.start, x.end};
    hopper::attention_maps m = {};

    if (!of_hopper(a) || !x.wide || !aligned16(out) || !maps_of_inputs(x, &m) || !map_of(&m.out, out, a.rows, a.heads))
        return false;
    hopper::attend_forward(d->stream, m, call, lse);
    return true;
}

bool hopper_backward(cuda_device *d, const dense_call &x, const dense_gradients &g)
{
    const struct dense_attention &a = x.a;
    hopper::attention_call call = {a.rows, a.keys, a.heads, a.scale, x.start, x.end};
    hopper::attention_maps m = {};

    if (!of_hopper(a) || !x.wide || !aligned16(g.out) || !aligned16(g.dout) || !aligned16(g.dq) || !aligned16(g.dk) ||
        !aligned16(g.dv) || !maps_of_inputs(x, &m) || !map_of(&m.dout, g.dout, a.rows, a.heads) ||
        !map_of(&m.dq, g.dq, a.rows, a.heads) || !map_of(&m.dk, g.dk, a.keys, a.heads) ||
        !map_of(&m.dv, g.dv, a.keys, a.heads))
        return false;
    const int together = std::max(1, heads_at_once(a));

    call.seen = g.seen;
    layout(a, g.space, &call);
    hopper::describe_rows(d->stream, call, g.out, g.dout, g.lse);
    for (; call.first < a.heads; call.first += together) {
        call.count = std::min(together, a.heads - call.first);
        hopper::attend_keys(d->stream, m, call);
        (call.slopes ? hopper::attend_slopes : hopper::attend_queries)(d->stream, m, call);
    }
    return true;
}
