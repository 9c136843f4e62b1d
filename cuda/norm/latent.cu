/* The latent of keys and values from its product in fp32: RMSNorm of the first columns and rotation of the others, and
 * back (model.md 2.2). A warp has a row; lanes take V columns each in turn.
 *
 * The gain's gradient is a sum over rows: each of at most BLOCKS blocks sums its rows, those of a warp in order and
 * then its warps in order, and then the blocks are added in order. How many blocks there are depends on the number of
 * rows alone. */
#include "device/element.cuh"

namespace {

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int BLOCKS = 264; /* of a backward: two for each of a Hopper's multiprocessors */
constexpr int QUAD = 4;     /* columns of a lane at a time where rows allow it */
constexpr int HELD = 4;     /* such quads of a lane that backward holds: 512 columns of a row */
constexpr int ADD_THREADS = 1024;

__host__ __device__ __forceinline__ int64_t columns_of(const struct latent &l) { return l.rank + 2 * (int64_t)l.half; }

int64_t block_count(int64_t rows)
{
    return std::min<int64_t>(BLOCKS, divided(rows, WARPS));
}

bool in_quads(const struct latent *l, const void *table, const void *x, const void *gain, const void *y)
{
    return l->rank % QUAD == 0 && l->half % (QUAD / 2) == 0 && aligned16(table) && aligned16(x) && aligned16(gain) &&
           aligned16(y);
}

/* Neighbouring pairs, turned by their cosines and sines; sign -1 turns back. One pair may lie anywhere. */
template <class T, int PAIRS>
__device__ __forceinline__ void rotate(const float *table, float sign, const float *x, T *y)
{
    float in[2 * PAIRS] = {x[0], x[1]}, turn[2 * PAIRS] = {table[0], table[1]}, out[2 * PAIRS];

    if (PAIRS > 1) {
        load(x, in);
        load(table, turn);
    }
#pragma unroll
    for (int i = 0; i < 2 * PAIRS; i += 2) {
        const float sine = sign * turn[i + 1];

        out[i] = in[i] * turn[i] - in[i + 1] * sine;
        out[i + 1] = in[i + 1] * turn[i] + in[i] * sine;
    }
    if (PAIRS > 1) {
        store(y, out);
    } else {
        y[0] = to<T>(out[0]);
        y[1] = to<T>(out[1]);
    }
}

template <class T, int PAIRS>
__device__ __forceinline__ void rotate_row(const struct latent &l, const float *table, float sign, const float *x, T *y)
{
    for (int j = threadIdx.x % 32 * 2 * PAIRS; j < 2 * l.half; j += 32 * 2 * PAIRS)
        rotate<T, PAIRS>(table + j, sign, x + j, y + j);
}

/* ---- forward ---- */

template <class T, int V>
__global__ __launch_bounds__(THREADS) void forward_kernel(const struct latent l, const float *table, const float *x,
                                                          const T *gain, T *y, float *rstd)
{
    const int64_t row = blockIdx.x * (int64_t)WARPS + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    float squares = 0;

    if (row >= l.rows) return;
    x += row * columns_of(l);
    y += row * columns_of(l);
    rotate_row<T, V == 1 ? 1 : V / 2>(l, table + row * 2 * l.half, 1, x + l.rank, y + l.rank);
#pragma unroll 4
    for (int j = lane * V; j < l.rank; j += 32 * V) {
        float a[V];

        load(x + j, a);
#pragma unroll
        for (int i = 0; i < V; i++) squares += a[i] * a[i];
    }
    const float scale = 1.0f / sqrtf(warp_reduce(squares, plus()) / (float)l.rank + l.epsilon);
#pragma unroll 4
    for (int j = lane * V; j < l.rank; j += 32 * V) {
        float a[V], g[V];

        load(x + j, a);
        load(gain + j, g);
#pragma unroll
        for (int i = 0; i < V; i++) a[i] *= scale * g[i];
        store(y + j, a);
    }
    if (lane == 0) rstd[row] = scale;
}

void latent_forward(struct stream *s, const struct latent *l, const float *table, const float *x, const void *gain,
                    void *y, float *rstd)
{
    cuda_device *d = device_of(s);
    const unsigned blocks = (unsigned)divided(l->rows, WARPS);

    count_latent_forward(s, l);
    if (l->rows == 0) return;
    with_type(l->type, [&](auto element) {
        using T = decltype(element);
        if (in_quads(l, table, x, gain, y))
            forward_kernel<T, QUAD><<<blocks, THREADS, 0, d->stream>>>(*l, table, x, (const T *)gain, (T *)y, rstd);
        else
            forward_kernel<T, 1><<<blocks, THREADS, 0, d->stream>>>(*l, table, x, (const T *)gain, (T *)y, rstd);
    });
    launched(d, "latent_forward");
}

/* ---- backward ---- */

/* With g = gain * dy and h = x rstd: dx = rstd (g - h mean(g h)), dgain = sum of dy h. A warp's rows in order; what it
 * sums of the gain's gradient stays in registers. */
template <class T>
__global__ __launch_bounds__(THREADS) void held_kernel(const struct latent l, const float *table, const float *x,
                                                       const T *gain, const float *rstd, const float *dy, T *dx,
                                                       float *partial)
{
    __shared__ __align__(16) float sums[HELD * 32 * QUAD];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float to_gain[HELD][QUAD] = {}, g[HELD][QUAD] = {};

#pragma unroll
    for (int c = 0; c < HELD; c++)
        if ((c * 32 + lane) * QUAD < l.rank) load(gain + (c * 32 + lane) * QUAD, g[c]);
    for (int64_t row = blockIdx.x * (int64_t)WARPS + warp; row < l.rows; row += gridDim.x * (int64_t)WARPS) {
        const float *own_x = x + row * columns_of(l), *own_dy = dy + row * columns_of(l), scale = rstd[row];
        T *to = dx + row * columns_of(l);
        float h[HELD][QUAD] = {}, up[HELD][QUAD] = {}, mean = 0;

#pragma unroll
        for (int c = 0; c < HELD; c++)
            if ((c * 32 + lane) * QUAD < l.rank) {
                load(own_x + (c * 32 + lane) * QUAD, h[c]);
                load(own_dy + (c * 32 + lane) * QUAD, up[c]);
            }
        rotate_row<T, QUAD / 2>(l, table + row * 2 * l.half, -1, own_dy + l.rank, to + l.rank);
#pragma unroll
        for (int c = 0; c < HELD; c++)
#pragma unroll
            for (int i = 0; i < QUAD; i++) {
                h[c][i] *= scale;
                to_gain[c][i] += up[c][i] * h[c][i];
                up[c][i] *= g[c][i];
                mean += up[c][i] * h[c][i];
            }
        mean = warp_reduce(mean, plus()) / (float)l.rank;
#pragma unroll
        for (int c = 0; c < HELD; c++) {
            if ((c * 32 + lane) * QUAD >= l.rank) break;
#pragma unroll
            for (int i = 0; i < QUAD; i++) up[c][i] = scale * (up[c][i] - h[c][i] * mean);
            store(to + (c * 32 + lane) * QUAD, up[c]);
        }
    }
    if (!partial) return;
    for (int w = 0; w < WARPS; w++) {
#pragma unroll
        for (int c = 0; c < HELD; c++)
            if (warp == w) store(sums + (c * 32 + lane) * QUAD, to_gain[c], w > 0);
        __syncthreads();
    }
    for (int j = threadIdx.x; j < l.rank; j += THREADS) partial[blockIdx.x * (int64_t)l.rank + j] = sums[j];
}

/* Any shape: a block a row, and the thread that has a column sums its gain's gradient in partial. */
template <class T>
__global__ __launch_bounds__(THREADS) void backward_kernel(const struct latent l, const float *table, const float *x,
                                                           const T *gain, const float *rstd, const float *dy, T *dx,
                                                           float *partial)
{
    if (partial) partial += blockIdx.x * (int64_t)l.rank;
    for (int j = threadIdx.x; partial && j < l.rank; j += THREADS) partial[j] = 0;
    for (int64_t row = blockIdx.x; row < l.rows; row += gridDim.x) {
        const float *own_x = x + row * columns_of(l), *own_dy = dy + row * columns_of(l), scale = rstd[row];
        T *to_row = dx + row * columns_of(l);
        float mean = 0;

        for (int j = threadIdx.x; j < l.rank; j += THREADS) {
            const float h = own_x[j] * scale;

            mean += get(gain[j]) * own_dy[j] * h;
            if (partial) partial[j] += own_dy[j] * h;
        }
        mean = block_sum<THREADS>(mean) / (float)l.rank;
        for (int j = threadIdx.x; j < l.rank; j += THREADS)
            to_row[j] = to<T>(scale * (get(gain[j]) * own_dy[j] - own_x[j] * scale * mean));
        if (threadIdx.x < 32)
            rotate_row<T, 1>(l, table + row * 2 * l.half, -1, own_dy + l.rank, to_row + l.rank);
    }
}

/* A warp has 32 columns, and each warp of a block a share of the blocks; shares are added in order. */
__global__ __launch_bounds__(ADD_THREADS) void add_blocks_kernel(int blocks, int rank, const float *partial,
                                                                 float *dgain)
{
    __shared__ float share[ADD_THREADS / 32][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, j = blockIdx.x * 32 + lane;
    float sum = 0;

    if (j < rank) {
#pragma unroll 8
        for (int b = warp; b < blocks; b += ADD_THREADS / 32) sum += partial[b * (int64_t)rank + j];
    }
    share[warp][lane] = sum;
    __syncthreads();
    if (warp != 0 || j >= rank) return;
#pragma unroll
    for (int w = 1; w < ADD_THREADS / 32; w++) sum += share[w][lane];
    dgain[j] += sum;
}

size_t latent_backward_bytes(struct stream *, const struct latent *l)
{
    return (size_t)block_count(l->rows) * (size_t)l->rank * sizeof(float);
}

void latent_backward(struct stream *s, const struct latent *l, const float *table, const float *x, const void *gain,
                     const float *rstd, const float *dy, void *dx, float *dgain, void *workspace)
{
    cuda_device *d = device_of(s);
    const int blocks = (int)block_count(l->rows);
    float *partial = dgain ? (float *)workspace : nullptr;

    count_latent_backward(s, l);
    if (l->rows == 0) return;
    with_type(l->type, [&](auto element) {
        using T = decltype(element);
        const bool held = in_quads(l, table, x, gain, dx) && aligned16(dy) && l->rank <= HELD * 32 * QUAD;
        auto kernel = held ? held_kernel<T> : backward_kernel<T>;

        kernel<<<blocks, THREADS, 0, d->stream>>>(*l, table, x, (const T *)gain, rstd, dy, (T *)dx, partial);
    });
    if (dgain)
        add_blocks_kernel<<<(unsigned)divided(l->rank, 32), ADD_THREADS, 0, d->stream>>>(blocks, l->rank, partial,
                                                                                         dgain);
    launched(d, "latent_backward");
}

} /* namespace */

void fill_latent(struct ops *t)
{
    t->latent_forward = latent_forward;
    t->latent_backward_bytes = latent_backward_bytes;
    t->latent_backward = latent_backward;
}
