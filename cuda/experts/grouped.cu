/* Products of the experts: rows sorted by group, one weight matrix per group, the groups' bounds known to the device
 * alone. What grouped_gemm/ takes runs there, on Hopper's tensor cores; the kernels of this file take every shape and
 * type. The grid is made for the most tiles that any bounds can give; a block finds its tile in them, or none. */
#include "dense/tile.cuh"
#include "grouped_gemm/grouped_gemm.h"

namespace {

template <class T> constexpr int TILE = sizeof(T) == 2 ? 128 : 64;

int32_t type_of(glm52_dtype type) { return type == GLM52_DTYPE_BF16 ? GROUPED_GEMM_BF16 : GROUPED_GEMM_F32; }

struct arguments {
    struct grouped_gemm g;
    const int32_t *offsets;
    const void *left, *right;
    void *out;
    bool wide;
};

/* Of the rows' products: which group, and where the tile begins. group < 0: none. */
struct place {
    int group;
    int64_t row, rows;
};

/* Tile `number` of tiles of `high` rows, counted group by group. */
__device__ place find_tile(const int32_t *offsets, int groups, int64_t number, int high)
{
    __shared__ place found;
    int before = 0;

    if (threadIdx.x == 0) found = {-1, 0, 0};
    for (int first = 0; first < groups; first += TILE_THREADS) {
        const int group = first + threadIdx.x;
        const int start = group < groups ? offsets[group] : 0, end = group < groups ? offsets[group + 1] : 0;
        const int tiles = (end - start + high - 1) / high;
        int all;
        const int at = before + block_before<TILE_THREADS>(tiles, &all);

        if (number >= at && number < at + tiles) {
            const int64_t row = start + (number - at) * high;
            found = {group, row, min((int64_t)high, end - row)};
        }
        before += all;
        if (number < before) break;
    }
    __syncthreads();
    return found;
}

/* out[rows, columns] (+)= left[rows, depth] W, W the group's matrix [n,k]: ALONG for the forward, ACROSS to go back. */
template <class T, order W>
__global__ __launch_bounds__(TILE_THREADS) void rows_kernel(const arguments x, int64_t depth, int64_t columns)
{
    using product = tile<T, TILE<T>, TILE<T>, ALONG, W>;
    __shared__ typename product::shared shared;
    const place p = find_tile(x.offsets, x.g.groups, blockIdx.y, TILE<T>);
    const int64_t j = (int64_t)blockIdx.x * TILE<T>;
    const T *w = (const T *)x.right + p.group * x.g.stride + (W == ALONG ? j * x.g.k : j);
    T *out = (T *)x.out + p.row * columns + j;
    product t;

    if (p.group < 0) return;
    t.clear();
    t.multiply(shared, operand<T>{(const T *)x.left + p.row * depth, depth, (int)p.rows, x.wide},
               operand<T>{w, x.g.k, (int)min((int64_t)TILE<T>, columns - j), x.wide}, depth);
    t.each([&](int row, int column, float sum) {
        if (row >= p.rows || j + column >= columns) return;
        T *at = out + row * columns + column;
        *at = to<T>(x.g.add ? get(*at) + sum : sum);
    });
}

/* dw[n,k] (+)= dy^T x over the rows of group blockIdx.z. */
template <class T, class G>
__global__ __launch_bounds__(TILE_THREADS) void weight_kernel(const arguments x)
{
    using product = tile<T, TILE<T>, TILE<T>, ACROSS, ACROSS>;
    __shared__ typename product::shared shared;
    const int64_t i = (int64_t)blockIdx.y * TILE<T>, j = (int64_t)blockIdx.x * TILE<T>, n = x.g.n, k = x.g.k;
    const int64_t first = x.offsets[blockIdx.z], rows = x.offsets[blockIdx.z + 1] - first;
    G *dw = (G *)x.out + blockIdx.z * x.g.stride;
    product t;

    if (rows == 0 && x.g.add) return;
    t.clear();
    t.multiply(shared, operand<T>{(const T *)x.left + first * n + i, n, (int)min((int64_t)TILE<T>, n - i), x.wide},
               operand<T>{(const T *)x.right + first * k + j, k, (int)min((int64_t)TILE<T>, k - j), x.wide}, rows);
    t.each([&](int row, int column, float sum) {
        if (i + row >= n || j + column >= k) return;
        G *at = dw + (i + row) * k + j + column;
        *at = to<G>(x.g.add ? get(*at) + sum : sum);
    });
}

/* Hopper's kernels take it: true, and it has run. What they report is kept. */
template <class Function>
bool on_tensor_cores(cuda_device *d, const struct grouped_gemm *g, const void *a, const void *b, const void *c,
                     Function call)
{
    const struct grouped_gemm_shape shape = {g->rows, g->n, g->k, g->stride, g->groups, g->add, type_of(g->type),
                                             type_of(g->gradient)};

    if (!grouped_gemm_cuda_takes(&shape, a, b, c) || grouped_gemm_cuda_bytes(&shape) > SCRATCH_BYTES) return false;
    const cudaError_t error = call(&shape);
    if (error != cudaSuccess) record_error(d, error, "grouped_gemm");
    return true;
}

arguments arguments_of(const struct grouped_gemm *g, const int32_t *offsets, const void *left, const void *right,
                       void *out)
{
    const bool wide = g->n % WIDE == 0 && g->k % WIDE == 0 && g->stride % WIDE == 0 && aligned16(left) &&
                      aligned16(right);

    return {*g, offsets, left, right, out, wide};
}

template <order W>
void rows_product(cuda_device *d, const arguments &x, int64_t depth, int64_t columns)
{
    if (x.g.rows == 0) return;
    with_type(x.g.type, [&](auto element) {
        using T = decltype(element);
        const dim3 grid((unsigned)divided(columns, TILE<T>), (unsigned)(divided(x.g.rows, TILE<T>) + x.g.groups));

        rows_kernel<T, W><<<grid, TILE_THREADS, 0, d->stream>>>(x, depth, columns);
    });
    launched(d, "grouped_gemm");
}

void grouped_gemm_forward(struct stream *s, const struct grouped_gemm *g, const int32_t *offsets, const void *x,
                          const void *w, void *y)
{
    cuda_device *d = device_of(s);

    count_grouped_gemm_forward(s, g);
    if (!on_tensor_cores(d, g, x, w, y, [&](const struct grouped_gemm_shape *shape) {
            return grouped_gemm_cuda_forward(d->stream, shape, offsets, x, w, y, d->scratch);
        }))
        rows_product<ALONG>(d, arguments_of(g, offsets, x, w, y), g->k, g->n);
}

void grouped_gemm_backward_rows(struct stream *s, const struct grouped_gemm *g, const int32_t *offsets, const void *dy,
                                const void *w, void *dx)
{
    cuda_device *d = device_of(s);

    count_grouped_gemm_backward_rows(s, g);
    if (!on_tensor_cores(d, g, dy, w, dx, [&](const struct grouped_gemm_shape *shape) {
            return grouped_gemm_cuda_backward_rows(d->stream, shape, offsets, dy, w, dx, d->scratch);
        }))
        rows_product<ACROSS>(d, arguments_of(g, offsets, dy, w, dx), g->n, g->k);
}

void grouped_gemm_backward_weight(struct stream *s, const struct grouped_gemm *g, const int32_t *offsets,
                                  const void *dy, const void *x, void *dw)
{
    cuda_device *d = device_of(s);
    const arguments a = arguments_of(g, offsets, dy, x, dw);

    count_grouped_gemm_backward_weight(s, g);
    if (on_tensor_cores(d, g, dy, x, dw, [&](const struct grouped_gemm_shape *shape) {
            return grouped_gemm_cuda_backward_weight(d->stream, shape, offsets, dy, x, dw, d->scratch);
        }))
        return;
    with_type(g->type, [&](auto element) {
        with_type(g->gradient, [&](auto sum) {
            using T = decltype(element);
            const dim3 grid((unsigned)divided(g->k, TILE<T>), (unsigned)divided(g->n, TILE<T>), (unsigned)g->groups);

            weight_kernel<T, decltype(sum)><<<grid, TILE_THREADS, 0, d->stream>>>(a);
        });
    });
    launched(d, "grouped_gemm_backward_weight");
}

} /* namespace */

void fill_grouped(struct ops *t)
{
    t->grouped_gemm_forward = grouped_gemm_forward;
    t->grouped_gemm_backward_rows = grouped_gemm_backward_rows;
    t->grouped_gemm_backward_weight = grouped_gemm_backward_weight;
}
