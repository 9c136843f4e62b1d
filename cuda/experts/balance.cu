/* Auxiliary losses of the router (training.md 5), in the device's scratch: first what each row has for itself, then the sums
 * per sequence and expert, each by one warp that meets its rows in order, then the gradient of each row. */
#include "experts/route.cuh"

namespace {

constexpr int THREADS = 256, WARPS = THREADS / 32;

/* Of a row: 1 / sum of sigmoids, logsumexp and the sum of exponentials under it, and the last of its k best. */
struct row_state {
    double inverse, z;
    float largest, total;
    candidate last;
};

struct arguments {
    struct route_auxiliary a;
    const float *logits;
    const int32_t *sequence;
    float *dlogits;
    double *loss, *running;
    row_state *row;         /* [rows] */
    double *share, *count;  /* [sequences at a time, experts] */
    double *part;           /* [sequences at a time]: their losses */
    int32_t first, end;     /* sequences of this round */
};

__global__ void rows_kernel(const arguments x)
{
    const int64_t t = blockIdx.x * (int64_t)WARPS + threadIdx.x / 32;
    const int lane = threadIdx.x % 32, experts = x.a.experts;

    if (t >= x.a.rows) return;
    const float *logit = x.logits + t * experts;
    candidate best = {INFINITY, -1};
    double sum = 0, total = 0;
    float most = -INFINITY;

    for (int32_t j = 0; x.a.coefficient != 0 && j < x.a.k; j++) best = next_best(logit, nullptr, experts, best);
    for (int e = lane; e < experts; e += 32) {
        sum += (double)sigmoid(logit[e]);
        most = fmaxf(most, logit[e]);
    }
    sum = warp_reduce(sum, plus());
    most = warp_reduce(most, larger());
    for (int e = lane; e < experts; e += 32) total += (double)expf(logit[e] - most);
    total = warp_reduce(total, plus());
    if (lane == 0) x.row[t] = {1 / (sum + (double)ROUTE_SUM_FLOOR), log(total) + (double)most, most, (float)total, best};
}

/* A warp takes 32 experts of one sequence. */
__global__ void sums_kernel(const arguments x)
{
    const int32_t n = x.first + blockIdx.y, e = (blockIdx.x * WARPS + threadIdx.x / 32) * 32 + threadIdx.x % 32;
    double share = 0, count = 0;

    if (e >= x.a.experts) return;
    for (int64_t t = x.sequence[n]; t < x.sequence[n + 1]; t++) {
        const candidate mine = {choice_score(x.logits + t * x.a.experts, nullptr, e), e};

        share += (double)sigmoid(x.logits[t * x.a.experts + e]) * x.row[t].inverse;
        count += !better(x.row[t].last, mine);
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
    const double *share = x.share + (int64_t)blockIdx.x * x.a.experts, *count = x.count + (int64_t)blockIdx.x * x.a.experts;
    const scales scale = scales_of(x, n);
    double balance = 0, squares = 0;

    for (int e = threadIdx.x; e < x.a.experts; e += THREADS) balance += count[e] * share[e];
    for (int64_t t = x.sequence[n] + threadIdx.x; t < x.sequence[n + 1]; t += THREADS) squares += x.row[t].z * x.row[t].z;
    balance = block_sum<THREADS>(balance);
    squares = block_sum<THREADS>(squares);
    if (threadIdx.x != 0) return;
    if (x.sequence[n + 1] <= x.sequence[n])
        x.part[blockIdx.x] = 0;
    else
        x.part[blockIdx.x] = (x.a.coefficient == 0 ? 0 : scale.balance * balance) +
                             (x.a.z_coefficient == 0 ? 0 : scale.z * squares);
}

/* With S = sum s and balance = factor * sum_e count_e sum_t s'[t,e]: ds_e = factor (count_e - sum_i count_i s_i / S) / S. */
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

    for (int64_t t = x.sequence[n] + blockIdx.x * WARPS + threadIdx.x / 32; t < x.sequence[n + 1]; t += gridDim.x * WARPS)
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
    const unsigned experts = (unsigned)divided(x.a.experts, THREADS);
    const unsigned per_sequence = (unsigned)std::max<int64_t>(1, std::min<int64_t>(
        divided(x.a.rows, WARPS), d->multiprocessors * 8 / sequences));

    sums_kernel<<<dim3(experts, sequences), THREADS, 0, d->stream>>>(x);
    if (x.running) running_kernel<<<(unsigned)divided(x.a.experts + 1, THREADS), THREADS, 0, d->stream>>>(x);
    losses_kernel<<<sequences, THREADS, 0, d->stream>>>(x);
    gradients_kernel<<<dim3(per_sequence, sequences), THREADS, 0, d->stream>>>(x);
    add_losses_kernel<<<1, THREADS, 0, d->stream>>>((int32_t)sequences, x.part, x.loss);
}

} /* namespace */

void route_auxiliary_losses(struct stream *s, const struct route_auxiliary *a, const float *logits, const int32_t *sequence,
                            float *dlogits, double *loss, double *running)
{
    constexpr int64_t MOST = 32768; /* sequences at a time: a grid's second dimension ends at 65535 */
    cuda_device *d = device_of(s);
    arguments x = {*a, logits, sequence, dlogits, loss, running};
    size_t used = 0;
    int64_t fit;

    count_route_auxiliary(s, a);
    if (a->rows == 0 || a->sequences == 0) return;
    x.row = carve<row_state>(d->scratch, &used, a->rows);
    fit = used + 4096 > SCRATCH_BYTES ? 0 : (int64_t)((SCRATCH_BYTES - used - 4096) / ((2 * a->experts + 1) * sizeof(double)));
    fit = std::min(std::min<int64_t>(fit, MOST), (int64_t)a->sequences);
    if (fit == 0) {
        record_error(d, cudaErrorInvalidValue, "route_auxiliary: more rows than the scratch has room for");
        return;
    }
    x.share = carve<double>(d->scratch, &used, fit * a->experts);
    x.count = carve<double>(d->scratch, &used, fit * a->experts);
    x.part = carve<double>(d->scratch, &used, fit);
    rows_kernel<<<(unsigned)divided(a->rows, WARPS), THREADS, 0, d->stream>>>(x);
    for (x.first = 0; x.first < a->sequences; x.first = x.end) {
        x.end = (int32_t)std::min<int64_t>(x.first + fit, a->sequences);
        run_round(d, x);
    }
    launched(d, "route_auxiliary");
}
