/* Exactness and speed of the lightning indexer at the sizes it is built for; random data of 32 bf16 heads of 128,
 * top-k 2048. The operations come from libglm52-cuda.so, which the loader must find. For each size: samples of the
 * scores against double sums, the selection against the rule applied to the scores (select_topk of index_scores),
 * that rule against a sort on the host, two runs against each other; the loss against the fp32 kernels; then times.
 * --test leaves the times out, --first all sizes but the first, --loss [ROWS...] all but the loss; --once calls each
 * operation once at its first size, for a profiler, and --once-loss ROWS the loss alone. */
#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <vector>

extern "C" {
#include "base/dtype.h"
#include "ops/cuda.h"
}

#define CHECK(x)                                                                                             \
    do {                                                                                                     \
        cudaError_t e_ = (x);                                                                                \
        if (e_ != cudaSuccess) {                                                                             \
            std::printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #x, cudaGetErrorString(e_));                  \
            std::exit(1);                                                                                    \
        }                                                                                                    \
    } while (0)

namespace {

const int HEADS = 32, WIDTH = 128, K = 2048;
int failures = 0;

glm52_status say(glm52_status status, const char *message)
{
    std::printf("%s\n", message);
    return status;
}
glm52_status say_hint(const char *hint) { return say(GLM52_OK, hint); }
void account(struct host *, enum memory_class, int64_t) {}

stream open_device()
{
    static const cuda_services services = {say, say_hint, account};
    void *library = dlopen("libglm52-cuda.so", RTLD_NOW);
    stream s;

    if (!library) {
        std::printf("%s\n", dlerror());
        std::exit(1);
    }
    cuda_backend_function *enter = (cuda_backend_function *)dlsym(library, CUDA_BACKEND_SYMBOL);
    if (enter(&services)->open(&s, nullptr, 0)) std::exit(1);
    return s;
}

/* ---- data ---- */

__device__ uint32_t mixed(uint32_t x)
{
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    return x ^ x >> 16;
}

template <class T>
__global__ void fill_kernel(T *p, size_t n, float scale, uint32_t salt)
{
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        uint32_t x = (uint32_t)i * 2654435761u + (uint32_t)(i >> 32) * 97u + salt;
        float sum = 0;

        for (int j = 0; j < 4; j++) { /* four uniforms: close to normal */
            x = mixed(x + j);
            sum += (float)x * (1 / 4294967296.0f) - 0.5f;
        }
        p[i] = (T)(sum * 1.7320508f * scale);
    }
}

template <class T>
T *allocate(size_t n)
{
    T *p;

    CHECK(cudaMalloc(&p, n * sizeof(T)));
    return p;
}
template <class T>
T *random_array(size_t n, float scale, uint32_t salt)
{
    T *p = allocate<T>(n);

    fill_kernel<<<1056, 256>>>(p, n, scale, salt);
    return p;
}
template <class T>
std::vector<T> fetched(const T *p, size_t n)
{
    std::vector<T> v(n);

    CHECK(cudaMemcpy(v.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
    return v;
}
template <class T>
T *sent(const std::vector<T> &v)
{
    T *p = allocate<T>(v.size());

    CHECK(cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
    return p;
}

void expect(bool right, const char *what)
{
    std::printf("  %-58s %s\n", what, right ? "right" : "WRONG");
    failures += !right;
}

/* ---- times: A, events round one call after L2 was overwritten, median; C, back to back for 0.6 s, second half ---- */

struct times {
    double spaced, sustained; /* ms */
};

times time_both(cudaStream_t stream, void *flush, const std::function<void()> &call)
{
    cudaEvent_t a, b;
    std::vector<float> each;
    times t;
    float ms;

    CHECK(cudaEventCreate(&a));
    CHECK(cudaEventCreate(&b));
    for (int i = 0; i < 13; i++) {
        CHECK(cudaMemsetAsync(flush, i, 512 << 20, stream));
        CHECK(cudaEventRecord(a, stream));
        call();
        CHECK(cudaEventRecord(b, stream));
        CHECK(cudaEventSynchronize(b));
        CHECK(cudaEventElapsedTime(&ms, a, b));
        if (i > 2) each.push_back(ms);
    }
    std::sort(each.begin(), each.end());
    t.spaced = each[each.size() / 2];
    const int half = std::max(2, (int)(300 / t.spaced));
    for (int part = 0; part < 2; part++) {
        if (part) CHECK(cudaEventRecord(a, stream));
        for (int i = 0; i < half; i++) call();
    }
    CHECK(cudaEventRecord(b, stream));
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaEventElapsedTime(&ms, a, b));
    t.sustained = ms / half;
    return t;
}

times reference; /* TFLOP/s of cuBLAS bf16 8192^3 */

times gemm_rate(void *flush)
{
    const int n = 8192;
    const float one = 1, zero = 0;
    const double flop = 2.0 * n * n * n;
    __nv_bfloat16 *m[3];
    cublasHandle_t handle;

    for (auto &p : m) p = random_array<__nv_bfloat16>((size_t)n * n, 1, (uint32_t)(uintptr_t)&p);
    cublasCreate(&handle);
    const times t = time_both(0, flush, [&] {
        cublasGemmEx(handle, CUBLAS_OP_T, CUBLAS_OP_N, n, n, n, &one, m[0], CUDA_R_16BF, n, m[1], CUDA_R_16BF, n, &zero,
                     m[2], CUDA_R_16BF, n, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    });
    cublasDestroy(handle);
    for (auto &p : m) CHECK(cudaFree(p));
    std::printf("cuBLAS 8192^3: A %.1f TF, C %.1f TF\n", flop / t.spaced / 1e9, flop / t.sustained / 1e9);
    return {flop / t.spaced / 1e9, flop / t.sustained / 1e9};
}

void report(const char *what, const times &t, double flop)
{
    const double a = flop / t.spaced / 1e9, c = flop / t.sustained / 1e9;

    std::printf("  %-26s A %8.3f ms %7.1f TF %.3f | C %8.3f ms %7.1f TF %.3f\n", what, t.spaced, a,
                a / reference.spaced, t.sustained, c, c / reference.sustained);
    std::fflush(stdout);
}

/* ---- checks ---- */

/* The largest error of sampled scores against double sums, relative to the sum of magnitudes. */
__global__ void sample_kernel(struct indexer x, int64_t rows, const __nv_bfloat16 *q, const __nv_bfloat16 *key,
                              const float *weight, const int32_t *start, const int32_t *end, const float *scores,
                              unsigned *worst)
{
    const uint32_t a = mixed(blockIdx.x * 2 + 1), b = mixed(blockIdx.x * 2 + 2);
    const int64_t t = a % rows;
    double score = 0, size = 0;

    if (threadIdx.x || start[t] == end[t]) return;
    const int64_t u = start[t] + b % (uint32_t)(end[t] - start[t]);
    for (int h = 0; h < x.heads; h++) {
        double dot = 0;

        for (int c = 0; c < x.width; c++)
            dot += (double)__bfloat162float(q[(t * x.heads + h) * x.width + c]) *
                   __bfloat162float(key[u * x.width + c]);
        score += weight[t * x.heads + h] * fmax(dot, 0.0);
        size += fabs(weight[t * x.heads + h] * dot);
    }
    const double error = fabs(scores[t * x.keys + u] - score) / size;
    atomicMax(worst, error < 1 ? (unsigned)(error * 1e9) : 1000000000u);
}

/* Sorts some rows' scores on the host. */
bool sorted_rows_agree(const struct indexer &x, const float *scores, const std::vector<int32_t> &start,
                       const std::vector<int32_t> &end, const std::vector<int32_t> &selected)
{
    for (int64_t t = x.rows - 1; t >= 0; t -= x.rows / 7 + 1) {
        const std::vector<float> row = fetched(scores + t * x.keys, x.keys);
        std::vector<int32_t> order(end[t] - start[t]);

        std::iota(order.begin(), order.end(), start[t]);
        std::sort(order.begin(), order.end(), [&](int a, int b) { return row[a] != row[b] ? row[a] > row[b] : a < b; });
        order.resize(std::min<size_t>(order.size(), x.k));
        std::sort(order.begin(), order.end());
        order.resize(x.k, -1);
        if (!std::equal(order.begin(), order.end(), selected.begin() + t * x.k)) return false;
    }
    return true;
}

/* ---- cases ---- */

struct problem {
    struct indexer x;
    std::vector<int32_t> start, end;
};

/* Every row sees all keys, or documents of `length` are causal. */
problem problem_of(int64_t rows, int64_t keys, int64_t length)
{
    problem p = {{rows, keys, HEADS, WIDTH, K, GLM52_DTYPE_BF16, 0}, std::vector<int32_t>(rows),
                 std::vector<int32_t>(rows)};

    for (int64_t t = 0; t < rows; t++) {
        p.start[t] = length ? (int32_t)(t / length * length) : 0;
        p.end[t] = length ? (int32_t)t + 1 : (int32_t)keys;
        p.x.pairs += p.end[t] - p.start[t];
    }
    return p;
}

void selection(stream *s, cudaStream_t stream, void *flush, const char *name, const problem &p, bool timed)
{
    const struct indexer &x = p.x;
    const size_t chosen = x.rows * x.k, all = x.rows * x.keys, bytes = s->ops->index_select_bytes(s, &x);
    auto *q = random_array<__nv_bfloat16>(x.rows * HEADS * WIDTH, 1, 11),
         *key = random_array<__nv_bfloat16>(x.keys * WIDTH, 1, 12);
    float *weight = random_array<float>(x.rows * HEADS, 1 / 64.0f, 13);
    int32_t *start = sent(p.start), *end = sent(p.end), *selected = allocate<int32_t>(chosen),
            *length = allocate<int32_t>(x.rows);
    char *workspace = allocate<char>(bytes);

    std::printf("%s: workspace %.1f MB\n", name, bytes / 1e6);
    auto select = [&] { s->ops->index_select(s, &x, q, key, weight, start, end, selected, workspace); };
    CHECK(cudaMemset(workspace, 0xff, bytes));
    CHECK(cudaMemset(selected, 0x7f, chosen * 4));
    CHECK(cudaDeviceSynchronize());
    select();
    CHECK(cudaDeviceSynchronize());
    const std::vector<int32_t> first = fetched(selected, chosen);
    select();
    expect(s->ops->synchronize(s) == GLM52_OK && fetched(selected, chosen) == first, "two runs select the same");
    if (all * 4 < (size_t)40 << 30) {
        float *scores = allocate<float>(all);
        unsigned *worst = sent(std::vector<unsigned>(1));
        auto score = [&] { s->ops->index_scores(s, &x, q, key, weight, start, end, scores); };
        auto rule = [&] { s->ops->select_topk(s, x.rows, x.keys, x.k, scores, start, end, selected, length); };

        CHECK(cudaMemset(scores, 0xff, all * 4));
        CHECK(cudaDeviceSynchronize());
        score();
        CHECK(cudaDeviceSynchronize());
        sample_kernel<<<8192, 32>>>(x, x.rows, q, key, weight, start, end, scores, worst);
        const double error = fetched(worst, 1)[0] / 1e9;
        expect(error < 2e-6, "8192 scores against double sums");
        CHECK(cudaMemset(selected, 0x7f, chosen * 4));
        CHECK(cudaDeviceSynchronize());
        rule();
        expect(s->ops->synchronize(s) == GLM52_OK && fetched(selected, chosen) == first,
               "the rule on index_scores gives the same selection");
        expect(sorted_rows_agree(x, scores, p.start, p.end, first), "eight rows against a sort");
        if (timed) {
            report("index_scores", time_both(stream, flush, score), x.pairs * 2 * HEADS * WIDTH);
            report("select_topk", time_both(stream, flush, rule), 0);
        }
        CHECK(cudaFree(scores));
        CHECK(cudaFree(worst));
    }
    if (timed) report("index_select", time_both(stream, flush, select), x.pairs * 2 * HEADS * WIDTH);
    for (void *a : {(void *)q, (void *)key, (void *)weight, (void *)start, (void *)end, (void *)selected,
                    (void *)length, (void *)workspace})
        CHECK(cudaFree(a));
}

/* ---- the loss over selected keys ---- */

/* A thread a row: k distinct keys of those it sees, ascending, or all of fewer; and the probabilities of a teacher. */
__global__ void teach_kernel(struct indexer x, bool causal, int32_t *selected, float *target)
{
    const int64_t t = blockIdx.x * (int64_t)blockDim.x + threadIdx.x, seen = causal ? t + 1 : x.keys;
    uint32_t bits = (uint32_t)t * 2654435761u + 17;
    float sum = 0;
    int n = 0;

    if (t >= x.rows) return;
    for (int64_t u = 0; u < seen && n < x.k; u++) {
        bits = mixed(bits + (uint32_t)u);
        if (bits % (uint32_t)(seen - u) >= (uint32_t)(x.k - n)) continue;
        sum += target[t * x.k + n] = __expf((float)mixed(bits) * (6 / 4294967296.0f));
        selected[t * x.k + n++] = (int32_t)u;
    }
    for (int j = 0; j < n; j++) target[t * x.k + j] /= sum;
    for (int j = n; j < x.k; j++) selected[t * x.k + j] = -1, target[t * x.k + j] = 0;
}

struct lesson {
    struct indexer x;
    void *q, *key;
    float *weight, *target, *row_weight;
    int32_t *selected;
    float *kl, *dkey, *dweight;
    void *dq, *workspace;
};

template <class T>
__global__ void widen_kernel(const T *from, float *to, size_t n)
{
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
        to[i] = (float)from[i];
}
float *widened(const void *from, size_t n)
{
    float *p = allocate<float>(n);

    widen_kernel<<<1056, 256>>>((const __nv_bfloat16 *)from, p, n);
    return p;
}

lesson lesson_of(stream *s, int64_t rows, int64_t keys, bool causal)
{
    lesson l = {{rows, keys, HEADS, WIDTH, K, GLM52_DTYPE_BF16, 0}};
    for (int64_t t = 0; t < rows; t++) l.x.pairs += (double)std::min<int64_t>(causal ? t + 1 : keys, K);
    const size_t bytes = s->ops->index_kl_selected_bytes(s, &l.x);

    l.q = random_array<__nv_bfloat16>(rows * HEADS * WIDTH, 1, 21);
    l.key = random_array<__nv_bfloat16>(keys * WIDTH, 1, 22);
    l.weight = random_array<float>(rows * HEADS, 1 / 64.0f, 23);
    l.row_weight = random_array<float>(rows, 1, 24);
    l.target = allocate<float>(rows * K);
    l.selected = allocate<int32_t>(rows * K);
    l.kl = random_array<float>(rows, NAN, 0);
    l.dkey = random_array<float>(keys * WIDTH, NAN, 0);
    l.dweight = random_array<float>(rows * HEADS, NAN, 0);
    l.dq = random_array<__nv_bfloat16>(rows * HEADS * WIDTH, NAN, 0);
    l.workspace = random_array<uint8_t>(bytes, 1e9f, 0);
    teach_kernel<<<(unsigned)(rows + 63) / 64, 64>>>(l.x, causal, l.selected, l.target);
    CHECK(cudaDeviceSynchronize());
    std::printf("loss, %d rows x %d keys%s: workspace %.1f MB\n", (int)rows, (int)keys, causal ? ", causal" : "",
                bytes / 1e6);
    return l;
}

void learn(stream *s, const lesson &l)
{
    s->ops->index_kl_selected(s, &l.x, l.q, l.key, l.weight, l.selected, l.target, l.row_weight, l.kl, l.dq, l.dkey,
                              l.dweight, l.workspace);
}

void free_lesson(const lesson &l)
{
    for (void *a : {l.q, l.key, (void *)l.weight, (void *)l.target, (void *)l.row_weight, (void *)l.selected,
                    (void *)l.kl, (void *)l.dkey, (void *)l.dweight, l.dq, l.workspace})
        CHECK(cudaFree(a));
}

void expect_close(const std::vector<float> &is, const std::vector<float> &want, double tolerance, const char *what)
{
    double largest = 0, error = 0;
    char text[100];

    for (size_t i = 0; i < is.size(); i++) {
        largest = std::max(largest, (double)std::fabs(want[i]));
        error = std::fabs(is[i] - want[i]) <= error ? error : std::fabs((double)is[i] - want[i]); /* NaN stays */
    }
    std::snprintf(text, sizeof text, "%s against fp32: %.1e of the largest", what, error / largest);
    expect(error <= tolerance * largest, text);
}

/* Several chunks, against the kernels of fp32, which are others; and twice. */
void loss_is_right(stream *s, int64_t rows, int64_t keys, bool causal)
{
    lesson l = lesson_of(s, rows, keys, causal), wide = l;
    const size_t nq = l.x.rows * HEADS * WIDTH, nkey = l.x.keys * WIDTH, nweight = l.x.rows * HEADS;

    learn(s, l);
    CHECK(cudaDeviceSynchronize());
    const auto kl = fetched(l.kl, l.x.rows), dkey = fetched(l.dkey, nkey), dweight = fetched(l.dweight, nweight);
    float *dq_wide = widened(l.dq, nq);
    const auto dq = fetched(dq_wide, nq);
    learn(s, l);
    expect(s->ops->synchronize(s) == GLM52_OK && fetched(l.dkey, nkey) == dkey &&
               fetched(l.dweight, nweight) == dweight && fetched(l.kl, l.x.rows) == kl,
           "two runs give the same");
    wide.x.type = GLM52_DTYPE_F32;
    wide.q = widened(l.q, nq);
    wide.key = widened(l.key, nkey);
    wide.dq = dq_wide;
    wide.workspace = allocate<char>(s->ops->index_kl_selected_bytes(s, &wide.x));
    CHECK(cudaDeviceSynchronize());
    learn(s, wide);
    CHECK(cudaDeviceSynchronize());
    expect_close(kl, fetched(l.kl, l.x.rows), 1e-5, "kl");
    expect_close(dq, fetched(dq_wide, nq), 1 / 128.0, "dq");
    expect_close(dkey, fetched(l.dkey, nkey), 1 / 128.0, "dkey");
    expect_close(dweight, fetched(l.dweight, nweight), 1 / 128.0, "dweight");
    for (void *a : {wide.q, wide.key, wide.dq, wide.workspace}) CHECK(cudaFree(a));
    free_lesson(l);
}

void loss_times(stream *s, cudaStream_t stream, void *flush, int64_t rows, bool causal)
{
    const lesson l = lesson_of(s, rows, rows, causal);

    report("index_kl_selected", time_both(stream, flush, [&] { learn(s, l); }), l.x.pairs * 6 * HEADS * WIDTH);
    free_lesson(l);
}

} /* namespace */

int main(int count, char **arguments)
{
    const char *mode = count > 1 ? arguments[1] : "";
    const bool once = !std::strncmp(mode, "--once", 6), timed = std::strcmp(mode, "--test") && !once;
    const bool more = std::strcmp(mode, "--first") && !once, select = !std::strstr(mode, "loss");
    stream s = open_device();
    const cudaStream_t stream = *(cudaStream_t *)s.state; /* the first member of cuda_device */
    void *flush = allocate<char>(512 << 20);

    if (timed) reference = gemm_rate(flush);
    if (select) selection(&s, stream, flush, "4096 queries x 32768 keys", problem_of(4096, 32768, 0), timed);
    if (more && select) {
        selection(&s, stream, flush, "8192 causal", problem_of(8192, 8192, 8192), timed);
        selection(&s, stream, flush, "16384 in documents of 3001", problem_of(16384, 16384, 3001), timed);
        selection(&s, stream, flush, "512 queries x 131072 keys", problem_of(512, 131072, 0), timed);
        selection(&s, stream, flush, "128 queries x 1048576 keys", problem_of(128, 1048576, 0), timed);
    }
    if (more) {
        loss_is_right(&s, 1203, 32768 + 77, false);
        loss_is_right(&s, 5003, 5003, true);
        loss_is_right(&s, 2503, 12003, true);
    }
    std::vector<int> sizes;
    for (int n = 2; n < count; n++) sizes.push_back(std::atoi(arguments[n]));
    if (sizes.empty()) sizes = {4096, 8192, 16384, 32768};
    if (once) learn(&s, lesson_of(&s, sizes[0], sizes[0], false));
    CHECK(cudaDeviceSynchronize());
    if (more && timed)
        for (const bool causal : {false, true})
            for (int rows : sizes) loss_times(&s, stream, flush, rows, causal);
    if (timed) gemm_rate(flush);
    std::printf("%d wrong\n", failures);
    return failures != 0;
}
