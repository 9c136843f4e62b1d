/* Parity and speed of the CUDA grouped GEMM. Without arguments: every case against plain double
 * loops on the CPU, with poisoned outputs, guard bytes and NaN wherever nothing may be read from.
 * --bench: time, TFLOP/s and share of the dense bf16 GEMM rate (grouped_gemm_bench.h). */
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
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "../../cuda/grouped_gemm/grouped_gemm.h"

#define CHECK(x)                                                                                   \
    do {                                                                                           \
        cudaError_t e_ = (x);                                                                      \
        if (e_ != cudaSuccess) {                                                                   \
            std::printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #x, cudaGetErrorString(e_));        \
            std::exit(1);                                                                          \
        }                                                                                          \
    } while (0)

static uint64_t seed = 88172645463325252ull;
static uint32_t random_bits()
{
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return (uint32_t)(seed >> 32);
}
static double uniform()
{
    return random_bits() / 4294967296.0;
}
static float normal()
{
    return (float)(std::sqrt(-2 * std::log(uniform() + 1e-12)) *
                   std::cos(6.283185307179586 * uniform()));
}

/* ---- arrays: the values on the host, a guarded copy on the device ------------------------------
 */

static const size_t GUARD = 256;

struct array {
    int type;
    std::vector<float> value; /* as rounded to the type */
    uint8_t *all = nullptr;

    array(int type, size_t n, bool random) : type(type), value(n, NAN)
    {
        for (float &v : value)
            if (random)
                v = type == GROUPED_GEMM_BF16 ? __bfloat162float(__float2bfloat16(normal()))
                                              : normal();
        CHECK(cudaMalloc(&all, bytes() + 2 * GUARD));
    }
    ~array() { cudaFree(all); }
    array(const array &) = delete;

    size_t bytes() const { return value.size() * (type == GROUPED_GEMM_BF16 ? 2 : 4); }
    void *device() { return all + GUARD; }
    void poison(size_t from, size_t to) { std::fill(&value[0] + from, &value[0] + to, NAN); }

    void upload()
    {
        std::vector<uint8_t> image(bytes() + 2 * GUARD, 0xab);
        for (size_t i = 0; i < value.size(); i++) {
            const __nv_bfloat16 h = __float2bfloat16(value[i]);
            if (type == GROUPED_GEMM_BF16)
                std::memcpy(&image[GUARD + i * 2], &h, 2);
            else
                std::memcpy(&image[GUARD + i * 4], &value[i], 4);
        }
        CHECK(cudaMemcpy(all, image.data(), image.size(), cudaMemcpyHostToDevice));
    }
    std::vector<uint8_t> download()
    {
        std::vector<uint8_t> image(bytes() + 2 * GUARD);
        CHECK(cudaMemcpy(image.data(), all, image.size(), cudaMemcpyDeviceToHost));
        return image;
    }
    float at(const std::vector<uint8_t> &image, size_t i) const
    {
        float f;
        __nv_bfloat16 h;
        if (type != GROUPED_GEMM_BF16) {
            std::memcpy(&f, &image[GUARD + i * 4], 4);
            return f;
        }
        std::memcpy(&h, &image[GUARD + i * 2], 2);
        return __bfloat162float(h);
    }
};

/* ---- one case -----------------------------------------------------------------------------------
 */

enum operation { FORWARD, BACKWARD_ROWS, BACKWARD_WEIGHT };
static const char *const NAMES[] = {"forward", "backward_rows", "backward_weight"};

static cudaError_t call(operation op, const grouped_gemm_shape &g, const int32_t *offsets,
                        const void *a, const void *b, void *c, void *workspace)
{
    auto f = op == FORWARD         ? grouped_gemm_cuda_forward
             : op == BACKWARD_ROWS ? grouped_gemm_cuda_backward_rows
                                   : grouped_gemm_cuda_backward_weight;
    return f(0, &g, offsets, a, b, c, workspace);
}

struct sum {
    double value = 0, size = 0; /* of the products, and of their absolute values */

    void add(double a, double b)
    {
        value += a * b;
        size += std::fabs(a * b);
    }
};

struct one_case {
    operation op;
    grouped_gemm_shape g;
    std::vector<int32_t> offsets;
    array a, b, c;
    int wrong = 0;
    double worst = 0;

    one_case(operation op, const grouped_gemm_shape &g, const std::vector<int32_t> &offsets)
        : op(op), g(g), offsets(offsets), a(g.type, g.rows * (op == FORWARD ? g.k : g.n), true),
          b(g.type, op == BACKWARD_WEIGHT ? g.rows * g.k : g.groups * g.stride, true),
          c(op == BACKWARD_WEIGHT ? g.weight_type : g.type,
            op == BACKWARD_WEIGHT ? g.groups * g.stride : g.rows * (op == FORWARD ? g.n : g.k),
            g.add != 0)
    {
        const size_t used = offsets.back();
        a.poison(used * (op == FORWARD ? g.k : g.n), a.value.size());
        if (op == BACKWARD_WEIGHT)
            b.poison(used * g.k, b.value.size());
        else
            for (int e = 0; e < g.groups; e++)
                b.poison(e * g.stride + g.n * g.k, (e + 1) * g.stride);
        a.upload();
        b.upload();
        c.upload();
    }

    /* What must not change is compared bit by bit; the rest with a tolerance: half a unit of the
     * output's last place, and fp32 sums (the tensor cores' truncate: 2^-22 of the terms' size). */
    void compare(const std::vector<uint8_t> &image, size_t i, const sum &s)
    {
        const double want = s.value + (g.add ? c.value[i] : 0);
        const double unit = std::ldexp(1.0, c.type == GROUPED_GEMM_BF16 ? -7 : -23);
        const double limit = std::fabs(want) * unit * 0.51 + s.size * std::ldexp(1.0, -20) + 1e-30;
        const double error = std::fabs(c.at(image, i) - want) / limit;
        worst = std::max(worst, error);
        if (!(error <= 1) && wrong++ < 4)
            std::printf("  element %zu: %.9g, expected %.9g\n", i, c.at(image, i), want);
    }
    void unchanged(const std::vector<uint8_t> &image, size_t i)
    {
        const float is = c.at(image, i), was = c.value[i];
        if (std::memcmp(&is, &was, 4) && !(std::isnan(is) && std::isnan(was)) && wrong++ < 4)
            std::printf("  element %zu: %.9g, was %.9g and should have stayed\n", i, is, was);
    }

    void check_rows(const std::vector<uint8_t> &image)
    {
        const int64_t width = op == FORWARD ? g.n : g.k, depth = op == FORWARD ? g.k : g.n;
        const int64_t across = op == FORWARD ? g.k : 1, along = op == FORWARD ? 1 : g.k;
        for (int e = 0; e < g.groups; e++)
            for (int64_t i = offsets[e]; i < offsets[e + 1]; i++)
                for (int64_t j = 0; j < width; j++) {
                    const float *row = &a.value[i * depth],
                                *w = &b.value[e * g.stride + j * across];
                    sum s;
                    for (int64_t d = 0; d < depth; d++)
                        s.add(row[d], w[d * along]);
                    compare(image, i * width + j, s);
                }
        for (size_t i = offsets.back() * width; i < c.value.size(); i++)
            unchanged(image, i);
    }
    void check_weight(const std::vector<uint8_t> &image)
    {
        for (int e = 0; e < g.groups; e++) {
            for (int64_t i = 0; i < g.n * g.k; i++) {
                sum s;
                for (int64_t r = offsets[e]; r < offsets[e + 1]; r++)
                    s.add(a.value[r * g.n + i / g.k], b.value[r * g.k + i % g.k]);
                compare(image, e * g.stride + i, s);
            }
            for (int64_t i = g.n * g.k; i < g.stride; i++)
                unchanged(image, e * g.stride + i);
        }
    }

    int run()
    {
        int32_t *device_offsets;
        uint8_t *workspace;
        const size_t bytes = grouped_gemm_cuda_bytes(&g);
        std::vector<uint8_t> first, ws(bytes + GUARD, 0xcd);

        CHECK(cudaMalloc(&device_offsets, offsets.size() * 4));
        CHECK(
            cudaMemcpy(device_offsets, offsets.data(), offsets.size() * 4, cudaMemcpyHostToDevice));
        CHECK(cudaMalloc(&workspace, bytes + GUARD));
        CHECK(cudaMemcpy(workspace, ws.data(), ws.size(), cudaMemcpyHostToDevice));
        for (int again = 0; again < 2; again++) {
            c.upload();
            CHECK(call(op, g, device_offsets, a.device(), b.device(), c.device(), workspace));
            CHECK(cudaDeviceSynchronize());
            if (again && first != c.download()) {
                std::printf("  the second call gave other bits\n");
                wrong++;
            }
            first = c.download();
        }
        CHECK(cudaMemcpy(ws.data(), workspace, ws.size(), cudaMemcpyDeviceToHost));
        for (size_t i = 0; i < GUARD; i++)
            if (first[i] != 0xab || first[GUARD + c.bytes() + i] != 0xab || ws[bytes + i] != 0xcd) {
                std::printf("  guard byte %zu is gone\n", i);
                wrong++;
                break;
            }
        op == BACKWARD_WEIGHT ? check_weight(first) : check_rows(first);
        std::printf(
            "%-6s %-15s %s add %d %-8s n %4d k %4d groups %3d rows %5d: %.2f of the limit\n",
            wrong ? "FAILED" : "ok", NAMES[op], g.type == GROUPED_GEMM_BF16 ? "bf16" : "fp32",
            g.add,
            op != BACKWARD_WEIGHT ? ""
            : c.type              ? "dw fp32"
                                  : "dw bf16",
            (int)g.n, (int)g.k, g.groups, (int)offsets.back(), worst);
        cudaFree(device_offsets);
        cudaFree(workspace);
        return wrong > 0;
    }
};

static int all_of(int64_t n, int64_t k, int gap, int spare, const std::vector<int> &counts)
{
    std::vector<int32_t> offsets(1, 0);
    int failed = 0;

    for (int c : counts)
        offsets.push_back(offsets.back() + c);
    for (int op = FORWARD; op <= BACKWARD_WEIGHT; op++)
        for (int add = 0; add < 2; add++)
            for (int weight_type = 0; weight_type < (op == BACKWARD_WEIGHT ? 2 : 1);
                 weight_type++) {
                const grouped_gemm_shape g = {offsets.back() + spare, n,   k, n * k + gap,
                                              (int32_t)counts.size(), add, GROUPED_GEMM_BF16,
                                              weight_type};
                failed += one_case((operation)op, g, offsets).run();
            }
    return failed;
}

static int test()
{
    const std::vector<int> ragged = {0, 1, 63, 64, 65, 127, 128, 129, 0, 300, 257, 16, 511, 0};
    std::vector<int> many(70), all_sizes;
    int failed = 0;

    for (int &c : many)
        c = (int)(random_bits() % 40) * (random_bits() % 4 > 0);
    for (int c = 8; c < 272; c += 16)
        all_sizes.push_back(c);
    failed += all_of(200, 328, 8, 37, ragged);
    failed += all_of(512, 256, 0, 0, {0, 1000, 0});
    failed += all_of(264, 72, 16, 1, many);
    failed += all_of(136, 200, 0, 300, all_sizes);
    failed += all_of(1032, 1544, 0, 5, {70, 3, 0, 20});
    failed += all_of(64, 64, 0, 50, {0, 0, 0, 0, 0});
    failed += all_of(8, 8, 0, 0, {5});
    std::printf(failed ? "%d cases FAILED\n" : "all cases passed\n", failed);
    return failed > 0;
}

#include "grouped_gemm_bench.h"

int main(int argc, char **argv)
{
    if (argc > 1 && !strcmp(argv[1], "--bench"))
        return bench(argc > 2 ? argv[2] : "fbw");
    return test();
}
