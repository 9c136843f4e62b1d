/* Parity and speed of the CUDA sparse MLA. Without arguments: every case against a plain double
 * loop on the CPU, with poisoned outputs and guard bytes. --bench: time, TFLOP/s and share of the
 * dense bf16 GEMM rate of the same run; mode A (each call after an overwrite of L2, median) and
 * mode C (back to back for 0.8 s, second half). */
#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "../../cuda/sparse_mla/sparse_mla.h"

#define CHECK(x)                                                                                   \
    do {                                                                                           \
        cudaError_t e_ = (x);                                                                      \
        if (e_ != cudaSuccess) {                                                                   \
            std::printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #x, cudaGetErrorString(e_));        \
            std::exit(1);                                                                          \
        }                                                                                          \
    } while (0)

typedef __nv_bfloat16 bf16;

static uint64_t seed = 88172645463325252ull;
static uint32_t random_bits()
{
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return (uint32_t)(seed >> 32);
}
static double uniform() { return random_bits() / 4294967296.0; }
static float normal()
{
    return (float)(std::sqrt(-2 * std::log(uniform() + 1e-12)) *
                   std::cos(6.283185307179586 * uniform()));
}

/* ---- device buffers with guards -------------------------------------------------------------- */

static const size_t GUARD = 256;

struct buffer {
    uint8_t *all = nullptr;
    size_t bytes = 0;

    explicit buffer(size_t n) : bytes(n)
    {
        CHECK(cudaMalloc(&all, n + 2 * GUARD));
        CHECK(cudaMemset(all, 0xab, n + 2 * GUARD));
        CHECK(cudaMemset(all + GUARD, 0xff, n)); /* NaN in fp32 and bf16 */
    }
    ~buffer() { cudaFree(all); }
    buffer(const buffer &) = delete;
    void *data() { return all + GUARD; }
    bool guards_whole()
    {
        std::vector<uint8_t> v(bytes + 2 * GUARD);
        CHECK(cudaMemcpy(v.data(), all, v.size(), cudaMemcpyDeviceToHost));
        for (size_t i = 0; i < GUARD; i++)
            if (v[i] != 0xab || v[GUARD + bytes + i] != 0xab)
                return false;
        return true;
    }
    std::vector<uint8_t> copy()
    {
        std::vector<uint8_t> v(bytes);
        CHECK(cudaMemcpy(v.data(), data(), bytes, cudaMemcpyDeviceToHost));
        return v;
    }
};

static void upload(buffer &b, const std::vector<float> &v, int dtype)
{
    if (dtype == SPARSE_MLA_F32) {
        CHECK(cudaMemcpy(b.data(), v.data(), v.size() * 4, cudaMemcpyHostToDevice));
    } else {
        std::vector<bf16> h(v.size());
        for (size_t i = 0; i < v.size(); i++)
            h[i] = __float2bfloat16(v[i]);
        CHECK(cudaMemcpy(b.data(), h.data(), h.size() * 2, cudaMemcpyHostToDevice));
    }
}
static std::vector<float> download(buffer &b, int dtype)
{
    const std::vector<uint8_t> raw = b.copy();
    std::vector<float> v(raw.size() / (dtype == SPARSE_MLA_F32 ? 4 : 2));
    for (size_t i = 0; i < v.size(); i++)
        v[i] = dtype == SPARSE_MLA_F32 ? ((const float *)raw.data())[i]
                                       : __bfloat162float(((const bf16 *)raw.data())[i]);
    return v;
}

/* ---- reference ------------------------------------------------------------------------------- */

struct problem {
    sparse_mla shape;
    std::vector<float> q, kv, dout;
    std::vector<int32_t> selected;
};

struct result {
    std::vector<double> out, lse, dq, dkv, target;
};

static void reference_row(const problem &p, int64_t row, result &r, std::vector<double> &dkv)
{
    const sparse_mla &s = p.shape;
    const int width = s.kv_rank + s.rope;
    const int32_t *selected = &p.selected[row * s.k];
    int count = 0;
    while (count < s.k && selected[count] >= 0)
        count++;
    for (int h = 0; h < s.heads; h++) {
        const int64_t rh = row * s.heads + h;
        const float *q = &p.q[rh * width], *dout = &p.dout[rh * s.kv_rank];
        std::vector<double> e(count);
        double top = -INFINITY, sum = 0, delta = 0;

        for (int j = 0; j < count; j++) {
            double dot = 0;
            for (int c = 0; c < width; c++)
                dot += (double)q[c] * p.kv[(int64_t)selected[j] * width + c];
            e[j] = dot * s.scale;
            top = std::max(top, e[j]);
        }
        for (int j = 0; j < count; j++)
            sum += e[j] = std::exp(e[j] - top);
        r.lse[rh] = count ? top + std::log(sum) : INFINITY;
        for (int j = 0; j < count; j++) {
            e[j] /= sum;
            r.target[row * s.k + j] += e[j] / s.heads;
            for (int c = 0; c < s.kv_rank; c++)
                r.out[rh * s.kv_rank + c] += e[j] * p.kv[(int64_t)selected[j] * width + c];
        }
        for (int c = 0; c < s.kv_rank; c++)
            delta += r.out[rh * s.kv_rank + c] * dout[c];
        for (int j = 0; j < count; j++) {
            const int64_t key = selected[j];
            double dp = 0;
            for (int c = 0; c < s.kv_rank; c++)
                dp += (double)dout[c] * p.kv[key * width + c];
            const double ds = e[j] * (dp - delta) * s.scale;
            for (int c = 0; c < width; c++) {
                r.dq[rh * width + c] += ds * p.kv[key * width + c];
                dkv[key * width + c] += ds * q[c] + (c < s.kv_rank ? e[j] * dout[c] : 0);
            }
        }
    }
}

static result reference(const problem &p)
{
    const sparse_mla &s = p.shape;
    const int width = s.kv_rank + s.rope,
              threads = std::max(1u, std::thread::hardware_concurrency());
    result r;
    std::vector<std::vector<double>> dkv(threads);
    std::vector<std::thread> pool;

    r.out.assign(s.rows * s.heads * s.kv_rank, 0);
    r.lse.assign(s.rows * s.heads, 0);
    r.dq.assign(s.rows * s.heads * width, 0);
    r.dkv.assign(s.keys * width, 0);
    r.target.assign(s.rows * s.k, 0);
    for (int t = 0; t < threads; t++)
        pool.emplace_back([&, t] {
            dkv[t].assign(s.keys * width, 0);
            for (int64_t row = t; row < s.rows; row += threads)
                reference_row(p, row, r, dkv[t]);
        });
    for (auto &t : pool)
        t.join();
    for (auto &d : dkv)
        for (size_t i = 0; i < d.size(); i++)
            r.dkv[i] += d[i];
    return r;
}

/* ---- cases ----------------------------------------------------------------------------------- */

struct test_case {
    const char *name;
    int rows, keys, heads, rank, rope, k, dtype;
    int min_count, max_count; /* keys of a row, drawn uniformly */
    float spread;             /* standard deviation of q: larger is a sharper softmax */
    bool deterministic;
};

static problem make(const test_case &c)
{
    problem p;
    const int width = c.rank + c.rope;

    p.shape = {c.rows,          c.keys, c.heads, c.rank, c.rope, c.k, 1 / std::sqrt((float)width),
               c.deterministic, c.dtype};
    auto fill = [&](std::vector<float> &v, size_t n, float by) {
        v.resize(n);
        for (auto &x : v) {
            x = by * normal();
            if (c.dtype == SPARSE_MLA_BF16)
                x = __bfloat162float(__float2bfloat16(x));
        }
    };
    fill(p.q, (size_t)c.rows * c.heads * width, c.spread);
    fill(p.kv, (size_t)c.keys * width, 1);
    fill(p.dout, (size_t)c.rows * c.heads * c.rank, 1);
    p.selected.assign((size_t)c.rows * c.k, -1);
    for (int r = 0; r < c.rows; r++) {
        const int count = std::min(
            {c.min_count + (int)(uniform() * (c.max_count - c.min_count + 1)), c.k, c.keys});
        int need = count, at = 0;
        for (int key = 0; key < c.keys && need; key++)
            if (uniform() * (c.keys - key) < need) {
                p.selected[(size_t)r * c.k + at++] = key;
                need--;
            }
    }
    return p;
}

static double distance(const std::vector<float> &x, const std::vector<double> &y)
{
    double d = 0, n = 0;

    for (size_t i = 0; i < y.size(); i++) {
        if (std::isinf(y[i])) {
            if (!((double)x[i] == y[i]))
                return NAN;
            continue;
        }
        d += (x[i] - y[i]) * (x[i] - y[i]);
        n += y[i] * y[i];
    }
    return n > 0 ? std::sqrt(d / n) : std::sqrt(d);
}

/* What the contract gives exactly: zeros in out, dq and target where a row has no (such) key. */
static bool padding_exact(const problem &p, const std::vector<float> &out,
                          const std::vector<float> &dq, const std::vector<float> &target)
{
    const sparse_mla &s = p.shape;
    const int64_t wide = (int64_t)s.heads * (s.kv_rank + s.rope),
                  narrow = (int64_t)s.heads * s.kv_rank;

    for (int64_t row = 0; row < s.rows; row++) {
        bool any = false;

        for (int j = 0; j < s.k; j++) {
            any |= p.selected[row * s.k + j] >= 0;
            if (p.selected[row * s.k + j] < 0 && target[row * s.k + j] != 0)
                return false;
        }
        for (int64_t i = 0; !any && i < wide; i++)
            if (dq[row * wide + i] != 0 || (i < narrow && out[row * narrow + i] != 0))
                return false;
    }
    return true;
}

/* bf16: P, dS and the outputs are rounded to 8 bits (2^-9 each, and errors add up in dQ and dKV);
 * fp32: sums of up to a few thousand terms. Padding must be exact. */
static bool run_case(const test_case &c)
{
    const problem p = make(c);
    const sparse_mla &s = p.shape;
    const result want = reference(p);
    const size_t width = c.rank + c.rope, size = c.dtype == SPARSE_MLA_F32 ? 4 : 2;
    const size_t nq = (size_t)c.rows * c.heads * width, no = (size_t)c.rows * c.heads * c.rank;
    buffer q(nq * size), kv(c.keys * width * size), dout(no * size),
        selected(p.selected.size() * 4);
    buffer out(no * size), lse((size_t)c.rows * c.heads * 4), dq(nq * size);
    buffer dkv(c.keys * width * 4), target((size_t)c.rows * c.k * 4);
    buffer wf(sparse_mla_cuda_forward_bytes(&s)), wb(sparse_mla_cuda_backward_bytes(&s));

    upload(q, p.q, c.dtype);
    upload(kv, p.kv, c.dtype);
    upload(dout, p.dout, c.dtype);
    CHECK(cudaMemcpy(selected.data(), p.selected.data(), p.selected.size() * 4,
                     cudaMemcpyHostToDevice));
    CHECK(sparse_mla_cuda_forward(0, &s, q.data(), kv.data(), (int32_t *)selected.data(),
                                  out.data(), (float *)lse.data(), wf.data()));
    CHECK(cudaDeviceSynchronize());
    CHECK(sparse_mla_cuda_backward(0, &s, q.data(), kv.data(), (int32_t *)selected.data(),
                                   out.data(), (float *)lse.data(), dout.data(), dq.data(),
                                   (float *)dkv.data(), (float *)target.data(), wb.data()));
    CHECK(cudaDeviceSynchronize());
    const double e[5] = {distance(download(out, c.dtype), want.out),
                         distance(download(lse, SPARSE_MLA_F32), want.lse),
                         distance(download(dq, c.dtype), want.dq),
                         distance(download(dkv, SPARSE_MLA_F32), want.dkv),
                         distance(download(target, SPARSE_MLA_F32), want.target)};
    bool whole = true;
    bool good = padding_exact(p, download(out, c.dtype), download(dq, c.dtype),
                              download(target, SPARSE_MLA_F32));
    for (buffer *b : {&q, &kv, &dout, &selected, &out, &lse, &dq, &dkv, &target, &wf, &wb})
        whole &= b->guards_whole();
    const bool fp32 = c.dtype == SPARSE_MLA_F32;
    const double limit[5] = {fp32 ? 1e-5 : 5e-3, fp32 ? 1e-5 : 1e-4, fp32 ? 2e-5 : 1.2e-2,
                             fp32 ? 2e-5 : 8e-3, fp32 ? 1e-5 : 1e-3};
    for (int i = 0; i < 5; i++)
        good &= e[i] <= limit[i];
    std::printf("%-4s %-44s out %.1e lse %.1e dq %.1e dkv %.1e target %.1e%s\n",
                good && whole ? "ok" : "FAIL", c.name, e[0], e[1], e[2], e[3], e[4],
                whole ? "" : " GUARD OVERWRITTEN");
    return good && whole;
}

static const int B = SPARSE_MLA_BF16, F = SPARSE_MLA_F32;
static const test_case cases[] = {
    {"64 heads, full tiles", 5, 300, 64, 512, 64, 128, B, 128, 128, 1, false},
    {"64 heads, one tile", 3, 70, 64, 512, 64, 64, B, 64, 64, 1, false},
    {"64 heads, ragged, empty rows", 11, 300, 64, 512, 64, 257, B, 0, 257, 1, false},
    {"64 heads, one key each", 7, 5, 64, 512, 64, 1, B, 1, 1, 1, false},
    {"64 heads, all padding", 4, 9, 64, 512, 64, 70, B, 0, 0, 1, false},
    {"64 heads, sharp softmax", 9, 500, 64, 512, 64, 333, B, 200, 333, 12, false},
    {"17 heads, more rows than blocks", 401, 150, 17, 512, 64, 131, B, 0, 131, 1, false},
    {"64 heads, more rows than blocks", 291, 400, 64, 512, 64, 200, B, 3, 200, 2, false},
    {"1 head, k beyond the keys", 150, 100, 1, 512, 64, 190, B, 0, 100, 1, false},
    {"64 heads, ragged, deterministic", 291, 300, 64, 512, 64, 257, B, 0, 257, 1, true},
    {"64 heads, sharp, deterministic", 67, 500, 64, 512, 64, 333, B, 200, 333, 12, true},
    {"9 heads, sharp, deterministic", 37, 500, 9, 512, 64, 333, B, 1, 333, 12, true},
    {"generic fp32, ragged", 37, 61, 3, 20, 6, 23, F, 0, 23, 1, false},
    {"generic fp32, more keys than a slab", 3, 2500, 5, 33, 7, 2100, F, 1500, 2100, 1, true},
    {"generic fp32, the model's width", 9, 90, 10, 512, 64, 70, F, 0, 70, 1, false},
    {"generic bf16, ragged", 37, 61, 3, 20, 6, 23, B, 0, 23, 1, true},
    {"generic bf16, 70 heads", 6, 80, 70, 512, 64, 50, B, 0, 50, 1, false},
};

#include "sparse_mla_bench.h"

int main(int argc, char **argv)
{
    bool good = true;

    setvbuf(stdout, nullptr, _IOLBF, 0);
    if (argc > 1 && !std::strcmp(argv[1], "--bench"))
        return bench(argc > 2 ? argv[2] : "fbd", argc > 3 ? std::atoi(argv[3]) : 0);
    for (const test_case &c : cases)
        good &= run_case(c);
    std::printf("%s\n", good ? "all good" : "FAILED");
    return !good;
}
