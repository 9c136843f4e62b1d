/* The way to the Hopper kernels. */
#include "attention/hopper.cuh"
#include "grouped_gemm/grouped_gemm.h"
#include "grouped_gemm/shape.cuh"

static bool map_of(CUtensorMap *map, const void *array, int64_t rows, int64_t heads)
{
    const int64_t size[3] = {hopper::COLUMNS, rows, heads};

    return encode_map(map, GROUPED_GEMM_BF16, array, 3, size, heads * hopper::COLUMNS, hopper::COLUMNS, hopper::BLOCK, TILE);
}

static bool of_hopper(const dense_call &x)
{
    const struct dense_attention &a = x.a;

    return a.type == GLM52_DTYPE_BF16 && a.qk == hopper::COLUMNS && a.v == hopper::COLUMNS && a.scale > 0 && x.wide &&
           a.rows > 0 && a.keys > 0 && a.keys <= INT32_MAX;
}

static bool maps_of_inputs(const dense_call &x, hopper::attention_maps *m)
{
    const struct dense_attention &a = x.a;

    return map_of(&m->q, x.q, a.rows, a.heads) && map_of(&m->k, x.k, a.keys, a.heads) && map_of(&m->v, x.v, a.keys, a.heads);
}

bool hopper_forward(cuda_device *d, const dense_call &x, void *out, float *lse)
{
    const struct dense_attention &a = x.a;
    const hopper::attention_call call = {a.rows, a.keys, a.heads, a.scale, x.start, x.end, nullptr, nullptr, nullptr};
    hopper::attention_maps m = {};

    if (!of_hopper(x) || !aligned16(out) || !maps_of_inputs(x, &m) || !map_of(&m.out, out, a.rows, a.heads)) return false;
    hopper::attend_forward(d->stream, m, call, lse);
    return true;
}

bool hopper_backward(cuda_device *d, const dense_call &x, const dense_gradients &g)
{
    const struct dense_attention &a = x.a;
    const hopper::attention_call call = {a.rows, a.keys, a.heads, a.scale, x.start, x.end, g.lse, g.delta, g.seen};
    hopper::attention_maps m = {};

    if (!of_hopper(x) || !aligned16(g.dq) || !aligned16(g.dk) || !aligned16(g.dv) || !maps_of_inputs(x, &m) ||
        !map_of(&m.dout, g.dout, a.rows, a.heads) || !map_of(&m.dq, g.dq, a.rows, a.heads) ||
        !map_of(&m.dk, g.dk, a.keys, a.heads) || !map_of(&m.dv, g.dv, a.keys, a.heads))
        return false;
    hopper::attend_keys(d->stream, m, call);
    hopper::attend_queries(d->stream, m, call);
    return true;
}
