/* Auxiliary losses of the router (training.md 5), in the device's scratch: first what each row has for itself, then
 * the sums per sequence and expert, over parts of the rows in order, then the gradient of each row. */
#include "experts/route.cuh"

namespace {

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int PARTS = 256; /* of all sequences: a block sums the rows of one, in order */

/* Of a row: 1 / sum of sigmoids, logsumexp and the sum of exponentials under it. */
struct row_state {
    double inverse, z;
    float largest, total;
};

struct arguments {
    struct route_auxiliary a;
    const float *logits;
    const int32_t *sequence;
    float *dlogits;
    double *loss, *running;
    row_state *row;            /* [rows] */
    unsigned *chosen;          /* [rows, experts / 32]: a bit an expert */
    double *share, *count;     /* [sequences at a time, experts] */
    double *share_of_part;     /* [sequences at a time, parts, experts] */
    int32_t *count_of_part;
    double *part;              /* [sequences at a time]: their losses */
    int32_t first, end, parts; /* sequences of this round; parts of each */
};

template <int EACH>
__global__ __launch_bounds__(THREADS) void rows_kernel(const arguments x)
{
    const int64_t t = blockIdx.x * (int64_t)WARPS + threadIdx.x / 32;
    const int lane = threadIdx.x % 32, experts = x.a.experts, words = (experts + 31) / 32;

    if (t >= x.a.rows) return;
    const float *logit = x.logits + t * experts;
    unsigned key[EACH], taken[(EACH + 31) / 32] = {};
    double sum = 0, total = 0;
    float most = -INFINITY;

#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int e = i * 32 + lane;

        key[i] = 0;
        if (e >= experts) continue;
        key[i] = choice_key(logit[e], 0);
        sum += (double)sigmoid(logit[e]);
        most = fmaxf(most, logit[e]);
    }
    if (x.a.coefficient != 0) take_best(key, x.a.k, taken);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const unsigned word = __ballot_sync(~0u, taken[i / 32] >> i % 32 & 1);
        if (lane == 0 && i < words) x.chosen[t * words + i] = word;
    }
    sum = warp_reduce(sum, plus());
    most = warp_reduce(most, larger());
    for (int e = lane; e < experts; e += 32) total += (double)expf(logit[e] - most);
    total = warp_reduce(total, plus());
    if (lane == 0) x.row[t] = {1 / (sum + (double)ROUTE_SUM_FLOOR), log(total) + (double)most, most, (float)total};
}

/* A thread an expert of one part of a sequence: blockIdx.y the sequence, blockIdx.z the part. */
__global__ __launch_bounds__(THREADS) void parts_kernel(const arguments x)
{
    const int32_t n = x.first + blockIdx.y, e = blockIdx.x * THREADS + threadIdx.x, words = (x.a.experts + 31) / 32;
    const int64_t begin = x.sequence[n], rows = max(x.sequence[n + 1] - x.sequence[n], 0);
    const int64_t first = begin + rows * blockIdx.z / x.parts, end = begin + rows * (blockIdx.z + 1) / x.parts;
    double share = 0;
    int32_t count = 0;

    if (e >= x.a.experts) return;
#pragma unroll 4
    for (int64_t t = first; t < end; t++) {
        share += (double)sigmoid(x.logits[t * x.a.experts + e]) * x.row[t].inverse;
        count += x.chosen[t * words + e / 32] >> e % 32 & 1;
    }
    const int64_t at = ((int64_t)blockIdx.y * x.parts + blockIdx.z) * x.a.experts + e;
    x.share_of_part[at] = share;
    x.count_of_part[at] = count;
}

/* The parts of a sequence, blockIdx.y; a warp has 32 experts' columns, and each warp a share of the parts. */
__global__ __launch_bounds__(THREADS) void sums_kernel(const arguments x)
{
    __shared__ double shares[WARPS][32];
    __shared__ int32_t counts[WARPS][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, e = blockIdx.x * 32 + lane;
    double share = 0;
    int32_t count = 0;

    if (e < x.a.experts) {
#pragma unroll 8
        for (int p = warp; p < x.parts; p += WARPS) {
            const int64_t at = ((int64_t)blockIdx.y * x.parts + p) * x.a.experts + e;

            share += x.share_of_part[at];
            count += x.count_of_part[at];
        }
    }
    shares[warp][lane] = share;
    counts[warp][lane] = count;
    __syncthreads();
    if (warp != 0 || e >= x.a.experts) return;
#pragma unroll
    for (int w = 1; w < WARPS; w++) {
        share += shares[w][lane];
        count += counts[w][lane];
    }
    x.share[(int64_t)blockIdx.y * x.a.experts + e] = share;
    x.count[(int64_t)blockIdx.y * x.a.experts + e] = count;
}

/* Counts and rows of earlier calls join those of this one's only sequence, and take their place. */
__global__ void running_kernel(const arguments x)
{
    const int e = blockIdx.x * THREADS + threadIdx.x;

    if (e < x.a.experts) x.count[e] = x.running[e] += x.count[e];
    if (e == x.a.experts) x.running[e] += (double)(x.sequence[1] - x.sequence[0]);
}

/* What the losses of a sequence are divided by: the sequences that have rows, and the rows of them all. */
struct scales {
    double balance, z;
};

__device__ scales scales_of(const arguments &x, int32_t n)
{
    const double rows = x.sequence[n + 1] - x.sequence[n], all_rows = x.running ? x.running[x.a.experts] : rows;
    int filled = 0;

    for (int32_t i = threadIdx.x; i < x.a.sequences; i += THREADS) filled += x.sequence[i + 1] > x.sequence[i];
    filled = block_sum<THREADS>(filled);
    return {(double)x.a.coefficient * x.a.experts / (x.a.k * rows * all_rows * filled),
            (double)x.a.z_coefficient / (x.sequence[x.a.sequences] - x.sequence[0])};
}

/* A block a sequence: its loss. */
__global__ void losses_kernel(const arguments x)
{
    const int32_t n = x.first + blockIdx.x;
    const double *share = x.share + (int64_t)blockIdx.x * x.a.experts,
                 *count = x.count + (int64_t)blockIdx.x * x.a.experts;
    const scales scale = scales_of(x, n);
    double balance = 0, squares = 0;

    for (int e = threadIdx.x; e < x.a.experts; e += THREADS) balance += count[e] * share[e];
    for (int64_t t = x.sequence[n] + threadIdx.x; t < x.sequence[n + 1]; t += THREADS)
        squares += x.row[t].z * x.row[t].z;
    balance = block_sum<THREADS>(balance);
    squares = block_sum<THREADS>(squares);
    if (threadIdx.x != 0) return;
    if (x.sequence[n + 1] <= x.sequence[n])
        x.part[blockIdx.x] = 0;
    else
        x.part[blockIdx.x] = (x.a.coefficient == 0 ? 0 : scale.balance * balance) +
                             (x.a.z_coefficient == 0 ? 0 : scale.z * squares);
}

/* With S = sum s and balance = factor * sum_e count_e sum_t s'[t,e]: ds_e = factor
 * (count_e - sum_i count_i s_i / S) / S. */
__device__ void add_row_gradient(const arguments &x, int64_t t, const double *count, scales scale)
{
    const int lane = threadIdx.x % 32;
    const float *logit = x.logits + t * x.a.experts;
    float *dlogit = x.dlogits + t * x.a.experts;
    const row_state row = x.row[t];

    if (x.a.coefficient != 0) {
        double mean = 0;

        for (int e = lane; e < x.a.experts; e += 32) mean += count[e] * (double)sigmoid(logit[e]);
        mean = warp_reduce(mean, plus()) * row.inverse;
        for (int e = lane; e < x.a.experts; e += 32)
            dlogit[e] += (float)(scale.balance * row.inverse * (count[e] - mean)) * sigmoid_slope(logit[e]);
    }
    if (x.a.z_coefficient != 0) {
        const float factor = (float)(scale.z * 2 * row.z / (double)row.total);

        for (int e = lane; e < x.a.experts; e += 32) dlogit[e] += factor * expf(logit[e] - row.largest);
    }
}

/* blockIdx.y: the sequence; its rows are dealt to the warps of all blocks. */
__global__ void gradients_kernel(const arguments x)
{
    const int32_t n = x.first + blockIdx.y;
    const scales scale = scales_of(x, n);

    for (int64_t t = x.sequence[n] + blockIdx.x * WARPS + threadIdx.x / 32; t < x.sequence[n + 1];
         t += gridDim.x * WARPS)
        add_row_gradient(x, t, x.count + (int64_t)blockIdx.y * x.a.experts, scale);
}

__global__ void add_losses_kernel(int32_t count, const double *part, double *loss)
{
    double sum = 0;

    for (int32_t i = threadIdx.x; i < count; i += THREADS) sum += part[i];
    sum = block_sum<THREADS>(sum);
    if (threadIdx.x == 0) *loss += sum;
}

void run_round(cuda_device *d, const arguments &x)
{
    const unsigned sequences = (unsigned)(x.end - x.first);
    const unsigned experts = (unsigned)divided(x.a.experts, THREADS), warps = (unsigned)divided(x.a.experts, 32);
    const unsigned per_sequence = (unsigned)std::max<int64_t>(1, std::min<int64_t>(
        divided(x.a.rows, WARPS), d->multiprocessors * 8 / sequences));

    parts_kernel<<<dim3(experts, sequences, (unsigned)x.parts), THREADS, 0, d->stream>>>(x);
    sums_kernel<<<dim3(warps, sequences), THREADS, 0, d->stream>>>(x);
    if (x.running) running_kernel<<<(unsigned)divided(x.a.experts + 1, THREADS), THREADS, 0, d->stream>>>(x);
    losses_kernel<<<sequences, THREADS, 0, d->stream>>>(x);
    gradients_kernel<<<dim3(per_sequence, sequences), THREADS, 0, d->stream>>>(x);
    add_losses_kernel<<<1, THREADS, 0, d->stream>>>((int32_t)sequences, x.part, x.loss);
}

} /* namespace */

void route_auxiliary_losses(struct stream *s, const struct route_auxiliary *a, const float *logits,
                            const int32_t *sequence, float *dlogits, double *loss, double *running)
{
    constexpr int64_t MOST = 32768; /* sequences at a time: a grid's second dimension ends at 65535 */
    cuda_device *d = device_of(s);
    arguments x = {*a, logits, sequence, dlogits, loss, running};
    size_t used = 0, each;
    int64_t fit;

    count_route_auxiliary(s, a);
    if (a->rows == 0 || a->sequences == 0) return;
    x.parts = (int32_t)std::max<int64_t>(1, std::min<int64_t>(PARTS / a->sequences, divided(a->rows, WARPS)));
    x.row = carve<row_state>(d->scratch, &used, a->rows);
    x.chosen = carve<unsigned>(d->scratch, &used, a->rows * divided(a->experts, 32));
    each = (size_t)a->experts * (2 * sizeof(double) + (size_t)x.parts * (sizeof(double) + sizeof(int32_t))) +
           sizeof(double);
    fit = used + 4096 > SCRATCH_BYTES ? 0 : (int64_t)((SCRATCH_BYTES - used - 4096) / each);
    fit = std::min(std::min<int64_t>(fit, MOST), (int64_t)a->sequences);
    if (fit == 0) {
        record_error(d, cudaErrorInvalidValue, "route_auxiliary: more rows than the scratch has room for");
        return;
    }
    x.share = carve<double>(d->scratch, &used, fit * a->experts);
    x.count = carve<double>(d->scratch, &used, fit * a->experts);
    x.share_of_part = carve<double>(d->scratch, &used, fit * x.parts * a->experts);
    x.count_of_part = carve<int32_t>(d->scratch, &used, fit * x.parts * a->experts);
    x.part = carve<double>(d->scratch, &used, fit);
    with_each(a->experts, [&](auto most) {
        rows_kernel<decltype(most)::value><<<(unsigned)divided(a->rows, WARPS), THREADS, 0, d->stream>>>(x);
    });
    for (x.first = 0; x.first < a->sequences; x.first = x.end) {
        x.end = (int32_t)std::min<int64_t>(x.first + fit, a->sequences);
        run_round(d, x);
    }
    launched(d, "route_auxiliary");
}
