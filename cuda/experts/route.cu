/* Sigmoid router (model.md 2.6), a warp a row: the correction bias takes part in the choice alone, the weights are the
 * chosen sigmoids, normalised and scaled. */
#include "device/sort.cuh"
#include "experts/few.cuh"

namespace {

constexpr int THREADS = 256, ROWS = THREADS / 32;

template <int WORDS>
__device__ void take_given(const int32_t *chosen, int k, int lane, unsigned (&taken)[WORDS])
{
    for (int j = 0; j < k; j++)
        if (chosen[j] % 32 == lane) taken[WORDS == 1 ? 0 : chosen[j] / 1024] |= 1u << chosen[j] / 32 % 32;
    __syncwarp(); /* all have read before any writes the same places */
}

template <int EACH>
__global__ __launch_bounds__(THREADS) void forward_kernel(const struct route r, const float *logits, const float *bias,
                                                          int32_t *chosen, float *weight)
{
    const int64_t t = blockIdx.x * (int64_t)ROWS + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    unsigned key[EACH], taken[(EACH + 31) / 32] = {};
    int before = 0;
    float sum = 0;

    if (t >= r.rows) return;
    const float *logit = logits + t * r.experts;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int e = i * 32 + lane, turn = (int)(t * r.k % r.experts);

        key[i] = e < r.experts ? choice_key(logit[e], bias[e]) : 0;
        if (r.forced && !r.given && e < r.experts && (e - turn + r.experts) % r.experts < r.k)
            taken[i / 32] |= 1u << i % 32;
    }
    if (r.given) take_given(chosen + t * r.k, r.k, lane, taken);
    else if (!r.forced) take_best(key, r.k, taken);
#pragma unroll
    for (int i = 0; i < EACH; i++)
        if (taken[i / 32] >> i % 32 & 1) sum += sigmoid(logit[i * 32 + lane]);
    sum = warp_reduce(sum, plus());
    const float factor = r.normalize ? r.scale / (sum + ROUTE_SUM_FLOOR) : r.scale;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const bool mine = taken[i / 32] >> i % 32 & 1;
        const unsigned all = __ballot_sync(~0u, mine);
        const int64_t at = t * r.k + before + __popc(all & ((1u << lane) - 1));

        before += __popc(all);
        if (!mine) continue;
        chosen[at] = i * 32 + lane;
        weight[at] = sigmoid(logit[i * 32 + lane]) * factor;
    }
}

void route_forward(struct stream *s, const struct route *r, const float *logits, const float *bias, int32_t *chosen,
                   float *weight)
{
    cuda_device *d = device_of(s);

    count_route_forward(s, r);
    if (r->rows == 0) return;
    with_each(r->experts, [&](auto each) {
        constexpr int EACH = decltype(each)::value;

        if constexpr (EACH <= few::FEW)
            few::forward<EACH>(d, r, logits, bias, chosen, weight);
        else
            forward_kernel<EACH>
                <<<(unsigned)divided(r->rows, ROWS), THREADS, 0, d->stream>>>(*r, logits, bias, chosen, weight);
    });
    launched(d, "route_forward");
}

/* With S = sum of the chosen sigmoids, weight_j = scale s_j / S; so
 *     ds_j = scale (dweight_j - sum_i dweight_i s_i / S) / S.
 * Lane j has assignments j, j + 32, ... */
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
    if (r.normalize) {
        for (int32_t j = lane; j < r.k; j += 32) {
            const float sigma = sigmoid(logit[expert[j]]);

            sum += sigma;
            mean += dw[j] * sigma;
        }
        sum = warp_reduce(sum, plus()) + ROUTE_SUM_FLOOR;
        mean = warp_reduce(mean, plus()) / sum;
        factor /= sum;
    }
    __syncwarp();
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

/* ---- capacity ---- */

struct by_expert {
    const int32_t *chosen;
    int32_t *source;

    __device__ int bin(int64_t i) const { return chosen[i]; }
    __device__ void put(int64_t i, int slot) const { source[slot] = (int32_t)i; }
};

/* A weight as a whole number of the order in which places are given away. */
__device__ __forceinline__ unsigned rank_of(float weight) { return __float_as_uint(fabsf(weight)); }

/* The assignments of an expert in order of rows, with the ranks of the first ones on chip: every pass over a list
 * reads them. */
struct ranked {
    static constexpr int HELD = 4096;
    const int32_t *list;
    int count;
    const float *weight;
    unsigned *held;

    __device__ void hold() const
    {
        for (int i = threadIdx.x; i < count && i < HELD; i += THREADS) held[i] = rank_of(weight[list[i]]);
        __syncthreads();
    }
    __device__ __forceinline__ unsigned rank(int i) const { return i < HELD ? held[i] : rank_of(weight[list[i]]); }
};

/* The rank at which `places` of the list are full, by the bytes of ranks from the highest down; *left: places for
 * those of exactly this rank. */
__device__ unsigned last_rank(const ranked &r, int places, int *left)
{
    __shared__ int bins[256], found[2];
    unsigned rank = 0;

    for (int shift = 24; shift >= 0; shift -= 8) {
        int all;

        bins[threadIdx.x] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < r.count; i += THREADS) {
            const unsigned own = r.rank(i);
            if (shift == 24 || (own ^ rank) >> (shift + 8) == 0) atomicAdd(&bins[own >> shift & 255], 1);
        }
        __syncthreads();
        const int here = bins[255 - threadIdx.x], above = block_before<THREADS>(here, &all);
        if (above < places && places <= above + here) {
            found[0] = 255 - threadIdx.x;
            found[1] = places - above;
        }
        __syncthreads();
        rank |= (unsigned)found[0] << shift;
        places = found[1];
    }
    *left = places;
    return rank;
}

/* A block an expert, its assignments in order of rows. */
__global__ __launch_bounds__(THREADS) void capacity_kernel(const int32_t *offsets, const int32_t *source,
                                                           int64_t capacity, bool by_weight, float *weight,
                                                           double *dropped)
{
    static_assert(THREADS == 256, "a thread a bin");
    __shared__ unsigned held[ranked::HELD];
    const int32_t *list = source + offsets[blockIdx.x];
    const int count = offsets[blockIdx.x + 1] - offsets[blockIdx.x];
    int left = 0, equal_before = 0;

    if (count <= capacity) return;
    if (dropped && threadIdx.x == 0) atomicAdd(dropped, (double)(count - capacity));
    if (!by_weight || capacity == 0) {
        for (int i = (int)capacity + threadIdx.x; i < count; i += THREADS) weight[list[i]] = 0;
        return;
    }
    const ranked r = {list, count, weight, held};
    r.hold();
    const unsigned last = last_rank(r, (int)capacity, &left);
    for (int first = 0; first < count; first += THREADS) {
        const int i = first + threadIdx.x;
        const unsigned own = i < count ? r.rank(i) : ~0u;
        int all;
        const int before = equal_before + block_before<THREADS>(own == last, &all);

        if (own < last || (own == last && before >= left)) weight[list[i]] = 0;
        equal_before += all;
    }
}

void limit_capacity(struct stream *s, const struct route *r, int64_t capacity, int32_t by_weight, const int32_t *chosen,
                    float *weight, double *dropped)
{
    cuda_device *d = device_of(s);
    const int64_t count = r->rows * r->k;
    size_t used = 0;

    count_limit_capacity(s, r);
    if (r->rows == 0) return;
    int32_t *counts = carve<int32_t>(d->scratch, &used, (int64_t)(sort_bytes(count, r->experts) / sizeof(int32_t)));
    int32_t *offsets = carve<int32_t>(d->scratch, &used, r->experts + 1),
            *source = carve<int32_t>(d->scratch, &used, count);
    if (used > SCRATCH_BYTES) {
        record_error(d, cudaErrorInvalidValue, "limit_capacity: more assignments than the scratch has room for");
        return;
    }
    counting_sort(d, count, r->experts, by_expert{chosen, source}, counts, offsets);
    capacity_kernel<<<(unsigned)r->experts, THREADS, 0, d->stream>>>(offsets, source, capacity, by_weight != 0, weight,
                                                                     dropped);
    launched(d, "limit_capacity");
}

__global__ void bias_kernel(int32_t experts, float rate, const float *coefficient, const double *counts, float *bias)
{
    double mean = 0;

    if (coefficient && *coefficient < 0) return;
    for (int32_t e = threadIdx.x; e < experts; e += THREADS) mean += counts[e];
    mean = block_sum<THREADS>(mean) / experts;
    for (int32_t e = threadIdx.x; e < experts; e += THREADS)
        bias[e] += rate * (float)((mean > counts[e]) - (mean < counts[e]));
}

void balance_bias(struct stream *s, int32_t experts, float rate, const float *coefficient, const double *counts,
                  float *bias)
{
    cuda_device *d = device_of(s);

    count_balance_bias(s, experts);
    bias_kernel<<<1, THREADS, 0, d->stream>>>(experts, rate, coefficient, counts, bias);
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
