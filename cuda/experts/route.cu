/* Sigmoid router (model.md 2.6), a warp a row: the correction bias takes part in the choice alone, the weights are the chosen
 * sigmoids, normalised and scaled. */
#include "experts/route.cuh"

namespace {

constexpr int THREADS = 256, ROWS = THREADS / 32;

__device__ void sort_ascending(int32_t *value, int n)
{
    for (int i = 1; i < n; i++) {
        const int32_t x = value[i];
        int j = i;

        for (; j > 0 && value[j - 1] > x; j--) value[j] = value[j - 1];
        value[j] = x;
    }
}

__global__ void forward_kernel(const struct route r, const float *logits, const float *bias, int32_t *chosen, float *weight)
{
    const int64_t t = blockIdx.x * (int64_t)ROWS + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;

    if (t >= r.rows) return;
    const float *logit = logits + t * r.experts;
    int32_t *expert = chosen + t * r.k;
    float *w = weight + t * r.k, sum = 0;
    candidate best = {INFINITY, -1};

    for (int32_t j = 0; j < r.k; j++) {
        if (!r.forced) best = next_best(logit, bias, r.experts, best);
        if (lane == 0) expert[j] = r.forced ? (int32_t)((t * r.k + j) % r.experts) : best.expert;
    }
    if (lane != 0) return;
    sort_ascending(expert, r.k);
    for (int32_t j = 0; j < r.k; j++) sum += w[j] = sigmoid(logit[expert[j]]);
    for (int32_t j = 0; j < r.k; j++) w[j] *= r.normalize ? r.scale / (sum + ROUTE_SUM_FLOOR) : r.scale;
}

void route_forward(struct stream *s, const struct route *r, const float *logits, const float *bias, int32_t *chosen,
                   float *weight)
{
    cuda_device *d = device_of(s);

    count_route_forward(s, r);
    if (r->rows == 0) return;
    forward_kernel<<<(unsigned)divided(r->rows, ROWS), THREADS, 0, d->stream>>>(*r, logits, bias, chosen, weight);
    launched(d, "route_forward");
}

/* With S = sum of the chosen sigmoids, weight_j = scale s_j / S; so
 *     ds_j = scale (dweight_j - sum_i dweight_i s_i / S) / S. */
__global__ void backward_kernel(const struct route r, const float *logits, const int32_t *chosen, const float *dweight,
                                float *dlogits)
{
    const int64_t t = blockIdx.x * (int64_t)ROWS + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;

    if (t >= r.rows) return;
    const float *logit = logits + t * r.experts, *dw = dweight + t * r.k;
    const int32_t *expert = chosen + t * r.k;
    float *dlogit = dlogits + t * r.experts, sum = 0, mean = 0, factor = r.scale;

    for (int32_t e = lane; e < r.experts; e += 32) dlogit[e] = 0;
    __syncwarp();
    if (r.normalize) {
        for (int32_t j = 0; j < r.k; j++) {
            const float sigma = sigmoid(logit[expert[j]]);

            sum += sigma;
            mean += dw[j] * sigma;
        }
        mean /= sum + ROUTE_SUM_FLOOR;
        factor /= sum + ROUTE_SUM_FLOOR;
    }
    for (int32_t j = lane; j < r.k; j += 32)
        dlogit[expert[j]] = factor * (dw[j] - mean) * sigmoid_slope(logit[expert[j]]);
}

void route_backward(struct stream *s, const struct route *r, const float *logits, const int32_t *chosen,
                    const float *dweight, float *dlogits)
{
    cuda_device *d = device_of(s);

    count_route_backward(s, r);
    if (r->rows == 0) return;
    backward_kernel<<<(unsigned)divided(r->rows, ROWS), THREADS, 0, d->stream>>>(*r, logits, chosen, dweight, dlogits);
    launched(d, "route_backward");
}

/* ---- counts and the correction bias ---- */

/* Whole numbers are exact in fp64 in any order of addition. */
__global__ void count_kernel(const struct route r, const int32_t *chosen, const float *counted, double *counts)
{
    extern __shared__ int bins[];

    for (int e = threadIdx.x; e < r.experts; e += THREADS) bins[e] = 0;
    __syncthreads();
    for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < r.rows * r.k; i += (int64_t)gridDim.x * THREADS)
        if (!counted || counted[i / r.k] != 0) atomicAdd(&bins[chosen[i]], 1);
    __syncthreads();
    for (int e = threadIdx.x; e < r.experts; e += THREADS)
        if (bins[e]) atomicAdd(&counts[e], (double)bins[e]);
}

void count_experts_of_rows(struct stream *s, const struct route *r, const int32_t *chosen, const float *counted,
                           double *counts)
{
    cuda_device *d = device_of(s);
    const unsigned blocks = (unsigned)std::min<int64_t>(divided(r->rows * r->k, THREADS), d->multiprocessors);

    count_count_experts(s, r, counted != nullptr);
    if (r->rows == 0) return;
    count_kernel<<<blocks, THREADS, (size_t)r->experts * sizeof(int), d->stream>>>(*r, chosen, counted, counts);
    launched(d, "count_experts");
}

/* Whether assignment j of an expert comes before assignment i when places are given away. */
__device__ bool comes_before(const float *weight, int64_t j, int64_t i, bool by_weight)
{
    const float other = fabsf(weight[j]), own = fabsf(weight[i]);

    return by_weight ? other > own || (other == own && j < i) : j < i;
}

/* A block an expert. Weights without a place are marked by their sign first: those behind must still see how large they
 * were. */
__global__ __launch_bounds__(THREADS) void capacity_kernel(const struct route r, int64_t capacity, bool by_weight,
                                                           const int32_t *chosen, float *weight, double *dropped)
{
    __shared__ unsigned mask[ROWS];
    const int32_t expert = blockIdx.x;
    const int64_t count = r.rows * r.k;
    int all = 0, lost = 0;

    for (int64_t i = threadIdx.x; i < count; i += THREADS) all += chosen[i] == expert;
    if (block_sum<THREADS>(all) <= capacity) return;
    for (int64_t first = 0; first < count; first += THREADS) {
        const int64_t mine = first + threadIdx.x;
        const unsigned here = __ballot_sync(~0u, mine < count && chosen[mine] == expert);

        __syncthreads();
        if (threadIdx.x % 32 == 0) mask[threadIdx.x / 32] = here;
        __syncthreads();
        for (int w = 0; w < ROWS; w++)
            for (unsigned left = mask[w]; left; left &= left - 1) {
                const int64_t i = first + w * 32 + __ffs(left) - 1;
                int before = 0;

                for (int64_t j = threadIdx.x; j < count; j += THREADS)
                    before += chosen[j] == expert && comes_before(weight, j, i, by_weight);
                if (block_sum<THREADS>(before) < capacity) continue;
                if (threadIdx.x == 0) weight[i] = -weight[i];
                lost++;
            }
    }
    __syncthreads();
    for (int64_t i = threadIdx.x; i < count; i += THREADS)
        if (chosen[i] == expert && signbit(weight[i])) weight[i] = 0;
    if (dropped && threadIdx.x == 0) atomicAdd(dropped, (double)lost);
}

void limit_capacity(struct stream *s, const struct route *r, int64_t capacity, int32_t by_weight, const int32_t *chosen,
                    float *weight, double *dropped)
{
    cuda_device *d = device_of(s);

    count_limit_capacity(s, r);
    if (r->rows == 0) return;
    capacity_kernel<<<(unsigned)r->experts, THREADS, 0, d->stream>>>(*r, capacity, by_weight != 0, chosen, weight, dropped);
    launched(d, "limit_capacity");
}

__global__ void bias_kernel(int32_t experts, float rate, const double *counts, float *bias)
{
    double mean = 0;

    for (int32_t e = threadIdx.x; e < experts; e += THREADS) mean += counts[e];
    mean = block_sum<THREADS>(mean) / experts;
    for (int32_t e = threadIdx.x; e < experts; e += THREADS)
        bias[e] += rate * (float)((mean > counts[e]) - (mean < counts[e]));
}

void balance_bias(struct stream *s, int32_t experts, float rate, const double *counts, float *bias)
{
    cuda_device *d = device_of(s);

    count_balance_bias(s, experts);
    bias_kernel<<<1, THREADS, 0, d->stream>>>(experts, rate, counts, bias);
    launched(d, "balance_bias");
}

} /* namespace */

void fill_route(struct ops *t)
{
    t->route_forward = route_forward;
    t->route_backward = route_backward;
    t->route_auxiliary = route_auxiliary_losses;
    t->count_experts = count_experts_of_rows;
    t->limit_capacity = limit_capacity;
    t->balance_bias = balance_bias;
}
