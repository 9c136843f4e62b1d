/* x of a block: the momentum moves, the update in halves is stored, its squares are summed and x x^T is begun, while
 * gradient and momentum come and the momentum goes. The norm is known after that; so x is the update times a power
 * of two, which a first look at some columns gives, and is made again in the unlikely case that halves would not
 * hold it. What x is multiplied by later makes up for it. */
#pragma once

#include "update/muon.cuh"
#include "update/small_squares.cuh"

namespace small {

/* The norm of a block's own columns of x lies from 1, that of all columns if x were divided by its norm, to what
 * halves hold at most, whichever element has it. The scale aims at the middle. */
constexpr float NORM_MOST = 60000, NORM_AIM = 256;
constexpr int SCALE_BITS = 100; /* keeps the scale's powers within fp32 */

/* The power of two that takes a norm near the aim. */
__device__ __forceinline__ float scale_for(float norm)
{
    const int exponent = norm > 0 ? (__float_as_int(NORM_AIM) >> 23) - (__float_as_int(norm) >> 23) : 0;

    return __int_as_float((127 + max(-SCALE_BITS, min(exponent, SCALE_BITS))) << 23);
}

/* ---- four neighbours in shared memory ---- */

__device__ __forceinline__ void load_quad(uint32_t from, bool narrow, float (&v)[4])
{
    if (narrow) {
        uint32_t a, b;

        asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(a), "=r"(b) : "r"(from) : "memory");
        v[0] = __uint_as_float(a << 16);
        v[1] = __uint_as_float(a & 0xffff0000u);
        v[2] = __uint_as_float(b << 16);
        v[3] = __uint_as_float(b & 0xffff0000u);
    } else {
        asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
                     : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
                     : "r"(from)
                     : "memory");
    }
}

__device__ __forceinline__ void store_pair(uint32_t to, uint32_t a, uint32_t b)
{
    asm volatile("st.shared.v2.b32 [%0], {%1,%2};" ::"r"(to), "r"(a), "r"(b) : "memory");
}

/* Rounds v to what is stored. */
__device__ __forceinline__ void store_quad(uint32_t to, bool narrow, float (&v)[4])
{
    if (narrow) {
        const uint32_t a = pack_bf16(v[0], v[1]), b = pack_bf16(v[2], v[3]);

        store_pair(to, a, b);
        v[0] = __uint_as_float(a << 16);
        v[1] = __uint_as_float(a & 0xffff0000u);
        v[2] = __uint_as_float(b << 16);
        v[3] = __uint_as_float(b & 0xffff0000u);
    } else {
        store_shared16(to, __float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3]));
    }
}

/* The types and places of a stage's tiles */
template <int N>
struct state_tiles {
    bool narrow_gradient, narrow_momentum;

    __device__ state_tiles(const struct muon &m)
        : narrow_gradient(m.gradient == GLM52_DTYPE_BF16), narrow_momentum(m.moments == GLM52_DTYPE_BF16)
    {
    }
    __device__ uint32_t bytes_of(bool narrow) const { return layout<N>::PIECE_BYTES / (narrow ? 2 : 1); }
    __device__ uint32_t bytes() const { return bytes_of(narrow_gradient) + bytes_of(narrow_momentum); }
    __device__ int stages() const { return min(STAGES, (int)(layout<N>::MAKING * layout<N>::PIECE_BYTES / bytes())); }
    __device__ uint32_t gradient(const frame<N> &f, int stage) const { return f.base + stage * bytes(); }
    __device__ uint32_t momentum(const frame<N> &f, int stage) const
    {
        return gradient(f, stage) + bytes_of(narrow_gradient);
    }
};

/* What a thread of the warpgroups that multiply knows of it. It has four neighbours of a row, and as many ROWS
 * further on; so many rows leave the swizzle as it is. */
template <int N>
struct making {
    static constexpr int ROUNDS = 4, ROWS = layout<N>::CONSUMERS / 8;

    const frame<N> &f;
    state_tiles<N> tiles;
    muon_momentum of;
    int rows, row;          /* row: the first */
    uint32_t at, narrow_at; /* in tiles of HALF_PIECE columns */

    __device__ making(const frame<N> &f, const struct muon &m, float coefficient)
        : f(f), tiles(m), of(m, coefficient), rows((int)m.rows), row(threadIdx.x / 8), at(swizzled(threadIdx.x * 16)),
          narrow_at(swizzled64(threadIdx.x * 8))
    {
    }

    __device__ __forceinline__ uint32_t place_in(uint32_t tile, bool narrow, int round) const
    {
        return tile + (narrow ? narrow_at + round * (ROWS * 64) : at + round * (ROWS * 128));
    }

    __device__ __forceinline__ uint32_t momentum_at(int stage, int round) const
    {
        return place_in(tiles.momentum(f, stage), tiles.narrow_momentum, round);
    }

    __device__ __forceinline__ void load_round(int stage, int round, float (&g)[4], float (&m)[4]) const
    {
        load_quad(place_in(tiles.gradient(f, stage), tiles.narrow_gradient, round), tiles.narrow_gradient, g);
        load_quad(momentum_at(stage, round), tiles.narrow_momentum, m);
    }

    __device__ __forceinline__ float squares(const float (&u)[4]) const
    {
        return u[0] * u[0] + u[1] * u[1] + u[2] * u[2] + u[3] * u[3];
    }

    /* of the update of a stage that is left as it is */
    __device__ __forceinline__ double look(int stage) const
    {
        double sum = 0;

        for (int round = 0; round < ROUNDS; round++) {
            float g[4], m[4], u[4];

            if (row + round * ROWS >= rows) break;
            load_round(stage, round, g, m);
#pragma unroll
            for (int i = 0; i < 4; i++) u[i] = of.update(g[i], of.moved(g[i], m[i]));
            sum += (double)squares(u);
        }
        return sum;
    }

    /* A stage's columns of x at a place, its left or right half, and of the momentum, which has moved already where
     * `again`. */
    __device__ __forceinline__ double make(int stage, uint32_t to, int half, float scale, bool again) const
    {
        const uint32_t x = to + swizzled(row * 128 + half * 64 + threadIdx.x % 8 * 8);
        double sum = 0;

#pragma unroll 2
        for (int round = 0; round < ROUNDS; round++) {
            float g[4] = {}, m[4] = {}, u[4];

            if (row + round * ROWS < rows) {
                load_round(stage, round, g, m);
                if (!again) {
#pragma unroll
                    for (int i = 0; i < 4; i++) m[i] = of.moved(g[i], m[i]);
                    store_quad(momentum_at(stage, round), tiles.narrow_momentum, m);
                }
            }
#pragma unroll
            for (int i = 0; i < 4; i++) u[i] = of.update(g[i], m[i]);
            sum += (double)squares(u);
#pragma unroll
            for (int i = 0; i < 4; i++) u[i] *= scale;
            store_pair(x + round * (ROWS * 128), pack_half(u[0], u[1]), pack_half(u[2], u[3]));
        }
        return sum;
    }

    /* over the threads that multiply */
    __device__ __forceinline__ double sum_of_all(double x) const
    {
        x = warp_reduce(x, plus());
        if (threadIdx.x % 32 == 0) f.signal->sums[threadIdx.x / 32] = x;
        named_barrier(1, layout<N>::CONSUMERS);
        x = f.signal->sums[0];
#pragma unroll
        for (int i = 1; i < layout<N>::CONSUMERS / 32; i++) x += f.signal->sums[i];
        named_barrier(1, layout<N>::CONSUMERS);
        return x;
    }
};

/* All of this block's columns once. Returns this thread's squares; d = x x^T of them. */
template <int N, class Share>
__device__ __forceinline__ double make_columns(const making<N> &w, int columns, place &stage, place &x, float scale,
                                               bool again, float (&d)[Share::SUMS])
{
    using L = layout<N>;
    const frame<N> &f = w.f;
    double sum = 0;
    int before = -1;

    clear(d);
    stage.begin(w.tiles.stages());
    x.begin(X_SLOTS);
    each_tile(columns, f.rank, false, [&](int) {
        const uint32_t to = f.slot(L::MAKING + x.slot);

        barrier_wait(f.x_empty(x.slot), x.parity() ^ 1);
        for (int half = 0; half < 2; half++, stage.advance()) {
            barrier_wait(f.full(stage.slot), stage.parity());
            sum += w.make(stage.slot, to, half, scale, again);
            arrive_written(f.done(stage.slot));
            arrive(f.empty(stage.slot));
        }
        arrive(f.x_done(x.slot));
        named_barrier(1, L::CONSUMERS);
        add_squares<Share>(d, to);
        if (before >= 0) {
            mma_wait<1>();
            arrive(f.x_empty(before));
        }
        before = x.slot;
        x.advance();
    });
    mma_wait<0>();
    settle(d);
    if (before >= 0) arrive(f.x_empty(before));
    return sum;
}

/* Makes x and the first square, x x^T / |x|^2 of all columns. Returns what this block's x takes to have norm 1. */
template <int N, class Share>
__device__ __forceinline__ float make_x(const making<N> &w, int columns, place &stage, place &x)
{
    const frame<N> &f = w.f;
    const int tiles = (columns + PIECE - 1) / PIECE, own = (tiles - f.rank + 1) / 2;
    part_norm part = {0, 1};
    float d[Share::SUMS];

    if (own > 0) { /* the first stage is looked at, then waited for once more */
        barrier_wait(f.full(0), 0);
        part.scale = scale_for((float)sqrt(w.sum_of_all(w.look(0)) * (2 * own)));
    }
    for (bool again = false, fits = false; !fits; again = true) {
        part.squares = w.sum_of_all(make_columns<N, Share>(w, columns, stage, x, part.scale, again, d));
        const float norm = (float)sqrt(part.squares), scaled = norm * part.scale;

        fits = again || part.squares == 0 || (scaled >= 1 && scaled <= NORM_MOST);
        if (threadIdx.x == 0) f.signal->again = !fits;
        named_barrier(0, layout<N>::DECIDING);
        if (!fits) part.scale = scale_for(norm);
    }
    cluster_barrier();
    send_sums<N, Share>(f, d);
    if (threadIdx.x == 0) send_norm(&f.signal->other, f.rank ^ 1, part);
    cluster_barrier();
    const part_norm other = f.signal->other;
    const float norm = fmaxf((float)sqrt(part.squares + other.squares), MUON_NORM_FLOOR);
    const float factor = 1 / (norm * part.scale), others = 1 / (norm * other.scale);

    add_sent<N, Share>(f, d, factor * factor, others * others);
    return factor;
}

} /* namespace small */
