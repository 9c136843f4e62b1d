/* RMSNorm and LayerNorm with their backward (model.md 2, 2.3), statistics in fp32. Here: a block a row, any type and
 * width; held.cuh has bf16 rows that fit in registers.
 *
 * Gradients of gain and bias are sums over rows: each of at most BLOCKS blocks sums its rows in order, then the
 * blocks are added in order. How many blocks there are depends on the number of rows, and on the path, alone. */
#include "device/early.cuh"
#include "norm/held_backward.cuh"

namespace {

constexpr int THREADS = 256, ADD_THREADS = 1024;
constexpr int BLOCKS = 264;         /* that share the rows of a backward: two for each of a Hopper's multiprocessors */
constexpr size_t SHARED = 96 << 10; /* bytes of sums that a block keeps on chip: two blocks fit a multiprocessor */

int64_t block_count(int64_t rows)
{
    return std::min<int64_t>(BLOCKS, rows);
}

size_t norm_backward_bytes(struct stream *, const struct norm *n)
{
    return (size_t)block_count(n->rows) * 2 * (size_t)n->width * sizeof(float);
}

bool wide(const struct norm *n, const void *a, const void *b, const void *c, const void *e)
{
    return n->width % WIDE == 0 && n->x_stride % WIDE == 0 && n->y_stride % WIDE == 0 && aligned16(a) && aligned16(b) &&
           aligned16(c) && aligned16(e);
}

/* ---- forward ---- */

template <class T, int V, bool LAYER>
__global__ __launch_bounds__(THREADS) void forward_kernel(const struct norm n, const T *x, const T *gain, const T *bias,
                                                          T *y, float *statistics)
{
    const int64_t row = blockIdx.x;
    float sum = 0, squares = 0, mean = 0;

    x += row * n.x_stride;
    y += row * n.y_stride;
    if (LAYER) {
        for (int64_t j = threadIdx.x * V; j < n.width; j += THREADS * V) {
            float a[V];

            load(x + j, a);
#pragma unroll
            for (int i = 0; i < V; i++) sum += a[i];
        }
        mean = block_sum<THREADS>(sum) / (float)n.width;
    }
    for (int64_t j = threadIdx.x * V; j < n.width; j += THREADS * V) {
        float a[V];

        load(x + j, a);
#pragma unroll
        for (int i = 0; i < V; i++) squares += (a[i] - mean) * (a[i] - mean);
    }
    const float rstd = 1.0f / sqrtf(block_sum<THREADS>(squares) / (float)n.width + n.epsilon);
    for (int64_t j = threadIdx.x * V; j < n.width; j += THREADS * V) {
        float a[V], g[V], b[V] = {};

        load(x + j, a);
        load(gain + j, g);
        if (LAYER) load(bias + j, b);
#pragma unroll
        for (int i = 0; i < V; i++) a[i] = (a[i] - mean) * rstd * g[i] + b[i];
        store(y + j, a, n.add);
    }
    if (threadIdx.x == 0) {
        if (LAYER) statistics[2 * row] = mean;
        statistics[LAYER ? 2 * row + 1 : row] = rstd;
    }
}

template <bool LAYER>
void forward(cuda_device *d, const struct norm *n, const void *x, const void *gain, const void *bias, void *y,
             float *statistics)
{
    const bool by_pieces = wide(n, x, gain, LAYER ? bias : x, y);

    if (n->rows == 0) return;
    if (by_pieces && held::fits(n))
        held::forward<LAYER>(d, n, (const bf16 *)x, (const bf16 *)gain, (const bf16 *)bias, (bf16 *)y, statistics);
    else
        with_type_and_width(n->type, by_pieces, [&](auto element, auto width) {
            using T = decltype(element);
            constexpr int V = decltype(width)::value;
            forward_kernel<T, V, LAYER><<<(unsigned)n->rows, THREADS, 0, d->stream>>>(
                *n, (const T *)x, (const T *)gain, (const T *)bias, (T *)y, statistics);
        });
    launched(d, LAYER ? "layernorm_forward" : "rmsnorm_forward");
}

/* ---- backward ---- */

/* With g = gain * dy and h = (x - mean) rstd: dx = rstd (g - mean(g) - h mean(g h)); mean(g) counts for LayerNorm
 * alone. What a thread reads of dy it also writes to dx, and nobody else does: dx may be dy. */
template <class T, int V, bool LAYER>
__device__ void backward_row(const struct norm &n, const T *x, const T *gain, float mean, float rstd, const T *dy,
                             T *dx, float *dgain, float *dbias)
{
    float mean_g = 0, mean_gh = 0;

    for (int64_t j = threadIdx.x * V; j < n.width; j += THREADS * V) {
        float a[V], g[V], up[V], to_gain[V], to_bias[V];

        load(x + j, a);
        load(gain + j, g);
        load(dy + j, up);
        load(dgain + j, to_gain);
        if (LAYER) load(dbias + j, to_bias);
#pragma unroll
        for (int i = 0; i < V; i++) {
            const float h = (a[i] - mean) * rstd;

            to_gain[i] += up[i] * h;
            if (LAYER) to_bias[i] += up[i];
            mean_g += g[i] * up[i];
            mean_gh += g[i] * up[i] * h;
        }
        store(dgain + j, to_gain);
        if (LAYER) store(dbias + j, to_bias);
    }
    mean_g = LAYER ? block_sum<THREADS>(mean_g) / (float)n.width : 0;
    mean_gh = block_sum<THREADS>(mean_gh) / (float)n.width;
    for (int64_t j = threadIdx.x * V; j < n.width; j += THREADS * V) {
        float a[V], g[V], up[V];

        load(x + j, a);
        load(gain + j, g);
        load(dy + j, up);
#pragma unroll
        for (int i = 0; i < V; i++) a[i] = rstd * (g[i] * up[i] - mean_g - (a[i] - mean) * rstd * mean_gh);
        store(dx + j, a, n.add);
    }
}

/* The rows of one block; its sums go to partial [blocks, 2, width]. */
template <class T, int V, bool LAYER>
__global__ __launch_bounds__(THREADS) void backward_kernel(const struct norm n, const T *x, const T *gain,
                                                           const float *statistics, const T *dy, T *dx, float *partial,
                                                           bool on_chip)
{
    extern __shared__ __align__(16) float shared[];
    float *own = partial + (int64_t)blockIdx.x * 2 * n.width, *dgain = on_chip ? shared : own, *dbias = dgain + n.width;
    const int64_t first = n.rows * blockIdx.x / gridDim.x, end = n.rows * (blockIdx.x + 1) / gridDim.x;

    for (int64_t j = threadIdx.x * V; j < n.width; j += THREADS * V) {
        const float zero[V] = {};

        store(dgain + j, zero);
        if (LAYER) store(dbias + j, zero);
    }
    for (int64_t row = first; row < end; row++)
        backward_row<T, V, LAYER>(n, x + row * n.x_stride, gain, LAYER ? statistics[2 * row] : 0,
                                  statistics[LAYER ? 2 * row + 1 : row], dy + row * n.y_stride, dx + row * n.x_stride,
                                  dgain, dbias);
    if (!on_chip) return;
    __syncthreads();
    for (int64_t j = threadIdx.x; j < (LAYER ? 2 : 1) * n.width; j += THREADS) own[j] = shared[j];
}

/* to[j] += sum over blocks; blockIdx.y: gain or bias. A warp has 32 columns, and each warp of a block a share of the
 * blocks, so that all loads are under way at once; shares are added in order. */
__global__ __launch_bounds__(ADD_THREADS) void add_blocks_kernel(int blocks, int64_t width, const float *partial,
                                                                 float *dgain, float *dbias)
{
    constexpr int WARPS = ADD_THREADS / 32, EACH = (int)(BLOCKS + WARPS - 1) / WARPS;
    __shared__ float share[WARPS][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t j = blockIdx.x * (int64_t)32 + lane;
    float *to = (blockIdx.y ? dbias : dgain) + j, part[EACH], sum = 0;
    const float before = warp == 0 && j < width ? *to : 0;

    wait_for_kernel_before();
#pragma unroll
    for (int q = 0; q < EACH; q++) {
        const int b = warp + q * WARPS;
        part[q] = b < blocks && j < width ? partial[(2 * (int64_t)b + blockIdx.y) * width + j] : 0;
    }
#pragma unroll
    for (int q = 0; q < EACH; q++) sum += part[q];
    share[warp][lane] = sum;
    __syncthreads();
    if (warp != 0 || j >= width) return;
#pragma unroll
    for (int w = 1; w < WARPS; w++) sum += share[w][lane];
    *to = before + sum;
}

template <bool LAYER>
void backward(cuda_device *d, const struct norm *n, const void *x, const void *gain, const float *statistics,
              const void *dy, void *dx, float *dgain, float *dbias, void *workspace)
{
    unsigned blocks = (unsigned)block_count(n->rows);
    const size_t bytes = (LAYER ? 2 : 1) * (size_t)n->width * sizeof(float);
    const bool on_chip = bytes <= SHARED, by_pieces = wide(n, x, gain, dy, dx) && aligned16(workspace);

    if (n->rows == 0) return;
    if (by_pieces && held::fits(n)) {
        blocks = std::min<unsigned>(blocks, held::MOST_BLOCKS);
        held::backward<LAYER>(d, n, (const bf16 *)x, (const bf16 *)gain, statistics, (const bf16 *)dy, (bf16 *)dx,
                              dgain ? (float *)workspace : nullptr, blocks);
    } else
        with_type_and_width(n->type, by_pieces, [&](auto element, auto width) {
            using T = decltype(element);
            constexpr int V = decltype(width)::value;
            allow_shared(backward_kernel<T, V, LAYER>, on_chip ? bytes : 0);
            backward_kernel<T, V, LAYER><<<blocks, THREADS, on_chip ? bytes : 0, d->stream>>>(
                *n, (const T *)x, (const T *)gain, statistics, (const T *)dy, (T *)dx, (float *)workspace, on_chip);
        });
    if (dgain)
        launch_following(d->stream, add_blocks_kernel, dim3((unsigned)divided(n->width, 32), LAYER ? 2 : 1),
                         ADD_THREADS, 0, (int)blocks, n->width, (const float *)workspace, dgain, dbias);
    launched(d, LAYER ? "layernorm_backward" : "rmsnorm_backward");
}

/* ---- the operations ---- */

void rmsnorm_forward(struct stream *s, const struct norm *n, const void *x, const void *gain, void *y, float *rstd)
{
    count_rmsnorm_forward(s, n);
    forward<false>(device_of(s), n, x, gain, nullptr, y, rstd);
}

void rmsnorm_backward(struct stream *s, const struct norm *n, const void *x, const void *gain, const float *rstd,
                      const void *dy, void *dx, float *dgain, void *workspace)
{
    count_rmsnorm_backward(s, n);
    backward<false>(device_of(s), n, x, gain, rstd, dy, dx, dgain, nullptr, workspace);
}

void layernorm_forward(struct stream *s, const struct norm *n, const void *x, const void *gain, const void *bias,
                       void *y, float *statistics)
{
    count_layernorm_forward(s, n);
    forward<true>(device_of(s), n, x, gain, bias, y, statistics);
}

void layernorm_backward(struct stream *s, const struct norm *n, const void *x, const void *gain,
                        const float *statistics, const void *dy, void *dx, float *dgain, float *dbias, void *workspace)
{
    count_layernorm_backward(s, n);
    backward<true>(device_of(s), n, x, gain, statistics, dy, dx, dgain, dbias, workspace);
}

} /* namespace */

void fill_norm(struct ops *t)
{
    t->rmsnorm_forward = rmsnorm_forward;
    t->norm_backward_bytes = norm_backward_bytes;
    t->rmsnorm_backward = rmsnorm_backward;
    t->layernorm_forward = layernorm_forward;
    t->layernorm_backward = layernorm_backward;
}
